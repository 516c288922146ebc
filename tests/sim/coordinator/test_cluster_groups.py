"""Coordinators of groups on a simulated cluster: leaderships, leases and processes come and go,
what was acknowledged of committed offsets stays.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.coordinator.coordinators import GroupClient
from tests.sim.schedules import outcomes, report
from tests.tiers import quick

GROUPS = Plan(groups=3, partitions=1)


@pytest.mark.parametrize("first", quick([0, 10, 20, 30], [0]))
def test_schedules_with_groups(first: int) -> None:
    found = outcomes(range(first, first + 10), plan=GROUPS)
    assert not report(found), report(found)


def test_groups_get_on_and_coordinators_move() -> None:
    """Otherwise the schedules prove nothing."""
    done = moves = 0
    for seed in range(6):
        world = ClusterWorld(seed, plan=GROUPS)
        world.run()
        done += sum(len(client.acked) for client in world.clients if isinstance(client, GroupClient))
        moves += sum(1 for entry in world.kernel.story if entry[1] == "coordinator")
    assert done > 200 and moves > 15


# A rule that is off -> seeds within which it is seen.
@pytest.mark.parametrize(("rule", "seeds"), quick([("L5", 60), ("held", 30)], ["L5"]))
def test_a_rule_that_is_off_is_seen(rule: str, seeds: int) -> None:
    found = outcomes(range(seeds), frozenset([rule]), enough=1, plan=GROUPS)
    assert any(result.name for result in found), f"{rule} survives {seeds} schedules"
