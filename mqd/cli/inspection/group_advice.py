"""Computes how many members or partitions a consumer group needs for the current rate of writes,
from two samples of its committed offsets and the ends of its partitions.

A member's capacity is the rate of the members that always had records to read. The rate of a
member that keeps up is only a lower bound of its capacity, and is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from mqd.cli.inspection.diagnosis import COMMIT_INTERVAL_S
from mqd.cli.inspection.live_view import Partition, rates


class GroupSample(NamedTuple):
    """`at_s`: monotonic clock. `members`: the partitions of each member, by the member's name."""

    at_s: float
    ends: Mapping[Partition, int]
    committed: Mapping[Partition, int]
    members: Mapping[str, frozenset[Partition]]

    def lag(self, partitions: frozenset[Partition]) -> int:
        sampled = partitions & self.committed.keys() & self.ends.keys()
        return sum(max(self.ends[partition] - self.committed[partition], 0) for partition in sampled)


class Advice(NamedTuple):
    """The fields are those of the JSON output. `records_in_s`, `records_read_s`, `member_reads_s`:
    records per second that are written, that the group reads, and that a busy member can read.
    `to_hold`: how many members keep up with the write rate. `to_catch_up`: how many also read the
    backlog in the given time. None: not known. `hot`: partitions that receive more records than a
    single member can read.
    """

    seconds: float
    records_in_s: float
    records_read_s: float
    lag: int
    members: int
    partitions: int
    member_reads_s: float | None
    to_hold: int | None
    to_catch_up: int | None
    partitions_needed: dict[str, int]  # by topic, where there are too few
    hot: list[Partition]
    lines: list[str]


def advise(before: GroupSample, after: GroupSample, catch_up_s: float) -> Advice:
    """Raises ValueError if `after` is not later than `before`."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        raise ValueError("two samples taken at the same time give no rate")
    read_partitions = frozenset(after.committed).union(*after.members.values()) & frozenset(after.ends)
    written = {
        partition: rate
        for partition, rate in rates(before.ends, after.ends, seconds).items()
        if partition in read_partitions
    }
    read = rates(before.committed, after.committed, seconds)
    records_in_s, records_read_s = sum(written.values()), sum(read.values())
    lag = after.lag(read_partitions)
    busy_rates = _busy_rates(before, after, read)
    capacity = median(busy_rates) if busy_rates else None
    to_hold = to_catch_up = None
    needed: dict[str, int] = {}
    hot: list[Partition] = []
    if capacity:
        to_hold = max(math.ceil(records_in_s / capacity), 1)
        to_catch_up = max(math.ceil((records_in_s + lag / catch_up_s) / capacity), 1)
        hot = sorted(partition for partition, rate in written.items() if rate > capacity)
        if to_hold > len(read_partitions):
            needed = _partitions_needed(written, to_hold)
    advice = Advice(
        seconds,
        records_in_s,
        records_read_s,
        lag,
        len(after.members),
        len(read_partitions),
        capacity,
        to_hold,
        to_catch_up,
        needed,
        hot,
        [],
    )
    return advice._replace(lines=_advice_lines(advice, set(before.members) != set(after.members), catch_up_s))


def _busy_rates(before: GroupSample, after: GroupSample, read: Mapping[Partition, float]) -> list[float]:
    """The rates of the members that always had records to read: their lag in both samples exceeds
    what they read between two commits. `read`: the rate at which each partition is read.
    """
    busy_rates = []
    for name, partitions in after.members.items():
        if before.members.get(name) != partitions:
            continue  # its assignment has just changed
        rate = sum(read.get(partition, 0.0) for partition in partitions)
        if rate > 0 and min(before.lag(partitions), after.lag(partitions)) > rate * COMMIT_INTERVAL_S:
            busy_rates.append(rate)
    return busy_rates


def _partitions_needed(written: Mapping[Partition, float], members: int) -> dict[str, int]:
    """Returns how many partitions each topic needs so that each member gets one, in proportion to
    the topics' write rates. Topics that have enough are omitted.
    """
    by_topic: dict[str, list[float]] = {}
    for (topic, _), rate in written.items():
        by_topic.setdefault(topic, []).append(rate)
    total = sum(map(sum, by_topic.values()))
    needed = {topic: math.ceil(members * sum(topic_rates) / total) for topic, topic_rates in by_topic.items()}
    return {topic: count for topic, count in sorted(needed.items()) if count > len(by_topic[topic])}


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _advice_lines(advice: Advice, has_changed: bool, catch_up_s: float) -> list[str]:
    if not advice.members:
        return ["it has no members: start some, and run this again while they read"]
    if has_changed:
        return ["its members changed meanwhile: run this again when the rebalance is over"]
    if not advice.records_read_s and advice.lag:
        return [
            f"nothing was committed within {advice.seconds:.0f} s, though {advice.lag:,} records wait: if"
            " members commit less often than that, use a longer --seconds; otherwise they are probably stuck (mqd group"
            " describe)"
        ]
    if advice.member_reads_s is None:
        return [
            f"it keeps up: {_plural(advice.members, 'member')} are enough. How much more they could read is not known"
            " while they wait for records"
            if advice.members > 1
            else "it keeps up: 1 member is enough. How much more it could read is not known while it waits for records"
        ]
    return [*_member_lines(advice, catch_up_s), *_partition_lines(advice)]


def _member_lines(advice: Advice, catch_up_s: float) -> list[str]:
    assert advice.member_reads_s and advice.to_hold and advice.to_catch_up
    gain = advice.records_read_s - advice.records_in_s
    lines = [f"a member that is busy all the time reads {advice.member_reads_s:,.0f} records/s"]
    if gain > 0:
        lines.append(f"at these rates the lag is gone in {duration_text(advice.lag / gain)}")
    else:
        lines.append(f"the lag grows by {-gain:,.0f} records/s")
    lines.append(f"{_plural(advice.to_hold, 'member')} would keep up with the current rate")
    if advice.to_catch_up > advice.to_hold:
        lines.append(
            f"{_plural(advice.to_catch_up, 'member')} would also read the backlog within {duration_text(catch_up_s)}"
        )
    return lines


def _partition_lines(advice: Advice) -> list[str]:
    assert advice.to_hold
    lines = []
    for topic, count in advice.partitions_needed.items():
        lines.append(
            f"members beyond {advice.partitions} would have no partition: {topic} needs {count}"
            f" (mqd topic add-partitions; keys move to other partitions)"
        )
    if advice.hot:
        names = ", ".join(f"{topic}-{index}" for topic, index in advice.hot[:5])
        more = f" and {len(advice.hot) - 5} more" if len(advice.hot) > 5 else ""
        lines.append(
            f"more members do not help {names}{more}: a single partition receives more records than a single member"
            " can read. Make the processing of a record cheaper, or spread the keys over more partitions"
        )
    return lines
