"""Offset ranges for tasks, and the size of a trigger."""

from __future__ import annotations

import random

from mqd.spark.offsets import IDS, Position
from mqd.spark.planning import Range, limit_rate, split


def _covered(ranges: list[Range]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Adjacent ranges joined again."""
    out: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for one in sorted(ranges, key=lambda one: (one.topic, one.partition, one.start)):
        assert one.end > one.start
        pieces = out.setdefault((one.topic, one.partition), [])
        if pieces and pieces[-1][1] == one.start:
            pieces[-1] = (pieces[-1][0], one.end)
        else:
            pieces.append((one.start, one.end))
    return out


def test_one_task_for_a_partition_by_default() -> None:
    ranges = [Range("a", 0, 5, 10), Range("a", 1, 3, 3), Range("b", 0, 0, 1)]
    assert split(ranges, None, None) == [ranges[0], ranges[2]]
    assert split(ranges, 2, None) == [ranges[0], ranges[2]]
    assert split([], 8, 5) == []


def test_the_ranges_are_always_covered() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ranges = [
            Range("t", index, start, start + rng.choice((0, 1, 7, rng.randrange(1, 10_000))))
            for index in range(rng.randrange(1, 9))
            for start in (rng.randrange(1000),)
        ]
        least, most = rng.choice((None, 1, 3, 20, 200)), rng.choice((None, 1, 50, 5000))
        if most == 1:
            ranges = ranges[:1]
        weights = {} if rng.random() < 0.5 else {("t", one.partition): rng.uniform(1, 1000) for one in ranges}
        made = split(ranges, least, most, weights)
        assert _covered(made) == {("t", one.partition): [(one.start, one.end)] for one in ranges if one.size}
        if most:
            assert all(one.size <= most for one in made)
        if least:
            assert len(made) >= min(least, sum(one.size for one in ranges))


def test_tasks_are_even_by_bytes() -> None:
    """Equal offsets in both; those of partition 1 are nine times as large."""
    made = split([Range("t", 0, 0, 9000), Range("t", 1, 0, 9000)], 10, None, {("t", 0): 100.0, ("t", 1): 900.0})
    counts = [sum(one.partition == index for one in made) for index in (0, 1)]
    assert counts == [1, 9]
    weights = [one.size * (100 if one.partition == 0 else 900) for one in made]
    assert max(weights) <= 1.1 * min(weights)
    # the largest pieces are split again
    assert [
        sum(one.partition == index for one in split([Range("t", 0, 0, 300), Range("t", 1, 0, 700)], 5, None))
        for index in (0, 1)
    ] == [2, 3]
    half_known = split([Range("t", 0, 0, 9000), Range("t", 1, 0, 9000)], 10, None, {("t", 0): 100.0})
    assert [sum(one.partition == index for one in half_known) for index in (0, 1)] == [5, 5]


def test_a_trigger_is_shared_by_backlog() -> None:
    start, latest = {("t", 0): 0, ("t", 1): 100, ("t", 2): 7}, {("t", 0): 900, ("t", 1): 200, ("t", 2): 7}
    assert limit_rate(start, latest, 100) == {("t", 0): 90, ("t", 1): 110, ("t", 2): 7}
    assert limit_rate(start, latest, 5000) == latest


def test_a_trigger_is_bounded_and_every_partition_gets_its_turn() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        latest = {("t", index): rng.choice((0, 1, 2, rng.randrange(1, 100))) for index in range(rng.randrange(1, 20))}
        at, most, turns = dict.fromkeys(latest, 0), rng.choice((1, 3, 40)), 0
        while at != latest:
            after = limit_rate(at, latest, most)
            assert all(at[key] <= after[key] <= latest[key] for key in latest)
            assert 0 < sum(after.values()) - sum(at.values()) <= most
            at, turns = after, turns + 1
        assert turns <= sum(latest.values())


def test_positions_in_sparks_format() -> None:
    position = Position({("b", 10): 5, ("b", 2): 7, ("a", 0): 1}, {"a": bytes(range(16)), "gone": bytes(16)})
    found = position.to_json()
    assert list(found) == ["a", "b", IDS] and list(found["b"]) == ["2", "10"] and list(found[IDS]) == ["a"]  # O1
    again = Position.from_json(found)
    assert again.offsets == position.offsets and again.ids == {"a": bytes(range(16))}
    assert Position.from_json({"a": {"0": 3}}) == Position({("a", 0): 3}, {})
    for wrong in ({"a": 3}, {"a": {"x": 1}}, {"a": {"0": None}}, {"a": {"0": 1}, IDS: {"a": 7}}):
        try:
            Position.from_json(wrong)
        except ValueError as error:
            assert "not valid offsets for format mqd" in str(error)
        else:
            raise AssertionError(wrong)
