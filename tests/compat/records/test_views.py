"""Views (view.of) with third-party clients: each reads the selected records, at the base's offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition

import mqd
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.polling import PATIENCE_S

pytestmark = pytest.mark.slow

TAGS = ["a", "c"] * 20 + ["c"] * 3000 + ["a"] + ["c"] * 2000 + ["a"] + ["c"] * 50  # long runs without a match
WANTED = [offset for offset, tag in enumerate(TAGS) if tag == "a"]
BASE, VIEW = "orders", "orders-a"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory):
    with Broker(tmp_path_factory.mktemp("views")) as started:
        admin = AdminClient({"bootstrap.servers": started.bootstrap})
        admin.create_topics([NewTopic(BASE, 1)])[BASE].result(PATIENCE_S)
        view = NewTopic(VIEW, config={"view.of": BASE, "view.filter": "tag = 'a'"})
        admin.create_topics([view])[VIEW].result(PATIENCE_S)
        producer = Producer({"bootstrap.servers": started.bootstrap, "batch.num.messages": 20})
        for tag in TAGS:
            producer.produce(BASE, b"v" * 1000, partition=0, headers={"tag": tag})
        assert producer.flush(PATIENCE_S) == 0
        yield started


def kafka_python(bootstrap: str, **config: int) -> list[int]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, consumer_timeout_ms=5000, enable_auto_commit=False, **config)
    partition = KafkaPartition(VIEW, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    found = [message.offset for message in consumer]
    consumer.close()
    return found


def kafka_python_in_small_fetches(bootstrap: str) -> list[int]:
    return kafka_python(bootstrap, max_partition_fetch_bytes=20_000)


def aiokafka(bootstrap: str) -> list[int]:
    async def read() -> list[int]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
        await consumer.start()
        partition = AioPartition(VIEW, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        found: list[int] = []
        while len(found) < len(WANTED):
            for messages in (await consumer.getmany(partition, timeout_ms=1000)).values():
                found += [message.offset for message in messages]
        await consumer.stop()
        return found

    return asyncio.run(asyncio.wait_for(read(), PATIENCE_S))


def shared_memory(bootstrap: str) -> list[int]:
    """mqd's client cannot map the base's files for a view: it reads over TCP."""
    consumer = mqd.Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "enable.partition.eof": True})
    consumer.assign([mqd.TopicPartition(VIEW, 0, 0)])
    found = []
    while True:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, found
        if message.error():
            break
        found.append(message.offset())
    consumer.close()
    return found


@pytest.mark.parametrize("read", [kafka_python, kafka_python_in_small_fetches, aiokafka, shared_memory])
def test_every_client_reads_the_selected_records(broker: Broker, read: Callable[[str], list[int]]) -> None:
    assert read(broker.bootstrap) == WANTED


def test_javas_console_consumer(broker: Broker, tmp_path: Path) -> None:
    tools = KafkaTools(tmp_path)
    done = tools.run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", broker.bootstrap, "--topic", VIEW, "--from-beginning", "--timeout-ms", "8000"),
        *("--formatter-property", "print.offset=true", "--formatter-property", "print.value=false"),
    )
    found = [int(line.removeprefix("Offset:")) for line in done.stdout.split() if line.startswith("Offset:")]
    assert found == WANTED, done.stderr[-2000:]
