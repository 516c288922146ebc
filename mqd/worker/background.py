"""Threads for blocking work. `urgent` threads open and close partitions; `slow` threads, at low
priority, do work that no caller waits for. Each log directory has its own threads, so that a
hanging one does not block work in the others.

Bound: URGENT_COUNT + 1 threads for each log directory, and as many for other work; threads are
created on first use.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

NO_LOG_DIR = -1  # for work in no particular log directory
# recovery reads and checks with the GIL released; more threads would only make a disk seek more
URGENT_COUNT = 4
SLOW_NICENESS = 10
# When a worker ends, work without progress for this long counts as hanging: the keeper kills the
# worker after 25 s.
HANG_S = 8.0


def _lower_priority() -> None:
    try:
        # on Linux niceness is per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
    except OSError:
        pass  # not permitted here: only the priority is affected


async def run_unless_hung(work: Coroutine[Any, Any, None], last_step_s: Callable[[], float]) -> bool:
    """Runs `work`. Returns True when it has ended, or False if it was abandoned because its last
    step is more than HANG_S ago. `last_step_s()` returns the time of that step by the loop's clock.
    A thread that abandoned work uses keeps running. Raises what the work raises.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    while not task.done():
        remaining_s = last_step_s() + HANG_S - loop.time()
        if remaining_s <= 0:
            task.cancel()
            await asyncio.wait({task})
            return False
        await asyncio.wait({task}, timeout=remaining_s)
    task.result()
    return True


class Background:
    def __init__(self) -> None:
        self._urgent: dict[int, ThreadPoolExecutor] = {}
        self._slow: dict[int, ThreadPoolExecutor] = {}

    async def urgent(self, log_dir: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs `work` in a thread, up to URGENT_COUNT at a time for each log directory."""
        if log_dir not in self._urgent:
            self._urgent[log_dir] = ThreadPoolExecutor(
                URGENT_COUNT, "urgent" if log_dir == NO_LOG_DIR else f"urgent-{log_dir}"
            )
        return await asyncio.get_running_loop().run_in_executor(self._urgent[log_dir], work, *arguments)

    async def slow(self, log_dir: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs `work` in a thread, one at a time for each log directory: a stalled disk delays only
        its own work, and no two pieces of work on a log directory overlap.
        """
        if log_dir not in self._slow:
            self._slow[log_dir] = ThreadPoolExecutor(1, f"slow-{log_dir}", initializer=_lower_priority)
        return await asyncio.get_running_loop().run_in_executor(self._slow[log_dir], work, *arguments)

    def close(self) -> None:
        """Lets running work end; work that has not begun is dropped."""
        for pool in [*self._slow.values(), *self._urgent.values()]:
            pool.shutdown(wait=True, cancel_futures=True)
