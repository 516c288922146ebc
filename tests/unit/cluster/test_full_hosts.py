"""Hosts whose disks are full, or have failed, get no replicas while there are others, and delay no
move; by single traces of the rules.
"""

from collections import Counter

import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.maintenance import UPKEEP_MS
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import BrokerChanged, BrokerConfigured, PartitionsChanged, PartitionState
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules.placement import (
    Directories,
    Directory,
    Loads,
    choose_additional_host,
    choose_replicas,
    plan_balance,
)
from mqd.cluster.metadata.rules.reassignments import GROW_ELSEWHERE_MS
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from tests.unit.cluster.test_brokers import partitions, run
from tests.unit.cluster.test_rules import cluster, do, topic
from tests.unit.controller.controller_world import World

MIB = 1 << 20


def disks(state: MetadataState, **free: int) -> Directories:
    """Free bytes of host n as `hN`, a GiB on all others; -1: its directory is unusable."""
    found = {}
    for node in state.brokers:
        bytes_free = free.get(f"h{node}", 1024 * MIB)
        found[node] = (Directory(f"d{node}", "/d", max(0, bytes_free), bytes_free >= 0),)
    return Directories(state, found)


def begin(state: MetadataState, directories: Directories, *leaving: int, moves_max: int = 50) -> list[tuple[int, ...]]:
    """The hosts to which the replicas of these partitions begin to move."""
    found = reassign_rules.replace_replicas(View(state), leaving, directories, moves_max)
    for entry, change in found:
        state.apply(PartitionsChanged(entry.topic_id, (change,)))
    state.check()
    return [change.adding_replicas for _, change in found]


# -- when a host is full ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "largest", "is_full"),
    [
        (0, 1000, True),
        (9, 1000, True),
        (10, 1000, False),
        (79 * MIB, 1024 * MIB, True),
        (80 * MIB, 1024 * MIB, False),
        (80 * MIB, 8001 * MIB, True),
        (-1, 0, True),
        (0, 0, False),
    ],
)
def test_a_host_is_full_below_its_reserve_or_beside_much_larger_ones(free: int, largest: int, is_full: bool) -> None:
    """If all are below the reserve, full compared to the others."""
    state = cluster(2)
    found = disks(state, h1=free, h2=largest)
    assert (
        found.full_hosts([1, 2]) == ({1} if is_full else set())
        and found.is_full(1, "d1") == found.is_full(1, "") == is_full
    )


def test_the_configured_reserve_is_used() -> None:
    state = cluster(2)
    state.apply(BrokerConfigured("1", {"log.dirs.free.bytes.min": str(400 * MIB)}))
    assert (
        disks(state, h1=499 * MIB, h2=499 * MIB).full_hosts([1, 2])
        == set()
        == disks(state, h1=500 * MIB).full_hosts([1, 2])
    )
    assert disks(state, h1=499 * MIB).full_hosts([1, 2]) == {1}


def test_a_host_is_full_when_all_its_directories_are_and_unreported_ones_are_not() -> None:
    state = cluster(3)
    found = Directories(
        state,
        {
            1: (
                Directory("a", "/a", 0, True),
                Directory("b", "/b", 1024 * MIB, True),
                Directory("c", "/c", 1024 * MIB, False),
            )
        },
    )
    assert found.full_hosts([1, 2, 3, 9]) == set()
    assert [found.is_full(1, name) for name in ("a", "b", "c", "")] == [True, False, True, False] and not found.is_full(
        2, "d2"
    )
    do(topic(state), broker_rules.fence(state, [2]))
    assert disks(state, h1=20 * MIB, h2=10_000 * MIB, h3=20 * MIB).full_hosts([1, 3]) == set(), (
        "the disk of a lost host is no measure"
    )


# -- placement ---------------------------------------------------------------------------------


def test_new_replicas_go_where_there_is_space_then_to_other_racks() -> None:
    state = cluster(5, {1: "a", 2: "a", 3: "b", 4: "b", 5: "c"})
    loads = Loads(state, View(state).placement_nodes(), {5})
    assert [5 in choose_replicas(loads, 3) for _ in range(6)] == [False] * 6 and set(choose_replicas(loads, 5)) == {
        1,
        2,
        3,
        4,
        5,
    }
    assert choose_additional_host(loads, (1, 3)) in (2, 4) and choose_additional_host(loads, (1, 2, 3, 4)) == 5
    assert choose_replicas(Loads(state, [5], {5}), 1) == (5,), "where there is no other host"


def test_a_balance_only_takes_from_full_hosts() -> None:
    state = topic(cluster(4), replicas=(1, 2), count=12)
    moves = plan_balance(state, [1, 2, 3, 4], lambda _: True, full={4})
    assert moves and not any(4 in move.replicas for move in moves)
    topic(state, replicas=(4, 1), count=24, name="u", topic_id=b"u" * 16)
    held = {
        (entry.name, partition.index): partition.replicas
        for entry in state.topics.values()
        for partition in entry.partitions
    }
    held |= {
        (move.name, move.index): move.replicas for move in plan_balance(state, [1, 2, 3, 4], lambda _: True, full={4})
    }
    counts = Counter(node for replicas in held.values() for node in replicas)
    assert counts[4] < 24 and max(counts[node] for node in (1, 2, 3)) - min(counts[node] for node in (1, 2, 3)) <= 1
    assert plan_balance(state, [1, 2, 3, 4], lambda _: True, full={1, 2, 3, 4}) is not None


def test_balancing_skips_topics_that_are_being_retired() -> None:
    """Moving one partition moves those that follow it: as long as the topic was being retired, the
    next plan moved the previous one back.
    """
    state = topic(
        topic(cluster(6), replicas=(1, 2, 3), count=20, name="u", topic_id=b"u" * 16), replicas=(1, 2, 3), count=8
    )
    for record in retire_rules.retire(View(state), "t", 4, False):
        state.apply(record)
    moves = plan_balance(state, View(state).placement_nodes(), lambda _: True)
    assert moves and {move.name for move in moves} == {"u"}


# -- moves that mqd starts itself --------------------------------------------------------------


def test_a_full_host_attracts_no_moves() -> None:
    """The least loaded host, as a full host often is."""
    state = topic(cluster(6), replicas=(1, 2, 3), count=10)
    do(state, broker_rules.fence(state, [1]))
    to = begin(state, disks(state, h6=3 * MIB), 1)
    assert Counter(node for added in to for node in added) == {4: 5, 5: 5}


def test_partitions_that_only_full_hosts_can_take_do_not_delay_others() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3, 4), count=20, name="u", topic_id=b"u" * 16)
    topic(state, replicas=(1, 2, 3), count=20)
    do(state, broker_rules.fence(state, [1]))
    directories = disks(state, h5=0)
    assert Counter(begin(state, directories, 1, moves_max=3)) == {(5,): 3, (4,): 3}
    assert begin(state, directories, 1, moves_max=3) == [], "as many of either"
    assert begin(state, directories, 1, moves_max=4) == [(5,), (4,)]


def stuck(state: MetadataState) -> PartitionState:
    return state.topics["t"].partitions[0]


def test_a_move_to_a_failed_directory_gets_another_target() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1]))
    (added,) = begin(state, disks(state), 1)[0]
    other = 9 - added
    bad = {f"h{added}": -1}
    assert begin(state, disks(state, **bad, **{f"h{other}": 0}), 1) == [], "the other one is no better"
    assert begin(state, disks(state, **bad), 1, moves_max=1) == [(other,)], (
        "a move that is stuck takes no other's place"
    )
    assert stuck(state).removing_replicas == (1,) and stuck(state).replacing == 1 and added not in stuck(state).replicas
    assert begin(state, disks(state, **{f"h{added}": 0}), 1) == []


def test_a_move_that_has_filled_a_disk_waits() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3), count=2)
    do(state, broker_rules.fence(state, [1]))
    ((added,),) = begin(state, disks(state), 1, moves_max=1)
    for _ in range(3):
        assert begin(state, disks(state, **{f"h{added}": 0}), 1, moves_max=1) in ([(9 - added,)], []), (
            "the other partition, whose place it does not take"
        )
    assert stuck(state).adding_replicas == (added,)


def test_a_drained_host_is_not_compared_with_the_others() -> None:
    state = cluster(5, {1: "a", 2: "a", 3: "b", 4: "b", 5: "b"})
    state.apply(BrokerChanged(1, 10, draining=True))
    full = disks(state, h1=400_000 * MIB, h2=3_500 * MIB, h3=4_500 * MIB, h4=4_500 * MIB, h5=4_500 * MIB).full_hosts(
        View(state).placement_nodes()
    )
    assert not full


def test_a_move_from_a_failed_directory_goes_to_another_host_even_with_local_space() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3))
    do(state, broker_rules.fence(state, [1]))
    (added,) = begin(state, disks(state), 1)[0]
    topic(state, replicas=(9 - added,), count=5, name="busy", topic_id=b"b" * 16)
    reported = {
        node: (Directory(f"d{node}", "/d", 1024 * MIB, node != added), Directory(f"e{node}", "/e", 1024 * MIB, True))
        for node in state.brokers
    }
    assert begin(state, Directories(state, reported), 1) == [(9 - added,)]


def test_a_move_that_has_caught_up_stays() -> None:
    state = topic(cluster(5), replicas=(1, 2, 3), in_sync_replicas=(1,))
    (added,) = begin(state, disks(state), 1)[0]
    entry = state.topics["t"]
    target = reassign_rules.Target(entry.partitions[0])
    target.in_sync = (added, 1)
    do(state, [PartitionsChanged(entry.topic_id, (View(state).change_to(entry, target),))])
    assert added in stuck(state).adding_replicas and begin(state, disks(state, **{f"h{added}": 0}), 1) == []


class Growing:
    """__consumer_offsets with one replica, on 1, in a cluster of four; maintained by an active
    controller.
    """

    def __init__(self) -> None:
        self.state = topic(cluster(4), replicas=(1,), name="__consumer_offsets")
        self.active = ActiveController(1, self.state, ControllerOptions(), 0, True)

    @property
    def partition(self) -> PartitionState:
        return self.state.topics["__consumer_offsets"].partitions[0]

    def grow(self, now_ms: int = 0, **free: int) -> set[int]:
        """Returns the replicas afterwards; free space as in disks()."""
        for node in self.state.brokers:
            bytes_free = free.get(f"h{node}", 1024 * MIB)
            self.active.set_reported_directories(
                node, [Directory(f"d{node}", "/d", max(0, bytes_free), bytes_free >= 0)]
            )
        for record in self.active._grow_internal_topics(self.state, now_ms):
            self.state.apply(record)
        self.state.check()
        return set(self.partition.replicas)

    def copied(self, *nodes: int) -> None:
        entry = self.state.topics["__consumer_offsets"]
        target = reassign_rules.Target(self.partition)
        target.in_sync = (*self.partition.in_sync_replicas, *nodes)
        self.state.apply(PartitionsChanged(entry.topic_id, (View(self.state).change_to(entry, target),)))


def test_an_internal_topic_does_not_grow_to_a_full_host() -> None:
    one = Growing()
    assert one.grow(h2=0, h3=0, h4=0) == {1}
    assert one.grow(h2=0, h4=0) == {1, 3}
    one.copied(3)
    assert one.grow(h2=0, h4=0) == {1, 3}
    assert one.grow(h2=0) == {1, 3, 4}


def test_an_internal_topic_that_filled_a_disk_grows_elsewhere_after_a_pause() -> None:
    """The disk that it leaves has space again. Without the pause it moved back and forth between
    two disks that are too small for it, every second.
    """
    one, turns, now_ms = Growing(), 0, 0
    assert one.grow() == {1, 2, 3}
    while now_ms < 10 * GROW_ELSEWHERE_MS:
        now_ms += UPKEEP_MS
        goals = set(one.partition.adding_replicas)
        full = {f"h{node}": 0 for node in goals & {2, 4}}
        one.grow(now_ms, **full)
        turns += set(one.partition.adding_replicas) != goals
    assert 9 <= turns <= 10
    assert {1, 3} < set(one.partition.replicas) and len(one.partition.replicas) == 3


def test_an_internal_topic_waits_for_a_full_disk_but_not_for_a_failed_one() -> None:
    one = Growing()
    assert one.grow() == {1, 2, 3}
    assert one.grow(GROW_ELSEWHERE_MS, h2=0, h4=0) == one.grow(3 * GROW_ELSEWHERE_MS, h2=0, h4=0) == {1, 2, 3}
    assert one.grow(3 * GROW_ELSEWHERE_MS, h2=-1, h4=0) == {1, 2, 3}
    assert one.grow(3 * GROW_ELSEWHERE_MS, h2=-1) == {1, 3, 4}


def test_a_lost_host_is_replaced_beside_a_full_one() -> None:
    """With the real cores: a host's report about its disks reaches the active controller with its
    heartbeats.
    """
    world = World(7, 5, lossy=False)
    world.settle(20)
    assert (
        world.send_request(messages.CreateTopic("t", -1, -1, {index: [1, 2, 3] for index in range(4)}, {})).error == 0
    )
    host = world.hosts[5]
    world.on_broker(
        host,
        broker_core.DirectoriesSeen(
            tuple(broker_messages.DirectoryReport(f"{host.directory_id}-{name}", f"/{name}", 0, True) for name in "ab")
        ),
    )
    run(world, 3_000)
    assert world.send_request(messages.CreateTopic("u", 4, 3, {}, {})).error == 0 and not any(
        5 in partition.replicas for partition in partitions(world, "u")
    )
    world.crash(1)
    if world.active < 0:
        world.elect(2)
    run(world, 90_000, 500)
    assert all(set(partition.in_sync_replicas) == {2, 3, 4} for partition in partitions(world))
