"""K1 to K4 of acknowledgement by K of the in-sync replicas, in a model of its rules; each omitted
rule is detected, by schedules or by a trace.
"""

from __future__ import annotations

import pytest

from tests.sim.replica.quorum_ack_world import Violation, World
from tests.tiers import quick

EVENTS = 1_000
PLANTED = [
    "DROPPED_EARLY",
    "EMPTIED",
    "FIRST",
    "FORGETS",
    "NOT_FROZEN",
    "PROPOSED",
    "TOO_FEW",
    "TWICE",
    "VISIBLE_BELOW_K",
]


@pytest.mark.parametrize("block", quick(range(10), range(1)))
def test_records_acknowledged_by_k_survive(block: int) -> None:
    """10 blocks are more than 10^6 events."""
    worlds = [World(seed) for seed in range(block * 100, block * 100 + 100)]
    assert sum(world.run(EVENTS) for world in worlds) >= 100 * EVENTS
    assert sum(world.acknowledged for world in worlds) > 500
    assert sum(world.elections for world in worlds) > 150


@pytest.mark.parametrize("rule", quick(PLANTED, ["FIRST", "TWICE", "TOO_FEW"]))
def test_a_planted_bug_is_found(rule: str) -> None:
    for seed in range(1_000):
        try:
            World(seed, rule).run(EVENTS)
        except Violation:
            return
    pytest.fail(f"no world found {rule}")


# -- traces: histories that schedules rarely or never reach ----------------------------------------


def settle(world: World) -> None:
    while world.messages:
        world.dispatch(world.messages.pop(0))


def replicate(world: World, node: int, times: int = 1) -> None:
    """A follower fetches `count` times; the leader counts each position at the next fetch."""
    for _ in range(times):
        world.fetch(world.hosts[node])
        settle(world)


def elect(world: World, *nodes: int) -> None:
    """These members learn that there is no leader, and respond in this order. They learn of the new
    leader, too.
    """
    for node in nodes:
        world.catch_up(world.hosts[node])
        world.answer(world.hosts[node])
        settle(world)
    for node in nodes:
        world.catch_up(world.hosts[node])


def die(world: World, node: int) -> None:
    world.kill(world.hosts[node])
    world.fence(node)


def agreed(world: World, node: int) -> None:
    world.propose(world.hosts[node])
    settle(world)
    world.catch_up(world.hosts[node])


def records_of_an_earlier_epoch(off: str) -> World:
    """Raft's Figure 8: K hosts have a record of an earlier epoch that a log of a later epoch lacks."""
    world = World(0, off, count=5, k=3)
    world.produce(world.hosts[0])
    replicate(world, 1)  # 0 and 1 have the record
    world.ask()
    elect(world, 2, 3, 4)
    world.produce(world.hosts[2])  # only 2 has another, of a later epoch
    die(world, 2)
    elect(world, 1, 0, 3)
    replicate(world, 0, 2)
    replicate(world, 3, 2)  # three have it; the electors are still all five
    die(world, 1)
    world.start(world.hosts[2])
    elect(world, 2, 3, 4)
    assert world.metadata.leader == 2
    return world


def test_a_new_leader_waits_until_only_its_followers_elect() -> None:
    assert records_of_an_earlier_epoch("").promised == {}
    with pytest.raises(Violation, match="K1"):
        records_of_an_earlier_epoch("ACKNOWLEDGES_AT_ONCE")


def logs_of_one_length(off: str) -> World:
    world = World(0, off, count=4, k=2)
    world.ask()
    elect(world, 2, 0, 1)
    for _ in range(6):
        world.produce(world.hosts[2])  # only 2 has them
    world.ask()
    elect(world, 0, 1, 3)
    for _ in range(6):
        world.produce(world.hosts[0])
    replicate(world, 1, 3)  # 0 and 1 have others, of a later epoch
    die(world, 0)
    elect(world, 1, 2, 3)
    assert world.metadata.leader == 1
    replicate(world, 3, 4)
    agreed(world, 1)
    world.catch_up(world.hosts[1])
    assert len(world.promised) == 6
    die(world, 1)
    elect(world, 2, 3)
    assert world.metadata.leader == 3
    return world


def test_the_longest_log_is_the_one_of_the_latest_epoch() -> None:
    assert logs_of_one_length("").elections == 4
    with pytest.raises(Violation, match="K1"):
        logs_of_one_length("LENGTH")


def an_emptied_disk_comes_back(off: str) -> World:
    world = World(0, off, count=3, k=2)
    world.produce(world.hosts[0])
    replicate(world, 1, 2)
    assert len(world.promised) == 1 and world.hosts[0].high_watermark == 0  # acknowledged, and 2 lacks it
    die(world, 1)
    world.lose_disk(world.hosts[1])
    world.start(world.hosts[1])
    world.catch_up(world.hosts[0])
    world.fetch(world.hosts[1])
    world.dispatch(world.messages.pop())  # its first position; the response is lost
    world.messages.clear()
    agreed(world, 0)
    die(world, 0)
    world.lose_disk(world.hosts[0])
    elect(world, 1, 2)
    return world


def test_a_replica_joins_with_all_that_is_acknowledged() -> None:
    """Not only with the records that consumers can read."""
    assert an_emptied_disk_comes_back("").metadata.leader == -1
    with pytest.raises(Violation, match="K1"):
        an_emptied_disk_comes_back("JOINS_AT_HIGH_WATERMARK")


def two_hosts_die(off: str) -> World:
    """One after the other, and no disk is lost."""
    world = World(0, off, count=3, k=2)
    world.produce(world.hosts[0])
    replicate(world, 1, 2)  # acknowledged by 0 and 1
    die(world, 1)
    die(world, 0)
    elect(world, 2)
    return world


def test_electors_are_needed_in_addition_to_the_in_sync_set() -> None:
    world = two_hosts_die("")
    assert world.metadata.leader == -1
    world.start(world.hosts[1])
    elect(world, 1)
    assert world.metadata.leader == 1
    with pytest.raises(Violation, match="K1"):
        two_hosts_die("FORGETS")
