"""Every client's transactions: every client reads committed ones, and no committed reader others;
the older of two is fenced; a topic is copied exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiokafka
import confluent_kafka
import kafka
import pytest

from tests.broker import Broker
from tests.compat import topics
from tests.compat.clients import DEADLINE_SECONDS
from tests.compat.kcat import Kcat
from tests.compat.transactions.transacting import TRANSACTING

WRITERS = ("confluent-kafka", "kafka-python", "aiokafka")
PARTITIONS = 2
Values = dict[int, list[bytes]]
LAST = {partition: [b"the last"] for partition in range(PARTITIONS)}


def script_of(count: int) -> list[tuple[Values, bool]]:
    """Every third one is aborted; the last one is committed, so that readers know when they have
    read all.
    """
    values = [
        (
            {
                partition: [b"%d %d %d" % (number, partition, index) for index in range(3)]
                for partition in range(PARTITIONS)
            },
            number % 3 != 1,
        )
        for number in range(count)
    ]
    return [*values, (LAST, True)]


def kept(script: list[tuple[Values, bool]]) -> Values:
    return {
        partition: [value for values, committed in script if committed for value in values[partition]]
        for partition in range(PARTITIONS)
    }


def read_by_confluent(bootstrap: str, topic: str, isolation: str) -> Values:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "by hand",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        return _until_last(
            lambda: [
                (message.partition(), message.value()) for message in consumer.consume(100, 0.05) if not message.error()
            ]
        )
    finally:
        consumer.close()


def read_by_kafka_python(bootstrap: str, topic: str, isolation: str) -> Values:
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=bootstrap, group_id=None, isolation_level=isolation, auto_offset_reset="earliest"
    )
    try:
        consumer.assign([kafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)])
        return _until_last(
            lambda: [(record.partition, record.value) for records in consumer.poll(200).values() for record in records]
        )
    finally:
        consumer.close()


def read_by_aiokafka(bootstrap: str, topic: str, isolation: str) -> Values:
    async def run() -> Values:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=bootstrap, group_id=None, isolation_level=isolation, auto_offset_reset="earliest"
        )
        consumer.assign([aiokafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)])
        found: Values = {partition: [] for partition in range(PARTITIONS)}
        deadline = time.monotonic() + DEADLINE_SECONDS
        async with consumer:
            while not all(values[-1:] == LAST[partition] for partition, values in found.items()):
                assert time.monotonic() < deadline, found
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        found[record.partition].append(record.value)
        return found

    return asyncio.run(run())


def _until_last(poll: Callable[[], list[tuple[int, bytes]]]) -> Values:
    found: Values = {partition: [] for partition in range(PARTITIONS)}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(values[-1:] == LAST[partition] for partition, values in found.items()):
        assert time.monotonic() < deadline, found
        for partition, value in poll():
            found[partition].append(value)
    return found


READERS = {"confluent-kafka": read_by_confluent, "kafka-python": read_by_kafka_python, "aiokafka": read_by_aiokafka}


@pytest.mark.parametrize("writer", WRITERS)
def test_committed_readers_see_committed_records(shared_broker: Broker, writer: str) -> None:
    topic, script = topics.create_topic(shared_broker, "transactions", PARTITIONS), script_of(10)
    TRANSACTING[writer].transact(shared_broker.bootstrap, topics.fresh_name("id"), topic, script)
    everything = {
        partition: [value for values, _committed in script for value in values[partition]]
        for partition in range(PARTITIONS)
    }
    for reader, read in READERS.items():
        assert read(shared_broker.bootstrap, topic, "read_committed") == kept(script), reader
        assert read(shared_broker.bootstrap, topic, "read_uncommitted") == everything, reader


def test_kcat_sees_committed_records(shared_broker: Broker, kcat: Kcat) -> None:
    """It is built on an older librdkafka; it reads only committed records by default."""
    topic, script = topics.create_topic(shared_broker, "transactions", PARTITIONS), script_of(4)
    TRANSACTING["confluent-kafka"].transact(shared_broker.bootstrap, topics.fresh_name("id"), topic, script)
    found: Values = {partition: [] for partition in range(PARTITIONS)}
    for partition, _offset, _timestamp_ms, _key, value, _headers in kcat.consume(shared_broker.bootstrap, topic):
        found[partition].append(value)
    assert found == kept(script)


@pytest.mark.parametrize("client", WRITERS)
def test_the_older_of_two_producers_is_fenced(shared_broker: Broker, client: str) -> None:
    topic, name = topics.create_topic(shared_broker, "fenced", PARTITIONS), topics.fresh_name("id")
    TRANSACTING[client].fenced(shared_broker.bootstrap, name, topic)
    TRANSACTING[client].transact(shared_broker.bootstrap, name, topic, [(LAST, True)])
    assert read_by_confluent(shared_broker.bootstrap, topic, "read_committed") == {
        0: [b"younger", b"the last"],
        1: [b"the last"],
    }


@pytest.mark.parametrize("client", TRANSACTING)
def test_a_topic_is_copied_exactly_once(shared_broker: Broker, client: str) -> None:
    source, target, script = (
        topics.create_topic(shared_broker, "source", PARTITIONS),
        topics.create_topic(shared_broker, "target", PARTITIONS),
        script_of(10),
    )
    TRANSACTING["confluent-kafka"].transact(shared_broker.bootstrap, topics.fresh_name("id"), source, script)
    count = sum(len(values) for values in kept(script).values())
    TRANSACTING[client].copy(
        shared_broker.bootstrap, topics.fresh_name("id"), topics.fresh_name("copiers"), source, target, count
    )
    assert read_by_confluent(shared_broker.bootstrap, target, "read_committed") == kept(script)
