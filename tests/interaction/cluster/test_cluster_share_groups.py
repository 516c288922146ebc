"""A share group over three hosts, each killed and restarted in turn: Java's KafkaShareConsumers,
librdkafka's ShareConsumers and mqd's in one group. With each host, leaders of partitions, the
coordinator of the group, and those of the share state are lost. The topic's records are deleted
when the group has finished with them.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.cluster import Cluster
from tests.compat.java_client import build_java_client, java_command
from tests.compat.programs.program import Program
from tests.crash.workload import wait_until
from tests.interaction import share_members
from tests.interaction.cluster.test_cluster_moves import Load
from tests.interaction.cluster_clients import all_in_sync, create
from tests.interaction.coordinator import fifo_members
from tests.interaction.share_members import Output, begin_at_first_record, lag

pytestmark = pytest.mark.slow

GROUP, TOPIC, PARTITIONS = "workers", "work", 6
SECONDS = 90.0
DELIVERIES = 10
MARKERS = 1_000_000_000  # values of records written at the end; greater than those of the load
CONFIG = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "5000",
    "queue.delete.on.ack.interval.ms": "500",
    "group.share.delivery.count.limit": str(DELIVERIES),  # kills must not exhaust a record's deliveries
}
# so that members on a host that is killed do not hold partitions for long
SHORT_SESSIONS = {
    "group.share.min.session.timeout.ms": "3000",
    "group.share.session.timeout.ms": "5000",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
}
SPARED_S = 15.0  # after a change of leader a member may still hold what its successor delivers again


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_share_consumers_while_hosts_are_killed(tmp_path: Path, seed: int) -> None:
    home = build_java_client()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, workers=2, config=CONFIG))
        for broker in cluster:
            broker.start_seconds = SECONDS  # it runs beside two JVMs
        create(cluster, TOPIC, PARTITIONS, config={"queue.delete.on.ack": "true"})
        begin_at_first_record(cluster.bootstrap, GROUP)
        java = java_command(home, cluster.bootstrap, "share", GROUP, TOPIC)
        commands = [("java", java)] + [
            (client, share_members.command(cluster.bootstrap, GROUP, TOPIC, client))
            for client in ("librdkafka", "auto", "tcp")
        ]
        members = [Program(command, tmp_path / name) for name, command in commands]
        outputs = [member.output for member in members]

        def state() -> str:
            return "\n".join([*(member.tail() for member in members), cluster.logs()])

        def answered() -> list[int]:
            """Acknowledgements confirmed, for each member."""
            return [len(Output([output]).answered) for output in outputs]

        def progress(count: int) -> None:
            """Waits until each member has this many more confirmed acknowledgements."""
            before = answered()
            wait_until(
                lambda: all(now >= then + count for now, then in zip(answered(), before, strict=True)),
                SECONDS,
                lambda: f"{answered()} answers after {before}\n{state()}",
            )

        def all_in_service() -> bool:
            return all(all_in_sync(cluster, name) for name in (TOPIC, "__consumer_offsets", "__share_group_state"))

        def begins_and_ends() -> list[tuple[int, int]]:
            """Log start offset and log end offset of each partition."""
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
            partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            found = [
                admin.list_offsets(dict.fromkeys(partitions, which))
                for which in (OffsetSpec.earliest(), OffsetSpec.latest())
            ]
            return [(found[0][one].result(SECONDS).offset, found[1][one].result(SECONDS).offset) for one in partitions]

        def lags() -> list[int]:
            return lag([(broker.address, broker.port) for broker in cluster], GROUP)

        with Load(cluster, TOPIC, PARTITIONS) as load:
            for member in members:
                stack.enter_context(member)
            nodes = sorted(cluster.brokers) * 2
            random.Random(seed).shuffle(nodes)
            for node in nodes:
                progress(50)
                cluster.brokers[node].kill_all()
                progress(50)  # served by the other hosts
                cluster.brokers[node].start()
                wait_until(all_in_service, SECONDS, state)
            progress(50)
        sent = {int(value) for values in load.sent.values() for value in values}
        wait_until(lambda: lags() == [0] * PARTITIONS, SECONDS, lambda: f"lag {lags()}\n{state()}")
        wait_until(
            lambda: all(begin == end for begin, end in begins_and_ends()),
            SECONDS,
            lambda: f"log starts and ends {begins_and_ends()}\n{state()}",
        )
        assert not any(member.ended() for member in members), state()
        for member in members:
            member.kill()
        output = Output(outputs)
        with Program(java, tmp_path / "last") as last:
            # unsettled records are acquired before newly written ones
            producer = Producer({"bootstrap.servers": cluster.bootstrap})
            markers = {MARKERS + partition for partition in range(PARTITIONS)}
            for partition in range(PARTITIONS):
                producer.produce(TOPIC, str(MARKERS + partition), partition=partition)
            assert producer.flush(SECONDS) == 0
            wait_until(lambda: Output([last.output]).deliveries.keys() >= markers, SECONDS, last.tail)
            found = Output([last.output]).deliveries
            assert found.keys() == markers and not last.ended(), last.tail()
    print(f"hosts {nodes}: {output.check(sent, DELIVERIES)}")


@pytest.mark.timeout(900)
def test_the_order_of_keys_while_hosts_are_killed(tmp_path: Path) -> None:
    """share.fifo: with each host, leaders of partitions and coordinators of their states are lost."""
    key_count, config = 60, {**CONFIG, **SHORT_SESSIONS}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, workers=1, config=config))
        create(cluster, TOPIC, PARTITIONS)
        begin_at_first_record(cluster.bootstrap, GROUP)
        share_members.configure_group(cluster.bootstrap, GROUP, "share.fifo", "key")
        module = [sys.executable, "-m", "tests.interaction.coordinator.fifo_members"]
        members = [
            stack.enter_context(Program([*module, cluster.bootstrap, GROUP, TOPIC, client], tmp_path / client))
            for client in ("librdkafka", "auto", "tcp")
        ]
        outputs = [member.output for member in members]
        counts: collections.Counter[str] = collections.Counter()
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 20})

        def send(count: int) -> None:
            for _ in range(count):
                key = f"k{counts.total() % key_count}"
                producer.produce(TOPIC, f"{key}:{counts[key]}", key)
                counts[key] += 1
            assert producer.flush(SECONDS) == 0

        def state() -> str:
            return "\n".join([*(member.tail() for member in members), cluster.logs()])

        def progress(count: int) -> None:
            """Waits until so many more of the records are accepted."""
            least = min(len(fifo_members.accepted(outputs)) + count, counts.total())
            wait_until(lambda: len(fifo_members.accepted(outputs)) >= least, SECONDS, state)

        def all_in_service() -> bool:
            return all(all_in_sync(cluster, name) for name in (TOPIC, "__consumer_offsets", "__share_group_state"))

        def all_take_part() -> bool:
            send(60)
            return all(fifo_members.accepted([output]) for output in outputs)

        wait_until(all_take_part, SECONDS, state)  # a member that is still attaching when its host is killed ends
        kills_ns: list[int] = []
        for node in sorted(cluster.brokers):
            send(1200)
            progress(200)
            kills_ns.append(time.monotonic_ns())
            cluster.brokers[node].kill_all()
            send(1200)
            progress(200)  # served by the other hosts
            kills_ns.append(time.monotonic_ns())  # leaders move back
            cluster.brokers[node].start()
            wait_until(all_in_service, SECONDS, state)
        addresses = [(broker.address, broker.port) for broker in cluster]
        wait_until(
            lambda: lag(addresses, GROUP) == [0] * PARTITIONS, SECONDS, lambda: f"{lag(addresses, GROUP)}\n{state()}"
        )
        assert not any(member.ended() for member in members), state()
    print(fifo_members.check(outputs, dict(counts), kills_ns, SPARED_S))
