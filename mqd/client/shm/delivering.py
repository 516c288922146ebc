"""Turns outcomes of batches into delivery reports for the application.

The driver queues an event when it has the outcome of a batch; poll() or flush(), in a thread of the
application, turns it into messages and calls the callbacks. Reports of one partition come in the
order of their records.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from mqd.client.messages import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, BatchDelivery, KafkaError, Message
from mqd.client.shm.staging import FullEntry

BatchPart = tuple[Any, Any, int]  # see Delivery


class Batch:
    """A batch in the C core, until its outcome is known. `parts`: (waiters, indices, count) in the
    order of its records; see Delivery.
    """

    __slots__ = ("attempts", "created", "parts", "topic")

    def __init__(self, created: float, topic: int) -> None:
        self.created = created
        self.topic = topic  # number in the C core
        self.attempts = 0
        self.parts: list[BatchPart] = []


class CallReport:
    """The callback of one produce_batch call."""

    __slots__ = ("began", "on_delivery")

    def __init__(self, on_delivery: Callable[[KafkaError | None, BatchDelivery], None]) -> None:
        self.on_delivery, self.began = on_delivery, time.monotonic()


class Delivery:
    """An event: records of one partition with one outcome.

    A part is (waiters, indices, count) for the next `count` records: `waiters` is a list of FullEntry or
    one CallReport, and `indices` are the records' positions in that list or in the reported call.
    (None, None, count): no caller waits for these records.
    """

    __slots__ = ("base_offset", "error", "pending_count", "log_append_ms", "parts", "partition", "topic")

    def __init__(
        self,
        topic: str,
        partition: int,
        base_offset: int,
        log_append_ms: int,
        error: KafkaError | None,
        parts: list[BatchPart],
    ) -> None:
        self.topic, self.partition, self.base_offset, self.log_append_ms, self.error, self.parts = (
            topic,
            partition,
            base_offset,
            log_append_ms,
            error,
            parts,
        )
        self.pending_count = sum(_callback_count(waiters, indices) for waiters, indices, _ in parts)

    def count_pending_calls(self) -> int:
        """Returns the number of callbacks that are still to be called."""
        return self.pending_count

    def call(self) -> int:
        """Calls the callbacks; returns their number. When one raises, the later reports are kept, and the
        next call() continues with them.
        """
        call_count, parts, position = 0, self.parts, 0
        for number, (waiters, indices, count) in enumerate(parts):
            offset = self.base_offset + position if self.base_offset >= 0 else None
            if isinstance(waiters, CallReport):
                self.parts = [(None, None, position + count), *parts[number + 1 :]]
                self.pending_count -= 1
                call_count += 1
                waiters.on_delivery(
                    self.error,
                    BatchDelivery(self.topic, self.partition, offset, indices, time.monotonic() - waiters.began),
                )
            elif waiters is not None:
                call_count += self._call_entries(waiters, indices, offset, parts[number + 1 :], position)
            position += count
        return call_count

    def _call_entries(
        self, entries: list[FullEntry], indices: Any, first_offset: int | None, later: list[BatchPart], position: int
    ) -> int:
        call_count, now, error, has_append_time = 0, time.monotonic(), self.error, self.log_append_ms >= 0
        topic, partition, offset = self.topic, self.partition if self.partition >= 0 else None, None
        for nth, index in enumerate(indices):
            value, key, _, timestamp_ms, _, on_delivery, began, headers = entries[index]
            if on_delivery is None:
                continue
            if first_offset is not None:
                offset = first_offset + nth
            timestamp = (
                (TIMESTAMP_LOG_APPEND_TIME, self.log_append_ms)
                if has_append_time
                else (TIMESTAMP_CREATE_TIME, timestamp_ms)
            )
            call_count += 1
            try:
                on_delivery(
                    error, Message(topic, partition, offset, key, value, headers, error, timestamp, now - began)
                )
            except BaseException:
                self.pending_count -= call_count
                self.parts = [
                    (None, None, position + nth + 1),
                    (entries, indices[nth + 1 :], len(indices) - nth - 1),
                    *later,
                ]
                raise
        self.pending_count -= call_count
        return call_count


def _callback_count(waiters: Any, indices: Any) -> int:
    if waiters is None:
        return 0
    return 1 if isinstance(waiters, CallReport) else sum([waiters[index].on_delivery is not None for index in indices])


class ErrorEvent:
    """An error for error_cb."""

    __slots__ = ("callback", "error")

    def __init__(self, callback: Callable[[KafkaError], None], error: KafkaError) -> None:
        self.callback, self.error = callback, error

    def count_pending_calls(self) -> int:
        return 0  # not a report of a record

    def call(self) -> int:
        self.callback(self.error)
        return 1


class Events:
    """Events for poll(), oldest first. `pending_call_count`: how many delivery callbacks they have
    yet to call; the records of these callbacks count as outstanding.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[Any] = collections.deque()
        self.pending_call_count = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, event: Any) -> None:
        """Queues an event. With the attachment's lock held."""
        self.pending_call_count += event.count_pending_calls()
        self._queue.append(event)

    def run_callbacks(self, lock: Any) -> int:
        """Calls the callbacks of all queued events; returns their number. Takes the lock only to update
        `pending_call_count`. When a callback raises, later events stay queued.
        """
        call_count, queue = 0, self._queue
        for _ in range(len(queue)):
            try:
                event = queue.popleft()
            except IndexError:  # another thread has taken them
                break
            pending_before = event.count_pending_calls()
            try:
                call_count += event.call()
            except BaseException:
                if event.count_pending_calls():
                    queue.appendleft(event)
                raise
            finally:
                with lock:
                    self.pending_call_count -= pending_before - event.count_pending_calls()
        return call_count
