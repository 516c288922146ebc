"""Sets of partitions by topic id, or of tasks by subtopology: each key has at least one number, in
ascending order. None of the functions changes its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")
Held = dict[K, tuple[int, ...]]
Numbers = Mapping[K, tuple[int, ...]]


def intersection(one: Held[K], other: Numbers[K]) -> Held[K]:
    if one is other:
        return one
    found: Held[K] = {}
    for key, numbers in one.items():
        others = other.get(key)
        if others is None:
            continue
        both = numbers if others == numbers else tuple(sorted(set(numbers).intersection(others)))
        if both:
            found[key] = both
    return found


def difference(one: Held[K], other: Numbers[K]) -> Held[K]:
    found: Held[K] = {}
    for key, numbers in one.items():
        others = other.get(key)
        rest = (
            numbers if others is None else () if others == numbers else tuple(sorted(set(numbers).difference(others)))
        )
        if rest:
            found[key] = rest
    return found


def union(one: Held[K], other: Held[K]) -> Held[K]:
    if not other:
        return one
    found: Held[K] = dict(one)
    for key in other:
        found[key] = tuple(sorted({*one[key], *other[key]})) if key in one else other[key]
    return found


def overlap(one: Numbers[K], other: Numbers[K]) -> bool:
    return any(key in other and not set(numbers).isdisjoint(other[key]) for key, numbers in one.items())


def contains(whole: Numbers[K], part: Numbers[K]) -> bool:
    return all(key in whole and set(whole[key]).issuperset(numbers) for key, numbers in part.items())
