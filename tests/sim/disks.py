"""Disks of simulated hosts: what was written, what of it is durable, what a power cut leaves.

PartitionLog is a model of a partition's files at the grain that replication sees: one entry is one batch with its leader epoch. The bytes on the platter are the
durable prefix, plus whatever a power cut happens to have kept of the rest; a truncation that was not flushed may come undone (the old tail is back).

Invariants
    D1  durable <= log_end_offset; a flush makes durable what was there when it began, unless it was truncated meanwhile
    D2  epochs lists (epoch, start offset), both rising strictly, and agrees with the entries
    D3  producers[id] lists the offsets of that producer's sequences 0, 1, 2, ...
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random
from typing import NamedTuple


class Entry(NamedTuple):
    """One batch of one record."""

    epoch: int
    producer: int  # -1 = not idempotent
    sequence: int
    value: int  # unique over the run


class PartitionLog:
    __slots__ = ("entries", "durable", "epochs", "producers", "flushing", "undone", "verified", "changes")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.durable = 0
        self.epochs: list[tuple[int, int]] = []
        self.producers: dict[int, list[int]] = {}
        self.flushing = 0  # what the flush under way will have made durable
        self.undone: tuple[int, list[Entry]] | None = None  # (offset, old tail that was durable): may come back when power is lost before the next flush
        self.verified = 0  # the checker's: entries below were compared with what was committed
        self.changes = 0  # truncations, for the checker

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def last_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else -1

    def append(self, entry: Entry) -> None:
        entries = self.entries
        if not self.epochs or self.epochs[-1][0] < entry.epoch:
            self.epochs.append((entry.epoch, len(entries)))
        elif self.epochs[-1][0] > entry.epoch:
            raise AssertionError(f"epochs of a log never fall: {entry.epoch} after {self.epochs[-1]}")
        if entry.producer >= 0:
            offsets = self.producers.setdefault(entry.producer, [])
            if len(offsets) == entry.sequence:
                offsets.append(len(entries))
            # else: a stale log, as under planted bugs; the checker finds it by C2
        entries.append(entry)

    def truncate(self, end: int) -> None:
        if end >= len(self.entries):
            return
        removed = self.entries[end:]
        if end < self.durable:
            self.undone = (end, self.entries[end : self.durable])
            self.durable = end
        del self.entries[end:]
        self.flushing = min(self.flushing, end)
        self.verified = min(self.verified, end)
        self.changes += 1
        while self.epochs and self.epochs[-1][1] >= end:
            self.epochs.pop()
        for entry in reversed(removed):
            offsets = self.producers.get(entry.producer)
            while offsets and offsets[-1] >= end:
                offsets.pop()

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(the highest epoch <= `epoch` that is here, the offset after its last entry); (-1, 0) if there is none."""
        place = bisect_right(self.epochs, (epoch, 1 << 62))
        if place == 0:
            return -1, 0
        return self.epochs[place - 1][0], self.epochs[place][1] if place < len(self.epochs) else len(self.entries)

    def flush_begin(self) -> int:
        self.flushing = len(self.entries)
        return self.changes

    def flush_done(self, changes: int) -> None:
        """changes: what flush_begin gave. A truncation since then is not yet safe."""
        self.durable = max(self.durable, min(self.flushing, len(self.entries)))
        if changes == self.changes:
            self.undone = None

    def wipe(self) -> None:
        self.__init__()

    def lose_power(self, random: Random) -> None:
        """Unsynced entries are lost from some point on; an unsynced truncation may come undone."""
        if self.undone is not None and random.random() < 0.5:
            offset, tail = self.undone
            keep = self.entries[:offset]
            self._rebuild(keep + tail[: random.randrange(len(tail) + 1)])
        elif self.durable < len(self.entries):
            self._rebuild(self.entries[: random.randrange(self.durable, len(self.entries) + 1)])
        self.durable = len(self.entries)  # what recovery found, it flushed
        self.undone = None

    def _rebuild(self, entries: list[Entry]) -> None:
        changes = self.changes
        self.__init__()
        self.changes = changes + 1
        for entry in entries:
            self.append(entry)
