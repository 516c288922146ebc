"""Committed offsets of deleted topics and partitions are removed, even if their coordinator did not
receive the deletion: it may be loading, on another host, or receive only a whole image.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from mqd.acceptor.coordinators import InternalPartitions
from mqd.cluster.host import messages
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import PartitionsGone
from mqd.coordinator.internal_topic import partition_for
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import DeleteTopicsRequest
from tests.unit.acceptor.handler_broker import ACCEPTOR, NODE, HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create
from tests.unit.coordinator.test_runtime import commit, fetch, run, shard_of, store, until

OTHER = NODE + 1


async def delete(broker: HandlerBroker, name: str = "t") -> None:
    response = await broker.send_request(DeleteTopicsRequest(topic_names=[name], timeout_ms=1000), 5)
    assert response.responses[0].error_code == 0
    await until(lambda: name not in broker.metadata.topics)


async def not_served(broker: HandlerBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's partition is not served here; its log stays on the disk."""
    store(broker, OFFSETS_TOPIC, partition_for("g", 3))
    monkeypatch.setattr(InternalPartitions, "served", lambda *_: None)
    broker.broker.coordinators.groups.check_partitions()
    assert shard_of(broker, "g") is None


async def served_again(broker: HandlerBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    await until(lambda: shard_of(broker, "g") is not None)


def gone(topic: messages.TopicImage, left: int, version: int) -> messages.TopicPut:
    """Sent by the controller when the retired partitions of a topic are deleted."""
    return messages.TopicPut(
        version, msgspec.structs.replace(topic, partitions=topic.partitions[:left], partition_count=left)
    )


def test_a_topic_deleted_while_its_groups_partition_was_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await create(broker, "u")
        assert await commit(broker, 5) == await commit(broker, 7, topic="u") == [0]
        await not_served(broker, monkeypatch)
        await delete(broker)
        await served_again(broker, monkeypatch)
        assert shard_of(broker, "g").core("g").offsets.partition_ends() == {"u": 1}
        await create(broker, "t", 4)
        assert await fetch(broker) == (0, -1), "the group would skip what is written to the new topic"
        assert await commit(broker, 1) == [0] and await fetch(broker) == (0, 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("again", [False, True])
def test_a_topic_recreated_while_its_groups_partition_was_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its name does not show that the offset belongs to another topic. `again`: the load fails, and
    another one succeeds.
    """
    ready = asyncio.Event()
    original = InternalPartitions.load

    async def load(self: InternalPartitions, partition: int, *arguments: object) -> object:
        await ready.wait()
        loads.append(partition)
        if again and partition == partition_for("g", 3) and loads.count(partition) == 1:
            raise OSError("the disk is slow")
        return await original(self, partition, *arguments)  # type: ignore[arg-type]

    loads: list[int] = []

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        await not_served(broker, monkeypatch)
        monkeypatch.undo()
        monkeypatch.setattr(InternalPartitions, "load", load)
        place = broker.broker.coordinators.groups.partition_states[partition_for("g", 3)]
        await until(lambda: place.loading is not None)
        await delete(broker)
        await create(broker, "t", 4)
        ready.set()
        await until(lambda: place.shard is not None)
        assert loads.count(place.index) == 1 + again and await fetch(broker) == (0, -1)
        assert await commit(broker, 1) == [0] and await fetch(broker) == (0, 1)
        assert place.missed == []

    run(tmp_path, scenario)


@pytest.mark.parametrize("is_recreated", [False, True])
def test_a_topic_whose_deletion_is_reported_by_a_whole_image_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recreated: bool
) -> None:
    """The controller's process was replaced meanwhile."""

    async def scenario(broker: HandlerBroker) -> None:
        await create(broker, "u")
        assert await commit(broker, 5) == await commit(broker, 7, topic="u") == [0]
        deliver = HandlerBroker._deliver
        monkeypatch.setattr(
            HandlerBroker,
            "_deliver",
            lambda self, number, message: (
                deliver(self, number, message) if number != ACCEPTOR or isinstance(message, messages.Response) else None
            ),
        )
        await broker.send_request(DeleteTopicsRequest(topic_names=["t"], timeout_ms=1000), 5)
        if is_recreated:
            await create(broker, "t", 4)
        monkeypatch.undo()
        assert shard_of(broker, "g").core("g").offsets.partition_ends() == {"t": 1, "u": 1}
        broker._deliver(ACCEPTOR, broker.shell.host._full_image("acceptor"))
        await until(lambda: shard_of(broker, "g").core("g").offsets.partition_ends() == {"u": 1})

    run(tmp_path, scenario)


def test_early_commits_for_a_recreated_topic_stay(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5, partitions=(0, 1)) == [0, 0]
        topic = broker.metadata.topics["t"]
        removed = messages.TopicRemoved(broker.metadata.version, "t", topic.topic_id, [])
        made = messages.TopicPut(broker.metadata.version, msgspec.structs.replace(topic, topic_id=b"n" * 16))
        committed = asyncio.ensure_future(commit(broker, 1))  # runs before anything that the two defer
        broker._deliver(ACCEPTOR, removed)
        broker._deliver(ACCEPTOR, made)
        assert await committed == [0] and [await fetch(broker, partition=index) for index in (0, 1)] == [
            (0, 1),
            (0, -1),
        ]
        await asyncio.sleep(0.01)
        assert await fetch(broker) == (0, 1)

    run(tmp_path, scenario)


async def recreated(broker: HandlerBroker) -> None:
    await delete(broker)
    await create(broker, "t", 4)


async def reloaded(broker: HandlerBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, in the same leader epoch."""
    shutil.rmtree(
        broker.broker.path_of(OFFSETS_TOPIC, broker.metadata.topics[OFFSETS_TOPIC].partitions[partition_for("g", 3)])
    )
    await not_served(broker, monkeypatch)
    await served_again(broker, monkeypatch)


def test_a_topic_that_was_recreated_while_the_host_had_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lapsed, and was renewed before another host was made leader of the group's partition: no
    other load has removed the offsets of the old topic.
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        epoch = shard_of(broker, "g").leader_epoch
        await not_served(broker, monkeypatch)
        broker.broker.coordinators.groups.check_partitions()  # more than once
        await recreated(broker)
        await served_again(broker, monkeypatch)
        assert shard_of(broker, "g").leader_epoch == epoch and await fetch(broker) == (0, -1), (
            "the group would skip what is written to the new topic"
        )
        assert await commit(broker, 1) == [0]
        await reloaded(broker, monkeypatch)
        assert await fetch(broker) == (0, 1), "what was missed is made up for once"

    run(tmp_path, scenario)


def test_offsets_that_another_host_coordinated_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That host knows of the deletion, and its commits are for the new topic."""

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        await not_served(broker, monkeypatch)
        monkeypatch.setattr(InternalPartitions, "is_led_elsewhere", lambda *_: True)
        broker.broker.coordinators.groups.check_partitions()
        await recreated(broker)
        await served_again(broker, monkeypatch)
        assert await fetch(broker) == (0, 5)

    run(tmp_path, scenario)


def led_by(broker: HandlerBroker, leader: int, epochs: int = 1) -> messages.PartitionsPut:
    """The controller's message about the group's partition, `epochs` leader epochs later."""
    topic = broker.metadata.topics[OFFSETS_TOPIC]
    image = topic.partitions[partition_for("g", 3)]
    return messages.PartitionsPut(
        broker.metadata.version,
        topic.topic_id,
        [msgspec.structs.replace(image, leader=leader, leader_epoch=image.leader_epoch + epochs)],
    )


def lead(broker: HandlerBroker, message: messages.PartitionsPut | messages.MessageList) -> None:
    """The worker publishes the newest epoch first, and the controller notifies the acceptor then."""
    image = (message if isinstance(message, messages.PartitionsPut) else message.parts[-1]).partitions[0]
    broker.table.positions.setdefault(image.slot, {})["leader_epoch"] = image.leader_epoch
    broker.broker.coordinators.groups.check_partitions()
    broker._deliver(ACCEPTOR, message)


def test_a_topic_recreated_while_the_partition_of_its_group_has_no_leader(tmp_path: Path) -> None:
    """Its only in-sync replica did not respond for some seconds. It leads again in another leader
    epoch, and no other host has led it.
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        epoch = shard_of(broker, "g").leader_epoch
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        broker._deliver(ACCEPTOR, led_by(broker, -1))
        assert shard_of(broker, "g") is None
        await recreated(broker)
        lead(broker, led_by(broker, NODE))
        await until(lambda: shard_of(broker, "g") is not None)
        assert shard_of(broker, "g").leader_epoch == epoch + 2 and await fetch(broker) == (0, -1), (
            "the group would skip what is written to the new topic"
        )
        assert await commit(broker, 1) == [0] and await fetch(broker) == (0, 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("reported", ["at once", "skipped", "before", "after"])
def test_offsets_that_another_host_coordinated_are_kept_however_it_is_reported(tmp_path: Path, reported: str) -> None:
    """`at once`: one message says that it led and that this host leads again. `skipped`: only the
    second, since there were too many changes. It led `before` or `after` the topic was recreated.
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        broker._deliver(ACCEPTOR, led_by(broker, -1))
        if reported == "before":
            broker._deliver(ACCEPTOR, led_by(broker, OTHER))
        await recreated(broker)
        await asyncio.sleep(0.01)
        if reported == "after":
            broker._deliver(ACCEPTOR, led_by(broker, OTHER))
        if reported == "at once":
            lead(
                broker, messages.MessageList(broker.metadata.version, [led_by(broker, OTHER), led_by(broker, NODE, 2)])
            )
        else:
            lead(broker, led_by(broker, NODE, 2 if reported == "skipped" else 1))
        await until(lambda: shard_of(broker, "g") is not None)
        assert await fetch(broker) == (0, 5)

    run(tmp_path, scenario)


def test_a_partition_is_not_loaded_for_an_epoch_unknown_to_the_metadata(tmp_path: Path) -> None:
    """They do not contain yet which host led it in between."""

    async def scenario(broker: HandlerBroker) -> None:
        groups, index = broker.broker.coordinators.groups, partition_for("g", 3)
        image = broker.metadata.topics[OFFSETS_TOPIC].partitions[index]
        broker.table.positions.setdefault(image.slot, {})["leader_epoch"] = image.leader_epoch + 2
        assert groups._partitions.served(index) is None
        broker._deliver(ACCEPTOR, led_by(broker, NODE, 2))
        assert groups._partitions.served(index).leader_epoch == image.leader_epoch + 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("fails", ["g", "other"])
def test_a_core_that_fails_at_a_removal_does_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """All cores of the partition are discarded with it, those that got the removal and those that
    did not.
    that have not.
    """

    async def scenario(broker: HandlerBroker) -> None:
        other = next(name for name in map(str, range(1000)) if partition_for(name, 3) == partition_for("g", 3))
        assert await commit(broker, 5) == await commit(broker, 6, group=other) == [0]
        names = {"g": "g", "other": other}
        bad, handle = names.pop(fails), Group.handle
        (good,) = names.values()
        reported: list[str] = []

        def failing(self: Group, event: object, now_ms: int) -> object:
            if isinstance(event, PartitionsGone):
                reported.append(self.group_id)
                if self.group_id == bad:
                    raise RuntimeError("a fault of its core")
            return handle(self, event, now_ms)

        monkeypatch.setattr(Group, "handle", failing)
        shard = shard_of(broker, "g")
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        await recreated(broker)
        await until(lambda: shard_of(broker, "g") not in (None, shard))
        assert await fetch(broker, group=good) == (0, -1)
        assert reported.count(bad) == 1, "it would fail of it forever"
        assert await commit(broker, 1, group=good) == [0]
        await reloaded(broker, monkeypatch)
        assert await fetch(broker, group=good) == (0, 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("away", [False, True])
def test_a_removal_that_could_not_be_written_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """`away`: a load detected it. By the time of the next one the topic exists again."""

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        if away:
            monkeypatch.setattr(InternalPartitions, "served", lambda *_: None)
            broker.broker.coordinators.groups.check_partitions()
            await delete(broker)
            # as if another host had coordinated until now
            broker.broker.coordinators.groups.partition_states[partition_for("g", 3)].missed.clear()
        broker.owners.refuse = int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if away:
            monkeypatch.undo()
            # between two loads it is served for less than a polling interval
            await until(lambda: broker.owners.refused_count > 0)
        else:
            await delete(broker)
        await until(lambda: shard_of(broker, "g") is None)
        await create(broker, "t", 4)
        broker.owners.refuse = 0
        await until(lambda: shard_of(broker, "g") is not None)
        assert await fetch(broker) == (0, -1)
        assert await commit(broker, 1) == [0]
        await reloaded(broker, monkeypatch)
        assert await fetch(broker) == (0, 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("how", ["told", "image", "away"])
def test_offsets_of_retired_partitions_are_removed_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5, partitions=(0, 1, 2, 3)) == [0] * 4
        topic = broker.metadata.topics["t"]
        if how == "away":
            await not_served(broker, monkeypatch)
        if how == "image":
            whole = broker.shell.host._full_image("acceptor")
            topics = [gone(one, 2, 0).topic if one.name == "t" else one for one in whole.topics]
            broker._deliver(ACCEPTOR, msgspec.structs.replace(whole, topics=topics))
        else:
            broker._deliver(ACCEPTOR, gone(topic, 2, broker.metadata.version))
        if how == "away":
            await served_again(broker, monkeypatch)
        await until(lambda: shard_of(broker, "g").core("g").offsets.partition_ends() == {"t": 2})
        broker._deliver(ACCEPTOR, messages.TopicPut(broker.metadata.version, topic))  # partitions are added again
        assert [await fetch(broker, partition=index) for index in range(4)] == [(0, 5), (0, 5), (0, -1), (0, -1)]
        assert await commit(broker, 1, partitions=(3,)) == [0] and await fetch(broker, partition=3) == (0, 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("whole", [False, True])
def test_a_topic_that_this_host_does_not_know_yet_keeps_its_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Its partitions wait for slots here. The former coordinator knew it, and accepted the commit.
    commit.
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5, partitions=(0, 3)) == [0, 0]
        await not_served(broker, monkeypatch)
        metadata, topic = broker.metadata, broker.metadata.topics["t"]
        if whole:
            del metadata.topics["t"], metadata.names[topic.topic_id]
        else:
            metadata.topics["t"] = gone(topic, 2, 0).topic
        metadata.apply(messages.SettingsPut(metadata.version, withheld=["t"]))
        await served_again(broker, monkeypatch)
        metadata.topics["t"], metadata.names[topic.topic_id] = topic, "t"
        metadata.apply(messages.SettingsPut(metadata.version, withheld=[]))
        assert await fetch(broker) == await fetch(broker, partition=3) == (0, 5)

    run(tmp_path, scenario)
