"""Streams a thread's results to a reader. The thread waits while the reader is slow, and stops when
the reader disconnects.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
QUEUED_MAX = 4  # items that wait for a slow reader
STREAMS_MAX = 12
STREAMS_PER_USER_MAX = 6
POLL_S = 0.5


class StreamLimit:
    """Limits the number of running streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running_counts: dict[str, int] = {}  # by user

    def take(self, user: str) -> bool:
        """Returns False if the limit is reached."""
        with self._lock:
            user_count = self._running_counts.get(user, 0)
            if sum(self._running_counts.values()) >= STREAMS_MAX or user_count >= STREAMS_PER_USER_MAX:
                return False
            self._running_counts[user] = user_count + 1
            return True

    def free(self, user: str) -> None:
        with self._lock:
            self._running_counts[user] -= 1
            if not self._running_counts[user]:
                del self._running_counts[user]


async def stream(generate: Callable[[threading.Event], Iterator[T]], on_end: Callable[[], None]) -> AsyncIterator[T]:
    """Yields the items of `generate`, which runs on a thread of its own and gets an event that is set
    when the reader has disconnected. Raises the exceptions of `generate`. Calls `on_end` at the end.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    # (item, None); at the end (None, the exception of `generate`, or StopAsyncIteration)
    queue: asyncio.Queue[Any] = asyncio.Queue(QUEUED_MAX)

    def put(item: Any) -> None:
        waiting = asyncio.run_coroutine_threadsafe(queue.put(item), loop)
        while True:
            try:
                waiting.result(POLL_S)
                return
            except concurrent.futures.TimeoutError:
                if stop.is_set():
                    waiting.cancel()
                    return

    def run() -> None:
        try:
            end: Any = None
            try:
                for item in generate(stop):
                    if stop.is_set():
                        return
                    put((item, None))
            except Exception as error:
                end = error
            if not stop.is_set():
                put((None, end or StopAsyncIteration()))
        except RuntimeError:
            return  # the event loop is closed, because the process is exiting
        finally:
            on_end()

    threading.Thread(target=run, name="stream", daemon=True).start()
    with contextlib.ExitStack() as stack:
        stack.callback(stop.set)
        while True:
            item, end = await queue.get()
            if isinstance(end, StopAsyncIteration):
                return
            if end is not None:
                raise end
            yield item
