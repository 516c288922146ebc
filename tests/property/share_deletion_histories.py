"""Random histories of share groups on one partition whose records are deleted when all groups have
finished them (mqd/coordinator/share/deletion.py), and their invariants.

Groups' states are spread over places; each place has a leader, which may be another host at any
time and then starts from the persisted state. All hosts are queried, some do not respond, and one
responds when its findings are written.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

from mqd.coordinator.share.deletion import UNINITIALIZED, StartOffsets, deletable_ends

PLACES, HOSTS, GROUPS = 4, 3, 6
KEY = (bytes(16), 0)


Decide = Callable[[Iterable[StartOffsets], int], dict[tuple[bytes, int], int]]


class Violation(AssertionError):
    """An invariant of mqd/coordinator/share/deletion.py does not hold."""


@dataclasses.dataclass
class Group:
    place: int
    written: int  # its start offset; UNINITIALIZED: not chosen yet
    latest: int  # the coordinator's, possibly not written yet


class History:
    """`writes_first`: a host responds when its findings are written."""

    def __init__(self, seed: int, decide: Decide = deletable_ends, writes_first: bool = True) -> None:
        self._random = random.Random(seed)
        self._decide, self._writes_first = decide, writes_first
        self._leaders = [self._random.randrange(HOSTS) for _ in range(PLACES)]
        self._groups: dict[int, Group] = {}
        self.end = self.start = 0
        self.deleted = 0

    def run(self, steps: int) -> History:
        moves = (self._write, self._acknowledge, self._acknowledge, self._persist, self._begin, self._leave)
        for _ in range(steps):
            self._random.choice((*moves, self._choose, self._fail_over, self._ask, self._ask))()
        return self

    def _any(self) -> Group | None:
        return self._random.choice(list(self._groups.values())) if self._groups else None

    def _write(self) -> None:
        self.end += self._random.randrange(20)

    def _begin(self) -> None:
        """Initialized without a start: it begins with the first record, or at the end."""
        number = self._random.randrange(GROUPS)
        if number not in self._groups and self._random.random() < 0.3:
            self._groups[number] = Group(self._random.randrange(PLACES), UNINITIALIZED, UNINITIALIZED)

    def _choose(self) -> None:
        group = self._any()
        if group is not None and group.latest == UNINITIALIZED:
            group.latest = self._random.choice((self.start, self.end))

    def _acknowledge(self) -> None:
        group = self._any()
        if group is not None and group.latest != UNINITIALIZED:
            group.latest += self._random.randint(0, self.end - group.latest)

    def _persist(self) -> None:
        for group in self._groups.values():
            group.written = group.latest

    def _leave(self) -> None:
        if self._groups and self._random.random() < 0.1:
            del self._groups[self._random.choice(list(self._groups))]

    def _fail_over(self) -> None:
        place = self._random.randrange(PLACES)
        self._leaders[place] = self._random.randrange(HOSTS)
        for group in self._groups.values():
            if group.place == place:
                group.latest = group.written

    def _answer(self, host: int) -> StartOffsets:
        places = frozenset(place for place, leader in enumerate(self._leaders) if leader == host)
        groups = [group for group in self._groups.values() if group.place in places]
        for group in groups if self._writes_first else ():
            group.written = group.latest
        return StartOffsets(places, {KEY: min(group.latest for group in groups)} if groups else {})

    def _ask(self) -> None:
        responses = [self._answer(host) for host in range(HOSTS) if self._random.random() < 0.9]
        offset = self._decide(responses, PLACES).get(KEY)
        self._check(offset)
        if offset is not None and offset > self.start:
            self.deleted += offset - self.start
            self.start = offset

    def _check(self, offset: int | None) -> None:
        if offset is None:
            return
        if not self._groups:
            raise Violation(f"Q4: deletes up to {offset}, and no group has begun")
        for number, group in self._groups.items():
            if group.written == UNINITIALIZED:
                raise Violation(f"Q4: deletes up to {offset}; group {number} has not chosen its start")
            if offset > group.written:
                raise Violation(f"Q1: deletes up to {offset}; group {number} begins at {group.written}")
