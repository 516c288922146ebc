"""Apache Kafka's kafka-configs and kafka-topics: levels of the broker's loggers, and partitions
with fewer in-sync replicas than min.insync.replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.cluster import Cluster
from tests.compat.kafka_tools import KafkaTools
from tests.interaction.cluster_clients import PATIENCE_S, partitions, until

pytestmark = pytest.mark.slow

LOGGER = "mqd.acceptor.requests"


def in_sync(cluster: Cluster, name: str) -> set[int]:
    found = partitions(cluster, name).get(0)
    return set(found.isrs) if found else set()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker") as started:
        yield started


def test_levels_of_loggers(kafka_tools: KafkaTools, broker: Broker) -> None:
    def configs(*words: str) -> str:
        common = ("--bootstrap-server", broker.bootstrap, "--entity-type", "broker-loggers", "--entity-name", "1")
        done = kafka_tools.run("kafka.admin.ConfigCommand", *common, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"  {LOGGER}=INFO" in configs("--describe") and "  root=INFO" in configs("--describe")
    configs("--alter", "--add-config", f"{LOGGER}=DEBUG,root=WARN")
    assert f"  {LOGGER}=DEBUG" in configs("--describe")
    assert broker.status()["log_level"] == "warning", "of every process"
    configs("--alter", "--delete-config", LOGGER)
    assert f"  {LOGGER}=WARN" in configs("--describe")


def test_partitions_under_min_in_sync_are_found(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    """min.insync.replicas is not set: the effective number is used."""

    def under() -> str:
        done = kafka_tools.run(
            "org.apache.kafka.tools.TopicCommand",
            *("--bootstrap-server", cluster.bootstrap, "--describe", "--under-min-isr-partitions"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    quick = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "300"}
    with Cluster(tmp_path / "cluster", count=5, config=quick) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        for name, replicas in (("three", [1, 4, 5]), ("two", [1, 5])):
            topic = NewTopic(name, replica_assignment=[replicas], num_partitions=1)
            admin.create_topics([topic])[name].result(PATIENCE_S)
            until("all are in sync", lambda: in_sync(cluster, name) == set(replicas), cluster)
        assert under() == ""
        cluster.brokers[5].kill_all()
        until("one is out", lambda: in_sync(cluster, "two") == {1} and in_sync(cluster, "three") == {1, 4}, cluster)
        assert under() == "", "two of three are enough, and one of two"
        cluster.brokers[4].kill_all()
        until("two are out", lambda: in_sync(cluster, "three") == {1}, cluster)
        assert "Topic: three" in under() and "Topic: two" not in under()
