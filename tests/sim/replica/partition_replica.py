"""The rules of one replica (R1-R7, R10-R12 of the design page) in plain Python, behind the
interface of native/replica/rules.h: used in the small world, and compared with the C core.
NativeReplica (native_replica.py) is the same interface over the library.

A rule named in `off` is broken on purpose, to prove that the checkers find it. Offsets count
entries; times are milliseconds of the host's clock.

Invariants
    A1  high_watermark never decreases while the replica leads, and is <= log end
    A2  maximal in-sync set = committed ones + proposed ones, from before the proposal is sent until
        a newer partition epoch or a final refusal
    A3  follower states are of this leader epoch only
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sim.disks import PartitionLog

NONE, OUT_OF_RANGE, NOT_LEADER, REPLICA_NOT_AVAILABLE, NOT_ENOUGH, NOT_ENOUGH_AFTER = 0, 1, 6, 9, 19, 20
(
    NOT_CONTROLLER,
    OUT_OF_ORDER,
    NOT_ATTEMPTED,
    FENCED_EPOCH,
    UNKNOWN_EPOCH,
    STALE_BROKER,
    NOT_AVAILABLE,
    INVALID_VERSION,
    INELIGIBLE,
) = (41, 45, 55, 74, 75, 77, 78, 95, 107)
STORAGE_ERROR = 56

NEW_EPOCH, NEW_ROLE, HIGH_WATERMARK, STALE_IGNORED, BELOW_MIN = 1, 2, 4, 8, 16
IGNORE, APPEND, TRUNCATE, RESTART, LATER = range(5)


class Member(NamedTuple):
    node: int
    in_sync: bool
    eligible: bool  # unfenced, not shutting down
    broker_epoch: int
    moving: bool = False  # a reassignment adds or removes it


class Assignment(NamedTuple):
    """One partition in the metadata, with the state of its brokers that a leader needs."""

    node: int
    broker_epoch: int  # of this process's own registration
    leader: int
    leader_epoch: int
    partition_epoch: int
    min_in_sync: int
    members: tuple[Member, ...]


class Fetch(NamedTuple):
    node: int
    broker_epoch: int
    leader_epoch: int
    last_epoch: int
    offset: int


class Answer(NamedTuple):
    error: int
    leader_epoch: int
    diverging_epoch: int
    diverging_end: int
    read_end: int
    high_watermark: int
    changed: int


class Proposal(NamedTuple):
    sequence: int
    broker_epoch: int
    leader_epoch: int
    partition_epoch: int
    in_sync: tuple[tuple[int, int], ...]  # (node, broker epoch)


class Follower:
    __slots__ = ("end", "broker_epoch", "caught_up_ms", "fetched_ms", "end_at_fetch")

    def __init__(self, now_ms: int) -> None:
        self.end = self.broker_epoch = self.end_at_fetch = -1
        self.caught_up_ms = self.fetched_ms = now_ms


class ModelReplica:
    def __init__(
        self, log: PartitionLog, flush_on_ack: bool, off: frozenset[str] = frozenset(), lag_ms_max: int = 10_000
    ) -> None:
        self.entries = log
        self.flush_on_ack = flush_on_ack
        self.off = off
        self.lag_ms_max = lag_ms_max
        self.high_watermark = 0
        self.assignment: Assignment | None = None
        self.leader = self.leader_epoch = self.partition_epoch = -1
        self.leading = self.following = self.holding = False
        self.epoch_start = 0
        self.epoch_began_ms = 0
        self.committed: frozenset[int] = frozenset()
        self.proposal: Proposal | None = None
        self._proposal_due_ms = 0
        self._sequence = 0
        self.followers: dict[int, Follower] = {}

    # -- metadata ----------------------------------------------------------------------------------

    def assign(self, given: Assignment, now_ms: int) -> int:
        if (given.leader_epoch, given.partition_epoch) < (self.leader_epoch, self.partition_epoch):
            return STALE_IGNORED
        changed = 0
        if given.leader_epoch != self.leader_epoch:
            changed |= NEW_EPOCH
            self.proposal = None
            self.epoch_start = self.entries.end
            self.epoch_began_ms = now_ms
            self.leading = given.leader == given.node
            self.following = not self.leading and given.leader >= 0
            if "R3" not in self.off:
                self.followers = {}
            if self.following and "R2" in self.off:
                self.entries.truncate(self.high_watermark)
        if given.partition_epoch != self.partition_epoch:
            self.proposal = None
        self.assignment = given
        self.leader, self.leader_epoch, self.partition_epoch = given.leader, given.leader_epoch, given.partition_epoch
        self.committed = frozenset([member.node for member in given.members if member.in_sync])
        replicas = [member.node for member in given.members]
        for node in [node for node in self.followers if node not in replicas]:
            del self.followers[node]
        if self.leading:
            if len(self.committed) < given.min_in_sync:
                changed |= BELOW_MIN
            changed |= self._advance()
        return changed

    @property
    def maximal(self) -> frozenset[int]:
        return (
            self.committed
            if self.proposal is None
            else self.committed.union([node for node, _ in self.proposal.in_sync])
        )

    @property
    def in_sync_count(self) -> int:
        return len(self.committed)

    @property
    def min_in_sync(self) -> int:
        return min(self.assignment.min_in_sync, len(self.assignment.members))

    def restore(self, high_watermark: int) -> None:
        self.high_watermark = min(high_watermark, self.entries.end)

    def log_changed(self, now_ms: int) -> int:
        self.high_watermark = min(self.high_watermark, self.entries.end)
        return self._advance() if self.leading else 0

    # -- as the leader -----------------------------------------------------------------------------

    def _advance(self) -> int:
        """R4."""
        given = self.assignment
        if len(self.committed) < given.min_in_sync and "R4" not in self.off:
            return 0
        counted = self.committed if "R5" in self.off else self.maximal
        position = self.entries.durable if self.flush_on_ack and "flush" not in self.off else self.entries.end
        for member in given.members:
            if member.node != given.node and member.node in counted:
                follower = self.followers.get(member.node)
                position = min(position, follower.end if follower is not None else -1)
        if position <= self.high_watermark:
            return 0
        self.high_watermark = position
        return HIGH_WATERMARK

    def fetch(self, requested: Fetch, now_ms: int) -> Answer:
        """R1, R2, KIP-903: a follower's fetch, which reports its position."""
        if not self.leading:
            return self._answer(NOT_LEADER)
        if requested.leader_epoch != self.leader_epoch and "R1" not in self.off:
            return self._answer(FENCED_EPOCH if requested.leader_epoch < self.leader_epoch else UNKNOWN_EPOCH)
        member = next((member for member in self.assignment.members if member.node == requested.node), None)
        if member is None:
            return self._answer(REPLICA_NOT_AVAILABLE)
        follower = self.followers.get(requested.node)
        if "903" not in self.off and requested.broker_epoch < max(
            member.broker_epoch, follower.broker_epoch if follower is not None else -1
        ):
            return self._answer(STALE_BROKER)
        log = self.entries
        if "R2" not in self.off and requested.offset > 0:
            epoch, end = log.end_of_epoch(requested.last_epoch)
            if epoch != requested.last_epoch or end < requested.offset:
                return self._answer(NONE, epoch, end)
        if requested.offset > log.end:
            return self._answer(OUT_OF_RANGE)
        if follower is None or (follower.broker_epoch != requested.broker_epoch and "903" not in self.off):
            follower = self.followers[requested.node] = Follower(self.epoch_began_ms)
            follower.broker_epoch = requested.broker_epoch
        if requested.offset >= log.end:
            follower.caught_up_ms = now_ms
        elif requested.offset >= follower.end_at_fetch >= 0:
            follower.caught_up_ms = max(follower.caught_up_ms, follower.fetched_ms)
        follower.end, follower.fetched_ms, follower.end_at_fetch = requested.offset, now_ms, log.end
        return self._answer(NONE, changed=self._advance())

    def _answer(self, error: int, diverging_epoch: int = -1, diverging_end: int = -1, changed: int = 0) -> Answer:
        return Answer(
            error, self.leader_epoch, diverging_epoch, diverging_end, self.entries.end, self.high_watermark, changed
        )

    def may_append(self, all_acks: bool, lease_deadline_ns: int, now_ns: int) -> int:
        """R11, before an append."""
        if not self.leading or now_ns >= lease_deadline_ns:
            return NOT_LEADER
        if all_acks and len(self.committed) < self.assignment.min_in_sync and "R11" not in self.off:
            return NOT_ENOUGH
        return NONE

    def tick(self, now_ms: int) -> int:
        return 0

    def latest(self) -> int:
        """R12."""
        if not self.leading:
            return NOT_LEADER
        return NOT_AVAILABLE if self.high_watermark < self.epoch_start and "R12" not in self.off else NONE

    def propose(self, now_ms: int, repeat_ms: int) -> Proposal | None:
        """R7: the in-sync set that this leader would have now, if it differs; from here on the
        union counts (R5). One in flight; the same again when there is no response.
        """
        if not self.leading:
            return None
        if self.proposal is None:
            members = self._requested(now_ms)
            if {node for node, _ in members} == self.committed:
                return None
            self._sequence += 1
            self.proposal = Proposal(
                self._sequence, self.assignment.broker_epoch, self.leader_epoch, self.partition_epoch, members
            )
        elif now_ms < self._proposal_due_ms:
            return None
        self._proposal_due_ms = now_ms + repeat_ms
        return self.proposal

    def _caught_up(self, follower: Follower, now_ms: int) -> bool:
        """It has everything that was there when the epoch began, and would not be removed at once."""
        recently = follower.end == self.entries.end or now_ms - follower.caught_up_ms <= self.lag_ms_max // 2
        return follower.end >= self.epoch_start and recently

    def _requested(self, now_ms: int) -> tuple[tuple[int, int], ...]:
        given = self.assignment
        expected: list[tuple[int, int]] = []
        for member in given.members:
            follower = self.followers.get(member.node)
            if member.node == given.node:
                expected.append((member.node, given.broker_epoch))
            elif member.in_sync:
                caught_up = follower.caught_up_ms if follower is not None else self.epoch_began_ms
                if now_ms - caught_up <= self.lag_ms_max:
                    expected.append(
                        (member.node, follower.broker_epoch if follower is not None else member.broker_epoch)
                    )
            elif (
                follower is not None
                and member.eligible
                and follower.end >= self.high_watermark
                and (self._caught_up(follower, now_ms) or "R7" in self.off)
            ):
                if follower.broker_epoch == member.broker_epoch or "903" in self.off:
                    expected.append((member.node, follower.broker_epoch))
        return tuple(expected)

    def answered(self, sequence: int, leader_epoch: int, error: int, again_ms: int) -> int:
        """Success shows as a newer partition epoch, by assign()."""
        proposal = self.proposal
        if proposal is None or proposal.sequence != sequence or leader_epoch != self.leader_epoch:
            return 0
        if error in (NOT_ATTEMPTED, INELIGIBLE):  # it will never be accepted
            self.proposal = None
            return self._advance()
        self._proposal_due_ms = again_ms
        return 0

    # -- as a follower -----------------------------------------------------------------------------

    def next_fetch(self) -> Fetch | None:
        log, given = self.entries, self.assignment
        if not self.following or (self.flush_on_ack and log.durable < log.end and "flush" not in self.off):
            return None
        return Fetch(given.node, given.broker_epoch, self.leader_epoch, log.last_epoch, log.end)

    def step(self, requested: Fetch, response: Answer) -> tuple[int, int]:
        """(action, offset)."""
        log = self.entries
        if (
            not self.following
            or requested.leader_epoch != self.leader_epoch
            or requested.offset != log.end
            or (response.leader_epoch != self.leader_epoch and "R1" not in self.off)
        ):
            return IGNORE, 0
        if response.error == OUT_OF_RANGE:
            return TRUNCATE, min(response.read_end, log.end)
        if response.error:
            return LATER, 0
        if response.diverging_end >= 0:  # R2: never to the high watermark
            epoch, end = log.end_of_epoch(response.diverging_epoch)
            return TRUNCATE, min(end, response.diverging_end) if epoch == response.diverging_epoch else end
        return APPEND, log.end

    def followed(self, leader_epoch: int, high_watermark: int) -> int:
        high = min(high_watermark, self.entries.end)
        if leader_epoch != self.leader_epoch or high <= self.high_watermark:
            return 0
        self.high_watermark = high
        return HIGH_WATERMARK
