"""Threads for what blocks. `urgent` ones open and close partitions; `slow` ones, one per log directory and at low priority, do what nobody waits for.

Bound: URGENT_COUNT threads and one per log directory; threads are made when first used.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

URGENT_COUNT = 4  # recovery reads and checks with the GIL released; more would only make one disk seek
SLOW_NICENESS = 10


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)  # on Linux niceness belongs to the thread
    except OSError:
        pass  # not allowed here: the work is still right


class Background:
    def __init__(self) -> None:
        self._urgent = ThreadPoolExecutor(URGENT_COUNT, "urgent")
        self._slow: dict[int, ThreadPoolExecutor] = {}

    async def urgent(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._urgent, work, *arguments)

    async def slow(self, log_dir: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """One at a time for each log directory: a stalled disk holds up its own work only, and pieces of it never overlap."""
        if log_dir not in self._slow:
            self._slow[log_dir] = ThreadPoolExecutor(1, f"slow-{log_dir}", initializer=_lower_priority)
        return await asyncio.get_running_loop().run_in_executor(self._slow[log_dir], work, *arguments)

    def close(self) -> None:
        """Lets what runs end; what has not begun is dropped."""
        for pool in [*self._slow.values(), self._urgent]:
            pool.shutdown(wait=True, cancel_futures=True)
