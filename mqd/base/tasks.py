"""Work of an event loop: work that it repeats, and work that becomes a task only when it waits."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from mqd.base import logging


class Periodic:
    """Waits for `interval_s()`, then does `work()`, again and again. An exception is logged with the
    text `failure`, and does not end it. Concurrency: the event loop's thread.
    """

    def __init__(
        self, interval_s: Callable[[], float], work: Callable[[], Awaitable[None]], log: logging.Logger, failure: str
    ) -> None:
        self._interval_s, self._work = interval_s, work
        self._log, self._failure = log, failure
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s())
            try:
                await self._work()
            except Exception:
                self._log.exception(self._failure)


def begin(work: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
    """Runs the work up to where it first waits, without a task: for work that does not wait, a task
    would cost two more turns of the event loop. Returns the rest, to be made a task; None: it has
    ended. Raises the work's exceptions.

    Until it first waits it must not need a task: asyncio.timeout() does, for example.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return _rest(work, waits_for)


async def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _continued(work, waits_for)


@types.coroutine
def _continued(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # of what it awaited, or a cancellation: the work handles it
                waits_for = work.throw(error)
            else:
                waits_for = work.send(sent)
    except StopIteration:
        return
