"""Look-ups that wait for a flush: what was appended before they came is to be on disk, and so below
the high watermark, before they are answered.

What native/server/look_up.c is for ListOffsets (latest), for all that the acceptor answers. Waits
for this host's flush alone, never for followers, and for WAIT_S at most: when a disk hangs, the
answer is what is known.

Concurrency: one event loop.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from mqd.native import NativeError, SlotRole, SlotState, SlotView

WAIT_S = 2.0


class Slots(Protocol):
    """native.Control, as far as it is needed here."""

    def slot_view(self, slot: int) -> SlotView: ...

    def await_flush(self, slot: int) -> None: ...


def unflushed(view: SlotView, end_offset: int) -> bool:
    """Whether the flush of what lies below `end_offset` is to be waited for."""
    served = view.state == SlotState.ONLINE and view.role == SlotRole.LEADS and view.flush_on_ack
    return bool(served) and view.durable_offset < min(end_offset, view.log_end_offset)


class Flushes:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def told(self, slot: int) -> None:
        """A flush of this slot has ended (MQD_LINK_FLUSHED)."""
        for future in self._waiting.pop(slot, ()):
            if not future.done():
                future.set_result(None)

    def told_all(self) -> None:
        """A worker has died: its slots get other owners."""
        for slot in list(self._waiting):
            self.told(slot)

    async def wait(self, slots: Iterable[int]) -> None:
        """Until all that the partitions in these slots held at the call is flushed; the ends are
        those of the call, so flushes that run side by side are waited for once.
        """
        awaited = [
            (slot, view.log_end_offset)
            for slot in slots
            if (view := self._view(slot)) is not None and unflushed(view, view.log_end_offset)
        ]
        if not awaited:
            return
        try:
            async with asyncio.timeout(WAIT_S):
                for slot, end_offset in awaited:
                    await self._wait_for(slot, end_offset)
        except TimeoutError:
            return

    async def _wait_for(self, slot: int, end_offset: int) -> None:
        while self._below(slot, end_offset):
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(slot, []).append(future)
            self._slots.await_flush(slot)
            if not self._below(slot, end_offset):
                return  # it ended before the owner could see that it is awaited; `future` goes with the next note
            try:
                await future
            finally:
                if future in self._waiting.get(slot, ()):
                    self._waiting[slot].remove(future)

    def _below(self, slot: int, end_offset: int) -> bool:
        view = self._view(slot)
        return view is not None and unflushed(view, end_offset)

    def _view(self, slot: int) -> SlotView | None:
        try:
            return self._slots.slot_view(slot)
        except NativeError:
            return None  # the controller died while writing this slot
