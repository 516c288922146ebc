"""Removes planted bugs after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planted import plant


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    yield
    plant()
