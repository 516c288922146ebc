"""The acceptor's reads of log directories, for requests and for loading coordinators. A directory
that hangs does not delay reads of another one.

Bounds: READS_AT_ONCE and LOADS_AT_ONCE threads for each directory; LOADS_IN_ALL loads at a time,
because they share the interpreter with the event loop. Other work waits as long as the directory
makes progress. A thread in a hanging file system stays, and counts, until that responds.

Concurrency: the event loop's thread; the work runs in threads that are not joined at exit.
"""

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mqd.base.blocking_pool import QueryProgress, in_thread

READS_AT_ONCE = 4
LOADS_AT_ONCE = 2
LOADS_IN_ALL = 4
SILENT_S = 10.0  # a directory without progress for this long counts as not responding

T = TypeVar("T")


class _Work(QueryProgress):
    def __init__(self, work: Callable[[QueryProgress], Any]) -> None:
        super().__init__()
        self.work = work
        self.response = asyncio.get_running_loop().create_future()


class _Directory:
    """At most `at_once` threads work in it."""

    def __init__(self, path: Path, at_once: int) -> None:
        self._path, self._at_once = path, at_once
        self._under_way: set[_Work] = set()
        self._waiting: dict[_Work, None] = {}

    async def run(self, work: Callable[[QueryProgress], T]) -> T:
        """Raises TimeoutError if the work, or all work ahead of it, has made no progress for
        SILENT_S.
        """
        mine = _Work(work)
        self._waiting[mine] = None
        self._start()
        try:
            while not mine.response.done():
                last_step_s = (
                    mine.stepped_s if mine in self._under_way else max(one.stepped_s for one in self._under_way)
                )
                left_s = last_step_s + SILENT_S - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"log directory {self._path} does not respond")
                await asyncio.wait({mine.response}, timeout=min(left_s, SILENT_S))
            return mine.response.result()
        finally:
            self._waiting.pop(mine, None)
            mine.response.cancel()  # its caller was cancelled

    def _start(self) -> None:
        while self._waiting and len(self._under_way) < self._at_once:
            one = next(iter(self._waiting))
            del self._waiting[one]
            one.step()
            try:
                future = in_thread(partial(one.work, one))
            except RuntimeError as error:  # no thread is available
                one.response.set_exception(OSError(errno.EAGAIN, str(error)))
                continue
            self._under_way.add(one)
            future.add_done_callback(partial(self._ended, one))

    def _ended(self, one: _Work, future: "asyncio.Future[Any]") -> None:
        self._under_way.discard(one)
        error = future.exception()
        if one.response.done():
            pass
        elif error is not None:
            one.response.set_exception(error)
        else:
            one.response.set_result(future.result())
        self._start()


class Disks:
    """`log_dirs`: their paths; callers use the index."""

    def __init__(self, log_dirs: Sequence[Path]) -> None:
        self._reads = [_Directory(path, READS_AT_ONCE) for path in log_dirs]
        self._loads = [(asyncio.Semaphore(LOADS_AT_ONCE), _Directory(path, LOADS_AT_ONCE)) for path in log_dirs]
        self._slots = asyncio.Semaphore(LOADS_IN_ALL)

    async def read(self, log_dir: int, work: Callable[..., T], *arguments: object) -> T:
        """Runs short work and passes on its exceptions. Raises TimeoutError if the directory does
        not respond.
        """
        return await self._reads[log_dir].run(lambda _: work(*arguments))

    async def load(self, log_dir: int, work: Callable[[QueryProgress], T]) -> T:
        """Like read(), for long work, which reports its progress and when it no longer needs the
        directory. It waits for earlier work as long as that makes progress.
        """
        turn, threads = self._loads[log_dir]
        # a hanging directory delays only its own loads, and not for long
        async with turn, self._slots:
            return await threads.run(work)
