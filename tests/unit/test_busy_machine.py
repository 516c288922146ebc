"""A slow example, as on a busy machine, does not fail a Hypothesis test."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(max_examples=1)
@given(st.just(0.3))
def test_an_example_that_takes_longer_than_the_default_deadline(seconds: float) -> None:
    time.sleep(seconds)


def test_slow_draws_are_not_a_failure() -> None:
    assert HealthCheck.too_slow in settings().suppress_health_check and settings().deadline is None
