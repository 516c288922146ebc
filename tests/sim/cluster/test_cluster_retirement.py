"""Topics of simulated clusters get fewer partitions (retirement.py): keys keep their order, nothing
is deleted too early, and in the end the partitions are deleted.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.plans import KINDS
from tests.sim.schedules import outcomes, report
from tests.tiers import quick


@pytest.mark.parametrize("first", quick([0, 2, 4, 6], [0]))
def test_schedules_with_retirements(first: int) -> None:
    found = outcomes(range(first, first + 2), kind="retire")
    assert not report(found), report(found)


@pytest.mark.slow
def test_schedules_reach_rare_cases() -> None:
    """Otherwise they prove nothing: partitions go through all steps, also in pairs, while producers
    move on to others.
    """
    redirected, gone = 0, []
    for seed in range(4):
        world = ClusterWorld(seed, plan=KINDS["retire"].plan(seed))
        world.run(KINDS["retire"].chaos)
        redirected += world.retirement.counts["redirected"]
        gone.append(world.retirement.counts["gone"])
    assert redirected > 50 and min(gone) >= 1 and max(gone) >= 2, (redirected, gone)


# Disabled rule -> seeds within which it is detected.
@pytest.mark.parametrize(
    ("rule", "name", "seeds"), quick([("seal", "V2", 5), ("emptied", "V4", 5), ("used", "V4", 5)], ["seal"])
)
def test_a_disabled_rule_is_detected(rule: str, name: str, seeds: int) -> None:
    found = outcomes(range(seeds), frozenset([rule]), enough=1, kind="retire")
    assert any(result.name == name for result in found), f"{rule} survives {seeds} schedules"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_more_schedules(block: int) -> None:
    found = outcomes(range(1_000 + 200 * block, 1_200 + 200 * block), kind="retire")
    assert not report(found), report(found)
