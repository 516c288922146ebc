"""Whole clusters in the simulator: schedules of faults hold the invariants, every disabled rule is
detected, and runs are deterministic.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.plans import KINDS
from tests.sim.schedules import outcome, outcomes, report
from tests.tiers import examples, quick

ROOT = Path(__file__).resolve().parents[3]
COUNT, PARTS = 2_000, 100
EVENTS_MIN = 1_500


@pytest.mark.parametrize("part", quick(range(PARTS), [0]))
def test_schedules_hold_the_invariants(part: int) -> None:
    """Together 2,000 schedules of at least 1,500 events each."""
    count = COUNT // PARTS
    found = outcomes(range(part * count, (part + 1) * count))
    assert not report(found), "\n" + report(found)
    assert (
        min(result.events for result in found) >= EVENTS_MIN and sum(result.faults for result in found) > 10 * count
    ), "too little happens to prove anything"
    assert sum(result.acked for result in found) > 20 * count


@pytest.mark.parametrize("count", quick([12, 60], []))
def test_acknowledged_records_are_lost_where_unclean_elections_are_enabled(count: int) -> None:
    """The cluster heals nevertheless. With the same faults, where they are disabled there are none
    (UNCLEAN), and every acknowledged record exists (C1).
    """
    found = outcomes(range(count), kind="unclean")
    assert not report(found), "\n" + report(found)
    assert sum(result.unclean for result in found) > count / 3 and sum(result.lost for result in found) > count
    plans = [msgspec.structs.replace(KINDS["unclean"].plan(seed), unclean=False) for seed in range(count)]
    without = [outcome(seed, plan=plan, chaos=KINDS["unclean"].chaos) for seed, plan in enumerate(plans)]
    assert not report(without), "\n" + report(without)
    assert sum(result.acked for result in without) > 20 * count and not any(result.lost for result in without)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_schedules_with_spares_hold_the_invariants(part: int) -> None:
    """Topics with acks.replicas; replicas move, hosts are drained and lose disks."""
    found = outcomes(range(part * 20, (part + 1) * 20), kind="spares")
    assert not report(found), "\n" + report(found)
    assert sum(result.acked for result in found) > 20 * len(found)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_goes_wrong_without_faults(seed: int) -> None:
    world = ClusterWorld(seed, quiet=True)
    world.run(4_000)
    assert not world.stuck_count and world.history.counts["acked"] > 40


def test_runs_are_deterministic_with_any_hash_seed() -> None:
    """A different order of a set or a dict would show: the traces of two processes with different
    PYTHONHASHSEED are equal.
    """
    seeds = range(3, 3 + examples(1, 3))
    program = (
        "from tests.sim.cluster.cluster_world import ClusterWorld\n"
        f"for seed in {seeds}:\n    w = ClusterWorld(seed)\n    w.run(3000)\n"
        "    print(w.kernel.steps, w.kernel.trace_hash(), w.history.counts)"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "977")
    ]
    assert traces[0] == traces[1] and traces[0].count("\n") == len(seeds)


# Rules whose absence is detected within SEEN_COUNT seeds. Rarer ones are detected in the small
# world (test_partition_sim.py) and by traces (test_cluster_traces.py): R1, R3, R6, R6b, KIP-903,
# the addressee of a proof of death, OLDER.
MUTANTS = ("R2", "R4", "R5", "R7", "R8", "R9", "R10", "R11", "R12", "R13", "flush", "lease", "L2", "PAST")
SEEN_COUNT = 150
RARE = {"R6": 2_000, "903": 2_000, "proof of any epoch": 2_000, "OLDER": 2_000}


@pytest.mark.parametrize("rule", quick(MUTANTS, ["R13"]))
def test_a_disabled_rule_is_detected(rule: str) -> None:
    found = outcomes(range(SEEN_COUNT), frozenset([rule]), enough=1)
    assert any(result.name for result in found), f"{rule} survives {SEEN_COUNT} schedules"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", RARE)
def test_a_disabled_rule_is_detected_after_many_seeds(rule: str) -> None:
    found = outcomes(range(RARE[rule]), frozenset([rule]), enough=1)
    assert any(result.name for result in found), f"{rule} survives {RARE[rule]} schedules"


def test_encoded_messages_between_hosts_hold_the_invariants() -> None:
    for seed in range(3):
        world = ClusterWorld(seed, plan=Plan(wire=True))
        world.run(2_000)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_schedules(block: int) -> None:
    first = int(os.environ.get("MQD_SIM_FIRST", "100000")) + block * 1_000
    found = outcomes(range(first, first + 1_000))
    assert not report(found), "\n" + report(found)


def test_a_failing_schedule_prints_the_command_that_repeats_it() -> None:
    failed = next(result for result in (outcome(seed, frozenset(["flush"])) for seed in range(20)) if result.name)
    assert f"python -m tests.sim.replay {failed.seed}" in report([failed])
