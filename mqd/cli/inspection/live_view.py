"""The output of `mqd top`: rates from two samples of a cluster, rendered as lines.

Pure functions; mqd/cli/verbs/top.py samples and draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mqd.cli.common import table

Partition = tuple[str, int]
LAG_GROWTH_MIN = 1  # records a second; less is noise
ROWS_MIN = 3


class Replicas(NamedTuple):
    """The replicas of a partition. `leader` -1: the partition has none."""

    leader: int
    out_of_sync: tuple[int, ...] = ()


class GroupOffsets(NamedTuple):
    """A sample of a group. `behind_s`: by partition, how long the first uncommitted record has
    waited.
    """

    state: str
    offsets: Mapping[Partition, int]
    behind_s: Mapping[Partition, float]


class Sample(NamedTuple):
    """`at_s`: monotonic clock. `ends`: offset of the next record. `cpu_s`: CPU time of
    the processes of this host's broker, by name; empty if not known.
    """

    at_s: float
    nodes: Mapping[int, str]
    partitions: Mapping[Partition, Replicas]
    ends: Mapping[Partition, int]
    groups: Mapping[str, GroupOffsets]
    cpu_s: Mapping[str, float]


class Host(NamedTuple):
    node: int
    address: str
    leads: int
    records_in_s: float


class Process(NamedTuple):
    name: str
    cpu: float  # in cores: 0.5 is half a core


class Topic(NamedTuple):
    """`records_read_s`: None where no group has committed."""

    name: str
    partitions: int
    records_in_s: float | None
    records_read_s: float | None


class Group(NamedTuple):
    """`behind_s` and `records_read_s` None: not known."""

    name: str
    state: str
    lag: int
    behind_s: float | None
    records_read_s: float | None

    def catch_up_time_s(self, records_in_s: float) -> float | None:
        """Seconds until the group has no lag; None: never, at these rates."""
        if not self.lag:
            return 0.0
        gain = (self.records_read_s or 0.0) - records_in_s
        return self.lag / gain if gain > 0 else None


class SlowPartition(NamedTuple):
    """A partition, and why it is listed."""

    partition: str
    leader: int
    lag: int
    why: str


class View(NamedTuple):
    """The changes between two samples. Hosts are in the order of their ids, processes in the
    sample's order; topics and groups are sorted, the largest first.
    """

    seconds: float
    partition_count: int
    records_in_s: float
    records_read_s: float
    hosts: list[Host]
    processes: list[Process]
    topics: list[Topic]
    groups: list[Group]
    slow: list[SlowPartition]
    group_records_in_s: dict[str, float]  # by group: records a second written to the partitions that it reads


def rates(before: Mapping[Partition, int], after: Mapping[Partition, int], seconds: float) -> dict[Partition, float]:
    """Returns the rates of the partitions that are in both samples and whose offset did not
    decrease: a recreated topic begins at 0, and a committed offset may have been reset.
    """
    return {
        partition: (end - before[partition]) / seconds
        for partition, end in after.items()
        if partition in before and end >= before[partition]
    }


def view(before: Sample, after: Sample) -> View:
    """Raises ValueError if `after` is not later than `before`."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        raise ValueError("two samples taken at the same time give no rate")
    written = rates(before.ends, after.ends, seconds)
    read = {
        name: rates(before.groups[name].offsets, group.offsets, seconds) if name in before.groups else {}
        for name, group in after.groups.items()
    }
    by_topic: defaultdict[str, list[Partition]] = defaultdict(list)
    for partition in after.partitions:
        by_topic[partition[0]].append(partition)
    read_by_topic: dict[str, float] = {}
    for group_rates in read.values():
        for (topic, _), rate in group_rates.items():
            read_by_topic[topic] = read_by_topic.get(topic, 0.0) + rate
    topics = [
        Topic(
            name,
            len(partitions),
            _total(written[partition] for partition in partitions if partition in written),
            read_by_topic.get(name),
        )
        for name, partitions in by_topic.items()
    ]
    groups = [_group(name, group, after.ends, read[name]) for name, group in after.groups.items()]
    processes = [
        Process(name, (used - before.cpu_s[name]) / seconds)
        for name, used in after.cpu_s.items()
        if name in before.cpu_s and used >= before.cpu_s[name]
    ]
    return View(
        seconds,
        len(after.partitions),
        sum(written.values()),
        sum(read_by_topic.values()),
        _hosts(after, written),
        processes,
        sorted(topics, key=lambda topic: (-(topic.records_in_s or 0), -(topic.records_read_s or 0), topic.name)),
        sorted(groups, key=lambda group: (-group.lag, group.name)),
        _slow_partitions(after, written, read),
        {name: sum(written.get(partition, 0.0) for partition in group.offsets) for name, group in after.groups.items()},
    )


def _total(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) if listed else None


def _lag(ends: Mapping[Partition, int], partition: Partition, offset: int) -> int:
    return max(0, ends.get(partition, offset) - offset)


def _group(name: str, group: GroupOffsets, ends: Mapping[Partition, int], read: Mapping[Partition, float]) -> Group:
    lag = sum(_lag(ends, partition, offset) for partition, offset in group.offsets.items())
    behind_s = max(group.behind_s.values(), default=None) if lag else 0.0
    return Group(name, group.state, lag, behind_s, _total(read.values()))


def _hosts(sample: Sample, written: Mapping[Partition, float]) -> list[Host]:
    leads: dict[int, int] = {}
    records_in: dict[int, float] = {}
    for partition, replicas in sample.partitions.items():
        leads[replicas.leader] = leads.get(replicas.leader, 0) + 1
        records_in[replicas.leader] = records_in.get(replicas.leader, 0.0) + written.get(partition, 0.0)
    return [
        Host(node, address, leads.get(node, 0), records_in.get(node, 0.0))
        for node, address in sorted(sample.nodes.items())
    ]


def _slow_partitions(
    sample: Sample, written: Mapping[Partition, float], read: Mapping[str, Mapping[Partition, float]]
) -> list[SlowPartition]:
    """The partitions to list: those without a leader, then those with a replica out of sync, then
    those in which a group falls behind.
    """
    ranked = []
    for partition, replicas in sample.partitions.items():
        name = f"{partition[0]}-{partition[1]}"
        if replicas.leader < 0:
            ranked.append((0, SlowPartition(name, -1, 0, "no leader: neither read nor written")))
        elif replicas.out_of_sync:
            nodes = ", ".join(map(str, replicas.out_of_sync))
            ranked.append((1, SlowPartition(name, replicas.leader, 0, f"not in sync: replicas of broker {nodes}")))
    for group, group_rates in read.items():
        for partition, rate in group_rates.items():
            lag = _lag(sample.ends, partition, sample.groups[group].offsets[partition])
            growth = written.get(partition, 0.0) - rate
            if not lag or growth < LAG_GROWTH_MIN:
                continue
            why = f"{group} commits nothing" if not rate else f"{group} falls behind by {growth:.0f} records/s"
            leader = sample.partitions[partition].leader if partition in sample.partitions else -1
            ranked.append((2, SlowPartition(f"{partition[0]}-{partition[1]}", leader, lag, why)))
    return [slow for _, slow in sorted(ranked, key=lambda pair: (pair[0], -pair[1].lag, pair[1].partition))]


# -- rendering ------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Group names may contain anything, even terminal control sequences."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _count(rate: float | None) -> int | str:
    return "-" if rate is None else round(rate)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: float | None) -> str:
    """ "850 ms", "12 s", "3 min", "2.5 h"."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def render(shown: View, heading: str, height: int | None = None, width: int | None = None) -> list[str]:
    """Returns the lines: at most `height`, each of at most `width` columns; None: no limit. If
    there is no room for all rows, each section shows how many it omits.
    """
    sections: list[tuple[Sequence[str], list[tuple[Any, ...]]]] = [
        (
            ("HOST", "ADDRESS", "LEADS", "RECORDS IN/S"),
            [(host.node, host.address, host.leads, round(host.records_in_s)) for host in shown.hosts],
        ),
        (("PROCESS", "CPU %"), [(process.name, round(100 * process.cpu)) for process in shown.processes]),
        (
            ("SLOW PARTITION", "LEADER", "LAG", "WHY"),
            [(slow.partition, slow.leader if slow.leader >= 0 else "-", slow.lag, slow.why) for slow in shown.slow],
        ),
        (
            ("GROUP", "STATE", "LAG", "BEHIND", "COMMITTED/S", "CAUGHT UP IN"),
            [
                (
                    group.name,
                    group.state,
                    group.lag,
                    duration(group.behind_s),
                    _count(group.records_read_s),
                    duration(group.catch_up_time_s(shown.group_records_in_s[group.name]))
                    if group.records_read_s is not None
                    else "-",
                )
                for group in shown.groups
            ],
        ),
        (
            ("TOPIC", "PARTITIONS", "RECORDS IN/S", "COMMITTED/S"),
            [
                (topic.name, topic.partitions, _count(topic.records_in_s), _count(topic.records_read_s))
                for topic in shown.topics
            ],
        ),
    ]
    sections = [(titles, rows) for titles, rows in sections if rows]
    lines = [
        heading,
        f"{shown.records_in_s:,.0f} records/s in, {shown.records_read_s:,.0f} committed by groups; "
        f"{_plural(len(shown.topics), 'topic')}, {_plural(shown.partition_count, 'partition')}, "
        f"{_plural(len(shown.groups), 'group')}",
    ]
    row_limits = _row_limits([len(rows) for _, rows in sections], None if height is None else height - len(lines))
    for (titles, rows), row_limit in zip(sections, row_limits, strict=True):
        if row_limit:
            lines += ["", *table(titles, rows[:row_limit])]
            if row_limit < len(rows):
                lines.append(f"... and {len(rows) - row_limit} more")
    printed = [printable(line) for line in lines]
    return [line[:width] for line in printed][:height]


def _row_limits(counts: Sequence[int], height: int | None) -> list[int]:
    """How many rows each section shows. Each section needs two extra lines, and a third if it omits
    rows. Rows are distributed round-robin, so that a small section is complete.
    """
    if height is None:
        return list(counts)
    row_limits = [min(count, ROWS_MIN) for count in counts]

    def lines_needed() -> int:
        return sum(
            2 + row_limit + (row_limit < count)
            for row_limit, count in zip(row_limits, counts, strict=True)
            if row_limit
        )

    for index in reversed(range(len(row_limits))):  # a short terminal shows the first sections
        if lines_needed() > height:
            row_limits[index] = 0
    has_grown = True
    while has_grown:
        has_grown = False
        for index, count in enumerate(counts):
            if row_limits[index] and row_limits[index] < count:
                row_limits[index] += 1
                if lines_needed() > height:
                    row_limits[index] -= 1
                else:
                    has_grown = True
    return row_limits
