"""Whole clusters in the simulator: thousands of schedules of faults in the quick tier, every rule that is switched off is seen, the same seed is the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sim.cluster_world import ClusterWorld, Plan
from tests.sim.schedules import outcome, outcomes, report

ROOT = Path(__file__).resolve().parents[2]
QUICK_COUNT, QUICK_PARTS = 2_000, 8
EVENTS_MIN = 1_500
QUICK_SECONDS_MAX = 300


@pytest.mark.parametrize("part", range(QUICK_PARTS))
def test_schedules_hold_the_invariants(part: int) -> None:
    """Together 2,000 schedules of at least 1,500 events each."""
    count = QUICK_COUNT // QUICK_PARTS
    found = outcomes(range(part * count, (part + 1) * count))
    assert not report(found), "\n" + report(found)
    assert min(result.events for result in found) >= EVENTS_MIN and sum(result.faults for result in found) > 10 * count, "too little happens to prove anything"
    assert sum(result.acked for result in found) > 20 * count


@pytest.mark.parametrize("seed", range(6))
def test_nothing_goes_wrong_by_itself(seed: int) -> None:
    world = ClusterWorld(seed, quiet=True)
    world.run(4_000)
    assert not world.stuck_count and world.history.counts["acked"] > 40


def test_the_same_seed_is_the_same_run_whatever_the_hash_seed() -> None:
    """A set or a dict of another order would show: in two processes with different PYTHONHASHSEED the traces are equal."""
    program = "from tests.sim.cluster_world import ClusterWorld\nfor seed in (3, 4, 5):\n    w = ClusterWorld(seed)\n    w.run(3000)\n    print(w.kernel.steps, w.kernel.trace_hash(), w.history.counts)"
    traces = [
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=120).stdout
        for seed in ("1", "977")
    ]
    assert traces[0] == traces[1] and traces[0].count("\n") == 3


# Rule that is off -> seeds within which a cluster shows it. test_partition_sim.py has those that are rare here.
MUTANTS = {"R2": 300, "R4": 400, "R5": 200, "R7": 1_500, "R8": 400, "R9": 600, "R10": 600, "R11": 100, "R12": 200, "R13": 400, "flush": 60, "lease": 300, "L2": 200, "PAST": 100}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_off_is_seen(rule: str) -> None:
    found = outcomes(range(MUTANTS[rule]), frozenset([rule]), enough=1)
    assert any(result.name for result in found), f"{rule} survives {MUTANTS[rule]} schedules"


def test_messages_between_hosts_are_as_good_encoded() -> None:
    for seed in range(3):
        world = ClusterWorld(seed, plan=Plan(wire=True))
        world.run(2_000)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_schedules(block: int) -> None:
    first = int(os.environ.get("MQD_SIM_FIRST", "100000")) + block * 1_000
    found = outcomes(range(first, first + 1_000))
    assert not report(found), "\n" + report(found)


def test_a_schedule_that_fails_says_how_to_run_it_again() -> None:
    began = time.monotonic()
    failed = next(result for result in (outcome(seed, frozenset(["R5"])) for seed in range(200)) if result.name)
    assert f"python -m tests.sim.replay {failed.seed}" in report([failed]) and time.monotonic() - began < QUICK_SECONDS_MAX
