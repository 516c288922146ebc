"""Searches a topic's records with a filter, from a starting point, and reports the progress. A
search ends at the offsets where the partitions ended when it began; a live search continues until
it is stopped, for at most LIVE_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from mqd.cli.broker_lookup import EARLIEST, LATEST, Cluster
from mqd.cli.common import CliError, Settings
from mqd.cli.librdkafka import base_config, unreachable
from mqd.console.filters import Filter

NEWEST_READ_MAX = 10_000  # limit on the records read to find the newest ones, over all partitions
COUNT_MAX = 500
LIVE_S = 900.0  # how long a live search may run
SILENT_S = 15.0  # a search fails after this time without a message
STEP_S = 0.3  # interval between steps while nothing is found
BATCH_MESSAGES = 500


class Query(msgspec.Struct, frozen=True):
    """`start`: newest | beginning | offset | time | live. `at`: the offset, or the time in ms."""

    topic: str
    start: str = "newest"
    at: int = 0
    partition: int | None = None
    count: int = 50
    filter: Filter = Filter()

    @property
    def is_newest(self) -> bool:
        return self.start == "newest"


class Step(msgspec.Struct):
    """The records found since the previous step, and the progress: `scanned` of the `total` offsets
    to search. `whole`: how many offsets the chosen partitions have in total. `ended`: why the
    search has ended (count | time | end | stopped), or "" if it has not.
    """

    records: list[Any]
    scanned: int
    total: int
    whole: int
    matches: int
    bytes: int
    ended: str = ""


def _offset_ranges(settings: Settings, query: Query) -> tuple[dict[int, tuple[int, int]], int]:
    """Returns (partition -> first offset and end offset of the search, how many offsets these
    partitions have in total). Raises CliError.
    """
    with Cluster(settings.bootstrap) as cluster:
        indexes = cluster.topics([query.topic]).get(query.topic)
        if indexes is None:
            raise CliError(f"there is no topic {query.topic}, or you may not see it; see the list of topics")
        if query.partition is not None and query.partition not in indexes:
            raise CliError(f"topic {query.topic} has no partition {query.partition}; it has 0 to {len(indexes) - 1}")
        chosen = [(query.topic, index) for index in indexes if query.partition in (None, index)]
        firsts, ends = cluster.offsets(chosen, EARLIEST), cluster.offsets(chosen, LATEST)
        offsets_at_time = cluster.offsets(chosen, query.at) if query.start == "time" else {}
    served = [partition for partition in chosen if partition in firsts and partition in ends]
    if not served:
        raise CliError(f"no partition of {query.topic} is served at the moment; the cluster's page shows why")
    newest_count = max(1, NEWEST_READ_MAX // len(served))  # of each partition
    if query.filter.is_empty:
        newest_count = min(query.count, newest_count)
    ranges = {}
    for partition in served:
        first, end = firsts[partition], ends[partition]
        offset_at_time = offsets_at_time.get(partition, -1)
        start = {
            "newest": end - newest_count,
            "beginning": first,
            "offset": query.at,
            "time": offset_at_time if offset_at_time >= 0 else end,
            "live": end,
        }[query.start]
        ranges[partition[1]] = (min(end, max(first, start)), end)
    return ranges, sum(ends[partition] - firsts[partition] for partition in served)


def _consumer(settings: Settings) -> Consumer:
    return Consumer(
        base_config(settings.bootstrap)
        | {
            "group.id": "mqd-console",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": 8192,  # limits the memory that each search occupies
        }
    )


def search(
    settings: Settings, query: Query, stop: Event, convert: Callable[[Any], Any], is_sorted: bool
) -> Iterator[Step]:
    """Yields a step at intervals, even while nothing is found. `convert` turns each found message, which
    can be large, into the item that a step contains for it. If `is_sorted`, a search for the newest records returns
    the newest of all partitions, sorted by time, in its last step; `convert` must then return
    Records. Otherwise records are yielded as they are found. Raises CliError, KafkaException.
    """
    sorts_at_end = query.is_newest and is_sorted
    ends_by_count = query.start not in ("newest", "live")
    ranges, offset_count = _offset_ranges(settings, query)
    is_live = query.start == "live"
    positions = {index: start for index, (start, _) in ranges.items()}
    open_partitions = {index for index, (start, end) in ranges.items() if is_live or start < end}
    total = sum(end - start for start, end in ranges.values())
    step = Step([], 0, total, offset_count, 0, 0)
    began = last_step = last_received = time.monotonic()
    consumer = _consumer(settings)

    def finish(index: int) -> None:
        open_partitions.discard(index)
        consumer.pause([TopicPartition(query.topic, index)])

    try:
        consumer.assign([TopicPartition(query.topic, index, positions[index]) for index in sorted(open_partitions)])
        while open_partitions and not stop.is_set():
            for message in consumer.consume(BATCH_MESSAGES, timeout=STEP_S):
                index, offset, error = message.partition() or 0, message.offset() or 0, message.error()
                if index in open_partitions:
                    last_received = time.monotonic()
                if error is not None:
                    _raise_unless_transient(error)
                    if error.code() == KafkaError._PARTITION_EOF and not is_live:
                        positions[index] = ranges[index][1]
                        finish(index)
                    continue
                if index not in open_partitions or (ends_by_count and step.matches >= query.count):
                    continue
                positions[index] = offset + 1
                step.bytes += len(message.value() or b"") + len(message.key() or b"")
                if not is_live and offset >= ranges[index][1]:
                    finish(index)
                    continue
                if query.filter.matches(message):
                    step.matches += 1
                    step.records.append(convert(message))
                    if sorts_at_end and len(step.records) > 2 * query.count:
                        step.records = _newest(step.records, query.count)
                if not is_live and positions[index] >= ranges[index][1]:
                    finish(index)
            now = time.monotonic()
            if ends_by_count and step.matches >= query.count:
                step.ended = "count"
                break
            if is_live and now - began > LIVE_S:
                step.ended = "time"
                break
            if not is_live and now - last_received > SILENT_S:
                raise unreachable(settings.bootstrap, f"no record for {SILENT_S:.0f} s")
            if now - last_step >= STEP_S or (step.records and not sorts_at_end):
                last_step = now
                _update_scanned(step, positions, ranges, is_live)
                yield msgspec.structs.replace(step, records=[] if sorts_at_end else step.records)
                step.records = step.records if sorts_at_end else []
        _update_scanned(step, positions, ranges, is_live)
        step.ended = step.ended or ("stopped" if open_partitions else "end")
        if sorts_at_end:
            step.records = _newest(step.records, query.count)
        yield step
    finally:
        consumer.close()


def _newest(records: list[Any], count: int) -> list[Any]:
    return sorted(records, key=lambda record: (record.timestamp_ms, record.offset), reverse=True)[:count]


def _update_scanned(step: Step, positions: dict[int, int], ranges: dict[int, tuple[int, int]], is_live: bool) -> None:
    if is_live:
        step.scanned = sum(positions[index] - start for index, (start, _) in ranges.items())
    else:
        step.scanned = sum(min(end, positions[index]) - start for index, (start, end) in ranges.items())


def _raise_unless_transient(error: KafkaError) -> None:
    transient = (KafkaError._PARTITION_EOF, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
    if error.code() not in transient and not error.retriable():
        raise KafkaException(error)


def read_record(settings: Settings, topic: str, partition: int, offset: int) -> Any:
    """Returns the record, or None if there is none at this offset: it was deleted or compacted away, or
    the offset is that of a transaction marker. Raises CliError, KafkaException.
    """
    ranges, _ = _offset_ranges(settings, Query(topic, "beginning", partition=partition))
    first, end = ranges[partition]
    if not first <= offset < end:
        return None
    consumer = _consumer(settings)
    deadline = time.monotonic() + SILENT_S
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        while time.monotonic() < deadline:
            message = consumer.poll(STEP_S)
            if message is None:
                continue
            error = message.error()
            if error is None:
                return message if message.offset() == offset else None
            _raise_unless_transient(error)
            if error.code() == KafkaError._PARTITION_EOF:
                return None
        raise unreachable(settings.bootstrap, f"no record for {SILENT_S:.0f} s")
    finally:
        consumer.close()
