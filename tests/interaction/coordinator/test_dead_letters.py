"""Dead letters of share groups (KIP-1191) on a running broker, with librdkafka's ShareConsumer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Consumer, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.crash.workload import wait_until
from tests.interaction.coordinator.test_share_groups import SECONDS, Shared, committed, polled
from tests.interaction.share_members import configure_group, lag

ENABLED = {"errors.deadletterqueue.group.enable": "true"}
REJECTED, EXHAUSTED = "Offset rejected by client.", "Offset delivery count exceeded the threshold."

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Dead(Shared):
    """A share group whose dead letters go to the topic `letters`."""

    def __init__(self, bootstrap: str, partitions: int = 1) -> None:
        super().__init__(bootstrap, partitions)
        self.letters = f"dlq.{self.topic}"

    def create_letters(self, partitions: int = 1, **config: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        topic = NewTopic(self.letters, partitions, config={**ENABLED, **config})
        admin.create_topics([topic])[self.letters].result(SECONDS)

    def name_letters(self) -> None:
        self.configure("errors.deadletterqueue.topic.name", self.letters)

    def configure(self, name: str, value: str) -> None:
        configure_group(self.bootstrap, self.group, name, value)

    def answer(self, kinds: dict[str, AcknowledgeType], count: int) -> None:
        """Acknowledges this many deliveries; records without a type are accepted."""
        with self.consumer("explicit") as consumer:
            while count > 0:
                for value, message in polled(consumer):
                    count -= 1
                    consumer.acknowledge(message, kinds.get(value, AcknowledgeType.ACCEPT))
                committed(consumer)

    def read(self, count: int) -> list[Message]:
        """The committed letters: this many, and none after them."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": f"reader-{self.topic}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([self.letters])
        found: list[Message] = []
        deadline = time.monotonic() + SECONDS
        try:
            while len(found) < count and time.monotonic() < deadline:
                found += [one for one in consumer.consume(100, 0.5) if one.error() is None]
            found += [one for one in consumer.consume(1, 0.5) if one.error() is None]
        finally:
            consumer.close()
        assert len(found) == count, [fields(one) for one in found]
        return found


def fields(message: Message) -> dict[str, str]:
    prefix = "__dlq.errors."
    return {
        name.removeprefix(prefix): value.decode() for name, value in message.headers() or () if name.startswith(prefix)
    }


@pytest.fixture
def dead(shared_broker: Broker) -> Iterator[Dead]:
    yield Dead(shared_broker.bootstrap)


def test_each_rejected_or_exhausted_record_has_one_letter(dead: Dead) -> None:
    dead.create_letters()
    dead.name_letters()
    dead.produce("good", "rejected", "exhausted")
    dead.answer({"rejected": AcknowledgeType.REJECT, "exhausted": AcknowledgeType.RELEASE}, 2 + 5)
    letters = sorted((fields(one) for one in dead.read(2)), key=lambda one: one["offset"])
    common = {"topic": dead.topic, "partition": "0", "group": dead.group}
    assert letters == [
        {**common, "offset": "1", "delivery.count": "1", "message": REJECTED},
        {**common, "offset": "2", "delivery.count": "5", "message": EXHAUSTED},
    ]


def test_a_copied_record_keeps_its_key_value_and_headers(dead: Dead) -> None:
    dead.create_letters(partitions=2)
    dead.configure("errors.deadletterqueue.copy.record.enable", "true")
    dead.name_letters()
    producer = Producer({"bootstrap.servers": dead.bootstrap, "compression.type": "gzip", "linger.ms": 50})
    for index in range(3):
        producer.produce(
            dead.topic, f"value-{index}", f"key-{index}", headers={"own": f"{index}", "traceparent": TRACE}
        )
    assert producer.flush(SECONDS) == 0
    dead.answer({"value-0": AcknowledgeType.REJECT, "value-2": AcknowledgeType.REJECT}, 3)
    letters = sorted(dead.read(2), key=lambda one: one.key())
    assert [(one.key(), one.value(), one.partition()) for one in letters] == [
        (b"key-0", b"value-0", 0),
        (b"key-2", b"value-2", 0),
    ]
    assert [dict(one.headers())["own"] for one in letters] == [b"0", b"2"]
    assert {dict(one.headers())["traceparent"] for one in letters} == {TRACE.encode()}, "a trace continues"


def test_letters_wait_for_their_topic(dead: Dead) -> None:
    dead.name_letters()
    dead.produce("rejected")
    dead.answer({"rejected": AcknowledgeType.REJECT}, 1)
    dead.create_letters()
    (letter,) = dead.read(1)
    assert fields(letter)["offset"] == "0"


@pytest.mark.slow
def test_letters_wait_while_their_topic_is_deleted(dead: Dead) -> None:
    dead.create_letters()
    dead.name_letters()
    dead.produce("first")
    dead.answer({"first": AcknowledgeType.REJECT}, 1)
    dead.read(1)
    admin = AdminClient({"bootstrap.servers": dead.bootstrap})
    admin.delete_topics([dead.letters])[dead.letters].result(SECONDS)
    dead.produce("second", "good")
    dead.answer({"second": AcknowledgeType.REJECT}, 2)
    assert unfinished(dead) == [1], "its letter waits, and a record after it does not"
    dead.create_letters()
    (letter,) = dead.read(1)
    assert fields(letter)["offset"] == "1", "the first letter went with its topic"
    wait_until(lambda: unfinished(dead) == [0], SECONDS, lambda: "the record is not archived")


@pytest.mark.slow
def test_a_rejected_dead_letter_has_no_letter_in_its_own_topic(dead: Dead) -> None:
    dead.create_letters()
    dead.name_letters()
    dead.topic = dead.letters
    dead.produce("rejected")
    dead.answer({"rejected": AcknowledgeType.REJECT}, 1)
    wait_until(lambda: unfinished(dead) == [0], SECONDS, lambda: "the record is not archived")
    (record,) = dead.read(1)
    assert record.value() == b"rejected" and not fields(record)


def unfinished(dead: Dead) -> list[int]:
    """Unfinished letters by partition; empty: no host reports the metric."""
    host, _, port = dead.bootstrap.rpartition(":")
    return lag([(host, int(port))], dead.group)


def test_a_topic_that_takes_no_letters_is_refused(dead: Dead) -> None:
    admin = AdminClient({"bootstrap.servers": dead.bootstrap})
    admin.create_topics([NewTopic(dead.letters, 1)])[dead.letters].result(SECONDS)
    with pytest.raises(KafkaException, match="takes no dead letters"):
        dead.name_letters()
    with pytest.raises(KafkaException, match=r"must begin with dlq\."):
        dead.configure("errors.deadletterqueue.topic.name", "letters")
    with pytest.raises(KafkaException, match="must not begin with __"):
        dead.configure("errors.deadletterqueue.topic.name", "__letters")
