"""Ratios of two trees' costs, measured alternately."""

from __future__ import annotations

import random

from perf.trees.alternate import ratio


def test_a_small_difference_is_seen_through_noise_that_both_sides_share():
    rng = random.Random(1)
    machine = [rng.uniform(0.7, 1.4) for _ in range(100)]
    old = [speed * rng.gauss(1.0, 0.05) for speed in machine]
    new = [speed * rng.gauss(1.06, 0.05) for speed in machine]
    middle, low, high = ratio(old, new)
    assert low <= middle <= high
    assert low > 1.03 and high < 1.09


def test_equal_sides_are_not_told_apart():
    rng = random.Random(2)
    old, new = ([rng.gauss(1.0, 0.1) for _ in range(100)] for _ in range(2))
    _, low, high = ratio(old, new)
    assert low < 1.0 < high
