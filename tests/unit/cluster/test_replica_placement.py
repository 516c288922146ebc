"""Placement of replicas, failing disks, feature levels, and moves that mqd starts itself."""

import random
from collections import Counter

import msgspec
import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.host.images import owner_of
from mqd.cluster.metadata.records import (
    BrokerRegistered,
    PartitionsChanged,
    PartitionState,
    TopicCreated,
    decode_record,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import placement
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import settings as settings_rules
from mqd.cluster.metadata.rules.placement import Directories, Directory, Loads, choose_replicas, plan_balance
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_brokers import partitions, run
from tests.unit.cluster.test_rules import cluster, do, topic
from tests.unit.controller.controller_world import World

# -- placement -------------------------------------------------------------------------------------


def test_leaders_and_replicas_are_spread_also_over_many_small_topics() -> None:
    state = cluster(5)
    for number in range(40):
        nodes = View(state).placement_nodes()
        replicas = choose_replicas(Loads(state, nodes), 3)
        topic(state, replicas, name=f"t{number}", topic_id=bytes([number]) * 16)
    assert set(state.preferred_counts.values()) == {8}
    counts = broker_rules.replica_counts_by_node(state).values()
    assert max(counts) - min(counts) <= 2


def test_replicas_are_spread_over_all_racks() -> None:
    state = cluster(9, {1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 6: "b", 7: "c", 8: "c", 9: "c"})
    loads = Loads(state, View(state).placement_nodes())
    for _ in range(60):
        replicas = choose_replicas(loads, 3)
        assert len(set(replicas)) == 3 and len({loads.racks[node] for node in replicas}) == 3
    for _ in range(20):
        assert max(Counter(loads.racks[node] for node in choose_replicas(loads, 5)).values()) == 2
    assert max(loads.leader_counts.values()) - min(loads.leader_counts.values()) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_balancing_ends_even_and_keeps_racks_spread(seed: int) -> None:
    rng = random.Random(seed)
    racks = {node: rng.choice("ab") for node in range(1, 7)} if seed % 2 else {}
    state = cluster(6, racks)
    for number in range(10):
        factor = rng.randint(1, 3)
        topic(
            state,
            tuple(rng.sample(range(1, rng.randint(4, 6)), factor)),
            name="t" if number == 0 else f"t{number}",
            count=rng.randint(1, 12),
            topic_id=bytes([number]) * 16,
        )
    before = {
        (entry.name, partition.index): partition.replicas
        for entry in state.topics.values()
        for partition in entry.partitions
    }
    moves = plan_balance(state, View(state).placement_nodes(), lambda _: True)
    loads = Loads(state, View(state).placement_nodes())
    for name, index, replicas in moves:
        old = before[(name, index)]
        assert len(replicas) == len(set(replicas)) == len(old)
        assert placement._repeated_rack_count(loads, replicas) <= placement._repeated_rack_count(loads, old)
        before[(name, index)] = replicas
    counts = Counter(node for replicas in before.values() for node in replicas)
    if not racks:
        assert max(counts.values()) - min(counts[node] for node in range(1, 7)) <= 1
    else:
        assert max(counts.values()) <= max(broker_rules.replica_counts_by_node(state).values())


def test_directories_with_the_fewest_replicas_first() -> None:
    state = cluster(1)
    directories = Directories(
        state,
        {
            1: (
                Directory("a", "/a", 500, True),
                Directory("b", "/b", 1000, True),
                Directory("c", "/c", 9, True),
                Directory("d", "/d", 1000, False),
            )
        },
    )
    assert [directories.choose(1) for _ in range(5)] == ["b", "a", "b", "a", "b"], (
        "c is nearly full, d cannot be written to"
    )
    assert Directories(state, {1: (Directory("d", "/d", 1, False),)}).choose(1) is None
    assert Directories(state, {}).choose(1) == "d1" and Directories(state, {}).choose(7) == ""


# -- disks -----------------------------------------------------------------------------------------


def test_a_failed_replica_leads_no_more() -> None:
    state = topic(cluster(), config={"flush.on.ack": "false"})
    after = do(
        state,
        broker_rules.on_replicas_failed(state, 1, [(b"t" * 16, 0), (b"t" * 16, 0), (b"x" * 16, 0), (b"t" * 16, 9)]),
    )
    assert (after.leader, after.leader_epoch, after.in_sync_replicas, after.eligible_leader_replicas) == (
        2,
        6,
        (2, 3),
        (),
    )
    after = do(state, broker_rules.on_replicas_failed(state, 3, [(b"t" * 16, 0)]))
    assert (
        after.leader,
        after.leader_epoch,
        after.in_sync_replicas,
        after.eligible_leader_replicas,
        after.last_known_eligible,
    ) == (2, 6, (2,), (), (3,))
    after = do(state, broker_rules.on_replicas_failed(state, 2, [(b"t" * 16, 0)]))
    assert (
        after.leader,
        after.leader_epoch,
        after.in_sync_replicas,
        after.eligible_leader_replicas,
        after.last_known_eligible,
    ) == (-1, 7, (2,), (), (3,)), "no other host can: it has all records"


def test_an_in_sync_replica_stays_eligible_when_its_disk_fails() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2), config={"flush.on.ack": "true"})
    after = do(state, broker_rules.on_replicas_failed(state, 1, [(b"t" * 16, 0)]))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (2, (2,), (1,))


def test_a_failed_disk_is_reported_until_others_lead() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 6, 3, {}, {})).error == 0
    topic_id = world.unlogged.topics["t"].topic_id
    led = [partition.index for partition in partitions(world) if partition.leader == 2]
    # the link lost it
    world.hosts[2].broker.handle(broker_core.ReplicasFailed(0, tuple((topic_id, index) for index in led)), world.now_ms)
    run(world, 1_500)
    assert led and all(partitions(world)[index].leader not in (2, -1) for index in led)
    world.hosts[2].broker.handle(broker_core.ReplicasFailed(0, ()), world.now_ms)
    run(world, 2_000)
    assert all(2 in partitions(world)[index].in_sync_replicas for index in led)


def test_a_replica_on_a_full_disk_leaves_the_isr_if_enough_others_are_in_sync() -> None:
    state = topic(cluster(), config={"flush.on.ack": "false"})
    after = do(
        state, broker_rules.on_replicas_full(state, 1, [(b"t" * 16, 0), (b"t" * 16, 0), (b"x" * 16, 0), (b"t" * 16, 9)])
    )
    assert (after.leader, after.leader_epoch, after.in_sync_replicas, after.eligible_leader_replicas) == (
        2,
        6,
        (2, 3),
        (),
    )
    before = state.copy()
    for node in (1, 2, 3):
        assert broker_rules.on_replicas_full(state, node, [(b"t" * 16, 0)]) == [] and state == before, (
            "acks=all would be refused either way"
        )
    state = topic(cluster(), config={"min.insync.replicas": "1"}, in_sync_replicas=(1, 2))
    after = do(state, broker_rules.on_replicas_full(state, 2, [(b"t" * 16, 0)]))
    assert (after.leader, after.leader_epoch, after.in_sync_replicas) == (1, 6, (1,)), (
        "a follower outside the in-sync set, which does not rejoin by its former offset"
    )


def test_replicas_in_full_directories_leave_the_isr_until_there_is_space() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 12, 3, {}, {})).error == 0
    topic_id, host = world.unlogged.topics["t"].topic_id, world.hosts[2]
    mine = [
        partition.index
        for partition in partitions(world)
        if partition.directories[partition.replicas.index(2)] == "meta-2-a"
        and owner_of(topic_id, partition.index, 2) == 1
    ]
    host.broker.handle(broker_core.DirectoriesFull(1, frozenset({"meta-2-a"})), world.now_ms)  # the link lost it
    fetch, world.fetch = world.fetch, lambda other, key: None if other is host and key[1] in mine else fetch(other, key)
    run(world, 1_500)
    assert 0 < len(mine) < 12
    for partition in partitions(world):
        assert (2 in partition.in_sync_replicas) == (partition.index not in mine) and partition.leader >= 0, partition
    world.fetch = fetch
    host.broker.handle(broker_core.DirectoriesFull(1, frozenset()), world.now_ms)
    run(world, 2_000)
    assert all(2 in partition.in_sync_replicas for partition in partitions(world))


def test_partitions_in_a_missing_directory_are_led_by_others() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 6, 3, {}, {})).error == 0
    host = world.hosts[2]
    lost = [
        partition.index
        for partition in partitions(world)
        if partition.directories[partition.replicas.index(2)] == "meta-2-a"
    ]
    host.broker.handle(
        broker_core.DirectoriesSeen(
            (
                broker_messages.DirectoryReport("meta-2-a", "/a", 0, False),
                broker_messages.DirectoryReport("meta-2-b", "/b", 9, True),
            )
        ),
        world.now_ms,
    )
    fetch, world.fetch = world.fetch, lambda *_: None
    assert world.send_request(messages.CreateTopic("u", 1, 3, {}, {})).error == 0
    run(world, 2_000)
    assert 0 < len(lost) < 6 and all(
        partitions(world)[index].leader not in (2, -1) and 2 not in partitions(world)[index].in_sync_replicas
        for index in lost
    )
    world.fetch = fetch


# -- versions --------------------------------------------------------------------------------------


def test_a_feature_level_waits_for_the_last_host() -> None:
    state = cluster()
    state.apply(BrokerRegistered(msgspec.structs.replace(state.brokers[2], features={"metadata.version": (25, 28)})))
    with pytest.raises(Refusal) as refused:
        settings_rules.update_features(
            state, messages.UpdateFeatures([messages.FeatureUpdate("metadata.version", 29, 1)])
        )
    assert refused.value.error == E.INVALID_UPDATE_VERSION and "broker 2 at h2 (25 to 28)" in refused.value.message


def test_records_of_the_version_before_clusters_are_read() -> None:
    partition = {
        "index": 0,
        "replicas": [1],
        "directories": ["a"],
        "in_sync_replicas": [1],
        "leader": 1,
        "leader_epoch": 3,
        "partition_epoch": 3,
    }
    created = {
        "type": "topic_created/1",
        "topic": {"name": "t", "topic_id": b"t" * 16, "partitions": [partition], "config": {}},
    }
    broker = {
        "type": "broker_registered/1",
        "broker": {
            "node_id": 1,
            "host": "h",
            "port": 1,
            "rack": None,
            "epoch": 0,
            "incarnation": 5,
            "directories": {"a": "/a"},
        },
    }
    state = MetadataState()
    for record, kind in ((broker, BrokerRegistered), (created, TopicCreated)):
        decoded = decode_record(msgspec.msgpack.encode(record))
        assert isinstance(decoded, kind)
        state.apply(decoded)
    state.check()
    assert not state.brokers[1].fenced and state.topics["t"].partitions[0] == PartitionState(
        0, (1,), ("a",), (1,), 1, 3, 3
    )
    registered = do(
        state,
        broker_rules.register(
            state, broker_messages.RegisterBroker(1, "meta", 6, "h", 1, None, "", 0, "", 0, 2, [], -1, {})
        ),
    )
    assert registered.leader_epoch == 4 and state.brokers[1].directory_id == "meta", (
        "a host that grows into a cluster keeps its number"
    )


# -- replicas that mqd moves by itself --------------------------------------------------------


def begin(state: MetadataState, *leaving: int, moves_max: int = 50) -> list:
    found = reassign_rules.replace_replicas(View(state), leaving, Directories(state, {}), moves_max)
    for entry, change in found:
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    return [change for _, change in found]


def test_partitions_that_cannot_be_copied_do_not_delay_others() -> None:
    state = topic(cluster(4), replicas=(1,), count=60, name="alone", topic_id=b"a" * 16)
    topic(state, replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1]))
    (change,) = begin(state, 1, moves_max=5)
    assert change.adding_replicas == (4,) and state.topics["t"].partitions[0].replacing == 1


def test_a_move_to_a_host_that_is_lost_too_gets_another_target() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1]))
    begin(state, 1)
    (first,) = state.topics["t"].partitions[0].adding_replicas
    do(state, broker_rules.fence(state, [first]))
    begin(state, 1, first)
    partition = state.topics["t"].partitions[0]
    assert (
        partition.adding_replicas == (9 - first,)
        and partition.removing_replicas == (1,)
        and partition.replacing == 1
        and len(partition.replicas) == 4
    )


def test_an_internal_topic_that_grew_towards_a_lost_host_grows_elsewhere() -> None:
    state = topic(cluster(4), replicas=(1,), name="__consumer_offsets")
    found = reassign_rules.grow_internal_topics(View(state), Directories(state, {}), 10)
    for entry, change in found:
        state.apply(PartitionsChanged(entry.topic_id, (change,)))
    grown = state.topics["__consumer_offsets"].partitions[0]
    assert len(grown.adding_replicas) == 2
    lost = grown.adding_replicas[0]
    for record in broker_rules.fence(state, [lost]):
        state.apply(record)
    for step in (reassign_rules.replace_replicas(View(state), [lost], Directories(state, {}), 10), None):
        for entry, change in (
            step if step is not None else reassign_rules.grow_internal_topics(View(state), Directories(state, {}), 10)
        ):
            state.apply(PartitionsChanged(entry.topic_id, (change,)))
    state.check()
    grown = state.topics["__consumer_offsets"].partitions[0]
    assert lost not in grown.replicas and len(grown.replicas) == 3
