"""The current state of a joint transaction, in which several producers (its children) write one
batch, and its encoding in the log. The transitions, and the invariants that check() asserts, are in
joint.py.
"""

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.transaction import joint_records as records
from mqd.coordinator.transaction.events import Description
from mqd.coordinator.transaction.joint_records import Child
from mqd.coordinator.transaction.records import STATE_NAMES, State
from mqd.coordinator.transaction.state import PREPARING, HeldRequest, Settings

CHILDREN_MAX = 10_000
HELD_MAX = 64  # waiting requests
FENCED_RUNS_MAX = 8  # a run is one execution of the client's job
# a producer id is not used again once its epoch has reached this; the next child gets a new one
RETIREMENT_EPOCH = 32_000

IN_PROGRESS = PREPARING | {State.ONGOING}


class JointState:
    """`serial` numbers the transactions of this transactional id; 0: the id is unknown."""

    __slots__ = (
        "_active_ids",
        "_armed_ms",
        "_attempt",
        "_held",
        "_idle_ids",
        "_key",
        "_last_activity_ms",
        "_pending_attempts",
        "_settings",
        "batch_id",
        "children",
        "committed_batch_id",
        "fenced_run_ids",
        "last_update_ms",
        "run_id",
        "serial",
        "start_ms",
        "state",
        "timeout_ms",
        "transactional_id",
        "winners",
    )

    def __init__(self, transactional_id: str, settings: Settings) -> None:
        self.transactional_id = transactional_id
        self._settings = settings
        self._key = records.TRANSACTION.encode_key(transactional_id)
        self._attempt = 0  # number of the last WriteMarkers
        self._held: list[HeldRequest] = []
        self._armed_ms: int | None = None  # when the armed timer fires
        self.children: dict[int, Child] = {}
        self._forget()

    def _forget(self) -> None:
        self.state = State.EMPTY
        self.serial = 0
        self.batch_id = self.committed_batch_id = -1
        self.run_id = ""
        self.timeout_ms = 0
        self.start_ms = self.last_update_ms = self._last_activity_ms = -1
        self.winners: frozenset[int] = frozenset()  # the children that the commit covers
        self.fenced_run_ids: tuple[str, ...] = ()
        self._active_ids: list[int] = []  # children of the open transaction
        self._idle_ids: list[int] = []  # the other children
        self._pending_attempts: set[int] = set()  # attempts whose markers are not written yet

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Applies one record of the log; records may come in any order. Raises ValueError for
        bytes that it cannot read.
        """
        kind = records.key_type_of(key)
        if kind == records.CHILD.key_type:
            self._replay_child(records.CHILD.decode_key(key).producer_id, value)
        elif kind != records.TRANSACTION.key_type:
            raise ValueError(f"a record of type {kind} under a joint transactional id")
        elif value is None:
            self._forget()
        else:
            self._replay_transaction(records.TRANSACTION.decode_value(value))
        self._active_ids = [producer_id for producer_id, child in self.children.items() if self._is_active(child)]
        self._idle_ids = [producer_id for producer_id, child in self.children.items() if not self._is_active(child)]

    def _replay_child(self, producer_id: int, value: bytes | None) -> None:
        if value is None:
            self.children.pop(producer_id, None)
            return
        child = records.decode_child(value)
        if producer_id < 0 or not 0 <= child.epoch <= RETIREMENT_EPOCH:
            raise ValueError(f"a child of a joint transaction with producer id {producer_id} and epoch {child.epoch}")
        self.children[producer_id] = child

    def _replay_transaction(self, record) -> None:  # noqa: ANN001  (records.TRANSACTION.value.cls)
        state = State(record.state)
        if state in (State.EMPTY, State.DEAD) or record.serial < 1:
            raise ValueError(f"a joint transaction's record in state {state!r} with serial {record.serial}")
        self.state, self.serial, self.batch_id, self.run_id = state, record.serial, record.batch_id, record.run_id
        self.committed_batch_id, self.timeout_ms = record.committed_batch_id, record.timeout_ms
        self.start_ms, self.last_update_ms, self._last_activity_ms = (
            record.start_ms,
            record.last_update_ms,
            record.last_update_ms,
        )
        self.winners, self.fenced_run_ids = frozenset(record.winners), tuple(record.fenced_run_ids)

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        raise ValueError("a coordinator's own records are never transactional; this one has another writer")

    @property
    def is_empty(self) -> bool:
        return self.serial == 0 and not self.children and not self._held

    def _is_active(self, child: Child) -> bool:
        return child.serial == self.serial and self.state in IN_PROGRESS

    def _current_epoch(self, child: Child) -> int:
        """The child's epoch in the open transaction, or in its next one if it is in none now."""
        return child.epoch if self._is_active(child) else child.epoch + 1

    def _fence_predecessor_of(self, successor: str) -> None:
        if self.run_id != successor:
            self._fence(self.run_id)

    def _fence(self, run_id: str) -> bool:
        """Returns False if the run is fenced already."""
        if not run_id or run_id in self.fenced_run_ids:
            return False
        self.fenced_run_ids = (*self.fenced_run_ids, run_id)[-FENCED_RUNS_MAX:]
        return True

    def _begin(self, batch_id: int, run_id: str, timeout_ms: int, now_ms: int) -> None:
        self._fence_predecessor_of(run_id)
        self.serial += 1
        self.state, self.batch_id, self.run_id, self.winners = State.ONGOING, batch_id, run_id, frozenset()
        self.timeout_ms, self.start_ms = timeout_ms, now_ms

    def description(self) -> Description | None:
        """Describes all children together, under the producer id of the first active child."""
        if self.serial == 0:
            return None
        producer_id = self._active_ids[0] if self._active_ids else -1
        epoch = self._current_epoch(self.children[producer_id]) if producer_id >= 0 else -1
        partitions = dict.fromkeys(
            partition for child_id in self._active_ids for partition in self.children[child_id].partitions
        )
        start_ms = self.start_ms if self.state in IN_PROGRESS else -1
        return Description(
            self.transactional_id,
            STATE_NAMES[self.state],
            producer_id,
            epoch,
            self.timeout_ms,
            start_ms,
            tuple(partitions),
        )

    def open_producers(self) -> dict[int, int]:
        """Producer id -> epoch of the children that have written in the open transaction."""
        is_bumped = self.state in PREPARING
        return {
            producer_id: self.children[producer_id].epoch + is_bumped
            for producer_id in self._active_ids
            if self.children[producer_id].partitions
        }

    # -- records -----------------------------------------------------------------------------------

    def _transaction_record(self, now_ms: int) -> KeyValue:
        self.last_update_ms = now_ms
        value = records.TRANSACTION.value.cls(
            serial=self.serial,
            state=int(self.state),
            batch_id=self.batch_id,
            run_id=self.run_id,
            committed_batch_id=self.committed_batch_id,
            timeout_ms=self.timeout_ms,
            start_ms=self.start_ms,
            last_update_ms=now_ms,
            winners=sorted(self.winners),
            fenced_run_ids=list(self.fenced_run_ids),
        )
        return self._key, records.TRANSACTION.encode_value(value)

    def _child_record(self, producer_id: int) -> KeyValue:
        return records.CHILD.encode_key(self.transactional_id, producer_id), records.encode_child(
            self.children[producer_id]
        )

    def durable_state(self) -> tuple[object, ...]:
        """The state that a replay of the log must reproduce (J8)."""
        children = tuple(
            sorted(
                (
                    producer_id,
                    self._current_epoch(child),
                    tuple(sorted(child.partitions)) if self._is_active(child) else (),
                )
                for producer_id, child in self.children.items()
            )
        )
        return (
            self.state,
            self.serial,
            self.batch_id,
            self.run_id,
            self.committed_batch_id,
            self.timeout_ms,
            self.start_ms,
            self.last_update_ms,
            self.winners,
            self.fenced_run_ids,
            children,
        )

    def check(self) -> None:
        """Raises AssertionError."""
        assert sorted((*self._active_ids, *self._idle_ids)) == sorted(self.children), (
            "J3: a child is neither active nor idle, or both"
        )
        assert all(self._is_active(self.children[producer_id]) for producer_id in self._active_ids) and not any(
            self._is_active(self.children[producer_id]) for producer_id in self._idle_ids
        ), "J2"
        assert self.state not in (State.ONGOING, State.PREPARE_ABORT) or self.batch_id > self.committed_batch_id, (
            "J1: a committed batch is in progress"
        )
        assert (
            self.state not in (State.PREPARE_COMMIT, State.COMPLETE_COMMIT) or self.batch_id == self.committed_batch_id
        ), "J1: a batch is committed, but not recorded as committed"
        assert self.state != State.ONGOING or self.run_id not in self.fenced_run_ids, (
            "J5: a fenced run has an open transaction"
        )
        assert not self._held or self.state in PREPARING, f"J7: requests wait in {self.state!r}"
        assert (self.state in PREPARING) or not self._pending_attempts, (
            "J4: markers are pending although no transaction is ending"
        )
        assert (
            len(self._held) <= HELD_MAX
            and len(self.children) <= CHILDREN_MAX
            and len(self.fenced_run_ids) <= FENCED_RUNS_MAX
        )
