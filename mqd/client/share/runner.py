"""Runs a share consumer's core: sends its requests, keeps its timers, and lets the application wait for
its results.

Between the application's calls a background thread runs the core: it sends heartbeats on time and
receives responses to fetches. While the application waits in a call, its own thread runs the core.

    R1  the core is used with `lock` held; requests and callbacks are made without it
    R2  each of the core's requests ends with one on_response(), even if a channel cannot send it
Concurrency: channels call _on_response() in their threads, with their locks held, so it only queues
the response (`_responses`) and wakes a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mqd.client.messages import KafkaError, KafkaException, local_error
from mqd.client.share.channels import Channel, close_all
from mqd.client.share.core import ShareCore
from mqd.client.share.events import Send, Target

WAIT_MAX_S = 60.0
_log = logging.getLogger("mqd.client")


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class ShareRunner:
    """`open_channel(target)` returns a channel without waiting; it is called once for each target. stop()
    closes those channels, and also `channels`, which the caller has opened.
    """

    def __init__(self, core: ShareCore, open_channel: Callable[[Target], Channel], channels: Sequence[Channel] = ()):
        self.core = core
        self.lock = threading.RLock()
        self._open_channel = open_channel
        self._opened_channels = channels
        self._channels: dict[Target, Channel] = {}
        self._responses: deque[tuple[int, Any, KafkaError | None]] = deque()
        self._application_condition = threading.Condition(self.lock)
        self._background_condition = threading.Condition(self.lock)
        self._waiting_count = 0  # threads of the application in wait_for()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="mqd-share-consumer", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[int], Any]) -> Any:
        """Calls function(now_ms), which uses the core, then sends the core's requests."""
        with self.lock:
            result = function(now_ms())
            sends = self._advance_core()
            if not self._waiting_count:
                self._background_condition.notify()  # its next turn may now be due earlier
        self._flush(sends)
        return result

    def wait_for(self, predicate: Callable[[], object], deadline: float) -> bool:
        """Waits until predicate(), which reads the core's state, is true, or until `deadline`
        (time.monotonic).
        """
        with self.lock:
            self._waiting_count += 1
        try:
            while True:
                with self.lock:
                    sends = self._advance_core()
                    if predicate():
                        is_true = True
                        break
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0 or self._is_stopped:
                        is_true = False
                        break
                    if not sends:
                        self._application_condition.wait(min(remaining_s, self._seconds_until_due()))
                self._flush(sends)
        finally:
            with self.lock:
                self._waiting_count -= 1
                self._background_condition.notify()
        self._flush(sends)
        return is_true

    def _seconds_until_due(self) -> float:
        now = now_ms()
        next_ms = self.core.next_ms(now)
        return WAIT_MAX_S if next_ms is None else min(max(next_ms - now, 0) / 1000, WAIT_MAX_S)

    def _advance_core(self) -> list[Send]:
        """Passes responses to the core and returns the requests that are due. With the lock held."""
        now = now_ms()
        while self._responses:
            number, response, error = self._responses.popleft()
            self.core.on_response(number, response, error, now)
        self.core.advance(now)
        return self.core.take_sends()

    def _flush(self, sends: list[Send]) -> None:
        """Sends requests. Without the lock, because a channel has its own locks."""
        for send in sends:
            try:
                self._channel(send.target).send(send, partial(self._on_response, send.number))
            except (KafkaException, OSError) as problem:
                error = (
                    problem.args[0]
                    if isinstance(problem, KafkaException)
                    else local_error(KafkaError._TRANSPORT, str(problem), retriable=True)
                )
                self._on_response(send.number, None, error)

    def _channel(self, target: Target) -> Channel:
        with self.lock:
            channel = self._channels.get(target)
            if channel is None:
                channel = self._channels[target] = self._open_channel(target)
            return channel

    def _on_response(self, number: int, response: Any, error: KafkaError | None) -> None:
        with self.lock:
            if error is not None:
                _log.debug("share consumer: %s", error.str())
            self._responses.append((number, response, error))
            if self._waiting_count:
                self._application_condition.notify()
            else:
                self._background_condition.notify()

    def _run(self) -> None:
        """The background thread."""
        try:
            while self._background_turn():
                pass
        # a bug in mqd: without this error heartbeats would stop silently, and calls would wait forever
        except Exception as error:
            _log.exception("the share consumer has failed")
            with self.lock:
                self.core.fail(KafkaError._FATAL, f"a fault in the client: {error!r}")
                self._application_condition.notify_all()

    def _background_turn(self) -> bool:
        with self.lock:
            if self._is_stopped:
                return False
            sends = [] if self._waiting_count else self._advance_core()
            if not sends:
                self._background_condition.wait(WAIT_MAX_S if self._waiting_count else self._seconds_until_due())
        self._flush(sends)
        return True

    def stop(self) -> None:
        """Ends immediately; requests under way are lost. A second call has no effect."""
        with self.lock:
            self._is_stopped = True
            channels, self._channels = list(self._channels.values()), {}
            self._background_condition.notify()
            self._application_condition.notify_all()
        close_all([*channels, *self._opened_channels])
