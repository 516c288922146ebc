"""The members of a classic group: who they are, what protocols they vote for, who waits for which
answer, and until when each is believed alive.

Invariants (check())
    M1  the votes counted for a protocol are the members that support it
    M2  `awaiting_join_count` is the number of members whose JoinGroup waits
    M3  an instance id names exactly the member that carries it, and no two members carry the same
    M4  nobody is a member and pending (was given a member id, has not joined with it) at once; at
        most PENDING_MAX are pending
    M5  who has a deadline has an entry in the heap that is not later than it, so none is overlooked
Bounds: the heap holds at most twice the entries that are in force, plus HEAP_SLACK.

A heartbeat moves a deadline and nothing else: O(1). The heap learns of it when the old deadline
comes up, once in a session time-out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

PENDING_MAX = 10_000
HEAP_SLACK = 64
NEVER = -1


class Watched:
    """Somebody with a deadline. `deadline_ms` NEVER: none. `armed_ms`: of the one heap entry that
    counts.
    """

    __slots__ = ("armed_ms", "deadline_ms", "member_id")

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.deadline_ms = self.armed_ms = NEVER


class Pending(Watched):
    """Was given a member id and asked to join with it (KIP-394)."""

    __slots__ = ("client_host", "client_id", "since_ms")

    def __init__(self, member_id: str, client_id: str, client_host: str, since_ms: int) -> None:
        super().__init__(member_id)
        self.client_id, self.client_host, self.since_ms = client_id, client_host, since_ms


class Member(Watched):
    """`protocols`: name -> metadata, most wanted first. `join_request`, `sync_request`: the numbers
    of the requests that wait, None otherwise. `is_new`: waits for its first JoinGroup's answer, so
    that this wait is bounded. `seen_ms`: when it last asked anything.
    """

    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_new",
        "join_request",
        "protocols",
        "rebalance_timeout_ms",
        "seen_ms",
        "session_timeout_ms",
        "sync_request",
    )

    def __init__(
        self,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocols: dict[str, bytes],
        assignment: bytes = b"",
        is_new: bool = False,
    ) -> None:
        super().__init__(member_id)
        self.instance_id = instance_id
        self.client_id, self.client_host = client_id, client_host
        self.rebalance_timeout_ms, self.session_timeout_ms = rebalance_timeout_ms, session_timeout_ms
        self.protocols = protocols
        self.assignment = assignment
        self.is_new = is_new
        self.join_request: int | None = None
        self.sync_request: int | None = None
        self.seen_ms = -1  # not yet, since this coordinator began

    def matches(self, protocols: dict[str, bytes]) -> bool:
        """The same protocols with the same metadata in the same order."""
        return list(self.protocols.items()) == list(protocols.items())

    @property
    def is_waiting(self) -> bool:
        return self.join_request is not None or self.sync_request is not None


class Deadlines:
    """Many deadlines under one timer."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Watched]] = []
        self._number = 0  # so that entries of the same time compare
        self._superseded = 0  # entries that an earlier one has replaced

    @property
    def next_ms(self) -> int | None:
        """Not later than the earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def move(self, watched: Watched, deadline_ms: int) -> None:
        watched.deadline_ms = deadline_ms
        if watched.armed_ms == NEVER:
            self._push(watched)
        elif deadline_ms < watched.armed_ms:
            self._superseded += 1
            self._push(watched)
            if 2 * self._superseded > len(self._heap) + HEAP_SLACK:
                self._rebuild()

    def drop(self, watched: Watched) -> None:
        """Its entry goes when its time comes, or when there are too many of its kind."""
        watched.deadline_ms = NEVER

    def _push(self, watched: Watched) -> None:
        watched.armed_ms = watched.deadline_ms
        self._number += 1
        heapq.heappush(self._heap, (watched.deadline_ms, self._number, watched))

    def expired(self, now_ms: int) -> list[Watched]:
        """Those whose deadline has come; they have none from now on."""
        found = []
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, watched = heapq.heappop(self._heap)
            if watched.armed_ms != at_ms:
                self._superseded -= 1  # by an earlier entry
                continue
            watched.armed_ms = NEVER
            if watched.deadline_ms > now_ms:
                self._push(watched)
            elif watched.deadline_ms != NEVER:
                watched.deadline_ms = NEVER
                found.append(watched)
        return found

    def tidy(self, live: int) -> None:
        """Forgets superseded entries and those of the departed when they are the more; `live`: how
        many may have a deadline.
        """
        if len(self._heap) > 2 * live + HEAP_SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        entries = [entry for entry in self._heap if entry[2].armed_ms == entry[0] and entry[2].deadline_ms != NEVER]
        for entry in self._heap:
            if entry[2].deadline_ms == NEVER:
                entry[2].armed_ms = NEVER
        heapq.heapify(entries)
        self._heap, self._superseded = entries, 0

    def check(self, watched: Iterable[Watched]) -> None:
        entries = {(entry[0], id(entry[2])) for entry in self._heap}
        for one in watched:
            if one.deadline_ms != NEVER:
                assert (
                    one.armed_ms != NEVER and one.armed_ms <= one.deadline_ms and (one.armed_ms, id(one)) in entries
                ), f"M5: {one.member_id} is not watched"


class Members:
    """Mapping of member id to Member in the order of joining, with the counts that make every
    question about all of them O(1).
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.static: dict[str, str] = {}  # instance id -> member id
        # a plain one is slow to give up its first again and again
        self.pending: OrderedDict[str, Pending] = OrderedDict()
        self.votes: dict[str, int] = {}  # protocol -> members that support it
        self.awaiting_join_count = 0
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def all_joined(self) -> bool:
        return self.awaiting_join_count == len(self.by_id) and not self.pending

    def add(self, member: Member) -> None:
        self.by_id[member.member_id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id
        self._count(member, 1)
        if member.join_request is not None:
            self.awaiting_join_count += 1

    def remove(self, member_id: str) -> Member:
        """Its waiting requests are the caller's to answer, before."""
        member = self.by_id.pop(member_id)
        if member.instance_id is not None:
            del self.static[member.instance_id]
        self._count(member, -1)
        if member.join_request is not None:
            self.awaiting_join_count -= 1
        self.deadlines.drop(member)
        self.deadlines.tidy(len(self.by_id) + len(self.pending))
        return member

    def _count(self, member: Member, by: int) -> None:
        votes = self.votes
        for name in member.protocols:
            count = votes.get(name, 0) + by
            if count:
                votes[name] = count
            else:
                del votes[name]

    def set_protocols(self, member: Member, protocols: dict[str, bytes]) -> None:
        self._count(member, -1)
        member.protocols = protocols
        self._count(member, 1)

    def await_join(self, member: Member, request: int) -> int | None:
        """Returns the number of the request that waited before, if any: it is superseded."""
        before, member.join_request = member.join_request, request
        if before is None:
            self.awaiting_join_count += 1
        return before

    def take_join(self, member: Member) -> int | None:
        request, member.join_request = member.join_request, None
        if request is not None:
            self.awaiting_join_count -= 1
        return request

    def add_pending(self, pending: Pending, deadline_ms: int) -> None:
        """The oldest gives way when there are PENDING_MAX: it hears UNKNOWN_MEMBER_ID when it
        comes, and asks again.
        """
        if len(self.pending) >= PENDING_MAX:
            self.remove_pending(next(iter(self.pending)))
        self.pending[pending.member_id] = pending
        self.deadlines.move(pending, deadline_ms)

    def remove_pending(self, member_id: str) -> bool:
        pending = self.pending.pop(member_id, None)
        if pending is not None:
            self.deadlines.drop(pending)
            self.deadlines.tidy(len(self.by_id) + len(self.pending))
        return pending is not None

    def supports_any(self, protocols: Iterable[str]) -> bool:
        """Is there one that every member supports?"""
        count = len(self.by_id)
        return any(self.votes.get(name, 0) == count for name in protocols)

    def elect_protocol(self) -> str:
        """Each member votes for the one it wants most among those that all support; the most votes
        win, the earliest voter breaks a tie. There is always one: who supports none of them is not
        let in.
        """
        count = len(self.by_id)
        candidates = {name for name, votes in self.votes.items() if votes == count}
        ballots: dict[str, int] = {}
        for member in self.by_id.values():
            choice = next(name for name in member.protocols if name in candidates)
            ballots[choice] = ballots.get(choice, 0) + 1
        return max(ballots, key=ballots.__getitem__)

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest that a member asked for. O(members): once in a rebalance."""
        return max((member.rebalance_timeout_ms for member in self.by_id.values()), default=0)

    def check(self) -> None:
        votes: dict[str, int] = {}
        for member in self.by_id.values():
            for name in member.protocols:
                votes[name] = votes.get(name, 0) + 1
        assert votes == self.votes, f"M1: {votes} != {self.votes}"
        waiting = sum(member.join_request is not None for member in self.by_id.values())
        assert waiting == self.awaiting_join_count, f"M2: {waiting} wait, {self.awaiting_join_count} counted"
        static = {
            member.instance_id: member.member_id for member in self.by_id.values() if member.instance_id is not None
        }
        assert static == self.static and len(static) == sum(
            member.instance_id is not None for member in self.by_id.values()
        ), f"M3: {static} != {self.static}"
        assert not self.by_id.keys() & self.pending.keys() and len(self.pending) <= PENDING_MAX, "M4"
        self.deadlines.check(self.by_id.values())
        self.deadlines.check(self.pending.values())
