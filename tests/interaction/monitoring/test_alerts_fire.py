"""A real Prometheus scrapes three real brokers while faults are injected: alerts fire and resolve.

These are the faults that a process without root can cause in its own cluster. The other alerts
(disks, certificates, corrupt segments, slow hardware) are tested with promtool in test_rules.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from mqd import Consumer, Producer, TopicPartition
from mqd.admin import AdminClient, NewTopic
from mqd.monitoring.alerts import render_rules
from tests.cluster import Cluster
from tests.interaction.monitoring.prometheus import Prometheus
from tests.interaction.traffic import eventually

pytestmark = pytest.mark.slow

SHORT = "10s"  # replaces every range, and alerts have no `for`: the test ends within minutes
PATIENCE_S = 90
HOUR_MS = 3_600_000


def shortened(text: str) -> str:
    text = re.sub(r"\[[0-9]+[mh]\]", f"[{SHORT}]", text)
    return re.sub(r"^( +for: ).*$", r"\g<1>0s", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), config={"max.connections": "60"})
    for broker in cluster.brokers.values():
        broker.config["metrics.listener"] = f"http://{broker.address}:{broker.port + 5}"
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = [f"{broker.address}:{broker.port + 5}" for broker in cluster.brokers.values()]
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), targets, shortened(render_rules("docs/monitoring.md")))
    try:
        eventually(lambda: found.healthy_targets() == 3, "three scraped brokers")
        eventually(lambda: not found.firing(), "no alert while all is well")
        yield found
    finally:
        found.stop()


def create(cluster: Cluster, name: str, replicas: list[int], **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    topic = NewTopic(
        name,
        num_partitions=1,
        replica_assignment=[replicas],
        config={key.replace("_", "."): v for key, v in config.items()},
    )
    admin.create_topics([topic])[name].result(30)


def wait_for(prometheus: Prometheus, *names: str) -> None:
    eventually(lambda: set(names) <= prometheus.firing(), f"{names} to fire", PATIENCE_S)


def wait_for_end(prometheus: Prometheus) -> None:
    eventually(lambda: not prometheus.firing(), "every alert to end", PATIENCE_S)


def test_a_broker_stops_and_returns(cluster: Cluster, prometheus: Prometheus) -> None:
    create(cluster, "three", [1, 2, 3], min_insync_replicas="3")
    create(cluster, "one", [3])
    cluster.brokers[3].kill_all()
    wait_for(
        prometheus,
        "MqdBrokerDown",
        "MqdBrokerFenced",
        "MqdUnderReplicated",
        "MqdUnderMinInSync",
        "MqdPartitionsWithoutLeader",
    )
    cluster.brokers[3].start()
    wait_for_end(prometheus)


def test_no_majority_of_controllers(cluster: Cluster, prometheus: Prometheus) -> None:
    for node in (2, 3):
        cluster.brokers[node].kill_all()
    wait_for(prometheus, "MqdNoActiveController")
    for node in (2, 3):
        cluster.brokers[node].process = None
    cluster.start()
    wait_for_end(prometheus)


def test_a_worker_that_keeps_dying(cluster: Cluster, prometheus: Prometheus) -> None:
    broker = cluster.brokers[1]
    deadline = time.monotonic() + PATIENCE_S
    while not {"MqdProcessKeepsDying", "MqdWorkerDown"} <= prometheus.firing():
        assert time.monotonic() < deadline, prometheus.firing()
        pid = next((one["pid"] for one in broker.status()["processes"] if one["name"] == "mqd-worker-0"), 0)
        if pid:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # until the next poll
    wait_for_end(prometheus)


def test_a_consumer_that_makes_no_progress(cluster: Cluster, prometheus: Prometheus) -> None:
    create(cluster, "old", [1, 2, 3])
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for number in range(5):
        producer.produce("old", b"value", partition=0, timestamp=int(time.time() * 1000) - HOUR_MS + number)
    assert producer.flush(30) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "still",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["old"])
    eventually(lambda: consumer.poll(1), "a record")
    consumer.commit(offsets=[TopicPartition("old", 0, 1)], asynchronous=False)
    try:
        wait_for(prometheus, "MqdConsumerBehind", "MqdConsumerStuck")
        consumer.commit(offsets=[TopicPartition("old", 0, 5)], asynchronous=False)
        wait_for_end(prometheus)
    finally:
        consumer.close()


def test_more_connections_than_are_allowed(cluster: Cluster, prometheus: Prometheus) -> None:
    broker = cluster.brokers[2]
    held: list[socket.socket] = []
    deadline = time.monotonic() + PATIENCE_S
    try:
        while "MqdConnectionsRefused" not in prometheus.firing():
            assert time.monotonic() < deadline
            held.append(socket.create_connection((broker.address, broker.port), timeout=60))
    finally:
        for connection in held:
            connection.close()
    wait_for_end(prometheus)
