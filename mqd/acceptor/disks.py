"""The acceptor's reads of log directories, for requests and for loading coordinators. A directory
that hangs does not delay reads of another one.

Bounds: READ_THREADS and LOAD_THREADS threads for each directory; LOADS_MAX loads at a time,
because they share the interpreter with the event loop. Work beyond these limits is queued, for as
long as the directory makes progress. A thread that hangs in a file system counts against the limit
until the file system responds.

Concurrency: the event loop's thread; the work runs in threads that are not joined at exit.
"""

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mqd.base.blocking_queries import QueryProgress, in_thread

READ_THREADS = 4
LOAD_THREADS = 2
LOADS_MAX = 4
SILENT_S = 10.0  # a directory without progress for this long is treated as not responding

T = TypeVar("T")


class _Work(QueryProgress):
    def __init__(self, work: Callable[[QueryProgress], Any]) -> None:
        super().__init__()
        self.work = work
        self.response = asyncio.get_running_loop().create_future()


class _Directory:
    """One log directory. At most `threads_max` threads work in it."""

    def __init__(self, path: Path, threads_max: int) -> None:
        self._path, self._threads_max = path, threads_max
        self._under_way: set[_Work] = set()
        self._waiting: dict[_Work, None] = {}

    async def run(self, work: Callable[[QueryProgress], T]) -> T:
        """Raises TimeoutError if the work, or all work ahead of it, has made no progress for
        SILENT_S.
        """
        item = _Work(work)
        self._waiting[item] = None
        self._start()
        try:
            while not item.response.done():
                last_step_s = (
                    item.last_step_s if item in self._under_way else max(other.last_step_s for other in self._under_way)
                )
                left_s = last_step_s + SILENT_S - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"log directory {self._path} does not respond")
                await asyncio.wait({item.response}, timeout=min(left_s, SILENT_S))
            return item.response.result()
        finally:
            self._waiting.pop(item, None)
            item.response.cancel()  # if there is no result yet: the caller no longer waits for it

    def _start(self) -> None:
        while self._waiting and len(self._under_way) < self._threads_max:
            item = next(iter(self._waiting))
            del self._waiting[item]
            item.step()
            try:
                future = in_thread(partial(item.work, item))
            except RuntimeError as error:  # no thread is available
                item.response.set_exception(OSError(errno.EAGAIN, str(error)))
                continue
            self._under_way.add(item)
            future.add_done_callback(partial(self._on_ended, item))

    def _on_ended(self, item: _Work, future: "asyncio.Future[Any]") -> None:
        self._under_way.discard(item)
        error = future.exception()
        if item.response.done():
            pass
        elif error is not None:
            item.response.set_exception(error)
        else:
            item.response.set_result(future.result())
        self._start()


class Disks:
    """`log_dirs`: their paths. Callers name a directory by its index."""

    def __init__(self, log_dirs: Sequence[Path]) -> None:
        self._reads = [_Directory(path, READ_THREADS) for path in log_dirs]
        self._loads = [(asyncio.Semaphore(LOAD_THREADS), _Directory(path, LOAD_THREADS)) for path in log_dirs]
        self._load_slots = asyncio.Semaphore(LOADS_MAX)

    async def read(self, log_dir: int, work: Callable[..., T], *arguments: object) -> T:
        """Runs `work`, which must be short, and passes on its exceptions. Raises TimeoutError if the
        directory does not respond.
        """
        return await self._reads[log_dir].run(lambda _: work(*arguments))

    async def load(self, log_dir: int, work: Callable[[QueryProgress], T]) -> T:
        """Like read(), for long `work`, which reports its progress, and reports when it no longer
        needs the directory. The load waits for earlier ones as long as they make progress.
        """
        directory_slots, directory = self._loads[log_dir]
        # a hanging directory holds at most LOAD_THREADS of the slots, until its loads time out
        async with directory_slots, self._load_slots:
            return await directory.run(work)
