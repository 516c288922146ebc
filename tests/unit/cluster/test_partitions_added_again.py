"""A topic gets partitions again after others of it were retired: they have the same topic id and
index as the deleted ones, and are distinguished by their leader epochs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from mqd.cluster.broker import core as broker_core
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import (
    PartitionsAdded,
    PartitionState,
    RetiredPartitionsRemoved,
    TopicCreated,
    TopicState,
    decode_record,
    encode_record,
)
from mqd.cluster.metadata.rules.elections import ELECT_UNCLEAN
from mqd.cluster.metadata.rules.in_sync import Proposals
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.cluster.metadata.view import View
from mqd.native import ProducerView, SlotState
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.messages import CreatePartitionsRequest
from mqd.protocol.redirected import redirected_producer_id
from tests.unit.acceptor.handler_broker import ACCEPTOR, HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create
from tests.unit.cluster.test_brokers import partitions, run
from tests.unit.cluster.test_rules import TOPIC, cluster, do, proposal, topic
from tests.unit.controller.controller_world import World

WAY_OUT = ("mqd topic reassign", "--election-type unclean", "lost permanently")


def retired(world: World, name: str, to: int) -> list[PartitionState]:
    """A complete retirement; returns the partitions' last state."""
    topic_id = world.unlogged.topics[name].topic_id
    assert world.send_request(messages.RetirePartitions(name, to)).error == 0
    last, end = list(partitions(world, name)), world.now_ms + 120_000
    while len(partitions(world, name)) > to:
        assert world.now_ms < end
        run(world, 200)
        for partition in partitions(world, name)[to:]:
            world.on_broker(
                world.hosts[partition.leader],
                broker_core.PartitionEmptied(topic_id, partition.index, partition.leader_epoch),
            )
            last[partition.index] = max(last[partition.index], partition, key=lambda one: one.leader_epoch)
    return last[to:]


def test_partitions_added_after_a_retirement_begin_above_all_old_leader_epochs() -> None:
    """Clients that have seen the old ones accept no older leader epoch while the topic keeps its
    id: for them the partition would not exist.
    """
    world = World(7, 4, lossy=False)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 4, 3, {}, {})).error == 0
    topic_id = world.unlogged.topics["t"].topic_id
    highest = 0
    for to in (2, 1):
        gone = retired(world, "t", to)
        assert min(partition.leader_epoch for partition in gone) > 0
        highest = max(highest, *(partition.leader_epoch for partition in gone))
        assert (
            world.send_request(
                messages.AddPartitions("t", 4, None, world.unlogged.topics["t"].first_leader_epoch)
            ).error
            == 0
        )
        run(world, 500)
        added = partitions(world)[to:]
        assert world.unlogged.topics["t"].topic_id == topic_id and len(added) == 4 - to
        assert all(partition.leader_epoch > highest for partition in added), (highest, added)
    assert all(host.core.committed.topics["t"].first_leader_epoch > highest - 1 for host in world.hosts.values())
    assert world.send_request(messages.CreateTopic("u", 2, 3, {}, {})).error == 0
    assert world.send_request(messages.AddPartitions("u", 4, None)).error == 0
    run(world, 500)
    assert [partition.leader_epoch for partition in partitions(world, "u")] == [0] * 4


def test_snapshots_keep_removed_partitions_and_older_snapshots_are_read() -> None:
    state = topic(cluster(), count=3)
    do(state, [RetiredPartitionsRemoved(TOPIC, 2)])
    assert state.topics["t"].first_leader_epoch == 6
    low = PartitionState(2, (1,), ("d1",), (1,), 1, 2)
    do(
        state, [PartitionsAdded(TOPIC, (low,)), RetiredPartitionsRemoved(TOPIC, 2)]
    )  # added by a host of an older version
    assert state.topics["t"].first_leader_epoch == 6, "it never falls"
    data = msgspec.msgpack.encode(state.snapshot())
    assert MetadataState.from_snapshot(msgspec.msgpack.decode(data, type=Snapshot)) == state
    old = msgspec.msgpack.decode(data)
    for entry in old["topics"]:
        del entry["first_leader_epoch"]
    assert MetadataState.from_snapshot(msgspec.convert(old, Snapshot)).topics["t"].first_leader_epoch == 0
    record = TopicCreated(TopicState("u", b"u" * 16, (low,), {}))
    fields = msgspec.msgpack.decode(encode_record(record))
    del fields["topic"]["first_leader_epoch"]
    assert decode_record(msgspec.msgpack.encode(fields)) == record


def test_proposals_of_the_deleted_partition_are_ignored_and_those_of_the_new_one_accepted() -> None:
    """R6b uses the newest judged leader epoch: that of the old partition would have stayed forever."""
    proposals, state = Proposals(), topic(cluster(), count=2)

    def judge(expected) -> int:
        return proposals.decide(View(state), 1, 10, expected)[0].error

    old = proposal([1, 2], sequence=9, index=1)
    assert judge(old) == 0
    do(state, [RetiredPartitionsRemoved(TOPIC, 1)])
    assert judge(proposal([1, 2], sequence=10, index=1)) == E.UNKNOWN_TOPIC_OR_PARTITION
    new = PartitionState(1, (1, 2, 3), ("d1", "d2", "d3"), (1, 2, 3), 1, state.topics["t"].first_leader_epoch)
    do(state, [PartitionsAdded(TOPIC, (new,))])
    assert judge(proposal([1, 2], sequence=11, index=1)) == E.FENCED_LEADER_EPOCH
    mine = proposal([1, 2], sequence=1, leader_epoch=6, partition_epoch=0, index=1)
    assert judge(mine) == 0 and proposals._handled[TOPIC, 1].leader_epoch == 6
    assert judge(old) != 0


def test_partitions_are_not_added_by_a_broker_with_old_metadata() -> None:
    """It has not checked for open transactions that wrote to them. Only the controller knows that
    its metadata is old.
    """
    world = World(7, 4, lossy=False)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 4, 3, {}, {})).error == 0
    known = [0]
    for to in (2, 1):
        retired(world, "t", to)
        known.append(world.unlogged.topics["t"].first_leader_epoch)
        for old in known[:-1]:
            response = world.send_request(messages.AddPartitions("t", 4, None, old))
            assert (
                response.error == E.LEADER_NOT_AVAILABLE
                and "try again" in response.message
                and len(partitions(world)) == to
            )
    assert (
        known == sorted(set(known)) and world.send_request(messages.AddPartitions("t", 4, None, known[-1])).error == 0
    )
    assert world.send_request(messages.AddPartitions("t", 5, None, known[-1])).error == 0, (
        "it may have asked before others were added: those are none of the gone"
    )


def test_an_operator_can_restart_a_partition_of_lost_hosts_empty_elsewhere() -> None:
    """The remedy named in the error: until then it is unknown whether a transaction is open on it."""
    world = World(7, 4, lossy=False)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", -1, -1, {0: [1], 1: [4]}, {})).error == 0
    world.crash(4)
    if world.active < 0:
        world.elect(2)
    run(world, 30_000)
    assert [partition.leader for partition in partitions(world)] == [1, -1]
    response = world.send_request(messages.AlterReassignments([messages.PartitionReassignment("t", 1, [2])]))
    assert [result.error for result in response.results] == [0] and partitions(world)[1].leader == -1, (
        "nothing is given up by that alone"
    )
    response = world.send_request(messages.ElectLeaders(ELECT_UNCLEAN, [("t", 1)]))
    assert [result.error for result in response.results] == [0]
    run(world, 2_000)
    lost = partitions(world)[1]
    assert (lost.leader, lost.replicas, lost.in_sync_replicas) == (2, (2,), (2,))


def test_a_refusal_names_the_unreachable_partition_and_the_remedy(tmp_path: Path) -> None:
    """Partitions are not added to a topic that has shrunk while a leader cannot report whether a
    transaction is open; when the leader is lost permanently this was forever, and the error only
    said: try again.
    """

    async def scenario() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", 2)
            image = msgspec.structs.replace(broker.metadata.topics["t"], first_leader_epoch=7)
            lost = msgspec.structs.replace(image.partitions[1], leader=-1)
            withheld = msgspec.structs.replace(image, partitions=image.partitions[:1])
            for reported, words in (
                (
                    msgspec.structs.replace(image, partitions=[image.partitions[0], lost]),
                    ("Partition 1 of t has no leader", *WAY_OUT),
                ),
                (withheld, ("1 of the 2 partitions of t", "another broker")),
            ):
                broker.metadata.topics["t"] = reported
                error, text = await add(broker, 3)
                assert error == E.LEADER_NOT_AVAILABLE and all(word in text for word in words), text
            broker.metadata.topics["t"] = image
            broker.control.set_slot_state(image.partitions[1].slot, SlotState.OFFLINE)
            error, text = await add(broker, 3)
            assert error == E.LEADER_NOT_AVAILABLE and all(
                word in text for word in ("The leader of partition 1 of t", *WAY_OUT)
            ), text

    asyncio.run(scenario())


def test_the_remedy_in_the_refusal_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    section = page.split("## Reducing the number of partitions")[1].split("\n## ")[0]
    assert all(word in section for word in WAY_OUT)


async def add(broker: HandlerBroker, count: int) -> tuple[int, str | None]:
    response = await broker.send_request(
        CreatePartitionsRequest(
            topics=[CreatePartitionsRequest.Topic(name="t", count=count, assignments=None)], timeout_ms=1000
        ),
        3,
    )
    return response.results[0].error_code, response.results[0].error_message


def test_partitions_are_not_added_while_a_transaction_on_a_deleted_one_is_open(tmp_path: Path) -> None:
    """The current number of partitions decides where its marker is written: it would go to the new
    one, and the end of the transaction would never be read.
    """

    def producer(producer_id: int, first_offset: int) -> ProducerView:
        return ProducerView(producer_id, 0, first_offset, 9, 9, 0, 3)

    async def scenario() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", 2)
            topic = broker.metadata.topics["t"]
            views = broker.owners.views
            request, requested = broker.request, []

            async def noted(change: messages.Change, *arguments: object) -> messages.Response:
                requested.append(change.first_leader_epoch)
                return await request(change, *arguments)

            broker.request = noted
            views[topic.partitions[1].slot] = [producer(redirected_producer_id(77, 5), 4)]
            assert await add(broker, 3) == (0, None), "no host is queried for a topic that has never shrunk"
            topic = broker.metadata.topics["t"]
            broker._deliver(
                ACCEPTOR,
                messages.TopicPut(broker.metadata.version, msgspec.structs.replace(topic, first_leader_epoch=7)),
            )
            error, text = await add(broker, 4)
            assert (
                error == E.CONCURRENT_TRANSACTIONS
                and "former partition 5" in text
                and "producer id 77" in text
                and "then add partitions" in text
            )
            views[topic.partitions[1].slot] = [
                producer(redirected_producer_id(77, 5), -1),
                producer(redirected_producer_id(78, 2), 4),
                producer(79, 4),
            ]
            assert await add(broker, 4) == (0, None), "over; of a partition that was there before; not redirected"
            assert len(broker.metadata.topics["t"].partitions) == 4 and requested == [0, 7], (
                "what it knew when it asked"
            )

    asyncio.run(scenario())
