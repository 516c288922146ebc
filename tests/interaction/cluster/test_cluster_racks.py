"""A consumer that names its rack fetches from the replica there (KIP-392), with librdkafka; when
that host is lost it fetches from the leader, and misses no record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.cluster import Cluster
from tests.interaction.cluster_clients import (
    PATIENCE_S,
    all_in_sync,
    create,
    partitions,
    produce,
    until,
    wait_for_in_sync,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, config={"broker.session.timeout.ms": "5000", "broker.heartbeat.interval.ms": "500"})
    for broker in made:
        broker.config["broker.rack"] = f"rack-{broker.node_id}"
    with made as started:
        yield started


class Reader:
    """Reads partition 0 from the beginning; `served_by` is the host that librdkafka fetches from,
    according to its statistics.
    """

    def __init__(self, cluster: Cluster, topic: str, rack: str) -> None:
        self.served_by = -1
        self.values: list[bytes] = []
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": rack,
                "client.rack": rack,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "statistics.interval.ms": 100,
                "stats_cb": self._report,
                "reconnect.backoff.max.ms": 500,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])

    def _report(self, statistics: str) -> None:
        found = json.loads(statistics)["topics"].get(self._topic)
        if found:
            self.served_by = found["partitions"]["0"]["broker"]

    def turn(self) -> int:
        """Polls once, and returns the broker that librdkafka fetches from."""
        self.values += [message.value() for message in self._consumer.consume(100, 0.2) if not message.error()]
        return self.served_by

    def read_to(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.values) < count and time.monotonic() < deadline:
            self.turn()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._consumer.close()


def leader(cluster: Cluster, topic: str) -> int:
    return partitions(cluster, topic)[0].leader


def test_a_consumer_is_served_in_its_rack_and_by_the_leader_when_that_host_is_lost(cluster: Cluster) -> None:
    create(cluster, "near", partitions=1)
    led_by = wait_for_in_sync(cluster, "near")[0].leader
    near = next(node for node in cluster.brokers if node != led_by)
    values = [b"%d" % number for number in range(300)]
    produce(cluster, "near", values[:100])
    with Reader(cluster, "near", f"rack-{near}") as reader:
        reader.read_to(100)
        until("it is served in its rack", lambda: reader.turn() == near, cluster)
        produce(cluster, "near", values[100:200])
        reader.read_to(200)
        until("it still is", lambda: reader.turn() == near, cluster)
        cluster.brokers[near].kill_all()
        produce(cluster, "near", values[200:])
        reader.read_to(300)
        assert reader.values == values
        until("it is served by the leader", lambda: reader.turn() == leader(cluster, "near"), cluster)


@pytest.mark.slow
def test_a_rack_without_a_replica_is_served_by_the_leader(cluster: Cluster) -> None:
    create(cluster, "far", partitions=1)
    until("all are in sync", lambda: all_in_sync(cluster, "far"), cluster)
    values = [b"%d" % number for number in range(100)]
    produce(cluster, "far", values)
    with Reader(cluster, "far", "nowhere") as reader:
        reader.read_to(100)
        assert reader.values == values
        until("it is served by the leader", lambda: reader.turn() == leader(cluster, "far"), cluster)
