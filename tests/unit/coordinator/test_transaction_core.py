"""One transactional id, step by step: cases that random histories rarely reach, and the encoded
records. Random histories: tests/sim/coordinator/test_transaction_sim.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqd.coordinator.actions import Action, Persist, Reply, Timer, TimerFired
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.core import CONCURRENT, FENCED, INVALID_STATE, UNKNOWN_PRODUCER, Transaction
from mqd.coordinator.transaction.cores import TransactionCoreFactory
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, Identity, WriteMarkers
from mqd.coordinator.transaction.records import (
    State,
    TransactionValue,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from mqd.coordinator.transaction.state import EPOCH_MAX, HELD_MAX, Settings

SETTINGS = Settings(max_timeout_ms=60_000, expiration_ms=100_000, response_ms=200, hold_ms=1_000)
A, B = ("a", 0), ("b", 7)
PID, NEXT = 7, 8


class Driver:
    """A core, a clock, and its persisted records; every step is checked."""

    def __init__(self, epoch: int | None = None, state: State = State.EMPTY) -> None:
        self.now, self.number = 1_000, 0
        self.core = Transaction("id", SETTINGS)
        self.log: list[tuple[bytes, bytes | None]] = []
        if epoch is not None:
            self.log.append(
                (
                    encode_key("id"),
                    encode_value(TransactionValue(PID, epoch, 5_000, state, (), self.now, self.now, PID, -1, 2)),
                )
            )
            self.core.replay(*self.log[0])
        self.actions: list[Action] = []
        self.attempt = 0

    def report(self, event: object) -> list[Action]:
        self.actions = self.core.handle(event, self.now)
        self.core.check()
        for action in self.actions:
            if isinstance(action, Persist):
                self.log += action.records
            elif isinstance(action, WriteMarkers):
                self.attempt = action.attempt
        again = Transaction("id", SETTINGS)
        for key, value in self.log:
            again.replay(key, value)
        assert again.durable_state() == self.core.durable_state()
        return self.actions

    def send_request(self, kind: type, *arguments: object, **options: object) -> object:
        """The response; None while it waits."""
        self.number += 1
        self.report(kind(self.number, *arguments, **options))
        return self.answer(self.number)

    def answer(self, number: int) -> object:
        return next(
            (action.response for action in self.actions if isinstance(action, Reply) and action.request == number), None
        )

    def markers_written(self) -> list[Action]:
        return self.report(events.MarkersWritten(self.attempt))

    def wait(self, milliseconds: int) -> list[Action]:
        self.now += milliseconds
        return self.report(TimerFired("due"))

    def add(self, epoch: int, *partitions: tuple[str, int], producer_id: int = PID, version: int = 2) -> object:
        return self.send_request(events.AddPartitions, producer_id, epoch, partitions or (A,), version)

    def end(
        self, epoch: int, committed: bool = True, producer_id: int = PID, version: int = 2, spare: int = -1
    ) -> object:
        return self.send_request(events.EndTransaction, producer_id, epoch, committed, version, spare)


def identity(error: int = 0, producer_id: int = -1, epoch: int = -1) -> Identity:
    return Identity(error, producer_id, epoch)


def test_a_transaction_of_version_2() -> None:
    it = Driver()
    assert it.send_request(events.InitProducerId, 5_000) == identity(NEED_PRODUCER_ID)
    assert it.send_request(events.InitProducerId, 5_000, spare_producer_id=PID) == identity(0, PID, 0)
    assert it.add(0, A) == 0 and it.add(0, A, B) == 0
    assert it.end(0) is None, "answered when the markers are written"
    number = it.number
    (persist,) = [action for action in it.actions if isinstance(action, Persist)]
    (markers,) = [action for action in it.actions if isinstance(action, WriteMarkers)]
    assert it.actions.index(persist) < it.actions.index(markers)
    assert (markers.partitions, markers.producer_id, markers.producer_epoch, markers.committed) == (
        (A, B),
        PID,
        1,
        True,
    )
    actions = it.markers_written()
    assert it.answer(number) == identity(0, PID, 1)
    assert [type(action) for action in actions if not isinstance(action, Timer)] == [Reply, Persist], (
        "who committed does not wait for the Complete record"
    )
    assert it.core.state == State.COMPLETE_COMMIT
    assert it.end(0) == identity(0, PID, 1) and it.end(0, False) == identity(INVALID_STATE)


def test_epochs_run_out_and_the_next_producer_id_continues() -> None:
    it = Driver(EPOCH_MAX - 1)
    assert it.add(EPOCH_MAX - 1) == 0
    assert it.end(EPOCH_MAX - 1) == identity(NEED_PRODUCER_ID)
    assert it.core.state == State.ONGOING
    assert it.end(EPOCH_MAX - 1, spare=NEXT) is None
    first = it.number
    assert it.end(EPOCH_MAX - 1, spare=99) is None, "a repetition waits too, and takes no other producer id"
    assert it.add(0, B, producer_id=NEXT) is None, "the next transaction, already"
    third = it.number
    it.markers_written()
    assert it.answer(first) == it.answer(first + 1) == identity(0, NEXT, 0)
    assert it.answer(third) == 0 and it.core.state == State.ONGOING
    assert it.end(EPOCH_MAX - 1) == identity(UNKNOWN_PRODUCER), "late: the next transaction of the new id is under way"


def test_a_retry_across_the_change_of_ids_gets_the_same_response() -> None:
    it = Driver(EPOCH_MAX - 1)
    it.add(EPOCH_MAX - 1)
    it.end(EPOCH_MAX - 1, spare=NEXT)
    it.markers_written()
    assert it.end(EPOCH_MAX - 1) == identity(0, NEXT, 0)
    assert it.end(EPOCH_MAX - 1, committed=False) == identity(INVALID_STATE)


@pytest.mark.parametrize("epoch", [0, 5, EPOCH_MAX - 3, EPOCH_MAX - 2, EPOCH_MAX - 1])
def test_a_fenced_producer_is_not_taken_for_a_retry(epoch: int) -> None:
    it = Driver(epoch)
    it.add(epoch)
    it.wait(5_000)
    assert it.core.state == State.PREPARE_ABORT and it.core.producer_epoch > epoch
    assert it.end(epoch, committed=False) == identity(FENCED)
    it.markers_written()
    assert it.end(epoch, committed=False) == it.end(epoch) == identity(FENCED)
    response = it.send_request(events.InitProducerId, 5_000, spare_producer_id=NEXT)
    assert response.error == 0 and response.producer_epoch < EPOCH_MAX
    assert response.producer_id == (NEXT if epoch >= EPOCH_MAX - 3 else PID)


def test_init_waits_for_the_abort_of_the_current_transaction() -> None:
    it = Driver(3)
    it.add(3)
    assert it.send_request(events.InitProducerId, 5_000) is None
    first = it.number
    assert it.send_request(events.InitProducerId, 5_000) is None
    it.markers_written()
    assert it.answer(first) == identity(0, PID, 6) and it.answer(first + 1) == identity(0, PID, 7), (
        "the later one fences the earlier"
    )


def test_a_late_recovery_does_not_abort_the_next_transaction() -> None:
    """InitProducerId of epoch 3, repeated when its producer already uses epoch 4."""
    it = Driver(3)
    assert it.send_request(events.InitProducerId, 5_000, PID, 3) == identity(0, PID, 4)
    assert it.send_request(events.InitProducerId, 5_000, PID, 3) == identity(0, PID, 4)
    assert it.add(4) == 0
    assert it.send_request(events.InitProducerId, 5_000, PID, 3) == identity(FENCED)
    assert it.core.state == State.ONGOING


def test_recovery_in_the_middle_of_a_transaction() -> None:
    it = Driver(3)
    it.add(3)
    assert it.send_request(events.InitProducerId, 5_000, PID, 3) is None
    it.markers_written()
    assert it.answer(it.number) == identity(0, PID, 5)


def test_recovery_at_the_last_epoch_changes_the_producer_id() -> None:
    it = Driver(EPOCH_MAX - 1)
    assert it.send_request(events.InitProducerId, 5_000, PID, EPOCH_MAX - 1, NEXT) == identity(0, NEXT, 0)
    assert it.send_request(events.InitProducerId, 5_000, PID, EPOCH_MAX - 1, 99) == identity(0, NEXT, 0), "its retry"
    assert it.send_request(events.InitProducerId, 5_000, PID, EPOCH_MAX - 2) == identity(FENCED)


def test_markers_that_take_long() -> None:
    """Callers that end a transaction get a response after a while; callers that begin one must
    retry.
    """
    it = Driver(3)
    it.add(3)
    it.end(3)
    end = it.number
    assert it.add(4) is None
    begun = it.number
    it.wait(200)
    assert it.answer(end) == identity(0, PID, 4) and it.answer(begun) is None
    it.wait(800)
    assert it.answer(begun) == CONCURRENT
    assert it.core.state == State.PREPARE_COMMIT
    for _ in range(HELD_MAX):
        assert it.add(4) is None
    assert it.add(4) == CONCURRENT, "the waiting list is full"
    assert it.send_request(events.VerifyPartitions, PID, 4, (A,)) == (CONCURRENT,)
    assert it.add(4, version=0) == CONCURRENT, "of this client it could be a repetition"
    it.markers_written()
    assert sum(isinstance(action, Reply) for action in it.actions) == HELD_MAX


def test_after_a_restart_decided_transactions_are_completed() -> None:
    it = Driver(EPOCH_MAX - 1)
    it.add(EPOCH_MAX - 1, A, B)
    it.end(EPOCH_MAX - 1, spare=NEXT)
    core = Transaction("id", SETTINGS)
    for key, value in it.log:
        core.replay(key, value)
    (markers,) = [action for action in core.on_loaded(it.now) if isinstance(action, WriteMarkers)]
    assert (markers.partitions, markers.producer_epoch, markers.committed) == ((A, B), EPOCH_MAX, True)
    core.handle(events.MarkersWritten(markers.attempt), it.now)
    assert (core.state, core.producer_id, core.producer_epoch) == (State.COMPLETE_COMMIT, NEXT, 0)
    (reply,) = core.handle(events.EndTransaction(1, PID, EPOCH_MAX - 1, True, 2), it.now)
    assert reply.response == identity(0, NEXT, 0)


def test_old_markers_do_not_complete_the_next_transaction() -> None:
    """With clients of version 0 only the attempt distinguishes them."""
    it = Driver(3)
    it.add(3, version=0)
    it.end(3, version=0)
    old = it.attempt
    it.markers_written()
    it.add(3, version=0)
    it.end(3, version=0)
    it.report(events.MarkersWritten(old))
    assert it.core.state == State.PREPARE_COMMIT
    it.markers_written()
    assert it.core.state == State.COMPLETE_COMMIT


def test_an_idle_id_expires() -> None:
    it = Driver(3)
    it.wait(99_999)
    assert it.core.producer_id == PID
    it.wait(1)
    assert it.core.is_empty and it.log[-1] == (encode_key("id"), None)
    assert it.add(3) == UNKNOWN_PRODUCER and it.end(3) == identity(UNKNOWN_PRODUCER)
    assert it.send_request(events.Describe) is None and it.core.is_empty
    assert it.send_request(events.InitProducerId, 5_000, PID, 3, NEXT) == identity(0, NEXT, 0), (
        "a producer that is still there starts over"
    )


def test_an_idle_id_does_not_expire_in_a_transaction() -> None:
    it = Driver(3)
    it.now += 99_000
    it.add(3)
    it.wait(2_000)
    assert it.core.state == State.ONGOING


def test_nothing_is_added_twice() -> None:
    it = Driver(3)
    it.add(3, A, B)
    before = len(it.log)
    assert it.add(3, B) == 0 and it.add(3, A, A) == 0
    assert len(it.log) == before, "nothing new, nothing written"


def test_an_administrator_aborts() -> None:
    it = Driver(3)
    assert it.send_request(events.AbortByAdministrator, PID) == 0, "nothing is under way"
    it.add(3)
    assert it.send_request(events.AbortByAdministrator, 99) == UNKNOWN_PRODUCER
    assert it.send_request(events.AbortByAdministrator, PID) is None
    it.markers_written()
    assert it.answer(it.number) == 0 and it.core.state == State.COMPLETE_ABORT
    assert it.end(3) == identity(FENCED)


# -- records ---------------------------------------------------------------------------------------


def test_the_records_are_kafkas() -> None:
    """Bytes constructed by hand from the public schemas."""
    assert encode_key("ab") == bytes.fromhex("00000002") + b"ab" and decode_key(encode_key("ab")) == "ab"
    value = TransactionValue(1, 2, 3, State.ONGOING, (("t", 0), ("t", 5)), 4, 5, 6, -1, 2)
    head = "0001000000000000000100020000000301"
    partitions = "02027403000000000000000500"
    times = "00000000000000040000000000000005"
    tags = "020008000000000000000602020002"
    assert encode_value(value).hex() == head + partitions + times + tags
    assert decode_value(encode_value(value)) == value
    old = "0000000000000000000100020000000304000000010001740000000100000005" + times
    assert decode_value(bytes.fromhex(old)) == TransactionValue(1, 2, 3, State.COMPLETE_COMMIT, (("t", 5),), 4, 5)
    empty = encode_value(TransactionValue(1, 2, 3, State.EMPTY, (), 4, -1))
    assert empty[17] == 0, "null"
    assert decode_key(bytes.fromhex("0001ffff")) is None, "of a newer version"


_PARTITIONS = st.lists(
    st.tuples(st.text(min_size=1, max_size=200), st.integers(0, 2**31 - 1)), unique=True, max_size=20
)


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, EPOCH_MAX),
    st.sampled_from([State.ONGOING, State.PREPARE_ABORT]),
    _PARTITIONS,
    st.integers(-1, 2**63 - 1),
    st.sampled_from([0, 2]),
)
def test_values_are_read_back(
    producer_id: int, epoch: int, state: State, partitions: list[tuple[str, int]], other: int, version: int
) -> None:
    found = decode_value(
        encode_value(TransactionValue(producer_id, epoch, 1, state, tuple(partitions), 2, 3, other, other, version))
    )
    assert sorted(found.partitions) == sorted(partitions)
    assert (
        found.producer_id,
        found.producer_epoch,
        found.state,
        found.previous_producer_id,
        found.next_producer_id,
        found.client_version,
    ) == (producer_id, epoch, state, other, other, version)


@given(st.binary(max_size=120), st.integers(0, 200), st.integers(0, 255))
def test_invalid_bytes_are_a_value_error(junk: bytes, at: int, byte: int) -> None:
    good = encode_value(TransactionValue(1, 2, 3, State.ONGOING, (("topic", 1), ("other", 2)), 4, 5, 6, 7, 2))
    changed = good[: at % len(good)] + bytes((byte,)) + good[at % len(good) + 1 :]
    for data in (junk, changed, good[: at % len(good)], b"\x00\x01" + junk):
        for decode in (decode_value, decode_key, TransactionCoreFactory(SETTINGS).core_name_of):
            try:
                decode(data)
            except ValueError:
                pass


def test_a_key_selects_its_core() -> None:
    cores = TransactionCoreFactory(SETTINGS)
    name = cores.core_name_of(encode_key("some id"))
    assert name == "some id" and cores.make(name).is_empty


def test_a_clock_that_was_ahead_before_a_restart_prolongs_no_transaction() -> None:
    it = Driver(epoch=3)
    assert it.add(3) == 0
    core = Transaction("id", SETTINGS)
    for key, value in it.log:
        core.replay(key, value)
    year_ms = 365 * 24 * 3_600_000
    (timer,) = core.on_loaded(it.now - year_ms)
    assert timer.at_ms == it.now - year_ms + 5_000


@pytest.mark.parametrize("version", [0, 2])
def test_the_last_epoch_belongs_to_no_client(version: int) -> None:
    """It fences the previous epoch; no client ever received it, so a client that names it guesses."""
    it = Driver(epoch=32767, state=State.COMPLETE_ABORT)
    assert it.add(32767, version=version) == FENCED
    assert it.end(32767, committed=False, version=2, spare=77).error == FENCED
    assert it.send_request(events.InitProducerId, 5_000, spare_producer_id=77) == identity(producer_id=77, epoch=0)
