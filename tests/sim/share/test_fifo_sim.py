"""F1 in simulated share-partitions, and that each planted bug is found."""

from __future__ import annotations

import pytest

from tests.sim.share.fifo_world import World
from tests.tiers import quick

PLANTED = ["FORGOTTEN", "LATER_FREED", "LETTER_PASSED", "LOST_KEY", "NOT_LAST", "OLD_KEYS", "OVERTAKE", "UNSEEN"]


@pytest.mark.parametrize("block", quick(range(25), range(1)))
def test_records_of_a_key_come_one_after_the_other(block: int) -> None:
    """25 blocks are more than 10^6 events."""
    events = sum(World(seed).run(1_000) for seed in range(block * 25, block * 25 + 25))
    assert events > 40_000


@pytest.mark.parametrize("rule", quick(PLANTED, ["LETTER_PASSED", "LOST_KEY", "OVERTAKE"]))
def test_a_planted_bug_is_found(rule: str) -> None:
    for seed in range(200):
        try:
            World(seed, [rule]).run(1_000)
        except AssertionError:
            return
    pytest.fail(f"no world found {rule}")
