"""How many members and partitions a group needs, for groups whose rates are known."""

from __future__ import annotations

import pytest

from mqd.cli.inspection.group_advice import Advice, GroupSample, advise
from mqd.cli.inspection.live_view import Partition

SECONDS = 20.0
CATCH_UP_S = 600.0


def after_while(
    written: dict[Partition, float],
    read: dict[Partition, float],
    members: dict[str, set[Partition]],
    lag: int = 100_000,
    members_before: dict[str, set[Partition]] | None = None,
) -> Advice:
    """`written`, `read`: records per second. `lag`: of each partition, at first."""

    def look(at_s: float, held: dict[str, set[Partition]]) -> GroupSample:
        return GroupSample(
            at_s,
            {one: 10_000_000 + int(rate * at_s) for one, rate in written.items()},
            {one: 10_000_000 - lag + int(rate * at_s) for one, rate in read.items()},
            {name: frozenset(partitions) for name, partitions in held.items()},
        )

    return advise(look(0.0, members_before or members), look(SECONDS, members), CATCH_UP_S)


def flights(count: int, rate: float) -> dict[Partition, float]:
    return {("flights", index): rate for index in range(count)}


def test_a_group_that_falls_behind() -> None:
    held = {"a": {("flights", 0), ("flights", 1)}, "b": {("flights", 2), ("flights", 3)}}
    found = after_while(flights(4, 1000), flights(4, 400), held)
    assert (found.records_in_s, found.records_read_s, found.lag) == (4000, 1600, 448_000)
    assert (found.member_reads_s, found.to_hold) == (800, 5)
    assert found.to_catch_up == 6  # 4000 + 448,000 / 600 s, by 800
    assert found.partitions_needed == {"flights": 5}
    assert found.hot == [("flights", index) for index in range(4)]
    assert "the lag grows by 2,400 records/s" in found.lines
    assert "5 members would keep up with the current rate" in found.lines
    assert any("flights needs 5" in line for line in found.lines)


def test_a_group_that_catches_up() -> None:
    found = after_while(flights(2, 100), flights(2, 200), {"a": {("flights", 0)}, "b": {("flights", 1)}})
    assert (found.to_hold, found.to_catch_up, found.partitions_needed, found.hot) == (1, 3, {}, [])
    assert "at these rates the lag is gone in 16 min" in found.lines
    assert "3 members would also read the backlog within 10 min" in found.lines


def test_the_capacity_of_a_group_that_keeps_up_is_unknown() -> None:
    # records between two commits are not lag
    found = after_while(flights(2, 1000), flights(2, 1000), {"a": {("flights", 0), ("flights", 1)}}, lag=5_000)
    assert (found.member_reads_s, found.to_hold) == (None, None)
    assert found.lines[0].startswith("it keeps up: 1 member is enough")


def test_only_busy_members_count() -> None:
    written = {("flights", 0): 1000.0, ("flights", 1): 10.0}
    read = {("flights", 0): 300.0, ("flights", 1): 510.0}
    held: dict[str, set[Partition]] = {"a": {("flights", 0)}, "b": {("flights", 1)}}
    found = after_while(written, read, held, lag=10_000)  # b has nothing left at the end
    assert found.member_reads_s == 300
    assert found.hot == [("flights", 0)]
    assert any("more members do not help flights-0" in line for line in found.lines)


def test_partitions_by_the_write_rate_of_their_topics() -> None:
    written = {("flights", 0): 3000.0, ("gates", 0): 1000.0}
    read = dict.fromkeys(written, 500.0)
    found = after_while(written, read, {"a": {("flights", 0)}, "b": {("gates", 0)}})
    assert found.to_hold == 8 and found.partitions_needed == {"flights": 6, "gates": 2}


@pytest.mark.parametrize(
    ("members", "before", "read", "said"),
    [
        ({}, None, 0.0, "it has no members"),
        ({"a": {("flights", 0)}}, {"b": {("flights", 0)}}, 10.0, "its members changed meanwhile"),
        ({"a": {("flights", 0)}}, None, 0.0, "nothing was committed within 20 s"),
    ],
)
def test_groups_that_show_no_rate(
    members: dict[str, set[Partition]], before: dict[str, set[Partition]] | None, read: float, said: str
) -> None:
    found = after_while(flights(1, 100), flights(1, read), members, members_before=before)
    (line,) = found.lines
    assert line.startswith(said)


def test_offsets_that_were_set_back_and_topics_that_are_gone() -> None:
    part = ("flights", 0)
    members = {"a": frozenset({part})}
    found = advise(
        GroupSample(0.0, {part: 100}, {part: 90, ("gone", 0): 5}, members),
        GroupSample(10.0, {part: 110}, {part: 10}, members),
        60,
    )
    assert (found.records_in_s, found.records_read_s, found.lag, found.partitions) == (1, 0, 100, 1)


def test_two_samples_at_the_same_time() -> None:
    look = GroupSample(1.0, {}, {}, {})
    with pytest.raises(ValueError, match="no rate"):
        advise(look, look, 60)
