"""Random programs of one consumer over shared memory, checked against a model: which records are
returned in which order, its positions and committed offsets, and where the next owner begins. One
seed, one program.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator

import confluent_kafka
import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import Consumer
from tests.broker import Broker
from tests.polling import PATIENCE_S

SECONDS = PATIENCE_S
PARTITIONS = 3
QUICK = 12


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp("programs"), config={"log.flush.on.ack": "false", "log.segment.bytes": "65536"}
    ) as broker:
        yield broker


@pytest.fixture(scope="module")
def topic(broker: Broker) -> str:
    """Some thousand records in segments of 64 KiB, with compressed batches; every third batch
    belongs to an aborted transaction.
    """
    name = uuid.uuid4().hex
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(SECONDS)
    rng = random.Random(1)
    for codec in ("none", "zstd", "lz4"):
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "transactional.id": name + codec,
                "compression.type": codec,
                "linger.ms": 1,
            }
        )
        producer.init_transactions(SECONDS)
        for number in range(6):
            producer.begin_transaction()
            good = number % 3 != 1
            for _ in range(rng.randrange(50, 400)):
                producer.produce(
                    name,
                    (b"good" if good else b"bad ") + bytes(rng.randrange(200)),
                    partition=rng.randrange(PARTITIONS),
                )
            producer.flush(SECONDS)
            producer.commit_transaction(SECONDS) if good else producer.abort_transaction(SECONDS)
    return name


@pytest.fixture(scope="module")
def log(broker: Broker, topic: str) -> list[list[int]]:
    """The readable offsets by partition, as librdkafka reads them."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "truth", "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]
    ends = 0
    while ends < PARTITIONS:
        message = consumer.poll(SECONDS)
        if message.error() is not None:
            assert message.error().code() == KafkaError._PARTITION_EOF
            ends += 1
        else:
            assert message.value().startswith(b"good")
            found[message.partition()].append(message.offset())
    consumer.close()
    assert all(len(offsets) > 100 for offsets in found)
    return found


class Program:
    def __init__(self, seed: int, broker: Broker, topic: str, log: list[list[int]]) -> None:
        self.rng = random.Random(seed)
        self.topic, self.log = topic, log
        self.group = uuid.uuid4().hex
        self.broker = broker
        self.consumer = self.open()
        self.next: dict[int, int] = {}  # where each assigned partition continues
        self.position: dict[int, int] = {}
        self.stored: dict[int, int] = {}  # what commit() would commit: a seek does not change it, as in librdkafka
        self.committed: dict[int, int] = {}
        self.paused: set[int] = set()

    def open(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "transport": "shm",
            }
        )

    def readable(self) -> int:
        return sum(
            len([offset for offset in self.log[index] if offset >= begin])
            for index, begin in self.next.items()
            if index not in self.paused
        )

    def check_records(self, index: int, offsets: list[int]) -> None:
        assert index in self.next and index not in self.paused
        expected = [offset for offset in self.log[index] if offset >= self.next[index]][: len(offsets)]
        assert offsets == expected, f"partition {index} from {self.next[index]} on"
        self.next[index] = self.position[index] = self.stored[index] = offsets[-1] + 1

    def see(self, messages: list) -> None:
        for message in messages:
            assert message.error() is None and message.value().startswith(b"good")
            self.check_records(message.partition(), [message.offset()])

    # -- steps -------------------------------------------------------------------------------------

    def poll(self) -> None:
        if self.readable():
            self.see([self.consumer.poll(SECONDS)])
        else:
            assert self.consumer.poll(0.02) is None

    def consume(self) -> None:
        count = min(self.rng.choice((1, 7, 100, 3000)), self.readable())
        messages = self.consumer.consume(count, SECONDS) if count else self.consumer.consume(5, 0.02)
        assert len(messages) == count
        self.see(messages)

    def consume_batch(self) -> None:
        if not self.readable():
            assert self.consumer.consume_batch(10, 0.02) is None
            return
        batch = self.consumer.consume_batch(self.rng.choice((1, 10, 1000)), SECONDS)
        assert all(value.startswith(b"good") for value in batch.values)
        self.check_records(batch.partition, batch.offsets.tolist())

    def seek(self) -> None:
        if self.next:
            index = self.rng.choice(sorted(self.next))
            offset = self.rng.choice((OFFSET_BEGINNING, OFFSET_END, self.rng.randrange(self.log[index][-1] + 1)))
            self.consumer.seek(TopicPartition(self.topic, index, offset))
            self.next[index] = {OFFSET_BEGINNING: 0, OFFSET_END: 1 << 60}.get(offset, offset)
            self.position.pop(index, None)

    def pause(self) -> None:
        if self.next:
            index = self.rng.choice(sorted(self.next))
            self.consumer.pause([TopicPartition(self.topic, index)])
            self.paused.add(index)

    def resume(self) -> None:
        if self.paused:
            index = self.rng.choice(sorted(self.paused))
            self.consumer.resume([TopicPartition(self.topic, index)])
            self.paused.discard(index)

    def assign(self) -> None:
        chosen = self.rng.sample(range(PARTITIONS), self.rng.randrange(1, PARTITIONS + 1))
        self.consumer.assign([TopicPartition(self.topic, index) for index in chosen])
        self.next = {index: self.committed.get(index, 0) for index in chosen}
        self.position, self.stored, self.paused = {}, {}, set()

    def unassign_one(self) -> None:
        if len(self.next) > 1:
            index = self.rng.choice(sorted(self.next))
            self.consumer.incremental_unassign([TopicPartition(self.topic, index)])
            for state in (self.next, self.position, self.stored):
                state.pop(index, None)
            self.paused.discard(index)

    def commit(self) -> None:
        if self.stored:
            self.consumer.commit(asynchronous=False)
            self.committed.update(self.stored)

    def look(self) -> None:
        here = [TopicPartition(self.topic, index) for index in sorted(self.next)]
        assert [one.offset for one in self.consumer.position(here)] == [
            self.position.get(one.partition, OFFSET_INVALID) for one in here
        ]
        assert [one.offset for one in self.consumer.committed(here, SECONDS)] == [
            self.committed.get(one.partition, OFFSET_INVALID) for one in here
        ]

    def reopen(self) -> None:
        self.consumer.close()
        self.consumer = self.open()
        self.assign()

    def run(self, steps: int) -> None:
        often = (self.poll, self.poll, self.consume, self.consume_batch, self.consume_batch)
        seldom = (
            self.seek,
            self.pause,
            self.resume,
            self.resume,
            self.commit,
            self.look,
            self.assign,
            self.unassign_one,
        )
        self.assign()
        for number in range(steps):
            step: Callable[[], None] = self.rng.choice(often if self.rng.random() < 0.6 else seldom)
            step()
            if number % 40 == 39:
                self.reopen()
        self.consumer.close()


@pytest.mark.parametrize("seed", range(QUICK))
def test_program(broker: Broker, topic: str, log: list[list[int]], seed: int) -> None:
    Program(seed, broker, topic, log).run(60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_longer_program(broker: Broker, topic: str, log: list[list[int]], seed: int) -> None:
    Program(seed, broker, topic, log).run(400)
