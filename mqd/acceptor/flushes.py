"""Lookups that wait for a flush: records appended before a request must be on disk, and thus
below the high watermark, before the request is answered.

This module does for the acceptor's responses what native/server/lookup.c does for ListOffsets
(latest). It waits only for this host's flush, never for followers, and for at most WAIT_S: when a
disk hangs, the request is answered from the state known so far.

Concurrency: one event loop.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from mqd.base.tasks import timeout
from mqd.native import NativeError, SlotRole, SlotState, SlotView

WAIT_S = 2.0


class Slots(Protocol):
    """The part of native.Control that is needed here."""

    def slot_view(self, slot: int) -> SlotView: ...

    def request_flush_notice(self, slot: int) -> None: ...


def is_unflushed(view: SlotView, end_offset: int) -> bool:
    """Whether the flush of records below `end_offset` must be awaited."""
    needs_flush = view.state == SlotState.ONLINE and view.role == SlotRole.LEADS and view.flush_on_ack
    return bool(needs_flush) and view.durable_offset < min(end_offset, view.log_end_offset)


class Flushes:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def notify(self, slot: int) -> None:
        """A flush of this slot is complete (MQD_LINK_FLUSHED)."""
        for future in self._waiting.pop(slot, ()):
            if not future.done():
                future.set_result(None)

    def notify_all(self) -> None:
        """A worker has died: its slots get other owners."""
        for slot in list(self._waiting):
            self.notify(slot)

    async def wait(self, slots: Iterable[int]) -> None:
        """Waits until everything that the partitions in these slots hold at the time of the call is
        flushed; records appended later do not prolong the wait.
        """
        awaited = [
            (slot, view.log_end_offset)
            for slot in slots
            if (view := self._view(slot)) is not None and is_unflushed(view, view.log_end_offset)
        ]
        if not awaited:
            return
        try:
            async with timeout(WAIT_S):
                for slot, end_offset in awaited:
                    await self._wait_for(slot, end_offset)
        except TimeoutError:
            return

    async def _wait_for(self, slot: int, end_offset: int) -> None:
        while self._is_unflushed(slot, end_offset):
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(slot, []).append(future)
            self._slots.request_flush_notice(slot)
            if not self._is_unflushed(slot, end_offset):
                # the flush completed before the owner saw that it was awaited; `future` is resolved
                # by the next notification
                return
            try:
                await future
            finally:
                if future in self._waiting.get(slot, ()):
                    self._waiting[slot].remove(future)

    def _is_unflushed(self, slot: int, end_offset: int) -> bool:
        view = self._view(slot)
        return view is not None and is_unflushed(view, end_offset)

    def _view(self, slot: int) -> SlotView | None:
        try:
            return self._slots.slot_view(slot)
        except NativeError:
            return None  # the controller died while writing this slot
