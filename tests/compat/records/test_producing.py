"""Every client as a producer: acknowledgements, idempotence, auto-created topics, and its errors
when the broker refuses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka
import kafka.errors
import pytest
from confluent_kafka.admin import AdminClient

from mqd.protocol.records import decode_records
from tests.broker import Broker
from tests.compat import topics
from tests.compat.clients import Aiokafka, Client, Confluent, KafkaPython
from tests.compat.kcat import Kcat
from tests.compat.messages import PARTITION_COUNT, Message, compressible

COUNT = 300

# The same setting in the form of each client.
ACKS = {
    "confluent-kafka": lambda acks: {"acks": str(acks)},
    "kafka-python": lambda acks: {"acks": acks},
    "aiokafka": lambda acks: {"acks": acks},
    "kcat": lambda acks: {"acks": str(acks)},
}
IDEMPOTENCE = {
    "confluent-kafka": {"enable.idempotence": True, "linger.ms": 0, "batch.num.messages": 20},
    "kafka-python": {"enable_idempotence": True, "linger_ms": 0, "batch_size": 2000},
    "aiokafka": {"enable_idempotence": True, "linger_ms": 0, "max_batch_size": 2000},
    "kcat": {"enable.idempotence": "true", "batch.num.messages": "20"},
}


def numbered(count: int = COUNT, partitions: int = PARTITION_COUNT) -> list[Message]:
    rows = [Message(number % partitions, b"key", b"%06d" % number + b"." * 80) for number in range(count)]
    return sorted(rows, key=lambda message: message.partition)


def stored(broker: Broker, topic: str, partition: int, expected: int) -> list[bytes | None]:
    """The values of a partition, read with raw frames, once there are `wanted`; acks 0 and 1 do not
    wait until records are visible.
    """
    values: list[bytes | None] = []
    with topics.connect(broker) as connection:
        while True:
            part = topics.fetch(
                connection,
                topic,
                len(values),
                partition,
                max_wait_ms=5000 if len(values) < expected else 0,
                max_bytes=32 << 20,
            )
            found = [
                record.value
                for record in decode_records(part.records, allow_partial=True)
                if record.offset >= len(values)
            ]
            if not found:
                return values
            values += found


def check_stored(broker: Broker, topic: str, messages: list[Message]) -> None:
    for partition in {message.partition for message in messages}:
        expected = [message.value for message in messages if message.partition == partition]
        assert stored(broker, topic, partition, len(expected)) == expected, (
            f"partition {partition}: each once and in order"
        )


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_acks(shared_broker: Broker, client: Client, acks: int | str) -> None:
    topic = topics.create_topic(shared_broker, "acks", PARTITION_COUNT)
    messages = numbered()
    client.produce(shared_broker.bootstrap, topic, messages, **ACKS[client.name](acks))
    check_stored(shared_broker, topic, messages)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_idempotent_producer(shared_broker: Broker, client: Client, compression: str) -> None:
    """Several batches in flight for each partition, with sequence numbers: each record once, in
    order.
    """
    topic = topics.create_topic(shared_broker, "idempotent", PARTITION_COUNT)
    messages = numbered(COUNT * 2)
    client.produce(shared_broker.bootstrap, topic, messages, compression, **IDEMPOTENCE[client.name])
    check_stored(shared_broker, topic, messages)
    with topics.connect(shared_broker) as connection:
        headers = topics.headers_in(topics.fetch(connection, topic, 0, 1, max_bytes=8 << 20).records)
    assert all(header.producer_id >= 0 for header in headers), "it did use a producer id"
    expected_sequence = 0
    for header in headers:
        assert header.base_sequence in (expected_sequence, 0), (
            "0 begins another producer's life: kcat is one for each partition"
        )
        expected_sequence = header.base_sequence + header.record_count


def test_a_requested_topic_is_created(shared_broker: Broker, client: Client) -> None:
    topic = topics.fresh_name("asked-for")
    messages = numbered(20, 1)
    client.produce(shared_broker.bootstrap, topic, messages)
    check_stored(shared_broker, topic, messages)


def test_four_concurrent_producers_keep_their_order(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "together", 2)
    writers = [Confluent(), KafkaPython(), Aiokafka(), Confluent()]

    def write(number: int) -> None:
        messages = [
            Message(partition, b"%d" % number, b"%d %04d" % (number, row))
            for partition in range(2)
            for row in range(200)
        ]
        writers[number].produce(shared_broker.bootstrap, topic, messages, **IDEMPOTENCE[writers[number].name])

    with concurrent.futures.ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(write, range(len(writers))))
    for partition in range(2):
        found = stored(shared_broker, topic, partition, 800)
        for number in range(len(writers)):
            assert [value for value in found if value.startswith(b"%d " % number)] == [
                b"%d %04d" % (number, row) for row in range(200)
            ]


# -- refused ---------------------------------------------------------------------------------------


def test_too_large_confluent(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "large", 1, max_message_bytes="20000")
    with pytest.raises(AssertionError, match="Message size too large"):
        Confluent().produce(shared_broker.bootstrap, topic, [Message(0, b"k", b"x" * 30_000)])
    Confluent().produce(shared_broker.bootstrap, topic, [Message(0, b"k", b"x" * 10_000)])


def test_too_large_kafka_python(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "large", 1, max_message_bytes="20000")
    with pytest.raises(kafka.errors.MessageSizeTooLargeError):
        KafkaPython().produce(shared_broker.bootstrap, topic, [Message(0, b"k", b"x" * 30_000)])


def test_too_large_aiokafka(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "large", 1, max_message_bytes="20000")
    with pytest.raises(aiokafka.errors.MessageSizeTooLargeError):
        Aiokafka().produce(shared_broker.bootstrap, topic, [Message(0, b"k", b"x" * 30_000)])


def test_too_large_kcat(shared_broker: Broker, kcat: Kcat) -> None:
    topic = topics.create_topic(shared_broker, "large", 1, max_message_bytes="20000")
    with pytest.raises(AssertionError, match="Message size too large"):
        kcat.produce(shared_broker.bootstrap, topic, [Message(0, b"k", b"x" * 30_000)])


def test_the_broker_s_own_limit_is_the_default_of_clients(shared_broker: Broker, client: Client) -> None:
    """A record of a million bytes, the largest that the default settings of clients send."""
    topic = topics.create_topic(shared_broker, "largest", 1)
    value = compressible(999_000, "largest").replace(b"\x1e", b".").replace(b"\x1f", b".")
    client.produce(shared_broker.bootstrap, topic, [Message(0, b"k", value)])
    assert stored(shared_broker, topic, 0, 1) == [value]


def test_a_requested_topic_is_not_created_when_disabled(start_broker) -> None:
    broker = start_broker(workers=1, config={"auto.create.topics.enable": "false"})
    failed: list[confluent_kafka.KafkaError] = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap, "message.timeout.ms": 3000, "topic.metadata.propagation.max.ms": 100}
    )
    producer.produce("nowhere", b"x", on_delivery=lambda error, _message: failed.append(error))
    assert producer.flush(60) == 0
    assert failed[0].code() in (
        confluent_kafka.KafkaError._UNKNOWN_TOPIC,
        confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
    )

    async def unknown() -> None:
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=broker.bootstrap, request_timeout_ms=2000) as other:
            with pytest.raises(aiokafka.errors.KafkaError):
                await other.send_and_wait("nowhere", b"x")

    asyncio.run(unknown())
    assert "nowhere" not in AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=60).topics


def test_a_producer_keeps_going_over_a_restart(start_broker) -> None:
    """The client reconnects by itself, and records sent meanwhile arrive once."""
    broker = start_broker()
    topic = topics.create_topic(broker, "restart", 2)
    reported: list[confluent_kafka.KafkaError | None] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "reconnect.backoff.max.ms": 200,
            "linger.ms": 1,
        }
    )
    for number in range(200):
        if number == 100:
            broker.stop()
        producer.produce(
            topic, b"%04d" % number, partition=number % 2, on_delivery=lambda error, _message: reported.append(error)
        )
        producer.poll(0)
        if number == 100:
            broker.start()
    assert producer.flush(60) == 0 and reported == [None] * 200
    for partition in range(2):
        assert stored(broker, topic, partition, 100) == [b"%04d" % number for number in range(partition, 200, 2)]


def test_kafka_python_producers_flush_many_small_batches(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "many", 3)
    producer = kafka.KafkaProducer(
        bootstrap_servers=shared_broker.bootstrap, batch_size=0, max_in_flight_requests_per_connection=5
    )
    try:
        futures = [producer.send(topic, b"%d" % number, partition=number % 3) for number in range(300)]
        producer.flush(30)
        assert [future.get(1).offset for future in futures] == [number // 3 for number in range(300)]
    finally:
        producer.close(10)
