"""Records that get the offsets of lost ones are delivered, and each planted bug is found."""

from __future__ import annotations

import pytest

from tests.sim.share.lost_log_world import PLANTED, World
from tests.tiers import quick


@pytest.mark.parametrize("block", quick(range(20), range(1)))
def test_what_gets_the_offset_of_a_lost_record_is_delivered(block: int) -> None:
    assert sum(World(seed).run(120).losses for seed in range(block * 10, block * 10 + 10)) > 10


@pytest.mark.parametrize("name", quick(sorted(PLANTED), ["looks at the log's end alone"]))
def test_a_planted_bug_of_the_coordinator_is_found(name: str) -> None:
    for seed in range(200):
        try:
            World(seed, PLANTED[name]).run(120)
        except AssertionError:
            return
    pytest.fail(f"no world found that a coordinator {name}")
