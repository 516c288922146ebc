"""A key maps to the same partition with every client: mqd's through shared memory and TCP,
librdkafka, and (murmur2) the Java client.
"""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import Producer
from mqd.client.partitioner import NAMES
from tests.broker import Broker
from tests.client_reading import read_all
from tests.compat.java_client import build_java_client, run_java_client

PARTITIONS = 7
TEXTS = ["kéy" * (number // 3) + "abc"[: number % 3] for number in range(300)]  # as in java/.../Partitions.java
KEYS = [text.encode() for text in TEXTS]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory):
    with Broker(tmp_path_factory.mktemp("partitioners"), workers=1, config={"log.flush.on.ack": "false"}) as broker:
        yield broker


def _topic(broker: Broker, name: str) -> str:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(20)
    return name


def _by_key(messages) -> dict[bytes, dict[bytes, set[int]]]:
    """Partitions by sender and key."""
    found: dict[bytes, dict[bytes, set[int]]] = {}
    for message in messages:
        found.setdefault(message.value(), {}).setdefault(message.key(), set()).add(message.partition())
    return found


def _send_ours(broker: Broker, topic: str, partitioner: str, transport: str, batched: bool, keys: list[bytes]) -> None:
    with Producer(
        {"bootstrap.servers": broker.bootstrap, "transport": transport, "partitioner": partitioner}
    ) as producer:
        assert producer.transport == transport
        name = f"mqd {transport} {batched}".encode()
        if batched:
            producer.produce_batch(topic, [name] * len(keys), keys)
        else:
            for key in keys:
                producer.produce(topic, name, key)
        assert producer.flush(60) == 0


@pytest.mark.parametrize("partitioner", [name for name in NAMES if name != "random"])
def test_librdkafkas_partitioners(broker: Broker, partitioner: str) -> None:
    topic = _topic(broker, f"keys-{partitioner}")
    keys = KEYS if partitioner not in ("consistent_random",) else KEYS[1:]  # which sends an empty key to any partition
    own = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "partitioner": partitioner})
    for key in keys:
        own.produce(topic, b"librdkafka", key)
    assert own.flush(60) == 0
    senders = [("shm", False), ("shm", True), ("tcp", True)]
    for transport, batched in senders:
        _send_ours(broker, topic, partitioner, transport, batched, keys)
    found = _by_key(read_all(broker, topic, len(keys) * (len(senders) + 1)))
    expected = found.pop(b"librdkafka")
    assert len(found) == len(senders) and all(places == expected for places in found.values())
    assert all(len(places) == 1 for places in expected.values()) and set().union(*expected.values()) == set(
        range(PARTITIONS)
    )


@pytest.mark.parametrize("partitioner", ["consistent", "murmur2", "fnv1a"])
def test_records_without_key_with_partitioners_that_hash_them(broker: Broker, partitioner: str) -> None:
    topic = _topic(broker, f"none-{partitioner}")
    own = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "partitioner": partitioner})
    with Producer({"bootstrap.servers": broker.bootstrap, "transport": "shm", "partitioner": partitioner}) as ours:
        for _ in range(20):
            own.produce(topic, b"librdkafka")
            ours.produce(topic, b"mqd")
        assert own.flush(60) == 0
    found = _by_key(read_all(broker, topic, 40))
    assert found[b"mqd"] == found[b"librdkafka"] and len(found[b"mqd"][None]) == 1


def test_records_without_key_are_spread(broker: Broker) -> None:
    topic = _topic(broker, "spread")
    with Producer({"bootstrap.servers": broker.bootstrap, "transport": "shm", "batch.num.messages": 10}) as producer:
        producer.produce_batch(topic, [b"x"] * 2000)
    messages = read_all(broker, topic, 2000)
    assert {message.partition() for message in messages} == set(range(PARTITIONS))


@pytest.mark.timeout(400)
def test_the_java_client(broker: Broker) -> None:
    home: Path = build_java_client()
    assert run_java_client(home, broker.bootstrap, "partitions") == ["partitions"]
    for transport, batched in (("shm", False), ("shm", True), ("tcp", False)):
        _send_ours(broker, "java-partitions", "murmur2_random", transport, batched, KEYS)
    found = _by_key(read_all(broker, "java-partitions", 4 * len(KEYS)))
    expected = found.pop(b"java")
    assert len(found) == 3 and all(places == expected for places in found.values())
