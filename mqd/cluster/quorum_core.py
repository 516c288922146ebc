"""The metadata quorum as a state machine without I/O: a pull Raft with pre-vote, check-quorum and a majority-granted lease (cluster.md, section 3)."""

from __future__ import annotations

import random

import msgspec

from mqd.cluster.quorum_events import Effect, Event, QuorumSettings, Stored
from mqd.cluster.quorum_messages import ReplicaKey, SnapshotMeta, Voters


class ReplicaView(msgspec.Struct, frozen=True):
    key: ReplicaKey
    log_end_offset: int
    last_fetch_age_ns: int  # -1 = never
    last_caught_up_age_ns: int


class QuorumView(msgspec.Struct, frozen=True):
    """What DescribeQuorum (API 55, KIP-836) shows."""

    leader: int
    epoch: int
    high_watermark: int
    voters: tuple[ReplicaView, ...]
    observers: tuple[ReplicaView, ...]


class QuorumCore:
    """`key`: this replica. `rng` decides only when to try to be elected."""

    def __init__(self, key: ReplicaKey, stored: Stored, settings: QuorumSettings, rng: random.Random) -> None: ...

    # Read freely: leader (node id or -1), epoch, high_watermark, next_offset, voters, is_leader, is_active, generation

    @property
    def next_deadline_ns(self) -> int:
        """When a Tick is due; NO_DEADLINE = never."""
        raise NotImplementedError

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        raise NotImplementedError

    def lease_deadline_ns(self, now_ns: int) -> int:
        """Until when (own clock) this host may act as the controller without asking anyone: 0 when it may not, NO_DEADLINE when it is the only voter."""
        raise NotImplementedError

    def snapshot_meta(self, offset: int) -> SnapshotMeta:
        """What goes with a snapshot of the state at `offset`, which is at most the high watermark."""
        raise NotImplementedError

    def describe(self, now_ns: int) -> QuorumView:
        raise NotImplementedError

    def check(self) -> None:
        """Asserts the invariants of one replica."""


def standalone(meta: SnapshotMeta, survivor: Voters) -> SnapshotMeta:
    """force-standalone: the same state in a new generation with these voters; members of the old one are refused."""
    return SnapshotMeta(meta.offset, meta.epoch, survivor, meta.generation + 1)
