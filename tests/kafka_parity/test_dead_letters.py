"""Dead letters of share groups (KIP-1191) compared with Apache Kafka 4.4, the first with them: the
same records, the same failures, the same letters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from confluent_kafka import AcknowledgeType, Consumer, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from perf.peers.apache_kafka import POM
from perf.peers.peer import Unavailable
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.interaction.share_members import configure_group
from tests.polling import eventually

pytestmark = pytest.mark.slow

SECONDS = 90.0
TOPIC, PARTITIONS, RECORDS, LIMIT = "work", 2, 40, 2
REJECTED, RELEASED = "7", "3"  # last digits of values that no worker can process, and that fail each time
OWN_HEADER = ("kind", b"resize")
CONFIG = {
    "group.share.delivery.count.limit": str(LIMIT),
    "group.share.min.record.lock.duration.ms": "1000",
    "errors.deadletterqueue.auto.create.topics.enable": "true",
}


class Letter(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    is_new: bool  # its timestamp is the letter's, not the record's


class DeadLetters:
    """Of the groups of one broker."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap})
        self._sent_ms = int(time.time() * 1000) - 3_600_000

    def send(self) -> None:
        self._admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(SECONDS)
        producer = Producer({"bootstrap.servers": self._bootstrap})
        for number in range(RECORDS):
            producer.produce(
                TOPIC,
                f"{number}",
                f"key-{number}",
                number % PARTITIONS,
                headers=[OWN_HEADER],
                timestamp=self._sent_ms + number,
            )
        assert producer.flush(SECONDS) == 0

    def work(self, group: str, topic: str, copy: bool) -> list[Letter]:
        """Until each record is accepted or has a letter in `topic`."""
        configure_group(self._bootstrap, group, "share.auto.offset.reset", "earliest")
        configure_group(self._bootstrap, group, "errors.deadletterqueue.topic.name", topic)
        configure_group(self._bootstrap, group, "errors.deadletterqueue.copy.record.enable", str(copy).lower())
        settings = {"bootstrap.servers": self._bootstrap, "group.id": group}
        worker = ShareConsumer({**settings, "share.acknowledgement.mode": "explicit"})
        worker.subscribe([TOPIC])
        expected = {f"{number}" for number in range(RECORDS)}
        ended: set[str] = set()
        deadline = time.monotonic() + SECONDS
        while ended != expected:
            assert time.monotonic() < deadline, f"never ended: {sorted(expected - ended)}"
            for message in worker.poll(0.5):
                assert message.error() is None, message.error()
                value = message.value().decode()
                if value.endswith(RELEASED):
                    kind = AcknowledgeType.RELEASE
                else:
                    kind = AcknowledgeType.REJECT if value.endswith(REJECTED) else AcknowledgeType.ACCEPT
                worker.acknowledge(message, kind)
                if kind != AcknowledgeType.RELEASE or message.delivery_count() == LIMIT:
                    ended.add(value)
            worker.commit_sync(SECONDS)
        letters = self._read(topic, sum(value.endswith((REJECTED, RELEASED)) for value in expected))
        worker.close()
        return letters

    def _read(self, topic: str, count: int) -> list[Letter]:
        reader = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": f"{topic}-reader",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "topic.metadata.refresh.interval.ms": 500,
            }
        )
        reader.subscribe([topic])
        found: list[Letter] = []

        def read_all() -> bool:
            for message in reader.consume(100, 0.5):
                if message.error() is None:
                    is_new = message.timestamp()[1] > self._sent_ms + 1_800_000
                    place, headers = message.partition(), tuple(message.headers())
                    found.append(Letter(place, message.key(), message.value(), headers, is_new))
            return len(found) >= count

        eventually(read_all, lambda: f"{len(found)} of {count} letters", SECONDS)
        assert not [one for one in reader.consume(100, 2.0) if one.error() is None], "no record has two letters"
        reader.close()
        return found

    def config(self, topic: str) -> dict[str, str]:
        """The configuration of the topic created by the broker."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        found = self._admin.describe_configs([resource])[resource].result(SECONDS)
        return {name: found[name].value for name in ("errors.deadletterqueue.group.enable", "message.timestamp.type")}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeadLetters, DeadLetters]]:
    """Apache Kafka's and mqd's."""
    directory = tmp_path_factory.mktemp("letters")
    try:
        tools = KafkaTools(directory, POM)  # newer than the one of the other comparisons
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka 4.4 cannot be had: {reason}")
    settings = {name.replace(".", "_"): value for name, value in CONFIG.items()}
    with tools.broker(**settings) as bootstrap, Broker(directory / "mqd", workers=1, config=CONFIG) as broker:
        upgraded = tools.features(bootstrap, "upgrade", "--feature", "share.version=2")
        assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr
        both = DeadLetters(bootstrap), DeadLetters(broker.bootstrap)
        for side in both:
            side.send()
        yield both


def without(letters: list[Letter], header: tuple[str, bytes]) -> list[Letter]:
    return [one._replace(headers=tuple(pair for pair in one.headers if pair != header)) for one in letters]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("copy", [False, True], ids=["headers", "copied"])
def test_letters_are_those_of_apache_kafka(sides: tuple[DeadLetters, DeadLetters], copy: bool) -> None:
    name = "copied" if copy else "headers"
    theirs, ours = (sorted(side.work(name, f"dlq.{name}", copy)) for side in sides)
    assert without(ours, OWN_HEADER) == theirs, "Apache Kafka does not copy the record's headers"
    assert [OWN_HEADER in one.headers for one in ours] == [copy] * len(ours), "mqd does"


@pytest.mark.timeout(300)
def test_the_topic_created_for_letters(sides: tuple[DeadLetters, DeadLetters]) -> None:
    theirs, ours = ((side.work("made", "dlq.made", True), side.config("dlq.made"))[1] for side in sides)
    assert ours == theirs
