"""What an operator's tools ask a cluster for, by Kafka's requests; one thing by chance, and what became of it, in one line.

    python -m tests.chaos.operator reassign|cancel|elect|configure BOOTSTRAP SEED

A refusal is told as any other answer: while hosts are away, much is refused, and rightly. Nothing here may harm a record: unclean elections are not asked for, and min.insync.replicas stays.
"""

from __future__ import annotations

import random
import sys

from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ElectionType, ResourceType

from mqd.protocol.messages import AlterPartitionReassignmentsRequest
from tests.kafka_connection import ConnectionEnded, KafkaConnection

TOPICS = ("plain", "mixed", "atomic")
CONFIGS = {"segment.bytes": (1 << 20, 16 << 20), "max.message.bytes": (1_048_588, 2_000_000), "replica.lag.max.messages": (500, 100_000)}
ALTER_PARTITION_REASSIGNMENTS = 45
TIMEOUT_S = 15.0


def elect(admin: AdminClient, chance: random.Random) -> str:
    topic, partition = some(admin, chance)
    answer = admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, partition)], request_timeout=TIMEOUT_S).result(TIMEOUT_S)
    return f"preferred leader of {topic}-{partition}: " + ", ".join("done" if error is None else error.name() for error in answer.values())


def configure(admin: AdminClient, chance: random.Random) -> str:
    topic, name = chance.choice(TOPICS), chance.choice(sorted(CONFIGS))
    operation = chance.choice((AlterConfigOpType.SET, AlterConfigOpType.DELETE))
    entry = ConfigEntry(name, str(chance.choice(CONFIGS[name])) if operation == AlterConfigOpType.SET else None, incremental_operation=operation)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource], request_timeout=TIMEOUT_S).values():
        future.result(TIMEOUT_S)
    return f"{topic} {operation.name.lower()} {name}: done"


def reassign(admin: AdminClient, chance: random.Random, cancel: bool = False) -> str:
    """Another order, or two of the three and later three again: the cluster has three hosts."""
    topic, partition = some(admin, chance)
    metadata = admin.list_topics(timeout=TIMEOUT_S)
    nodes = sorted(metadata.brokers)
    replicas = None if cancel else chance.sample(nodes, len(nodes) if chance.random() < 0.7 else max(1, len(nodes) - 1))
    one = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=partition, replicas=replicas)
    request = AlterPartitionReassignmentsRequest(timeout_ms=10_000, topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name=topic, partitions=[one])])
    broker = metadata.brokers[chance.choice(nodes)]
    with KafkaConnection(broker.host, broker.port, timeout_s=TIMEOUT_S) as kafka:
        answer = kafka.call(ALTER_PARTITION_REASSIGNMENTS, 0, request)
    errors = [answer.error_code, *(found.error_code for told in answer.responses for found in told.partitions)]
    return f"{topic}-{partition} to {replicas}, asked of {broker.id}: " + ("done" if not any(errors) else f"errors {errors}")


def some(admin: AdminClient, chance: random.Random) -> tuple[str, int]:
    topic = chance.choice(TOPICS)
    found = admin.describe_topics(TopicCollection([topic]), request_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)
    return topic, chance.randrange(len(found.partitions))


def main() -> int:
    action, bootstrap, chance = sys.argv[1], sys.argv[2], random.Random(sys.argv[3])
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": int(TIMEOUT_S * 1000), "error_cb": lambda _error: None})
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
