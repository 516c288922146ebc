"""Members of share groups as processes, their output, and its invariants: every record is delivered
until it is accepted or rejected, and not again after that was confirmed.

As a program: one member with confluent_kafka's ShareConsumer, or mqd's (over shared memory, or
TCP), which does the same as ShareJob.java of tests/compat.

    python -m tests.interaction.share_members BOOTSTRAP GROUP TOPIC [librdkafka | auto | tcp]
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from confluent_kafka import AcknowledgeType, KafkaException, Message, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import mqd
from mqd.protocol.messages import DescribeShareGroupOffsetsRequest
from tests.kafka_connection import KafkaConnection

DESCRIBE_OFFSETS = 90
SECONDS = 60.0


def command(bootstrap: str, group: str, topic: str, client: str = "librdkafka") -> list[str]:
    """`client`: librdkafka, or the transport of mqd's client."""
    return [sys.executable, "-m", "tests.interaction.share_members", bootstrap, group, topic, client]


def configure_group(broker: str | dict[str, Any], group: str, name: str, value: str) -> None:
    """`broker`: its address, or a client's settings."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": broker} if isinstance(broker, str) else broker)
    admin.incremental_alter_configs([resource])[resource].result(SECONDS)


def begin_at_first_record(bootstrap: str, group: str) -> None:
    configure_group(bootstrap, group, "share.auto.offset.reset", "earliest")


class Output:
    """The members' output in these files."""

    def __init__(self, outputs: Iterable[Path]) -> None:
        self.deliveries: dict[int, list[int]] = collections.defaultdict(list)  # delivery counts
        # the acknowledgement types that were confirmed
        self.answered: dict[int, list[str]] = collections.defaultdict(list)
        self.failures: collections.Counter[str] = collections.Counter()
        for output in outputs:
            for line in output.read_text(errors="replace").splitlines(keepends=True):
                match line.split() if line.endswith("\n") else []:
                    case ["delivered", value, count]:
                        self.deliveries[int(value)].append(int(count))
                    case ["answered", value, kind, "ok"]:
                        self.answered[int(value)].append(kind.upper())
                    case ["answered", _, _, why]:
                        self.failures[why] += 1

    def check(self, sent: Set[int], limit: int) -> str:
        """AssertionError unless the group has finished these records; else a summary."""
        assert self.deliveries.keys() == sent, f"never delivered: {sorted(sent - self.deliveries.keys())[:20]}"
        settled = {value: [kind for kind in kinds if kind != "RELEASE"] for value, kinds in self.answered.items()}
        assert not {value: kinds for value, kinds in settled.items() if len(kinds) > 1}, self.failures
        assert all(kinds == ["REJECT"] for value, kinds in settled.items() if value % 10 == 7 and kinds)
        released = [value for value, kinds in self.answered.items() if "RELEASE" in kinds]
        assert released and all(max(self.deliveries[value]) >= 2 for value in released)
        assert all(1 <= count <= limit for counts in self.deliveries.values() for count in counts)
        return f"{len(sent)} records, {len(released)} released, failed acknowledgements: {dict(self.failures)}"


def lag(addresses: Iterable[tuple[str, int]], group: str) -> list[int]:
    """The lag of each partition, from the host that coordinates the group; -1: not known yet.
    Empty: no host coordinates the group now.
    """
    request = DescribeShareGroupOffsetsRequest(
        groups=[DescribeShareGroupOffsetsRequest.Group(group_id=group, topics=None)]
    )
    for host, port in addresses:
        with KafkaConnection(host, port) as kafka:
            (found,) = kafka.call(DESCRIBE_OFFSETS, 1, request).groups
        if found.error_code == 0:
            return [one.lag for topic in found.topics for one in topic.partitions]
    return []


# -- one member ------------------------------------------------------------------------------------


def _kind(message: Message) -> AcknowledgeType:
    last = int(message.value()) % 10
    if last == 3 and message.delivery_count() == 1:
        return AcknowledgeType.RELEASE
    return AcknowledgeType.REJECT if last == 7 else AcknowledgeType.ACCEPT


def _committed(consumer: ShareConsumer) -> dict[TopicPartition, str]:
    """The results of the acknowledgements, by partition."""
    try:
        outcome = consumer.commit_sync(SECONDS)
    except KafkaException as failure:
        print("commit failed", failure.args[0], flush=True)
        return {}
    return {one: "ok" if error is None else error.args[0].name() for one, error in outcome.items()}


def consumer_of(settings: dict[str, Any], client: str) -> Any:
    if client == "librdkafka":
        return ShareConsumer({**settings, "log_level": 0, "reconnect.backoff.max.ms": 500})
    consumer = mqd.ShareConsumer({**settings, "transport": client})
    print("transport", consumer.transport, consumer.transport_reason, flush=True)
    return consumer


def run(bootstrap: str, group: str, topic: str, client: str) -> None:
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "share.acknowledgement.mode": "explicit"}
    consumer = consumer_of(settings, client)
    consumer.subscribe([topic])
    while True:
        taken: list[tuple[Message, AcknowledgeType]] = []
        for message in consumer.poll(0.5):
            if message.error() is not None:
                print("error", message.error(), flush=True)
                continue
            print("delivered", int(message.value()), message.delivery_count())
            taken.append((message, _kind(message)))
            consumer.acknowledge(*taken[-1])
        outcome = _committed(consumer) if taken else {}
        for message, kind in taken:
            response = outcome.get(TopicPartition(message.topic(), message.partition()), "none")
            print("answered", int(message.value()), kind.name, response)
        sys.stdout.flush()


if __name__ == "__main__":
    run(*sys.argv[1:])
