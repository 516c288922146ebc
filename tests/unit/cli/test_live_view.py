"""`mqd top`: rates from two samples, rendered as lines."""

from __future__ import annotations

import os
import time

import pytest

from mqd.cli.inspection.live_view import GroupOffsets, Replicas, Sample, duration, printable, rates, render, view
from mqd.cli.verbs.top import cpu_seconds

T0, T1, U0 = ("t", 0), ("t", 1), ("u", 0)


def sample(at_s: float, ends: dict[tuple[str, int], int], **changed: object) -> Sample:
    partitions = {T0: Replicas(1), T1: Replicas(2), U0: Replicas(1)}
    return Sample(at_s, {1: "h:1", 2: "h:2"}, partitions, ends, {}, {})._replace(**changed)  # type: ignore[arg-type]


def test_a_topic_created_again_has_no_rate() -> None:
    assert rates({T0: 100, T1: 50}, {T0: 10, T1: 60, U0: 5}, 2.0) == {T1: 5.0}


def test_rates_by_topic_and_host() -> None:
    shown = view(sample(10.0, {T0: 0, T1: 0, U0: 7}), sample(12.0, {T0: 100, T1: 50, U0: 7}))
    assert [(one.name, one.partitions, one.records_in_s) for one in shown.topics] == [("t", 2, 75.0), ("u", 1, 0.0)]
    assert [(one.node, one.leads, one.records_in_s) for one in shown.hosts] == [(1, 2, 50.0), (2, 1, 25.0)]
    assert (shown.records_in_s, shown.partition_count, shown.slow) == (75.0, 3, [])


def test_groups() -> None:
    before = {"g": GroupOffsets("Stable", {T0: 0, U0: 7}, {}), "new": GroupOffsets("Stable", {}, {})}
    after = {
        "g": GroupOffsets("Stable", {T0: 180, U0: 7}, {T0: 3.5, U0: 0.0}),
        "h": GroupOffsets("Empty", {T1: 0}, {}),
        "new": GroupOffsets("Stable", {T1: 300}, {}),
    }
    shown = view(
        sample(0.0, {T0: 200, T1: 300, U0: 7}, groups=before), sample(2.0, {T0: 300, T1: 300, U0: 7}, groups=after)
    )
    assert [(one.name, one.lag, one.behind_s, one.records_read_s) for one in shown.groups] == [
        ("h", 300, None, None),
        ("g", 120, 3.5, 90.0),
        ("new", 0, 0.0, None),
    ]
    group = shown.groups[1]
    assert (
        shown.group_records_in_s["g"] == 50.0
        and group.catch_up_time_s(50.0) == 3.0
        and group.catch_up_time_s(90.0) is None
    )
    assert [one.records_read_s for one in shown.topics] == [90.0, 0.0]


def test_slow_partitions_are_listed_worst_first() -> None:
    partitions = {T0: Replicas(1, (2, 3)), T1: Replicas(-1), U0: Replicas(1)}
    shown = view(
        sample(
            0.0,
            {T0: 0, U0: 0},
            groups={"g": GroupOffsets("Stable", {U0: 0}, {}), "s": GroupOffsets("Stable", {T0: 0}, {})},
        ),
        sample(
            1.0,
            {T0: 10, U0: 100},
            partitions=partitions,
            groups={"g": GroupOffsets("Stable", {U0: 40}, {}), "s": GroupOffsets("Stable", {T0: 0}, {})},
        ),
    )
    assert [(one.partition, one.leader, one.lag, one.why) for one in shown.slow] == [
        ("t-1", -1, 0, "no leader: neither read nor written"),
        ("t-0", 1, 0, "not in sync: replicas of broker 2, 3"),
        ("u-0", 1, 60, "g falls behind by 60 records/s"),
        ("t-0", 1, 10, "s commits nothing"),
    ]


def test_cpu_of_a_process_that_was_restarted_is_not_shown() -> None:
    before = {"mqd-worker-0": 10.0, "mqd-acceptor": 4.0}
    shown = view(
        sample(0.0, {}, cpu_s=before), sample(2.0, {}, cpu_s={"mqd-worker-0": 11.0, "mqd-acceptor": 0.5, "new": 1.0})
    )
    assert shown.processes == [("mqd-worker-0", 0.5)]


def test_two_samples_of_the_same_time_are_refused() -> None:
    with pytest.raises(ValueError):
        view(sample(1.0, {}), sample(1.0, {}))


def test_lines() -> None:
    groups = {"\x1b[2J": GroupOffsets("Stable", {T0: 100}, {T0: 1.5})}
    shown = view(
        sample(0.0, {T0: 100, T1: 0, U0: 0}, groups=groups), sample(1.0, {T0: 1100, T1: 0, U0: 0}, groups=groups)
    )
    assert render(shown, "heading") == [
        "heading",
        "1,000 records/s in, 0 committed by groups; 2 topics, 3 partitions, 1 group",
        "",
        "HOST  ADDRESS  LEADS  RECORDS IN/S",
        "   1  h:1          2          1000",
        "   2  h:2          1             0",
        "",
        "SLOW PARTITION  LEADER   LAG  WHY",
        "t-0                  1  1000  �[2J commits nothing",
        "",
        "GROUP  STATE    LAG  BEHIND  COMMITTED/S  CAUGHT UP IN",
        "�[2J   Stable  1000  2 s               0  -",
        "",
        "TOPIC  PARTITIONS  RECORDS IN/S  COMMITTED/S",
        "t               2          1000            0",
        "u               1             0            -",
    ]


@pytest.mark.parametrize("height", range(1, 60))
def test_lines_fit_the_terminal(height: int) -> None:
    topics = {(f"topic-{number}", 0): 5 for number in range(100)}
    partitions = {partition: Replicas(1, (2,)) for partition in topics}
    groups = {f"g{number}": GroupOffsets("Empty", {("topic-1", 0): 0}, {}) for number in range(9)}
    seen = sample(0.0, topics, partitions=partitions, groups=groups)
    lines = render(view(seen, seen._replace(at_s=1.0)), "heading", height, 40)
    assert len(lines) <= height and max(map(len, lines)) <= 40
    if height >= 40:
        assert {"GROUP", "TOPIC", "HOST", "SLOW"} <= {line.split()[0] for line in lines if line}
        assert len(lines) >= height - 1 and sum(line.startswith("... and") for line in lines) == 2


def test_words() -> None:
    assert [duration(one) for one in (None, 0.0, 0.25, 90, 600, 9000)] == [
        "-",
        "0 s",
        "250 ms",
        "90 s",
        "10 min",
        "2.5 h",
    ]
    assert printable("a\tb\x9b") == "a�b�"


def test_cpu_of_this_process() -> None:
    before = cpu_seconds(os.getpid())
    assert before is not None and before <= time.process_time() + 0.02
    assert cpu_seconds(2**22 + 1) is None
