"""The producer over shared memory: confluent_kafka's semantics on the C core.

The path of a record: produce() appends it to a Stage (staging.py); the stage goes to the C core in
bulk, which partitions it and builds batches in the memory shared with the broker; the attachment's
driver receives responses, decides (retry, give up, done: delivery_outcomes.py) and queues events;
poll() and flush() call the callbacks (delivering.py).

1. A record is in exactly one place: a stage, the C core, or an event. The records in all three are
   outstanding; queue.buffering.max.messages and the shared memory limit their number.
2. Records of a stage are passed on in order, and only while `hold_reason` is None: none before the producer
   has its identity, or while the identity is being replaced.
3. User callbacks run in poll(), flush() and a produce_batch() that waits; never with the lock held,
   never in the background thread.

Concurrency: produce() by any thread, without the lock while there is room; everything else takes
the attachment's lock.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mqd.client import columns
from mqd.client.config import Settings, TransportChoice
from mqd.client.messages import KafkaError, KafkaException, encode_headers, failure, local_error
from mqd.client.shm import closing
from mqd.client.shm.batch_call import BatchCall
from mqd.client.shm.delivering import CallReport
from mqd.client.shm.producer_driver import NEVER, ProducerDriver
from mqd.client.shm.staging import STAGE_MAX, Chunk, FullEntry, Stage, chunk_of_arguments
from mqd.native.client import INT64_MAX

_log = logging.getLogger("mqd.client")
_STAGED_BYTES_MAX = 16 << 10  # a larger record is handed over immediately, so that the staged bytes are bounded
_new_entry = tuple.__new__  # takes a third of the time of FullEntry(...)
_INT32_MAX = 2**31 - 1


class ShmProducer(ProducerDriver):
    """Used by mqd.Producer when the broker is on this host. Raises KafkaException or OSError
    when attaching fails.
    """

    transport = "shm"

    def __init__(self, settings: Settings, choice: TransportChoice) -> None:
        super().__init__(settings, choice)
        self.produce = self._make_produce()
        self.attachment.subscribe(self)

    # -- produce -----------------------------------------------------------------------------------

    def _make_produce(self) -> Callable[..., None]:
        """Returns produce() as a closure, which is a third of a microsecond faster per record than a
        method that looks up attributes.
        """
        stages, new_stage, entry_of, make_room, active = (
            self.stages,
            self._new_stage,
            self._entry_of,
            self._make_room,
            self.active,
        )
        clock, monotonic, wake_by, linger_s = time.time, time.monotonic, self.attachment.wake_by, self._linger_s
        small_max = min(_STAGED_BYTES_MAX, self.config["message.max.bytes"])
        hand_over_above, hand_over_now = small_max if linger_s else -1, self._hand_over_now
        allows_plain_entries = self.config["on_delivery"] is None and self.config.partitioner is None

        def produce(
            topic, value=None, key=None, partition=-1, callback=None, on_delivery=None, timestamp=0, headers=None
        ) -> None:
            try:
                stage = stages[topic]
            except KeyError:
                stage = None
            if stage is None:
                stage = new_stage(topic)
            entries = stage.entries
            if len(entries) >= stage.limit:
                make_room(stage)
            if (
                allows_plain_entries
                and type(value) is bytes
                and type(partition) is int
                and -1 <= partition < stage.partition_count
                and headers is None
                and not timestamp
                and callback is None
                and on_delivery is None
                and (key is None or type(key) is bytes)
                and (size := len(value) if key is None else len(value) + len(key)) <= small_max
            ):
                if not stage.mark_start_s <= clock() < stage.mark_end_s:
                    stage.mark()
                if key is None:
                    entries.append(value if partition < 0 else (value, partition))
                else:
                    entries.append((value, key) if partition < 0 else (value, key, partition))
            else:
                entry = entry_of(stage, value, key, partition, callback or on_delivery, timestamp, headers)
                size = len(entry.value or b"") + len(entry.key or b"") + len(entry.headers or b"")
                entries.append(entry)
            if size > hand_over_above:
                hand_over_now(stage)
            elif not stage.armed:
                stage.armed = True
                due = stage.due = monotonic() + linger_s
                active.add(stage)
                wake_by(due)

        return produce

    def _new_stage(self, topic: str) -> Stage:
        if not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str, not {type(topic).__name__}")
        self.require_usable()
        with self.attachment.lock:
            stage = self.stages.get(topic)
            if stage is None:
                stage = Stage(topic)
                stage.unresolved_since = time.monotonic()
                self.resolve(stage)
                self.stages[topic] = stage
        return stage

    def _entry_of(
        self, stage: Stage, value: Any, key: Any, partition: Any, on_delivery: Any, timestamp: Any, headers: Any
    ) -> Any:
        """Checks a record that may use all optional fields, and returns its entry. Raises the exceptions of
        produce().
        """
        if type(value) is not bytes:
            value = columns.to_bytes(value, 2)
        if key is not None and type(key) is not bytes:
            key = columns.to_bytes(key, 3)
        if (len(value) if value else 0) + (len(key) if key else 0) > self._bytes_max:
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Unable to produce message: Broker: Message size too large")
        encoded = None if headers is None else encode_headers(headers)
        partition = -1 if partition is None else operator.index(partition)
        if not -1 <= partition <= _INT32_MAX:
            raise failure(
                KafkaError._UNKNOWN_PARTITION, f"Unable to produce message: there is no partition numbered {partition}"
            )
        if self.config.partitioner is not None and partition < 0:
            count = self._partition_count(stage)
            partition = columns.checked_partition(self.config.partitioner(key, count), count)
        if partition >= stage.partition_count and stage.number >= 0:
            raise failure(
                KafkaError._UNKNOWN_PARTITION,
                f"Unable to produce message: {stage.topic} has {stage.partition_count} partitions; there is"
                f" none numbered {partition}",
            )
        on_delivery = on_delivery or self._on_delivery
        began = 0.0
        if on_delivery is not None:
            if not callable(on_delivery):
                raise TypeError("expected on_delivery to be callable")
            began = time.monotonic()
        timestamp_ms = operator.index(timestamp) if timestamp else time.time_ns() // 1_000_000
        if not -INT64_MAX <= timestamp_ms <= INT64_MAX:
            raise OverflowError("timestamp must be in milliseconds since the epoch, and fit into 64 bits")
        return _new_entry(FullEntry, (value, key, partition, timestamp_ms, encoded, on_delivery, began, headers))

    def _partition_count(self, stage: Stage) -> int:
        if stage.number < 0:
            self.attachment.metadata.find(
                stage.topic,
                self.config["topic.metadata.propagation.max.ms"] / 1000,
                allow_auto_create=self.config["allow.auto.create.topics"],
            )
            with self.attachment.lock:
                self.resolve(stage)
        return stage.partition_count

    def _make_room(self, stage: Stage) -> None:
        """Passes on a stage that has reached its limit, and increases the limit. Raises BufferError if
        there is no room, or the exception that says why producing is not allowed.
        """
        self.require_usable()
        with self.attachment.lock:
            self.hand_over(stage)
            self.transactions.require_may_produce()  # after hand_over(), during which the transaction may fail
            room = self.messages_max - self.outstanding()
            staged_count = len(stage.entries)
            if room <= 0 or (staged_count and stage.number >= 0 and self.hold_reason is None):
                raise BufferError("Local: Queue full")
            stage.limit = staged_count + min(room, STAGE_MAX)

    def _hand_over_now(self, stage: Stage) -> None:
        with self.attachment.lock:
            self.hand_over(stage)
            self.send_due()
            if stage.entries:
                self._arm(stage)

    # -- batches -----------------------------------------------------------------------------------

    def produce_batch(
        self,
        topic: str,
        values: Any,
        keys: Any = None,
        *,
        headers: Any = None,
        partition: Any = -1,
        timestamps: Any = None,
        on_delivery: Any = None,
        timeout: float = -1,
    ) -> int:
        """Like mqd.Producer.produce_batch."""
        stage = self.stages.get(topic) or self._new_stage(topic)
        if on_delivery is not None and not callable(on_delivery):
            raise TypeError("expected on_delivery to be callable")
        records = chunk_of_arguments(values, keys, headers, partition, timestamps, self.config["message.max.bytes"])
        if self.config.partitioner is not None and records.partitions is None and records.partition < 0:
            records = self._with_partitions(stage, records)
        self.require_usable()
        deadline = time.monotonic() + timeout if timeout >= 0 else NEVER
        call = BatchCall(self, stage, records, None if on_delivery is None else CallReport(on_delivery))
        try:
            with self.attachment.lock:
                self.transactions.require_may_produce()
                call.step()
            self._carry_out(call, deadline)
        # also for exceptions of a callback and Ctrl-C: the caller must not pass accepted records again
        except BaseException as problem:
            problem.accepted = call.accepted_count  # type: ignore[attr-defined]  # read by the caller
            raise
        return call.accepted_count

    def _carry_out(self, call: BatchCall, deadline: float) -> None:
        while not call.finished:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            # at most 0.1 s, because a metadata request that becomes due does not end the wait
            self.attachment.wait_for(lambda: call.step() or self.events, min(remaining_s, 0.1))
            if not call.finished and self.events:
                self._serve()
        if call.error is not None:
            raise KafkaException(call.error)

    def _with_partitions(self, stage: Stage, records: Chunk) -> Chunk:
        count, partitioner = self._partition_count(stage), self.config.partitioner
        assert partitioner is not None  # otherwise the C core chooses the partition
        keys = [None] * records.values.count if records.keys is None else records.keys.items()
        return records._replace(
            partitions=np.array([columns.checked_partition(partitioner(key, count), count) for key in keys], np.int32)
        )

    # -- waiting -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = -1) -> int:
        """Like mqd.Producer.poll."""
        if self.events:
            return self._serve()
        if self._closed:
            self.require_usable()
        if timeout == 0:
            return 0
        self.attachment.wait_for(lambda: self.events, -1 if timeout is None else timeout)
        return self._serve()

    def _serve(self) -> int:
        return self.events.run_callbacks(self.attachment.lock)

    def flush(self, timeout: float | None = -1) -> int:
        """Like mqd.Producer.flush."""
        deadline = NEVER if timeout is None or timeout < 0 else time.monotonic() + timeout
        with self.attachment.lock:
            self._require_open()
            self._flush_count += 1
        try:
            with self.attachment.lock:
                for stage in self.stages.values():
                    if stage.entries:
                        self._hand_over_if_due(stage, time.monotonic())
                if self.hold_reason is None:
                    self._send(True)
            while True:
                remaining_s = deadline - time.monotonic()
                self.attachment.wait_for(
                    lambda: self.events or not self.outstanding(), -1 if remaining_s == NEVER else max(remaining_s, 0)
                )
                if self.events:
                    self._serve()
                outstanding = len(self)
                if not outstanding or remaining_s <= 0:
                    return outstanding
        finally:
            with self.attachment.lock:
                self._flush_count -= 1

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Like mqd.Producer.purge. Records in the C core count as in flight, even if not sent yet."""
        self.require_usable()
        self.fail_outstanding(in_queue, in_flight)

    def fail_outstanding(self, in_queue: bool = True, in_flight: bool = True) -> None:
        """Fails all outstanding records; does nothing if another thread has closed this producer."""
        with self.attachment.lock:
            if not self._closed:
                self._fail_outstanding(in_queue, in_flight)

    def _fail_outstanding(self, in_queue: bool, in_flight: bool) -> None:
        """Fails records in flight first, so that a partition's reports come in the order of its records."""
        if in_flight:
            self.outcomes.drop_all(local_error(KafkaError._PURGE_INFLIGHT))
        if in_queue:
            for stage in self.stages.values():
                self.fail_entries(stage, len(stage.entries), local_error(KafkaError._PURGE_QUEUE))

    def __len__(self) -> int:
        with self.attachment.lock:
            return 0 if self._closed else self.outstanding()

    def request(self, api_key: int, message: object, timeout: float) -> Any:
        return self.attachment.request(api_key, self.attachment.api.pick(api_key), message, timeout)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Like mqd.Producer.list_topics."""
        self.require_usable()
        return self.attachment.metadata.list_topics(
            topic, timeout, allow_auto_create=self.config["allow.auto.create.topics"]
        )

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Does nothing: over shared memory a client is identified by its process's user."""

    # -- transactions ------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        self._require_open()
        self.transactions.init(timeout)

    def begin_transaction(self) -> None:
        self._require_open()
        self.transactions.begin()

    def send_offsets_to_transaction(self, positions: Any, group_metadata: Any, timeout: float = -1) -> None:
        self._require_open()
        self.transactions.send_offsets(positions, group_metadata, timeout)

    def commit_transaction(self, timeout: float = -1) -> None:
        self._require_open()
        self.transactions.commit(timeout)

    def abort_transaction(self, timeout: float = -1) -> None:
        self._require_open()
        self.transactions.abort(timeout)

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> bool:
        """Like mqd.Producer.close."""
        if self._closed or os.getpid() != self._pid:
            return True
        closing.close(self)
        return True

    def end(self, report_outstanding: bool = False) -> None:
        """Ends immediately. `report_outstanding`: puts a report with an error into `events` for each
        outstanding record.
        """
        if self._closed:
            return
        with self.attachment.lock:
            self._closed = True
            for stage in self.stages.values():
                stage.limit = 0
            if report_outstanding:
                self._fail_outstanding(True, True)
        self.attachment.unsubscribe(self)
        with self.attachment.lock:
            self.native.close()
        self.attachment.close()

    def abandon(self) -> None:
        """Called when the mqd.Producer was garbage-collected. Never waits: unflushed records are lost, as
        with confluent_kafka.
        """
        if self._closed or os.getpid() != self._pid:
            return
        if outstanding := len(self):
            _log.warning(
                "%s: producer ends with %d records outstanding: use flush() to wait for their delivery",
                self.config["client.id"],
                outstanding,
            )
        self.end()
