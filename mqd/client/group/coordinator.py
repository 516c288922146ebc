"""Looks up a group's coordinator. Over shared memory, requests always go to this broker, but the
lookup is needed: only a lookup makes a broker that has never had a group create the offsets topic.

The lookup is done when the consumer is created, and again after an error that says that the
coordinator is unavailable. when_known() delays requests until the first lookup has succeeded, but
not for longer than WAIT_MAX_S.
Concurrency: with the attachment's lock held, except for look_up() and when_known(), which take it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException
from mqd.protocol.messages import FindCoordinatorRequest

RETRY_S = 0.1
WAIT_MAX_S = 5.0  # after the consumer's creation; then requests are sent even without a successful lookup
_VERSION_MAX = 6


class CoordinatorLookup:
    def __init__(self, attachment: Any, group_id: str) -> None:
        self._attachment, self._group_id = attachment, group_id
        self._is_known = self._is_under_way = False
        self._waiting_callbacks: list[Callable[[], None]] = []
        self._retry_at: float | None = None
        self._give_up_at = time.monotonic() + WAIT_MAX_S
        attachment.subscribe(self)
        self.look_up()

    def look_up(self) -> None:
        """Starts a lookup; does not wait for it."""
        with self._attachment.lock:
            if not self._is_under_way and self._retry_at is None:
                self._retry_at = time.monotonic()
                self._send()

    def when_known(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the first lookup has succeeded (or after WAIT_MAX_S): immediately if that
        was earlier. The attachment's lock is held during the call.
        """
        with self._attachment.lock:
            if self._is_known:
                callback()
            else:
                self._waiting_callbacks.append(callback)
                self._attachment.wake_by(self._give_up_at)

    def _send(self) -> None:
        attachment = self._attachment
        if attachment.is_closed or not attachment.attached:
            return
        version = attachment.api.pick(requests.FIND_COORDINATOR, _VERSION_MAX)
        message = (
            FindCoordinatorRequest(coordinator_keys=[self._group_id])
            if version >= 4
            else FindCoordinatorRequest(key=self._group_id)
        )
        self._is_under_way, self._retry_at = True, None
        try:
            attachment.send(requests.FIND_COORDINATOR, version, message, self._on_response)
        except KafkaException:
            self._is_under_way = False

    def _on_response(self, response: Any, error: KafkaError | None) -> None:
        self._is_under_way = False
        code = (
            response.coordinators[0].error_code
            if error is None and response.coordinators
            else getattr(response, "error_code", 0)
        )
        if error is None and not code:
            self._run_waiting()
        else:
            self._retry_at = time.monotonic() + RETRY_S

    def _run_waiting(self) -> None:
        self._is_known = True
        waiting, self._waiting_callbacks = self._waiting_callbacks, []
        for callback in waiting:
            callback()

    def on_turn(self, now: float) -> float | None:
        if self._waiting_callbacks and now >= self._give_up_at:
            self._run_waiting()
        if self._retry_at is not None and now >= self._retry_at and not self._is_under_way:
            self._send()
        # While the broker is gone no retry is due: a due time in the past would cause one turn after
        # another without a pause. The first turn after reattaching sends the request.
        due = self._retry_at if self._attachment.attached else None
        if not self._waiting_callbacks:
            return due
        return self._give_up_at if due is None else min(due, self._give_up_at)

    def on_lost(self, _error: KafkaError) -> None:
        pass

    def on_reattached(self, _old: Any, _new: Any) -> None:
        if not self._is_known:
            self._retry_at = time.monotonic()
