"""Views over everything that changes their base topic's log (V1), and proof that the simulator finds bugs."""

from __future__ import annotations

import pytest

from tests.sim.views.view_reads import RULES
from tests.sim.views.view_world import World
from tests.tiers import examples, quick

EVENTS = 4_000
SEEDS = 30  # of a part; ten parts have more than a million events


@pytest.mark.parametrize("part", quick(range(10), [0]))
def test_views_are_their_filter(part: int) -> None:
    events = used = 0
    for seed in range(part * SEEDS, part * SEEDS + examples(2, SEEDS)):
        world = World(seed)
        events += world.run(EVENTS)
        used += world.used
        assert world.selected > 100_000
    assert used > events // 20, "the index is not used"


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found(rule: str) -> None:
    for seed in range(30):
        try:
            World(seed, [rule]).run(EVENTS)
        except AssertionError as error:
            assert "V1" in str(error) or "error" in str(error)
            return
    raise AssertionError(f"{rule}: nothing was noticed")
