"""Deduplication over three hosts, each killed and restarted in turn, while two producers send the
same ids. Neither is idempotent: without deduplication each retried batch would be written again.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

import mqd
from tests.cluster import Cluster
from tests.compat.programs.program import kill_process
from tests.crash.workload import wait_until
from tests.interaction.cluster.test_cluster_local import at, metric
from tests.interaction.cluster.test_cluster_local import create as create_assigned
from tests.interaction.cluster_clients import all_in_sync, create

pytestmark = pytest.mark.slow

TOPIC, PARTITIONS, SECONDS = "deduplicated", 4, 90.0
BEHIND = 500  # how many records the second producer is behind the first
HOSTS = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
}
CONFIG = {"dedup.window.ms": "3600000", "message.timestamp.type": "LogAppendTime", "compression.type": "uncompressed"}


class Sender(threading.Thread):
    """Sends the ids 0, 1, ... until it is stopped; retries each until it is acknowledged."""

    def __init__(self, bootstrap: str, wait_for: Sender | None = None) -> None:
        super().__init__()
        self.sent = 0
        self.stopping = threading.Event()
        self._wait_for = wait_for
        self._again: collections.deque[int] = collections.deque()
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": False, "acks": "all", "linger.ms": 20}
        )

    def run(self) -> None:
        while not self.stopping.is_set() or self._again or len(self._producer):
            while self._again:
                self._send(self._again.popleft())
            may_go_on = self._wait_for is None or self.sent < self._wait_for.sent - BEHIND
            if may_go_on and not self.stopping.is_set():
                self._send(self.sent)
                self.sent += 1
            self._producer.poll(0.001)

    def finish(self, last: int) -> None:
        """Returns once this sender has sent all ids up to `last`."""
        self.stopping.set()
        self.join(SECONDS)
        assert not self.is_alive()
        for number in range(self.sent, last):
            self._send(number)
        while self._again or len(self._producer):
            self._producer.poll(0.1)
            while self._again:
                self._send(self._again.popleft())

    def _send(self, number: int) -> None:
        def acknowledged(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                self._again.append(number)

        headers = {"dedup-id": str(number)}
        self._producer.produce(
            TOPIC, str(number), headers=headers, partition=number % PARTITIONS, on_delivery=acknowledged
        )


def _read(bootstrap: str) -> collections.Counter[int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.partition.eof": True})
    consumer.assign([TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
    found: collections.Counter[int] = collections.Counter()
    ends, until = 0, time.monotonic() + SECONDS
    while ends < PARTITIONS:
        assert time.monotonic() < until
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            ends += message.error().code() == KafkaError._PARTITION_EOF
        else:
            found[int(message.value())] += 1
    consumer.close()
    return found


@pytest.mark.timeout(900)
def test_each_id_once_while_hosts_are_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=2, config=HOSTS) as cluster:
        create(cluster, TOPIC, PARTITIONS, config=CONFIG)
        first = Sender(cluster.bootstrap)
        second = Sender(cluster.bootstrap, wait_for=first)
        for sender in (first, second):
            sender.start()

        def progress(count: int) -> None:
            before = first.sent
            wait_until(lambda: first.sent >= before + count, SECONDS, lambda: f"{first.sent} sent\n{cluster.logs()}")

        for node in sorted(cluster.brokers) * 2:
            progress(1000)
            cluster.brokers[node].kill_all()
            progress(1000)
            cluster.brokers[node].start()
            wait_until(lambda: all_in_sync(cluster, TOPIC), SECONDS, cluster.logs)
        progress(1000)
        first.finish(first.sent)
        second.finish(first.sent)
        found = _read(cluster.bootstrap)
        assert not {number: count for number, count in found.items() if count != 1}
        assert set(found) == set(range(first.sent))
        print(f"{first.sent} ids, each sent twice or more, each written once")


def _produce(client: mqd.Producer, number: int, on_delivery: Callable[[object, object], None]) -> None:
    """While a worker is down, the shared memory for its records may be full."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            client.produce(
                TOPIC,
                str(number),
                headers={"dedup-id": str(number)},
                partition=number % PARTITIONS,
                on_delivery=on_delivery,
            )
            return
        except BufferError:
            assert time.monotonic() < deadline, "the queue stays full"
            client.poll(0.01)


def test_each_id_once_through_relays(tmp_path: Path) -> None:
    """Applications through shared memory on every host: one host leads, one has a replica, one has none. Leaders
    die while all of them send the same ids.
    """
    with Cluster(tmp_path, workers=1, config=HOSTS) as cluster:
        create_assigned(cluster, TOPIC, [[1, 2], [2, 3], [3, 1], [1, 3]], CONFIG)
        clients = [mqd.Producer(at(broker, transport="shm", linger_ms=2, acks="all")) for broker in cluster]
        failed: list[object] = []

        def acknowledged(error: object, _message: object) -> None:
            if error is not None:
                failed.append(error)

        count = 3000
        for number in range(count):
            for client in clients:
                _produce(client, number, acknowledged)
                client.poll(0)
            if number % 1000 == 500:
                kill_process(cluster.brokers[number // 1000 + 1], "mqd-worker-0")
        for client in clients:
            assert client.flush(SECONDS) == 0, cluster.logs()
        assert not failed, failed[:3]
        relayed = {node: metric(broker, "mqd_relayed_batches") for node, broker in cluster.brokers.items()}
        assert all(relayed.values()), relayed
        found = _read(cluster.bootstrap)
        assert found == collections.Counter(range(count))
        for client in clients:
            client.close()
        print(f"{count} ids, sent by each of {len(clients)} hosts, each written once; relayed: {relayed}")
