"""Reassignments while hosts are lost: no move releases the last replica with acknowledged records,
and none waits for a host that cannot hold it; by single traces of the rules.
"""

import pytest

from mqd.cluster.broker.messages import DirectoryReport, RegisterBroker
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import PartitionChange, PartitionsChanged, PartitionState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules import topics as metadata_rules
from mqd.cluster.metadata.rules.partitions import replicas_before
from mqd.cluster.metadata.rules.placement import Directories
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_brokers import partitions, run
from tests.unit.cluster.test_replica_placement import begin
from tests.unit.cluster.test_replicas import cancel, elect, in_sync, move, phases, together, until
from tests.unit.cluster.test_rules import cluster, do, topic
from tests.unit.controller.controller_world import World


def returned(state: MetadataState, node: int, clean: bool = False, directory: str = "") -> PartitionState:
    """The host's next start: `again`, with other disks; or on the same ones, where not `clean`
    means that the page cache may be lost.
    """
    old = state.brokers[node]
    clean_epoch = old.epoch if clean else -1
    directories = [DirectoryReport(f"{directory or 'd'}{node}", "/d", 1, True)]
    message = RegisterBroker(
        node,
        directory + old.directory_id,
        old.incarnation + 1,
        "h",
        1,
        None,
        "",
        0,
        "",
        0,
        1,
        directories,
        clean_epoch,
        dict(old.features),
    )
    do(state, broker_rules.register(state, message))
    return do(state, broker_rules.unfence(state, node))


def in_sync_by(state: MetadataState, *members: int) -> PartitionState:
    """Proposed by its leader, in the members' current sessions."""
    entry = state.topics["t"]
    target = reassign_rules.Target(entry.partitions[0])
    target.in_sync = tuple(node for node in entry.partitions[0].replicas if node in members)
    change = View(state).change_to(entry, target)
    return do(state, [PartitionsChanged(entry.topic_id, (change,))])


def only_the_added_one_is_left(config: dict[str, str], clean: bool = True) -> MetadataState:
    """{1, 2} is moved to {3, 4}; 3 has caught up when 1 and 2 are lost and return without their
    data, and 3 restarts.
    """
    state = topic(cluster(5), replicas=(1, 2), config=config)
    move(state, 3, 4)
    assert in_sync(state, 1, 2, 3).adding_replicas == (3, 4)
    for node in (1, 2):
        do(state, broker_rules.fence(state, [node]))
        if not config:
            returned(state, node, directory="new")
    partition = do(state, broker_rules.fence(state, [3]))
    assert (partition.leader, partition.in_sync_replicas, partition.eligible_leader_replicas) == (-1, (), (3,))
    return state


@pytest.mark.parametrize("config", [{}, {"min.insync.replicas": "1"}])
def test_another_target_keeps_the_last_replica_with_all_records(config: dict[str, str]) -> None:
    state = only_the_added_one_is_left(config)
    partition = move(state, 1, 2)
    assert (
        partition.replicas == (1, 2, 3)
        and partition.removing_replicas == (3,)
        and partition.eligible_leader_replicas == (3,)
        and partition.leader == -1
    )
    partition = returned(state, 3, clean=True)
    assert partition.leader == 3, "it leads, and the others copy what they lack"
    for node in (1, 2):
        if state.brokers[node].fenced:
            returned(state, node)
    partition = in_sync_by(state, 1, 2, 3)
    assert (partition.replicas, partition.in_sync_replicas, partition.removing_replicas, partition.leader) == (
        (1, 2),
        (1, 2),
        (),
        1,
    )


def test_a_shortened_replica_can_be_the_last_known_eligible_one() -> None:
    state = only_the_added_one_is_left({})
    partition = returned(state, 3)
    assert (partition.in_sync_replicas, partition.eligible_leader_replicas, partition.leader) == (
        (),
        (),
        -1,
    ) and 3 in partition.last_known_eligible
    with pytest.raises(Refusal) as refused:
        cancel(state)
    assert refused.value.error == E.INVALID_REPLICA_ASSIGNMENT and "uncleanly" in refused.value.message
    partition = move(state, 1, 2)
    assert partition.removing_replicas == (3,) and 3 in partition.last_known_eligible
    partition = elect(state, election_rules.ELECT_UNCLEAN)
    assert partition.leader in (2, 3), "one of those with the records, not the empty one"
    partition = in_sync_by(state, 1, 2, 3)
    assert partition.replicas == (1, 2) and not partition.removing_replicas


def test_a_needed_copy_stays_until_enough_replicas_are_in_sync() -> None:
    state = topic(cluster(6))
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4)
    do(state, broker_rules.fence(state, [2, 3]))
    do(state, broker_rules.fence(state, [4]))
    partition = move(state, 1, 2, 3)
    assert (
        partition.in_sync_replicas == (1,)
        and 4 in partition.eligible_leader_replicas
        and partition.removing_replicas == (4,)
    )
    do(state, broker_rules.fence(state, [1]))
    assert returned(state, 4, clean=True).leader == 4, "it has all that was acknowledged, and the three are away"
    returned(state, 2)
    partition = in_sync_by(state, 2, 4)
    assert partition.removing_replicas == (4,)
    returned(state, 3)
    partition = in_sync_by(state, 2, 3, 4)
    assert set(partition.replicas) == {1, 2, 3} and not partition.removing_replicas


def sent_superseded() -> tuple[MetadataState, int]:
    """A move of mqd's own from 1, with the others lost: its first target has caught up and is then
    drained too, but is still needed.
    """
    state = topic(cluster(6), replicas=(1, 2, 3))
    begin(state, 1)
    (first,) = state.topics["t"].partitions[0].adding_replicas
    do(state, broker_rules.fence(state, [2, 3]))
    assert in_sync(state, 1, first).in_sync_replicas == (first, 1)
    begin(state, 1, first)
    partition = state.topics["t"].partitions[0]
    assert (
        set(partition.removing_replicas) == {1, first}
        and partition.replacing == 1
        and len(partition.adding_replicas) == 1
    )
    return state, first


def test_an_abandoned_but_needed_target_does_not_stay_a_replica() -> None:
    state, first = sent_superseded()
    (second,) = state.topics["t"].partitions[0].adding_replicas
    begin(state, 1, first, second)
    partition = state.topics["t"].partitions[0]
    assert (
        set(partition.removing_replicas) == {1, first}
        and len(partition.adding_replicas) == 1
        and len(partition.replicas) == 5
    )
    partition = in_sync_by(state, 1, first, *partition.adding_replicas)
    assert first in partition.replicas, "two have to be in sync without those that leave"
    for node in (2, 3):
        returned(state, node)
    partition = in_sync_by(state, *partition.replicas)
    assert len(partition.replicas) == 3 and not {1, first, second} & set(partition.replicas)


def test_an_abandoned_target_is_removed_when_the_move_is_cancelled() -> None:
    state, first = sent_superseded()
    for entry, change in reassign_rules.cancel_replacements(View(state), 1):
        do(state, [PartitionsChanged(entry.topic_id, (change,))])
    partition = state.topics["t"].partitions[0]
    assert (
        set(partition.replicas) == {1, 2, 3, first}
        and partition.removing_replicas == (first,)
        and not partition.adding_replicas
    )
    returned(state, 2)
    partition = in_sync_by(state, 1, 2, first)
    assert set(partition.replicas) == {1, 2, 3} and not partition.removing_replicas and partition.replacing == -1


def test_an_abandoned_target_is_removed_when_an_older_controller_completes_the_move() -> None:
    """It does not know of targets given up, and does not report them: a cancelled later
    reassignment would go back to fewer replicas than before.
    """
    state, first = sent_superseded()
    partition = state.topics["t"].partitions[0]
    assert partition.superseded_replicas == (first,)

    def says(stay: tuple[int, ...], **fields) -> PartitionState:
        change = PartitionChange(0, replicas=stay, directories=tuple(f"d{node}" for node in stay), **fields)
        return do(state, [PartitionsChanged(state.topics["t"].topic_id, (change,))])

    stay = tuple(node for node in partition.replicas if node not in partition.removing_replicas)
    ended = says(
        stay,
        in_sync_replicas=partition.adding_replicas,
        leader=partition.adding_replicas[0],
        adding_replicas=(),
        removing_replicas=(),
        replacing=-1,
        raises_leader_epoch=True,
    )
    assert ended.superseded_replicas == ()
    back = says((*stay, first), adding_replicas=(first,))
    assert replicas_before(back) == stay
    back = says((*stay, first), adding_replicas=())
    assert replicas_before(back) == (*stay, first), "it is a replica like any other"


def of_another_goal() -> MetadataState:
    """{1, 2, 3} is moved to {4, 5, 6}, 2 and 3 are lost, and the move gets another target: 4 has
    caught up, and two must be in sync.
    """
    state = topic(cluster(7))
    move(state, 4, 5, 6)
    in_sync(state, 1, 2, 3, 4)
    do(state, broker_rules.fence(state, [2, 3]))
    partition = move(state, 1, 2, 7)
    assert (partition.adding_replicas, set(partition.removing_replicas), set(partition.in_sync_replicas)) == (
        (7,),
        {3, 4},
        {1, 4},
    )
    return state


def test_a_cancel_restores_the_original_replicas_after_a_changed_target() -> None:
    """The needed copy of the first target used to be among the original replicas (KIP-455: those to
    which a cancel returns).
    """
    state = of_another_goal()
    partition = cancel(state)
    assert (
        set(partition.replicas) == {1, 2, 3, 4}
        and partition.removing_replicas == (4,)
        and not partition.adding_replicas
    ), "still needed"
    entry = state.topics["t"]
    assert reassign_rules.cancel(View(state), entry, partition) is None, "repeated"
    returned(state, 2)
    partition = in_sync_by(state, 1, 2, 4)
    assert (
        set(partition.replicas) == {1, 2, 3} and not partition.removing_replicas and not partition.superseded_replicas
    )


def test_a_previous_target_does_not_count_and_may_be_the_target_again() -> None:
    state = of_another_goal()
    for target, error in (((1, 2, 5), 0), ((1, 2, 5, 6), E.INVALID_REPLICATION_FACTOR)):
        try:
            reassign_rules.check_target(View(state), state.topics["t"].partitions[0], target, False)
        except Refusal as refusal:
            assert refusal.error == error
        else:
            assert not error
    place = metadata_rules.PlacementContext(1, View(state), Directories(state, {}), 100)
    (added,) = metadata_rules.add_partitions(state, messages.AddPartitions("t", 2, None), place)
    assert len(added.partitions[0].replicas) == 3
    partition = move(state, 1, 4, 5)
    assert (
        set(partition.adding_replicas) == {4, 5}
        and set(partition.removing_replicas) == {2, 3}
        and not partition.superseded_replicas
    )
    move(state, 1, 2, 6)
    partition = cancel(state)
    assert set(partition.replicas) == {1, 2, 3, 4} and partition.removing_replicas == (4,)


# -- retired partitions, and those that take their records, during reassignments ---------------


class Slow:
    """Hosts to which some partitions are not copied."""

    def __init__(self, world: World, *copies: tuple[int, int]) -> None:
        self.copies, self._fetch = set(copies), world.fetch
        world.fetch = self.fetch

    def fetch(self, host=None, key=None) -> None:
        if host is None or (host.node, key[1]) not in self.copies:
            self._fetch(host, key)


def retired(hosts: int, *replicas: int, count: int = 2, reached: int = 2) -> World:
    """Partitions from 1 on redirect their records to partition 0."""
    world = World(7, hosts, lossy=False)
    world.settle(20)
    assert (
        world.send_request(
            messages.CreateTopic("t", -1, -1, {index: list(replicas) for index in range(count)}, {})
        ).error
        == 0
    )
    assert world.send_request(messages.RetirePartitions("t", 1)).error == 0
    until(world, lambda: phases(world)[1] >= reached, 20_000)
    assert together(world)
    return world


def reassign(world: World, *replicas: int) -> None:
    response = world.send_request(messages.AlterReassignments([messages.PartitionReassignment("t", 0, list(replicas))]))
    assert [result.error for result in response.results] == [0]


def apart_ms(world: World, milliseconds: int) -> int:
    """The longest time in this period during which they are on different hosts."""
    longest = since = 0
    for _ in range(milliseconds // 100):
        run(world, 100)
        since = 0 if together(world) else since + 100
        longest = max(longest, since)
    return longest


def moved_to(world: World, *replicas: int) -> bool:
    return all(
        set(partition.replicas) == set(partition.in_sync_replicas) == set(replicas) for partition in partitions(world)
    )


@pytest.mark.parametrize("how", ["drain", "reassign"])
def test_they_stay_on_one_host_while_a_large_one_is_copied(how: str) -> None:
    world = retired(4, 1, 2, 3)
    slow = Slow(world, (4, 1))
    if how == "drain":
        assert world.send_request(messages.DrainBroker(1)).error == 0
    else:
        reassign(world, 4, 2, 3)
    assert apart_ms(world, 60_000) <= 1_100
    assert set(partitions(world)[0].replicas) == {2, 3, 4} and partitions(world)[1].adding_replicas == (4,)
    slow.copies.clear()
    until(world, lambda: moved_to(world, 2, 3, 4), 20_000)
    assert apart_ms(world, 10_000) <= 1_100


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("before", "after"), [((1, 2, 3), (4, 5, 6)), ((1,), (2,))])
def test_neither_leaves_for_hosts_where_the_other_is_not(
    late: int, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    world = retired(6, *before)
    slow = Slow(world, *((node, late) for node in after))
    reassign(world, *after)
    assert apart_ms(world, 30_000) <= 1_100
    early = partitions(world)[1 - late]
    assert set(early.in_sync_replicas) == {*before, *after}, "it could have ended"
    slow.copies.clear()
    assert apart_ms(world, 10_000) <= 1_100
    assert moved_to(world, *after) and together(world)


@pytest.mark.parametrize("late", [0, 1])
def test_one_host_that_has_both_is_enough(late: int) -> None:
    world = retired(6, 1, 2, 3)
    slow = Slow(world, *((node, late) for node in (4, 5, 6)))
    reassign(world, 4, 5, 6)
    run(world, 5_000)
    assert len(partitions(world)[1 - late].replicas) == 6
    slow.copies.remove((4, late))
    assert apart_ms(world, 5_000) <= 1_100
    early, other = partitions(world)[1 - late], partitions(world)[late]
    assert set(early.replicas) == {4, 5, 6} and early.leader == other.leader == 4 and other.adding_replicas == (4, 5, 6)


def test_a_retired_partition_does_not_wait_for_a_lost_host() -> None:
    world = retired(4, 1, 2, 3)
    Slow(world, (4, 1))
    reassign(world, 4, 2, 3)
    run(world, 5_000)
    world.crash(4)
    if world.active < 0:
        world.elect(2)
    run(world, 5_000)
    assert apart_ms(world, 120_000) <= 1_100
    assert moved_to(world, 1, 2, 3)


def test_a_reassignment_is_cancelled_for_all() -> None:
    world = retired(6, 1, 2, 3, reached=1)
    Slow(world, (4, 0), (5, 1))
    reassign(world, 4, 5, 6)
    run(world, 3_000)
    assert all(partition.adding_replicas for partition in partitions(world))
    response = world.send_request(messages.AlterReassignments([messages.PartitionReassignment("t", 0, None)]))
    assert response.results[0].error == 0
    assert apart_ms(world, 5_000) <= 1_100 and moved_to(world, 1, 2, 3)


def state_of(goal: tuple[int, ...], *followers: tuple[int, ...], leader: int = 1) -> MetadataState:
    state = topic(cluster(5), replicas=(1, 2, 3, 4), count=1 + len(followers))
    entry = state.topics["t"]
    changes = [PartitionChange(0, in_sync_replicas=goal, leader=leader)]
    changes += [
        PartitionChange(
            index,
            in_sync_replicas=members,
            eligible_leader_replicas=() if members else (1,),
            leader=members[0] if members else -1,
            retiring=2,
            redirect=0,
        )
        for index, members in enumerate(followers, 1)
    ]
    for change in changes:
        state.apply(PartitionsChanged(entry.topic_id, (change,)))
    return state


def led(state: MetadataState) -> list[int]:
    entry = state.topics["t"]
    for _, change in retire_rules.colocate(View(state), entry, Directories(state, {})):
        state.apply(PartitionsChanged(entry.topic_id, (change,)))
    return [partition.leader for partition in state.topics["t"].partitions]


def test_a_target_is_led_where_most_partitions_can_follow() -> None:
    assert led(state_of((1, 2, 3, 4), (2, 3), (3, 4), leader=1)) == [3, 3, 3], "in one look"
    state = state_of((1, 2, 3, 4), (2,), (3,), leader=3)
    assert [led(state) for _ in range(3)] == [[3, 2, 3]] * 3, "not to and fro"
    assert led(state_of((1, 2), (3, 4), (2, 3), leader=1)) == [2, 3, 2]
    state = state_of((1, 2, 3, 4), (2, 3), leader=2)
    assert election_rules.elect_preferred_leaders(View(state), {node: True for node in state.brokers}, 10, 10) == [], (
        "one that cannot follow it there would be left"
    )
    state = state_of((1, 2, 3, 4), (2, 1), leader=2)
    assert [
        change.leader
        for _, change in election_rules.elect_preferred_leaders(
            View(state), {node: True for node in state.brokers}, 10, 10
        )
    ] == [1]


def test_it_is_led_beside_the_other_one_even_when_that_one_moves() -> None:
    state = state_of((1, 2, 3, 4), (2, 1, 3, 4), leader=1)
    entry = state.topics["t"]
    for index in (0, 1):
        state.apply(
            PartitionsChanged(
                entry.topic_id,
                (
                    PartitionChange(
                        index,
                        replicas=(5, 2, 3, 4, 1),
                        directories=("d5", "d2", "d3", "d4", "d1"),
                        adding_replicas=(5,),
                        removing_replicas=(1,),
                    ),
                ),
            )
        )
    assert led(state) == [1, 1]


def test_reassignments_waiting_for_a_deleted_partition_end() -> None:
    state = state_of((1, 2, 3, 4), (2, 3, 4), leader=2)
    entry = state.topics["t"]
    state.apply(PartitionsChanged(entry.topic_id, (PartitionChange(1, retiring=3),)))
    move(state, 1, 5)
    assert in_sync_by(state, 1, 2, 3, 4, 5).removing_replicas == (2, 3, 4)
    assert do(state, retire_rules.remove(View(state), state.topics["t"])).replicas == (1, 5)
    assert len(state.topics["t"].partitions) == 1


def test_a_retired_partition_without_a_leader_delays_nothing() -> None:
    state = state_of((1, 2, 3, 4), (), leader=2)
    assert led(state) == [2, -1]
    assert move(state, 5).adding_replicas == (5,)
    assert in_sync_by(state, 1, 2, 3, 4, 5).replicas == (5,)
