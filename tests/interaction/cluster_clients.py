"""Client and user actions for cluster tests: topics, records, log files on a broker's disk, the
command line.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster import Cluster, Member
from tests.polling import PATIENCE_S, eventually
from tests.preloaded import PRELOADED

T = TypeVar("T")


def until(what: str, holds: Callable[[], T], cluster: Cluster, seconds: float = PATIENCE_S) -> T:
    return eventually(holds, lambda: f"{what}\n{cluster.logs()}", seconds)


def create(
    cluster: Cluster, name: str, partitions: int = 3, replicas: int = 3, config: dict[str, str] | None = None
) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(name, partitions, replicas, config=config or {})])[name].result(PATIENCE_S)


def partitions(cluster: Cluster, name: str) -> dict:
    return (
        AdminClient({"bootstrap.servers": cluster.bootstrap})
        .list_topics(name, timeout=PATIENCE_S)
        .topics[name]
        .partitions
    )


def produce(cluster: Cluster, topic: str, values: list[bytes], partition: int = 0) -> None:
    """All acknowledged, or the test fails."""
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 1,
            "message.timeout.ms": 60_000,
        }
    )
    for value in values:
        producer.produce(
            topic,
            value,
            partition=partition,
            on_delivery=lambda error, _message: failed.append(error) if error else None,
        )
    assert producer.flush(60) == 0
    assert not failed


def read(cluster: Cluster, topic: str, count: int, partition: int = 0) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += [message.value() for message in consumer.consume(1000, 0.5) if not message.error()]
    consumer.close()
    return found


def log(broker: Member, topic: str, partition: int) -> bytes:
    """The partition's records as stored on the broker's disk."""
    directory = broker.data_dir / "log" / f"{topic}-{partition}"
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def all_in_sync(cluster: Cluster, topic: str) -> bool:
    return _are_in_sync(partitions(cluster, topic))


def _are_in_sync(found: dict) -> bool:
    """False at a broker that does not know the topic yet."""
    return bool(found) and all(sorted(one.isrs) == sorted(one.replicas) and one.leader >= 0 for one in found.values())


def wait_for_in_sync(cluster: Cluster, topic: str) -> dict:
    """Returns its partitions as reported by one broker: the next request may go to another one,
    which may not know a new topic yet.
    """
    found: dict = {}

    def settled() -> bool:
        nonlocal found
        found = partitions(cluster, topic)
        return _are_in_sync(found)

    until("all replicas are in sync", settled, cluster)
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `mqd ARGUMENTS` as a user types it."""
    return PRELOADED.run(*arguments, timeout=180)
