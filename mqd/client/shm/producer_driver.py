"""The driver of a producer over shared memory: holds the producer's state, passes records from stages
to the C core, and does the producer's part of each turn of the attachment's driver (attachment.py).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, cast

from mqd.client.config import ProducerConfig, Settings, TransportChoice
from mqd.client.messages import KafkaError, KafkaException, failure, local_error
from mqd.client.partitioner import number_of
from mqd.client.requests import PRODUCE
from mqd.client.shm.appending import Appender
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.compressing import Compressor
from mqd.client.shm.delivering import Delivery, ErrorEvent, Events
from mqd.client.shm.delivery_outcomes import DeliveryOutcomes
from mqd.client.shm.identity import ProducerIdentity
from mqd.client.shm.opening import opener
from mqd.client.shm.producer_statistics import ProducerStatistics
from mqd.client.shm.staging import STAGE_MAX, FullEntry, Refused, Stage, TakenCount, chunk_of
from mqd.client.shm.transactional import Transactions
from mqd.native import NativeError
from mqd.native.client import INT64_MAX, Client, ProducerOptions
from mqd.native.client import Producer as NativeProducer

_log = logging.getLogger("mqd.client")

NEVER = float("inf")
_PRODUCE_VERSION_MAX = 12
_DATA_BYTES, _DATA_BYTES_MAX = 16 << 20, 1 << 30
_LARGEST_RECORDS = 4  # the memory must have room for this many records of message.max.bytes
_BATCH_BYTES_MIN = 128  # the C core's minimum


class ProducerDriver:
    """The attachment's lock guards everything except staging."""

    def __init__(self, settings: Settings, choice: TransportChoice) -> None:
        self.reason = choice.reason
        self.config = config = ProducerConfig(settings)
        self.events = Events()
        self.fatal: KafkaError | None = None
        self.hold_reason: str | None = None  # why stages are not passed on; None: they are passed on
        self.stages: dict[str, Stage] = {}
        self.active: set[Stage] = set()  # stages that a later turn hands over
        self.stages_by_number: list[Stage] = []  # by the topic's number in the C core
        self.compress_due = NEVER
        self._turn_due = NEVER  # time of the driver's next turn, for lingering batches
        self._metadata_version = 0
        self._flush_count = 0  # calls of flush() in progress
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
        self.outcomes = DeliveryOutcomes(self)
        self.identity = ProducerIdentity(self)
        self.transactions = Transactions(self)
        self.compressor = Compressor(self)
        self.appender = Appender(self)
        self.statistics = ProducerStatistics(self)

    def _open_native(self) -> NativeProducer:
        config, api = self.config, self.attachment.api
        version = api.pick(PRODUCE, _PRODUCE_VERSION_MAX if api.supports_transactions_v2 else _PRODUCE_VERSION_MAX - 1)
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
        return NativeProducer(cast(Client, self.attachment.native), options)

    def _arm(self, stage: Stage) -> None:
        stage.armed = True
        stage.due = time.monotonic() + self._linger_s
        self.active.add(stage)
        self.attachment.wake_by(stage.due)

    # -- from the stage to the C core --------------------------------------------------------------

    def hand_over(self, stage: Stage) -> None:
        """Passes on as much of a stage as possible. Lock held."""
        while stage.entries and self.hold_reason is None and stage.number >= 0 and self.transactions.may_write(stage):
            count = min(len(stage.entries), STAGE_MAX)
            chunk, taken = chunk_of(stage, count), TakenCount()
            try:
                self.appender.append(stage, chunk, chunk.entries, taken)
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

    def retry_after(self, stage: Stage, delay: float) -> None:
        """Hands the stage over again after `delay` seconds; by then its topic may have been added to the
        transaction. Lock held.
        """
        self.active.add(stage)
        stage.armed = True
        stage.due = time.monotonic() + delay
        self.attachment.wake_by(stage.due)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def fail_entries(self, stage: Stage, count: int, error: KafkaError) -> None:
        """Fails the first records of a stage; their transaction must be aborted."""
        entries = stage.entries[:count]
        for entry in entries:
            if type(entry) is FullEntry and entry.on_delivery is not None:
                self.put(Delivery(stage.topic, max(entry.partition, -1), -1, -1, error, [([entry], range(1), 1)]))
        stage.release(count)
        if entries:
            self.transactions.mark_broken(error)

    def put(self, event: Any) -> None:
        """Queues an event for poll(). Lock held."""
        self.events.put(event)

    def resolve(self, stage: Stage) -> bool:
        """Registers the topic, or its new partitions, in the C core once its metadata is known; requests
        the metadata otherwise. Returns whether the topic is registered.
        """
        metadata = self.attachment.metadata
        info = metadata.topics.get(stage.topic)
        if info is not None and not info.error and info.partition_count:
            if stage.number < 0 or info.partition_count > stage.partition_count:
                stage.number = self.native.register_topic(stage.topic, info.partition_count, self._partitioner)
                stage.partition_count = info.partition_count
                if stage.number == len(self.stages_by_number):
                    self.stages_by_number.append(stage)
            return True
        now = time.monotonic()
        if now >= stage.next_request_at:
            stage.next_request_at = now + 0.1
            metadata.refresh([stage.topic], allow_auto_create=self.config["allow.auto.create.topics"])
        return False

    # -- the driver's turn -------------------------------------------------------------------------

    def on_turn(self, now: float) -> float | None:
        if self._closed:
            return None
        self.outcomes.take_deliveries(now)
        if self._metadata_version != self.attachment.metadata.version:
            self._metadata_version = self.attachment.metadata.version
            for stage in self.stages_by_number:
                self.resolve(stage)  # the topic may have more partitions
        due = min(self.identity.on_turn(now), self.outcomes.on_turn(now), self.statistics.on_turn(now))
        for stage in list(self.active):
            due = min(due, self._hand_over_if_due(stage, now))
        self._turn_due = NEVER
        if self.hold_reason is None and self.attachment.attached:
            self._send(self._flush_count > 0)
            self._turn_due = self._next_send()
        return min(due, self._turn_due)

    def _hand_over_if_due(self, stage: Stage, now: float) -> float:
        """Returns the time at which the stage is due next."""
        if stage.entries and self.transactions.is_broken:  # the transaction has failed in the meantime
            self.fail_entries(stage, len(stage.entries), local_error(KafkaError._PURGE_QUEUE))
        if stage.number < 0 and not self.resolve(stage):
            return self._on_unknown_topic(stage, now)
        if self._flush_count or now >= stage.due:
            # in this order: a thread that finds `armed` cleared adds the stage to `active` again
            self.active.discard(stage)
            stage.armed = False
            self.hand_over(stage)
            if not stage.entries:
                return NEVER
            stage.armed = True
            self.active.add(stage)
            # There is no room, or stages are held. Usually the event that changes this causes a turn;
            # `due` is for the other cases.
            stage.due = now + max(self._linger_s, 0.001)
        return stage.due

    def _on_unknown_topic(self, stage: Stage, now: float) -> float:
        """Fails the stage's records if its topic has been unknown for too long or has another error."""
        info = self.attachment.metadata.topics.get(stage.topic)
        limit = stage.unresolved_since + self.config["topic.metadata.propagation.max.ms"] / 1000
        # UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE: the topic may not have been created yet
        is_final = info is not None and info.error and info.error not in (3, 5)
        if is_final or now >= limit:
            code = info.error if info is not None and info.error else KafkaError._UNKNOWN_TOPIC
            self.fail_entries(stage, len(stage.entries), local_error(code))
            stage.unresolved_since = now
            self.active.discard(stage)
            stage.armed = False
            if stage.entries:
                self._arm(stage)
            return NEVER
        return now + 0.05

    def send_due(self) -> None:
        """Sends the batches whose linger time has passed, and makes sure that the driver, which may be
        asleep, sends the others in time. The driver is woken only if it would be late: callers that
        wait for room call this after every turn of the driver, so waking it every time would always
        cause another turn.
        """
        if self.hold_reason is None and not self._closed:
            self._send(self._flush_count > 0 or self._linger_s == 0)
            due = self._next_send() if self.attachment.attached else NEVER
            if due < self._turn_due:
                self._turn_due = due
                self.attachment.wake_by(due)

    def send_queued(self) -> None:
        """Sends the batches queued in the C core, even while stages are held."""
        if self.attachment.attached and not self._closed:
            self._send(False)

    def _next_send(self) -> float:
        """Returns the time at which the first open batch will have lingered long enough."""
        next_us = self.native.next_send_us()
        return min(next_us / 1e6 if next_us != INT64_MAX else NEVER, self.compress_due)

    def _send(self, everything: bool) -> None:
        try:
            if self.compressor.enabled:
                self.compress_due = self.compressor.on_turn(time.monotonic(), everything)
            self.native.send(time.monotonic_ns() // 1000, everything)
        except NativeError:
            pass  # the attachment has ended: the driver's next turn handles it

    def on_lost(self, error: KafkaError) -> None:
        if error.fatal():
            self.set_fatal(error)
        elif self.config["error_cb"] is not None:
            self.put(ErrorEvent(self.config["error_cb"], error))
        if self.config["retries"] == 0:  # batches that were sent may have been written, and are not sent again
            self.outcomes.drop_all(error)

    def on_reattached(self, old: Any, new: Any) -> None:
        self.native.move(new)
        self.attachment.changed.notify_all()

    def on_forked(self) -> None:
        """Called in a child of fork: makes the next produce() detect and report it."""
        for stage in self.stages.values():
            stage.limit = 0

    def set_fatal(self, error: KafkaError, failed_batch: tuple[int, int, KafkaError] | None = None) -> None:
        """Fails the producer: outstanding records fail, and no more are accepted. `failed_batch`: (number,
        partition, error) of the batch that caused it.
        """
        if self.fatal is not None:
            return
        self.fatal = error
        self.hold("fatal")
        _log.error("%s: fatal error: %s", self.config["client.id"], error.str())
        if self.config["error_cb"] is not None:
            self.put(
                ErrorEvent(
                    self.config["error_cb"], local_error(KafkaError._FATAL, f"Fatal error: {error.str()}", fatal=True)
                )
            )
        if failed_batch is not None:
            self.outcomes.give_up(*failed_batch)
        purged = local_error(KafkaError._PURGE_QUEUE)
        self.outcomes.drop_all(local_error(KafkaError._PURGE_INFLIGHT))
        for stage in self.stages.values():
            self.fail_entries(stage, len(stage.entries), purged)

    def hold(self, reason: str | None) -> None:
        """Holds the stages for `reason`, or releases them (None)."""
        self.hold_reason = reason
        for stage in self.stages.values():
            stage.limit = 0 if reason is not None else len(stage.entries)
            if reason is None and stage.entries:
                self._arm(stage)

    def outstanding(self) -> int:
        """Returns the number of records that are staged or in the C core, plus the number of pending
        callbacks. Lock held.
        """
        if self.outcomes.batches and not self.native.outstanding_records:
            self.outcomes.take_deliveries(time.monotonic())  # batches with a response, but without a report yet
        return (
            self.native.outstanding_records
            + self.compressor.record_count
            + self.events.pending_call_count
            + sum(len(stage.entries) for stage in self.stages.values())
        )

    def _require_open(self) -> None:
        """Like require_usable(), except for a fatal error, which the caller reports in more detail."""
        if self._closed or os.getpid() != self._pid:
            self.require_usable()

    def require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise failure(
                KafkaError._STATE, "this producer was made before fork(): make a new one in the child process"
            )
        if self._closed:
            raise RuntimeError("Producer has been closed")  # as in confluent_kafka
        if self.fatal is not None:
            raise KafkaException(local_error(KafkaError._FATAL, self.fatal.str(), fatal=True))
