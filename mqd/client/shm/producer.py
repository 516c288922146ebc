"""The producer over shared memory: confluent_kafka's semantics on the C core.

A record's way: produce() appends it to a Stage (staging.py); the stage goes to the C core in bulk,
which partitions it and builds batches in the memory shared with the broker; answers come back by
the attachment's driver, which decides (retry, give up, done: delivery_outcomes.py) and leaves
events; poll() and flush() call back (delivering.py).

1. A record is in exactly one place: a stage, the C core, an event. What is outstanding is their
   sum; it is bounded by queue.buffering.max.messages and the shared memory.
2. Stages go over in the order of their records, and only while `held` is None: before the producer
   has its identity, between two identities, nothing moves.
3. Callbacks of the user run in poll(), flush() and a produce_batch() that waits; never with the
   lock held, never in the background thread.

Concurrency: produce() by any thread, without lock while there is room; all else takes the
attachment's lock.
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
from mqd.client.shm import closing
from mqd.client.shm.appending import Appender, Refused, Taken
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.batch_call import BatchCall
from mqd.client.shm.compressing import Compressor
from mqd.client.config import Choice, ProducerConfig, Settings
from mqd.client.shm.delivering import CallReport, Delivery, ErrorEvent, Events
from mqd.client.shm.delivery_outcomes import Fates
from mqd.client.shm.identity import Identity
from mqd.client.messages import KafkaError, KafkaException, encode_headers, failure, local_error
from mqd.client.shm.opening import opener
from mqd.client.partitioner import number_of
from mqd.client.requests import PRODUCE
from mqd.client.shm.staging import STAGE_MAX, Chunk, Entry, Stage, checked, chunk_of
from mqd.client.shm.producer_statistics import Statistics
from mqd.client.shm.transactional import Transactions
from mqd.native import NativeError
from mqd.native.client import INT64_MAX, ProducerOptions
from mqd.native.client import Producer as NativeProducer

_log = logging.getLogger("mqd.client")
_NEVER = float("inf")
_AT_ONCE_BYTES = 16 << 10  # a record this large goes over at once: staged ones are bounded in bytes, too
_new_entry = tuple.__new__  # a third of the time of Entry(...)
_PRODUCE_VERSION_MAX = 12
_DATA_BYTES, _DATA_BYTES_MAX = 16 << 20, 1 << 30
_LARGEST_RECORDS = 4  # of message.max.bytes, for which there is room
_BATCH_BYTES_MIN = 128  # the C core's
_INT32_MAX = 2**31 - 1


class ShmProducer:
    """What mqd.Producer stands on when the broker is this host's. Raises KafkaException or OSError
    when attaching fails.
    """

    transport = "shm"

    def __init__(self, settings: Settings, choice: Choice) -> None:
        self.reason = choice.reason
        self.config = config = ProducerConfig(settings)
        self.events = Events()
        self.fatal: KafkaError | None = None
        self.held: str | None = None  # why stages stay where they are
        self.stages: dict[str, Stage] = {}
        self.active: set[Stage] = set()
        self.topics: list[Stage] = []  # by number in the C core
        self.compress_due = _NEVER
        self._turn_due = _NEVER  # when the driver's next turn is, for what lingers
        self._metadata_version = 0
        self._flushing = 0
        self._closed = False
        self._pid = os.getpid()
        self._linger_s = config["linger.ms"] / 1000
        self.messages_max = config["queue.buffering.max.messages"] or 1 << 62
        self._bytes_max: int = config["message.max.bytes"]
        self._on_delivery = config["on_delivery"]
        self._partitioner = number_of(config["partitioner"])
        data_bytes = settings.own["mqd.buffer.bytes"] or min(
            max(_DATA_BYTES, _LARGEST_RECORDS * config["message.max.bytes"]), _DATA_BYTES_MAX
        )
        self.memory_bytes: int = min(data_bytes, config["queue.buffering.max.kbytes"] << 10)
        self.attachment = Attachment(
            opener(settings, choice, config["client.id"], data_bytes),
            client_id=config["client.id"],
            request_timeout_s=config["socket.timeout.ms"] / 1000,
            metadata_max_age_s=max(config["topic.metadata.refresh.interval.ms"], 1000) / 1000,
        )
        try:
            self.native = self._open_native()
        except BaseException:
            self.attachment.close()
            raise
        self.fates = Fates(self)
        self.identity = Identity(self)
        self.transactions = Transactions(self)
        self.compressor = Compressor(self)
        self.appender = Appender(self)
        self.statistics = Statistics(self)
        self.produce = self._make_produce()
        self.attachment.subscribe(self)

    def _open_native(self) -> NativeProducer:
        config, api = self.config, self.attachment.api
        version = api.pick(PRODUCE, _PRODUCE_VERSION_MAX if api.transactions_v2 else _PRODUCE_VERSION_MAX - 1)
        options = ProducerOptions(
            acks=max(min(config["acks"], 1), -1),
            request_timeout_ms=config["request.timeout.ms"],
            transactional_id=config["transactional.id"] or None,
            batch_bytes=max(config["batch.size"], _BATCH_BYTES_MIN),
            batch_records_max=config["batch.num.messages"],
            inflight_max=config["max.in.flight.requests.per.connection"],
            linger_us=int(config["linger.ms"] * 1000),
            buffer_bytes_max=config["queue.buffering.max.kbytes"] << 10,
            produce_version=version,
        )
        return NativeProducer(self.attachment.native, options)

    # -- produce -----------------------------------------------------------------------------------

    def _make_produce(self) -> Callable[..., None]:
        """produce() with everything it looks at in cells: a third of a microsecond less for each
        record than by attributes.
        """
        stages, new_stage, entry_of, make_room, active = (
            self.stages,
            self._new_stage,
            self._entry_of,
            self._make_room,
            self.active,
        )
        time_ns, monotonic, wake_by, linger_s = time.time_ns, time.monotonic, self.attachment.wake_by, self._linger_s
        small_max = min(_AT_ONCE_BYTES, self.config["message.max.bytes"])
        at_once, hand_over_now = small_max if linger_s else -1, self._hand_over_now
        plain = self.config["on_delivery"] is None and self.config.partitioner is None

        def produce(
            topic, value=None, key=None, partition=-1, callback=None, on_delivery=None, timestamp=0, headers=None
        ) -> None:
            stage = stages.get(topic) or new_stage(topic)
            entries = stage.entries
            if len(entries) >= stage.limit:
                make_room(stage)
            if (
                plain
                and type(value) is bytes
                and type(partition) is int
                and -1 <= partition < stage.partition_count
                and headers is None
                and not timestamp
                and callback is None
                and on_delivery is None
                and (key is None or type(key) is bytes)
                and (size := len(value) + (len(key) if key else 0)) <= small_max
            ):
                now_ms = time_ns() // 1_000_000
                if now_ms != stage.now_ms:
                    stage.mark(now_ms)
                entries.append((value, key, partition) if partition >= 0 else value if key is None else (value, key))
            else:
                entry = entry_of(stage, value, key, partition, callback or on_delivery, timestamp, headers)
                size = len(entry[0] or b"")
                entries.append(entry)
            if size > at_once:
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
        """One record with all that may come with it, checked. Raises what belongs to produce()."""
        if type(value) is not bytes:
            value = columns.one(value, 2)
        if key is not None and type(key) is not bytes:
            key = columns.one(key, 3)
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
                f"Unable to produce message: {stage.topic} has {stage.partition_count} partitions, not one numbered"
                f" {partition}",
            )
        on_delivery = on_delivery or self._on_delivery
        began = 0.0
        if on_delivery is not None:
            if not callable(on_delivery):
                raise TypeError("expected on_delivery to be callable")
            began = time.monotonic()
        timestamp_ms = operator.index(timestamp) if timestamp else time.time_ns() // 1_000_000
        if not -INT64_MAX <= timestamp_ms <= INT64_MAX:
            raise OverflowError("timestamp: milliseconds since the epoch, in 64 bits")
        return _new_entry(Entry, (value, key, partition, timestamp_ms, encoded, on_delivery, began, headers))

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
        """The stage is as long as it may be: hands it over, allows more. Raises BufferError, or why
        nothing may be produced.
        """
        self.require_usable()
        with self.attachment.lock:
            self.hand_over(stage)
            self.transactions.require_may_produce()  # behind that: the transaction may fail as records are handed over
            room = self.messages_max - self.outstanding()
            waiting = len(stage.entries)
            if room <= 0 or (waiting and stage.number >= 0 and self.held is None):
                raise BufferError("Local: Queue full")
            stage.limit = waiting + min(room, STAGE_MAX)

    def _hand_over_now(self, stage: Stage) -> None:
        with self.attachment.lock:
            self.hand_over(stage)
            self.send_due()
            if stage.entries:
                self._arm(stage)

    def _arm(self, stage: Stage) -> None:
        stage.armed = True
        stage.due = time.monotonic() + self._linger_s
        self.active.add(stage)
        self.attachment.wake_by(stage.due)

    # -- from the stage to the C core --------------------------------------------------------------

    def hand_over(self, stage: Stage) -> None:
        """As much of a stage as goes. Lock held."""
        while stage.entries and self.held is None and stage.number >= 0 and self.transactions.may_write(stage):
            count = min(len(stage.entries), STAGE_MAX)
            chunk, taken = chunk_of(stage, count), Taken()
            try:
                self.appender.append(stage, chunk, chunk.rows, taken)
            except Refused as refused:
                self.fail_entries(stage, 1, refused.error)
                continue
            except BaseException:
                stage.release(taken.count)
                self._arm(stage)
                raise
            stage.release(taken.count)
            if not taken.count:
                return

    def close_open_batches(self) -> None:
        self._send(True)

    def restage(self, stage: Stage, delay: float) -> None:
        """What kept the stage back may be gone by then. Lock held."""
        self.active.add(stage)
        stage.armed = True
        stage.due = time.monotonic() + delay
        self.attachment.wake_by(stage.due)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def fail_entries(self, stage: Stage, count: int, error: KafkaError) -> None:
        """The first records of a stage end with an error; the transaction that they are of must be
        aborted.
        """
        rows = stage.entries[:count]
        for row in rows:
            if type(row) is Entry and row.on_delivery is not None:
                self.leave(Delivery(stage.topic, max(row.partition, -1), -1, -1, error, [([row], range(1), 1)]))
        stage.release(count)
        if rows:
            self.transactions.failed(error)

    def leave(self, event: Any) -> None:
        """An event for poll(). Lock held."""
        self.events.leave(event)

    def resolve(self, stage: Stage) -> bool:
        """Has the topic a number in the C core? Asks for its metadata where not."""
        metadata = self.attachment.metadata
        info = metadata.topics.get(stage.topic)
        if info is not None and not info.error and info.partition_count:
            if stage.number < 0 or info.partition_count > stage.partition_count:
                stage.number = self.native.topic(stage.topic, info.partition_count, self._partitioner)
                stage.partition_count = info.partition_count
                if stage.number == len(self.topics):
                    self.topics.append(stage)
            return True
        now = time.monotonic()
        if now >= stage.wanted_by:
            stage.wanted_by = now + 0.1
            metadata.refresh([stage.topic], allow_auto_create=self.config["allow.auto.create.topics"])
        return False

    # -- the driver's turn -------------------------------------------------------------------------

    def on_turn(self, now: float) -> float | None:
        if self._closed:
            return None
        self.fates.take_deliveries(now)
        if self._metadata_version != self.attachment.metadata.version:
            self._metadata_version = self.attachment.metadata.version
            for stage in self.topics:
                self.resolve(stage)  # it may have more partitions
        due = min(self.identity.on_turn(now), self.fates.on_turn(now), self.statistics.on_turn(now))
        for stage in list(self.active):
            due = min(due, self._stage_turn(stage, now))
        self._turn_due = _NEVER
        if self.held is None and self.attachment.attached:
            self._send(self._flushing > 0)
            self._turn_due = self._next_send()
        return min(due, self._turn_due)

    def _stage_turn(self, stage: Stage, now: float) -> float:
        if stage.entries and self.transactions.is_broken:  # they were being looked at when it failed
            self.fail_entries(stage, len(stage.entries), local_error(KafkaError._PURGE_QUEUE))
        if stage.number < 0 and not self.resolve(stage):
            return self._unresolved(stage, now)
        if self._flushing or now >= stage.due:
            self.active.discard(stage)  # before `armed`: whoever arms it from here on puts it back
            stage.armed = False
            self.hand_over(stage)
            if not stage.entries:
                return _NEVER
            stage.armed = True
            self.active.add(stage)
            # full or held: what happens then brings a turn, this is for what does not
            stage.due = now + max(self._linger_s, 0.001)
        return stage.due

    def _unresolved(self, stage: Stage, now: float) -> float:
        info = self.attachment.metadata.topics.get(stage.topic)
        limit = stage.unresolved_since + self.config["topic.metadata.propagation.max.ms"] / 1000
        # UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE: may be on its way
        hopeless = info is not None and info.error and info.error not in (3, 5)
        if hopeless or now >= limit:
            code = info.error if info is not None and info.error else KafkaError._UNKNOWN_TOPIC
            self.fail_entries(stage, len(stage.entries), local_error(code))
            stage.unresolved_since = now
            self.active.discard(stage)
            stage.armed = False
            if stage.entries:
                self._arm(stage)
            return _NEVER
        return now + 0.05

    def send_due(self) -> None:
        """What has lingered; the driver, which may sleep for long, sees to what lingers yet. It is
        told once: who waits for room calls this after each turn, and would bring the next.
        """
        if self.held is None and not self._closed:
            self._send(self._flushing > 0 or self._linger_s == 0)
            due = self._next_send() if self.attachment.attached else _NEVER
            if due < self._turn_due:
                self._turn_due = due
                self.attachment.wake_by(due)

    def _next_send(self) -> float:
        """When a batch that is open will have lingered."""
        next_us = self.native.next_send_us()
        return min(next_us / 1e6 if next_us != INT64_MAX else _NEVER, self.compress_due)

    def _send(self, everything: bool) -> None:
        try:
            if self.compressor.enabled:
                self.compress_due = self.compressor.on_turn(time.monotonic(), everything)
            self.native.send(time.monotonic_ns() // 1000, everything)
        except NativeError:
            pass  # the attachment has ended: the driver's next turn deals with it

    def on_lost(self, error: KafkaError) -> None:
        if error.fatal():
            self.set_fatal(error)
        elif self.config["error_cb"] is not None:
            self.leave(ErrorEvent(self.config["error_cb"], error))
        if self.config["retries"] == 0:  # what was sent may have been written: nothing is sent twice
            self.fates.drop_all(error)

    def on_reattached(self, old: Any, new: Any) -> None:
        self.native.move(new)
        self.attachment.changed.notify_all()

    def on_forked(self) -> None:
        """In a child of fork: the next produce() looks, and says so."""
        for stage in self.stages.values():
            stage.limit = 0

    def set_fatal(self, error: KafkaError, of_batch: tuple[int, int, KafkaError] | None = None) -> None:
        """The producer is finished: what is outstanding fails, nothing more is taken. `of_batch`:
        (number, partition, its error) of the batch that it came with.
        """
        if self.fatal is not None:
            return
        self.fatal = error
        self.hold("fatal")
        _log.error("%s: fatal error: %s", self.config["client.id"], error.str())
        if self.config["error_cb"] is not None:
            self.leave(
                ErrorEvent(
                    self.config["error_cb"], local_error(KafkaError._FATAL, f"Fatal error: {error.str()}", fatal=True)
                )
            )
        if of_batch is not None:
            self.fates.give_up(*of_batch)
        purged = local_error(KafkaError._PURGE_QUEUE)
        self.fates.drop_all(local_error(KafkaError._PURGE_INFLIGHT))
        for stage in self.stages.values():
            self.fail_entries(stage, len(stage.entries), purged)

    def hold(self, why: str | None) -> None:
        """Stages stay (a reason) or go again (None)."""
        self.held = why
        for stage in self.stages.values():
            stage.limit = 0 if why is not None else len(stage.entries)
            if why is None and stage.entries:
                self._arm(stage)

    def outstanding(self) -> int:
        """Records that are staged or in the C core, and callbacks to be made. Lock held."""
        if self.fates.batches and not self.native.outstanding_records:
            self.fates.take_deliveries(time.monotonic())  # answered, but nobody has been told
        return (
            self.native.outstanding_records
            + self.compressor.records
            + self.events.unserved
            + sum(len(stage.entries) for stage in self.stages.values())
        )

    def _require_open(self) -> None:
        """As require_usable, but for a fatal error, of which the caller has more to say."""
        if self._closed or os.getpid() != self._pid:
            self.require_usable()

    def require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise failure(
                KafkaError._STATE, "this producer was made before fork(): make a new one in the child process"
            )
        if self._closed:
            raise RuntimeError("Producer has been closed")  # as confluent_kafka
        if self.fatal is not None:
            raise KafkaException(local_error(KafkaError._FATAL, self.fatal.str(), fatal=True))

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
        """As mqd.Producer.produce_batch."""
        stage = self.stages.get(topic) or self._new_stage(topic)
        if on_delivery is not None and not callable(on_delivery):
            raise TypeError("expected on_delivery to be callable")
        records = checked(values, keys, headers, partition, timestamps, self.config["message.max.bytes"])
        if self.config.partitioner is not None and records.partitions is None and records.partition < 0:
            records = self._partitioned(stage, records)
        self.require_usable()
        deadline = time.monotonic() + timeout if timeout >= 0 else _NEVER
        call = BatchCall(self, stage, records, None if on_delivery is None else CallReport(on_delivery))
        try:
            with self.attachment.lock:
                self.transactions.require_may_produce()
                call.step()
            self._carry_out(call, deadline)
        # what a callback raises and Ctrl-C, too: the records taken are not to be given again
        except BaseException as problem:
            problem.taken = call.taken  # type: ignore[attr-defined]
            raise
        return call.taken

    def _carry_out(self, call: BatchCall, deadline: float) -> None:
        while not call.finished:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # a metadata request that is due again brings no turn
            self.attachment.wait_for(lambda: call.step() or self.events, min(left, 0.1))
            if not call.finished and self.events:
                self._serve()
        if call.error is not None:
            raise KafkaException(call.error)

    def _partitioned(self, stage: Stage, records: Chunk) -> Chunk:
        count = self._partition_count(stage)
        keys = [None] * records.values.count if records.keys is None else records.keys.items()
        return records._replace(
            partitions=np.array(
                [columns.checked_partition(self.config.partitioner(key, count), count) for key in keys], np.int32
            )
        )

    # -- waiting -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = -1) -> int:
        """As mqd.Producer.poll."""
        if self.events:
            return self._serve()
        if self._closed:
            self.require_usable()
        if timeout == 0:
            return 0
        self.attachment.wait_for(lambda: self.events, -1 if timeout is None else timeout)
        return self._serve()

    def _serve(self) -> int:
        return self.events.serve(self.attachment.lock)

    def flush(self, timeout: float | None = -1) -> int:
        """As mqd.Producer.flush."""
        deadline = _NEVER if timeout is None or timeout < 0 else time.monotonic() + timeout
        with self.attachment.lock:
            self._require_open()
            self._flushing += 1
        try:
            with self.attachment.lock:
                for stage in self.stages.values():
                    if stage.entries:
                        self._stage_turn(stage, time.monotonic())
                if self.held is None:
                    self._send(True)
            while True:
                left = deadline - time.monotonic()
                self.attachment.wait_for(
                    lambda: self.events or not self.outstanding(), -1 if left == _NEVER else max(left, 0)
                )
                if self.events:
                    self._serve()
                waiting = len(self)
                if not waiting or left <= 0:
                    return waiting
        finally:
            with self.attachment.lock:
                self._flushing -= 1

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """As mqd.Producer.purge. What the C core holds counts as in flight: sent, or on its way."""
        self.require_usable()
        self.drop(in_queue, in_flight)

    def drop(self, in_queue: bool = True, in_flight: bool = True) -> None:
        """What is outstanding fails; nothing when another thread has closed this producer."""
        with self.attachment.lock:
            if not self._closed:
                self._drop(in_queue, in_flight)

    def _drop(self, in_queue: bool, in_flight: bool) -> None:
        """A partition's reports come in the order of its records: what is in flight came first."""
        if in_flight:
            self.fates.drop_all(local_error(KafkaError._PURGE_INFLIGHT))
        if in_queue:
            for stage in self.stages.values():
                self.fail_entries(stage, len(stage.entries), local_error(KafkaError._PURGE_QUEUE))

    def __len__(self) -> int:
        with self.attachment.lock:
            return 0 if self._closed else self.outstanding()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """As mqd.Producer.list_topics."""
        self.require_usable()
        return self.attachment.metadata.list_topics(
            topic, timeout, allow_auto_create=self.config["allow.auto.create.topics"]
        )

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Nothing: the broker knows the process's user."""

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

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> bool:
        """As mqd.Producer.close."""
        if self._closed or os.getpid() != self._pid:
            return True
        closing.close(self)
        return True

    def end(self, reported: bool = False) -> None:
        """At once. `reported`: what is outstanding leaves its reports in `events`."""
        if self._closed:
            return
        with self.attachment.lock:
            self._closed = True
            for stage in self.stages.values():
                stage.limit = 0
            if reported:
                self._drop(True, True)
        self.attachment.unsubscribe(self)
        with self.attachment.lock:
            self.native.close()
        self.attachment.close()

    def abandon(self) -> None:
        """Its owner is gone. Never waits: what was not flushed is lost, as with confluent_kafka."""
        if self._closed or os.getpid() != self._pid:
            return
        if left := len(self):
            _log.warning(
                "%s: producer ends with %d records outstanding: use flush() to wait for their delivery",
                self.config["client.id"],
                left,
            )
        self.end()
