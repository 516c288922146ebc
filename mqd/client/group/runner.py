"""Runs a group membership core: sends its requests, keeps its timers, and passes on the actions for
the application.

The runner is a listener on the attachment (client/shm/attachment.py), which is the consumer's
connection to the broker. The thread that drives the attachment (mostly the background thread) also
runs the core, so a member stays in its group while the application is busy, and no thread wakes up
while there is nothing to do.

    R1  the core is called with `lock` held, and makes no callbacks. The attachment's lock may be
        held when `lock` is taken, but is never taken while `lock` is held
    R2  actions for the application (Assign, Revoke, Lost, Problem, Left) go to `notify`, in order; the
        application's thread ends each of the first three with done()
    R3  a response goes to the core that sent the request: when the attachment is lost, every
        request under way ends with ResponseMissing
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mqd.client.group.coordinator import CoordinatorLookup
from mqd.client.group.events import (
    Action,
    Done,
    Event,
    Leave,
    Polled,
    Resolve,
    ResponseMissing,
    ResponseReceived,
    Send,
    Subscribe,
    Tick,
    TopicsKnown,
)
from mqd.client.group.events import Left as Left
from mqd.client.group.events import Partitions as Partitions
from mqd.client.group.events import Problem as Problem
from mqd.client.messages import KafkaError
from mqd.client.offsets import COORDINATOR_UNAVAILABLE

POLLED_EVERY_S = 0.25  # the core is informed of poll() at most this often


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class GroupRunner:
    """`core`: a membership core. `notify(action)` is called in any thread and must not block.
    `has_progressed()`: whether poll() has returned a record since the last call.
    """

    def __init__(
        self,
        attachment: Any,
        coordinator: CoordinatorLookup,
        core: Any,
        notify: Callable[[Action], None],
        has_progressed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.core = core
        self.lock = threading.Lock()
        self.is_polling = False
        self._attachment = attachment
        self._notify = notify
        self._has_progressed = has_progressed
        self._events: deque[Event] = deque()
        self._unsent: deque[Send] = deque()
        self._polled_at = 0.0
        self._pending_resolve: Resolve | None = None
        self._resolve_version = self._known_version = -1
        self._coordinator = coordinator
        self._may_send = False
        attachment.subscribe(self)
        coordinator.when_known(self._on_coordinator_known)

    # -- the application's thread ------------------------------------------------------------------

    def subscribe(self, topics: tuple[str, ...], regex: str | None) -> None:
        metadata = self._attachment.metadata
        with self._attachment.lock:
            if regex is not None or any(topic not in metadata.topics for topic in topics):
                # the assignment will have topic ids, whose names must be known
                metadata.refresh(None if regex is not None else topics)
        self._pass_to_core(Subscribe(topics, regex))

    def leave(self) -> None:
        self._pass_to_core(Leave())

    def done(self) -> None:
        self._pass_to_core(Done())

    def note_poll(self) -> None:
        """Called by every poll(), except when it only returns buffered records."""
        now = time.monotonic()
        if now - self._polled_at >= POLLED_EVERY_S or self.core.wants_poll:
            self._polled_at = now
            self._pass_to_core(Polled())

    def identity(self) -> tuple[str, int]:
        """Returns (member id, generation) for commits; generation -1: not a member."""
        with self.lock:
            return self.core.member_id, self.core.generation

    def _pass_to_core(self, *events: Event) -> None:
        """Passes events from any thread to the core. The core's requests are sent with the
        attachment's lock held, which is taken only after `lock` is released.
        """
        with self.lock:
            self._handle(events)
            due = self._due()
        if self._unsent or self._pending_resolve is not None:
            with self._attachment.lock:
                if not self._attachment.is_closed:
                    self._flush()
        self._attachment.wake_by(due if due is not None else float("inf"))

    def _handle(self, events: tuple[Event, ...]) -> None:
        for event in events:
            for action in self.core.handle(event, now_ms()):
                if isinstance(action, Send):
                    self._unsent.append(action)
                elif isinstance(action, Resolve):
                    self._pending_resolve, self._resolve_version = action, -1
                else:
                    self._notify(action)

    def _due(self) -> float | None:
        next_ms = self.core.next_ms
        return None if next_ms is None else time.monotonic() + (next_ms - now_ms()) / 1000

    # -- the attachment's turns: with its lock held ------------------------------------------------

    def _on_coordinator_known(self) -> None:
        self._may_send = True
        self._flush()

    def _flush(self) -> None:
        attachment = self._attachment
        while self._unsent and self._may_send:
            send = self._unsent.popleft()
            version = attachment.api.pick(send.api_key, send.version_max)
            attachment.send(
                send.api_key,
                version,
                send.message,
                lambda response, error, number=send.number: self._on_response(number, response, error),
                self.core.timeout_s(send),
            )
        if self._pending_resolve is not None and self._resolve_version < 0:
            self._resolve_version = attachment.metadata.version
            topics = self._pending_resolve.topics
            attachment.metadata.refresh(None if self._pending_resolve.topic_ids or topics is None else topics)

    def _on_response(self, number: int, response: Any, error: KafkaError | None) -> None:
        if error is None and response.error_code in COORDINATOR_UNAVAILABLE:
            self._coordinator.look_up()
        self._events.append(ResponseMissing(number) if error is not None else ResponseReceived(number, response))

    def on_turn(self, _now: float) -> float | None:
        attachment = self._attachment
        if self._known_version != attachment.metadata.version:
            counts = {
                name: 0 if topic.error or topic.is_internal else topic.partition_count
                for name, topic in attachment.metadata.topics.items()
            }
            self._events.append(TopicsKnown(dict(attachment.metadata.names), counts))
            if 0 <= self._resolve_version != attachment.metadata.version:
                self._pending_resolve = None
        self._known_version = attachment.metadata.version
        with self.lock:
            events, self._events = tuple(self._events), deque()
            self._handle(events)
            if self.core.next_ms is not None and self.core.next_ms <= now_ms():
                self._handle((Tick(self.is_polling or self._has_progressed()),))
            due = self._due()
        self._flush()
        return due

    def on_lost(self, _error: KafkaError) -> None:
        """Does nothing: the attachment has ended every request itself."""

    def on_reattached(self, _old: Any, _new: Any) -> None:
        pass

    def close(self) -> None:
        self._attachment.unsubscribe(self)
