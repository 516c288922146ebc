"""Hosts join and leave under load: a fourth joins and takes its share, one is drained and
unregistered, a topic is moved, partitions are retired. With the commands of the documentation.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.cluster import Cluster
from tests.interaction.cluster_clients import PATIENCE_S, all_in_sync, create, partitions, produce, read, run, until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("moves"), config={"log.retention.check.interval.ms": "500"}) as started:
        yield started


class Load:
    """A producer with acks=all that keeps writing; every record is acknowledged in the end, or the
    test fails.
    """

    def __init__(self, cluster: Cluster, topic: str, partitions: int) -> None:
        self._topic, self._partitions = topic, partitions
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 60_000,
            }
        )
        self._end = threading.Event()
        self._failed: list[str] = []
        self.sent: dict[int, list[bytes]] = {index: [] for index in range(partitions)}
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._end.wait(0.002):
            index, value = number % self._partitions, str(number).encode()
            self._producer.produce(
                self._topic,
                value,
                partition=index,
                on_delivery=lambda error, _: self._failed.append(error.str()) if error else None,
            )
            self.sent[index].append(value)
            self._producer.poll(0)
            number += 1
        if self._producer.flush(60):
            self._failed.append("not flushed")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        self._thread.join()
        assert not self._failed, self._failed[:3]


def _mqd(cluster: Cluster, *arguments: str) -> str:
    done = run(*arguments, "-b", cluster.bootstrap)
    assert done.returncode == 0, f"{arguments}: {done.stderr}\n{cluster.logs()}"
    return done.stdout


@pytest.mark.slow
def test_a_fourth_broker_takes_its_share_and_another_leaves(cluster: Cluster) -> None:
    create(cluster, "load", partitions=6)
    with Load(cluster, "load", 6) as load:
        cluster.add(4)
        until(
            "the fourth is in service",
            lambda: 4 in json.loads(_mqd(cluster, "cluster", "status", "--format", "json"))["brokers"],
            cluster,
        )
        assert "4" in _mqd(cluster, "cluster", "balance", "--dry-run")
        _mqd(cluster, "cluster", "balance")
        until(
            "the fourth has its share of 18 replicas",
            lambda: sum(4 in one.replicas for one in partitions(cluster, "load").values()) >= 3,
            cluster,
        )
        _mqd(cluster, "cluster", "drain", "2")
        until(
            "all brokers know that 2 holds nothing",
            lambda: not any(2 in one.replicas for one in partitions(cluster, "load").values()),
            cluster,
        )
        cluster.brokers[2].stop()
        until(
            "a stopped broker can be forgotten",
            lambda: run("cluster", "forget", "2", "-b", cluster.bootstrap).returncode == 0,
            cluster,
        )
    until("all replicas are in sync", lambda: all_in_sync(cluster, "load"), cluster)
    for index, values in load.sent.items():
        assert read(cluster, "load", len(values), index) == values
    del cluster.brokers[2]
    assert "2" not in json.loads(_mqd(cluster, "cluster", "status", "--format", "json"))["brokers"]


def test_a_topic_is_moved_under_load(cluster: Cluster, tmp_path: Path) -> None:
    nodes = sorted(cluster.brokers)
    create(cluster, "moved", partitions=2, replicas=1)
    with Load(cluster, "moved", 2) as load:
        _mqd(cluster, "topic", "reassign", "moved", "--brokers", ",".join(map(str, nodes[:2])), "-r", "2")
        until(
            "all know",
            lambda: all(sorted(one.replicas) == nodes[:2] for one in partitions(cluster, "moved").values()),
            cluster,
        )
        plan = tmp_path / "plan.json"
        plan.write_text(_mqd(cluster, "topic", "reassign", "moved", "--brokers", str(nodes[2]), "-r", "1", "--dry-run"))
        verify = (
            "topic",
            "reassign",
            "moved",
            "--plan",
            str(plan),
            "--status",
            "--format",
            "json",
            "-b",
            cluster.bootstrap,
        )
        assert (before := run(*verify)).returncode == 1 and {one["state"] for one in json.loads(before.stdout)} == {
            "not_done"
        }
        _mqd(cluster, "topic", "reassign", "moved", "--plan", str(plan))
        until(
            "all know",
            lambda: all(one.replicas == [nodes[2]] for one in partitions(cluster, "moved").values()),
            cluster,
        )
        assert (after := run(*verify)).returncode == 0 and {one["state"] for one in json.loads(after.stdout)} == {
            "done"
        }
        assert "nothing moves" in _mqd(cluster, "topic", "reassign", "moved", "--status")
    for index, values in load.sent.items():
        assert read(cluster, "moved", len(values), index) == values


def test_retired_partitions_vanish_when_they_are_empty(cluster: Cluster) -> None:
    create(cluster, "retired", partitions=4)
    for index in range(4):
        produce(cluster, "retired", [f"{index}:{number}".encode() for number in range(100)], index)
    assert "new records go to the other partitions" in _mqd(
        cluster, "topic", "retire-partitions", "retired", "--to", "2"
    )
    produce(cluster, "retired", [f"2:{number}".encode() for number in range(100, 120)], 2)
    for index in range(4):
        assert read(cluster, "retired", 100, index)[:100] == [f"{index}:{number}".encode() for number in range(100)]
    assert read(cluster, "retired", 120, 0)[100:] == [f"2:{number}".encode() for number in range(100, 120)]
    _mqd(cluster, "topic", "retire-partitions", "retired", "--release")
    refused = run("topic", "retire-partitions", "retired", "--to", "1", "-b", cluster.bootstrap)
    assert refused.returncode == 1 and "are being retired" in refused.stderr
    _mqd(cluster, "topic", "alter", "retired", "-c", "retention.ms=1000", "-c", "segment.ms=1000")
    until(
        "the retired partitions are not shown any more",
        lambda: len(partitions(cluster, "retired")) == 2,
        cluster,
        2 * PATIENCE_S,
    )
