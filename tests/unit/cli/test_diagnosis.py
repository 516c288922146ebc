"""The findings of `mqd doctor` in words."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.cli.inspection.diagnosis import (
    Finding,
    Harm,
    cluster_findings,
    consumer_findings,
    flush_findings,
    group_findings,
    host_findings,
    metric_findings,
    process_findings,
)
from mqd.cli.inspection.metrics_page import Sample
from mqd.cli.offline_replicas import OfflineReplica
from mqd.cli.verbs.doctor import _last_errors
from mqd.cli.voters import VoterStatus

NOW_MS = 1_000_000_000_000


def report(found: list[Finding]) -> list[tuple[Harm, str]]:
    assert all(one.cure for one in found)
    return [(one.harm, one.what) for one in found]


def process(name: str, state: str = "running", restarts: int = 0) -> dict[str, Any]:
    return {"name": name, "state": state, "restart_count": restarts}


def cluster(fenced: list[int], status: VoterStatus) -> Any:
    brokers = [SimpleNamespace(broker_id=n, host="h", port=9092, is_fenced=n in fenced) for n in (1, 2, 3)]
    return SimpleNamespace(brokers=brokers, voter_status=status, quorum=SimpleNamespace(leader_id=1))


def partitions(leaderless: list[tuple[str, int, list[int]]], behind: dict[int, list[str]]) -> Any:
    return SimpleNamespace(leaderless=leaderless, behind=behind)


def test_processes() -> None:
    assert report(process_findings({"data_dir": "/d", "processes": [process("mqd-worker-0")]})) == []
    assert report(process_findings({"data_dir": "/d", "processes": [], "reason": "no keeper"})) == [
        (Harm.OUTAGE, "no broker is running in /d: no keeper")
    ]
    dying = {"data_dir": "/d", "processes": [process("mqd-worker-0", "dead"), process("mqd-worker-1", restarts=4)]}
    assert report(process_findings(dying)) == [
        (Harm.OUTAGE, "mqd-worker-0 is dead"),
        (Harm.NO_RESERVE, "mqd-worker-1 has died 4 times since the broker started"),
    ]


def test_a_healthy_cluster() -> None:
    assert cluster_findings(cluster([], VoterStatus(NOW_MS, [], [], 1)), partitions([], {}), [], NOW_MS + 1_500) == []


def test_an_unhealthy_cluster() -> None:
    seen = cluster([3], VoterStatus(NOW_MS, [3], [], 0))
    lacking = partitions([("t", 0, [3]), ("t", 1, [2])], {2: ["u-0"], 3: ["u-1"]})
    place = OfflineReplica("t-1", 2, ("/disk",))
    assert report(cluster_findings(seen, lacking, [place], NOW_MS - 3_600_000)) == [
        (Harm.OUTAGE, "t-1 is not served by node 2, which is in service: log directory /disk"),
        (Harm.OUTAGE, "without a leader, neither read nor written: 1 partition (t-0)"),
        (Harm.NO_RESERVE, "broker 3 (h:9092) is fenced: its heartbeats do not reach the controllers"),
        (Harm.NO_RESERVE, "voters 3 of the metadata quorum are silent or behind; the quorum can lose no more"),
        (
            Harm.NO_RESERVE,
            "broker 2 is not in sync in 1 partition (u-0), though it is in service: it is too slow, or is catching up",
        ),
        (Harm.NO_RESERVE, "broker 3 is not in sync in 1 partition (u-1): it is not in service"),
        (
            Harm.NUISANCE,
            "this host's clock is 3600 s behind the active controller's (broker 1): times of records and retention are"
            " wrong on one of them",
        ),
    ]


def test_a_delayed_rebalance() -> None:
    holder = SimpleNamespace(client_id="slow-app", member_id="m", host="10.0.0.7")
    held = SimpleNamespace(group="g", rebalance=SimpleNamespace(elapsed_ms=40_000, held_up_by=[holder]))
    quick = SimpleNamespace(group="q", rebalance=SimpleNamespace(elapsed_ms=400, held_up_by=[holder]))
    calm = SimpleNamespace(group="c", rebalance=None)
    (found,) = group_findings([held, quick, calm])  # type: ignore[list-item]
    assert (found.harm, found.what) == (
        Harm.NUISANCE,
        "group g has been rebalancing for 40 s and waits for slow-app at 10.0.0.7",
    )
    assert "mqd group describe g" in found.cure


PARTITION = {"topic": "t", "partition": "0"}
DISK = {"directory": "/d"}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([Sample("mqd_corrupt_segments", PARTITION, 0)], []),
        ([Sample("mqd_corrupt_segments", PARTITION, 2)], [(Harm.LOSS, "2 stored segments of t-0 are corrupt")]),
        ([Sample("mqd_partition_online", PARTITION, 1)], []),
        ([Sample("mqd_partition_online", PARTITION, 0)], [(Harm.OUTAGE, "t-0 is not served on this host")]),
        (
            [Sample("mqd_sync_failures_total", {"worker": "1"}, 3)],
            [(Harm.LOSS, "3 flushes of worker 1 failed since it started")],
        ),
        ([Sample("mqd_sync_oldest_seconds", {"worker": "1"}, 9)], []),
        (
            [Sample("mqd_sync_oldest_seconds", {"worker": "1"}, 30)],
            [(Harm.OUTAGE, "a flush of worker 1 has lasted 30 s: its disk does not respond")],
        ),
        ([Sample("mqd_log_dir_free_bytes", DISK, 11), Sample("mqd_log_dir_total_bytes", DISK, 100)], []),
        (
            [Sample("mqd_log_dir_free_bytes", DISK, 9), Sample("mqd_log_dir_total_bytes", DISK, 100)],
            [(Harm.NO_RESERVE, "/d has 9% of its space left")],
        ),
        (
            [Sample("mqd_log_dir_free_bytes", DISK, 1), Sample("mqd_log_dir_total_bytes", DISK, 100)],
            [(Harm.OUTAGE, "/d has 1% of its space left")],
        ),
        ([Sample("mqd_certificate_expiry_timestamp_seconds", {"listener": "SSL"}, 20 * 86400)], []),
        (
            [Sample("mqd_certificate_expiry_timestamp_seconds", {"listener": "SSL"}, 5 * 86400)],
            [(Harm.NO_RESERVE, "the certificate of SSL expires in 5 days")],
        ),
        (
            [Sample("mqd_certificate_expiry_timestamp_seconds", {"listener": "SSL"}, -60)],
            [(Harm.OUTAGE, "the certificate of SSL has expired")],
        ),
        ([Sample("mqd_compaction_uncleanable", PARTITION, 1)], [(Harm.NUISANCE, "t-0 cannot be compacted, and grows")]),
        ([Sample("mqd_consumergroup_lag_seconds", {"consumergroup": "g", **PARTITION}, 500)], []),
        (
            [
                Sample("mqd_consumergroup_lag_seconds", {"consumergroup": "g", "topic": "t", "partition": "0"}, 1200),
                Sample("mqd_consumergroup_lag_seconds", {"consumergroup": "g", "topic": "t", "partition": "1"}, 3600),
            ],
            [(Harm.NUISANCE, "group g is 60 min behind in t")],
        ),
    ],
)
def test_metrics(samples: list[Sample], expected: list[tuple[Harm, str]]) -> None:
    assert report(metric_findings(samples, 0.0, "/d")) == expected


def test_the_host() -> None:
    assert host_findings({}) == []
    good = {"open_files": 100_000, "transparent_hugepages": "madvise", "swappiness": 1, "shm_free": 0.5}
    assert host_findings(good) == []
    bad = {"open_files": 1024, "transparent_hugepages": "always", "swappiness": 60, "shm_free": 0.05}
    assert [one.harm for one in host_findings(bad)] == [Harm.NO_RESERVE, Harm.NO_RESERVE, Harm.NUISANCE, Harm.NUISANCE]


def offsets(high: float, end: float, topic: str = "t") -> list[Sample]:
    labels = {"topic": topic, "partition": "0"}
    return [Sample("mqd_partition_log_end_offset", labels, end), Sample("mqd_partition_high_watermark", labels, high)]


@pytest.mark.parametrize(
    ("before", "after", "is_stuck"),
    [
        ((10, 10), (10, 12), False),  # written just now
        ((10, 12), (12, 14), False),  # slow
        ((10, 12), (10, 14), True),
    ],
)
def test_a_hung_disk(before: tuple[int, int], after: tuple[int, int], is_stuck: bool) -> None:
    found = flush_findings(offsets(*before), offsets(*after), frozenset({"t-0"}))
    assert [one.harm for one in found] == [Harm.OUTAGE] * is_stuck
    # with followers, it may be waiting for those
    assert flush_findings(offsets(*before), offsets(*after), frozenset()) == []


def consumer(offset: float, behind_s: float, members: float = 1) -> list[Sample]:
    labels = {"consumergroup": "g", "topic": "t", "partition": "3"}
    return [
        Sample("kafka_consumergroup_members", {"consumergroup": "g"}, members),
        Sample("kafka_consumergroup_current_offset", labels, offset),
        Sample("mqd_consumergroup_lag_seconds", labels, behind_s),
    ]


def test_a_record_that_blocks_a_group() -> None:
    (found,) = consumer_findings(consumer(7, 120), consumer(7, 126))
    assert "has not passed offset 7 of t-3, whose record has waited for 2 min" in found.what
    assert "mqd consume t --partition 3 --offset 7" in found.cure and "mqd group seek g t:3 --shift-by 1" in found.cure
    assert consumer_findings(consumer(7, 120), consumer(8, 120)) == []  # it makes progress
    assert consumer_findings(consumer(7, 30), consumer(7, 36)) == []  # it may be slow
    assert consumer_findings(consumer(7, 120, 0), consumer(7, 126, 0)) == []  # nothing runs: only behind


@pytest.mark.parametrize("newest", ["a.log", "m.log", "z.log"])
def test_the_errors_of_the_file_written_last_come_last(tmp_path: Path, newest: str) -> None:
    for name in ("z.log", "m.log", "a.log"):
        (tmp_path / name).write_text(f"12:00 ERROR first of {name}\n12:01 INFO x\n12:02 ERROR last of {name}\n")
        os.utime(tmp_path / name, (2000, 2000) if name == newest else (1000, 1000))
    found = [one.what for one in _last_errors(tmp_path)]
    assert found[-2:] == [
        f"the broker logged: {newest}: 12:0{minute} ERROR {what} of {newest}"
        for minute, what in ((0, "first"), (2, "last"))
    ]
