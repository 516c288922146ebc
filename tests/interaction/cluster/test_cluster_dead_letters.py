"""Dead letters of a share group while processes and hosts are killed: each rejected record has one
committed letter (L1). With each host, leaders of partitions (of the dead letters too), coordinators
of transactions and groups, and those of the share state are lost.
"""

from __future__ import annotations

import collections
import contextlib
import random
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.cluster import Cluster
from tests.compat.programs.program import Program, kill_process
from tests.crash.workload import wait_until
from tests.interaction import share_members
from tests.interaction.cluster.test_cluster_moves import Load
from tests.interaction.cluster_clients import all_in_sync, create
from tests.interaction.share_members import Output, begin_at_first_record, configure_group, lag

pytestmark = pytest.mark.slow

GROUP, TOPIC, LETTERS, PARTITIONS = "workers", "work", "dlq.work", 4
SECONDS = 90.0
KILLED = ("mqd-worker-0", "mqd-acceptor", "mqd-worker-1", "mqd-acceptor", "broker", "mqd-worker-0", "mqd-acceptor")
CONFIG = {
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "3000",
    "group.share.delivery.count.limit": "10",  # kills must not exhaust a record's deliveries
}
CLUSTER_CONFIG = CONFIG | {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
}


def configure(bootstrap: str, replicas: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    config = {"errors.deadletterqueue.group.enable": "true"}
    topic = NewTopic(LETTERS, PARTITIONS, replication_factor=replicas, config=config)
    admin.create_topics([topic])[LETTERS].result(SECONDS)
    begin_at_first_record(bootstrap, GROUP)
    configure_group(bootstrap, GROUP, "errors.deadletterqueue.topic.name", LETTERS)
    configure_group(bootstrap, GROUP, "errors.deadletterqueue.copy.record.enable", "true")


def letters(bootstrap: str) -> collections.Counter[int]:
    """How many committed letters contain each value."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([LETTERS])
    found: collections.Counter[int] = collections.Counter()
    silent = 0
    while silent < 6:
        messages = [one for one in consumer.consume(1000, 0.5) if one.error() is None]
        found.update(int(one.value()) for one in messages)
        silent = 0 if messages or not found else silent + 1
    consumer.close()
    return found


def check(bootstrap: str, sent: set[int]) -> str:
    """The members reject values that end in 7 (tests/interaction/share_members.py)."""
    rejected = {value for value in sent if value % 10 == 7}
    found = letters(bootstrap)
    assert found.keys() == rejected, f"without a letter: {sorted(rejected - found.keys())[:20]}"
    assert not [value for value, count in found.items() if count > 1], "twice"
    return f"{len(found)} letters of {len(sent)} records"


@pytest.mark.timeout(500)
def test_processes_are_killed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path / "data", config=CONFIG))
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(SECONDS)
        configure(broker.bootstrap, 1)
        members = [
            Program(share_members.command(broker.bootstrap, GROUP, TOPIC), tmp_path / f"member-{number}")
            for number in range(2)
        ]
        outputs = [member.output for member in members]
        address = [("127.0.0.1", broker.port)]

        def state() -> str:
            return "\n".join([f"lag {lag(address, GROUP)}", *(member.tail() for member in members), broker.logs()])

        with Load(broker, TOPIC, PARTITIONS) as load:
            for member in members:
                stack.enter_context(member)
            for name in KILLED:
                before = len(Output(outputs).answered)
                wait_until(lambda: len(Output(outputs).answered) > before + 200, SECONDS, state)  # noqa: B023
                kill_process(broker, name)
        sent = {int(value) for values in load.sent.values() for value in values}
        wait_until(lambda: lag(address, GROUP) == [0] * PARTITIONS, SECONDS, state)
        print(check(broker.bootstrap, sent))


@pytest.mark.timeout(900)
def test_hosts_are_killed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, workers=2, config=CLUSTER_CONFIG))
        create(cluster, TOPIC, PARTITIONS)
        configure(cluster.bootstrap, 3)
        members = [
            Program(share_members.command(cluster.bootstrap, GROUP, TOPIC), tmp_path / f"member-{number}")
            for number in range(2)
        ]
        outputs = [member.output for member in members]

        def state() -> str:
            return "\n".join([*(member.tail() for member in members), cluster.logs()])

        def progress(count: int) -> None:
            before = len(Output(outputs).answered)
            wait_until(lambda: len(Output(outputs).answered) > before + count, SECONDS, state)

        def all_in_service() -> bool:
            names = (TOPIC, LETTERS, "__consumer_offsets", "__share_group_state", "__transaction_state")
            return all(all_in_sync(cluster, name) for name in names)

        def lags() -> list[int]:
            return lag([(broker.address, broker.port) for broker in cluster], GROUP)

        with Load(cluster, TOPIC, PARTITIONS) as load:
            for member in members:
                stack.enter_context(member)
            nodes = sorted(cluster.brokers)
            random.Random(1).shuffle(nodes)
            for node in nodes:
                progress(100)
                cluster.brokers[node].kill_all()
                progress(100)
                cluster.brokers[node].start()
                wait_until(all_in_service, SECONDS, state)
            progress(100)
        sent = {int(value) for values in load.sent.values() for value in values}
        wait_until(lambda: lags() == [0] * PARTITIONS, SECONDS, lambda: f"lag {lags()}\n{state()}")
        print(check(cluster.bootstrap, sent))
