"""A view over three hosts, each killed and restarted in turn, while transactions commit and abort:
a follower of the view reads the committed records of its base that the filter selects, each once
and in order (V1).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.cluster import Cluster
from tests.crash.workload import wait_until
from tests.interaction.cluster_clients import all_in_sync, create

pytestmark = pytest.mark.slow

BASE, VIEW, PARTITIONS, SECONDS = "orders", "orders-a", 3, 90.0
CODECS = ("none", "lz4", "zstd")
HOSTS = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
}
Read = dict[int, list[tuple[int, bytes]]]  # by partition


class Sender(threading.Thread):
    """Transactions of 40 records. Every fourth record is selected; every third transaction is aborted."""

    def __init__(self, bootstrap: str, codec: str) -> None:
        super().__init__()
        self.done_count = 0
        self.stopping = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"sender-{codec}",
                "compression.type": codec,
                "linger.ms": 5,
                "transaction.timeout.ms": 60000,
            }
        )

    def run(self) -> None:
        self._producer.init_transactions(SECONDS)
        while not self.stopping.is_set():
            self._producer.begin_transaction()
            try:
                for number in range(40):
                    tag = "a" if number % 4 == 0 else "b"
                    self._producer.produce(BASE, tag, partition=number % PARTITIONS, headers={"tag": tag})
                if self.done_count % 3 == 2:
                    self._producer.abort_transaction(SECONDS)
                else:
                    self._producer.commit_transaction(SECONDS)
            except KafkaException as error:
                assert error.args[0].txn_requires_abort() or error.args[0].retriable(), error
                self._producer.abort_transaction(SECONDS)
            self.done_count += 1


def reader(bootstrap: str, topic: str) -> Consumer:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    return consumer


class Follower(threading.Thread):
    """Reads the view throughout the test."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self.found: Read = defaultdict(list)
        self.stopping = threading.Event()
        self._consumer = reader(bootstrap, VIEW)

    def run(self) -> None:
        while not self.stopping.is_set():
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.found[message.partition()].append((message.offset(), message.value()))
        self._consumer.close()


def read(bootstrap: str, topic: str) -> list[Message]:
    """Reads up to the end of all partitions."""
    consumer, found, ended = reader(bootstrap, topic), [], set[int]()
    until = time.monotonic() + SECONDS
    while len(ended) < PARTITIONS:
        assert time.monotonic() < until
        message = consumer.poll(1.0)
        if message is not None and message.error():
            ended |= {message.partition()} if message.error().code() == KafkaError._PARTITION_EOF else set()
        elif message is not None:
            found.append(message)
    consumer.close()
    return found


def by_partition(messages: list[Message]) -> Read:
    found: Read = defaultdict(list)
    for message in messages:
        found[message.partition()].append((message.offset(), message.value()))
    return found


@pytest.mark.timeout(900)
def test_a_view_equals_its_filter_while_hosts_are_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=2, config=HOSTS) as cluster:
        create(cluster, BASE, PARTITIONS)
        create(cluster, VIEW, -1, config={"view.of": BASE, "view.filter": "tag = 'a'"})
        senders = [Sender(cluster.bootstrap, codec) for codec in CODECS]
        follower = Follower(cluster.bootstrap)
        for thread in (*senders, follower):
            thread.start()

        def progress(count: int) -> None:
            before = [sender.done_count for sender in senders]
            wait_until(
                lambda: all(sender.done_count >= then + count for sender, then in zip(senders, before, strict=True)),
                SECONDS,
                cluster.logs,
            )

        for node in sorted(cluster.brokers):
            progress(20)
            cluster.brokers[node].kill_all()
            progress(20)
            cluster.brokers[node].start()
            wait_until(lambda: all_in_sync(cluster, BASE), SECONDS, cluster.logs)
        progress(20)
        for sender in senders:
            sender.stopping.set()
            sender.join(SECONDS)
            assert not sender.is_alive()
        base = read(cluster.bootstrap, BASE)
        wanted = by_partition([message for message in base if ("tag", b"a") in message.headers()])
        assert by_partition(read(cluster.bootstrap, VIEW)) == wanted
        wait_until(lambda: follower.found == wanted, SECONDS, lambda: f"{follower.found}"[:500])
        follower.stopping.set()
        follower.join(SECONDS)
        print(f"{len(base)} committed records, {sum(map(len, wanted.values()))} of them selected")
