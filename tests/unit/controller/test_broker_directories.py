"""A host's reports to the controller about its failed directories."""

from __future__ import annotations

import msgspec

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from tests.unit.controller.controller_world import World


def test_a_temporarily_failed_directory_is_reported_exactly_while_it_fails() -> None:
    """Even when nothing else happens in the cluster: unclean elections depend on the report."""
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 6, 1, {}, {})).error == 0
    world.settle(20)
    core = world.hosts[2].broker

    def seen(usable: bool) -> broker_core.DirectoriesSeen:
        return broker_core.DirectoriesSeen(
            (
                broker_messages.DirectoryReport("meta-2-a", "/a", 9 * usable, usable),
                broker_messages.DirectoryReport("meta-2-b", "/b", 9 * usable, usable),
            )
        )

    def report() -> list[broker_messages.ReplicasFailed]:
        world.now_ms += 10_000
        actions = [
            action for step in range(1, 40) for action in core.handle(broker_core.Tick(), world.now_ms + 100 * step)
        ]
        return [
            action.message
            for action in actions
            if isinstance(getattr(action, "message", None), broker_messages.ReplicasFailed)
        ]

    assert not report()
    core.handle(seen(False), world.now_ms)
    received = report()
    assert received and all(message.partitions for message in received)
    core.handle(seen(True), world.now_ms)
    assert not report()


def reported_by(world: World, node: int, *reports: broker_messages.DirectoryReport) -> set[tuple[bytes, int]]:
    """The partitions that this host reports as not served, with these directories."""
    core = world.hosts[node].broker
    core.handle(broker_core.DirectoriesSeen(reports), world.now_ms)
    actions = [action for step in range(1, 40) for action in core.handle(broker_core.Tick(), world.now_ms + 100 * step)]
    messages_sent = [
        action.message
        for action in actions
        if isinstance(getattr(action, "message", None), broker_messages.ReplicasFailed)
    ]
    return {key for message in messages_sent for key in message.partitions}


def test_partitions_without_a_leader_are_reported_by_all_hosts_that_cannot_serve_them() -> None:
    """Otherwise an unclean election chooses it."""
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 1, 3, {}, {})).error == 0
    world.settle(20)
    topic = world.unlogged.topics["t"]
    key, leader = (topic.topic_id, 0), topic.partitions[0].leader
    other = leader % 3 + 1
    core = world.hosts[other].broker
    core._state = core._state.copy()

    def now(**fields: object) -> None:
        partition = msgspec.structs.replace(core._state.topics["t"].partitions[0], **fields)
        core._state.topics["t"] = msgspec.structs.replace(core._state.topics["t"], partitions=(partition,))

    now(in_sync_replicas=(leader,), leader=leader)
    lost = (
        broker_messages.DirectoryReport(f"meta-{other}-a", "/a", 0, False),
        broker_messages.DirectoryReport(f"meta-{other}-b", "/b", 0, False),
    )
    assert reported_by(world, other, *lost) == set(), "no partition is placed there"
    now(in_sync_replicas=(), leader=-1, eligible_leader_replicas=(leader,))
    assert reported_by(world, other, lost[0]) == {key}


def test_partitions_in_a_directory_no_longer_configured_fail_too() -> None:
    """Even if the registration does not name that directory: the metadata directory was lost too,
    and no other was usable.
    """
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 6, 1, {}, {})).error == 0
    world.settle(20)
    core = world.hosts[2].broker
    led = {
        (topic.topic_id, partition.index)
        for topic in world.unlogged.topics.values()
        for partition in topic.partitions
        if partition.leader == 2
    }
    core._state = core._state.copy()
    core._state.brokers[2] = msgspec.structs.replace(core._state.brokers[2], directories={"new": "/a"})
    assert led and reported_by(world, 2, broker_messages.DirectoryReport("new", "/a", 0, False)) == led


def test_a_new_controller_gets_the_directories_at_once() -> None:
    """Until then it considers all of them usable."""
    world = World(7, 3)
    world.settle(20)
    core = world.hosts[2].broker
    core.handle(broker_core.ControllerKnown(-1, 90), world.now_ms)
    actions = core.handle(broker_core.ControllerKnown(3, 91), world.now_ms)
    heartbeats = [
        action.message for action in actions if isinstance(getattr(action, "message", None), broker_messages.Heartbeat)
    ]
    assert [bool(one.directories) for one in heartbeats] == [True]
