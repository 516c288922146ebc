"""Reassigned replicas, retired partitions, leaders elected by an operator, and placement: the rules
by single traces.
"""

import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import PartitionChange, PartitionsChanged, PartitionState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_TOPIC
from mqd.cluster.metadata.rules.placement import Directories, Directory
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.planted import planted
from tests.unit.cluster.test_brokers import partitions, run
from tests.unit.cluster.test_rules import cluster, do, judge, proposal, topic
from tests.unit.controller.controller_world import World

NONE = frozenset()


def move(state: MetadataState, *target: int, index: int = 0) -> PartitionState:
    view = View(state)
    entry = state.topics["t"]
    reassign_rules.check_target(view, entry.partitions[index], target, True)
    change = reassign_rules.reassign(view, entry, entry.partitions[index], target, Directories(state, {}))
    return do(state, [PartitionsChanged(entry.topic_id, (change,))] if change is not None else [])


def cancel(state: MetadataState) -> PartitionState:
    entry = state.topics["t"]
    return do(
        state, [PartitionsChanged(entry.topic_id, (reassign_rules.cancel(View(state), entry, entry.partitions[0]),))]
    )


def in_sync(state: MetadataState, *members: int) -> PartitionState:
    partition = state.topics["t"].partitions[0]
    leader = partition.leader
    result = judge(state, proposal(members, 1, partition.leader_epoch, partition.partition_epoch), leader, leader * 10)
    assert result.error == 0, result
    return state.topics["t"].partitions[0]


# -- reassignment (KIP-455) ------------------------------------------------------------------------


def test_replicas_are_exchanged_when_the_new_ones_are_in_sync() -> None:
    state = topic(cluster(6))
    during = move(state, 4, 5, 6)
    assert (during.replicas, during.adding_replicas, during.removing_replicas) == (
        (4, 5, 6, 1, 2, 3),
        (4, 5, 6),
        (1, 2, 3),
    )
    assert (during.leader, during.leader_epoch, during.in_sync_replicas) == (1, 5, (1, 2, 3)) and during.directories[
        :3
    ] == ("d4", "d5", "d6")
    assert in_sync(state, 1, 2, 3, 4, 5).adding_replicas == (4, 5, 6)
    after = in_sync(state, 1, 2, 3, 4, 5, 6)
    assert (after.replicas, after.in_sync_replicas, after.adding_replicas, after.removing_replicas) == (
        (4, 5, 6),
        (4, 5, 6),
        (),
        (),
    )
    assert after.leader == 4 and after.leader_epoch == 6 and after.directories == ("d4", "d5", "d6")
    assert (1, "d1") not in state.directory_replica_counts


def test_the_leader_stays_if_it_is_a_target_and_gets_another_epoch() -> None:
    state = topic(cluster(4))
    move(state, 1, 2, 4)
    after = in_sync(state, 1, 2, 3, 4)
    assert (after.replicas, after.leader, after.leader_epoch) == ((1, 2, 4), 1, 6)


def test_another_order_is_not_a_move() -> None:
    after = move(topic(cluster()), 3, 1, 2)
    assert (after.replicas, after.directories, after.adding_replicas, after.leader, after.leader_epoch) == (
        (3, 1, 2),
        ("d3", "d1", "d2"),
        (),
        1,
        5,
    )


def test_fewer_replicas_at_once_when_enough_are_in_sync() -> None:
    after = move(topic(cluster()), 2)
    assert (after.replicas, after.leader, after.in_sync_replicas, after.leader_epoch) == ((2,), 2, (2,), 6)


def test_removal_of_replicas_waits_until_those_that_stay_are_in_sync() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2))
    during = move(state, 2, 3)
    assert during.removing_replicas == (1,) and during.replicas == (2, 3, 1)
    after = in_sync(state, 1, 2, 3)
    assert (after.replicas, after.in_sync_replicas, after.leader) == ((2, 3), (2, 3), 2)


def _early_end() -> PartitionState:
    """All added replicas are in sync, and with them one of the two required by min.insync.replicas."""
    state = topic(cluster(5), replicas=(1, 2, 3), in_sync_replicas=(1, 2))
    move(state, 3, 4)
    judge(state, proposal([1, 2, 4], 1, 5, 8))
    return state.topics["t"].partitions[0]


def test_a_reassignment_ends_only_with_enough_in_sync() -> None:
    assert _early_end().removing_replicas == (1, 2)
    with planted("R14"):
        assert _early_end().in_sync_replicas == (4,), "the trace shows nothing without the bug"


def test_records_are_accepted_while_replicas_are_added() -> None:
    state = topic(cluster(), replicas=(1,))
    during = move(state, 1, 2, 3)
    assert state.min_in_sync(state.topics["t"], during) == 1
    after = in_sync(state, 1, 2, 3)
    assert state.min_in_sync(state.topics["t"], after) == 2 and not after.adding_replicas and after.leader == 1


def test_a_cancelled_move_restores_the_replicas() -> None:
    state = topic(cluster(6))
    before = state.topics["t"].partitions[0]
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4)
    after = cancel(state)
    assert (after.replicas, after.directories, after.in_sync_replicas, after.leader) == (
        before.replicas,
        before.directories,
        before.in_sync_replicas,
        1,
    )
    assert after.leader_epoch == 6, "the host that was being added is no longer a replica"
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.NO_REASSIGNMENT_IN_PROGRESS


def test_a_cancel_that_would_leave_too_few_is_refused() -> None:
    state = topic(cluster(6))
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4, 5)
    do(state, broker_rules.fence(state, [2, 3]))
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.INVALID_REPLICA_ASSIGNMENT and "min.insync.replicas" in refused.value.message


def test_another_target_replaces_the_first() -> None:
    state = topic(cluster(6))
    move(state, 4, 5, 6)
    during = move(state, 1, 2, 4)
    assert (during.replicas, during.adding_replicas, during.removing_replicas) == ((1, 2, 4, 3), (4,), (3,))
    back = move(state, 1, 2, 3)
    assert (back.replicas, back.adding_replicas, back.removing_replicas) == ((1, 2, 3), (), ())


@pytest.mark.parametrize(
    ("target", "allowed", "error"),
    [
        ((), True, 39),
        ((1, 1), True, 39),
        ((1, 9), True, 39),
        ((1, 2), False, 38),
        ((2, 3, 1), False, 0),
        ((1,), True, 0),
    ],
)
def test_targets_are_checked(target, allowed: bool, error: int) -> None:
    state = topic(cluster())
    try:
        reassign_rules.check_target(View(state), state.topics["t"].partitions[0], target, allowed)
    except Refusal as refusal:
        assert refusal.error == error
    else:
        assert error == 0


def test_a_host_without_a_usable_directory_gets_no_replica() -> None:
    state = topic(cluster(4))
    entry = state.topics["t"]
    broken = Directories(state, {4: (Directory("d4", "/d", 1, False),)})
    with pytest.raises(Refusal) as refused:
        reassign_rules.reassign(View(state), entry, entry.partitions[0], (1, 2, 4), broken)
    assert refused.value.error == E.KAFKA_STORAGE_ERROR


def test_the_number_of_concurrent_moves_is_bounded() -> None:
    state = topic(cluster(5), count=40)
    found = reassign_rules.replace_replicas(View(state), [2], Directories(state, {}), 7)
    assert len(found) == 7 and all(change.replacing == 2 and change.removing_replicas == (2,) for _, change in found)
    for entry, change in found:
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    assert reassign_rules.replace_replicas(View(state), [2], Directories(state, {}), 7) == []
    assert len(reassign_rules.replace_replicas(View(state), [2], Directories(state, {}), 9)) == 2


def test_reassignments_by_request_have_a_result_each() -> None:
    world = World(5, 4)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", -1, -1, {0: [1, 2], 1: [2, 3]}, {})).error == 0
    expected = [("t", 0, [3, 4]), ("t", 1, None), ("t", 7, [1]), ("u", 0, [1]), ("t", 0, [1]), ("t", 1, [9])]
    response = world.send_request(
        messages.AlterReassignments([messages.PartitionReassignment(*entry) for entry in expected])
    )
    assert [result.error for result in response.results] == [0, 85, 3, 3, 42, 42], (
        "the last two name partitions that were named before"
    )
    world.settle(20)
    assert partitions(world)[0].replicas == (3, 4) and sorted(partitions(world)[0].in_sync_replicas) == [3, 4]


# -- elections -------------------------------------------------------------------------------------


def elect(state: MetadataState, kind: int) -> PartitionState:
    entry = state.topics["t"]
    return do(
        state,
        [PartitionsChanged(entry.topic_id, (election_rules.elect(View(state), kind, entry, entry.partitions[0]),))],
    )


def test_the_preferred_replica_is_elected() -> None:
    state = topic(cluster(), leader=3)
    after = elect(state, 0)
    assert (after.leader, after.leader_epoch, after.in_sync_replicas) == (1, 6, (1, 2, 3))
    for error, setup in (
        (E.ELECTION_NOT_NEEDED, {}),
        (E.PREFERRED_LEADER_NOT_AVAILABLE, {"leader": 2, "in_sync_replicas": (2, 3)}),
    ):
        with pytest.raises(Refusal) as refused:
            elect(topic(cluster(), **setup), 0)
        assert refused.value.error == error


def test_an_unclean_leader_is_an_operators_choice_and_recorded() -> None:
    state = topic(cluster(), in_sync_replicas=(), leader=-1, last_known_eligible=(2, 3))
    after = elect(state, 1)
    assert (after.leader, after.in_sync_replicas, after.recovering, after.last_known_eligible) == (2, (2,), True, ())
    with pytest.raises(Refusal) as refused:
        elect(state, 1)
    assert refused.value.error == E.ELECTION_NOT_NEEDED
    result = judge(state, _recovered(after), 2, 20)
    assert result.error == 0 and not state.topics["t"].partitions[0].recovering


def _recovered(partition: PartitionState) -> broker_messages.InSyncProposal:
    return broker_messages.InSyncProposal(
        b"t" * 16, 0, partition.leader_epoch, partition.partition_epoch, 1, [(2, 20)], True
    )


def test_without_a_live_replica_the_election_is_refused() -> None:
    state = topic(cluster(), in_sync_replicas=(), leader=-1, last_known_eligible=(2,))
    do(state, broker_rules.fence(state, [1, 2, 3]))
    with pytest.raises(Refusal) as refused:
        elect(state, 1)
    assert refused.value.error == E.ELIGIBLE_LEADERS_NOT_AVAILABLE


def test_leadership_returns_only_to_stable_hosts_with_a_large_imbalance() -> None:
    def found(stable, percent: int = 10, moves: int = 100, elsewhere: int = 4) -> int:
        state = topic(cluster(), count=20)
        for index in range(elsewhere):
            do(state, [PartitionsChanged(b"t" * 16, (_led_by_two(index),))])
        return len(election_rules.elect_preferred_leaders(View(state), stable, percent, moves))

    assert found({1: True}) == 4 and found({1: False}) == 0 and found({}) == 0
    assert found({1: True}, percent=20) == 0 and found({1: True}, moves=3) == 3


def _led_by_two(index: int):
    return PartitionChange(index, raises_leader_epoch=True, leader=2)


# -- retirement ------------------------------------------------------------------------------------


def refused(world: World, change) -> int:
    return world.send_request(change).error


@pytest.fixture
def world() -> World:
    world = World(7, 3)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 6, -1, {}, {})).error == 0
    return world


def emptied(world: World, indexes) -> None:
    for index in indexes:
        partition = partitions(world)[index]
        world.on_broker(
            world.hosts[partition.leader],
            broker_core.PartitionEmptied(world.unlogged.topics["t"].topic_id, index, partition.leader_epoch),
        )


def phases(world: World) -> list[int]:
    return [partition.retiring for partition in partitions(world)]


def test_a_topic_that_is_compacted_by_the_brokers_default_keeps_its_partitions(world: World) -> None:
    """Retired partitions would never become empty if records are never deleted."""
    operations = [messages.ConfigOperation("log.cleanup.policy", "set", "compact")]
    assert world.send_request(messages.AlterConfig(RESOURCE_BROKER, "", operations, False)).error == 0
    refused = world.send_request(messages.RetirePartitions("t", 3))
    assert refused.error == E.POLICY_VIOLATION and "never deleted" in refused.message
    operations = [messages.ConfigOperation("cleanup.policy", "set", "compact,delete")]
    assert world.send_request(messages.AlterConfig(RESOURCE_TOPIC, "t", operations, False)).error == 0
    assert world.send_request(messages.RetirePartitions("t", 3)).error == 0


def test_partitions_are_sealed_then_redirected_then_hidden_then_deleted(world: World) -> None:
    epochs = [partition.leader_epoch for partition in partitions(world)]
    assert world.send_request(messages.RetirePartitions("t", 3)).error == 0
    assert phases(world) == [0] * 6, "not before they lie where their records will go"
    until(world, lambda: phases(world) == [0, 0, 0, 1, 1, 1])
    assert [partition.redirect for partition in partitions(world)] == [-1, -1, -1, 0, 1, 2]
    assert [partition.leader_epoch > epoch for partition, epoch in zip(partitions(world), epochs)] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
    assert together(world)
    emptied(world, [3, 4, 5])
    run(world, 1_000)
    assert phases(world) == [0, 0, 0, 1, 1, 1], "empty, but records may still come to it"
    run(world, 4_000)
    assert phases(world) == [0, 0, 0, 2, 2, 2]
    emptied(world, [3, 5])
    run(world, 1_000)
    assert phases(world) == [0, 0, 0, 2, 2, 2], "one number of partitions to the next, none between"
    emptied(world, [4])
    run(world, 1_000)
    assert phases(world) == [0, 0, 0, 3, 3, 3]
    assert [
        len(partitions(world)) for one in ([], [3], [4], [5]) if emptied(world, one) or run(world, 9_000) or True
    ] == [6] * 4, "none reported, or not all at once"
    emptied(world, [3, 4, 5]), run(world, 3_000)
    assert len(partitions(world)) == 3 and all(
        len(host.core.committed.topics["t"].partitions) == 3 for host in world.hosts.values()
    )


def test_consumers_that_have_read_end_the_wait(world: World) -> None:
    assert world.send_request(messages.RetirePartitions("t", 3)).error == 0
    until(world, lambda: phases(world)[5] == 1)
    client = world.request(messages.ReleaseRetired("t"), node=world.active)
    run(world, 200)
    assert world.answers[client].error == 0 and phases(world) == [0, 0, 0, 2, 2, 2]


def test_a_partition_emptied_in_an_older_epoch_may_have_records_again(world: World) -> None:
    assert world.send_request(messages.RetirePartitions("t", 3)).error == 0
    run(world, 5_000)
    stale = [
        (world.unlogged.topics["t"].topic_id, index, partitions(world)[index].leader_epoch - 1) for index in (3, 4, 5)
    ]
    view = View(world.unlogged)
    active = world.hosts[world.active].core
    for node in world.hosts:
        broker = world.unlogged.brokers[node]
        assert (
            active.handle(
                metadata_core.PeerReceived(node, broker_messages.PartitionsEmptied(node, broker.epoch, stale)),
                world.now_ms,
            )
            == []
        )
    assert retire_rules.phase(view.state.topics["t"]) == 2


def test_retired_partitions_follow_the_ones_that_take_their_records() -> None:
    """On the same hosts, and led by the same one, even when the leader is lost."""
    world = World(7, 5)
    world.settle(20)
    assignments = {0: [1, 2, 3], 1: [2, 3, 4], 2: [4, 5, 1], 3: [5, 3, 2]}
    assert world.send_request(messages.CreateTopic("t", -1, -1, assignments, {})).error == 0
    assert world.send_request(messages.RetirePartitions("t", 2)).error == 0
    until(world, lambda: phases(world) == [0, 0, 1, 1], 20_000)
    assert (
        together(world)
        and set(partitions(world)[2].replicas) == {1, 2, 3}
        and set(partitions(world)[3].replicas) == {2, 3, 4}
    )
    until(world, lambda: phases(world) == [0, 0, 2, 2])
    lost = partitions(world)[0].leader
    world.crash(lost)
    if world.active < 0:
        world.elect(4)
    until(world, lambda: partitions(world)[0].leader not in (lost, -1), 10_000)
    run(world, 400)
    assert together(world)
    response = world.send_request(messages.ElectLeaders(0, [("t", 0)]))
    run(world, 2_500)
    assert response.error == 0 and together(world)


def until(world: World, reached, milliseconds: int = 5_000) -> None:
    end = world.now_ms + milliseconds
    while not reached():
        assert world.now_ms < end, partitions(world)
        run(world, 100)


def together(world: World) -> bool:
    return all(
        partition.leader == partitions(world)[partition.redirect].leader
        for partition in partitions(world)
        if partition.redirect >= 0
    )


@pytest.mark.parametrize(
    ("name", "count", "error"),
    [("t", 6, 37), ("t", 7, 37), ("t", 0, 37), ("t", 4, 37), ("u", 1, 3), ("__consumer_offsets", 1, 44)],
)
def test_retirements_that_are_refused(world: World, name: str, count: int, error: int) -> None:
    assert world.send_request(messages.CreateTopic("__consumer_offsets", 5, -1, {}, {})).error == 0
    assert refused(world, messages.RetirePartitions(name, count)) == error


def test_changes_refused_while_partitions_are_retired(world: World) -> None:
    assert refused(world, messages.RetirePartitions("t", 4, allow_moved_keys=True)) == 0
    assert refused(world, messages.RetirePartitions("t", 4)) == 0, "repeated"
    assert refused(world, messages.RetirePartitions("t", 2)) == 37
    assert refused(world, messages.AddPartitions("t", 8, None)) == 37
    response = world.send_request(messages.AlterReassignments([messages.PartitionReassignment("t", 5, [1])]))
    assert response.results[0].error == 42
    assert refused(world, messages.DeleteTopic("t", None)) == 0


def test_a_compacted_topic_does_not_become_empty(world: World) -> None:
    assert world.send_request(messages.CreateTopic("c", 4, -1, {}, {"cleanup.policy": "compact"})).error == 0
    assert refused(world, messages.RetirePartitions("c", 2)) == 44
