"""Transactions of mqd.Producer over shared memory, in both versions; producers after a worker's
death; idempotence across it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import KafkaError, KafkaException, Producer, TopicPartition
from mqd.client.messages import GroupMetadata
from tests.broker import Broker
from tests.client_reading import read_all

_names = iter(range(1_000_000))


def _topic(broker: Broker, partitions: int = 2) -> str:
    name = f"transactions-{next(_names)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config={"flush.on.ack": "false"})])[name].result(20)
    return name


def _producer(broker: Broker, name: str | None = None, transport: str = "shm", **config) -> Producer:
    given = {key.replace("_", "."): value for key, value in config.items()}
    if name is not None:
        given["transactional.id"] = name
    return Producer({"bootstrap.servers": broker.bootstrap, "transport": transport, "linger.ms": 1, **given})


def _values(broker: Broker, topic: str, count: int, isolation: str = "read_committed") -> list[bytes]:
    return sorted(message.value() for message in read_all(broker, topic, count, isolation))


def test_commit_and_abort(shared_broker: Broker) -> None:
    topic = _topic(shared_broker)
    with _producer(shared_broker, f"tx-{topic}") as producer:
        producer.init_transactions(20)
        for number in range(6):
            producer.begin_transaction()
            for partition in (0, 1):
                producer.produce(topic, b"%d-%d" % (number, partition), partition=partition)
            producer.commit_transaction(20) if number % 2 == 0 else producer.abort_transaction(20)
    assert _values(shared_broker, topic, 6) == sorted(
        b"%d-%d" % (number, partition) for number in (0, 2, 4) for partition in (0, 1)
    )


def test_calls_outside_a_transaction_are_refused(shared_broker: Broker) -> None:
    topic = _topic(shared_broker)
    with _producer(shared_broker, f"tx-{topic}") as producer:
        for call in (
            producer.begin_transaction,
            lambda: producer.produce(topic, b"x"),
            lambda: producer.produce_batch(topic, [b"x"]),
            producer.commit_transaction,
        ):
            with pytest.raises(KafkaException) as raised:
                call()
            assert raised.value.args[0].code() == KafkaError._STATE
        producer.init_transactions(20)
        with pytest.raises(KafkaException):
            producer.init_transactions(20)
        with pytest.raises(KafkaException):
            producer.produce(topic, b"x")
        producer.begin_transaction()
        with pytest.raises(KafkaException):
            producer.begin_transaction()
        producer.produce(topic, b"in")
        producer.commit_transaction(20)
        with pytest.raises(KafkaException):
            producer.produce(topic, b"behind")
        producer.begin_transaction()
        producer.commit_transaction(20)  # without any records
    assert _values(shared_broker, topic, 1) == [b"in"]


def test_an_older_producer_is_fenced(shared_broker: Broker) -> None:
    topic = _topic(shared_broker)
    older = _producer(shared_broker, f"tx-{topic}")
    older.init_transactions(20)
    older.begin_transaction()
    older.produce(topic, b"older", partition=0)
    older.flush(60)
    newer = _producer(shared_broker, f"tx-{topic}")
    newer.init_transactions(20)
    errors: list[KafkaError] = []
    older.produce(topic, b"late", partition=0, on_delivery=lambda error, message: errors.append(error))
    with pytest.raises(KafkaException) as raised:
        older.commit_transaction(20)
    assert raised.value.args[0].fatal() and raised.value.args[0].code() == KafkaError._FENCED
    assert len(errors) == 1 and errors[0] is not None
    with pytest.raises(KafkaException) as raised:
        older.produce(topic, b"later still")
    assert raised.value.args[0].fatal() and raised.value.args[0].code() == KafkaError._FATAL
    with pytest.raises(KafkaException) as raised:
        older.abort_transaction(20)
    assert raised.value.args[0].code() == KafkaError._FENCED
    older.close()
    newer.begin_transaction()
    newer.produce(topic, b"newer", partition=0)
    newer.commit_transaction(20)
    newer.close()
    assert _values(shared_broker, topic, 1) == [b"newer"]


@pytest.mark.parametrize("metadata", ["ours", "confluent's"])
def test_offsets_are_committed_with_the_transaction(shared_broker: Broker, metadata: str) -> None:
    topic, group = _topic(shared_broker), f"group-{next(_names)}"
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": shared_broker.bootstrap, "group.id": group, "enable.auto.commit": False}
    )
    about = GroupMetadata(group) if metadata == "ours" else consumer.consumer_group_metadata()
    with _producer(shared_broker, f"tx-{topic}") as producer:
        producer.init_transactions(20)
        for offset, commit in ((5, True), (9, False)):
            producer.begin_transaction()
            producer.produce(topic, b"x")
            producer.send_offsets_to_transaction(
                [TopicPartition(topic, 0, offset), TopicPartition(topic, 1)], about, 20
            )
            producer.commit_transaction(20) if commit else producer.abort_transaction(20)
    assert consumer.committed([TopicPartition(topic, 0)], 20)[0].offset == 5
    consumer.close()
    assert GroupMetadata.read(GroupMetadata("g", 3, "m", "i").to_bytes()) == GroupMetadata("g", 3, "m", "i")


def test_abort_drops_outstanding_records(shared_broker: Broker) -> None:
    topic = _topic(shared_broker, 1)
    with _producer(shared_broker, f"tx-{topic}", linger_ms=5000) as producer:
        producer.init_transactions(20)
        producer.begin_transaction()
        errors: list[int] = []
        for number in range(500):
            producer.produce(
                topic, b"%d" % number, on_delivery=lambda error, message: errors.append(error.code() if error else 0)
            )
        producer.abort_transaction(20)
        producer.flush(60)
        assert len(errors) == 500 and set(errors) <= {0, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
        producer.begin_transaction()
        producer.produce_batch(topic, [b"%d" % number for number in range(5000)])
        producer.commit_transaction(20)
    assert len(_values(shared_broker, topic, 5000)) == 5000


@pytest.mark.parametrize("compression", ["none", pytest.param("lz4", marks=pytest.mark.slow)])
def test_a_workers_death_loses_and_duplicates_nothing(
    start_broker: Callable[..., Broker], io_backend: str, compression: str
) -> None:
    """Idempotent: the batches move to the next attachment with their sequence numbers."""
    broker = start_broker(workers=1, config={"io.backend": io_backend, "log.flush.on.ack": "false"})
    topic = _topic(broker, 3)
    reports: list[KafkaError | None] = []
    with _producer(broker, enable_idempotence=True, compression_type=compression) as producer:
        sent, deadline = 0, time.monotonic() + 60
        killed = False
        while sent < 30_000:
            try:
                producer.produce(
                    topic,
                    b"%d" % sent,
                    key=b"%d" % (sent % 10),
                    on_delivery=lambda error, message: reports.append(error),
                )
                sent += 1
            except BufferError:
                assert time.monotonic() < deadline
                producer.poll(0.01)
            if sent == 10_000 and not killed:
                killed = True
                os.kill(broker.pids("worker")[0], signal.SIGKILL)
        assert producer.flush(30) == 0
    assert len(reports) == 30_000 and not any(reports)
    found = read_all(broker, topic, 30_000)
    assert sorted(int(message.value()) for message in found) == list(range(30_000))
    by_key: dict[bytes, list[int]] = {}
    for message in found:
        by_key.setdefault(message.key(), []).append(int(message.value()))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_transactions_of_version_1_where_the_broker_is_configured_so(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker(workers=1, config={"log.flush.on.ack": "false"})
    _downgrade(broker)
    topic = _topic(broker, 3)
    with _producer(broker, f"tx-{topic}") as producer:
        producer.init_transactions(20)
        for number in range(6):
            producer.begin_transaction()
            producer.produce(topic, b"%d" % number, partition=number % 3)
            producer.send_offsets_to_transaction([TopicPartition(topic, 0, number)], GroupMetadata("g"), 20)
            producer.commit_transaction(20) if number % 2 == 0 else producer.abort_transaction(20)
    assert _values(broker, topic, 3) == [b"0", b"2", b"4"]


def _downgrade(broker: Broker) -> None:
    from mqd.protocol.messages import UpdateFeaturesRequest
    from tests.kafka_connection import KafkaConnection

    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        update = UpdateFeaturesRequest.FeatureUpdateKey(
            feature="transaction.version", max_version_level=1, upgrade_type=2
        )
        response = kafka.call(57, 1, UpdateFeaturesRequest(timeout_ms=60_000, feature_updates=[update]))
    assert response.error_code == 0 and all(result.error_code == 0 for result in response.results), response
