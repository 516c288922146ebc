"""share.fifo on a running broker: the records of a key one after the other, with librdkafka's
ShareConsumer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Message, Producer

from tests.broker import Broker
from tests.interaction.coordinator.test_share_groups import SECONDS, Shared, committed, polled
from tests.interaction.share_members import configure_group

KEYS = 5


@pytest.fixture
def shared(shared_broker: Broker) -> Iterator[Shared]:
    yield Shared(shared_broker.bootstrap, partitions=1)


def send(shared: Shared, count: int, codec: str = "none", value_bytes: int = 0) -> None:
    """In one batch if possible. Record n has the key n modulo KEYS, and as the header `half` whether n is odd."""
    producer = Producer({"bootstrap.servers": shared.bootstrap, "linger.ms": 300, "compression.type": codec})
    for number in range(count):
        value = f"{number} {os.urandom(value_bytes).hex()}"
        producer.produce(shared.topic, value, str(number % KEYS), headers={"half": str(number % 2)})
    assert producer.flush(SECONDS) == 0


def numbers(found: list[tuple[str, Message]]) -> list[int]:
    return [int(value.split()[0]) for value, _ in found]


def drain(shared: Shared, count: int, key_count: int) -> None:
    """Two members accept `count` records; one in five is released the first time. F1."""
    done: dict[int, list[int]] = {key: [] for key in range(key_count)}
    deadline = time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(shared.consumer("explicit")) for _ in range(2)]
        held: list[dict[int, Message]] = [{}, {}]
        while sum(map(len, done.values())) < count:
            assert time.monotonic() < deadline, done
            for index, member in enumerate(members):
                for message in member.poll(0.1):
                    assert message.error() is None
                    number = int(message.value().split()[0])
                    in_flight = {other % key_count for holding in held for other in holding}
                    assert number % key_count not in in_flight, "two of a key are in flight"
                    assert number == number % key_count + key_count * len(done[number % key_count]), "out of order"
                    held[index][number] = message
            for index, member in enumerate(members):
                if not held[index]:
                    continue
                for number, message in held[index].items():
                    released = number % 5 == 2 and message.delivery_count() < 2 + (key_count == 2)
                    member.acknowledge(message, AcknowledgeType.RELEASE if released else AcknowledgeType.ACCEPT)
                    if not released:
                        done[number % key_count].append(number)
                held[index] = {}
                committed(member)
    assert sorted(number for found in done.values() for number in found) == list(range(count))


@pytest.mark.parametrize(("codec", "value_bytes"), [("none", 0), ("zstd", 400)])
def test_records_of_a_key_come_one_after_the_other(shared: Shared, codec: str, value_bytes: int) -> None:
    """With 400 bytes each, a batch is larger than what the reactor decompresses itself."""
    configure_group(shared.bootstrap, shared.group, "share.fifo", "key")
    send(shared, 60, codec, value_bytes)
    drain(shared, 60, KEYS)


def test_the_setting_changes_while_records_are_held(shared: Shared) -> None:
    send(shared, 20)
    with shared.consumer("explicit") as consumer:
        found = polled(consumer)
        assert numbers(found) == list(range(20)), "without share.fifo"
        configure_group(shared.bootstrap, shared.group, "share.fifo", "header:half")
        for _, message in found:
            consumer.acknowledge(message, AcknowledgeType.RELEASE)
        committed(consumer)
    drain(shared, 20, 2)
