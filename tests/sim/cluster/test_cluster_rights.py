"""Rules, passwords and tokens of simulated clusters (rights.py) under kills, splits and power cuts."""

from __future__ import annotations

import msgspec
import pytest

from mqd.cluster.broker.reports import Reports
from mqd.cluster.host.core import _HANDLERS, HostCore
from mqd.cluster.metadata.core import Publish
from mqd.cluster.metadata.rules import tokens
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.kernel import Violation
from tests.sim.plans import KINDS
from tests.sim.schedules import outcomes, report
from tests.tiers import quick


@pytest.mark.parametrize("first", quick([0, 2, 4, 6], [0]))
def test_schedules_with_rights(first: int) -> None:
    found = outcomes(range(first, first + 2), kind="rights")
    assert not report(found), report(found)


def test_what_schedules_meet() -> None:
    """Otherwise they prove nothing."""
    counts = {"created": 0, "removed": 0, "passwords": 0, "tokens": 0, "removed tokens": 0}
    for seed in range(2):
        world = ClusterWorld(seed, plan=KINDS["rights"].plan(seed))
        world.run(KINDS["rights"].chaos)
        assert world.rights is not None
        counts = {name: counts[name] + count for name, count in world.rights.counts.items()}
    tokens_removed = counts.pop("removed tokens")
    assert min(counts.values()) >= 5 and tokens_removed >= 3, counts


def _seen(seeds: int) -> set[str]:
    names = set()
    for seed in range(seeds):
        try:
            ClusterWorld(seed, plan=KINDS["rights"].plan(seed)).run(KINDS["rights"].chaos)
        except Violation as violation:
            names.add(violation.name)
    return names


def test_an_answer_before_the_workers_apply_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is committed counts as applied."""
    monkeypatch.setattr(Reports, "in_force_version", property(lambda self: self._committed))
    assert "A1" in _seen(6)


def test_a_removal_that_is_not_told_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the host's processes hear of new rules only."""
    told = HostCore._on_publish

    def publish(self: HostCore, event: Publish, now_ms: int) -> list:
        return told(self, msgspec.structs.replace(event, acls_removed=()), now_ms)

    monkeypatch.setitem(_HANDLERS, Publish, publish)
    assert _seen(4) & {"A1", "A2"}


def test_tokens_that_outlive_their_expiry_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the active controller removes none."""
    monkeypatch.setattr(tokens, "expired", lambda state, now_ms: [])
    assert "A4" in _seen(1)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_many_more_schedules(block: int) -> None:
    found = outcomes(range(1_000 + 50 * block, 1_050 + 50 * block), kind="rights")
    assert not report(found), report(found)
