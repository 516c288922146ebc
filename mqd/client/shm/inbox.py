"""What other threads have for the application's thread: answers to its requests, and what its group
wants of it.

Whoever puts something in sets the consumer's `attention`, which poll() looks at before it hands out
a message, and wakes it where it sleeps. Concurrency: put() from any thread, also with an
attachment's lock held; the rest by the application's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    __slots__ = ("_wake", "answers", "attention", "operations")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        # served wherever the application's thread waits
        self.answers: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.operations: deque[Any] = deque()  # served by poll() and consume() alone: they call the user's functions
        self.attention = False

    def put(self, handler: Callable[..., None], *arguments: Any) -> None:
        self.answers.append((handler, arguments))
        self.notice()

    def put_operation(self, operation: Any) -> None:
        self.operations.append(operation)
        self.notice()

    def notice(self) -> None:
        self.attention = True
        self._wake()

    def serve(self) -> None:
        """Carries out what has been answered."""
        while self.answers:
            handler, arguments = self.answers.popleft()
            handler(*arguments)
