"""The broker's own replication core (native/replica/rules.h) behind the interface of
partition_replica.py: the simulator's worker drives it like the reactor.
"""

from __future__ import annotations

from typing import Any

from tests.sim.disks import PartitionLog
from tests.sim.replica.partition_replica import Answer, Assignment, Fetch, Proposal
from tests.sim.replica.replica_rules import ffi, lib

PLANTED = {  # disabled rule -> the switch in the core
    "R1": lib.MQD_PLANTED_FETCH_EPOCH,
    "R2": lib.MQD_PLANTED_TRUNCATE_TO_HW,
    "R3": lib.MQD_PLANTED_KEEP_STATE,
    "R4": lib.MQD_PLANTED_HW_BELOW_MIN,
    "R5": lib.MQD_PLANTED_COMMITTED_ONLY,
    "R7": lib.MQD_PLANTED_EXPAND_EARLY,
    "903": lib.MQD_PLANTED_BROKER_EPOCH,
    "R10": lib.MQD_PLANTED_SERVE_UNREGISTERED,
    "R11": lib.MQD_PLANTED_ACK_BELOW_MIN,
    "R12": lib.MQD_PLANTED_LATEST_EARLY,
    "flush": lib.MQD_PLANTED_COUNT_UNFLUSHED,
    "lease": lib.MQD_PLANTED_LEASE,
    "swap unchecked": lib.MQD_PLANTED_SWAP_UNCHECKED,
    "swap in two": lib.MQD_PLANTED_SWAP_IN_TWO,
    "swap often": lib.MQD_PLANTED_SWAP_OFTEN,
    "count spares": lib.MQD_PLANTED_COUNT_SPARES,
}
LEADER, FOLLOWER = lib.MQD_REPLICA_LEADER, lib.MQD_REPLICA_FOLLOWER
CUT = lib.MQD_PLANTED_CHANGED_CUT

# One thread, and the core keeps no pointers: these are filled and read within a call.
_assignment = ffi.new("struct mqd_replica_assignment *")
_fetch = ffi.new("struct mqd_replica_fetch *")
_answer = ffi.new("struct mqd_replica_response *")
_proposal = ffi.new("struct mqd_replica_proposal *")
_step = ffi.new("struct mqd_replica_step *")


def _fill_fetch(fetch: Fetch) -> Any:
    _fetch.node_id, _fetch.broker_epoch, _fetch.current_leader_epoch, _fetch.last_fetched_epoch, _fetch.fetch_offset = (
        fetch
    )
    return _fetch


class NativeReplica:
    def __init__(
        self,
        log: PartitionLog,
        flush_on_ack: bool,
        off: frozenset[str] = frozenset(),
        lag_ms_max: int = 10_000,
        lag_records_max: int = -1,
        acks_replicas: int = 0,
    ) -> None:
        self.entries = log
        self.flush_on_ack = flush_on_ack
        self.lag_ms_max = lag_ms_max
        self.lag_records_max = lag_records_max
        self.acks_replicas = acks_replicas
        self.native = ffi.new("struct mqd_replica *")
        lib.mqd_replica_init(self.native)
        self.native.planted = sum([bit for rule, bit in PLANTED.items() if rule in off])
        self._epochs: Any = ffi.NULL
        self._epoch_count = 0
        self._epochs_of: list[tuple[int, int]] = []

    def _with_epochs(self) -> tuple[Any, int]:
        epochs = self.entries.epochs
        if epochs != self._epochs_of:
            self._epochs_of = list(epochs)
            self._epochs = ffi.new("struct mqd_epoch[]", epochs)
            self._epoch_count = len(epochs)
        return self._epochs, self._epoch_count

    # -- metadata and log --------------------------------------------------------------------------

    def assign(self, given: Assignment, now_ms: int) -> int:
        out = _assignment
        out.node_id, out.broker_epoch, out.leader, out.leader_epoch, out.partition_epoch, out.min_insync = given[:6]
        out.lag_ms_max, out.lag_records_max, out.flush_on_ack = self.lag_ms_max, self.lag_records_max, self.flush_on_ack
        out.acks_replicas = self.acks_replicas
        out.member_count = len(given.members)
        for place, member in enumerate(given.members):
            target = out.members[place]
            target.node_id, target.in_sync, target.eligible, target.broker_epoch, target.moving = member
        changed = lib.mqd_replica_assign(self.native, out, now_ms)
        assert changed >= 0, given
        if changed & CUT:
            self.entries.truncate(self.high_watermark)
            self.log_changed(now_ms)
        return changed

    def restore(self, high_watermark: int) -> None:
        lib.mqd_replica_restore(self.native, high_watermark)

    def log_changed(self, now_ms: int) -> int:
        return lib.mqd_replica_set_log(self.native, 0, len(self.entries.entries), self.entries.durable, now_ms)

    # -- the leader --------------------------------------------------------------------------------

    def may_append(self, all_acks: bool, lease_deadline_ns: int, now_ns: int) -> int:
        return lib.mqd_replica_check_append(self.native, all_acks, lease_deadline_ns, now_ns)

    def tick(self, now_ms: int) -> int:
        return lib.mqd_replica_tick(self.native, now_ms)

    def latest(self) -> int:
        return lib.mqd_replica_check_latest(self.native)

    def fetch(self, requested: Fetch, now_ms: int) -> Answer:
        lib.mqd_replica_on_fetch(self.native, _fill_fetch(requested), *self._with_epochs(), now_ms, _answer)
        out = _answer
        return Answer(
            out.error,
            out.leader_epoch,
            out.diverging_epoch,
            out.diverging_end,
            out.read_end,
            out.high_watermark,
            out.changed,
        )

    def propose(self, now_ms: int, repeat_ms: int) -> Proposal | None:
        out = _proposal
        if not lib.mqd_replica_propose(self.native, now_ms, repeat_ms, out):
            return None
        members = tuple([(out.node_id[place], out.member_broker_epoch[place]) for place in range(out.member_count)])
        return Proposal(out.sequence, out.broker_epoch, out.leader_epoch, out.partition_epoch, members)

    def answered(self, sequence: int, leader_epoch: int, error: int, again_ms: int) -> int:
        return lib.mqd_replica_on_proposal_response(self.native, sequence, leader_epoch, error, again_ms)

    # -- the follower ------------------------------------------------------------------------------

    def next_fetch(self) -> Fetch | None:
        out = _fetch
        if not lib.mqd_replica_next_fetch(self.native, *self._with_epochs(), out):
            return None
        return Fetch(out.node_id, out.broker_epoch, out.current_leader_epoch, out.last_fetched_epoch, out.fetch_offset)

    def step(self, requested: Fetch, response: Answer) -> tuple[int, int]:
        out = _answer
        (
            out.error,
            out.leader_epoch,
            out.diverging_epoch,
            out.diverging_end,
            out.read_end,
            out.high_watermark,
            out.changed,
        ) = response
        out.log_start = 0
        lib.mqd_replica_next_step(self.native, _fill_fetch(requested), out, *self._with_epochs(), _step)
        return _step.action, _step.offset

    def followed(self, leader_epoch: int, high_watermark: int) -> int:
        return lib.mqd_replica_adopt_high_watermark(self.native, leader_epoch, high_watermark)

    # -- state -------------------------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        return self.native.high_watermark

    @property
    def leading(self) -> bool:
        return self.native.role == LEADER

    @property
    def following(self) -> bool:
        return self.native.role == FOLLOWER

    @property
    def leader(self) -> int:
        return self.native.leader

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
    def holding(self) -> bool:
        return bool(self.native.holding)

    @property
    def in_sync_count(self) -> int:
        return self.native.in_sync_count

    @property
    def min_in_sync(self) -> int:
        return self.native.min_insync

    @property
    def maximal(self) -> frozenset[int]:
        native = self.native
        replicas = [native.replicas[place] for place in range(native.replica_count)]
        return frozenset(
            [each.member.node_id for each in replicas if each.member.in_sync or (native.proposing and each.proposed)]
        )
