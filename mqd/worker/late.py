"""Ends of partitions, closed or deleted, in a log directory that does not answer: nobody waits for them longer than ANSWER_S. They go on by themselves, and are done when the directory answers.

Z1  while the end of a partition is late nothing is opened in its slot, in its place or of its key, and nothing else ends there: what a late end does meets nothing that came after it.
Z2  a slot whose partition the reactor has not given back is not told as free (PartitionSet.in_force): another worker may be given it.

Bound: one task for each partition that ends. Concurrency: the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mqd.base import logging
from mqd.worker.catalog import Owned

ANSWER_S = 5.0
LATE_ANSWER_S = 0.5  # of a directory in which something is late already


class LateEnds:
    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self._late: dict[asyncio.Task[None], Owned] = {}
        self._log = logging.get("worker.late")

    async def run(self, owned: Owned, work: Coroutine[Any, Any, None]) -> None:
        """Returns when it has ended, or is late. Raises what it raises by then."""
        patience_s = LATE_ANSWER_S if self.of_directory(owned.log_dir) else ANSWER_S
        task = asyncio.get_running_loop().create_task(self._behind(self.before(owned), work))
        try:
            done, _ = await asyncio.wait({task}, timeout=patience_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return task.result()
        self._log.error("log directory does not answer: what is closed or deleted there goes on when it does", partition=owned.name, log_dir=owned.log_dir)
        self._late[task] = owned
        task.add_done_callback(self._on_done)

    async def _behind(self, before: list[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        try:
            if before:
                await asyncio.wait(before)
            await work
        finally:
            work.close()  # it has not begun, if this was cancelled

    def _on_done(self, task: asyncio.Task[None]) -> None:
        owned = self._late.pop(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            self._log.error("partition did not end as it should", partition=owned.name, reason=str(task.exception()))
        self.on_ended()

    def owned(self) -> list[Owned]:
        return list(self._late.values())

    def before(self, owned: Owned) -> list[asyncio.Task[None]]:
        """Z1: what has to end first."""
        place = (owned.log_dir, owned.topic, owned.index)
        return [task for task, late in self._late.items() if late.key == owned.key or late.slot == owned.slot or (late.log_dir, late.topic, late.index) == place]

    def of_directory(self, log_dir: int) -> list[asyncio.Task[None]]:
        return [task for task, late in self._late.items() if late.log_dir == log_dir]
