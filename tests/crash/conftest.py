"""The number of rounds, and the seed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """rounds(quick, long): the number for this tier."""
    is_long = request.config.getoption("--tier") == "long"
    return lambda quick, long: long if is_long else quick


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("MQD_CRASH_SEED", "1"))
