"""Coordinators of groups on a simulated cluster: acknowledged committed offsets survive changes of
leaderships, leases and processes.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster.cluster_plan import Plan
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.coordinator.coordinators import GroupClient
from tests.sim.coordinator.pipelining import PipelinedClient
from tests.sim.schedules import outcomes, report
from tests.tiers import quick

GROUPS = Plan(groups=3, partitions=1)
PIPELINES = Plan(pipelines=3, partitions=1, producers=1, faults=("acceptor", "leaders", "mend"))


@pytest.mark.parametrize("first", quick([0, 10, 20, 30], [0]))
def test_schedules_with_groups(first: int) -> None:
    found = outcomes(range(first, first + 10), plan=GROUPS)
    assert not report(found), report(found)


@pytest.mark.parametrize("first", quick([0, 10, 20], [0]))
def test_pipelined_commits_never_lower_an_offset_when_acceptors_die(first: int) -> None:
    found = outcomes(range(first, first + 10), plan=PIPELINES)
    assert not report(found), report(found)


def test_pipelined_commits_make_progress_while_acceptors_die() -> None:
    done = deaths = 0
    for seed in range(6):
        world = ClusterWorld(seed, plan=PIPELINES)
        world.run()
        clients = [client for client in world.clients if isinstance(client, PipelinedClient)]
        done += sum(len(client.acked) for client in clients)
        deaths += sum(client.deaths for client in clients)
    assert done > 200 and deaths > 15


def test_commits_resent_in_another_order_are_detected() -> None:
    """As in an earlier version of a worker's table: newest first."""
    found = outcomes(range(20), frozenset(["order"]), enough=1, plan=PIPELINES)
    assert any(result.name == "C5" for result in found), report(found)


def test_groups_make_progress_while_coordinators_move() -> None:
    """Otherwise the schedules prove nothing."""
    done = moves = 0
    for seed in range(6):
        world = ClusterWorld(seed, plan=GROUPS)
        world.run()
        done += sum(len(client.acked) for client in world.clients if isinstance(client, GroupClient))
        moves += sum(1 for entry in world.kernel.history if entry[1] == "coordinator")
    assert done > 200 and moves > 15


# Disabled rule -> seeds within which it is detected. The order of commits, above, is off in every
# run.
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "seeds"), [("L5", 60), ("held", 30)])
def test_a_disabled_rule_is_detected(rule: str, seeds: int) -> None:
    found = outcomes(range(seeds), frozenset([rule]), enough=1, plan=GROUPS)
    assert any(result.name for result in found), f"{rule} survives {seeds} schedules"
