"""The rules of one replica in plain Python: native/replica/rules.c is compared with it, step by
step (tests/unit/native/test_replica_model.py).

Written from the rules, not from the C code: sets and comprehensions where the core has flags and
loops, whole histories where it keeps the last entry. Same names for the same things.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from tests.sim.replica.replica_core import Action, Answer, Assignment, Change, Fetch, Proposal, Role, Step

OUT_OF_RANGE, NOT_LEADER, NO_REPLICA, NOT_ENOUGH = 1, 6, 9, 19
NOT_ATTEMPTED, FENCED, UNKNOWN, STALE_BROKER, NOT_AVAILABLE, INELIGIBLE = 55, 74, 75, 77, 78, 107
BEHIND_MS = 500
SLOW_MS, HOLD_MS, SWAP_MS, PREFER_MS = 100, 2000, 1000, 300_000

EpochList = list[tuple[int, int]]


def epoch_end(epochs: EpochList, log_end: int, epoch: int) -> tuple[int, int]:
    """OffsetForLeaderEpoch: by the ranges that the epochs cover."""
    if epoch < 0 or epoch > max([known for known, _ in epochs], default=-1):
        return -1, -1
    starts = [start for known, start in epochs if known > epoch]
    at_most = [known for known, _ in epochs if known <= epoch]
    return max(at_most, default=epoch), min(starts, default=log_end)


def truncation(epochs: EpochList, log_end: int, diverging_epoch: int, diverging_end: int) -> int:
    found, end = epoch_end(epochs, log_end, diverging_epoch)
    if found == -1:
        return min(diverging_end, log_end)
    return min(end, log_end, diverging_end if found == diverging_epoch else log_end)


@dataclass
class FollowerView:
    """The known state of one replica in this leader epoch."""

    # (time, offset, broker epoch, leader's log end then)
    fetches: list[tuple[int, int, int, int]] = field(default_factory=list)
    had_everything_ms: float = -math.inf
    behind_since_ms: float = math.inf

    @property
    def position(self) -> int:
        return self.fetches[-1][1] if self.fetches else -1

    @property
    def broker_epoch(self) -> int:
        return self.fetches[-1][2] if self.fetches else -1


class ReplicaModel:
    def __init__(self) -> None:
        self.assignment: Assignment | None = None
        self.role = Role.NONE
        self.log_start = self.log_end = self.durable = self.high_watermark = self.epoch_start = 0
        self.received: dict[int, FollowerView] = {}
        self.proposal: Proposal | None = None
        self.next_proposal_ms = -math.inf
        self.swapped_ms = self.held_until_ms = -math.inf
        self.sequence = 0

    # -- sets --------------------------------------------------------------------------------------

    @property
    def committed(self) -> set[int]:
        return {member.node_id for member in self.assignment.members if member.in_sync} if self.assignment else set()

    @property
    def maximal(self) -> set[int]:
        return self.committed | ({node for node, _ in self.proposal.in_sync} if self.proposal else set())

    @property
    def min_insync(self) -> int:
        return min(self.assignment.min_insync, len(self.assignment.members)) if self.assignment else 0

    def _raise(self) -> int:
        if self.role != Role.LEADER or len(self.committed) < self.min_insync:
            return 0
        own = self.durable if self.assignment.flush_on_ack else self.log_end
        reached = min([own, *(self.received[node].position for node in self.maximal - {self.assignment.node_id})])
        if reached <= self.high_watermark:
            return 0
        self.high_watermark = reached
        return Change.HIGH_WATERMARK

    # -- events ------------------------------------------------------------------------------------

    def assign(self, given: Assignment, now_ms: int) -> int:
        old, old_role = self.assignment, self.role
        if old and (
            given.leader_epoch < old.leader_epoch
            or given.partition_epoch < old.partition_epoch
            or given.broker_epoch < old.broker_epoch
        ):
            return Change.STALE_IGNORED
        own = [member for member in given.members if member.node_id == given.node_id]
        registered = bool(own) and own[0].broker_epoch == given.broker_epoch
        role = (
            Role.NONE
            if not registered or given.leader < 0
            else Role.LEADER
            if given.leader == given.node_id
            else Role.FOLLOWER
        )
        new_epoch = old is None or given.leader_epoch > old.leader_epoch
        fresh = new_epoch or role != old_role
        below_before = old is not None and not fresh and len(self.committed) < self.min_insync
        if fresh or given.partition_epoch > old.partition_epoch:
            self.proposal, self.next_proposal_ms = None, -math.inf
        if fresh:
            self.swapped_ms = -math.inf
        known = {} if fresh else self.received
        self.assignment, self.role = given, role
        self.received = {member.node_id: known.get(member.node_id, FollowerView()) for member in given.members}
        for node in self.committed:
            if self.received[node].had_everything_ms == -math.inf:
                self.received[node].had_everything_ms = now_ms
        if role == Role.LEADER:
            for received in self.received.values():
                self._behind(received, now_ms)
        self.high_watermark = min(self.high_watermark, self.log_end)
        if fresh and role == Role.LEADER:
            self.epoch_start = self.log_end
        changed = (Change.EPOCH if new_epoch else 0) | (Change.ROLE if role != old_role else 0)
        below = role == Role.LEADER and len(self.committed) < self.min_insync
        if below and not below_before:
            able = [member for member in given.members if member.eligible or member.in_sync]
            waits = given.acks_replicas > 0 and len(able) >= self.min_insync
            self.held_until_ms = now_ms + HOLD_MS if waits else -math.inf
            changed |= 0 if waits else Change.BELOW_MIN
        elif not below or fresh:
            self.held_until_ms = -math.inf
        return changed | self._raise()

    def log(self, log_start: int, log_end: int, durable: int, now_ms: int) -> int:
        before, self.log_start, self.log_end, self.durable = self.log_end, log_start, log_end, durable
        clamped = min(max(self.high_watermark, log_start), log_end)
        changed = Change.HIGH_WATERMARK if clamped != self.high_watermark else 0
        self.high_watermark = clamped
        if self.role != Role.LEADER:
            return changed
        if log_end != before:
            for received in self.received.values():
                if received.position == before:
                    received.had_everything_ms = max(received.had_everything_ms, now_ms)
                self._behind(received, now_ms)
        return changed | self._raise()

    def _behind(self, received: FollowerView, now_ms: int) -> None:
        bound = self.assignment.lag_records_max
        behind = bound >= 0 and bool(received.fetches) and self.log_end - received.position > bound
        received.behind_since_ms = min(received.behind_since_ms, now_ms) if behind else math.inf

    def may_append(self, acks_all: bool, lease_deadline_ns: int, now_ns: int) -> int:
        if self.role != Role.LEADER or now_ns >= lease_deadline_ns:
            return NOT_LEADER
        below = len(self.committed) < self.min_insync and self.held_until_ms == -math.inf
        return NOT_ENOUGH if acks_all and below else 0

    def tick(self, now_ms: int) -> int:
        if self.held_until_ms == -math.inf or now_ms < self.held_until_ms:
            return 0
        self.held_until_ms = -math.inf
        return Change.BELOW_MIN

    def latest(self) -> int:
        return (
            NOT_LEADER if self.role != Role.LEADER else NOT_AVAILABLE if self.high_watermark < self.epoch_start else 0
        )

    def fetch(self, fetch: Fetch, epochs: EpochList, now_ms: int) -> Answer:
        given = self.assignment
        epoch = given.leader_epoch if given else -1
        error = self._refusal(fetch)
        if error:
            return Answer(error, epoch, -1, -1, -1, -1, -1, 0)
        diverging = self._diverging(fetch, epochs) if fetch.fetch_offset >= self.log_start else None
        if fetch.fetch_offset < self.log_start or (diverging is None and fetch.fetch_offset > self.log_end):
            return Answer(OUT_OF_RANGE, epoch, -1, -1, self.log_end, self.high_watermark, self.log_start, 0)
        if diverging is not None:
            return Answer(0, epoch, *diverging, self.log_end, self.high_watermark, self.log_start, 0)
        received = self.received[fetch.node_id]
        complete = -math.inf
        if fetch.fetch_offset >= self.log_end:
            complete = now_ms
        elif received.fetches and fetch.fetch_offset >= received.fetches[-1][3]:
            complete = received.fetches[-1][0]  # everything there was then
        received.had_everything_ms = max(received.had_everything_ms, complete)
        received.fetches.append((now_ms, fetch.fetch_offset, fetch.broker_epoch, self.log_end))
        self._behind(received, now_ms)
        changed = self._raise()
        return Answer(0, epoch, -1, -1, self.log_end, self.high_watermark, self.log_start, changed)

    def _refusal(self, fetch: Fetch) -> int:
        given = self.assignment
        if self.role != Role.LEADER:
            return NOT_LEADER
        members = {member.node_id: member for member in given.members if member.node_id != given.node_id}
        if fetch.node_id not in members:
            return NO_REPLICA
        if fetch.current_leader_epoch != given.leader_epoch:
            return FENCED if fetch.current_leader_epoch < given.leader_epoch else UNKNOWN
        newest = max([members[fetch.node_id].broker_epoch, self.received[fetch.node_id].broker_epoch])
        return STALE_BROKER if fetch.broker_epoch < newest else 0

    def _diverging(self, fetch: Fetch, epochs: EpochList) -> tuple[int, int] | None:
        """None: the follower's log is a prefix of this one. This leader epoch counts as known, from
        its start.
        """
        if fetch.last_fetched_epoch < 0:
            return None
        found, end = epoch_end(epochs, self.log_end, fetch.last_fetched_epoch)
        if found < 0:
            found, end = epochs[-1][0] if epochs else fetch.last_fetched_epoch, min(self.epoch_start, self.log_end)
        return (found, end) if found != fetch.last_fetched_epoch or end < fetch.fetch_offset else None

    # -- proposals ---------------------------------------------------------------------------------

    def _lags(self, received: FollowerView, now_ms: int) -> bool:
        if now_ms - received.behind_since_ms >= BEHIND_MS:
            return True
        return not self._caught_up_within(received, now_ms, self.assignment.lag_ms_max)

    def _caught_up_within(self, received: FollowerView, now_ms: int, ms: int) -> bool:
        return received.position == self.log_end or now_ms - received.had_everything_ms <= ms

    def _may_join(self, node: int, now_ms: int) -> bool:
        member = {member.node_id: member for member in self.assignment.members}[node]
        received = self.received[node]
        return (
            bool(received.fetches)
            and member.eligible
            and received.position >= max(self.high_watermark, self.epoch_start)
            and received.broker_epoch == member.broker_epoch
            and received.behind_since_ms == math.inf
            and self._caught_up_within(received, now_ms, self.assignment.lag_ms_max // 2)
        )

    def propose(self, now_ms: int, repeat_ms: int) -> Proposal | None:
        given = self.assignment
        if self.role != Role.LEADER or now_ms < self.next_proposal_ms:
            return None
        if self.proposal is None:
            nodes = [member.node_id for member in given.members]
            expected = {given.node_id}
            expected |= {node for node in self.committed - expected if not self._lags(self.received[node], now_ms)}
            joining = {node for node in set(nodes) - self.committed - {given.node_id} if self._may_join(node, now_ms)}
            swapped_ms = self.swapped_ms
            if given.acks_replicas > 0:
                expected, swapped_ms = self._limited(expected, joining, now_ms)
            else:
                expected |= joining
            unable = {member.node_id for member in given.members if not member.eligible}
            if given.acks_replicas > 0:
                unable -= self.committed
            if expected == self.committed or expected & unable:
                return None
            self.swapped_ms = swapped_ms
            epochs = {member.node_id: member.broker_epoch for member in given.members} | {
                node: received.broker_epoch for node, received in self.received.items() if received.fetches
            }
            epochs[given.node_id] = given.broker_epoch
            self.sequence += 1
            in_sync = tuple((node, epochs[node]) for node in nodes if node in expected)
            self.proposal = Proposal(
                self.sequence, given.broker_epoch, given.leader_epoch, given.partition_epoch, in_sync
            )
        self.next_proposal_ms = now_ms + repeat_ms
        return self.proposal

    def _limited(self, members: set[int], joining: set[int], now_ms: int) -> tuple[set[int], float]:
        """R7b: (the set, when a member was last exchanged). Replicas that are being moved or shut down stay in
        the set, or join it, as without a limit.
        """
        given = self.assignment
        nodes = [member.node_id for member in given.members]
        moving = {member.node_id for member in given.members if member.moving or not member.eligible}
        limit = max(given.acks_replicas, self.min_insync)
        slow = {node for node in nodes if not self._caught_up_within(self.received[node], now_ms, SLOW_MS)}

        def ranked(replicas: set[int]) -> list[int]:
            return sorted(
                replicas,
                key=lambda node: (node in slow, node != nodes[0], -self.received[node].position, nodes.index(node)),
            )

        moved = (members | joining) & moving
        staying = members - moving
        spares = ranked(joining - moving)
        others = ranked(staying - {given.node_id})
        if staying != self.committed - moving or len(staying) != limit:
            count = limit - len(staying & {given.node_id})
            if len(staying) <= limit:
                chosen = [*others, *spares][: max(count, len(others))]
            else:
                chosen = others[: max(count, 0)]
            if set(chosen) | (staying & {given.node_id}) != self.committed - moving:
                return {given.node_id, *chosen} | moved, self.swapped_ms
        if now_ms - self.swapped_ms < SWAP_MS:
            return staying | moved, self.swapped_ms
        fast = [node for node in spares if self._caught_up_within(self.received[node], now_ms, SLOW_MS // 2)]
        pairs = (
            [(out, into) for out, into in zip([node for node in reversed(others) if node in slow], fast, strict=False)]
            if self.high_watermark < self.log_end
            else []
        )
        ahead = itertools.takewhile(
            lambda pair: self.received[pair[1]].position > self.received[pair[0]].position, pairs
        )
        swaps = list(ahead)
        if not swaps and nodes[0] in fast and others and now_ms - self.swapped_ms >= PREFER_MS:
            swaps = [(others[-1], nodes[0])]
        if not swaps:
            return staying | moved, self.swapped_ms
        return (staying | moved) - {out for out, _ in swaps} | {into for _, into in swaps}, now_ms

    def answered(self, sequence: int, leader_epoch: int, error: int, again_ms: int) -> int:
        if self.proposal is None or (sequence, leader_epoch) != (self.proposal.sequence, self.proposal.leader_epoch):
            return 0
        self.next_proposal_ms = again_ms
        if error not in (NOT_ATTEMPTED, INELIGIBLE):
            return 0
        self.proposal = None
        return self._raise()

    # -- the follower ------------------------------------------------------------------------------

    def next_fetch(self, epochs: EpochList) -> Fetch | None:
        given = self.assignment
        if self.role != Role.FOLLOWER or (given.flush_on_ack and self.durable < self.log_end):
            return None
        return Fetch(
            given.node_id, given.broker_epoch, given.leader_epoch, epochs[-1][0] if epochs else -1, self.log_end
        )

    def step(self, fetch: Fetch, response: Answer, epochs: EpochList) -> Step:
        if (
            self.role != Role.FOLLOWER
            or fetch.current_leader_epoch != self.assignment.leader_epoch
            or fetch.fetch_offset != self.log_end
        ):
            return Step(Action.IGNORE, -1)
        if response.error == OUT_OF_RANGE and response.log_start > self.log_end:
            return Step(Action.RESTART, response.log_start)
        if response.error == OUT_OF_RANGE and 0 <= response.read_end < self.log_end:
            return Step(Action.TRUNCATE, response.read_end)
        if response.error:
            return Step(Action.LATER, -1)
        if response.diverging_epoch >= 0:
            return Step(
                Action.TRUNCATE, truncation(epochs, self.log_end, response.diverging_epoch, response.diverging_end)
            )
        return Step(Action.APPEND, fetch.fetch_offset)

    def followed(self, leader_epoch: int, high_watermark: int) -> int:
        reached = min(high_watermark, self.log_end)
        if self.role != Role.FOLLOWER or leader_epoch != self.assignment.leader_epoch or reached <= self.high_watermark:
            return 0
        self.high_watermark = reached
        return Change.HIGH_WATERMARK
