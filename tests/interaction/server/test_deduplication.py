"""Deduplication (dedup.window.ms) on a running broker, with librdkafka's clients."""

from __future__ import annotations

import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import mqd
from tests.broker import Broker
from tests.certificates import Authority
from tests.polling import PATIENCE_S
from tests.ports import free_port

CONFIG = {"dedup.window.ms": "600000", "message.timestamp.type": "LogAppendTime", "compression.type": "uncompressed"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("deduplication")) as started:
        yield started


def create(broker: Broker, config: dict[str, str]) -> str:
    topic = f"deduplicated-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, config=config)])[topic].result(PATIENCE_S)
    return topic


@pytest.fixture
def topic(broker: Broker) -> str:
    return create(broker, CONFIG)


def produce(broker: Broker, topic: str, *ids: str, **config: str | bool) -> list[int]:
    """Sends records as one batch; returns the offsets reported to the producer."""
    reports: list[Message] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 100, **config})
    for number in ids:
        producer.produce(
            topic, f"value-{number}", headers={"dedup-id": number}, partition=0, on_delivery=_keep(reports)
        )
    assert producer.flush(PATIENCE_S) == 0
    return [message.offset() for message in reports]


def _keep(reports: list[Message]):  # type: ignore[no-untyped-def]  # confluent_kafka has no type for it
    def keep(error: object, message: Message) -> None:
        assert error is None, error
        reports.append(message)

    return keep


def deduplicated_count(broker: Broker) -> float:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=PATIENCE_S
    ) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mqd_records_deduplicated_total{"))


def values(broker: Broker, topic: str) -> list[tuple[int, str]]:
    """(offset, value) of all records that read_committed returns up to the end of the log."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    while True:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, found
        if message.error():
            break  # the end of the partition
        found.append((message.offset(), message.value().decode()))
    consumer.close()
    return found


@pytest.mark.parametrize("idempotent", [False, True])
def test_an_id_is_written_once_from_several_producers(broker: Broker, topic: str, idempotent: bool) -> None:
    more: dict[str, str | bool] = {"enable.idempotence": idempotent, "compression.type": "lz4"}
    before = deduplicated_count(broker)
    assert produce(broker, topic, "a", "b", "c", **more) == [0, 1, 2]
    assert produce(broker, topic, "b", **more) == [1]
    mixed = produce(broker, topic, "d", "a", "e", "e", **more)
    assert [value for _, value in values(broker, topic)] == ["value-a", "value-b", "value-c", "value-d", "value-e"]
    written = {value: offset for offset, value in values(broker, topic)}
    assert (written["value-d"], written["value-e"]) == (mixed[0], mixed[2])
    assert deduplicated_count(broker) - before == 3


def test_ids_outlive_the_broker(broker: Broker, topic: str) -> None:
    assert produce(broker, topic, "a", "b") == [0, 1]
    broker.kill_all()
    broker.start()
    assert produce(broker, topic, "b") == [1]
    assert produce(broker, topic, "c") == [2]


def test_ids_of_an_aborted_transaction_are_free(broker: Broker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic})
    producer.init_transactions(PATIENCE_S)
    for commit in (False, True):
        producer.begin_transaction()
        for _ in range(2):  # its own id is a duplicate within the transaction
            producer.produce(topic, f"committed {commit}", headers={"dedup-id": "1"}, partition=0)
            producer.flush(PATIENCE_S)
        producer.commit_transaction(PATIENCE_S) if commit else producer.abort_transaction(PATIENCE_S)
    assert [value for _, value in values(broker, topic)] == ["committed True"]


def test_a_record_without_an_id_is_refused(broker: Broker, topic: str) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, "no id", partition=0, on_delivery=lambda error, _: errors.append(error.name()))
    producer.flush(PATIENCE_S)
    assert errors == ["INVALID_RECORD"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"message.timestamp.type": "CreateTime"}, "needs message.timestamp.type=LogAppendTime"),
        ({"compression.type": "producer"}, "needs compression.type=uncompressed"),
        ({"cleanup.policy": "compact"}, "cannot be set with cleanup.policy=compact"),
        ({"dedup.header": "h" * 64}, "must have 1 to 63 bytes"),
    ],
)
def test_topics_that_deduplication_refuses(broker: Broker, changed: dict[str, str], reason: str) -> None:
    with pytest.raises(KafkaException, match=reason):
        create(broker, CONFIG | changed)


def send_singly(producer: Any, topic: str, ids: range) -> list[int]:
    """Each record is a batch; returns the offset that each was acknowledged with."""
    offsets: dict[int, int] = {}

    def sent(error: object, message: Any) -> None:
        assert error is None, error
        offsets[int(message.value())] = message.offset()

    for number in ids:
        producer.produce(topic, str(number), headers={"dedup-id": str(number)}, partition=0, on_delivery=sent)
        assert producer.flush(PATIENCE_S) == 0
    return [offsets[number] for number in ids]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["tcp", "tls", "shm"])
def test_an_id_is_written_once_over_any_transport(tmp_path: Path, first: str) -> None:
    """Each transport sends some ids before the others and some after them."""
    authority, port = Authority(), free_port()
    config = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}",
        "ssl.keystore.location": str(authority.issue("broker").write(tmp_path / "keystore.pem")),
    }
    ca = {"security.protocol": "SSL", "ssl.ca.location": str(authority.write(tmp_path / "ca.pem"))}
    with Broker(tmp_path / "data", config=config) as broker:
        topic = create(broker, CONFIG)
        producers = {
            "tcp": Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True}),
            "tls": Producer({"bootstrap.servers": f"127.0.0.1:{port}", **ca}),
            "shm": mqd.Producer({"bootstrap.servers": broker.bootstrap, "transport": "shm"}),
        }
        names = [first, *(name for name in producers if name != first)]
        for index, name in enumerate(names):
            begin = 20 * index
            expected = send_singly(producers[name], topic, range(begin, begin + 20))
            for other in names:
                assert send_singly(producers[other], topic, range(begin, begin + 20)) == expected, (name, other)
        producers["shm"].close()
        assert [value for _, value in values(broker, topic)] == [str(number) for number in range(60)]
        assert deduplicated_count(broker) == 3 * 60
