"""A share group of Java's KafkaShareConsumers, while processes of the broker are killed: every record
is delivered until it is accepted or rejected, and not again after that was answered.
"""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from mqd.protocol.messages import DescribeShareGroupOffsetsRequest
from tests.broker import Broker
from tests.compat.java_client import build_java_client, java_command
from tests.compat.programs.program import Program, kill_process
from tests.crash.workload import wait_until
from tests.interaction.cluster.test_cluster_moves import Load
from tests.kafka_connection import KafkaConnection

pytestmark = pytest.mark.slow

GROUP, TOPIC, PARTITIONS = "workers", "work", 4
DESCRIBE_OFFSETS = 90
SECONDS = 60.0
MARKERS = 1_000_000_000  # values of records written at the end; above those of the load
KILLED = ("mqd-worker-0", "mqd-acceptor", "mqd-worker-1", "broker", "mqd-acceptor")
CONFIG = {
    # what a killed worker's members held at other workers is released by its locks
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "3000",
    "group.share.delivery.count.limit": "10",  # kills are no reason to give a record up
}


class Output:
    """What the members have printed."""

    def __init__(self, members: list[Program]) -> None:
        self.deliveries: dict[int, list[int]] = collections.defaultdict(list)  # delivery counts
        self.answered: dict[int, list[str]] = collections.defaultdict(list)  # the kinds, where the answer was good
        self.failures: collections.Counter[str] = collections.Counter()
        for member in members:
            for line in member.output.read_text(errors="replace").splitlines(keepends=True):
                match line.split() if line.endswith("\n") else []:
                    case ["delivered", value, count]:
                        self.deliveries[int(value)].append(int(count))
                    case ["answered", value, kind, "ok"]:
                        self.answered[int(value)].append(kind.upper())
                    case ["answered", _, _, why]:
                        self.failures[why] += 1


def lag(broker: Broker) -> list[int]:
    """Of each partition; -1: not known yet."""
    group = DescribeShareGroupOffsetsRequest.Group(group_id=GROUP, topics=None)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        response = kafka.call(DESCRIBE_OFFSETS, 1, DescribeShareGroupOffsetsRequest(groups=[group]))
    return [one.lag for topic in response.groups[0].topics for one in topic.partitions]


@pytest.mark.timeout(500)
def test_share_consumers_while_processes_are_killed(tmp_path: Path) -> None:
    home = build_java_client()
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path / "data", config=CONFIG))
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(SECONDS)
        reset = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.GROUP, GROUP, incremental_configs=[reset])
        admin.incremental_alter_configs([resource])[resource].result(SECONDS)
        command = java_command(home, broker.bootstrap, "share", GROUP, TOPIC)
        members = [Program(command, tmp_path / f"member-{number}") for number in range(2)]

        def state() -> str:
            return "\n".join([f"lag {lag(broker)}", *(member.tail() for member in members), broker.logs()])

        with Load(broker, TOPIC, PARTITIONS) as load:
            for member in members:
                stack.enter_context(member)
            for name in KILLED:
                before = len(Output(members).answered)
                wait_until(lambda: len(Output(members).answered) > before + 200, SECONDS, state)  # noqa: B023
                kill_process(broker, name)
        sent = {int(value) for values in load.sent.values() for value in values}
        wait_until(lambda: lag(broker) == [0] * PARTITIONS, SECONDS, state)
        assert not any(member.ended() for member in members), state()
        for member in members:
            member.kill()
        output = Output(members)
        with Program(command, tmp_path / "last") as last:
            # what was not settled is acquired before records that are written now
            producer = Producer({"bootstrap.servers": broker.bootstrap})
            markers = {MARKERS + partition for partition in range(PARTITIONS)}
            for partition in range(PARTITIONS):
                producer.produce(TOPIC, str(MARKERS + partition), partition=partition)
            assert producer.flush(SECONDS) == 0
            wait_until(lambda: Output([last]).deliveries.keys() >= markers, SECONDS, last.tail)
            assert Output([last]).deliveries.keys() == markers and not last.ended(), last.tail()

    assert output.deliveries.keys() == sent, f"never delivered: {sorted(sent - output.deliveries.keys())[:20]}"
    settled = {value: [kind for kind in kinds if kind != "RELEASE"] for value, kinds in output.answered.items()}
    assert not {value: kinds for value, kinds in settled.items() if len(kinds) > 1}, output.failures
    assert all(kinds == ["REJECT"] for value, kinds in settled.items() if value % 10 == 7 and kinds)
    released = [value for value, kinds in output.answered.items() if "RELEASE" in kinds]
    assert released and all(max(output.deliveries[value]) >= 2 for value in released)
    assert all(1 <= count <= 10 for counts in output.deliveries.values() for count in counts)
    print(f"{len(sent)} records, {len(released)} released, failed acknowledgements: {dict(output.failures)}")
