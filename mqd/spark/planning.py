"""Offset ranges for tasks and for triggers: arithmetic, without requests.

Without minPartitions and maxRecordsPerPartition a partition's range is one task, as in Spark's
Kafka source. maxRecordsPerPartition splits ranges that have more offsets. Then, if there are fewer
tasks than minPartitions, ranges are split so that tasks have similar sizes: the size of a range is
its number of offsets times the partition's average bytes per offset on the broker's disk (from
DescribeLogDirs). If that is unknown for a range, the sizes of all ranges are their numbers of
offsets.

    P1  the ranges cover the planned offsets, each exactly once
    P2  a trigger takes from each partition in proportion to its backlog, and at least one offset of
        each partition with a backlog if the limit allows it (rule of Spark's Kafka source)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

Key = tuple[str, int]


class Range(msgspec.Struct, frozen=True):
    """Offsets [start, end) of a partition: one task. `topic_id` empty: not known; then only the
    name identifies the topic.
    """

    topic: str
    partition: int
    start: int
    end: int
    topic_id: bytes = b""

    @property
    def size(self) -> int:
        return self.end - self.start


def split(
    ranges: list[Range], min_partitions: int | None, max_records: int | None, bytes_per_offset: Mapping[Key, float] = {}
) -> list[Range]:
    """Splits ranges into tasks; see the module's docstring. Empty ranges are dropped."""
    ranges = [range_ for range_ in ranges if range_.size > 0]
    if max_records:
        ranges = [piece for range_ in ranges for piece in _split_evenly(range_, math.ceil(range_.size / max_records))]
    if not min_partitions or len(ranges) >= min_partitions or not ranges:
        return ranges
    weights = _weights(ranges, bytes_per_offset)
    return [
        piece
        for range_, count in zip(ranges, _piece_counts(ranges, weights, min_partitions), strict=True)
        for piece in _split_evenly(range_, count)
    ]


def _weights(ranges: list[Range], bytes_per_offset: Mapping[Key, float]) -> list[float]:
    averages = [bytes_per_offset.get((range_.topic, range_.partition), 0.0) for range_ in ranges]
    if not all(averages):  # weights in bytes cannot be compared with numbers of offsets
        averages = [1.0] * len(ranges)
    return [range_.size * weight for range_, weight in zip(ranges, averages, strict=True)]


def _piece_counts(ranges: list[Range], weights: list[float], target: int) -> list[int]:
    """The number of pieces of each range: at first in proportion to its weight, but at least one;
    then one more at a time for the range with the largest pieces. At most one piece per offset.
    """
    total = sum(weights)
    counts = [
        max(1, min(range_.size, int(target * weight / total))) for range_, weight in zip(ranges, weights, strict=True)
    ]
    while sum(counts) < target:
        largest = max(range(len(ranges)), key=lambda i: weights[i] / counts[i] if counts[i] < ranges[i].size else -1.0)
        if counts[largest] >= ranges[largest].size:
            break
        counts[largest] += 1
    return counts


def _split_evenly(range_: Range, count: int) -> list[Range]:
    bounds = [range_.start + range_.size * i // count for i in range(count + 1)]
    return [
        msgspec.structs.replace(range_, start=start, end=end)
        for start, end in zip(bounds, bounds[1:], strict=False)
        if end > start
    ]


def limit_rate(start: Mapping[Key, int], latest: Mapping[Key, int], offsets_max: int) -> dict[Key, int]:
    """The end offsets of a trigger of at most `offsets_max` offsets (P2). Every partition of
    `latest` is in the result; a partition without a start begins at its latest offset.
    """
    backlog = {key: max(0, latest[key] - start.get(key, latest[key])) for key in latest}
    total = sum(backlog.values())
    if total <= offsets_max:
        return dict(latest)
    taken = {}
    for key, size in backlog.items():
        share = offsets_max * (size / total)
        taken[key] = min(size, math.ceil(share) if share < 1 else math.floor(share))
    surplus = sum(taken.values()) - offsets_max
    # shares below 1 were rounded up: the partitions with the smallest backlogs wait for the next
    # trigger
    for key in sorted(taken, key=lambda key: (backlog[key], key)):
        if surplus <= 0:
            break
        returned = min(surplus, taken[key])
        taken[key] -= returned
        surplus -= returned
    return {key: start.get(key, latest[key]) + taken[key] for key in latest}
