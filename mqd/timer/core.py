"""The schedule of one partition: which of its records are delivered next. Sans-I/O, except for
the files of the index.

Progress is a committed offset Y and, in its metadata, X, the last delivered (due, offset): of the
records below Y, those up to X have been delivered or cancelled, and those after X are pending. A
tick is one transaction, which writes what is due to the target together with the next (Y, X).

T1  Nothing is delivered before the clock of the host that delivers it has reached its due time.
T2  Each committed record is delivered or cancelled, exactly once.
T3  Y and X never fall.
T4  The log's start is not moved past a pending record.

A record that arrives when X is past its due time is late, and not in the index: it must be
delivered in the same transaction that moves Y past it. A record that arrives when X, but not the
clock, is past its due time (the clock was set back) is not read until the clock reaches that time;
later records of the partition wait with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.timer.index import ENTRY_COUNT_MAX, Entry, Index
from mqd.timer.storage import Storage

START = Entry(-1, -1)  # before every entry: nothing was delivered
LATE_COUNT_MAX = 4096


class ScheduleRecord(NamedTuple):
    """A committed record of the partition; `due_ms` and `cancelled_offset` as in
    mqd.log.schedule_headers.DeliveryPlan.
    """

    offset: int
    due_ms: int
    cancelled_offset: int = -1


class Progress(NamedTuple):
    end_offset: int  # Y
    last: Entry  # X

    def is_settled(self, entry: Entry) -> bool:
        """Whether the entry was delivered or cancelled."""
        return entry.offset < self.end_offset and entry <= self.last


class Tick(NamedTuple):
    """One transaction: `entries` in order, and the progress that is committed with them."""

    entries: list[Entry]
    progress: Progress


def take_over(
    storage: Storage, log_start: int, committed: Progress, entry_count_max: int = ENTRY_COUNT_MAX
) -> Schedule:
    """Returns the schedule from which this host continues. `committed`: the progress, read from the
    consumer group after all earlier writers were fenced. The index in `storage` is used if it was
    built up to an offset between the log's start and the committed offset; otherwise it is removed.
    """
    index, end_offset = Index.open(storage, entry_count_max)
    if not log_start <= end_offset <= committed.end_offset:
        for name in storage.names():
            storage.remove(name)
        index, end_offset = Index(storage, entry_count_max), log_start
    index.forget_below(log_start)
    return Schedule(index, end_offset, committed)


class Schedule:
    """`index_end`: the offset up to which the index was built; the log is read from there."""

    def __init__(self, index: Index, index_end: int, committed: Progress) -> None:
        self.index = index
        self.progress = committed
        self.end_offset = index_end  # records below it have been read
        self._late: list[Entry] = []
        if committed.last != START:
            index.drop_delivered(committed.last)

    def read(self, records: Iterable[ScheduleRecord], now_ms: int, due_of: Callable[[int], int | None]) -> bool:
        """Takes the next records, in order. Returns False if it did not take all of them: pass
        those at `end_offset` and above again, after a tick or later. `due_of(offset)`: returns when
        an earlier record is due, or None if the record at that offset is not to be delivered.
        """
        for record in records:
            if record.offset < self.end_offset:
                continue
            entry = Entry(record.due_ms, record.offset)
            is_late = record.due_ms >= 0 and entry <= self.progress.last and record.offset >= self.progress.end_offset
            if is_late and (record.due_ms > now_ms or len(self._late) >= LATE_COUNT_MAX):
                return False
            if 0 <= record.cancelled_offset < record.offset:
                self._cancel(record.cancelled_offset, due_of)
            if is_late:
                self._late.append(entry)
            elif record.due_ms >= 0 and not self.progress.is_settled(entry):
                self.index.add(*entry)
            self.end_offset = record.offset + 1
        return True

    def _cancel(self, offset: int, due_of: Callable[[int], int | None]) -> None:
        due_ms = due_of(offset)
        if due_ms is None:
            return
        entry = Entry(due_ms, offset)
        if entry in self._late:
            self._late.remove(entry)
        elif entry > self.progress.last:
            self.index.cancel(due_ms, offset)

    def tick(self, now_ms: int, count_max: int) -> Tick | None:
        """Returns what to commit next: records to deliver together with new progress, or progress
        alone; None if there is neither. Once it is committed, call on_committed() before any other
        method; if it cannot be committed, discard this schedule. A tick without entries may be
        skipped.
        """
        # after a takeover, records below Y are read again: until Y is reached, there is no progress
        # to commit
        if self.end_offset < self.progress.end_offset:
            return None
        # the progress covers all late records, so all of them are in this tick
        entries = self.index.take(now_ms, max(count_max - len(self._late), 1))
        last = max(self.progress.last, entries[-1]) if entries else self.progress.last
        progress = Progress(self.end_offset, last)
        if not entries and not self._late and progress == self.progress:
            return None
        return Tick(sorted([*self._late, *entries]), progress)

    def on_committed(self, tick: Tick) -> None:
        self._late = []
        self.progress = tick.progress

    @property
    def can_save(self) -> bool:
        """Whether the index matches the committed progress (Y, X)."""
        return not self._late and self.end_offset == self.progress.end_offset

    def save(self) -> None:
        """Call it only while can_save."""
        self.index.save(self.end_offset)

    @property
    def pending_count(self) -> int:
        return self.index.count + len(self._late)

    def first_needed_offset(self) -> int:
        """Returns the offset below which no record is needed (T4)."""
        offsets = [self.progress.end_offset, self.end_offset, *(entry.offset for entry in self._late)]
        first = self.index.first_offset()
        return min(offsets) if first is None else min(*offsets, first)
