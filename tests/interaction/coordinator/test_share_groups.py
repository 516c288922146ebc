"""Share groups (KIP-932) on a running broker, with librdkafka's ShareConsumer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.interaction.share_members import begin_at_first_record, configure_group
from tests.polling import PATIENCE_S

SECONDS = PATIENCE_S
PARTITIONS = 2


class Shared:
    """A topic, and a group that begins at its first record."""

    def __init__(self, bootstrap: str, partitions: int = PARTITIONS, config: dict[str, str] | None = None) -> None:
        self.bootstrap, self.partitions = bootstrap, partitions
        self.group = self.topic = f"shared-{uuid.uuid4().hex[:10]}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(self.topic, partitions, config=config or {})])[self.topic].result(SECONDS)
        begin_at_first_record(bootstrap, self.group)

    def produce(self, *values: str) -> None:
        """Round-robin over the partitions."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for index, value in enumerate(values):
            producer.produce(self.topic, value, partition=index % self.partitions)
        assert producer.flush(SECONDS) == 0

    def consumer(self, acknowledgement: str) -> ShareConsumer:
        consumer = ShareConsumer(
            {"bootstrap.servers": self.bootstrap, "group.id": self.group, "share.acknowledgement.mode": acknowledgement}
        )
        consumer.subscribe([self.topic])
        return consumer


@pytest.fixture
def shared(shared_broker: Broker) -> Iterator[Shared]:
    yield Shared(shared_broker.bootstrap)


def polled(consumer: ShareConsumer) -> list[tuple[str, Message]]:
    """The next records."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        messages = [(message, message.error()) for message in consumer.poll(0.5)]
        assert not [error for _, error in messages if error is not None and not error.retriable()], messages
        if found := [(message.value().decode(), message) for message, error in messages if error is None]:
            return found
    raise AssertionError("no record came")


def committed(consumer: ShareConsumer) -> None:
    outcome = consumer.commit_sync(SECONDS)
    assert set(outcome.values()) <= {None}, outcome


def take(consumer: ShareConsumer, count: int, *kinds: dict[str, AcknowledgeType]) -> list[tuple[str, int]]:
    """(value, delivery count) of this many deliveries. The n-th delivery of a record is
    acknowledged with the n-th of `kinds`; other records are accepted.
    """
    found: list[tuple[str, int]] = []
    while len(found) < count:
        for value, message in polled(consumer):
            delivery = message.delivery_count()
            found.append((value, delivery))
            kind = kinds[delivery - 1] if delivery <= len(kinds) else {}
            consumer.acknowledge(message, kind.get(value, AcknowledgeType.ACCEPT))
        committed(consumer)
    return sorted(found)


def test_explicit_acknowledgements(shared: Shared) -> None:
    shared.produce("accepted-0", "accepted-1", "released", "rejected")
    with shared.consumer("explicit") as consumer:
        first = {"released": AcknowledgeType.RELEASE, "rejected": AcknowledgeType.REJECT}
        assert take(consumer, 5, first) == [
            ("accepted-0", 1),
            ("accepted-1", 1),
            ("rejected", 1),
            ("released", 1),
            ("released", 2),
        ]
        shared.produce("next-0", "next-1")
        assert take(consumer, 2) == [("next-0", 1), ("next-1", 1)]
    shared.produce("last-0", "last-1")
    with shared.consumer("explicit") as consumer:  # a member of the same group
        assert take(consumer, 2) == [("last-0", 1), ("last-1", 1)]


def test_a_released_record_waits_for_its_backoff(shared: Shared) -> None:
    configure_group(shared.bootstrap, shared.group, "share.retry.backoff.ms", "300")
    shared.produce("released")
    with shared.consumer("explicit") as consumer:
        ((_, message),) = polled(consumer)
        for delivery, backoff_s in ((2, 0.3), (3, 0.6)):
            released = time.monotonic()
            consumer.acknowledge(message, AcknowledgeType.RELEASE)
            committed(consumer)
            ((_, message),) = polled(consumer)
            assert time.monotonic() - released > backoff_s - 0.001  # the broker counts in whole milliseconds
            assert message.delivery_count() == delivery
        released = time.monotonic()
    with shared.consumer("explicit") as consumer:  # the group had no members meanwhile
        assert take(consumer, 1) == [("released", 4)]
        assert time.monotonic() - released > 1.2 - 0.001


def test_implicit_acknowledgements(shared: Shared) -> None:
    shared.produce("first-0", "first-1")
    for values in (["first-0", "first-1"], ["last-0", "last-1"]):
        with shared.consumer("implicit") as consumer:
            found: list[str] = []
            while len(found) < len(values):
                found += [value for value, _ in polled(consumer)]
            assert sorted(found) == values
            committed(consumer)
        shared.produce("last-0", "last-1")


def test_a_member_that_leaves_releases_its_records(shared: Shared) -> None:
    shared.produce("held")
    with shared.consumer("explicit") as first:
        assert [value for value, _ in polled(first)] == ["held"]
    with shared.consumer("explicit") as second:
        assert take(second, 1) == [("held", 2)]
