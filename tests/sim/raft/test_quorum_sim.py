"""Simulated quorums: random schedules of faults under which the invariants must hold, planted bugs
that must be found, directed traces for histories that random schedules rarely reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mqd.cluster.raft.core import QuorumBroken, QuorumCore
from tests.sim.kernel import Violation
from tests.sim.raft import quorum_mutants as mutants
from tests.sim.raft import quorum_scenarios as scenarios
from tests.sim.raft.quorum_host import Host
from tests.sim.raft.quorum_world import CHANGE_PLAN, LEASE_PLAN, Plan, World, run
from tests.tiers import examples, quick

LATE_PLAN = LEASE_PLAN._replace(pause=10, noise=12, restart=4)


@pytest.mark.parametrize("first_seed", quick(range(0, 16, 2), [0]))
def test_schedules_hold_the_invariants(first_seed: int) -> None:
    """16 schedules of some 15,000 events each, then healing."""
    worlds = [run(seed, seconds=25) for seed in range(first_seed, first_seed + 2)]
    assert sum(world.counts["committed"] for world in worlds) > 250, "too little happens to prove anything"


HARD = {"lease": (LEASE_PLAN, 25), "late": (LATE_PLAN, 25), "change": (CHANGE_PLAN, 4)}


@pytest.mark.parametrize("part", quick(range(6), [0]))
@pytest.mark.parametrize("name", HARD)
def test_hard_plans(name: str, part: int) -> None:
    plan, seeds = HARD[name]
    for seed in range(part * seeds, part * seeds + seeds):
        World(seed, plan).chaos(20)


def test_clocks_beyond_the_bound_break_leases_and_nothing_else() -> None:
    """L3. One clock runs nine times as fast as another."""
    two_leases = 0
    for seed in range(80):
        world = World(seed, LEASE_PLAN._replace(drift_max=0.8, is_within_bound=False))
        world.chaos(20)
        two_leases += world.counts.get("two leases", 0)
    assert two_leases, "the clocks were not bad enough to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_schedules(block: int) -> None:
    """A thousand schedules, some twenty million events; and 12,000 short ones around leases and
    voter sets.
    """
    for seed in range(10_000 + block * 50, 10_050 + block * 50):
        run(seed, seconds=40)
    for seed in range(10_000 + block * 200, 10_200 + block * 200):
        World(seed, LEASE_PLAN).chaos(40)
        World(seed, LATE_PLAN).chaos(40)
        World(seed, CHANGE_PLAN).chaos(20)


# -- the same seed is the same run -----------------------------------------------------------------


def trace(hash_seed: str) -> str:
    code = "from tests.sim.raft.quorum_world import run; print(run(4, seconds=3).kernel.trace_hash())"
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_runs_are_deterministic() -> None:
    assert trace("1") == trace("2")


# -- directed traces -------------------------------------------------------------------------------

DIRECTED = (
    scenarios.restarted_voter,
    scenarios.promised_voter,
    scenarios.deaf_predecessor,
    scenarios.returning_voter,
    scenarios.lonely_leader,
    scenarios.stalled_disk,
    scenarios.figure_eight,
    scenarios.two_leaders_in_turn,
    scenarios.rumours,
    scenarios.forced,
    scenarios.removal_not_committed,
    scenarios.old_proof,
)


@pytest.mark.parametrize("scenario", DIRECTED, ids=lambda scenario: scenario.__name__)
def test_directed_traces_hold(scenario) -> None:
    for seed in range(examples(2, 5)):
        scenario(seed, QuorumCore)


@pytest.mark.parametrize(
    ("scenario", "seconds_max"),
    [
        (scenarios.failover, 3),
        (scenarios.proven, 0.25),
        (scenarios.formation, 1),
        (scenarios.handover, 0.1),
        (scenarios.all_restarted, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_how_long_there_is_no_controller(scenario, seconds_max: float) -> None:
    """With P = 2 s, disks that flush in up to 3 ms and links of up to 1.5 ms."""
    assert max(scenario(seed, QuorumCore) for seed in range(examples(8, 20))) < seconds_max


@pytest.mark.parametrize(
    ("scenario", "planted", "name"),
    [
        (scenarios.restarted_voter, mutants.VoteAfterRestart, "L1"),
        (scenarios.promised_voter, mutants.VoteAgainstPromise, "L1"),
        (scenarios.deaf_predecessor, mutants.TransferWithLease, "L1"),
        (scenarios.returning_voter, mutants.NoPreVote, "stable"),
        (scenarios.lonely_leader, mutants.NoCheckQuorum, "check-quorum"),
        (scenarios.figure_eight, mutants.CommitOfOlderEpoch, "I3"),
        (scenarios.two_leaders_in_turn, mutants.SingleServerChangeBug, "I3"),
        (scenarios.old_proof, mutants.ProofOfAnyEpoch, "L1"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_directed_traces_show_planted_bugs(scenario, planted: type[QuorumCore], name: str) -> None:
    with pytest.raises(Violation) as found:
        for seed in range(5):
            scenario(seed, planted)
    assert found.value.name == name


# -- planted bugs, found by random schedules -------------------------------------------------------

# one of elections, one of flushes; the directed traces above cover leases
QUICK_BUGS = (mutants.ForgetsVote, mutants.LeaderCountsBeforeFlush)


@pytest.mark.parametrize(
    ("planted", "plan", "seeds", "names"),
    quick(
        [
            (mutants.VoteForAnyLog, None, 20, ("I3", "broken")),
            (mutants.ForgetsVote, None, 2, ("I4",)),
            (mutants.LeaderCountsBeforeFlush, None, 4, ("I5",)),
            (mutants.FollowerFetchesBeforeFlush, None, 4, ("I5",)),
            (mutants.NoEpochCheck, None, 30, ("I2", "I3", "I5", "broken")),
            (mutants.EffectBeforeCommit, None, 4, ("I5",)),
            (mutants.TwoChangesAtOnce, CHANGE_PLAN, 60, ("I1", "I2", "I3", "I5", "broken")),
            (mutants.VoteAfterRestart, LEASE_PLAN, 300, ("L1",)),
            (mutants.VoteAgainstPromise, LEASE_PLAN, 300, ("L1",)),
            (mutants.LeaseFromReceipt, LEASE_PLAN, 300, ("L1",)),
            (mutants.LeaseIsPromise, LEASE_PLAN, 300, ("L1",)),
            (mutants.TransferWithLease, LEASE_PLAN, 300, ("L1",)),
            (mutants.ProofOfAnyEpoch, LEASE_PLAN, 300, ("L1",)),
        ],
        QUICK_BUGS,
    ),
    ids=lambda value: getattr(value, "__name__", None) or ("lease" if isinstance(value, Plan) else "-"),
)
def test_schedules_find_planted_bugs(
    planted: type[QuorumCore], plan: Plan | None, seeds: int, names: tuple[str, ...]
) -> None:
    assert found(seeds, plan, core_class=planted) in names


@pytest.mark.parametrize(
    ("planted", "plan", "seeds"),
    quick([(mutants.ZombieGrants, LATE_PLAN, 300), (mutants.FencesAtOnce, LEASE_PLAN, 20)], [mutants.FencesAtOnce]),
    ids=lambda value: getattr(value, "__name__", "-"),
)
def test_schedules_find_planted_bugs_in_broker_leases(planted, plan: Plan, seeds: int) -> None:
    assert found(seeds, plan, host_class=planted) == "L2"


@pytest.mark.slow
def test_schedules_find_a_premature_proof() -> None:
    assert found(100, LEASE_PLAN, host_class=mutants.ProvesTooSoon) == "L1"


def test_a_proven_death_ends_the_wait_even_if_the_host_restarts_at_once() -> None:
    assert max(scenarios.proven(seed, QuorumCore, restarted=True) for seed in range(20)) < 0.4


def test_a_late_grant_shows_a_deadline_that_counts_from_receipt() -> None:
    for seed in range(examples(1, 5)):
        scenarios.late_grant(seed, Host)
        with pytest.raises(Violation, match="L2"):
            scenarios.late_grant(seed, mutants.DeadlineFromReceipt)


def found(seeds: int, plan: Plan | None, **classes) -> str:
    """The invariant violated by the first failing seed; "" = none fails."""
    for seed in range(seeds):
        try:
            World(seed, plan, **classes).chaos(30)
        except Violation as violation:
            return violation.name
        except QuorumBroken:
            return "broken"
    return ""
