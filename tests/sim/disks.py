"""Disks of simulated hosts: written data, its durable part, and the effects of a power cut.

PartitionLog models a partition's files at the granularity of replication: one entry is one record;
records of one batch (`left` more follow in it) are appended, truncated and read together. The bytes
on the platter are the durable prefix, plus a random part of the rest after a power cut; an
unflushed truncation may be undone (the old tail is back). A failed flush leaves pages that the
kernel considers clean and that are on no disk: from `dropped` on, data may be lost at any start,
whatever later flushes report. A flipped bit makes a batch unreadable: a reader that verifies its
checksum notices.

Invariants
    D1  durable <= log_end_offset; a flush makes durable what was there when it began, unless it was
        truncated meanwhile; the part really on the platter is on_disk <= durable
    D2  epochs lists (epoch, start offset), both rising strictly, and agrees with the entries
    D3  producers[id] lists the offsets of that producer's sequences 0, 1, 2, ...
    D4  a log begins and ends with whole batches
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random
from typing import NamedTuple


class Entry(NamedTuple):
    """One record."""

    epoch: int
    producer: int  # -1 = not idempotent
    sequence: int
    value: int  # unique over the run
    left: int = 0  # records of its batch that follow it


class PartitionLog:
    __slots__ = (
        "entries",
        "durable",
        "epochs",
        "producers",
        "flushing",
        "undone",
        "verified",
        "changes",
        "dropped",
        "damaged",
        "shortened",
    )

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.durable = 0
        self.epochs: list[tuple[int, int]] = []
        self.producers: dict[int, list[int]] = {}
        self.flushing = 0  # what the current flush will have made durable
        # (offset, old tail that was durable): may return when power is lost before the next flush
        self.undone: tuple[int, list[Entry]] | None = None
        self.verified = 0  # the checker's: entries below were compared with committed ones
        self.changes = 0  # truncations, for the checker
        self.dropped = -1  # offset from which on a failed flush has left pages that are on no disk; -1 = none
        self.damaged: set[int] = set()  # base offsets of batches with a flipped bit
        self.shortened = False  # a file beside the log: recovery has truncated entries that may have been acknowledged

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def on_disk(self) -> int:
        """The part that is really durable."""
        return self.durable if self.dropped < 0 else min(self.durable, self.dropped)

    def whole(self, offset: int) -> int:
        """The end of the last batch that does not reach beyond `offset`."""
        entries = self.entries
        offset = min(offset, len(entries))
        while offset > 0 and entries[offset - 1].left:
            offset -= 1
        return offset

    def read(self, start: int, end: int) -> list[Entry]:
        """Whole batches from the one that contains `start` to the one that contains end - 1, as far
        as their checksums are valid.
        """
        entries = self.entries
        start, end = self.whole(start), min(end, len(entries))
        while 0 < end < len(entries) and entries[end - 1].left:
            end += 1
        bad = min([offset for offset in self.damaged if start <= offset], default=end)
        return entries[start : min(end, bad)]

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
        end = self.whole(end)
        removed = self.entries[end:]
        if end < self.durable:
            self.undone = (end, self.entries[end : self.durable])
            self.durable = end
        del self.entries[end:]
        self.flushing = min(self.flushing, end)
        self.verified = min(self.verified, end)
        self.changes += 1
        self.damaged = {offset for offset in self.damaged if offset < end}
        if self.dropped >= end:
            self.dropped = -1
        while self.epochs and self.epochs[-1][1] >= end:
            self.epochs.pop()
        for entry in reversed(removed):
            offsets = self.producers.get(entry.producer)
            while offsets and offsets[-1] >= end:
                offsets.pop()

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(the highest epoch <= `epoch` in this log, the offset after its last entry); (-1, 0) if
        there is none.
        """
        place = bisect_right(self.epochs, (epoch, 1 << 62))
        if place == 0:
            return -1, 0
        return self.epochs[place - 1][0], self.epochs[place][1] if place < len(self.epochs) else len(self.entries)

    def flush_begin(self) -> int:
        self.flushing = len(self.entries)
        return self.changes

    def flush_done(self, changes: int) -> None:
        """changes: the result of flush_begin. A truncation since then is not durable yet."""
        self.durable = max(self.durable, min(self.flushing, len(self.entries)))
        if changes == self.changes:
            self.undone = None

    def flush_failed(self) -> None:
        """The kernel has dropped the pages that it could not write, and considers them clean."""
        if self.durable < len(self.entries):
            self.dropped = self.durable if self.dropped < 0 else min(self.dropped, self.durable)

    def rewrite(self) -> None:
        """Everything readable is written again and flushed."""
        self.durable, self.dropped, self.undone = len(self.entries), -1, None

    def flip(self, offset: int) -> None:
        """Flips a bit of the batch that contains this offset."""
        self.damaged.add(self.whole(offset))

    def repair(self) -> None:
        """An operator has restored the segment from a copy."""
        self.damaged.clear()

    def wipe(self) -> None:
        self.__init__()

    def lose_power(self, random: Random) -> None:
        """Unsynced entries are lost from some point on; an unsynced truncation may come undone."""
        on_disk = self.on_disk
        if self.undone is not None and random.random() < 0.5:
            offset, tail = self.undone
            keep = self.entries[:offset]
            self._rebuild(keep + tail[: random.randrange(len(tail) + 1)])
        elif on_disk < len(self.entries):
            self._rebuild(self.entries[: random.randrange(on_disk, len(self.entries) + 1)])
        self.durable = len(self.entries)  # recovery has flushed what it found
        self.undone, self.dropped = None, -1

    def reopen(self, random: Random, checks: bool) -> None:
        """A host starts: pages of a failed flush may be lost; where every checksum after the
        recovery point is verified, the log ends before the first wrong one (with `checks` off,
        recovery trusts the file). That looks like a torn write, but valid batches follow it: the
        truncated ones may have been acknowledged.
        """
        if self.dropped >= 0:
            self._rebuild(self.entries[: random.randrange(self.dropped, len(self.entries) + 1)])
            self.rewrite()
        if not self.damaged or not self.entries:
            return
        point = random.randrange(len(self.entries))  # some offset that was durable once
        bad = min([offset for offset in self.damaged if offset >= point], default=-1)
        if bad < 0:
            return
        end = bad + 1 + self.entries[bad].left
        if end == len(self.entries):
            # the very last batch: indistinguishable from a torn write, so no disk does that here
            self.damaged.discard(bad)
        elif checks:
            self._rebuild(self.entries[:bad])
            self.durable = len(self.entries)
            self.shortened = True

    def _rebuild(self, entries: list[Entry]) -> None:
        while entries and entries[-1].left:  # a torn batch: its checksum is wrong
            entries.pop()
        changes, damaged, shortened = self.changes, self.damaged, self.shortened
        self.__init__()
        self.changes, self.shortened = changes + 1, shortened
        self.damaged = {offset for offset in damaged if offset < len(entries)}
        for entry in entries:
            self.append(entry)
