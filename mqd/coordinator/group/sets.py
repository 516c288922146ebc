"""Sets of partitions by topic id, or of tasks by subtopology: each key has at least one number, and
its numbers ascend. None of the functions changes its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")
NumbersByKey = dict[K, tuple[int, ...]]
NumbersByKeyView = Mapping[K, tuple[int, ...]]


def intersection(left: NumbersByKey[K], right: NumbersByKeyView[K]) -> NumbersByKey[K]:
    if left is right:
        return left
    result: NumbersByKey[K] = {}
    for key, numbers in left.items():
        right_numbers = right.get(key)
        if right_numbers is None:
            continue
        common = numbers if right_numbers == numbers else tuple(sorted(set(numbers).intersection(right_numbers)))
        if common:
            result[key] = common
    return result


def difference(left: NumbersByKey[K], right: NumbersByKeyView[K]) -> NumbersByKey[K]:
    result: NumbersByKey[K] = {}
    for key, numbers in left.items():
        right_numbers = right.get(key)
        remaining = (
            numbers
            if right_numbers is None
            else ()
            if right_numbers == numbers
            else tuple(sorted(set(numbers).difference(right_numbers)))
        )
        if remaining:
            result[key] = remaining
    return result


def union(left: NumbersByKey[K], right: NumbersByKey[K]) -> NumbersByKey[K]:
    if not right:
        return left
    result: NumbersByKey[K] = dict(left)
    for key in right:
        result[key] = tuple(sorted({*left[key], *right[key]})) if key in left else right[key]
    return result


def overlap(left: NumbersByKeyView[K], right: NumbersByKeyView[K]) -> bool:
    return any(key in right and not set(numbers).isdisjoint(right[key]) for key, numbers in left.items())


def contains(whole: NumbersByKeyView[K], part: NumbersByKeyView[K]) -> bool:
    return all(key in whole and set(whole[key]).issuperset(numbers) for key, numbers in part.items())
