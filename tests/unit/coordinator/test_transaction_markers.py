"""Markers are retried until they are written, and reported to the core that requested them; and the
verification of transactions for Produce.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import msgspec
import pytest

from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction import checks, markers
from mqd.coordinator.transaction.events import AddPartitions, MarkersWritten, VerifyPartitions, WriteMarkers
from mqd.coordinator.transaction.markers import Markers, OffsetCommits
from mqd.protocol.errors import ErrorCode

T0, T1, G3 = ("t", 0), ("t", 1), (OFFSETS_TOPIC, 3)


class World:
    """Replaces the log, the runtime and the metadata."""

    def __init__(self) -> None:
        self.the_core: object | None = object()
        self.posted: list[tuple[str, object]] = []
        self.appends: list[tuple[tuple[str, int], asyncio.Future[object]]] = []
        self.identities: list[tuple[object, ...]] = []
        self.partitions = {T0, T1, G3}
        self.commits = OffsetCommits()
        self.markers = Markers(self.append, lambda topic, index: (topic, index) in self.partitions, self.commits)
        self.markers.attach(self)  # type: ignore[arg-type]

    def append(self, topic: str, index: int, *identity: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.identities.append(identity)
        self.appends.append(((topic, index), future))
        return future

    def core(self, name: str) -> object | None:
        if self.the_core is None:
            raise CoordinatorError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return self.the_core

    def post(self, name: str, event: object) -> None:
        self.posted.append((name, event))

    async def settle(self, error: Exception | None = None) -> list[tuple[str, int]]:
        """Completes all appends in flight; returns their partitions."""
        taken, self.appends = self.appends, []
        for _, future in taken:
            future.set_exception(error) if error else future.set_result(0)
        await asyncio.sleep(0)
        return [partition for partition, _ in taken]


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(test)


def requested(*partitions: tuple[str, int]) -> WriteMarkers:
    return WriteMarkers(partitions, 7, 1, True, 4)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "RETRY_S", (0.0,))


def test_the_core_is_notified_when_all_are_written() -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(T0, T1, G3), 9)
        assert [partition for partition, _ in world.appends] == [T0, T1, G3] and not world.posted
        await world.settle()
        assert world.posted == [("id", MarkersWritten(4))] and world.markers.job_count == 0

    run(test())


def test_failed_markers_are_retried() -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(T0), 9)
        for error in (
            AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER),
            AppendError(ErrorCode.REQUEST_TIMED_OUT, is_outcome_unknown=True),
            AppendError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ):
            assert await world.settle(error) == [T0]
            while not world.appends:
                await asyncio.sleep(0)
            assert not world.posted
        await world.settle()
        assert world.posted

    run(test())


@pytest.mark.parametrize("in_the_call", [False, True])
def test_a_bug_leaves_no_transaction_open(in_the_call: bool) -> None:
    """Its marker was not retried before the coordinator was loaded again. `in_the_call`: raised
    where the marker is passed, not by its result.
    """

    async def test() -> None:
        world = World()
        append, failures = world.append, [KeyError("slot")] if in_the_call else []

        def failing(*marker: object) -> asyncio.Future[object]:
            if failures:
                raise failures.pop()
            return append(*marker)  # type: ignore[arg-type]

        world.markers._append = failing  # type: ignore[assignment]
        world.markers.carry_out("id", requested(T0), 9)
        if not in_the_call:
            assert await world.settle(KeyError("slot")) == [T0]
        for _ in range(1000):
            if world.appends:
                break
            await asyncio.sleep(0)
        assert not world.posted and await world.settle() == [T0]
        assert world.posted == [("id", MarkersWritten(4))] and world.markers.job_count == 0

    run(test())


@pytest.mark.parametrize("partition", [T0, G3])
def test_no_marker_is_sent_for_a_discarded_core(partition: tuple[str, int]) -> None:
    """Its successor had written all of them, and the producer's next transaction was aborted by a
    late marker a second later, one that was to be retried or waited for offset commits.
    """

    async def test() -> None:
        world = World()
        if partition is T0:
            world.markers.carry_out("id", requested(T0, T1), 9)
            await world.settle(AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        else:
            ticket = world.commits.enter(7)
            world.markers.carry_out("id", requested(G3), 9)
        assert not world.appends
        world.the_core = object()  # the partition of __transaction_state was loaded again
        if partition is G3:
            world.commits.leave(7, ticket)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not world.appends and not world.posted and world.markers.job_count == 0

    run(test())


@pytest.mark.parametrize(
    "error", [AppendError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), AppendError(ErrorCode.INVALID_PRODUCER_EPOCH)]
)
def test_deleted_partitions_and_ended_transactions_need_no_marker(error: AppendError) -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(T0), 9)
        world.partitions.clear()
        await world.settle(error)
        assert world.posted

    run(test())


def test_a_repeated_bumped_marker_is_done() -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", msgspec.structs.replace(requested(T0, G3), is_bumped=True), 9)
        assert world.identities == [(7, 1, 9, True, True)] * 2
        await world.settle(AppendError(ErrorCode.REQUEST_TIMED_OUT, is_outcome_unknown=True))
        while len(world.appends) < 2:
            await asyncio.sleep(0)
        assert not world.posted
        (_, first), (_, second) = world.appends
        first.set_exception(AppendError(ErrorCode.INVALID_PRODUCER_EPOCH))
        second.set_exception(CoordinatorError(ErrorCode.INVALID_PRODUCER_EPOCH))
        await asyncio.sleep(0)
        assert world.posted == [("id", MarkersWritten(4))] and world.markers.job_count == 0

    run(test())


@pytest.mark.parametrize("successor", [None, object()])
def test_a_reloaded_core_is_not_notified(successor: object | None) -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(T0, T1), 9)
        world.the_core = successor
        await world.settle(AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not world.appends and not world.posted and world.markers.job_count == 0
        world.markers.carry_out("id", requested(T0), 9)
        await world.settle()
        assert bool(world.posted) == (successor is not None)

    run(test())


def test_a_job_with_several_cancelled_writes_is_counted_once() -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(T0, T1, G3), 9)
        for _, future in world.appends:
            future.cancel()
        await asyncio.sleep(0)
        assert world.markers.job_count == 0 and not world.posted

    run(test())


def test_continuous_offset_commits_do_not_keep_a_transaction_from_ending() -> None:
    """They name the producer, whichever host sends them: they are verified after the end was
    decided, and refused.
    """

    async def test() -> None:
        world = World()
        before = world.commits.enter(7)
        world.markers.carry_out("id", requested(G3), 9)
        later = world.commits.enter(7)
        world.commits.leave(7, before)
        assert [partition for partition, _ in world.appends] == [G3]
        world.commits.leave(7, later)
        await world.settle()
        assert world.posted and not world.commits._in_flight and not world.commits._waiting

    run(test())


def test_a_record_without_partitions_is_done_at_once() -> None:
    async def test() -> None:
        world = World()
        world.markers.carry_out("id", requested(), 9)
        assert world.posted == [("id", MarkersWritten(4))] and world.markers.job_count == 0

    run(test())


def test_offsets_in_flight_are_written_before_the_marker() -> None:
    async def test() -> None:
        world = World()
        first, second, other = world.commits.enter(7), world.commits.enter(7), world.commits.enter(8)
        world.markers.carry_out("id", requested(T0, G3), 9)
        assert [partition for partition, _ in world.appends] == [T0]
        world.commits.leave(8, other)
        world.commits.leave(7, first)
        assert len(world.appends) == 1
        world.commits.leave(7, second)
        assert [partition for partition, _ in world.appends] == [T0, G3]
        await world.settle()
        assert world.posted

    run(test())


# -- verification for a Produce --------------------------------------------------------------------


class Coordinator:
    def __init__(self, response: object) -> None:
        self.answer = response
        self.event: object = None

    async def request(self, name: str, make_event, timeout_s: float | None = None) -> object:
        self.event = make_event(1)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def report(response: object, version: int, transactional_id: str = "id") -> tuple[list[int], object]:
    coordinator = Coordinator(response)
    errors = asyncio.run(checks.check_produce(coordinator, transactional_id, 7, 1, version, [T0, None, T1]))
    return errors, coordinator.event


UNKNOWN_ID = int(ErrorCode.UNKNOWN_TOPIC_ID)
AGAIN = int(ErrorCode.NOT_ENOUGH_REPLICAS)


def test_a_new_client_adds_and_an_old_one_is_verified() -> None:
    assert report(0, 12) == ([0, UNKNOWN_ID, 0], AddPartitions(1, 7, 1, (T0, T1), 2))
    assert report((0, 48), 10) == ([0, UNKNOWN_ID, 48], VerifyPartitions(1, 7, 1, (T0, T1)))
    assert report((0, 48), 11)[0] == [0, UNKNOWN_ID, int(ErrorCode.TRANSACTION_ABORTABLE)]
    assert report(0, 12, "") == ([int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)] * 3, None)


@pytest.mark.parametrize(
    ("error", "old", "new"),
    [
        (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_EPOCH),
        (ErrorCode.CONCURRENT_TRANSACTIONS, AGAIN, ErrorCode.CONCURRENT_TRANSACTIONS),
        (
            ErrorCode.INVALID_PRODUCER_ID_MAPPING,
            ErrorCode.INVALID_PRODUCER_ID_MAPPING,
            ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ),
    ],
)
def test_error_codes_are_those_that_clients_understand(error: int, old: int, new: int) -> None:
    assert report((int(error),) * 2, 10)[0] == [old, UNKNOWN_ID, old]
    assert report(int(error), 12)[0] == [new, UNKNOWN_ID, new]


@pytest.mark.parametrize(
    "error", [ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]
)
@pytest.mark.parametrize("version", [10, 12])
def test_markers_for_a_missing_coordinator_are_retried(error: int, version: int) -> None:
    assert report(CoordinatorError(error), version)[0] == [AGAIN, UNKNOWN_ID, AGAIN]
