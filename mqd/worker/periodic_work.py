"""Ticks for the periodic work of a worker. While its reactor is idle (nothing is connected,
and nothing waits to be flushed; native/server/api.h:mqd_reactor_is_idle), they slow down to one
every IDLE_S.

    async for _ in periodic_work.ticks(1.0):
        work()

The work runs at least once after the reactor has become idle, to see the last change. It runs again
as soon as the reactor resumes. Concurrency: the event loop's thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from mqd.base import clock

IDLE_S = 60.0


def never() -> bool:
    return False


class PeriodicWork:
    """`is_idle()`: whether the reactor is idle."""

    def __init__(self, is_idle: Callable[[], bool] = never):
        self._is_idle = is_idle
        self._resumed = asyncio.Event()
        self.resumed_count = 0

    def is_idle(self) -> bool:
        return self._is_idle()

    def on_resumed(self) -> None:
        """The reactor is no longer idle (MQD_EVENT_RESUMED)."""
        self.resumed_count += 1
        self._resumed.set()

    async def ticks(self, period_s: float, is_needed: Callable[[], bool] = never) -> AsyncIterator[None]:
        """Yields forever, at multiples of the period. `is_needed()`: whether there is work
        although the reactor is idle.
        """
        pace = Pace(self, is_needed)
        while True:
            self._resumed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pace.wait_s(period_s)):
                    await self._resumed.wait()
            yield


class Pace:
    """Determines how long to wait before one kind of work is repeated."""

    def __init__(self, periodic_work: PeriodicWork, is_needed: Callable[[], bool] = never):
        self._periodic_work = periodic_work
        self._is_needed = is_needed
        self._idle_resumed_count = -1  # resumed_count at the last call, if the reactor was idle then; otherwise -1

    def wait_s(self, period_s: float) -> float:
        earlier_count, self._idle_resumed_count = self._idle_resumed_count, -1
        if self._periodic_work.is_idle() and not self._is_needed():
            self._idle_resumed_count = self._periodic_work.resumed_count
        return (
            IDLE_S
            if self._idle_resumed_count >= 0 and self._idle_resumed_count == earlier_count
            else clock.seconds_until_tick(period_s)
        )
