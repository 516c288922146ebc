"""The reactor's commands as awaitables: every command has a token, and every token gets one event.

Bound: IN_FLIGHT_MAX commands in flight; further callers wait their turn (the reactor itself refuses
at 4096). Concurrency: everything runs on the event loop's thread.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from mqd.base.crash_on_error import crash_on_error
from mqd.native import Event, EventKind, NativeError, Reactor

IN_FLIGHT_MAX = 1024
_EVENTS_PER_CALL = 256


class ReactorCommands:
    """`on_event` gets every event that does not complete a command."""

    def __init__(self, reactor: Reactor, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]):
        self._reactor = reactor
        self._loop = loop
        self._on_event = on_event
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._next_token = 1
        self._in_flight_limit = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._is_watching = False

    def watch(self) -> None:
        self._loop.add_reader(self._reactor.event_fd, self.drain)
        self._is_watching = True

    def unwatch(self) -> None:
        """Stops watching. No further events will come: waiting callers get an error."""
        if self._is_watching:
            self._loop.remove_reader(self._reactor.event_fd)
            self._is_watching = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(NativeError(0, "the reactor has stopped"))
        self._waiting.clear()

    @crash_on_error
    def drain(self) -> None:
        while True:
            events = self._reactor.next_events(_EVENTS_PER_CALL)
            for event in events:
                future = self._waiting.pop(event.token, None) if event.kind == EventKind.DONE else None
                if future is None:
                    self._on_event(event)
                elif not future.done():
                    future.set_result(event)
            if len(events) < _EVENTS_PER_CALL:
                return

    async def run(self, command: Callable[..., None], *arguments: Any) -> Event:
        """Runs `command`, a bound method of the reactor whose first argument is a token. Raises
        NativeError with the reactor's reason.

        An event that returns a partition is never lost: if the waiting task was cancelled, it goes
        to `on_event`.
        """
        async with self._in_flight_limit:
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
