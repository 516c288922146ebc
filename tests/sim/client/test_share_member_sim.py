"""Histories of a share group's member against brokers that check it; each planted bug is found."""

from __future__ import annotations

from typing import Any

import pytest

from mqd.client.share import records, session
from mqd.client.share.core import ShareCore
from mqd.client.share.session import Session
from tests.sim.client.share_member_world import run
from tests.tiers import quick

QUICK_SEEDS, LONG_SEEDS = 12, 150


def test_histories() -> None:
    worlds = [run(seed) for seed in range(QUICK_SEEDS)]
    assert sum(world.lost for world in worlds) > QUICK_SEEDS and sum(world.session_count for world in worlds) > 24


@pytest.mark.slow
def test_many_histories() -> None:
    for seed in range(QUICK_SEEDS, LONG_SEEDS):
        run(seed)


# -- planted bugs ----------------------------------------------------------------------------------


def epochs_stand_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "EPOCH_MAX", 0)


def a_session_outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "end", lambda *_: [])
    patch.setattr(Session, "check", lambda _: None)


def lost_responses_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    end = Session.on_no_response
    patch.setattr(Session, "on_no_response", lambda self: end(self) and [])


def ranges_are_not_sorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "merged", list)


def gaps_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "_gaps", lambda *_: [])


def it_fetches_ahead(patch: pytest.MonkeyPatch) -> None:
    take = ShareCore.take

    def keeps_the_limits(self: ShareCore, *given: Any) -> Any:
        limits = self.limits
        found = take(self, *given)
        self.limits = limits
        return found

    patch.setattr(ShareCore, "take", keeps_the_limits)


def a_strict_fetch_asks_every_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ShareCore,
        "_leaders_to_fetch",
        lambda self, leaders, now: [node for node in sorted(leaders) if self._can_fetch_from(node, now)],
    )


def others_records_are_handed_out(patch: pytest.MonkeyPatch) -> None:
    def everything(runs: list[Any]) -> list[Any]:
        return [records.Acquired(first_offset=0, last_offset=23, delivery_count=1)] if (runs := list(runs)) else runs

    patch.setattr(records, "_check_runs", everything)


def a_dead_session_takes_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShareCore, "_acknowledge", lambda _, owner, __, one: owner[0].acknowledge(owner[1], one))
    patch.setattr(Session, "check", lambda _: None)


def sessions_are_left_open(patch: pytest.MonkeyPatch) -> None:
    acknowledge = ShareCore._send_acknowledgements
    patch.setattr(
        ShareCore, "_send_acknowledgements", lambda self, one, is_final=False: is_final or acknowledge(self, one)
    )


PLANTS = (
    epochs_stand_still,
    a_session_outlives_its_connection,
    lost_responses_are_not_reported,
    ranges_are_not_sorted,
    gaps_are_forgotten,
    it_fetches_ahead,
    a_strict_fetch_asks_every_leader,
    others_records_are_handed_out,
    a_dead_session_takes_acknowledgements,
    sessions_are_left_open,
)


@pytest.mark.parametrize("plant", quick(PLANTS, [it_fetches_ahead, lost_responses_are_not_reported]))
def test_planted_bugs_are_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(QUICK_SEEDS):
            run(seed)
