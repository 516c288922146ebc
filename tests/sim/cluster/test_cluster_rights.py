"""Rules, passwords, tokens and quotas of simulated clusters (rights.py) under kills, splits and power cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from mqd.cluster.broker.reports import Reports
from mqd.cluster.host.core import _HANDLERS, HostCore
from mqd.cluster.metadata.core import Publish
from mqd.cluster.metadata.rules import tokens
from mqd.cluster.metadata.state import MetadataState, Snapshot
from tests.sim.cluster.cluster_world import ClusterWorld
from tests.sim.kernel import Violation
from tests.sim.plans import KINDS
from tests.sim.schedules import outcomes, report
from tests.tiers import quick


@pytest.mark.parametrize("first", quick([0, 2, 4, 6], [0]))
def test_schedules_with_rights(first: int) -> None:
    found = outcomes(range(first, first + 2), kind="rights")
    assert not report(found), report(found)


@pytest.mark.slow
def test_schedules_reach_rare_cases() -> None:
    """Otherwise they prove nothing."""
    counts: Counter[str] = Counter()
    for seed in (0, 1, 3):
        world = ClusterWorld(seed, plan=KINDS["rights"].plan(seed))
        world.run(KINDS["rights"].chaos)
        assert world.rights is not None
        counts.update(world.rights.counts)
    often = ("created", "removed", "passwords", "tokens", "quotas")
    assert min(counts[name] for name in often) >= 5 and counts["removed tokens"] >= 3, counts
    assert counts["snapshots"] and counts["leaders"] > 2, (
        "a host may have read them from a snapshot, under several leaders"
    )


def _seen(seeds: Iterable[int]) -> set[str]:
    names = set()
    for seed in seeds:
        try:
            ClusterWorld(seed, plan=KINDS["rights"].plan(seed)).run(KINDS["rights"].chaos)
        except Violation as violation:
            names.add(violation.name)
        except KeyError:
            names.add("contradiction")  # a record that contradicts the state
    return names


def test_a_response_before_the_workers_apply_the_change_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: committed records count as applied."""
    monkeypatch.setattr(Reports, "applied_version", property(lambda self: self._committed))
    assert "A1" in _seen([7])


def test_a_removal_that_is_not_reported_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the host's processes receive only added rules."""
    reported = HostCore._on_publish

    def publish(self: HostCore, event: Publish, now_ms: int) -> list:
        return reported(self, msgspec.structs.replace(event, acls_removed=()), now_ms)

    monkeypatch.setitem(_HANDLERS, Publish, publish)
    assert _seen(range(4)) & {"A1", "A2"}


@pytest.mark.parametrize("what", quick(["acls", "scram_credentials", "delegation_tokens", "client_quotas"], ["acls"]))
def test_a_snapshot_without_rules_is_detected(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Planted: a host that starts or catches up from a snapshot has none."""
    taken = MetadataState.snapshot

    def snapshot(self: MetadataState) -> Snapshot:
        return msgspec.structs.replace(taken(self), **{what: []})

    monkeypatch.setattr(MetadataState, "snapshot", snapshot)
    seen = _seen([0, 2] if what == "acls" else range(0, 12, 2))
    assert seen and seen <= {"A1", "A2", "A3", "contradiction"}


@pytest.mark.slow
def test_quotas_that_are_not_published_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a process only has those from the time of its subscription."""
    reported = HostCore._on_publish

    def publish(self: HostCore, event: Publish, now_ms: int) -> list:
        return reported(self, msgspec.structs.replace(event, client_quotas_changed=False), now_ms)

    monkeypatch.setitem(_HANDLERS, Publish, publish)
    assert "A2" in _seen(range(4))


def test_tokens_that_outlive_their_expiry_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the active controller removes none."""
    monkeypatch.setattr(tokens, "remove_expired", lambda state, now_ms: [])
    assert "A4" in _seen([0])


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_many_more_schedules(block: int) -> None:
    found = outcomes(range(1_000 + 50 * block, 1_050 + 50 * block), kind="rights")
    assert not report(found), report(found)
