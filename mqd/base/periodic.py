"""Work that an event loop repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
