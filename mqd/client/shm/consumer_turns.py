"""The work of a shared-memory consumer in its attachments' threads: it wakes waiting callers and
puts due callbacks into the inbox.

These threads must not run the consumer's code. At most one callback for errors and one for
statistics is pending, with the newest value, because the application may not call poll() for a
long time.
Concurrency: the attachments' threads, with their locks held.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mqd.client.group.rebalancing import Call
from mqd.client.messages import KafkaError


class ControlListener:
    """The listener of the attachment for requests; the fetch attachment has a DataListener. Attachments
    hold listeners weakly, so no attachment keeps the consumer alive.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._version = -1
        self._is_loss_reported = False  # whether the current loss of the attachment was reported to error_cb
        self._error: deque[KafkaError] = deque(maxlen=1)  # the newest error for error_cb
        self._is_error_queued = False
        self.data = DataListener(consumer)

    def on_turn(self, now: float) -> float | None:
        consumer = self._consumer
        version = consumer.control.metadata.version
        if version != self._version:
            self._version = version
            consumer._inbox.notify()  # for consumers that are starting, subscribed, or reading from another host
        if now >= consumer._statistics.due:
            consumer._statistics.put(consumer._inbox, now)
        if now >= consumer._offsets.due:
            if not consumer._inbox.attention:
                consumer._inbox.notify()
            return consumer._statistics.due
        return min(consumer._offsets.due, consumer._statistics.due)

    def on_lost(self, error: KafkaError) -> None:
        if self._consumer.config["error_cb"] is not None and (error.fatal() or not self._is_loss_reported):
            self._error.append(error)
            if not self._is_error_queued:
                self._is_error_queued = True
                self._consumer._inbox.put_operation(Call(self._call_error_callback, ()))
        self._is_loss_reported = True
        if error.fatal():
            self._consumer._inbox.notify()

    def _call_error_callback(self) -> None:
        """Calls error_cb. On the application's thread."""
        # before reading the error: a later error is reported by this call or by the next one
        self._is_error_queued = False
        if self._error:
            self._consumer.config["error_cb"](self._error.pop())

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._is_loss_reported = False
        self._consumer._inbox.notify()


class DataListener:
    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def on_turn(self, _now: float) -> float | None:
        return None

    def on_lost(self, _error: KafkaError) -> None:
        self._consumer._inbox.notify()

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._consumer._inbox.notify()
