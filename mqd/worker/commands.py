"""The reactor's commands as awaitables: every command has a token, and every token gets one event.

Bound: UNDER_WAY_MAX commands in flight; further callers wait their turn (the reactor itself refuses
at 4096). Concurrency: everything on the event loop's thread.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from mqd.base.crash_on_error import crash_on_error
from mqd.native import Event, EventKind, NativeError, Reactor

UNDER_WAY_MAX = 1024
_DRAIN = 256


class ReactorCommands:
    """`on_event` gets every event that does not complete a command."""

    def __init__(self, reactor: Reactor, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]):
        self._reactor = reactor
        self._loop = loop
        self._on_event = on_event
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._next_token = 1
        self._room = asyncio.Semaphore(UNDER_WAY_MAX)
        self._watching = False

    def watch(self) -> None:
        self._loop.add_reader(self._reactor.event_fd, self.drain)
        self._watching = True

    def unwatch(self) -> None:
        """No further events will come: waiting callers get an error."""
        if self._watching:
            self._loop.remove_reader(self._reactor.event_fd)
            self._watching = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(NativeError(0, "the reactor has stopped"))
        self._waiting.clear()

    @crash_on_error
    def drain(self) -> None:
        while True:
            events = self._reactor.next_events(_DRAIN)
            for event in events:
                future = self._waiting.pop(event.token, None) if event.kind == EventKind.DONE else None
                if future is None:
                    self._on_event(event)
                elif not future.done():
                    future.set_result(event)
            if len(events) < _DRAIN:
                return

    async def run(self, command: Callable[..., None], *arguments: Any) -> Event:
        """`command`: a bound method of the reactor that takes a token first. Raises NativeError
        with the reactor's reason.

        An event that returns a partition is never lost: if the waiting task was cancelled, it goes to
        `on_event`.
        """
        async with self._room:
            token, self._next_token = self._next_token, self._next_token + 1
            future: asyncio.Future[Event] = self._loop.create_future()
            self._waiting[token] = future
            try:
                command(token, *arguments)
            except BaseException:
                del self._waiting[token]
                raise
            try:
                event = await asyncio.shield(future)
            except asyncio.CancelledError:
                self._waiting.pop(token, None)
                if future.done():
                    self._on_event(future.result())
                raise
        if event.error:
            raise NativeError(event.error, event.text or "the reactor gave no reason")
        return event
