"""The client's membership core and the broker's group core in one world (client_group_world.py);
and proof that the world finds planted bugs.
"""

from __future__ import annotations

import pytest

from mqd.client.group.consumer_protocol import ConsumerProtocolCore
from mqd.client.group.membership import MAX_POLL_EXCEEDED
from tests.sim.client.client_group_world import (
    MAX_POLL_MS,
    SESSION_MS,
    World,
    acknowledges_before_it_lets_go,
    leaves_slowly,
    run,
)
from tests.tiers import examples, quick

QUICK_SEEDS = examples(15, 30)


def test_histories() -> None:
    for seed in range(QUICK_SEEDS):
        run(seed)


def test_a_member_that_leaves_without_polling_gets_nothing_more() -> None:
    run(2464)


def test_a_member_that_leaves_keeps_its_partitions_until_they_are_released() -> None:
    for seed in range(5):
        world = World(seed)
        member, valid_ms = leaves_slowly(world, poll_ms=20 * SESSION_MS)
        assert member.is_gone and valid_ms > 2.9 * SESSION_MS and world.received == {0}


def test_an_application_that_never_releases_them_loses_them() -> None:
    for seed in range(5):
        member, valid_ms = leaves_slowly(World(seed), poll_ms=MAX_POLL_MS)
        assert member.is_gone and MAX_POLL_MS < valid_ms < MAX_POLL_MS + SESSION_MS + 100


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_many_histories(share: int) -> None:
    for seed in range(1_000 + 200 * share, 1_200 + 200 * share):
        run(seed)


@pytest.mark.slow
def test_histories_reach_rare_cases() -> None:
    """Fenced, forgotten and refused members, and applications that do not poll, occur."""
    worlds = [run(seed) for seed in range(25)]
    assert {0, 25, 110, 111} <= set().union(*(world.received for world in worlds))
    assert any(MAX_POLL_EXCEEDED in one.problems for world in worlds for one in world.consumers)


def keeps_what_it_had_when_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerProtocolCore, "_lose_membership", lambda self, now_ms: self._begin_joining(now_ms))
    patch.setattr(ConsumerProtocolCore, "check", lambda self: None)


def never_reports(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ConsumerProtocolCore,
        "_must_report_owned",
        property(lambda self: False, lambda self, value: None),
        raising=False,
    )


def takes_more_while_a_report_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ConsumerProtocolCore,
        "_is_report_pending",
        property(lambda self: False, lambda self, value: None),
        raising=False,
    )


PLANTS = (
    acknowledges_before_it_lets_go,
    keeps_what_it_had_when_fenced,
    never_reports,
    takes_more_while_a_report_is_on_its_way,
)


@pytest.mark.parametrize("plant", quick(PLANTS, [keeps_what_it_had_when_fenced]))
def test_planted_bugs_are_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(QUICK_SEEDS):
            run(seed)
