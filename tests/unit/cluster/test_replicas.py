"""Replicas that move, partitions that go, leaders that a human chooses, and where replicas are put:
the rules by single traces.
"""

import random
from collections import Counter

import msgspec
import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.host.images import owner_of
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import (
    BrokerRegistered,
    PartitionChange,
    PartitionsChanged,
    PartitionState,
    TopicCreated,
    decode_record,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import placement
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules import settings as settings_rules
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_TOPIC
from mqd.cluster.metadata.rules.placement import Directories, Directory, Loads, balance, choose
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
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
    assert (1, "d1") not in state.partition_counts


def test_the_leader_stays_when_it_may_and_gets_another_epoch() -> None:
    state = topic(cluster(4))
    move(state, 1, 2, 4)
    after = in_sync(state, 1, 2, 3, 4)
    assert (after.replicas, after.leader, after.leader_epoch) == ((1, 2, 4), 1, 6)


def test_another_order_is_no_move() -> None:
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


def test_fewer_replicas_wait_for_who_stays() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2))
    during = move(state, 2, 3)
    assert during.removing_replicas == (1,) and during.replicas == (2, 3, 1)
    after = in_sync(state, 1, 2, 3)
    assert (after.replicas, after.in_sync_replicas, after.leader) == ((2, 3), (2, 3), 2)


def _early_end(mutants=()) -> PartitionState:
    """All that was added are in sync, and with them one of two that min.insync.replicas asks for."""
    state = topic(cluster(5), replicas=(1, 2, 3), in_sync_replicas=(1, 2))
    move(state, 3, 4)
    judge(state, proposal([1, 2, 4], 1, 5, 8), mutants=mutants)
    return state.topics["t"].partitions[0]


def test_it_ends_only_with_enough_in_sync() -> None:
    assert _early_end().removing_replicas == (1, 2)
    assert _early_end(["R14"]).in_sync_replicas == (4,), "the trace shows nothing without the mutant"


def test_growing_keeps_taking_records() -> None:
    state = topic(cluster(), replicas=(1,))
    during = move(state, 1, 2, 3)
    assert state.min_in_sync(state.topics["t"], during) == 1
    after = in_sync(state, 1, 2, 3)
    assert state.min_in_sync(state.topics["t"], after) == 2 and not after.adding_replicas and after.leader == 1


def test_a_cancelled_move_leaves_all_as_it_was() -> None:
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
    assert after.leader_epoch == 6, "who was to be a replica is none any more"
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.NO_REASSIGNMENT_IN_PROGRESS


def test_a_cancel_that_would_leave_too_few_is_refused() -> None:
    state = topic(cluster(6))
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4, 5)
    do(state, broker_rules.fence(state, [2, 3], NONE))
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.INVALID_REPLICA_ASSIGNMENT and "min.insync.replicas" in refused.value.message


def test_another_target_takes_the_place_of_the_first() -> None:
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


def test_only_so_many_move_at_a_time() -> None:
    state = topic(cluster(5), count=40)
    found = reassign_rules.replacements(View(state), [2], Directories(state, {}), 7)
    assert len(found) == 7 and all(change.replacing == 2 and change.removing_replicas == (2,) for _, change in found)
    for entry, change in found:
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    assert reassign_rules.replacements(View(state), [2], Directories(state, {}), 7) == []
    assert len(reassign_rules.replacements(View(state), [2], Directories(state, {}), 9)) == 2


def test_reassignments_by_request_have_a_result_each() -> None:
    world = World(5, 4)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", -1, -1, {0: [1, 2], 1: [2, 3]}, {})).error == 0
    wanted = [("t", 0, [3, 4]), ("t", 1, None), ("t", 7, [1]), ("u", 0, [1]), ("t", 0, [1]), ("t", 1, [9])]
    answer = world.ask(messages.AlterReassignments([messages.PartitionReassignment(*entry) for entry in wanted]))
    assert [result.error for result in answer.results] == [0, 85, 3, 3, 42, 42], (
        "the last two name partitions that were named before"
    )
    world.settle(20)
    assert partitions(world)[0].replicas == (3, 4) and sorted(partitions(world)[0].in_sync_replicas) == [3, 4]


# -- elections -------------------------------------------------------------------------------------


def elect(state: MetadataState, kind: int) -> PartitionState:
    entry = state.topics["t"]
    return do(
        state,
        [PartitionsChanged(entry.topic_id, (election_rules.elected(View(state), kind, entry, entry.partitions[0]),))],
    )


def test_the_preferred_replica_is_asked_for() -> None:
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


def test_an_unclean_leader_is_a_humans_choice_and_remembered() -> None:
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


def test_without_anyone_alive_there_is_nobody_to_choose() -> None:
    state = topic(cluster(), in_sync_replicas=(), leader=-1, last_known_eligible=(2,))
    do(state, broker_rules.fence(state, [1, 2, 3], NONE))
    with pytest.raises(Refusal) as refused:
        elect(state, 1)
    assert refused.value.error == E.ELIGIBLE_LEADERS_NOT_AVAILABLE


def test_only_the_stable_and_the_much_imbalanced_get_leaderships_back() -> None:
    def found(stable, percent: int = 10, moves: int = 100, elsewhere: int = 4) -> int:
        state = topic(cluster(), count=20)
        for index in range(elsewhere):
            do(state, [PartitionsChanged(b"t" * 16, (_led_by_two(index),))])
        return len(election_rules.back_to_preferred(View(state), stable, percent, moves))

    assert found({1: True}) == 4 and found({1: False}) == 0 and found({}) == 0
    assert found({1: True}, percent=20) == 0 and found({1: True}, moves=3) == 3


def _led_by_two(index: int):
    return PartitionChange(index, new_epoch=True, leader=2)


# -- retirement ------------------------------------------------------------------------------------


def refused(world: World, change) -> int:
    return world.ask(change).error


@pytest.fixture
def world() -> World:
    world = World(7, 3)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", 6, -1, {}, {})).error == 0
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
    """What is never deleted from would never become empty."""
    operations = [messages.ConfigOperation("log.cleanup.policy", "set", "compact")]
    assert world.ask(messages.AlterConfig(RESOURCE_BROKER, "", operations, False)).error == 0
    refused = world.ask(messages.RetirePartitions("t", 3))
    assert refused.error == E.POLICY_VIOLATION and "never deleted from" in refused.message
    operations = [messages.ConfigOperation("cleanup.policy", "set", "compact,delete")]
    assert world.ask(messages.AlterConfig(RESOURCE_TOPIC, "t", operations, False)).error == 0
    assert world.ask(messages.RetirePartitions("t", 3)).error == 0


def test_partitions_are_sealed_then_redirected_then_hidden_then_gone(world: World) -> None:
    epochs = [partition.leader_epoch for partition in partitions(world)]
    assert world.ask(messages.RetirePartitions("t", 3)).error == 0
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
    ] == [6] * 4, "none heard of, or not all at once"
    emptied(world, [3, 4, 5]), run(world, 3_000)
    assert len(partitions(world)) == 3 and all(
        len(host.core.committed.topics["t"].partitions) == 3 for host in world.hosts.values()
    )


def test_consumers_that_have_read_end_the_wait(world: World) -> None:
    assert world.ask(messages.RetirePartitions("t", 3)).error == 0
    until(world, lambda: phases(world)[5] == 1)
    client = world.request(messages.ReleaseRetired("t"), node=world.active)
    run(world, 200)
    assert world.answers[client].error == 0 and phases(world) == [0, 0, 0, 2, 2, 2]


def test_a_partition_that_was_emptied_in_an_older_epoch_may_hold_records_again(world: World) -> None:
    assert world.ask(messages.RetirePartitions("t", 3)).error == 0
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
    """Where their replicas are, and where it is led, also when its leader is lost."""
    world = World(7, 5)
    world.settle(20)
    assignments = {0: [1, 2, 3], 1: [2, 3, 4], 2: [4, 5, 1], 3: [5, 3, 2]}
    assert world.ask(messages.CreateTopic("t", -1, -1, assignments, {})).error == 0
    assert world.ask(messages.RetirePartitions("t", 2)).error == 0
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
    answer = world.ask(messages.ElectLeaders(0, [("t", 0)]))
    run(world, 2_500)
    assert answer.error == 0 and together(world)


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
    assert world.ask(messages.CreateTopic("__consumer_offsets", 5, -1, {}, {})).error == 0
    assert refused(world, messages.RetirePartitions(name, count)) == error


def test_what_else_is_refused_while_partitions_go(world: World) -> None:
    assert refused(world, messages.RetirePartitions("t", 4, allow_moved_keys=True)) == 0
    assert refused(world, messages.RetirePartitions("t", 4)) == 0, "said again"
    assert refused(world, messages.RetirePartitions("t", 2)) == 37
    assert refused(world, messages.AddPartitions("t", 8, None)) == 37
    answer = world.ask(messages.AlterReassignments([messages.PartitionReassignment("t", 5, [1])]))
    assert answer.results[0].error == 42
    assert refused(world, messages.DeleteTopic("t", None)) == 0


def test_a_compacted_topic_does_not_become_empty(world: World) -> None:
    assert world.ask(messages.CreateTopic("c", 4, -1, {}, {"cleanup.policy": "compact"})).error == 0
    assert refused(world, messages.RetirePartitions("c", 2)) == 44


# -- placement -------------------------------------------------------------------------------------


def test_leaders_and_replicas_are_spread_also_over_many_small_topics() -> None:
    state = cluster(5)
    for number in range(40):
        nodes = View(state).nodes()
        replicas = choose(Loads(state, nodes), 3)
        topic(state, replicas, name=f"t{number}", topic_id=bytes([number]) * 16)
    assert set(state.preferred_counts.values()) == {8}
    counts = broker_rules.replica_counts(state).values()
    assert max(counts) - min(counts) <= 2


def test_replicas_lie_in_as_many_racks_as_there_are() -> None:
    state = cluster(9, {1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 6: "b", 7: "c", 8: "c", 9: "c"})
    loads = Loads(state, View(state).nodes())
    for _ in range(60):
        replicas = choose(loads, 3)
        assert len(set(replicas)) == 3 and len({loads.racks[node] for node in replicas}) == 3
    for _ in range(20):
        assert max(Counter(loads.racks[node] for node in choose(loads, 5)).values()) == 2
    assert max(loads.leaders.values()) - min(loads.leaders.values()) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_balance_ends_even_and_loses_no_rack(seed: int) -> None:
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
    moves = balance(state, View(state).nodes(), lambda _: True)
    loads = Loads(state, View(state).nodes())
    for name, index, replicas in moves:
        old = before[(name, index)]
        assert len(replicas) == len(set(replicas)) == len(old)
        assert placement._rack_cost(loads, replicas) <= placement._rack_cost(loads, old)
        before[(name, index)] = replicas
    counts = Counter(node for replicas in before.values() for node in replicas)
    if not racks:
        assert max(counts.values()) - min(counts[node] for node in range(1, 7)) <= 1
    else:
        assert max(counts.values()) <= max(broker_rules.replica_counts(state).values())


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
    assert [directories.place(1) for _ in range(5)] == ["b", "a", "b", "a", "b"], (
        "c is nearly full, d cannot be written to"
    )
    assert Directories(state, {1: (Directory("d", "/d", 1, False),)}).place(1) is None
    assert Directories(state, {}).place(1) == "d1" and Directories(state, {}).place(7) == ""


# -- disks -----------------------------------------------------------------------------------------


def test_a_failed_replica_leads_no_more() -> None:
    state = topic(cluster(), config={"flush.on.ack": "false"})
    after = do(
        state, broker_rules.failed(state, 1, [(b"t" * 16, 0), (b"t" * 16, 0), (b"x" * 16, 0), (b"t" * 16, 9)], NONE)
    )
    assert (after.leader, after.leader_epoch, after.in_sync_replicas, after.eligible_leader_replicas) == (
        2,
        6,
        (2, 3),
        (),
    )
    after = do(state, broker_rules.failed(state, 3, [(b"t" * 16, 0)], NONE))
    assert (
        after.leader,
        after.leader_epoch,
        after.in_sync_replicas,
        after.eligible_leader_replicas,
        after.last_known_eligible,
    ) == (2, 6, (2,), (), (3,))
    after = do(state, broker_rules.failed(state, 2, [(b"t" * 16, 0)], NONE))
    assert (
        after.leader,
        after.leader_epoch,
        after.in_sync_replicas,
        after.eligible_leader_replicas,
        after.last_known_eligible,
    ) == (-1, 7, (2,), (), (3,)), "nobody else can: it has all there is"


def test_what_was_counted_on_disk_stays_eligible_when_the_disk_fails() -> None:
    state = topic(cluster(), in_sync_replicas=(1, 2), config={"flush.on.ack": "true"})
    after = do(state, broker_rules.failed(state, 1, [(b"t" * 16, 0)], NONE))
    assert (after.leader, after.in_sync_replicas, after.eligible_leader_replicas) == (2, (2,), (1,))


def test_a_failed_disk_is_told_until_others_lead() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", 6, 3, {}, {})).error == 0
    topic_id = world.unlogged.topics["t"].topic_id
    led = [partition.index for partition in partitions(world) if partition.leader == 2]
    # the link lost it
    world.hosts[2].broker.handle(broker_core.ReplicasFailed(0, tuple((topic_id, index) for index in led)), world.now_ms)
    run(world, 1_500)
    assert led and all(partitions(world)[index].leader not in (2, -1) for index in led)
    world.hosts[2].broker.handle(broker_core.ReplicasFailed(0, ()), world.now_ms)
    run(world, 2_000)
    assert all(2 in partitions(world)[index].in_sync_replicas for index in led)


def test_a_replica_on_a_full_disk_leaves_where_enough_are_in_sync_without_it() -> None:
    state = topic(cluster(), config={"flush.on.ack": "false"})
    after = do(
        state, broker_rules.full(state, 1, [(b"t" * 16, 0), (b"t" * 16, 0), (b"x" * 16, 0), (b"t" * 16, 9)], NONE)
    )
    assert (after.leader, after.leader_epoch, after.in_sync_replicas, after.eligible_leader_replicas) == (
        2,
        6,
        (2, 3),
        (),
    )
    before = state.copy()
    for node in (1, 2, 3):
        assert broker_rules.full(state, node, [(b"t" * 16, 0)], NONE) == [] and state == before, (
            "acks=all would be refused either way"
        )
    state = topic(cluster(), config={"min.insync.replicas": "1"}, in_sync_replicas=(1, 2))
    after = do(state, broker_rules.full(state, 2, [(b"t" * 16, 0)], NONE))
    assert (after.leader, after.leader_epoch, after.in_sync_replicas) == (1, 6, (1,)), (
        "a follower that nobody waits for, and that is not taken back for what it had before"
    )


def test_full_directories_are_left_by_their_owners_replicas_until_there_is_space() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", 12, 3, {}, {})).error == 0
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


def test_what_lies_in_a_directory_that_is_gone_is_led_by_others() -> None:
    world = World(7, 3)
    world.settle(20)
    assert world.ask(messages.CreateTopic("t", 6, 3, {}, {})).error == 0
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
    assert world.ask(messages.CreateTopic("u", 1, 3, {}, {})).error == 0
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
            state, broker_messages.RegisterBroker(1, "meta", 6, "h", 1, None, "", 0, "", 0, 2, [], -1, {}), NONE
        ),
    )
    assert registered.leader_epoch == 4 and state.brokers[1].directory_id == "meta", (
        "a host that grows into a cluster keeps its number"
    )


# -- replicas that mqd moves by itself -------------------------------------------------------------


def begin(state: MetadataState, *leaving: int, moves_max: int = 50) -> list:
    found = reassign_rules.replacements(View(state), leaving, Directories(state, {}), moves_max)
    for entry, change in found:
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    return [change for _, change in found]


def test_what_cannot_be_copied_does_not_hold_up_what_can() -> None:
    state = topic(cluster(4), replicas=(1,), count=60, name="alone", topic_id=b"a" * 16)
    topic(state, replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1], NONE))
    (change,) = begin(state, 1, moves_max=5)
    assert change.adding_replicas == (4,) and state.topics["t"].partitions[0].replacing == 1


def test_a_move_to_a_host_that_is_lost_too_gets_another_goal() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1], NONE))
    begin(state, 1)
    (first,) = state.topics["t"].partitions[0].adding_replicas
    do(state, broker_rules.fence(state, [first], NONE))
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
    found = reassign_rules.grown_internal(View(state), Directories(state, {}), 10)
    for entry, change in found:
        state.apply(PartitionsChanged(entry.topic_id, (change,)))
    grown = state.topics["__consumer_offsets"].partitions[0]
    assert len(grown.adding_replicas) == 2
    lost = grown.adding_replicas[0]
    for record in broker_rules.fence(state, [lost], NONE):
        state.apply(record)
    for step in (reassign_rules.replacements(View(state), [lost], Directories(state, {}), 10), None):
        for entry, change in (
            step if step is not None else reassign_rules.grown_internal(View(state), Directories(state, {}), 10)
        ):
            state.apply(PartitionsChanged(entry.topic_id, (change,)))
    state.check()
    grown = state.topics["__consumer_offsets"].partitions[0]
    assert lost not in grown.replicas and len(grown.replicas) == 3
