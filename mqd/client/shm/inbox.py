"""Queues of work from other threads for the application's thread: responses to its requests, and
changes of its group.

Each put() sets `attention`, which poll() checks before it returns a message, and wakes the sleeping
consumer. Concurrency: put() from any thread, even with an attachment's lock
held; the rest by the application's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    __slots__ = ("_wake", "responses", "attention", "operations")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        # handled by every call in which the application's thread waits
        self.responses: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        # carried out only by poll() and consume(), because operations call the user's functions
        self.operations: deque[Any] = deque()
        self.attention = False

    def put(self, handler: Callable[..., None], *arguments: Any) -> None:
        self.responses.append((handler, arguments))
        self.notify()

    def put_operation(self, operation: Any) -> None:
        self.operations.append(operation)
        self.notify()

    def notify(self) -> None:
        self.attention = True
        self._wake()

    def handle_responses(self) -> None:
        """Processes the responses that have arrived."""
        while self.responses:
            handler, arguments = self.responses.popleft()
            handler(*arguments)
