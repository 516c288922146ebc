"""Records of tens of megabytes: every client writes and reads them, whichever worker owns the
partition; larger ones are refused without closing the connection; stalled clients block neither the
memory nor other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from pathlib import Path

import aiokafka
import kafka as kafka_python
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

import mqd
from mqd.protocol import encode_request, with_length
from mqd.protocol.messages import MetadataRequest
from mqd.spark.options import source_options
from mqd.spark.planning import Range
from mqd.spark.reading import read_range
from tests.broker_files import bytes_of
from tests.compat.topics import create_topic
from tests.interaction.traffic import (
    METADATA,
    PRODUCE,
    PRODUCE_VERSION,
    TOO_LARGE,
    Watch,
    batch,
    eventually,
    must_produce,
    one_outcome,
    produce_request,
)
from tests.preloaded import PRELOADED

MIB = 1 << 20
REQUEST_BYTES_MAX = 100 * MIB
MEMORY_BYTES = 256 * MIB  # large.request.memory.bytes, of each of two workers
TIMEOUT_S = 60


def record(mebibytes: int) -> bytes:
    return os.urandom(1 << 16) * (16 * mebibytes)


def one_write(producer, topic: str, value: bytes, partition: int, **more) -> int:
    outcomes: list = []
    producer.produce(
        topic, value, partition=partition, on_delivery=lambda error, it: outcomes.append((error, it.offset())), **more
    )
    assert producer.flush(TIMEOUT_S) == 0
    ((error, offset),) = outcomes
    assert error is None, error
    return offset


def by_librdkafka(bootstrap: str, topic: str, value: bytes, partition: int) -> None:
    one_write(
        Producer({"bootstrap.servers": bootstrap, "message.max.bytes": REQUEST_BYTES_MAX}), topic, value, partition
    )


def by_kafka_python(bootstrap: str, topic: str, value: bytes, partition: int) -> None:
    producer = kafka_python.KafkaProducer(bootstrap_servers=bootstrap, max_request_size=REQUEST_BYTES_MAX, acks="all")
    producer.send(topic, value, partition=partition).get(TIMEOUT_S)
    producer.close()


def by_aiokafka(bootstrap: str, topic: str, value: bytes, partition: int) -> None:
    async def write() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, max_request_size=REQUEST_BYTES_MAX, acks="all"
        )
        await producer.start()
        await producer.send_and_wait(topic, value, partition=partition)
        await producer.stop()

    asyncio.run(write())


def by_shared_memory(bootstrap: str, topic: str, value: bytes, partition: int) -> None:
    settings = {"bootstrap.servers": bootstrap, "message.max.bytes": REQUEST_BYTES_MAX, "transport": "shm"}
    one_write(mqd.Producer(settings), topic, value, partition)


def read_by(consumer, topic: str, partition: int, count: int) -> list[bytes]:
    """With librdkafka's API, which mqd's client shares."""
    assign = mqd.TopicPartition if isinstance(consumer, mqd.Consumer) else TopicPartition
    consumer.assign([assign(topic, partition, 0)])
    values: list[bytes] = []
    until = time.monotonic() + TIMEOUT_S
    while len(values) < count and time.monotonic() < until:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            values.append(message.value())
    consumer.close()
    return values


def read_with_librdkafka(bootstrap: str, topic: str, partition: int, count: int) -> list[bytes]:
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "receive.message.max.bytes": 2 * REQUEST_BYTES_MAX}
    return read_by(Consumer(settings), topic, partition, count)


def read_with_shared_memory(bootstrap: str, topic: str, partition: int, count: int) -> list[bytes]:
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "transport": "shm"}
    return read_by(mqd.Consumer(settings), topic, partition, count)


def read_with_kafka_python(bootstrap: str, topic: str, partition: int, count: int) -> list[bytes]:
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=TIMEOUT_S * 1000,
    )
    consumer.assign([kafka_python.TopicPartition(topic, partition)])
    values = [message.value for message in itertools.islice(consumer, count)]
    consumer.close()
    return values


def read_with_aiokafka(bootstrap: str, topic: str, partition: int, count: int) -> list[bytes]:
    async def read() -> list[bytes]:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        consumer.assign([aiokafka.TopicPartition(topic, partition)])
        values = [(await asyncio.wait_for(consumer.getone(), TIMEOUT_S)).value for _ in range(count)]
        await consumer.stop()
        return values

    return asyncio.run(read())


WRITERS = [by_librdkafka, by_kafka_python, by_aiokafka, by_shared_memory]
READERS = [read_with_librdkafka, read_with_kafka_python, read_with_aiokafka, read_with_shared_memory]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mebibytes", [12, pytest.param(30, marks=pytest.mark.slow)])
def test_every_client_writes_and_reads_large_records(shared_broker, mebibytes: int) -> None:
    topic = create_topic(shared_broker, "large", 2, max_message_bytes=str(REQUEST_BYTES_MAX))
    written = [record(mebibytes) for _ in WRITERS]
    for partition in (0, 1):  # one of each worker
        for write, value in zip(WRITERS, written, strict=True):
            write(shared_broker.bootstrap, topic, value, partition)
    for read in READERS:
        assert read(shared_broker.bootstrap, topic, 1, len(written)) == written, read.__name__
    assert read_with_librdkafka(shared_broker.bootstrap, topic, 0, len(written)) == written


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_executor_of_spark_reads_them(shared_broker, transport: str) -> None:
    """With the reader of Spark's tasks, without Spark."""
    topic = create_topic(shared_broker, "spark", 1, max_message_bytes=str(REQUEST_BYTES_MAX))
    values = [record(30), b"small", record(90)]
    for value in values:
        by_librdkafka(shared_broker.bootstrap, topic, value, 0)
    with Watch(shared_broker).connect() as kafka:
        requested = MetadataRequest(topics=[MetadataRequest.Topic(name=topic)])
        topic_id = bytes(kafka.call(METADATA, 12, requested).topics[0].topic_id)
    settings = {"kafka.bootstrap.servers": shared_broker.bootstrap, "subscribe": topic, "transport": transport}
    one = Range(topic=topic, partition=0, start=0, end=len(values), topic_id=topic_id)
    batches = read_range(source_options(settings, False), ["value"], one)
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == values


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ninety_mebibytes_survive_a_kill(start_broker) -> None:
    broker = start_broker()
    topic = create_topic(broker, "ninety", 2, max_message_bytes=str(REQUEST_BYTES_MAX))
    value = record(90)
    for partition in (0, 1):
        by_librdkafka(broker.bootstrap, topic, value, partition)
    by_shared_memory(broker.bootstrap, topic, value, 1)
    broker.kill_all()
    broker.start()
    assert read_with_librdkafka(broker.bootstrap, topic, 0, 1) == [value]
    assert read_with_shared_memory(broker.bootstrap, topic, 1, 2) == [value, value]
    broker.stop()
    directory = broker.data_dir / "log" / f"{topic}-1"
    for command in (["verify", str(directory)], ["dump", str(directory)]):
        done = PRELOADED.run("log", *command, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        assert ("sound" in done.stdout) if command[0] == "verify" else done.stdout.count("crc valid") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_large_records_are_compacted(start_broker) -> None:
    broker = start_broker(
        config={"log.cleaner.backoff.ms": "200", "log.roll.ms": "1000", "log.cleaner.min.cleanable.ratio": "0.01"}
    )
    topic = create_topic(
        broker, "compacted", 1, max_message_bytes=str(REQUEST_BYTES_MAX), cleanup_policy="compact", segment_ms="1000"
    )
    directory = broker.data_dir / "log" / f"{topic}-0"
    producer = Producer({"bootstrap.servers": broker.bootstrap, "message.max.bytes": REQUEST_BYTES_MAX})
    packed = Producer(
        {"bootstrap.servers": broker.bootstrap, "message.max.bytes": REQUEST_BYTES_MAX, "compression.type": "lz4"}
    )
    last = {b"plain": record(20), b"lz4": os.urandom(20 * MIB)}
    for _ in range(2):
        one_write(producer, topic, record(20), 0, key=b"plain")
        one_write(packed, topic, os.urandom(20 * MIB), 0, key=b"lz4")
    one_write(producer, topic, last[b"plain"], 0, key=b"plain")
    one_write(packed, topic, last[b"lz4"], 0, key=b"lz4")

    def stored() -> int:
        one_write(producer, topic, b"turn", 0, key=b"turn")  # segments only roll when something is written
        return bytes_of(directory.glob("*.log")) < 50 * MIB

    eventually(stored, lambda: f"only the last of each key is left\n{broker.logs()}", seconds=120)
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "none", "receive.message.max.bytes": 2 * REQUEST_BYTES_MAX}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen: dict[bytes, bytes] = {}
    while set(seen) < set(last):
        message = consumer.poll(TIMEOUT_S)
        assert message is not None and message.error() is None, message
        if message.key() in last:
            seen[message.key()] = message.value()
    consumer.close()
    assert seen == last


def test_a_record_too_large_for_its_topic_is_refused_on_an_open_connection(shared_broker) -> None:
    watch = Watch(shared_broker)
    topic = create_topic(shared_broker, "usual", 2)
    with watch.connect(TIMEOUT_S) as kafka:
        for partition in (0, 1):
            response = kafka.call(
                PRODUCE, PRODUCE_VERSION, produce_request(topic, {partition: batch(record(20))}, timeout_ms=30_000)
            )
            assert one_outcome(response).error_code == TOO_LARGE
            assert must_produce(kafka, topic, partition, b"small") == 0


def test_max_message_bytes_is_limited_by_the_request_size(shared_broker) -> None:
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    config = {"max.message.bytes": str(REQUEST_BYTES_MAX + 1)}
    made = admin.create_topics([NewTopic("never", 1, 1, config=config)])["never"]
    with pytest.raises(KafkaException, match="socket.request.max.bytes=104857600"):
        made.result(TIMEOUT_S)
    topic = create_topic(shared_broker, "most", 1, max_message_bytes=str(REQUEST_BYTES_MAX))
    entry = ConfigEntry("max.message.bytes", str(REQUEST_BYTES_MAX + 1), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    with pytest.raises(KafkaException, match="socket.request.max.bytes=104857600"):
        admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)


def test_a_local_client_gets_the_maximum_request_size(start_broker) -> None:
    broker = start_broker(config={"socket.request.max.bytes": "2000000"})
    topic = create_topic(broker, "local", 1, max_message_bytes="2000000")
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "transport": "shm",
        "message.max.bytes": 10_000_000,
        "batch.size": 10_000_000,
        "linger.ms": 200,
        "acks": "all",
    }
    producer, outcomes = mqd.Producer(settings), []
    for value in (bytes(3_000_000), *[bytes(100_000)] * 40):  # in batches that fit into a request
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    refused = [error for error in outcomes if error is not None]
    assert len(outcomes) == 41 and [error.code() for error in refused] == [mqd.KafkaError.MSG_SIZE_TOO_LARGE], refused
    assert "socket.request.max.bytes=2000000" in refused[0].str()


def test_a_frame_above_the_limit_is_logged_with_its_client(shared_broker) -> None:
    watch = Watch(shared_broker)
    with socket.create_connection(("127.0.0.1", shared_broker.port), TIMEOUT_S) as client:
        client.sendall(struct.pack(">i", REQUEST_BYTES_MAX + 1))
        assert client.recv(1) == b""
        port = client.getsockname()[1]
    cause = "a frame of 104857601 bytes is larger than socket.request.max.bytes=104857600"
    watch.wait_logged("closing the connection", cause, f"(client 127.0.0.1:{port})")


def pss_of_segments(pid: int) -> int:
    """This process's proportional share of the resident pages of the shared memory."""
    total, counted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counted = "/dev/shm/" in line
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifty_stalled_requests_hold_bounded_memory_and_delay_no_client(start_broker) -> None:
    """Each declares 90 MiB and sends two of them: 4.4 GiB are announced."""
    broker = start_broker(config={"large.request.timeout.ms": "10000"})
    watch = Watch(broker)
    topic = create_topic(broker, "stalled", 2, max_message_bytes=str(REQUEST_BYTES_MAX))
    by_librdkafka(broker.bootstrap, topic, record(30), 0)
    frame = with_length(
        encode_request(produce_request(topic, {0: batch(record(90))}, timeout_ms=30_000), PRODUCE_VERSION, 1, "slow")
    )
    before = sum(pss_of_segments(pid) for pid in watch.worker_pids())
    rss_before = watch.worker_rss_bytes()
    with contextlib.ExitStack() as held:
        slow = [held.enter_context(socket.create_connection(("127.0.0.1", broker.port), TIMEOUT_S)) for _ in range(50)]
        for client in slow:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.send(frame[: 2 * MIB])
        eventually(lambda: watch.total("large_stalls") >= 40, "the others wait")
        held_bytes = sum(pss_of_segments(pid) for pid in watch.worker_pids()) - before
        grown = watch.worker_rss_bytes() - rss_before
        print(f"50 promised 4.4 GiB: PSS of the segments + {held_bytes / MIB:.0f} MiB, RSS + {grown / MIB:.0f} MiB")
        assert held_bytes < 16 * MIB and grown < 64 * MIB, (held_bytes, grown)
        with watch.connect() as kafka:
            assert must_produce(kafka, topic, 1, b"small") == 0
        began = time.monotonic()
        by_librdkafka(broker.bootstrap, topic, record(30), 1)  # when its turn comes
        print(f"a large one was written after {time.monotonic() - began:.1f} s")
        eventually(
            lambda: sum(not is_open(client) for client in slow) == 50, "all that stalled are disconnected", seconds=120
        )
    watch.wait_logged("other connections wait for the memory reserved for its large request")
    eventually(
        lambda: sum(pss_of_segments(pid) for pid in watch.worker_pids()) - before < 4 * MIB, "the memory is given back"
    )
    assert read_with_librdkafka(broker.bootstrap, topic, 1, 2)[0] == b"small"


def is_open(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
