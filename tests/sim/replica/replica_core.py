"""The replication core of one partition (native/replica/rules.h), for tests: the broker's code,
built with planted bugs that can be switched on (replica_rules.py).

Concurrency: one thread at a time. Offsets are record offsets, times milliseconds of any monotonic
clock, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from mqd.native.core import E_INVALID, NativeError
from tests.sim.replica.replica_rules import ffi, lib


def enumeration(name: str, prefix: str) -> dict[str, int]:
    """The members of a C enum, by name without the prefix."""
    members = ffi.typeof(f"enum {name}").relements
    return {key.removeprefix(prefix): value for key, value in sorted(members.items(), key=lambda item: item[1])}


REPLICA_COUNT_MAX = lib.MQD_REPLICA_COUNT_MAX
NO_RECORD_BOUND = lib.MQD_REPLICA_NO_RECORD_BOUND

Role = IntEnum("Role", enumeration("mqd_replica_role", "MQD_REPLICA_"))
_changes = enumeration("mqd_replica_change", "MQD_REPLICA_CHANGED_")
Change = IntFlag("Change", {key.removeprefix("MQD_REPLICA_"): value for key, value in _changes.items()})
Action = IntEnum("Action", enumeration("mqd_replica_action", "MQD_REPLICA_"))
Planted = IntFlag("Planted", enumeration("mqd_replica_planted", "MQD_PLANTED_"))


class Member(NamedTuple):
    node_id: int
    in_sync: bool
    eligible: bool
    broker_epoch: int
    moving: bool = False


class Assignment(NamedTuple):
    """struct mqd_replica_assignment."""

    node_id: int
    broker_epoch: int
    leader: int
    leader_epoch: int
    partition_epoch: int
    min_insync: int
    lag_ms_max: int
    lag_records_max: int
    flush_on_ack: bool
    members: tuple[Member, ...]
    acks_replicas: int = 0

    def native(self) -> Any:
        if len(self.members) > REPLICA_COUNT_MAX:
            raise NativeError(
                E_INVALID, f"a partition has at most {REPLICA_COUNT_MAX} replicas, not {len(self.members)}"
            )
        out = ffi.new("struct mqd_replica_assignment *")
        for name in self._fields:
            if name != "members":
                setattr(out, name, getattr(self, name))
        out.member_count = len(self.members)
        for target, member in zip(out.members, self.members, strict=False):
            target.node_id, target.in_sync, target.eligible, target.broker_epoch, target.moving = member
        return out


class Fetch(NamedTuple):
    node_id: int
    broker_epoch: int
    current_leader_epoch: int
    last_fetched_epoch: int
    fetch_offset: int


class Answer(NamedTuple):
    error: int
    leader_epoch: int
    diverging_epoch: int
    diverging_end: int
    read_end: int
    high_watermark: int
    log_start: int
    changed: int


class Proposal(NamedTuple):
    sequence: int
    broker_epoch: int
    leader_epoch: int
    partition_epoch: int
    in_sync: tuple[tuple[int, int], ...]  # (node id, broker epoch)


class Step(NamedTuple):
    action: int  # Action
    offset: int


class FollowerState(NamedTuple):
    """A leader's knowledge of one replica."""

    node_id: int
    position: int
    broker_epoch: int
    caught_up_ms: int
    proposed: bool


def proposal_of(native: Any) -> Proposal:
    members = tuple((native.node_id[i], native.member_broker_epoch[i]) for i in range(native.member_count))
    return Proposal(native.sequence, native.broker_epoch, native.leader_epoch, native.partition_epoch, members)


class Epochs:
    """Leader epochs for C: (epoch, start offset), both rising."""

    def __init__(self, entries: Sequence[tuple[int, int]]):
        self.count = len(entries)
        self.native = ffi.new(
            "struct mqd_epoch[]", [{"epoch": epoch, "start_offset": start} for epoch, start in entries]
        )


class Replica:
    """struct mqd_replica; `planted`: rules that are off."""

    def __init__(self, planted: int = 0):
        self.native = ffi.new("struct mqd_replica *")
        self._answer = ffi.new("struct mqd_replica_response *")
        self._proposal = ffi.new("struct mqd_replica_proposal *")
        self._step = ffi.new("struct mqd_replica_step *")
        self._fetch = ffi.new("struct mqd_replica_fetch *")
        lib.mqd_replica_init(self.native)
        self.native.planted = planted

    # -- metadata and log --------------------------------------------------------------------------

    def assign(self, assignment: Assignment, now_ms: int) -> int:
        """Bits of Change; NativeError when the assignment is invalid."""
        changed = lib.mqd_replica_assign(self.native, assignment.native(), now_ms)
        if changed < 0:
            raise NativeError(E_INVALID, "the assignment names a replica twice, or one below 0")
        return changed

    def restore(self, high_watermark: int) -> None:
        lib.mqd_replica_restore(self.native, high_watermark)

    def log(self, log_start: int, log_end: int, durable: int, now_ms: int) -> int:
        return lib.mqd_replica_set_log(self.native, log_start, log_end, durable, now_ms)

    # -- the leader --------------------------------------------------------------------------------

    def may_append(self, acks_all: bool, lease_deadline_ns: int = (1 << 63) - 1, now_ns: int = 0) -> int:
        return lib.mqd_replica_check_append(self.native, acks_all, lease_deadline_ns, now_ns)

    def tick(self, now_ms: int) -> int:
        return lib.mqd_replica_tick(self.native, now_ms)

    def latest(self) -> int:
        return lib.mqd_replica_check_latest(self.native)

    def fetch(self, fetch: Fetch, epochs: Epochs, now_ms: int) -> Answer:
        lib.mqd_replica_on_fetch(
            self.native, self._native_fetch(fetch), epochs.native, epochs.count, now_ms, self._answer
        )
        response = self._answer
        return Answer(
            response.error,
            response.leader_epoch,
            response.diverging_epoch,
            response.diverging_end,
            response.read_end,
            response.high_watermark,
            response.log_start,
            response.changed,
        )

    def propose(self, now_ms: int, repeat_ms: int) -> Proposal | None:
        return (
            proposal_of(self._proposal)
            if lib.mqd_replica_propose(self.native, now_ms, repeat_ms, self._proposal)
            else None
        )

    def answered(self, sequence: int, leader_epoch: int, error: int, again_ms: int) -> int:
        return lib.mqd_replica_on_proposal_response(self.native, sequence, leader_epoch, error, again_ms)

    # -- the follower ------------------------------------------------------------------------------

    def next_fetch(self, epochs: Epochs) -> Fetch | None:
        if not lib.mqd_replica_next_fetch(self.native, epochs.native, epochs.count, self._fetch):
            return None
        fetch = self._fetch
        return Fetch(
            fetch.node_id, fetch.broker_epoch, fetch.current_leader_epoch, fetch.last_fetched_epoch, fetch.fetch_offset
        )

    def step(self, fetch: Fetch, response: Answer, epochs: Epochs) -> Step:
        native = ffi.new("struct mqd_replica_response *", response._asdict())
        lib.mqd_replica_next_step(
            self.native, self._native_fetch(fetch), native, epochs.native, epochs.count, self._step
        )
        return Step(self._step.action, self._step.offset)

    def followed(self, leader_epoch: int, high_watermark: int) -> int:
        return lib.mqd_replica_adopt_high_watermark(self.native, leader_epoch, high_watermark)

    # -- state -------------------------------------------------------------------------------------

    @property
    def role(self) -> int:
        return self.native.role

    @property
    def high_watermark(self) -> int:
        return self.native.high_watermark

    @property
    def leader_epoch(self) -> int:
        return self.native.leader_epoch

    @property
    def partition_epoch(self) -> int:
        return self.native.partition_epoch

    @property
    def epoch_start(self) -> int:
        return self.native.epoch_start

    @property
    def proposing(self) -> bool:
        return bool(self.native.proposing)

    @property
    def in_sync(self) -> list[int]:
        """The committed set."""
        return [follower.member.node_id for follower in self._followers() if follower.member.in_sync]

    @property
    def maximal_in_sync(self) -> list[int]:
        """The committed and the proposed set (R5)."""
        return [
            follower.member.node_id
            for follower in self._followers()
            if follower.member.in_sync or (self.native.proposing and follower.proposed)
        ]

    @property
    def followers(self) -> list[FollowerState]:
        return [
            FollowerState(
                follower.member.node_id,
                follower.position,
                follower.fetched_broker_epoch,
                follower.caught_up_ms,
                bool(follower.proposed),
            )
            for follower in self._followers()
        ]

    def _followers(self) -> list[Any]:
        return [self.native.replicas[i] for i in range(self.native.replica_count)]

    def _native_fetch(self, fetch: Fetch) -> Any:
        native = self._fetch
        (
            native.node_id,
            native.broker_epoch,
            native.current_leader_epoch,
            native.last_fetched_epoch,
            native.fetch_offset,
        ) = fetch
        return native


def epoch_end(epochs: Epochs, log_end: int, epoch: int) -> tuple[int, int]:
    """(the largest known epoch not above it, its end offset); (-1, -1): above all."""
    found, end_offset = ffi.new("int32_t *"), ffi.new("int64_t *")
    lib.mqd_replica_epoch_end(epochs.native, epochs.count, log_end, epoch, found, end_offset)
    return found[0], end_offset[0]


def truncation(epochs: Epochs, log_end: int, diverging_epoch: int, diverging_end: int) -> int:
    return lib.mqd_replica_truncation(epochs.native, epochs.count, log_end, diverging_epoch, diverging_end)
