"""Tracks the batches in the C core until each is written or has failed: retries them, and queues
their reports.

1. Every batch with records is in `batches`, oldest first, until it is written or dropped; then its
   event is queued, once.
2. A retried batch keeps its place: the C core holds back later batches of its partition. This keeps
   the order even without idempotence.
3. Errors are handled as in librdkafka: `ErrorAction`.
Concurrency: with the attachment's lock held.
"""

from __future__ import annotations

import collections
import enum
import heapq
import logging
import time
from typing import Any

import numpy as np

from mqd.client.messages import KafkaError, broker_error, local_error
from mqd.client.shm.delivering import Batch, BatchPart, CallReport, Delivery
from mqd.native import NativeError
from mqd.native.client import Delivery as NativeDelivery
from mqd.protocol.errors import ErrorCode, is_retriable

_log = logging.getLogger("mqd.client")
_NEVER = float("inf")
_MISSING_TOPIC = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
_LOST_IDENTITY = frozenset(
    {
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    }
)
_FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED})


class ErrorAction(enum.Enum):
    """What is done with a batch after a broker's error."""

    RETRY = enum.auto()
    RENEW = enum.auto()  # sent again with a new producer id
    FAIL = enum.auto()  # reported; a transaction must be aborted
    FATAL = enum.auto()  # the producer cannot continue


def action_after(error: int, idempotent: bool, transactional: bool, renewing: bool) -> ErrorAction:
    """`renewing`: a new producer id has been requested, so a gap in the old one's sequences is not fatal."""
    if transactional:
        if error in _FENCED:
            return ErrorAction.FATAL
        if error in _LOST_IDENTITY or error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return ErrorAction.FAIL
    elif idempotent:
        if error in _LOST_IDENTITY or (renewing and error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
            return ErrorAction.RENEW
        if error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return ErrorAction.FATAL
    return ErrorAction.RETRY if is_retriable(error) or error == ErrorCode.CORRUPT_MESSAGE else ErrorAction.FAIL


class DeliveryOutcomes:
    """`records_written`, `records_failed` and `batches_retried` are totals for statistics."""

    def __init__(self, producer: Any) -> None:
        config = producer.config
        self._producer = producer
        self.batches: dict[int, Batch] = {}
        # outcomes that the C core has reported and that have not been processed yet
        self._reported: collections.deque[NativeDelivery] = collections.deque()
        self.records_written = 0
        self.records_failed = 0
        self.batches_retried = 0
        self._tracking = False
        self._parked: list[int] = []  # batches that wait for a new producer id
        self._retries: list[tuple[float, int]] = []  # heap of (time, batch number)
        self._retries_max = config["retries"]
        self._backoff_s = config["retry.backoff.ms"] / 1000
        self._backoff_max_s = max(config["retry.backoff.max.ms"] / 1000, self._backoff_s)
        self._timeout_s = config["delivery.timeout.ms"] / 1000 or _NEVER
        self._topic_timeout_s = config["topic.metadata.propagation.max.ms"] / 1000
        self._tick_s = min(max(self._timeout_s / 10, 0.02), 1.0)
        self._tick_at = 0.0
        self._only_errors = config["delivery.report.only.error"]
        self._stage_marks: dict[Any, collections.deque[tuple[float, int]]] = {}

    # -- arriving batches --------------------------------------------------------------------------

    def before_append(self, waiters: Any) -> None:
        """Called before each append. When a caller first waits for a record, closes the open batches,
        because their records were not tracked; from then on the position of every record in its
        batch is tracked.
        """
        if waiters is not None and not self._tracking:
            self._tracking = True
            self._producer.close_open_batches()

    def split_by_batch(self, batch_numbers: np.ndarray, waiters: Any, first_index: int) -> list[tuple[int, BatchPart]]:
        """Returns (batch number, its part of these records) for each batch. `batch_numbers`: for each
        record, the number of its batch. `waiters` None: no caller waits for the records.
        """
        count = len(batch_numbers)
        if (batch_numbers == batch_numbers[0]).all():
            return [
                (
                    int(batch_numbers[0]),
                    (waiters, None if waiters is None else range(first_index, first_index + count), count),
                )
            ]
        if not self._tracking:
            return [(number, (None, None, 0)) for number in np.unique(batch_numbers).tolist()]
        order = np.argsort(batch_numbers, kind="stable")
        ordered = batch_numbers[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        ends = np.append(starts[1:], count)
        parts: list[tuple[int, BatchPart]] = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            indices: Any = None
            if waiters is not None:
                indices = order[start:end] + first_index
                if not isinstance(waiters, CallReport):
                    indices = indices.tolist()
            parts.append((int(ordered[start]), (waiters, indices, end - start)))
        return parts

    def add_records(self, topic: int, parts: list[tuple[int, BatchPart]]) -> None:
        """Adds records that are in the C core. Called again with the same parts after Ctrl-C; completed
        steps are not repeated.
        """
        for number, part in parts:
            batch = self.batches.get(number)
            if batch is None:
                batch = self.batches[number] = Batch(time.monotonic(), topic)
            if self._tracking and not (batch.parts and batch.parts[-1] is part):
                batch.parts.append(part)

    def add_batch(self, topic: int, number: int, parts: list[BatchPart], opened: float) -> None:
        """Adds a batch that was built elsewhere. `opened`: when it was begun (time.monotonic)."""
        batch = self.batches[number] = Batch(opened, topic)
        batch.parts = parts

    # -- outcomes ----------------------------------------------------------------------------------

    def take_deliveries(self, now: float) -> None:
        while self._reported or self._take_from_core():
            outcome = self._reported.popleft()
            try:
                self._handle(outcome, now)
            except BaseException:  # Ctrl-C: the C core reports an outcome only once, so keep it
                self._reported.appendleft(outcome)
                self._producer.attachment.wake()
                raise
        # for threads that wait for room or an outcome; the driving thread checks after every turn
        self._producer.attachment.changed.notify_all()

    def _take_from_core(self) -> bool:
        self._reported.extend(self._producer.native.deliveries())
        return bool(self._reported)

    def _handle(self, outcome: NativeDelivery, now: float) -> None:
        batch = self.batches.get(outcome.batch)
        if batch is None:
            return
        if outcome.error:
            self._on_failure(batch, outcome, now)
            return
        if batch.parts and not self._only_errors:
            self._report(batch, outcome.partition, outcome.base_offset, outcome.timestamp_ms, None)
        del self.batches[outcome.batch]
        self.records_written += outcome.record_count

    def _report(
        self, batch: Batch, partition: int, base_offset: int, timestamp_ms: int, error: KafkaError | None
    ) -> None:
        if any(waiters is not None for waiters, _, _ in batch.parts):
            name = self._producer.stages_by_number[batch.topic].topic
            self._producer.put(Delivery(name, partition, base_offset, timestamp_ms, error, batch.parts))

    def _on_failure(self, batch: Batch, outcome: NativeDelivery, now: float) -> None:
        producer, identity, code = self._producer, self._producer.identity, outcome.error
        action = action_after(code, identity.idempotent, producer.transactions.enabled, identity.renewing)
        if action is ErrorAction.RENEW:
            self._parked.append(outcome.batch)
            identity.renew()
            return
        if action is ErrorAction.FATAL:
            text = f"{producer.stages_by_number[batch.topic].topic} [{outcome.partition}]: {broker_error(code).str()}"
            producer.set_fatal(
                local_error(KafkaError._FENCED if code in _FENCED else code, text, fatal=True),
                (outcome.batch, outcome.partition, broker_error(code)),
            )
            return
        age = now - batch.created
        limit = self._topic_timeout_s if code in _MISSING_TOPIC else _NEVER
        if action is ErrorAction.RETRY and batch.attempts < self._retries_max and age < min(self._timeout_s, limit):
            backoff = min(self._backoff_s * 2 ** min(batch.attempts, 16), self._backoff_max_s)
            batch.attempts += 1
            self.batches_retried += 1
            heapq.heappush(self._retries, (now + backoff, outcome.batch))
            producer.attachment.metadata.expire()
            return
        timed_out = action is ErrorAction.RETRY and age >= self._timeout_s
        self.give_up(
            outcome.batch,
            outcome.partition,
            local_error(KafkaError._MSG_TIMED_OUT) if timed_out else broker_error(code),
        )

    def give_up(self, number: int, partition: int, error: KafkaError) -> None:
        """Reports a batch's records as failed, which leaves a gap in the sequences of an idempotent
        producer. partition -1 = not known here.
        """
        batch = self.batches.pop(number, None)
        if batch is None:
            return
        outstanding_before = self._producer.native.outstanding_records
        self._drop(number)
        self.records_failed += outstanding_before - self._producer.native.outstanding_records
        self._report(batch, partition, -1, -1, error)
        self._producer.identity.on_gap(error)

    def _drop(self, number: int) -> None:
        try:
            self._producer.native.drop(number)
        except NativeError:
            pass  # the batch's response has arrived and is about to be reported

    def drop_all(self, error: KafkaError) -> None:
        """Discards all batches in the C core and in the compressor."""
        self.take_deliveries(time.monotonic())
        for number in list(self.batches):
            self.give_up(number, -1, error)
        self._producer.compressor.drop_all(error)  # after the batches in the C core, whose records are older
        self._producer.attachment.changed.notify_all()

    def retry_parked(self) -> None:
        """Retries the batches that have waited for a new producer id."""
        for number in self._parked:
            self._retry(number)
        self._parked.clear()

    def _retry(self, number: int) -> None:
        if number in self.batches:
            try:
                self._producer.native.retry(number)
            except NativeError as error:
                _log.debug("batch %d is not retried: %s", number, error)

    # -- time --------------------------------------------------------------------------------------

    def on_turn(self, now: float) -> float:
        while self._retries and self._retries[0][0] <= now:
            self._retry(heapq.heappop(self._retries)[1])
        if now >= self._tick_at:
            self._tick_at = now + self._tick_s
            self._expire(now)
        any_waiting = self.batches or self._producer.active or self._producer.compressor.record_count
        return min(
            self._retries[0][0] if self._retries else _NEVER,
            self._tick_at if any_waiting and self._timeout_s < _NEVER else _NEVER,
        )

    def _expire(self, now: float) -> None:
        error = local_error(KafkaError._MSG_TIMED_OUT)
        while self.batches:
            number = next(iter(self.batches))
            if now - self.batches[number].created < self._timeout_s:
                break
            self.give_up(number, -1, error)
        if expired := self._producer.compressor.expire(now - self._timeout_s, error):
            self.records_failed += expired
            self._producer.attachment.changed.notify_all()
        for stage in self._producer.stages.values():
            self._expire_staged(stage, now, error)

    def _expire_staged(self, stage: Any, now: float, error: KafkaError) -> None:
        """Fails staged records that have waited too long. `_stage_marks` has, for each stage, (time, number of
        records produced by then): the staged records before an expired mark have waited too long.
        """
        marks = self._stage_marks.get(stage)
        if not stage.entries:
            if marks is not None:
                del self._stage_marks[stage]
            return
        if marks is None:
            marks = self._stage_marks[stage] = collections.deque()
        marks.append((now, stage.released_count + len(stage.entries)))
        while marks and now - marks[0][0] >= self._timeout_s:
            end = marks.popleft()[1]
            if end > stage.released_count:
                self.records_failed += end - stage.released_count
                self._producer.fail_entries(stage, end - stage.released_count, error)
                self._producer.attachment.changed.notify_all()
