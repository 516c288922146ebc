"""L1 in simulated clusters, and that each planted bug is found."""

from __future__ import annotations

import pytest

from tests.sim.share.dead_letters_world import PLANTED, World
from tests.tiers import quick


@pytest.mark.parametrize("block", quick(range(20), range(1)))
def test_each_dead_record_has_one_letter(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        World(seed).run(150)


@pytest.mark.parametrize("name", quick(sorted(PLANTED), ["ignores the progress record"]))
def test_a_planted_bug_of_the_writer_is_found(name: str) -> None:
    for seed in range(300):
        try:
            World(seed, PLANTED[name]).run(150)
        except AssertionError:
            return
    pytest.fail(f"no world found that a writer {name}")


@pytest.mark.parametrize("rule", ["LETTER_RETRIED"])
def test_a_planted_bug_of_the_owner_is_found(rule: str) -> None:
    for seed in range(100):
        try:
            World(seed, planted=[rule]).run(150)
        except AssertionError:
            return
    pytest.fail(f"no world found {rule}")
