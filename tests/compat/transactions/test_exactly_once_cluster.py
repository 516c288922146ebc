"""The exactly-once job on three brokers, each killed (kill -9 of all its processes) and restarted
in turn while the others serve: the output is the input, every record once, in order.

The job is `tests/crash/copy_job.py` (three members that share a group), and each client's own copy
(`transacting.py` by `copy_client.py`, and the Java program), one process that is restarted when its
client gives up. The message of a failure has the history of the run.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from tests.cluster import Cluster
from tests.compat.java_client import build_java_client, java_command
from tests.compat.transactions.transacting import TRANSACTING
from tests.crash.checker import FinalLog, History, check, summary
from tests.crash.copying import QUICK_GROUPS, Member, copy_job, difference
from tests.crash.workload import IDEMPOTENT, LoadConsumer, LoadProducer, wait_until
from tests.interaction.cluster_clients import all_in_sync, create, partitions
from tests.interaction.transactional import producers
from tests.kafka_connection import KafkaConnection

PARTITIONS = 3
MEMBERS = 3
PATIENCE_S = 90.0  # for one step; less than any test's limit, so that the message names the step
RECORDS_PER_SECOND = 200
QUICK_HOSTS = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
    "num.partitions": "3",
}
INTERNAL = ("__consumer_offsets", "__transaction_state")


def read(cluster: Cluster, topic: str) -> dict[int, FinalLog]:
    """Everything that is committed, by partition, up to the last stable offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    logs = {index: FinalLog(0, -1, []) for index in range(PARTITIONS)}
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in logs])
    try:

        def ended() -> bool:
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    logs[message.partition()].records.append((message.offset(), message.value()))
                elif error.code() == KafkaError._PARTITION_EOF:
                    logs[message.partition()].log_end_offset = message.offset()
            return all(one.log_end_offset >= 0 for one in logs.values())

        wait_until(
            ended,
            PATIENCE_S,
            lambda: (
                f"the ends of {topic}:"
                f" { {index: (one.log_end_offset, len(one.records)) for index, one in logs.items()} }"
            ),
        )
    finally:
        consumer.close()
    return logs


def stable(cluster: Cluster, topic: str) -> dict[int, int]:
    """The last stable offset of each partition, except those whose leader is unavailable."""
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "reader", "isolation.level": "read_committed"}
    )
    found = {}
    try:
        for index in range(PARTITIONS):
            with contextlib.suppress(KafkaException):
                found[index] = consumer.get_watermark_offsets(TopicPartition(topic, index), 2.0)[1]
    finally:
        consumer.close()
    return found


class Job:
    """`story` records the actions, shown on failure."""

    def __init__(self, cluster: Cluster, directory: Path, seed: str, members: list[Member]) -> None:
        self.cluster, self.members = cluster, members
        self.chance = random.Random(seed)
        self.began = time.monotonic()
        self.history = [f"seed {seed}"]
        for topic in ("source", "target"):
            create(cluster, topic, PARTITIONS)
        self.loads = [
            LoadProducer(
                f"load-{number}",
                cluster.bootstrap,
                {"source": PARTITIONS},
                self.chance.randrange(1 << 30),
                RECORDS_PER_SECOND,
                IDEMPOTENT,
            )
            for number in range(2)
        ]

        self.reader = LoadConsumer("reader", cluster.bootstrap, {"source": PARTITIONS})

    def __enter__(self) -> Job:
        for client in (*self.loads, self.reader):
            client.start()
        self.tend()
        return self

    def did(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self.began:.1f} s: {what}")

    def __exit__(self, *_exc: object) -> None:
        for load in self.loads:
            load.end()
        for member in self.members:
            member.end(signal.SIGTERM)
        for load in self.loads:
            load.join(70)
        self.reader.end()
        self.reader.join(70)

    def tend(self) -> None:
        for member in self.members:
            member.tend()

    def report(self) -> str:
        return "\n".join(
            [
                "; ".join(self.history),
                f"committed in the target: {stable(self.cluster, 'target')}",
                *(member.tail() for member in self.members),
                self.cluster.logs(),
            ]
        )

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        def tended() -> bool:
            self.tend()
            return condition()

        wait_until(tended, PATIENCE_S, lambda: f"{what}: {self.report()}")

    def wait_until_it_copies(self) -> None:
        """New transactions end in every partition: the group, the coordinators and the markers all
        work.
        """
        before = stable(self.cluster, "target")
        self.wait(
            f"it copies beyond {before}",
            lambda: all(
                stable(self.cluster, "target").get(index, -1) > before.get(index, 0) for index in range(PARTITIONS)
            ),
        )

    def wait_until_in_sync(self) -> None:
        self.wait(
            "all replicas are in sync",
            lambda: all(all_in_sync(self.cluster, topic) for topic in ("source", "target", *INTERNAL)),
        )

    def kill_in_turn(self) -> None:
        for node_id in self.chance.sample(sorted(self.cluster.brokers), len(self.cluster.brokers)):
            victim = self.cluster.brokers[node_id]
            self.wait_until_in_sync()
            self.did(f"kill {node_id}")
            victim.kill_all()
            if self.chance.random() < 0.7:  # otherwise it returns before it is missed
                self.wait_until_it_copies()
                self.did("it copies")
            victim.start()
            self.did(f"{node_id} is back")
        self.wait_until_in_sync()
        self.wait_until_it_copies()
        self.did("it copies with all of them")

    def finish(self) -> None:
        for load in self.loads:
            load.end()
        for load in self.loads:
            load.join(70)
            assert not load.errors and not load.failed and not load.is_alive(), (
                f"{load.errors} {load.failed[:3]} {self.report()}"
            )
        source = read(self.cluster, "source")
        self.reader.until = {("source", index): log.log_end_offset for index, log in source.items()}
        self.reader.join(PATIENCE_S)
        assert not self.reader.is_alive() and not self.reader.errors, (
            f"{self.reader.errors}, it reads {self.reader.positions} of {self.reader.until}: {self.report()}"
        )
        history = History(
            [ack for load in self.loads for ack in load.acknowledged],
            self.reader.seen,
            {load.name: load.sent for load in self.loads},
            {load.name for load in self.loads},
        )
        violations = check(history, {("source", index): log for index, log in source.items()})
        assert not violations, f"{summary(violations)}\n{self.report()}"
        requested = sum(len(one.records) for one in source.values())
        self.wait(
            f"all {requested} are copied",
            lambda: sum(len(one.records) for one in read(self.cluster, "target").values()) >= requested,
        )
        for member in self.members:
            member.end(signal.SIGTERM)
        for index, log in read(self.cluster, "target").items():
            found, expected = [value for _, value in log.records], [value for _, value in source[index].records]
            assert found == expected, f"partition {index}: {difference(expected, found)}\n{self.report()}"
        self.wait("no transaction stays open", lambda: not self.open_transactions())
        self.did(f"{requested} records copied")
        print("; ".join(self.history))

    def open_transactions(self) -> list[object]:
        found: list[object] = []
        for index, one in partitions(self.cluster, "target").items():
            leader = self.cluster.brokers[one.leader]
            with KafkaConnection(leader.address, leader.port) as kafka:
                found += [
                    producer for producer in producers(kafka, "target", index) if producer.current_txn_start_offset >= 0
                ]
        return found


def run(cluster: Cluster, directory: Path, seed: str, members: list[Member], rounds: int) -> None:
    with Job(cluster, directory, seed, members) as job:
        job.wait_until_it_copies()
        for _ in range(rounds):
            job.kill_in_turn()
        job.finish()


def sharing(cluster: Cluster, directory: Path, seed: str, protocol: str) -> list[Member]:
    consumer = (
        {"group.protocol": "consumer"}
        if protocol == "consumer"
        else {"session.timeout.ms": 2_000, "heartbeat.interval.ms": 200}
    )
    settings = {
        "group": "copy",
        "source": "source",
        "target": "target",
        "seed": seed,
        "consumer": consumer,
        "transport": "tcp",
    }
    return [Member(cluster.bootstrap, directory, number, settings, copy_job) for number in range(MEMBERS)]


@pytest.fixture
def cluster(tmp_path: Path):
    with Cluster(tmp_path, config={**QUICK_HOSTS, **QUICK_GROUPS}) as started:
        yield started


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_job_copies_every_record_once_while_each_host_is_killed_in_turn(cluster: Cluster, tmp_path: Path) -> None:
    run(cluster, tmp_path, "1", sharing(cluster, tmp_path, "1", "classic"), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_a_job_copies_every_record_once_while_hosts_are_killed_round_after_round(
    cluster: Cluster, tmp_path: Path, number: int
) -> None:
    run(cluster, tmp_path, f"{number}", sharing(cluster, tmp_path, f"{number}", ("classic", "consumer")[number % 2]), 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", TRANSACTING)
def test_each_clients_own_copy_while_hosts_are_killed_in_turn(cluster: Cluster, tmp_path: Path, client: str) -> None:
    settings = {"client": client, "group": "copy", "source": "source", "target": "target", "seed": client}
    command = lambda settings: [sys.executable, "-m", "tests.compat.transactions.copy_client", json.dumps(settings)]  # noqa: E731
    run(cluster, tmp_path, client, [Member(cluster.bootstrap, tmp_path, 0, settings, command)], 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_java_clients_copy_while_hosts_are_killed_in_turn(cluster: Cluster, tmp_path: Path, protocol: str) -> None:
    home = build_java_client()
    settings = {"protocol": protocol, "group": "copy", "source": "source", "target": "target", "seed": protocol}
    command = lambda settings: java_command(
        home, settings["bootstrap"], "copy", settings["name"], "copy", "source", "target", protocol
    )  # noqa: E731
    run(cluster, tmp_path, protocol, [Member(cluster.bootstrap, tmp_path, 0, settings, command)], 2)
