"""What a consumer on shared memory has done in its attachments' threads: whoever waits is woken, callbacks that are due are put into the inbox.

They must not run the consumer's code. Concurrency: the attachments' threads, with their locks held.
"""

from __future__ import annotations

from typing import Any

from mqd.client.messages import KafkaError
from mqd.client.rebalancing import Call


class Turns:
    """The attachments' listener: it must not keep the consumer alive, nor run its code."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._version = -1
        self._told = False  # error_cb, of this loss
        self.data = DataTurns(consumer)

    def on_turn(self, now: float) -> float | None:
        consumer = self._consumer
        version = consumer.control.metadata.version
        if version != self._version:
            self._version = version
            if consumer._fetcher._starting or consumer._subscription:
                consumer._inbox.notice()
        if now >= consumer._statistics.due:
            consumer._inbox.put_operation(consumer._statistics.call(now))
        if now >= consumer._offsets.due:
            if not consumer._inbox.attention:
                consumer._inbox.notice()
            return consumer._statistics.due
        return min(consumer._offsets.due, consumer._statistics.due)

    def on_lost(self, error: KafkaError) -> None:
        callback = self._consumer.config["error_cb"]
        if callback is not None and (error.fatal() or not self._told):
            self._consumer._inbox.put_operation(Call(callback, (error,)))
        self._told = True
        if error.fatal():
            self._consumer._inbox.notice()

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._told = False
        self._consumer._inbox.notice()


class DataTurns:
    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def on_turn(self, _now: float) -> float | None:
        return None

    def on_lost(self, _error: KafkaError) -> None:
        self._consumer._inbox.notice()

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._consumer._inbox.notice()
