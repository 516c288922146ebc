"""Finds repeated items in time proportional to their number: requests may contain 100,000 of them."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def repeated(items: Iterable[Item]) -> list[Item]:
    """The items that occur more than once, in the order of their first occurrence."""
    return [item for item, count in Counter(items).items() if count > 1]
