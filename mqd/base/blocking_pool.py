"""Queries to systems that may hang, mainly file systems. They run in threads that are not joined at
exit (those of an executor are).
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
    """A future of the result. Raises RuntimeError: no thread can be started."""
    loop = asyncio.get_running_loop()
    response: asyncio.Future[T] = loop.create_future()

    def resolve(found: T) -> None:
        if not response.done():
            response.set_result(found)

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
        """From now on the query no longer waits for the target: it may take arbitrarily long."""
        self.last_step_s = math.inf

    async def wait_until_ended(self, silent_s: float) -> bool:
        """False: the query has made no progress for `silent_s`, and has not ended."""
        while not self.response.done():
            left_s = self.last_step_s + silent_s - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait({self.response}, timeout=left_s)
        return True


class BlockingQueries:
    """Each target gets one query at a time, so that a target that hangs occupies one thread, however
    many callers query it. Concurrency: the event loop's thread.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, QueryProgress] = {}

    async def run(self, target: Hashable, query: Callable[[Callable[[], None]], T], silent_s: float) -> T:
        """`query` gets a function to call whenever it has made progress. Raises TimeoutError if
        `target` has made no progress for `silent_s`, counting the previous query too. RuntimeError:
        no thread can be started.
        """
        # a query that has ended may still be listed
        while (before := self._under_way.get(target)) is not None and not before.response.done():
            if not await before.wait_until_ended(silent_s):
                raise TimeoutError(f"{target} does not respond")
        mine = QueryProgress()
        mine.response = in_thread(lambda: query(mine.step))
        self._under_way[target] = mine  # only once it has a thread
        mine.response.add_done_callback(lambda _: self._forget(target, mine))
        if not await mine.wait_until_ended(silent_s):
            raise TimeoutError(f"{target} does not respond")
        return mine.response.result()

    def _forget(self, target: Hashable, done: QueryProgress) -> None:
        """Removes `done`, unless the target's next query has already replaced it."""
        if self._under_way.get(target) is done:
            del self._under_way[target]
