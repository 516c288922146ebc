"""share.fifo on a running broker: the records of a key are delivered one after the other, with
librdkafka's ShareConsumer.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import AcknowledgeType, Message, Producer

from tests.broker import Broker
from tests.compat.programs.program import Program, kill_process
from tests.crash.workload import wait_until
from tests.interaction.coordinator import fifo_members
from tests.interaction.coordinator.test_share_groups import SECONDS, Shared, committed, polled
from tests.interaction.share_members import configure_group, lag

KEYS = 5
CONFIG = {
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "3000",
    "group.share.min.session.timeout.ms": "3000",
    "group.share.session.timeout.ms": "5000",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
    "group.share.delivery.count.limit": "10",  # kills must not exhaust a record's deliveries
}
KILLED = ("mqd-worker-0", "member", "mqd-worker-1", "member", "mqd-acceptor", "member", "mqd-worker-0", "broker")


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
    """Two members accept `count` records; one in five is released the first time. Checks F1."""
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
    """With 400 bytes per record, a batch is larger than the reactor decompresses itself."""
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


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_members_and_workers_are_killed(tmp_path: Path) -> None:
    count, key_count = 6_000, 60
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path / "data", workers=2, config=CONFIG))
        shared = Shared(broker.bootstrap, partitions=4)
        configure_group(broker.bootstrap, shared.group, "share.fifo", "key")
        producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.type": "lz4", "linger.ms": 50})
        counts: collections.Counter[str] = collections.Counter()
        for number in range(count):
            key = f"k{number % key_count}"
            producer.produce(shared.topic, f"{key}:{counts[key]}", key)
            counts[key] += 1
        assert producer.flush(SECONDS) == 0
        module = [sys.executable, "-m", "tests.interaction.coordinator.fifo_members"]
        members = [
            Program([*module, broker.bootstrap, shared.group, shared.topic, client], tmp_path / f"{client}-{number}")
            for number, client in enumerate(("librdkafka", "auto", "tcp"))
        ]
        outputs = [member.output for member in members]
        for member in members:
            stack.enter_context(member)
        kills_ns: list[int] = []

        def state() -> str:
            return "\n".join([*(member.tail() for member in members), broker.logs()])

        for index, name in enumerate(KILLED):
            before = len(fifo_members.accepted(outputs))
            wait_until(lambda: len(fifo_members.accepted(outputs)) > before + 200, SECONDS, state)  # noqa: B023
            kills_ns.append(time.monotonic_ns())
            if name == "member":
                members[index % len(members)].restart()
            else:
                kill_process(broker, name)
        address = [("127.0.0.1", broker.port)]
        wait_until(lambda: lag(address, shared.group) == [0] * shared.partitions, SECONDS, state)
        print(fifo_members.check(outputs, counts, kills_ns, spared_s=6))
