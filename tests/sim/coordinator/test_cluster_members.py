"""Members of groups on simulated clusters (group_members.py): no partition has two of them, no
invalid commit is accepted, and every group settles when faults end.
"""

from __future__ import annotations

import pytest

from tests.sim.client.client_group_world import acknowledges_before_it_lets_go
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.plans import KINDS
from tests.sim.schedules import outcome, outcomes, report
from tests.tiers import quick


@pytest.mark.parametrize("first", quick([0, 4, 8], [0]))
def test_schedules_with_members(first: int) -> None:
    found = outcomes(range(first, first + 4), kind="members")
    assert not report(found), report(found)


@pytest.mark.slow
def test_schedules_reach_rare_cases() -> None:
    """Otherwise they prove nothing: coordinators move under members, which are fenced, told to
    rejoin, and commit; in groups of all three protocols.
    """
    received: set[int] = set()
    moves, commits = 0, [0, 0, 0]
    for seed in range(5):
        world = ClusterWorld(seed, plan=KINDS["members"].plan(seed))
        world.run(KINDS["members"].chaos)
        received |= world.members.received | world.members.refused
        moves += sum(1 for entry in world.kernel.history if entry[1] == "coordinator")
        for number, group in enumerate(world.members.groups):
            commits[number] += group.ledger.commits
    assert {0, 16, 25, 27, 79} <= received and received & {22, 113} and moves > 20 and min(commits) > 100, (
        received,
        moves,
        commits,
    )


# Disabled rule -> seeds within which it is detected.
@pytest.mark.parametrize(
    ("rule", "seeds"),
    quick([("held", 5), ("R4c", 200), ("commit", 15), ("unreleased", 10), ("timers", 1), ("again", 50)], ["timers"]),
)
def test_a_disabled_rule_is_detected(rule: str, seeds: int) -> None:
    found = outcomes(range(seeds), frozenset([rule]), enough=1, kind="members")
    assert any(result.name in ("C5", "C6", "LIVE") for result in found), f"{rule} survives {seeds} schedules"


@pytest.mark.slow
def test_a_bug_of_a_member_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledges_before_it_lets_go(monkeypatch)
    assert any(outcome(seed, kind="members").name for seed in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_more_schedules(block: int) -> None:
    found = outcomes(range(1_000 + 200 * block, 1_200 + 200 * block), kind="members")
    assert not report(found), report(found)
