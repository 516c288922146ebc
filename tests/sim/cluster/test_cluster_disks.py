"""Failing disks in whole clusters: flushes that fail, full disks, bits that flip; and the state
that a host may report after a restart within the same boot.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.kernel import SECOND, Violation
from tests.sim.schedules import outcomes, report
from tests.tiers import quick

DISKS = Plan(
    boot_id=True,
    partitions=1,
    faults=("bad_disk", "bits", "full_disk", "power", "restart", "worker", "many_down", "leaders", "mend", "reassign"),
)
NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(("first", "failures_min"), quick([(0, 10), (20, 15), (40, 15)], [0]))
def test_schedules_of_failing_disks(first: int, failures_min: int) -> None:
    found = outcomes(range(first, first + 20), plan=DISKS)
    assert not report(found), report(found)
    assert sum(result.kinds.get("bad_disk", 0) for result in found) >= failures_min
    assert sum(result.acked for result in found) > 2_000


# Disabled rule -> the first seed and the number of seeds that detect it (fsync: about 17 of 200
# schedules, CRC: 2 of 400). fsync: a failed flush is retried; CRC: a follower does not check
# checksums; batch: a leader sends parts of batches; shortened: a log that was truncated before valid
# records leads; BOOT: pages count as kept after a power failure.
@pytest.mark.parametrize(
    ("rule", "first", "seeds"),
    quick([("fsync", 20, 80), ("CRC", 180, 200), ("batch", 0, 10), ("shortened", 0, 60), ("BOOT", 0, 90)], ["batch"]),
)
def test_a_disabled_rule_is_detected(rule: str, first: int, seeds: int) -> None:
    found = outcomes(range(first, first + seeds), frozenset([rule]), enough=1, plan=DISKS)
    assert any(result.name for result in found), f"{rule} survives {seeds} schedules"


# -- named scenarios -------------------------------------------------------------------------------


def run(world: ClusterWorld, seconds: float) -> None:
    world.kernel.run(until=world.kernel.now + int(seconds * SECOND))


def last_in_sync(seed: int, off: frozenset[str], topic: str) -> tuple[ClusterWorld, tuple[bytes, int], int, list[int]]:
    """Only one of three replicas is left in sync; the others may lead again when they are back.
    Returns (world, partition, the remaining node, the others).
    """
    world = ClusterWorld(
        seed, off, Plan(hosts=4, voters=1, partitions=6, session_ms=1_000, boot_id=True, producers=4), quiet=True
    )
    world.begin()
    partition = next(
        key for key in world.partitions() if 0 not in world.view(key).replicas and world.name(key).startswith(topic)
    )
    last = world.view(partition).leader
    others = [node for node in world.view(partition).replicas if node != last]
    while len(world.history.committed.get(partition, ())) < 12:
        run(world, 0.1)
    for node in others:
        world.hosts[node].stop("kill")
    run(world, 3)
    assert world.view(partition).in_sync == (last,)
    return world, partition, last, others


def all_in_sync_again(world: ClusterWorld, partition: tuple[bytes, int], others: list[int]) -> None:
    run(world, 4)
    for node in others:
        world.hosts[node].start()
    world.heal()
    world.check_end()
    assert not world.stuck(partition)


@pytest.mark.parametrize("off", quick([NOTHING, frozenset(["shortened"])], [NOTHING]), ids=["kept", "off"])
def test_a_flipped_bit_in_acknowledged_records_of_the_last_replica(off: frozenset[str]) -> None:
    """Its host loses power; recovery truncates the log at the bit, as if that were a torn write,
    far below the high watermark. As the only replica left it could lead; but it must not, or
    acknowledged records would be lost, even on the hosts that return. (Found with seed 39.)
    """

    def history() -> None:
        for seed in range(6):
            world, partition, last, others = last_in_sync(seed, off, "flushed")
            host = world.hosts[last]
            host.logs[partition].flip(1)
            host.stop("power")
            run(world, 2)
            host.start()
            all_in_sync_again(world, partition, others)

    if not off:
        return history()
    with pytest.raises(Violation, match="P2|P3|C1"):
        history()


@pytest.mark.parametrize("off", quick([NOTHING, frozenset(["DOUBT"])], [frozenset(["DOUBT"])]), ids=["kept", "off"])
def test_a_restart_in_the_same_boot_after_a_failed_flush(off: frozenset[str]) -> None:
    """Pages are lost although the machine was not restarted, because the kernel dropped them. A host that
    reports "same boot, nothing lost" would lead without some acknowledged records.
    """

    def history() -> None:
        for seed in range(6):
            world, partition, last, others = last_in_sync(seed, off, "cached")
            host = world.hosts[last]
            log = host.logs[partition]
            log.durable = log.whole(log.end // 2)
            host.failing = 1.0
            for worker in host.workers:
                worker.flush_in_background()
            run(world, 0.5)
            assert any(worker.failed for worker in host.workers)
            host.failing = 0.0
            host.stop("kill")
            run(world, 2)
            host.start()
            all_in_sync_again(world, partition, others)

    if not off:
        return history()
    with pytest.raises(Violation, match="P2|P3|C1"):
        history()


@pytest.mark.parametrize("off", [NOTHING, frozenset(["rewrite"])], ids=["kept", "off"])
def test_a_worker_that_is_restarted_after_a_failed_flush(off: frozenset[str]) -> None:
    """Pages that the kernel has marked clean are not on the disk until they are written again."""

    def history() -> None:
        world = ClusterWorld(7, off, Plan(hosts=3, partitions=1), quiet=True)
        world.begin()
        for host in world.hosts:
            run(world, 1)
            host.failing = 1.0
            run(world, 0.1)
            host.failing = 0.0
            assert host.workers[0].failed
            host.kill_worker(0)
        world.heal()
        world.check_end()

    if not off:
        return history()
    with pytest.raises(Violation, match="P2|P9"):
        history()


def test_a_leader_whose_flush_fails_is_replaced_at_once() -> None:
    """Its host and its lease are alive; no acknowledged record is lost, and writes continue before it
    is restarted.
    """
    world = ClusterWorld(5, plan=Plan(hosts=3, partitions=1), quiet=True)
    world.begin()
    run(world, 1)
    partition = world.partitions()[0]
    leader = world.view(partition).leader
    world.hosts[leader].failing = 1.0
    run(world, 1.5)
    view = world.view(partition)
    assert view.leader not in (-1, leader) and leader not in view.in_sync
    before = world.history.counts["acked"]
    run(world, 2)
    assert world.history.counts["acked"] > before + 20
    world.heal()
    world.check_end()


def test_a_full_disk_refuses_records_and_recovers_with_space() -> None:
    world = ClusterWorld(6, plan=Plan(hosts=3, partitions=1), quiet=True)
    world.begin()
    run(world, 1)
    for host in world.hosts:
        host.full = True
    run(world, 1)
    ends = [log.end for host in world.hosts for log in host.logs.values()]
    run(world, 3)
    assert [log.end for host in world.hosts for log in host.logs.values()] == ends
    world.heal()
    world.check_end()
    assert all(
        world.view(partition).in_sync and set(world.view(partition).in_sync) == set(world.view(partition).replicas)
        for partition in world.partitions()
    )


@pytest.mark.slow
def test_records_behind_a_flipped_bit_may_have_been_acknowledged() -> None:
    """The leader may acknowledge records by a position that a follower reported before it was restarted
    and truncated (seed 210471 of a long run).
    """
    world = ClusterWorld(8, plan=Plan(hosts=3, partitions=1), quiet=True)
    world.begin()
    run(world, 1)
    partition = world.partitions()[0]
    host = next(host for host in world.hosts if host.node != world.view(partition).leader)
    log = host.logs[partition]
    while not log.shortened:
        host.stop("kill")
        log.flip(log.on_disk // 2)
        reported = log.entries[: log.on_disk]
        host.start()
        run(world, 1)
    lost = world.history.lost_logs[partition][-1]
    assert lost == reported and len(lost) > 10
    log.repair()
    world.heal()
    world.check_end()
