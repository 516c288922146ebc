"""Helpers for asyncio: periodic jobs, and coroutines that run without a task until they need one."""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mqd.base import logging

T = TypeVar("T")
log = logging.get("tasks")


class Periodic:
    """Waits for `interval_s()`, then awaits `job()`, again and again. An exception is logged with
    the message `failure`, and does not end the repetition. Concurrency: the event loop's thread.
    """

    def __init__(
        self, interval_s: Callable[[], float], job: Callable[[], Awaitable[None]], log: logging.Logger, failure: str
    ) -> None:
        self._interval_s, self._job = interval_s, job
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
                await self._job()
            except Exception:
                self._log.exception(self._failure)


class Turn:
    """The turn (iteration) of an event loop in which a process handles the messages that have
    arrived. Callbacks that these messages trigger run at the end of the same turn: deferring them
    to a later turn would cost another `epoll_wait`. Concurrency: the event loop's thread.
    """

    def __init__(self) -> None:
        self.is_in_progress = False  # True: run() will be called at the end of this turn
        self._calls: deque[Callable[[], None]] = deque()

    def call(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the end of this turn, or in the loop's next turn if none is in
        progress.
        """
        if not self._calls and not self.is_in_progress:
            asyncio.get_running_loop().call_soon(self.run)
        self._calls.append(callback)

    def run(self) -> None:
        """Calls the callbacks. An exception is logged, and the other callbacks are still called."""
        while self._calls:
            callback = self._calls.popleft()
            try:
                callback()
            except Exception:
                log.exception("a callback has failed", what=getattr(callback, "__qualname__", repr(callback)))


class PromptFuture(asyncio.Future[T]):
    """A future that immediately resumes the InlineCoroutine that awaits it, in the turn of the
    event loop in which it gets its result. For tasks and callbacks it is an ordinary future.
    """

    awaiter: InlineCoroutine | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        self._wake()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self._wake()

    def cancel(self, msg: Any | None = None) -> bool:
        was_pending = super().cancel(msg)
        self._wake()
        return was_pending

    def _wake(self) -> None:
        awaiter, self.awaiter = self.awaiter, None
        if awaiter is not None:
            awaiter.wake()


class InlineCoroutine:
    """A coroutine that runs without a task: it begins in start(), and continues in the turn in
    which the future that it awaits is done. That works as long as it awaits only PromptFutures,
    each of them awaited by only one InlineCoroutine at a time. When it awaits anything else, the
    rest of it becomes a task. Starting it as a task would cost two more turns of the event loop,
    and one more for each await.

    Until it is a task it must not call anything that needs one, such as asyncio.timeout(); use
    timeout() below, which works with and without a task.
    """

    __slots__ = ("_callbacks", "_coroutine", "_is_cancelled", "_is_ended", "_is_woken", "_task", "_turn", "_waits_for")

    def __init__(self, turn: Turn, coroutine: Coroutine[Any, Any, None]) -> None:
        self._turn, self._coroutine = turn, coroutine
        self._callbacks: list[Callable[[InlineCoroutine], object]] = []
        self._waits_for: PromptFuture[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ended = self._is_cancelled = self._is_woken = False

    def start(self) -> None:
        """Runs the coroutine up to its first await that blocks. Raises what the coroutine raises."""
        self._step()

    def done(self) -> bool:
        return self._is_ended

    def add_done_callback(self, callback: Callable[[InlineCoroutine], object]) -> None:
        """Unlike a task's callback, this one is called immediately when the coroutine ends. The
        coroutine must not have ended yet.
        """
        self._callbacks.append(callback)

    def cancel(self) -> None:
        """Like Task.cancel(): CancelledError is raised where the coroutine waits, but only after
        this call.
        """
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        elif not self._is_ended:
            self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._turn.call(self._resume)

    def _resume(self) -> None:
        self._is_woken = False
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is not None:
            waits_for.awaiter = None
            self._step()

    def _step(self) -> None:
        is_cancelled, self._is_cancelled = self._is_cancelled, False
        try:
            waits_for = self._coroutine.throw(asyncio.CancelledError()) if is_cancelled else self._coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            self._end()
        except BaseException:
            self._end()
            raise
        else:
            self._wait(waits_for)

    def _wait(self, waits_for: Any) -> None:
        if isinstance(waits_for, PromptFuture) and waits_for.awaiter is None:
            waits_for._asyncio_future_blocking = False
            waits_for.awaiter, self._waits_for = self, waits_for
            return
        asyncio.get_running_loop().create_task(self._rest(waits_for)).add_done_callback(self._end)

    async def _rest(self, waits_for: Any) -> None:
        # Not set earlier: a task that is cancelled before it begins would drop the coroutine.
        self._task = asyncio.current_task()
        if self._is_cancelled and self._task is not None:
            self._task.cancel()
        await _continue(self._coroutine, waits_for)

    def _end(self, _task: asyncio.Task[None] | None = None) -> None:
        self._is_ended = True
        for callback in self._callbacks:
            callback(self)


@asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout() for coroutines that may run as an InlineCoroutine: asyncio.timeout() needs
    a task, so the rest of the InlineCoroutine first becomes one. Raises TimeoutError.
    """
    if asyncio.current_task() is None:
        await asyncio.sleep(0)
    async with asyncio.timeout(seconds):
        yield


@types.coroutine
def _continue(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # from what it awaited, or a cancellation: the coroutine handles it
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
    except StopIteration:
        return
