"""Delivers what is due in one partition of a schedule, on the host that leads it.

A thread runs two consumers (one reads the partition, the other looks up records that are due) and a
transactional producer, all through shared memory. Each partition has its own transactional id: once
this timer's producer has initialized it, no timer of another host and no earlier timer of this host
can commit any more. After any error the timer closes everything and restarts from the committed
progress, which shows whether the last transaction was committed.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mqd.base import logging
from mqd.base.schedule_files import LATE_BOUNDS_S, PartitionStatus, ScheduleTopic
from mqd.client.consumer import Consumer
from mqd.client.messages import KafkaException, TopicPartition
from mqd.client.producer import Producer
from mqd.log import schedule_headers
from mqd.protocol.messages import DeleteRecordsRequest
from mqd.protocol.records import read_headers
from mqd.timer.core import Progress, Schedule, ScheduleRecord, Tick, take_over
from mqd.timer.index import Entry
from mqd.timer.progress import Delays, parse_progress, progress_text
from mqd.timer.storage import Directory

READ_COUNT_MAX = 8192
TICK_COUNT_MAX = 8192
LOOK_UP_COUNT_MAX = 512  # records of one lookup: they are in memory until they are produced
KEPT_MS = 60_000  # records that are due within this time are kept in memory if there is room
KEPT_OVERHEAD_BYTES = 300
NEAR_COUNT = 64  # a gap of fewer records between two wanted records is read; a larger gap is skipped by a seek
# the longest wait between two checks: PENDING_S while records are pending, because they become due
# sooner if the clock is set forward; otherwise IDLE_S
PENDING_S, IDLE_S = 5.0, 60.0
COMMIT_S, SAVE_S, TRIM_S = 1.0, 10.0, 30.0
RETRY_S_MIN, RETRY_S_MAX = 0.2, 10.0
TIMEOUT_S = 30.0
_DELETE_RECORDS = 21

log = logging.get("timer")


# key, value, section of headers as in the log
Record = tuple[bytes | None, bytes | None, bytes | None]


class Deferred(Exception):
    """Nothing can be delivered now; the text says why, and what to do."""


class PartitionTimer:
    """Other threads read `status`. To end the timer, call stop(), then join()."""

    def __init__(
        self,
        schedule: ScheduleTopic,
        partition: int,
        socket_path: Path,
        data_dir: Path,
        kept_bytes_max: int,
        on_status: Callable[[], None] = lambda: None,
    ) -> None:
        """`kept_bytes_max`: memory for records that are due soon. `on_status`: called when `status`
        may have changed.
        """
        self.topic = schedule
        self.partition_index = partition
        self.status = PartitionStatus(schedule.topic, partition)
        self._socket_path = socket_path
        self._name = f"{schedule_headers.GROUP_PREFIX}{schedule.topic}"
        self._directory = data_dir / "timer" / f"{schedule.topic_id.hex()}-{partition}"
        self._stopping = threading.Event()
        self._on_status = on_status
        self._reader: Any = None
        self._clients: list[Any] = []
        self._committed_tick_count = 0
        self._delays = Delays([])
        self._kept: dict[int, Record] = {}
        self._kept_bytes, self._kept_bytes_max = 0, kept_bytes_max
        self._thread = threading.Thread(target=self._run, name=f"timer-{schedule.topic}-{partition}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        reader = self._reader
        if reader is not None:
            reader._implementation.interrupt()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = RETRY_S_MIN
        while not self._stopping.is_set():
            count_before = self._committed_tick_count
            try:
                self._serve()
            except Exception as error:  # bugs too: the other partitions must continue
                expected = isinstance(error, (KafkaException, OSError, Deferred))
                write_log = log.warning if expected else log.exception
                write_log(
                    "schedule restarts from its committed progress",
                    topic=self.topic.topic,
                    partition=self.partition_index,
                    reason=str(error),
                )
            finally:
                self._close()
            wait_s = RETRY_S_MIN if self._committed_tick_count > count_before else min(2 * wait_s, RETRY_S_MAX)
            self._stopping.wait(wait_s)

    def _close(self) -> None:
        for client in self._clients:
            try:
                client.close()
            except (KafkaException, OSError, RuntimeError):
                pass  # the broker has ended
        self._clients = []

    # -- from the start of the clients to the next error -------------------------------------------

    def _open_consumer(self, isolation_level: str) -> Consumer:
        consumer = Consumer(
            {
                **self._connection_config(),
                "group.id": self._name,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": isolation_level,
            }
        )
        self._clients.append(consumer)
        return consumer

    def _connection_config(self) -> dict[str, Any]:
        return {"transport": "shm", "mqd.socket.path": str(self._socket_path), "client.id": "mqd-timer"}

    def _serve(self) -> None:
        partition_id = f"{self.topic.topic_id.hex()}-{self.partition_index}"
        self._producer = Producer(
            {
                **self._connection_config(),
                "transactional.id": f"{schedule_headers.GROUP_PREFIX}{partition_id}",
                "partitioner": "murmur2_random",
                "allow.auto.create.topics": False,
                "message.max.bytes": 1_000_000_000,
                "linger.ms": 1,
                "mqd.buffer.bytes": 4 << 20,
            }
        )
        self._clients.append(self._producer)
        self._reader = self._open_consumer("read_committed")
        self._lookup_consumer = self._open_consumer("read_uncommitted")
        self._lookup_position = -1
        self._kept, self._kept_bytes = {}, 0
        self._producer.init_transactions(TIMEOUT_S)  # no other timer can commit any more
        self._group = self._reader.consumer_group_metadata()
        partition = TopicPartition(self.topic.topic, self.partition_index)
        committed = self._reader.committed([partition], TIMEOUT_S)[0]
        if committed.error is not None:
            raise KafkaException(committed.error)
        log_start = self._log_start()
        progress, delays = parse_progress(committed.offset, committed.metadata, self.topic.topic_id)
        self._delays = delays.with_delay(self.topic.delay_ms, progress.end_offset, log_start)
        if self._delays.of(progress.end_offset) != self.topic.delay_ms:
            log.warning(
                "schedule.delay.ms was changed too often while a record was pending; an earlier value stays in use",
                topic=self.topic.topic,
                partition=self.partition_index,
                delay_ms=self._delays.of(progress.end_offset),
            )
        schedule = take_over(Directory(self._directory), log_start, progress)
        self._reader.assign([TopicPartition(self.topic.topic, self.partition_index, schedule.end_offset)])
        self._lookup_consumer.assign([TopicPartition(self.topic.topic, self.partition_index, log_start)])
        log.info(
            "delivery of a schedule starts",
            topic=self.topic.topic,
            partition=self.partition_index,
            target=self.topic.target,
            read_from=schedule.end_offset,
            committed=progress.end_offset,
            pending=schedule.pending_count,
        )
        self._run_schedule(schedule, log_start)

    def _log_start(self) -> int:
        offsets = self._reader.get_watermark_offsets(TopicPartition(self.topic.topic, self.partition_index), TIMEOUT_S)
        if offsets is None:
            raise Deferred("the partition's offsets are not known; retrying")
        return int(offsets[0])

    def _run_schedule(self, schedule: Schedule, log_start: int) -> None:
        committed_at = saved_at = trimmed_at = time.monotonic()
        saved_offset = -1
        wait_s = 0.0
        while not self._stopping.is_set():
            took_all = self._read(schedule, wait_s)
            now_ms = _now_ms()
            tick = schedule.tick(now_ms, TICK_COUNT_MAX)
            now = time.monotonic()
            if tick is not None and (tick.entries or now - committed_at >= COMMIT_S):
                self._deliver(tick)
                schedule.on_committed(tick)
                committed_at = now
            if now - saved_at >= SAVE_S and schedule.can_save and saved_offset != schedule.end_offset:
                schedule.save()
                saved_at, saved_offset = now, schedule.end_offset
            if now - trimmed_at >= TRIM_S:
                trimmed_at = now
                if schedule.first_needed_offset() > log_start:
                    log_start = schedule.first_needed_offset()
                    self._trim(log_start)
            self.status.pending = schedule.pending_count
            next_ms = schedule.index.next_due_ms()
            self.status.behind_s = 0.0 if next_ms is None else max(0.0, (_now_ms() - next_ms) / 1000)
            self._on_status()
            if tick is not None and tick.entries or schedule.end_offset < schedule.progress.end_offset:
                wait_s = 0.0
            else:
                wait_s = IDLE_S if next_ms is None else min(PENDING_S, max(0.001, (next_ms - _now_ms()) / 1000))
                # when the next commit, save and trim are due
                deadlines = [
                    committed_at + COMMIT_S if tick is not None and tick.progress != schedule.progress else math.inf,
                    saved_at + SAVE_S if schedule.can_save and saved_offset != schedule.end_offset else math.inf,
                    trimmed_at + TRIM_S if schedule.first_needed_offset() > log_start else math.inf,
                ]
                wait_s = min(wait_s, max(0.0, min(deadlines) - now))
            if not took_all:
                self._stopping.wait(0.01)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, schedule: Schedule, wait_s: float) -> bool:
        """Reads a batch into the schedule. Returns False if the schedule cannot take all of it yet."""
        batch = self._reader.consume_batch(READ_COUNT_MAX, wait_s)
        if batch is None:
            return True
        records = list(self._schedule_records(batch))
        self._keep(records, batch, schedule.progress)
        by_offset = {record.offset: record for record in records}

        def due_of(offset: int) -> int | None:
            self._take_kept(offset)
            record = by_offset.get(offset)
            if record is None:
                record = next(iter(self._look_up([offset], self._schedule_records)), None)
            return record.due_ms if record is not None and record.due_ms >= 0 else None

        if schedule.read(records, _now_ms(), due_of):
            return True
        self._reader.seek(TopicPartition(self.topic.topic, self.partition_index, schedule.end_offset))
        return False

    def _keep(self, schedule_records: list[ScheduleRecord], batch: Any, progress: Progress) -> None:
        if self._kept_bytes >= self._kept_bytes_max:
            return
        soon_ms = _now_ms() + KEPT_MS
        for scheduled, (offset, record) in zip(schedule_records, _offsets_and_records(batch), strict=True):
            # after a takeover without an index, delivered records are read again
            if not 0 <= scheduled.due_ms < soon_ms or progress.is_settled(Entry(scheduled.due_ms, offset)):
                continue
            if self._kept_bytes < self._kept_bytes_max and offset not in self._kept:
                self._kept[offset] = record
                self._kept_bytes += _size_bytes(record)

    def _take_kept(self, offset: int) -> Record | None:
        record = self._kept.pop(offset, None)
        if record is not None:
            self._kept_bytes -= _size_bytes(record)
        return record

    def _schedule_records(self, batch: Any) -> Iterator[ScheduleRecord]:
        """Yields a ScheduleRecord for each record of the batch. A record with invalid
        schedule headers was written before the topic became a schedule (the broker refuses later
        ones): it is treated as a record without headers.
        """
        sections = batch.header_sections
        offsets, timestamps = batch.offsets.tolist(), batch.timestamps.tolist()
        headers = [None] * len(offsets) if sections is None else sections.to_list()
        for offset, timestamp, section in zip(offsets, timestamps, headers, strict=True):
            delay_ms = self._delays.of(offset)
            try:
                plan = schedule_headers.plan_delivery(section, timestamp, delay_ms)
            except schedule_headers.InvalidScheduleHeader:
                self.status.unreadable += 1
                plan = schedule_headers.plan_delivery(None, timestamp, delay_ms)
            yield ScheduleRecord(offset, plan.due_ms, plan.cancelled_offset)

    def _look_up(self, offsets: list[int], extract: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Yields what `extract` returns for the records at these ascending offsets. Deleted records
        are left out.
        """
        start = 0
        while start < len(offsets):
            first = offsets[start]
            if not self._lookup_position <= first < self._lookup_position + NEAR_COUNT:
                self._lookup_consumer.seek(TopicPartition(self.topic.topic, self.partition_index, first))
                self._lookup_position = first
            end = start + 1
            end_max = min(len(offsets), start + LOOK_UP_COUNT_MAX)
            while end < end_max and offsets[end] - offsets[end - 1] <= NEAR_COUNT:
                end += 1
            batch = self._lookup_consumer.consume_batch(offsets[end - 1] - self._lookup_position + 1, TIMEOUT_S)
            if batch is None:
                self._lookup_position = -1
                raise Deferred(f"the record at offset {first} cannot be read; retrying")
            self._lookup_position = batch.next_offset
            next_start = bisect_left(offsets, batch.next_offset, start)
            yield from extract(_select(batch, offsets[start:next_start]))
            start = next_start

    # -- delivering --------------------------------------------------------------------------------

    def _deliver(self, tick: Tick) -> None:
        producer, target = self._producer, self.topic.target
        producer.begin_transaction()
        sent_count = 0
        for record in self._read_in_order(tick.entries):
            key, value, section = record
            headers = _without_schedule_headers(section) if section else []
            while True:
                try:
                    producer.produce(target, value, key, headers=headers or None)
                    break
                except BufferError:
                    if self._stopping.is_set():
                        raise Deferred(f"the timer was stopped while {target} accepted no records") from None
                    producer.poll(0.1)
            sent_count += 1
        position = TopicPartition(
            self.topic.topic,
            self.partition_index,
            tick.progress.end_offset,
            progress_text(self.topic.topic_id, tick.progress.last, self._delays),
        )
        producer.send_offsets_to_transaction([position], self._group, TIMEOUT_S)
        producer.commit_transaction(TIMEOUT_S)
        self._committed_tick_count += 1
        status = self.status
        status.delivered += sent_count
        status.gone += len(tick.entries) - sent_count
        now_ms = _now_ms()
        for entry in tick.entries:
            late_s = max(0.0, (now_ms - entry.due_ms) / 1000)
            status.late_buckets[bisect_left(LATE_BOUNDS_S, late_s)] += 1
            status.late_total_s += late_s

    def _read_in_order(self, entries: list[Entry]) -> Iterator[Record]:
        """Yields the records of `entries`, in that order; deleted records are left out. Records
        that are not kept in memory are looked up by offset, LOOK_UP_COUNT_MAX at a time.
        """
        for begin in range(0, len(entries), LOOK_UP_COUNT_MAX):
            chunk = entries[begin : begin + LOOK_UP_COUNT_MAX]
            records = {}
            for _, offset in chunk:
                record = self._take_kept(offset)
                if record is not None:
                    records[offset] = record
            if len(records) < len(chunk):
                missing = sorted(entry.offset for entry in chunk if entry.offset not in records)
                records.update(self._look_up(missing, _offsets_and_records))
            for entry in chunk:
                if entry.offset in records:
                    yield records[entry.offset]

    def _trim(self, offset: int) -> None:
        """Deletes the records below `offset`. None of them is pending (T4)."""
        request = DeleteRecordsRequest(
            topics=[
                DeleteRecordsRequest.Topic(
                    name=self.topic.topic,
                    partitions=[DeleteRecordsRequest.Partition(partition_index=self.partition_index, offset=offset)],
                )
            ],
            timeout_ms=int(TIMEOUT_S * 1000),
        )
        response = self._producer.broker_request(_DELETE_RECORDS, request, TIMEOUT_S)
        error = response.topics[0].partitions[0].error_code
        if error:
            log.warning(
                "delivered records cannot be deleted",
                topic=self.topic.topic,
                partition=self.partition_index,
                error=error,
            )


def _size_bytes(record: Record) -> int:
    return sum(len(part) for part in record if part) + KEPT_OVERHEAD_BYTES


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _select(batch: Any, wanted: list[int]) -> Any:
    """Returns the wanted records of a batch: a slice of the batch if they are adjacent."""
    offsets = batch.offsets
    if not wanted:
        return batch[0:0]
    first, last = int(offsets.searchsorted(wanted[0])), int(offsets.searchsorted(wanted[-1], "right"))
    if last - first == len(wanted):
        return batch[first:last]
    return _PickedRecords(batch, [int(offsets.searchsorted(one)) for one in wanted], wanted)


class _PickedRecords:
    """Selected records of a batch. Has the part of a batch's interface that _schedule_records() and
    _offsets_and_records() use.
    """

    def __init__(self, batch: Any, indices: list[int], wanted: list[int]) -> None:
        present = [
            index
            for index, offset in zip(indices, wanted, strict=True)
            if index < len(batch) and int(batch.offsets[index]) == offset
        ]
        self.offsets, self.timestamps = batch.offsets[present], batch.timestamps[present]
        self.keys = _ListWithToList([batch.keys[index] for index in present])
        self.values = _ListWithToList([batch.values[index] for index in present])
        sections = batch.header_sections
        self.header_sections = None if sections is None else _ListWithToList([sections[index] for index in present])


class _ListWithToList(list[Any]):
    def to_list(self) -> list[Any]:
        return self


def _without_schedule_headers(section: bytes) -> list[tuple[str, bytes | None]]:
    """Returns the headers without the schedule headers, because the target may be a schedule too."""
    headers, _ = read_headers(section, 0, len(section), "replace")
    return [(name, value) for name, value in headers if name not in schedule_headers.HEADERS]


def _offsets_and_records(batch: Any) -> Iterator[tuple[int, Record]]:
    """Yields (offset, record) for each record of the batch."""
    offsets, sections = batch.offsets.tolist(), batch.header_sections
    headers = [None] * len(offsets) if sections is None else sections.to_list()
    for offset, key, value, section in zip(offsets, batch.keys.to_list(), batch.values.to_list(), headers, strict=True):
        yield offset, (key, value, section)
