"""Calls whose outcome applications written for confluent_kafka rely on, over shared memory and over
TCP. Over TCP the calls are confluent_kafka's own, so the tests also hold for it.
"""

from __future__ import annotations

import copy
import json
import pickle
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.broker import Broker
from tests.polling import PATIENCE_S

SECONDS = PATIENCE_S


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp("client-same-calls"),
        config={"group.initial.rebalance.delay.ms": "0", "log.flush.on.ack": "false"},
    ) as broker:
        yield broker


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def topic(broker: Broker) -> str:
    name = "same-" + uuid.uuid4().hex
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})  # kept alive until it has a response
    admin.create_topics([NewTopic(name, 2, 1, config={"flush.on.ack": "false"})])[name].result(SECONDS)
    return name


@pytest.fixture
def producers(broker: Broker, transport: str) -> Iterator[Callable[..., Producer]]:
    made: list[Producer] = []

    def make(**config: object) -> Producer:
        given = {name if callable(value) else name.replace("_", "."): value for name, value in config.items()}
        made.append(Producer({"bootstrap.servers": broker.bootstrap, "transport": transport, **given}))
        return made[-1]

    yield make
    for producer in made:
        producer.close()


@pytest.fixture
def consumers(broker: Broker, transport: str) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(**config: object) -> Consumer:
        given = {name if callable(value) else name.replace("_", "."): value for name, value in config.items()}
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        made.append(Consumer({**settings, "transport": transport, **given}))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        message = consumer.poll(0.5)
        if message is not None:
            found.append(message)
    return found


def write(producer: Producer, topic: str, count: int) -> None:
    for number in range(count):
        producer.produce(topic, b"%d" % number, key=b"k", partition=0)
    assert producer.flush(SECONDS) == 0


def code_of(raised: pytest.ExceptionInfo[KafkaException]) -> int:
    return raised.value.args[0].code()


def test_calls_work_after_one_with_a_wrong_argument(producers, topic: str) -> None:
    producer = producers()
    reports: list = []
    for wrong in (
        {"timestamp": 1 << 70},
        {"timestamp": 1.5},
        {"timestamp": "5"},
        {"partition": "0"},
        {"partition": 0.0},
    ):
        with pytest.raises((OverflowError, TypeError)):
            producer.produce(topic, b"x", **wrong)
    for partition in (-5, 99, 1 << 40):
        with pytest.raises((KafkaException, OverflowError)):
            write(producer, topic, 1)
            producer.produce(topic, b"x", partition=partition)
    producer.produce(
        topic,
        b"y",
        headers={b"name": "value"},
        on_delivery=lambda error, message: reports.append((error, message.value())),
    )
    assert producer.flush(SECONDS) == 0 and reports == [(None, b"y")]


def test_partitions_beyond_32_bits_before_the_topic_is_known(producers, topic: str) -> None:
    producer = producers()
    with pytest.raises((KafkaException, OverflowError)):
        producer.produce(topic, b"x", partition=1 << 40)
    write(producer, topic, 1)


def test_a_closed_producer_raises_runtime_errors(producers, topic: str) -> None:
    producer = producers(transactional_id=uuid.uuid4().hex)
    assert producer.close() and producer.close()
    calls: list[Callable[[], object]] = [
        lambda: producer.produce(topic, b"x"),
        lambda: producer.poll(0),
        lambda: producer.flush(0),
        producer.purge,
        producer.list_topics,
        producer.init_transactions,
        producer.begin_transaction,
        producer.commit_transaction,
        producer.abort_transaction,
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()
    assert len(producer) == 0


def test_allow_auto_create_topics_is_respected(producers) -> None:
    name = "none-" + uuid.uuid4().hex
    producer = producers(allow_auto_create_topics=False, topic_metadata_propagation_max_ms=300)
    errors: list[KafkaError] = []
    producer.produce(
        name,
        b"x",
        on_delivery=lambda error, message: errors.append((error.code(), message.partition(), message.offset())),
    )
    assert producer.flush(SECONDS) == 0
    assert [code for code, _, offset in errors if offset is None] == [KafkaError.UNKNOWN_TOPIC_OR_PART]
    assert name not in producer.list_topics(timeout=SECONDS).topics
    with pytest.raises(TypeError):
        producer.list_topics(5)


def test_produce_batch_with_confluent_kafkas_arguments(producers, topic: str) -> None:
    producer = producers()
    values: list[bytes] = []
    assert (
        producer.produce_batch(
            topic=topic,
            messages=[{"value": b"a"}, {"value": b"b"}],
            callback=lambda error, message: values.append(message.value()),
        )
        == 2
    )
    assert producer.flush(SECONDS) == 0 and sorted(values) == [b"a", b"b"]


def test_messages_compare(producers, consumers, topic: str) -> None:
    write(producers(), topic, 2)
    consumer = consumers()
    consumer.assign([TopicPartition(topic, 0)])
    first, second = take(consumer, 2)
    assert first == first and first != second and first in [second, first] and first not in [second]
    assert pickle.loads(pickle.dumps(first)).value() == copy.copy(first).value() == b"0"
    assert pickle.loads(pickle.dumps(first)).offset() == 0
    with pytest.raises(TypeError):
        hash(first)


def test_calls_for_partitions_no_longer_assigned_are_ignored(producers, consumers, topic: str) -> None:
    """A thread that has finished its work resumes a partition and stores its offset after a
    rebalance has revoked it.
    """
    write(producers(), topic, 3)
    consumer = consumers(enable_auto_offset_store=False)
    consumer.assign([TopicPartition(topic, 0)])
    take(consumer, 1)
    gone = TopicPartition(topic, 1, 7)
    consumer.pause([gone])
    consumer.resume([gone])
    consumer.store_offsets(offsets=[TopicPartition(topic, 0, 2), gone])
    assert [(one.partition, one.offset) for one in consumer.commit(asynchronous=False) if one.offset >= 0] == [(0, 2)]
    with pytest.raises(KafkaException) as raised:
        consumer.store_offsets(offsets=[gone])
    assert code_of(raised) == KafkaError._STATE
    with pytest.raises(KafkaException) as raised:
        consumer.incremental_unassign([gone])
    assert code_of(raised) == KafkaError._INVALID_ARG


def test_a_commit_that_fails_for_one_partition_raises(consumers, topic: str) -> None:
    reported: list = []
    consumer = consumers(on_commit=lambda error, partitions: reported.append((error, partitions)))
    offsets = [TopicPartition(topic, 0, 1), TopicPartition(topic, 99, 1)]
    with pytest.raises(KafkaException) as raised:
        consumer.commit(offsets=offsets, asynchronous=False)
    assert code_of(raised) == KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.commit(offsets=offsets[:1], asynchronous=False)
    consumer.poll(0.1)
    assert reported == []  # a waiting caller gets the error as an exception
    consumer.commit(offsets=offsets)
    deadline = time.monotonic() + SECONDS
    while not reported:
        consumer.poll(0.1)
        assert time.monotonic() < deadline
    assert reported[0][0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_offsets_of_unknown_partitions_are_errors(consumers, topic: str) -> None:
    consumer = consumers()
    for nowhere in (TopicPartition(topic, 77, 5), TopicPartition("no-such-topic", 0, 5)):
        with pytest.raises(KafkaException) as raised:
            consumer.get_watermark_offsets(nowhere, timeout=SECONDS)
        assert code_of(raised) == KafkaError._UNKNOWN_PARTITION
        with pytest.raises(KafkaException) as raised:
            consumer.offsets_for_times([nowhere], timeout=SECONDS)
        assert code_of(raised) == KafkaError._UNKNOWN_PARTITION
    found = consumer.offsets_for_times([TopicPartition(topic, 0, 0), TopicPartition(topic, 77, 0)], timeout=SECONDS)
    assert [one.error.code() if one.error else None for one in found] == [None, KafkaError._UNKNOWN_PARTITION]


def test_a_misspelt_topic_is_reported_once(consumers) -> None:
    consumer = consumers()
    name = "misspelt-" + uuid.uuid4().hex
    consumer.subscribe([name])
    (message,) = take(consumer, 1)
    assert (
        message.error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        and message.topic() == name
        and name in message.error().str()
    )
    assert consumer.poll(0.5) is None
    with pytest.raises(KafkaException) as raised:
        consumer.subscribe([""])
    assert code_of(raised) == KafkaError._INVALID_ARG


def test_a_callback_that_raises_leaves_no_partition_unread(producers, consumers, topic: str) -> None:
    write(producers(), topic, 3)
    consumer = consumers()

    def on_assign(_consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        raise ValueError("the application's")

    consumer.subscribe([topic], on_assign=on_assign)
    with pytest.raises(ValueError, match="the application's"):
        take(consumer, 1)
    while take(consumer, 1)[0].value() != b"2":  # confluent_kafka loses the record returned with the exception
        pass


def test_an_empty_group_id_is_refused(broker: Broker, transport: str) -> None:
    with pytest.raises(ValueError):
        Consumer({"bootstrap.servers": broker.bootstrap, "transport": transport, "group.id": ""})


def test_leader_epochs_are_committed(producers, consumers, topic: str) -> None:
    write(producers(), topic, 2)
    consumer = consumers()
    consumer.assign([TopicPartition(topic, 0)])
    take(consumer, 2)
    consumer.commit(asynchronous=False)
    (found,) = consumer.committed([TopicPartition(topic, 0)], SECONDS)
    assert (found.offset, found.leader_epoch) == (2, 0)


def test_statistics_have_the_keys_that_exporters_read(producers, consumers, topic: str) -> None:
    texts: dict[str, str] = {}
    producer = producers(statistics_interval_ms=100, stats_cb=lambda text: texts.setdefault("producer", text))
    write(producer, topic, 1)
    consumer = consumers(statistics_interval_ms=100, stats_cb=lambda text: texts.setdefault("consumer", text))
    consumer.assign([TopicPartition(topic, 0)])
    deadline = time.monotonic() + SECONDS
    while len(texts) < 2:
        producer.poll(0.05)
        consumer.poll(0.05)
        assert time.monotonic() < deadline
    for text in texts.values():
        assert {
            "name",
            "client_id",
            "type",
            "ts",
            "time",
            "age",
            "replyq",
            "brokers",
            "topics",
            "tx",
            "rx",
            "tx_bytes",
            "rx_bytes",
            "txmsgs",
            "rxmsgs",
        } <= json.loads(text).keys()
    partitions = json.loads(texts["consumer"])["topics"][topic]["partitions"]
    assert {
        "lo_offset",
        "hi_offset",
        "ls_offset",
        "consumer_lag",
        "committed_offset",
        "stored_offset",
        "app_offset",
        "fetch_state",
    } <= partitions["0"].keys()
