"""A joint transaction's core, step by step: cases that random histories rarely reach, its bounds,
and its encoded records. Random histories: tests/sim/coordinator/test_joint_sim.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqd.coordinator.actions import Action, Persist, Reply, TimerFired
from mqd.coordinator.transaction import events, joint, joint_state
from mqd.coordinator.transaction import joint_records as records
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.cores import TransactionCoreFactory
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, JointResponse, WriteMarkers
from mqd.coordinator.transaction.joint import (
    CONCURRENT,
    FENCED,
    INVALID_STATE,
    INVALID_TIMEOUT,
    JOINT_PREFIX,
    TOO_MANY,
    UNKNOWN_PRODUCER,
    JointTransaction,
)
from mqd.coordinator.transaction.joint_state import HELD_MAX
from mqd.coordinator.transaction.records import State, encode_key
from mqd.coordinator.transaction.state import Settings

SETTINGS = Settings(max_timeout_ms=60_000, expiration_ms=100_000, response_ms=200, hold_ms=1_000)
NAME = JOINT_PREFIX + "query"
A, B = ("a", 0), ("b", 7)


class Driver:
    """A core, a clock, and its persisted records; every step is checked."""

    def __init__(self) -> None:
        self.now, self.number, self.spare = 1_000, 0, 100
        self.core = JointTransaction(NAME, SETTINGS)
        self.log: dict[bytes, bytes | None] = {}
        self.actions: list[Action] = []
        self.markers: list[WriteMarkers] = []

    def report(self, event: object) -> list[Action]:
        self.actions = self.core.handle(event, self.now)
        self.core.check()
        for action in self.actions:
            if isinstance(action, Persist):
                self.log.update(action.records)
            elif isinstance(action, WriteMarkers):
                self.markers.append(action)
        assert self.replayed().durable_state() == self.core.durable_state()
        return self.actions

    def replayed(self) -> JointTransaction:
        again = JointTransaction(NAME, SETTINGS)
        for key, value in reversed(self.log.items()):
            again.replay(key, value)
        return again

    def send_request(self, kind: type, *arguments: object, **options: object) -> object:
        """The response; None while it waits."""
        self.number += 1
        self.report(kind(self.number, *arguments, **options))
        return self.answer(self.number)

    def answer(self, number: int) -> object:
        return next(
            (action.response for action in self.actions if isinstance(action, Reply) and action.request == number), None
        )

    def enlist(self, batch: int, run: str = "run", timeout_ms: int = 5_000) -> JointResponse | None:
        found = self.send_request(events.Enlist, batch, run, timeout_ms)
        if isinstance(found, JointResponse) and found.error == NEED_PRODUCER_ID:
            self.spare += 1
            found = self.send_request(events.Enlist, batch, run, timeout_ms, spare_producer_id=self.spare)
        return found

    def child(self, batch: int, *partitions: tuple[str, int], run: str = "run") -> tuple[int, int]:
        found = self.enlist(batch, run)
        assert found is not None and found.error == 0
        if partitions:
            assert self.send_request(events.AddPartitions, found.producer_id, found.producer_epoch, partitions, 2) == 0
        return found.producer_id, found.producer_epoch

    def end(self, batch: int, *winners: tuple[int, int], committed: bool = True, run: str = "run") -> object:
        return self.send_request(events.EndJoint, batch, run, committed, winners)

    def written(self) -> None:
        markers, self.markers = self.markers, []
        for one in markers:
            self.report(events.MarkersWritten(one.attempt))

    def wait(self, milliseconds: int) -> None:
        self.now += milliseconds
        self.report(TimerFired("due"))


def error(code: int, committed: int = -1) -> JointResponse:
    return JointResponse(code, committed_batch_id=committed)


def test_winners_are_committed_and_all_others_aborted() -> None:
    it = Driver()
    winner, loser, idle = it.child(0, A, B), it.child(0, A), it.child(0)
    assert it.end(0, winner) is None, "answered when the markers are written"
    number = it.number
    assert [(one.producer_id, one.producer_epoch, one.committed, one.partitions) for one in it.markers] == [
        (winner[0], 1, True, (A, B)),
        (loser[0], 1, False, (A,)),
    ]
    kinds = [type(action) for action in it.actions]
    assert kinds.index(Persist) < kinds.index(WriteMarkers)
    first, second = it.markers
    it.report(events.MarkersWritten(first.attempt))
    assert it.answer(number) is None and it.core.state == State.PREPARE_COMMIT
    it.report(events.MarkersWritten(second.attempt))
    assert it.answer(number) == error(0, 0) and it.core.state == State.COMPLETE_COMMIT
    assert it.send_request(events.AddPartitions, *idle, (A,), 2) == FENCED
    assert {it.child(1)[1] for _ in range(3)} == {1}, "the same producer ids, with the next epoch"


def test_a_late_response_is_still_sent() -> None:
    it = Driver()
    winner = it.child(0, A)
    it.end(0, winner)
    commit = it.number
    assert it.enlist(1) is None
    enlisted = it.number
    it.wait(200)
    assert it.answer(commit) == error(0, 0), "it is decided"
    it.wait(1_000)
    assert it.answer(enlisted) == error(CONCURRENT, 0)
    assert it.enlist(0) == error(0, 0), "known while its markers are written"


def test_waiting_requests_are_bounded() -> None:
    it = Driver()
    it.end(0, it.child(0, A))
    assert [it.enlist(1) for _ in range(HELD_MAX - 1)] == [None] * (HELD_MAX - 1)
    assert it.enlist(1) == error(CONCURRENT, 0)
    it.written()
    assert len([action for action in it.actions if isinstance(action, Reply)]) == HELD_MAX


def test_children_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "CHILDREN_MAX", 2)
    it = Driver()
    it.child(0), it.child(0)
    assert it.enlist(0) == error(TOO_MANY)


def test_a_transaction_without_heartbeats_ends() -> None:
    it = Driver()
    child = it.child(0, A)
    it.wait(4_999)
    assert it.core.state == State.ONGOING
    assert it.send_request(events.Enlist, 0, "run", 5_000, *child) == JointResponse(0, *child, -1)
    it.wait(4_999)
    assert it.core.state == State.ONGOING
    it.wait(1)
    assert it.core.state == State.PREPARE_ABORT
    it.written()
    assert it.send_request(events.Enlist, 0, "run", 5_000, *child) == error(FENCED)
    assert it.end(0, child) == error(INVALID_STATE)
    again = it.child(0, A)
    assert it.end(0, child) == error(UNKNOWN_PRODUCER) and it.end(0, again) is None


def test_a_timeout_restarts_with_the_coordinator() -> None:
    it = Driver()
    it.child(0, A)
    it.now += 60_000
    it.core = it.replayed()
    assert [type(action) for action in it.core.on_loaded(it.now)] == [joint.Timer]
    it.wait(4_999)
    assert it.core.state == State.ONGOING


def test_the_next_coordinator_carries_out_decided_transactions() -> None:
    it = Driver()
    winner, loser = it.child(0, A), it.child(0, B)
    it.end(0, winner)
    it.core = it.replayed()
    again = [action for action in it.core.on_loaded(it.now) if isinstance(action, WriteMarkers)]
    assert sorted((one.producer_id, one.committed) for one in again) == [(winner[0], True), (loser[0], False)]


def test_overtaken_runs_are_remembered_up_to_a_bound() -> None:
    it = Driver()
    for number in range(joint_state.FENCED_RUNS_MAX + 2):
        it.child(0, run=f"run-{number}")
    assert it.enlist(0, "run-3") == error(FENCED) and it.end(0, run="run-3") == error(FENCED)
    assert "run-0" not in it.core.fenced_run_ids and len(it.core.fenced_run_ids) == joint_state.FENCED_RUNS_MAX


def test_an_earlier_batch_does_not_end_a_later_one() -> None:
    it = Driver()
    child = it.child(5, A)
    assert it.enlist(4, "other") == error(FENCED) and it.end(4, run="other") == error(FENCED)
    assert it.end(4, committed=False) == error(0), "there is nothing of it"
    assert it.end(5, child) is None


def test_an_aborted_run_is_over_and_its_remaining_tasks_are_fenced() -> None:
    it = Driver()
    child = it.child(0, A)
    assert it.end(0, committed=False) is None and it.enlist(0) == error(FENCED), "while its markers are written"
    it.written()
    assert it.end(0, committed=False) == error(0) and it.enlist(0) == error(FENCED) and it.enlist(1) == error(FENCED)
    assert it.end(0, child) == error(FENCED) and it.replayed().fenced_run_ids == ("run",)
    again = it.child(0, A, run="run-2")
    assert (
        it.enlist(0) == error(FENCED)
        and it.end(0, committed=False) == error(0)
        and it.end(0, again, run="run-2") is None
    )


def test_an_abort_before_the_first_task_is_remembered_for_a_while() -> None:
    it = Driver()
    assert (
        it.end(0, committed=False) == error(0)
        and it.enlist(0) == error(FENCED)
        and it.core.state == State.COMPLETE_ABORT
    )
    it.core = it.replayed()
    it.core.on_loaded(it.now)
    assert it.enlist(0) == error(FENCED) and it.child(0, A, run="run-2")
    it.end(0, committed=False, run="run-2")
    it.written()
    it.wait(100_000)
    assert it.core.is_empty and set(it.log.values()) == {None}


def test_an_abort_after_the_timeout_is_remembered() -> None:
    it = Driver()
    it.child(0, A)
    it.wait(5_000)
    assert it.core.state == State.PREPARE_ABORT and it.end(0, committed=False) is None
    assert it.replayed().fenced_run_ids == ("run",), "before it is answered"
    it.written()
    assert it.enlist(0) == error(FENCED)


def test_aborting_one_run_does_not_affect_another() -> None:
    it = Driver()
    child = it.child(0, A)
    assert it.end(0, committed=False, run="stillborn") == error(0) and it.enlist(0, "stillborn") == error(FENCED)
    assert (
        it.core.state == State.ONGOING
        and it.replayed().durable_state() == it.core.durable_state()
        and it.end(0, child) is None
    )


def test_an_invalid_timeout_is_refused() -> None:
    it = Driver()
    assert it.enlist(0, timeout_ms=60_001) == error(INVALID_TIMEOUT) and it.enlist(0, timeout_ms=0) == error(
        INVALID_TIMEOUT
    )
    assert it.core.is_empty


def test_unused_transactions_are_removed() -> None:
    it = Driver()
    it.end(0, it.child(0, A), it.child(0))
    it.written()
    it.wait(100_000)
    assert it.core.is_empty and set(it.log.values()) == {None} and len(it.log) == 3


def test_children_whose_epochs_run_out_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "RETIREMENT_EPOCH", 1)
    monkeypatch.setattr(joint_state, "RETIREMENT_EPOCH", 1)
    it = Driver()
    first = it.child(0, A)
    it.end(0, first)
    it.written()
    assert it.core.children == {} and it.child(1)[0] != first[0]


# -- records ---------------------------------------------------------------------------------------


def test_the_name_selects_the_core() -> None:
    cores = TransactionCoreFactory(SETTINGS)
    assert type(cores.make(NAME)) is JointTransaction and type(cores.make("orders")) is Transaction
    key, child = records.TRANSACTION.encode_key(NAME), records.CHILD.encode_key(NAME, 7)
    assert (
        cores.core_name_of(key) == cores.core_name_of(child) == NAME
        and cores.core_name_of(encode_key("orders")) == "orders"
    )
    for wrong in (records.TRANSACTION.encode_key("orders"), encode_key(NAME)):
        with pytest.raises(ValueError, match="does not match"):
            cores.core_name_of(wrong)


@given(
    kind=st.sampled_from([records.TRANSACTION.key_type, records.CHILD.key_type]),
    rest=st.binary(max_size=40),
    value=st.none() | st.binary(max_size=60),
)
def test_damaged_records_only_raise_value_errors(kind: int, rest: bytes, value: bytes | None) -> None:
    key = kind.to_bytes(2, "big") + rest
    core = JointTransaction(NAME, SETTINGS)
    try:
        TransactionCoreFactory(SETTINGS).core_name_of(key)
        core.replay(key, value)
    except ValueError:
        return
    core.check()


def test_invalid_records_are_refused() -> None:
    core = JointTransaction(NAME, SETTINGS)
    value = records.TRANSACTION.value.cls(
        serial=1, state=9, batch_id=0, run_id="r", committed_batch_id=-1, timeout_ms=1, start_ms=0, last_update_ms=0
    )
    child = records.CHILD.value.cls(serial=1, producer_epoch=-1, topics=[])
    for key, damaged in (
        (records.TRANSACTION.encode_key(NAME), records.TRANSACTION.encode_value(value)),
        (records.CHILD.encode_key(NAME, 1), records.CHILD.encode_value(child)),
        (encode_key(NAME), b"\0\1"),
    ):
        with pytest.raises(ValueError):
            core.replay(key, damaged)
