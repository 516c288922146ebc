"""Transactions on whole clusters: schedules of faults, every disabled rule is detected, and bugs
that the simulator has found.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.coordinator.transaction_cluster import TransactionCluster
from tests.sim.plans import KINDS
from tests.sim.schedules import outcome, outcomes, report
from tests.tiers import quick

KIND = KINDS["transactions"]
KINDS_OF_TRANSACTIONS = ("transactions", "coordinators", "last_markers")


def world_of(seed: int, quiet: bool = False, chaos: int = KIND.chaos) -> TransactionCluster:
    world = TransactionCluster(seed, plan=KIND.plan(seed), quiet=quiet)
    world.run(chaos)
    return world


@pytest.mark.parametrize("kind", KINDS_OF_TRANSACTIONS)
@pytest.mark.parametrize("first", quick([0, 4, 8], [0]))
def test_schedules_with_transactions(first: int, kind: str) -> None:
    found = outcomes(range(first, first + 4), kind=kind)
    assert not report(found), "\n" + report(found)
    assert sum(result.faults for result in found) > 10 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_TRANSACTIONS)
@pytest.mark.parametrize("block", range(5))
def test_many_more_schedules_with_transactions(block: int, kind: str) -> None:
    first = int(os.environ.get("MQD_SIM_FIRST", "100000")) + block * 200
    found = outcomes(range(first, first + 200), kind=kind)
    assert not report(found), "\n" + report(found)


@pytest.mark.slow
def test_transactions_make_progress() -> None:
    """Otherwise the schedules prove nothing: transactions commit and abort, are fenced and time
    out; readers read and skip; coordinators move.
    """
    counts: dict[str, int] = {}
    epochs = 0
    for seed in range(6):
        world = world_of(seed)
        for name, count in world.transactional.counts.items():
            counts[name] = counts.get(name, 0) + count
        epochs += sum(world.view(partition).leader_epoch for partition in world.coordinated())
    assert (
        counts["committed"] > 20
        and counts["aborted"] > 10
        and counts["fenced"] > 3
        and counts["delivered"] > 100
        and counts["left out"] > 50
    ), counts
    assert epochs > 6


@pytest.mark.parametrize("seed", range(2))
def test_nothing_goes_wrong_without_faults(seed: int) -> None:
    world = world_of(seed, quiet=True, chaos=3_000)
    assert not world.stuck_count and world.transactional.counts["committed"] > 2


def test_the_high_watermark_that_a_parked_fetch_moves_is_reported() -> None:
    """A bug of the simulator: its waiters waited forever."""
    world_of(623445)


def test_a_marker_delayed_until_its_host_leads_again_is_refused() -> None:
    """Another leader had written it meanwhile; it committed part of the producer's next
    transaction. test_marker_leader_epoch.py has the rule.
    """
    world_of(744903)


def test_runs_are_deterministic() -> None:
    first, second = (world_of(3, chaos=2_000) for _ in range(2))
    assert (
        first.kernel.trace_hash() == second.kernel.trace_hash()
        and first.transactional.counts == second.transactional.counts
    )
    assert first.kernel.steps == second.kernel.steps and first.history.committed == second.history.committed


# Disabled rule -> (seeds within which it is detected, in which kind of runs).
MUTANTS = {
    "fence": (80, "coordinators"),  # markers of a coordinator of an earlier epoch are accepted
    "end epoch": (40, "transactions"),  # EndTxn ends the current transaction, whatever epoch it names
    "LSO": (15, "transactions"),  # the last stable offset ignores open transactions
    # a coordinator responds before its state is replicated (seed 77: replicas that lag no longer
    # rejoin, so fewer of them come to lead)
    "early": (90, "transactions"),
    "one marker": (15, "transactions"),  # only one partition of a transaction gets its marker
    # requests of a dead acceptor are served after its successor has connected
    "one connection": (40, "last_markers"),
    "verify": (15, "transactions"),  # a transaction begins in a partition that its coordinator does not know
}
SEEN_BY = ("T1", "T2", "T3", "T4", "FENCE", "LIVE")
# a marker that a leader has is refused before it is replicated; test_reactor_leading.c has the
# history that the simulator found
RARE = {"M4": (600, "coordinators")}


@pytest.mark.parametrize("rule", quick(MUTANTS, ["one marker"]))
def test_a_disabled_rule_is_detected(rule: str) -> None:
    seeds, kind = MUTANTS[rule]
    found = outcomes(range(seeds), frozenset([rule]), enough=1, kind=kind)
    assert any(result.name in SEEN_BY for result in found), f"{rule} survives {seeds} schedules"


@pytest.mark.slow
@pytest.mark.parametrize("rule", RARE)
def test_a_disabled_rule_is_detected_after_many_seeds(rule: str) -> None:
    seeds, kind = RARE[rule]
    found = outcomes(range(seeds), frozenset([rule]), enough=1, kind=kind)
    assert any(result.name in SEEN_BY for result in found), f"{rule} survives {seeds} schedules"


def test_a_failing_schedule_prints_the_command_that_repeats_it() -> None:
    failed = next(
        result
        for result in (outcome(seed, frozenset(["LSO"]), kind="transactions") for seed in range(10))
        if result.name
    )
    assert f"python -m tests.sim.replay {failed.seed} --kind transactions" in report([failed])
