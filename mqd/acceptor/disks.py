"""The acceptor's reads of log directories, for requests and for loading coordinators. A directory
that hangs does not delay reads of other directories.

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


class _Query(QueryProgress):
    def __init__(self, function: Callable[[QueryProgress], Any]) -> None:
        super().__init__()
        self.function = function
        self.response = asyncio.get_running_loop().create_future()


class _Directory:
    """One log directory. At most `threads_max` threads work in it."""

    def __init__(self, path: Path, threads_max: int) -> None:
        self._path, self._threads_max = path, threads_max
        self._under_way: set[_Query] = set()
        self._waiting: dict[_Query, None] = {}

    async def run(self, function: Callable[[QueryProgress], T]) -> T:
        """Raises TimeoutError if the function has made no progress for SILENT_S or, while it waits for
        a thread, if no running one has.
        """
        query = _Query(function)
        self._waiting[query] = None
        self._start()
        try:
            while not query.response.done():
                last_step_s = (
                    query.last_step_s
                    if query in self._under_way
                    else max(other.last_step_s for other in self._under_way)
                )
                left_s = last_step_s + SILENT_S - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"log directory {self._path} does not respond")
                await asyncio.wait({query.response}, timeout=min(left_s, SILENT_S))
            return query.response.result()
        finally:
            self._waiting.pop(query, None)
            query.response.cancel()  # if there is no result yet: the caller no longer waits for it

    def _start(self) -> None:
        while self._waiting and len(self._under_way) < self._threads_max:
            query = next(iter(self._waiting))
            del self._waiting[query]
            query.step()
            try:
                future = in_thread(partial(query.function, query))
            except RuntimeError as error:  # no thread is available
                query.response.set_exception(OSError(errno.EAGAIN, str(error)))
                continue
            self._under_way.add(query)
            future.add_done_callback(partial(self._on_ended, query))

    def _on_ended(self, query: _Query, future: "asyncio.Future[Any]") -> None:
        self._under_way.discard(query)
        error = future.exception()
        if query.response.done():
            pass
        elif error is not None:
            query.response.set_exception(error)
        else:
            query.response.set_result(future.result())
        self._start()


class Disks:
    """`log_dirs`: their paths. Callers name a directory by its index."""

    def __init__(self, log_dirs: Sequence[Path]) -> None:
        self._reads = [_Directory(path, READ_THREADS) for path in log_dirs]
        self._loads = [(asyncio.Semaphore(LOAD_THREADS), _Directory(path, LOAD_THREADS)) for path in log_dirs]
        self._load_slots = asyncio.Semaphore(LOADS_MAX)

    async def read(self, log_dir: int, function: Callable[..., T], *arguments: object) -> T:
        """Runs `function`, which must be short, and passes on its exceptions. Raises TimeoutError if the
        directory does not respond.
        """
        return await self._reads[log_dir].run(lambda _: function(*arguments))

    async def load(self, log_dir: int, function: Callable[[QueryProgress], T]) -> T:
        """Like read(), for a long-running `function`, which reports its progress and when it no
        longer needs the directory. The load waits for earlier ones as long as they make progress.
        """
        directory_slots, directory = self._loads[log_dir]
        # a hanging directory holds at most LOAD_THREADS of the slots, until its loads time out
        async with directory_slots, self._load_slots:
            return await directory.run(function)
