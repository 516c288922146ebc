"""asyncio in simulated time: the broker's own coroutines run in a simulated process, unmodified.

Invariants
    E1  a callback runs within the event that made it ready, in order; a loop has no time of its own
    E2  everything in progress ends with the process, silently, as with kill -9
    E3  an unexpected exception ends the run instead of being logged
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from tests.sim.kernel import SECOND, Kernel, Process, Timer


class Handle:
    """The result of call_soon and call_later."""

    __slots__ = ("callback", "arguments", "context", "timer", "is_cancelled")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.arguments = callback, arguments
        self.context = context if context is not None else copy_context()
        self.timer: Timer | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.timer is not None:
            self.timer.cancel()

    def cancelled(self) -> bool:
        return self.is_cancelled


class SimLoop(asyncio.AbstractEventLoop):
    """`expected`: exceptions with which tasks may end."""

    def __init__(self, kernel: Kernel, process: Process, expected: tuple[type[BaseException], ...] = ()) -> None:
        self._kernel, self._process, self._expected = kernel, process, expected
        self._ready: deque[Handle] = deque()
        self._is_running = False
        self._is_due = False

    def enter(self, callback: Callable[..., object], *arguments: object) -> None:
        """An event of the simulation that the process handles: `callback`, and all callbacks that
        become ready by it.
        """
        self._ready.append(Handle(callback, arguments, None))
        self._run()

    def _run(self) -> None:
        self._is_due = False
        if self._is_running:
            return
        before = asyncio._get_running_loop()
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.is_cancelled:
                    handle.context.run(handle.callback, *handle.arguments)
        finally:
            asyncio._set_running_loop(before)
            self._is_running = False

    # -- asyncio's interface, the part that the broker uses ----------------------------------------

    def time(self) -> float:
        return self._kernel.now / SECOND

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return not self._process.alive

    def call_soon(self, callback: Callable[..., object], *arguments: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, arguments, context)
        self._ready.append(handle)
        if not self._is_running and not self._is_due:
            self._is_due = True
            self._kernel.after(0, self._process, self._run)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> Handle:  # type: ignore[override]
        handle = Handle(callback, arguments, context)
        handle.timer = self._kernel.timer(max(0, int(delay * SECOND)), self._process, self._fire, handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> Handle:  # type: ignore[override]
        return self.call_later(when - self.time(), callback, *arguments, context=context)

    def _fire(self, handle: Handle) -> None:
        self._ready.append(handle)
        self._run()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coroutine: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coroutine, loop=self, name=name, context=context)
        task.add_done_callback(self._look)
        return task

    def _look(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._expected):
            raise error

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Called for tasks that were running when the process died, and for expected errors of
        tasks that are not awaited.
        """
