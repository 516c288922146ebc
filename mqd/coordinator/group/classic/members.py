"""The members of a classic group: their identities, their votes for protocols, their waiting
requests, and the deadline until which each is considered alive.

Invariants (check())
    M1  the number of votes for a protocol is the number of members that support it
    M2  `joined_count` is the number of members that have joined: their JoinGroup waits for the end
        of the join phase
    M3  an instance id names exactly the member that has it, and no two members have the same one
    M4  no id is both a member's and pending (assigned to a client that has not joined with it); at
        most PENDING_MAX are pending
    M5  everything with a deadline has a heap entry at that time or earlier: no deadline is
        overlooked
    M6  `size_bytes` is the sum over all members and pending ids
Bounds: the heap holds at most twice the current entries, plus HEAP_SLACK.

A heartbeat moves a deadline and nothing else: O(1). The heap is updated only when the old deadline
comes up, once per session timeout.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from mqd.protocol.messages import DescribeGroupsResponse

PENDING_MAX = 10_000
HEAP_SLACK = 64
NEVER = -1
# Memory of the objects without the client's bytes: measured, rounded up.
MEMBER_BYTES = 1_000
PENDING_BYTES = 600
PROTOCOL_BYTES = 150


def protocols_size_bytes(protocols: Iterable[tuple[str, bytes]]) -> int:
    return sum(PROTOCOL_BYTES + len(name) + len(metadata) for name, metadata in protocols)


class Timed:
    """Something that can have a deadline. `deadline_ms` is NEVER if it has none. `armed_ms`: the time of
    its only valid heap entry; NEVER if it has no entry.
    """

    __slots__ = ("armed_ms", "deadline_ms", "member_id")

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.deadline_ms = self.armed_ms = NEVER


class PendingMember(Timed):
    """A client that received a member id and must join with it (KIP-394)."""

    __slots__ = ("client_host", "client_id", "since_ms")

    def __init__(self, member_id: str, client_id: str, client_host: str, since_ms: int) -> None:
        super().__init__(member_id)
        self.client_id, self.client_host, self.since_ms = client_id, client_host, since_ms

    @property
    def size_bytes(self) -> int:
        return PENDING_BYTES + len(self.member_id) + len(self.client_id)


class Member(Timed):
    """`protocols`: name -> metadata, in order of preference. `join_request`, `sync_request`: the
    numbers of the waiting requests, None otherwise. `is_new`: waits for the response to its first
    JoinGroup; this wait has a deadline. `seen_ms`: time of its last request.
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
        self.seen_ms = -1  # it has sent no request since this coordinator started

    @property
    def size_bytes(self) -> int:
        names_bytes = len(self.member_id) + len(self.instance_id or "") + len(self.client_id)
        return MEMBER_BYTES + names_bytes + protocols_size_bytes(self.protocols.items()) + len(self.assignment)

    def matches(self, protocols: dict[str, bytes]) -> bool:
        """Whether `protocols` equal the member's, including their order."""
        return list(self.protocols.items()) == list(protocols.items())

    def describe(self, protocol: str | None) -> DescribeGroupsResponse.Member:
        """The member's entry of DescribeGroups. The metadata is empty while the group has no
        protocol; an assignment stays until the next one, as in Kafka.
        """
        return DescribeGroupsResponse.Member(
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            client_id=self.client_id,
            client_host=self.client_host,
            member_metadata=self.protocols[protocol] if protocol is not None else b"",
            member_assignment=self.assignment,
        )

    @property
    def is_waiting(self) -> bool:
        return self.join_request is not None or self.sync_request is not None


class Deadlines:
    """Many deadlines under one timer."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timed]] = []
        self._number = 0  # tie-breaker for entries of the same time
        self._superseded_count = 0  # number of entries that an earlier one has replaced

    @property
    def next_ms(self) -> int | None:
        """The time of the next check, which is not later than the earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def move(self, timed: Timed, deadline_ms: int) -> None:
        timed.deadline_ms = deadline_ms
        if timed.armed_ms == NEVER:
            self._push(timed)
        elif deadline_ms < timed.armed_ms:
            self._superseded_count += 1
            self._push(timed)
            if 2 * self._superseded_count > len(self._heap) + HEAP_SLACK:
                self._rebuild()

    def drop(self, timed: Timed) -> None:
        """The heap entry stays until its time comes, or until there are too many dropped ones."""
        timed.deadline_ms = NEVER

    def _push(self, timed: Timed) -> None:
        timed.armed_ms = timed.deadline_ms
        self._number += 1
        heapq.heappush(self._heap, (timed.deadline_ms, self._number, timed))

    def take_expired(self, now_ms: int) -> list[Timed]:
        """Returns the Timed objects whose deadline has passed, and clears their deadlines."""
        expired = []
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, timed = heapq.heappop(self._heap)
            if timed.armed_ms != at_ms:
                self._superseded_count -= 1  # this entry was superseded by an earlier one
                continue
            timed.armed_ms = NEVER
            if timed.deadline_ms > now_ms:
                self._push(timed)
            elif timed.deadline_ms != NEVER:
                timed.deadline_ms = NEVER
                expired.append(timed)
        return expired

    def tidy(self, possible_count: int) -> None:
        """Purges superseded and dropped entries when they outnumber the others. `possible_count`:
        how many objects can have a deadline.
        """
        if len(self._heap) > 2 * possible_count + HEAP_SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        entries = [entry for entry in self._heap if entry[2].armed_ms == entry[0] and entry[2].deadline_ms != NEVER]
        for entry in self._heap:
            if entry[2].deadline_ms == NEVER:
                entry[2].armed_ms = NEVER
        heapq.heapify(entries)
        self._heap, self._superseded_count = entries, 0

    def check(self, all_timed: Iterable[Timed]) -> None:
        entries = {(entry[0], id(entry[2])) for entry in self._heap}
        for timed in all_timed:
            if timed.deadline_ms != NEVER:
                assert (
                    timed.armed_ms != NEVER
                    and timed.armed_ms <= timed.deadline_ms
                    and (timed.armed_ms, id(timed)) in entries
                ), f"M5: {timed.member_id} has a deadline, but no valid heap entry"


class Members:
    """Maps member id to Member in join order. Counters make the queries about all members O(1)."""

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.static_member_ids: dict[str, str] = {}  # instance id -> member id
        # a plain dict is slow when its first item is removed repeatedly
        self.pending: OrderedDict[str, PendingMember] = OrderedDict()
        self.votes: dict[str, int] = {}  # protocol -> number of members that support it
        self.joined_count = 0
        self.size_bytes = 0  # approximate size in memory
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def all_joined(self) -> bool:
        return self.joined_count == len(self.by_id) and not self.pending

    def add(self, member: Member) -> None:
        self.by_id[member.member_id] = member
        if member.instance_id is not None:
            self.static_member_ids[member.instance_id] = member.member_id
        self._count_votes(member, 1)
        self.size_bytes += member.size_bytes
        if member.join_request is not None:
            self.joined_count += 1

    def remove(self, member_id: str) -> Member:
        """The caller must have answered the member's waiting requests."""
        member = self.by_id.pop(member_id)
        if member.instance_id is not None:
            del self.static_member_ids[member.instance_id]
        self._count_votes(member, -1)
        self.size_bytes -= member.size_bytes
        if member.join_request is not None:
            self.joined_count -= 1
        self.deadlines.drop(member)
        self.deadlines.tidy(len(self.by_id) + len(self.pending))
        return member

    def _count_votes(self, member: Member, by: int) -> None:
        votes = self.votes
        for name in member.protocols:
            count = votes.get(name, 0) + by
            if count:
                votes[name] = count
            else:
                del votes[name]

    def set_protocols(self, member: Member, protocols: dict[str, bytes]) -> None:
        self._count_votes(member, -1)
        self.size_bytes -= member.size_bytes
        member.protocols = protocols
        self.size_bytes += member.size_bytes
        self._count_votes(member, 1)

    def set_assignment(self, member: Member, assignment: bytes) -> None:
        self.size_bytes += len(assignment) - len(member.assignment)
        member.assignment = assignment

    def set_join_request(self, member: Member, request: int) -> int | None:
        """Makes `request` the member's waiting JoinGroup. Returns the request that it supersedes,
        if any.
        """
        superseded, member.join_request = member.join_request, request
        if superseded is None:
            self.joined_count += 1
        return superseded

    def take_join_request(self, member: Member) -> int | None:
        request, member.join_request = member.join_request, None
        if request is not None:
            self.joined_count -= 1
        return request

    def add_pending(self, pending: PendingMember, deadline_ms: int) -> None:
        """Adds the client. At PENDING_MAX the oldest entry is evicted: its client gets
        UNKNOWN_MEMBER_ID when it joins, and retries.
        """
        if len(self.pending) >= PENDING_MAX:
            self.remove_pending(next(iter(self.pending)))
        self.pending[pending.member_id] = pending
        self.size_bytes += pending.size_bytes
        self.deadlines.move(pending, deadline_ms)

    def remove_pending(self, member_id: str) -> bool:
        pending = self.pending.pop(member_id, None)
        if pending is not None:
            self.size_bytes -= pending.size_bytes
            self.deadlines.drop(pending)
            self.deadlines.tidy(len(self.by_id) + len(self.pending))
        return pending is not None

    def supports_any(self, protocols: Iterable[str]) -> bool:
        """Whether at least one of these protocols is supported by all members."""
        count = len(self.by_id)
        return any(self.votes.get(name, 0) == count for name in protocols)

    def elect_protocol(self) -> str:
        """Each member votes for its most preferred protocol among those that all support. The most
        votes win; the earliest voter breaks a tie. There is always a winner: a member that would
        leave the group without a common protocol is not admitted.
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
        """The longest timeout of any member. O(members): called once per rebalance."""
        return max((member.rebalance_timeout_ms for member in self.by_id.values()), default=0)

    def check(self) -> None:
        votes: dict[str, int] = {}
        for member in self.by_id.values():
            for name in member.protocols:
                votes[name] = votes.get(name, 0) + 1
        assert votes == self.votes, f"M1: {votes} != {self.votes}"
        waiting = sum(member.join_request is not None for member in self.by_id.values())
        assert waiting == self.joined_count, f"M2: {waiting} have joined, {self.joined_count} counted"
        static = {
            member.instance_id: member.member_id for member in self.by_id.values() if member.instance_id is not None
        }
        assert static == self.static_member_ids and len(static) == sum(
            member.instance_id is not None for member in self.by_id.values()
        ), f"M3: {static} != {self.static_member_ids}"
        assert not self.by_id.keys() & self.pending.keys() and len(self.pending) <= PENDING_MAX, "M4"
        size = sum(member.size_bytes for member in self.by_id.values())
        size += sum(pending.size_bytes for pending in self.pending.values())
        assert size == self.size_bytes, f"M6: {size} != {self.size_bytes}"
        self.deadlines.check(self.by_id.values())
        self.deadlines.check(self.pending.values())
