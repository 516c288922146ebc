"""Markers of transactions for partitions that are being retired: also written to the partition that
takes the records, under the rewritten producer id.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from mqd.acceptor.metadata import Metadata
from mqd.acceptor.transactions import TransactionService
from mqd.cluster.host import messages
from mqd.coordinator.log import AppendError, LogAppender, Marker, Served
from mqd.coordinator.transaction.events import WriteMarkers
from mqd.protocol.errors import ErrorCode
from mqd.protocol.records import HEADER
from mqd.protocol.redirected import origin_of, redirected_producer_id

MARKER = Marker("t", 3, 7, 1, 5, True, 1_000, is_bumped=True)


class Owners:
    """`sent`: (slot, producer id, token)."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def served(self, _topic: str, partition: int) -> Served:
        return Served(partition + 10, 0, 1, 4)

    def send_batch(self, _owner: int, token: int, slot: int, batch: bytes, *_: int) -> None:
        self.sent.append((slot, HEADER.unpack_from(batch)[9], token))


def run(*responses: tuple[int, int], marker: Marker = MARKER) -> tuple[list[tuple[int, int]], Any]:
    """`answers`: (error, redirect) for the appends, in order. Returns the writes and the result."""

    async def scenario() -> tuple[list[tuple[int, int]], Any]:
        owners = Owners()
        log = LogAppender(owners, owners, 1 << 63)
        future = log.append_marker_nowait(marker)
        for number, (error, redirect) in enumerate(responses):
            assert log.on_produced(owners.sent[number][2], error, 20 + number, redirect)
            await asyncio.sleep(0)
        assert log.pending_count == 0
        try:
            result: Any = await asyncio.wait_for(future, 1)
        except AppendError as error:
            result = error.error
        return [one[:2] for one in owners.sent], result

    return asyncio.run(scenario())


def test_a_marker_is_only_written_to_its_partition_when_nothing_is_redirected() -> None:
    assert run((0, -1)) == ([(13, 7)], 20)


def test_a_marker_is_written_to_both() -> None:
    assert run((0, 1), (0, -1)) == ([(13, 7), (11, redirected_producer_id(7, 3))], 20)


def test_a_marker_written_to_the_first_leader_is_written_to_the_second_too() -> None:
    assert run((ErrorCode.INVALID_PRODUCER_EPOCH, 1), (0, -1)) == (
        [(13, 7), (11, redirected_producer_id(7, 3))],
        ErrorCode.INVALID_PRODUCER_EPOCH,
    )


@pytest.mark.parametrize("error", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.INVALID_PRODUCER_EPOCH])
def test_an_error_of_the_second_is_the_markers(error: int) -> None:
    assert run((0, 1), (error, -1))[1] == error


def test_a_retriable_error_of_the_first_leader_ends_the_redirect() -> None:
    assert run((ErrorCode.NOT_ENOUGH_REPLICAS, 1)) == ([(13, 7)], ErrorCode.NOT_ENOUGH_REPLICAS)


def test_redirected_records_are_ended_in_their_current_partition() -> None:
    """Their partition is being retired now: none of it continues, and the rewritten id would be
    that of another partition's records.
    """
    there = redirected_producer_id(7, 5)
    assert run((0, 1), marker=MARKER._replace(producer_id=there)) == ([(13, there)], 20)


def topic_of(reported: int, count: int, first_leader_epoch: int = 0) -> messages.TopicImage:
    """A topic of `count` partitions; this host's processes know the first `told` of them."""
    partitions = [messages.PartitionImage(index, index, 0, 0, 1, 0, [1], [1]) for index in range(reported)]
    return messages.TopicImage(
        "t", b"t" * 16, partitions, {}, partition_count=count, first_leader_epoch=first_leader_epoch
    )


class Written:
    """A coordinator with one transaction to end, and a log whose first response is `error`; this
    host learns of `then` at the same time.
    """

    def __init__(self, error: int, *then: messages.FromController) -> None:
        self.error, self.then, self.markers, self.posted = error, then, [], asyncio.Event()
        self.metadata = Metadata()
        self.metadata.apply(messages.Image(1, "cluster", 1, [], [topic_of(4, 4)], {}, node_id=1))
        self.node_id, self.broker_number = 1, lambda _name: 1_000

    def partition_of(self, name: str, index: int) -> object:
        topic = self.metadata.topics.get(name)
        return topic.partitions[index] if topic is not None and index < len(topic.partitions) else None

    def append_marker_nowait(self, marker: Marker, _leader_epoch: int) -> "asyncio.Future[int]":
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.markers.append((marker.partition, marker.producer_id))
        if len(self.markers) > 1:
            future.set_result(20)
        else:
            for message in self.then:
                self.metadata.apply(message)
            future.set_exception(AppendError(self.error))
        return future

    def core(self, _name: str) -> "Written":
        return self

    def post(self, _name: str, _event: object) -> None:
        self.posted.set()


def markers_written(world: Any) -> list[tuple[int, int]]:
    """(partition, producer id) of all markers written until the transaction that wrote to partition
    3 has ended.
    """

    async def scenario() -> list[tuple[int, int]]:
        service = TransactionService(world, world)
        service.attach(world, world, world, lambda: 1_000)
        service.carry_out("id", WriteMarkers((("t", 3),), 7, 1, True, 1, False), 5)
        await asyncio.wait_for(world.posted.wait(), 5)
        return world.markers

    return asyncio.run(scenario())


@pytest.mark.parametrize("error", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER])
def test_a_partition_deleted_while_its_marker_is_written_ends_nothing(error: int) -> None:
    world = Written(error, messages.TopicPut(2, topic_of(2, 2, first_leader_epoch=1)))
    assert markers_written(world) == [(3, 7), (1, redirected_producer_id(7, 3))]


WITHHELD = messages.SettingsPut(2, withheld=["t"])


@pytest.mark.parametrize(
    "then",
    [
        [WITHHELD, messages.TopicPut(2, topic_of(2, 4))],
        [WITHHELD, messages.TopicPut(2, topic_of(2, 4, first_leader_epoch=1))],
        [WITHHELD, messages.TopicPut(2, topic_of(2, 2, first_leader_epoch=1))],  # it has grown since then
        [messages.TopicPut(2, topic_of(2, 4, first_leader_epoch=1))],
        [messages.Image(2, "cluster", 1, [], [], {}, node_id=1, withheld=["t"])],
    ],
    ids=["never shrunk", "shrunk and grown", "told before it grew", "told with fewer", "whole topic"],
)
def test_the_marker_of_a_partition_waiting_for_a_slot_is_neither_redirected_nor_dropped(
    then: list[messages.FromController],
) -> None:
    """Others lead it. Otherwise the transaction would count as ended, and readers of committed
    records would wait there forever.
    """
    assert markers_written(Written(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, *then)) == [(3, 7), (3, 7)]


@pytest.mark.parametrize(
    "then",
    [
        messages.TopicRemoved(2, "t", b"t" * 16, []),
        messages.TopicPut(2, msgspec.structs.replace(topic_of(2, 2), topic_id=b"u" * 16)),
    ],
    ids=["deleted", "recreated with fewer partitions"],
)
def test_a_deleted_topic_needs_no_marker(then: messages.FromController) -> None:
    assert markers_written(Written(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, then)) == [(3, 7)]


@pytest.mark.parametrize("written", [False, True])
def test_a_worker_that_dies_between_the_two_markers_gets_both_again(written: bool) -> None:
    """`written`: the second was in the log when it died. Its owner does not write the first one
    twice: the transaction has ended there.
    """

    async def scenario() -> list[tuple[int, int]]:
        world: Any = Written(0)
        owners = Owners()
        append_log = LogAppender(owners, owners, 1 << 63)
        service = TransactionService(world, world)
        service.attach(world, world, append_log, lambda: 1_000)
        service.carry_out("id", WriteMarkers((("t", 3),), 7, 1, True, 1, True), 5)
        assert append_log.on_produced(owners.sent[0][2], 0, 20, 1)
        append_log.on_owner_death(0)
        while len(owners.sent) < 3:
            await asyncio.sleep(0.001)  # it is retried after a while
        assert not world.posted.is_set()
        assert append_log.on_produced(owners.sent[2][2], 0, 20, 1)
        assert append_log.on_produced(owners.sent[3][2], ErrorCode.INVALID_PRODUCER_EPOCH if written else 0, -1)
        await asyncio.wait_for(world.posted.wait(), 5)
        return [one[:2] for one in owners.sent]

    assert asyncio.run(scenario()) == [(13, 7), (11, redirected_producer_id(7, 3))] * 2


def test_numbers() -> None:
    assert origin_of(redirected_producer_id(7, 0)) == (7, 0) and origin_of(
        redirected_producer_id((1 << 40) - 1, (1 << 22) - 1)
    ) == ((1 << 40) - 1, (1 << 22) - 1)
    assert origin_of(7) == (7, -1) and origin_of(-1) == (-1, -1) and redirected_producer_id(-1, 3) == -1
