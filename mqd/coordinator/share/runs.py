"""The states of a share-partition's offsets, as runs of equal state and delivery count.

Of two runs that cover an offset, the one with the higher delivery count wins; with equal counts, the
one with the higher state, as in Kafka. So writes may be reordered or repeated.

Invariants (check())
    M1  runs ascend and do not overlap; neighbours that touch differ in state or count
    M2  `firsts` holds the first offset of each run
Merging one run costs two bisections, plus time proportional to the number of runs that it touches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import NamedTuple

AVAILABLE, ACKNOWLEDGED, ARCHIVING, ARCHIVED = 0, 2, 3, 4
STATES = (AVAILABLE, ACKNOWLEDGED, ARCHIVING, ARCHIVED)
OFFSET_MAX = (1 << 63) - 1


class Run(NamedTuple):
    """Offsets from `first` to `last`, both inclusive."""

    first: int
    last: int
    state: int
    deliveries: int

    def validate(self) -> None:
        """Raises ValueError if offsets, state or delivery count are out of range."""
        if not 0 <= self.first <= self.last < OFFSET_MAX:
            raise ValueError(f"a state batch with the invalid offset range {self.first} to {self.last}")
        if self.state not in STATES or self.deliveries < 0:
            raise ValueError(f"a state batch with invalid state {self.state} or delivery count {self.deliveries}")


class Runs:
    __slots__ = ("firsts", "runs")

    def __init__(self, runs: list[Run] | None = None) -> None:
        self.runs: list[Run] = []
        self.firsts: list[int] = []
        for run in runs or ():
            self.merge(run)

    def __len__(self) -> int:
        return len(self.runs)

    def merge(self, new: Run) -> None:
        first, last, state, count = new
        firsts, runs = self.firsts, self.runs
        begin = bisect_left(firsts, first)
        if begin and runs[begin - 1].last >= first - 1:
            begin -= 1
        end = bisect_right(firsts, last + 1, begin)
        if begin == end:
            firsts.insert(begin, first)
            runs.insert(begin, new)
            return
        merged: list[Run] = []
        at = first  # everything below has been merged
        for old in runs[begin:end]:
            if old.first < first:
                _append(merged, old.first, min(old.last, first - 1), old.state, old.deliveries)
            if at < old.first:
                _append(merged, at, min(old.first - 1, last), state, count)
            low, high = max(old.first, first), min(old.last, last)
            if low <= high:
                new_wins = (count, state) > (old.deliveries, old.state)
                _append(merged, low, high, state if new_wins else old.state, count if new_wins else old.deliveries)
            at = max(at, old.last + 1)
            if old.last > last:
                _append(merged, max(old.first, last + 1), old.last, old.state, old.deliveries)
        if at <= last:
            _append(merged, at, last, state, count)
        runs[begin:end] = merged
        firsts[begin:end] = [run.first for run in merged]

    def advance(self, start_offset: int) -> None:
        """Drops the offsets below `start_offset`."""
        if not self.firsts or self.firsts[0] >= start_offset:
            return
        index = bisect_right(self.firsts, start_offset) - 1
        partial = self.runs[index]
        if partial.last < start_offset:
            index += 1
        del self.runs[:index], self.firsts[:index]
        if self.firsts and self.firsts[0] < start_offset:
            self.runs[0] = partial._replace(first=start_offset)
            self.firsts[0] = start_offset

    def truncate(self, end: int) -> bool:
        """Drops the offsets from `end` on. Returns whether there were any."""
        if not self.runs or self.runs[-1].last < end:
            return False
        index = bisect_left(self.firsts, end)
        del self.runs[index:], self.firsts[index:]
        if self.runs and self.runs[-1].last >= end:
            self.runs[-1] = self.runs[-1]._replace(last=end - 1)
        return True

    def finished_count(self) -> int:
        """The number of offsets that are Acknowledged or Archived."""
        return sum(run.last + 1 - run.first for run in self.runs if run.state in (ACKNOWLEDGED, ARCHIVED))

    def retried_counts(self) -> list[tuple[int, int]]:
        """(delivery count, number of offsets) of the offsets that were delivered and are not finished."""
        counts: Counter[int] = Counter()
        for run in self.runs:
            if run.state == AVAILABLE and run.deliveries:
                counts[run.deliveries] += run.last + 1 - run.first
        return sorted(counts.items())

    def check(self) -> None:
        assert self.firsts == [run.first for run in self.runs], "M2"
        for run in self.runs:
            run.validate()
        for run, next_run in zip(self.runs, self.runs[1:], strict=False):
            assert run.last < next_run.first, f"M1: {run} {next_run}"
            assert run.last + 1 < next_run.first or run[2:] != next_run[2:], f"M1: {run} {next_run} are one run"


def _append(merged: list[Run], first: int, last: int, state: int, count: int) -> None:
    if merged:
        previous = merged[-1]
        if previous.last + 1 == first and previous.state == state and previous.deliveries == count:
            merged[-1] = Run(previous.first, last, state, count)
            return
    merged.append(Run(first, last, state, count))
