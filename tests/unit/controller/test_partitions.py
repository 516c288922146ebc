"""The controller's two cores: partitions moved between log directories, deletion of records,
missing directories; quotas and features.
"""

import pytest

from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from tests.unit.controller.cores_world import ACCEPTOR, NODE, World, create


@pytest.fixture
def world() -> World:
    world = World()
    world.settle()
    return world


def moved(world: World, image: messages.TopicImage, client: str, index: int = 0) -> None:
    world.on_host(
        host_core.MoveEnded(client, messages.MoveCompleted(image.topic_id, index, 1 - image.partitions[index].log_dir))
    )


def client_of(world: World, worker: int) -> str:
    return next(client for client, index in world.subscribed.items() if index == worker)


def test_a_move_is_complete_when_it_is_on_disk_and_all_processes_know(world: World) -> None:
    image = world.send_request(create("orders", 1)).topic
    (before,) = image.partitions
    client = client_of(world, before.owner)
    moved(world, image, client)
    assert world.inbox.get(client, []) == [] and world.slots[before.slot][3] == before.log_dir
    world.flush_log()
    assert world.slots[before.slot][3] == 1 - before.log_dir
    for name in world.subscribed:
        (message,) = world.inbox[name]
        assert isinstance(message, messages.TopicPut) and message.topic.partitions[0].log_dir == 1 - before.log_dir
    log = list(world.log)
    moved(world, image, client)  # reported again, as after a reconnection
    world.settle()
    assert world.log == log


def test_only_the_live_owner_reports_a_partitions_directory(world: World) -> None:
    image = world.send_request(create("orders", 1)).topic
    owner = image.partitions[0].owner
    log = list(world.log)
    moved(world, image, client_of(world, (owner + 1) % 3))
    moved(world, image, ACCEPTOR)
    old = client_of(world, owner)
    world.die(owner)
    moved(world, image, old)
    world.alive.add(owner)
    moved(world, image, world.join(owner))  # held until its new epoch is on disk: it has served nothing yet
    world.flush_log()
    assert {type(record).__name__ for record in world.log[len(log) :]} == {"PartitionsChanged"}


def test_a_successor_gets_the_move_that_its_predecessor_completed(world: World) -> None:
    image = world.send_request(create("orders", 1)).topic
    owner = image.partitions[0].owner
    moved(world, image, client_of(world, owner))
    world.die(owner)
    world.alive.add(owner)
    client = world.join(owner)
    assert client not in world.inbox
    world.flush_log()
    first, *_ = world.inbox[client]
    assert (
        isinstance(first, messages.Image) and first.topics[0].partitions[0].log_dir == 1 - image.partitions[0].log_dir
    )


def test_a_replica_is_moved_by_its_owner(world: World) -> None:
    image = world.send_request(create("orders", 1)).topic
    assert world.send_request(messages.MoveReplica("orders", 0, 7)).error == ErrorCode.KAFKA_STORAGE_ERROR, (
        "its directory could not be recorded"
    )
    world.request(messages.MoveReplica("orders", 0, 1))
    command = world.inbox[client_of(world, image.partitions[0].owner)][-1]
    assert (command.kind, command.slot, command.offset) == ("move_replica", image.partitions[0].slot, 1)


def test_quotas_and_features_are_reported_to_all(world: World) -> None:
    quota = messages.AlterClientQuota([("client-id", "c")], [messages.QuotaOperation("producer_byte_rate", 5.0)])
    number = world.request(quota)
    world.flush_log()
    assert number not in world.answers
    assert {
        message.client_quotas[0].quotas["producer_byte_rate"] for box in world.inbox.values() for message in box
    } == {5.0}
    world.settle()
    assert world.answers[number].error == 0
    log = list(world.log)
    assert world.send_request(quota).error == 0 and world.log == log
    assert (
        world.send_request(
            messages.UpdateFeatures(
                [messages.FeatureUpdate("metadata.version", 28, 2), messages.FeatureUpdate("nothing", 1, 1)]
            )
        ).error
        == ErrorCode.INVALID_UPDATE_VERSION
    )
    assert world.log == log, "all or none"


def test_delete_records_is_sent_to_the_owner(world: World) -> None:
    image = world.send_request(create("orders", 3)).topic
    number = world.request(messages.DeleteRecords("orders", 1, 77))
    client, command = next(
        (client, box[-1]) for client, box in world.inbox.items() if box and isinstance(box[-1], messages.Command)
    )
    assert (
        world.subscribed[client] == image.partitions[1].owner
        and command.slot == image.partitions[1].slot
        and command.offset == 77
    )
    other = next(name for name in world.subscribed if name != client)
    world.on_host(host_core.CommandEnded(other, messages.CommandDone(command.command_id, 0, 1)))
    assert number not in world.answers  # only the worker that got the request may respond
    world.on_host(host_core.CommandEnded(client, messages.CommandDone(command.command_id, 0, 70)))
    assert world.answers[number].error == 0 and world.answers[number].offset == 70


def test_delete_records_ends_with_its_worker(world: World) -> None:
    image = world.send_request(create("orders", 1)).topic
    number = world.request(messages.DeleteRecords("orders", 0, -1))
    world.die(image.partitions[0].owner)
    assert world.answers[number].error == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert world.send_request(messages.DeleteRecords("orders", 4, -1)).error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_partition_in_a_missing_directory_has_no_owner(world: World) -> None:
    world.send_request(create("orders", 2))
    host = host_core.HostCore(NODE, NODE, 3, 40, {"directory-a": 0})
    actions = host.handle(host_core.Started(world.core.committed, (), (), {}), 0)
    owners = sorted(action.owner for action in actions if isinstance(action, host_core.AssignSlot))
    assert len(owners) == 2 and owners[-1] == host_core.OWNER_NONE and owners[0] != host_core.OWNER_NONE
