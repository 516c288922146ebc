"""What of a test belongs to the quick tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

is_quick = False  # set by conftest.py


def examples(quick: int, whole: int) -> int:
    """How many of a property: `whole` in `make test-long`."""
    return quick if is_quick else whole


def quick(values: Iterable[Any], chosen: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """`values` for pytest.mark.parametrize, all slow except the chosen ones. A tuple is
    several arguments, chosen by the first of them.
    """
    is_chosen = (
        chosen if callable(chosen) else lambda value: (value[0] if isinstance(value, tuple) else value) in chosen
    )
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if is_chosen(value) else [pytest.mark.slow]
        )
        for value in values
    ]
