"""docs/delivery.md: its examples are extracted from the page, run, killed, run again, and their
results counted; the page's exclusions are demonstrated.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

from tests.broker import Broker
from tests.interaction.traffic import batch, create_topic, eventually, produce
from tests.interaction.transactional import RawProducer, connect, fetch_committed, read_committed, topic_of
from tests.polling import PATIENCE_S

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "delivery.md").read_text()
EXAMPLES = {match[1]: match[2] for match in re.finditer(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)}
EVERY = {f"payment-{number}" for number in range(1000)}
KILLED_AFTER = 150


class Example:
    """Runs one process; returns its output."""

    def __init__(self, directory: Path, name: str, broker: Broker) -> None:
        path = directory / name
        path.write_text(EXAMPLES[name])
        self.errors = directory / f"{name}.stderr"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "MQD_BOOTSTRAP": broker.bootstrap},
            )

    def lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        found = []
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, self.errors.read_text()
            found.append(line.strip())
        return found

    def kill(self) -> list[str]:
        """Returns the rest of its output."""
        assert self.process.stdout is not None
        self.process.kill()
        rest = self.process.stdout.read().split("\n")
        self.process.wait(10)
        self.process.stdout.close()
        return [line for line in rest if line in EVERY]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("delivery")
    with Broker(
        directory / "data",
        config={"num.partitions": "4", "group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"},
    ) as running:
        filling = Example(directory, "produce.py", running)
        assert filling.process.wait(PATIENCE_S) == 0, filling.errors.read_text()
        assert filling.process.stdout is not None
        filling.process.stdout.close()
        yield running


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Iterator[Callable[[str], Example]]:
    started: list[Example] = []

    def start(name: str) -> Example:
        started.append(Example(tmp_path, name, broker))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


def end_membership(broker: Broker, group: str) -> None:
    """A killed member is only missed after its session timeout; removing it as an administrator is
    faster. Requests that it sent before its end and that the broker has not read yet are refused
    from then on.
    """
    from mqd.protocol.messages import DescribeGroupsRequest, LeaveGroupRequest

    with connect(broker) as kafka:
        (found,) = kafka.call(15, 5, DescribeGroupsRequest(groups=[group])).groups
        for member in found.members:
            kafka.call(
                13,
                5,
                LeaveGroupRequest(
                    group_id=group, members=[LeaveGroupRequest.MemberIdentity(member_id=member.member_id)]
                ),
            )


def committed(broker: Broker, group: str) -> int:
    """How many of the records the group has committed."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    found = consumer.committed([TopicPartition("payments", index) for index in range(4)], timeout=60)
    consumer.close()
    return sum(max(0, one.offset) for one in found)


def test_the_page_has_the_examples() -> None:
    assert EXAMPLES.keys() == {"produce.py", "at_most_once.py", "at_least_once.py", "exactly_once.py"}


def test_at_most_once(broker: Broker, run: Callable[[str], Example]) -> None:
    first = run("at_most_once.py")
    done = first.lines(KILLED_AFTER) + first.kill()
    end_membership(broker, "at-most-once")
    skipped = committed(broker, "at-most-once") - len(done)
    assert 0 <= skipped <= 100
    second = run("at_most_once.py")
    done += second.lines(1000 - len(done) - skipped) + second.kill()
    assert max(Counter(done).values()) == 1 and len(done) == 1000 - skipped


def test_at_least_once(broker: Broker, run: Callable[[str], Example]) -> None:
    first = run("at_least_once.py")
    done = first.lines(KILLED_AFTER) + first.kill()
    end_membership(broker, "at-least-once")
    again = len(done) - committed(broker, "at-least-once")
    assert 0 <= again <= 200
    second = run("at_least_once.py")
    rest = second.lines(1000 - len(done) + again) + second.kill()
    assert set(done + rest) == EVERY
    assert len(set(done) & set(rest)) == again, "what was under way, and no more, is done again"


def test_exactly_once(broker: Broker, run: Callable[[str], Example]) -> None:
    with connect(broker) as kafka:
        create_topic(kafka, "receipts", 3)
    for count in (130, 70, 250):  # killed within a transaction, if there is one
        example = run("exactly_once.py")
        example.lines(count)
        example.kill()
        end_membership(broker, "receipts")
    run("exactly_once.py")
    eventually(lambda: committed(broker, "receipts") == 1000, "all payments to be answered")
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition("receipts", index, OFFSET_BEGINNING) for index in range(3)])
    found: list[str] = []

    def read() -> bool:
        found.extend(
            message.value().decode() for message in consumer.consume(500, timeout=0.2) if message.error() is None
        )
        return len(found) >= 1000

    eventually(read, lambda: f"{len(found)} receipts")
    found += [message.value().decode() for message in consumer.consume(500, timeout=0.3) if message.error() is None]
    consumer.close()
    assert Counter(found) == Counter(f"receipt for {payment}" for payment in EVERY)


# -- exclusions ----------------------------------------------------------------------------------


def test_readers_stop_before_the_oldest_open_transaction(broker: Broker) -> None:
    """Two transactions and a plain record, interleaved in a partition: they become visible in
    offset order when the first has ended.
    """
    with connect(broker) as kafka:
        topic = topic_of(kafka)
        first, second = RawProducer(kafka), RawProducer(kafka)
        first.init()
        second.init()
        assert first.produce(topic, 0, b"first 1") == 0
        assert second.produce(topic, 0, b"second 1") == 0
        assert first.produce(topic, 0, b"first 2") == 0
        assert produce(kafka, topic, 0, batch(b"plain")).error_code == 0
        assert second.end(True) == 0
        assert fetch_committed(kafka, topic, 0).last_stable_offset == 0 and read_committed(kafka, topic, 0) == []
        assert first.end(True) == 0
        assert read_committed(kafka, topic, 0) == [b"first 1", b"second 1", b"first 2", b"plain"]


def test_writers_do_not_conflict(broker: Broker) -> None:
    """Both have read the same value, and both commit."""
    with connect(broker) as kafka:
        topic = topic_of(kafka)
        one, other = RawProducer(kafka), RawProducer(kafka)
        for producer in (one, other):
            producer.init()
            assert read_committed(kafka, topic, 0) == []
            assert producer.produce(topic, 0, b"I am the only one") == 0
        assert read_committed(kafka, topic, 0) == [], "nor does a producer see its own before the commit"
        assert (one.end(True), other.end(True)) == (0, 0)
        assert len(read_committed(kafka, topic, 0)) == 2


def test_a_member_removed_from_the_group_cannot_commit(broker: Broker) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "put-out",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["payments"])
    message = eventually(lambda: consumer.poll(0.1), "a payment")
    metadata = consumer.consumer_group_metadata()
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "put-out"})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    end_membership(broker, "put-out")
    with pytest.raises(KafkaException) as refused:
        producer.send_offsets_to_transaction(
            [TopicPartition("payments", message.partition(), message.offset() + 1)], metadata, PATIENCE_S
        )
    assert refused.value.args[0].txn_requires_abort()
    producer.abort_transaction(PATIENCE_S)
    consumer.close()
    assert committed(broker, "put-out") == 0
