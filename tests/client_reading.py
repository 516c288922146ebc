"""Reads a topic with confluent_kafka, as an independent check where mqd's own clients are under
test.
"""

from __future__ import annotations

import time

import confluent_kafka

from tests.broker import Broker


def read_all(
    broker: Broker, topic: str, count: int, isolation: str = "read_committed", seconds: float = 20
) -> list[confluent_kafka.Message]:
    """Reads all partitions from the beginning until `count` records have arrived, and checks that
    no more follow. Raises AssertionError when there are fewer.
    """
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"read-{topic}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    partitions = list(consumer.list_topics(topic, 10).topics[topic].partitions)
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in partitions])
    found: list[confluent_kafka.Message] = []
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while (len(found) < count or len(ended) < len(partitions)) and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                found.append(message)
                ended.discard(message.partition())
            elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    assert len(found) == count, f"{len(found)} records where {count} were expected"
    return found
