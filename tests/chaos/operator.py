"""Requests of an operator's tools to a cluster, with Kafka's protocol; one random request, and its
outcome, in one line.

    python -m tests.chaos.operator reassign|cancel|elect|configure SETTINGS SEED TOPICS

Refusals are reported like other results: while hosts are down, many requests are rightly refused.
None of them may lose a record: unclean elections are not requested, and min.insync.replicas stays.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import AlterPartitionReassignmentsRequest, ElectLeadersRequest
from tests.chaos.secured import connect
from tests.kafka_connection import ConnectionEnded

CONFIGS = {
    "segment.bytes": (1 << 20, 16 << 20),
    "max.message.bytes": (1_048_588, 2_000_000),
    "replica.lag.max.messages": (500, 100_000),
}
ELECT_LEADERS, ALTER_PARTITION_REASSIGNMENTS = 43, 45
TIMEOUT_S = 15.0


class Admin(AdminClient):
    """`settings`: connection settings with librdkafka's names. `topics`: the topics that change."""

    def __init__(self, settings: dict[str, str], topics: list[str]) -> None:
        super().__init__(
            {**settings, "log_level": 0, "socket.timeout.ms": int(TIMEOUT_S * 1000), "error_cb": lambda _error: None}
        )
        self.settings, self.topics = settings, topics


def elect(admin: Admin, chance: random.Random) -> str:
    """Not with confluent-kafka, whose elect_leaders() raises a SystemError in some versions."""
    topic, partition = some(admin, chance)
    requested = ElectLeadersRequest(
        election_type=0,
        topic_partitions=[ElectLeadersRequest.TopicPartitions(topic=topic, partitions=[partition])],
        timeout_ms=10_000,
    )
    response = send_request(admin, chance, ELECT_LEADERS, 2, requested)
    errors = {
        response.error_code,
        *(one.error_code for result in response.replica_election_results for one in result.partition_result),
    } - {0, ErrorCode.ELECTION_NOT_NEEDED}
    return f"preferred leader of {topic}-{partition}: " + (f"errors {sorted(errors)}" if errors else "done")


def configure(admin: Admin, chance: random.Random) -> str:
    topic, name = chance.choice(admin.topics), chance.choice(sorted(CONFIGS))
    operation = chance.choice((AlterConfigOpType.SET, AlterConfigOpType.DELETE))
    entry = ConfigEntry(
        name,
        str(chance.choice(CONFIGS[name])) if operation == AlterConfigOpType.SET else None,
        incremental_operation=operation,
    )
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource], request_timeout=TIMEOUT_S).values():
        future.result(TIMEOUT_S)
    return f"{topic} {operation.name.lower()} {name}: done"


def reassign(admin: Admin, chance: random.Random, cancel: bool = False) -> str:
    """Another order, or one replica less and later three again; on three hosts or more: never more
    than three replicas, so that each host can be drained.
    """
    topic, partition = some(admin, chance)
    nodes = sorted(admin.list_topics(timeout=TIMEOUT_S).brokers)
    count = min(3, len(nodes))
    replicas = None if cancel else chance.sample(nodes, count if chance.random() < 0.7 else max(1, count - 1))
    one = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=partition, replicas=replicas)
    request = AlterPartitionReassignmentsRequest(
        timeout_ms=10_000, topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name=topic, partitions=[one])]
    )
    response = send_request(admin, chance, ALTER_PARTITION_REASSIGNMENTS, 0, request)
    errors = [
        response.error_code,
        *(found.error_code for reported in response.responses for found in reported.partitions),
    ]
    return f"{topic}-{partition} to {replicas}: " + ("done" if not any(errors) else f"errors {errors}")


def send_request(admin: Admin, chance: random.Random, api_key: int, version: int, request: object) -> Any:
    """To any host: the active controller decides, wherever it runs."""
    broker = chance.choice(list(admin.list_topics(timeout=TIMEOUT_S).brokers.values()))
    with connect(broker.host, broker.port, admin.settings, TIMEOUT_S) as kafka:
        return kafka.call(api_key, version, request)


def some(admin: Admin, chance: random.Random) -> tuple[str, int]:
    topic = chance.choice(admin.topics)
    found = admin.describe_topics(TopicCollection([topic]), request_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)
    return topic, chance.randrange(len(found.partitions))


def main() -> int:
    action, settings, chance = sys.argv[1], json.loads(sys.argv[2]), random.Random(sys.argv[3])
    admin = Admin(settings, sys.argv[4].split(","))
    try:
        if action in ("reassign", "cancel"):
            print(reassign(admin, chance, action == "cancel"))
        else:
            print({"elect": elect, "configure": configure}[action](admin, chance))
    except (KafkaException, ConnectionEnded, OSError) as error:
        print(f"refused: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
