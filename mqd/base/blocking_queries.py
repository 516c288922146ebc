"""Runs queries to systems that may hang, mainly file systems, in threads that are not joined at
exit (an executor's threads would be).
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(query: Callable[[], T]) -> "asyncio.Future[T]":
    """Returns a future for the result. Raises RuntimeError if no thread can be started."""
    loop = asyncio.get_running_loop()
    response: asyncio.Future[T] = loop.create_future()

    def resolve(result: T) -> None:
        if not response.done():
            response.set_result(result)

    def fail(error: Exception) -> None:
        if not response.done():
            response.set_exception(error)

    def call() -> None:
        deliver: Callable[[], None]
        try:
            deliver = partial(resolve, query())
        except StopIteration as error:  # a future does not accept it
            deliver = partial(fail, RuntimeError(f"a query has raised StopIteration: {error.value!r}"))
        except Exception as error:
            deliver = partial(fail, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(deliver)

    threading.Thread(target=call, name="blocking-query", daemon=True).start()
    return response


class QueryProgress:
    """The progress of a running query: reported from its thread, checked by its caller."""

    def __init__(self) -> None:
        self.last_step_s = time.monotonic()
        self.response: asyncio.Future[Any]

    def step(self) -> None:
        self.last_step_s = time.monotonic()

    def stop_timing(self) -> None:
        """Call this when the query no longer waits for its target: from then on it has no timeout."""
        self.last_step_s = math.inf

    async def wait_until_ended(self, progress_timeout_s: float) -> bool:
        """Returns False if the query has not ended and has made no progress for
        `progress_timeout_s`.
        """
        while not self.response.done():
            remaining_s = self.last_step_s + progress_timeout_s - time.monotonic()
            if remaining_s <= 0:
                return False
            await asyncio.wait({self.response}, timeout=remaining_s)
        return True


class BlockingQueries:
    """Runs at most one query per target at a time, so that a target that hangs occupies only one
    thread, however many callers query it. Concurrency: the event loop's thread.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, QueryProgress] = {}

    async def run(self, target: Hashable, query: Callable[[Callable[[], None]], T], progress_timeout_s: float) -> T:
        """`query` gets a function to call whenever it has made progress. Raises TimeoutError if the
        query, or the previous one that it waits for, makes no progress for `progress_timeout_s`;
        RuntimeError if no thread can be started.
        """
        # a query that has ended may still be listed
        while (previous := self._running.get(target)) is not None and not previous.response.done():
            if not await previous.wait_until_ended(progress_timeout_s):
                raise TimeoutError(f"{target} does not respond")
        progress = QueryProgress()
        progress.response = in_thread(lambda: query(progress.step))
        self._running[target] = progress  # only after its thread was started
        progress.response.add_done_callback(lambda _: self._forget(target, progress))
        if not await progress.wait_until_ended(progress_timeout_s):
            raise TimeoutError(f"{target} does not respond")
        return progress.response.result()

    def _forget(self, target: Hashable, ended: QueryProgress) -> None:
        """Removes `ended`, unless the target's next query has already replaced it."""
        if self._running.get(target) is ended:
            del self._running[target]
