"""Transactional producers of a compacted topic, some of whose transactions are aborted, while the
cleaner runs and workers are killed: at every moment readers of committed records end with the last
committed value of each key, including a reader of the files that pauses while they are compacted;
none ever reads a record of an aborted transaction.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

import mqd
from mqd.protocol.records import Record
from tests.broker import Broker
from tests.broker_files import bytes_of
from tests.crash.processes import kill_and_wait
from tests.interaction.traffic import eventually
from tests.interaction.transactional import (
    RETRIABLE_AT_START,
    RawProducer,
    connect,
    fetch_committed,
    producers,
    read_committed_records,
    topic_of,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S

PARTITIONS, KEYS, SEGMENT_BYTES = 2, 25, 4096
# slow enough to be interrupted while it runs
CONFIG = {"log.cleaner.backoff.ms": "20", "log.cleaner.io.max.bytes.per.second": "1000000"}
COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
    "index.interval.bytes": "512",
}


class Life:
    """`last`: by partition, the last committed value of each key, in log order. A value begins with
    the number of its transaction.
    """

    def __init__(self, broker: Broker, seed: int) -> None:
        self.broker, self.random = broker, random.Random(seed)
        with connect(broker) as kafka:
            self.topic = topic_of(kafka, PARTITIONS, **COMPACT)
            self.clients = [RawProducer(kafka, version=version) for version in (2, 0, 2)]
            for client in self.clients:
                client.init()
        self.number = 0
        self.aborted: set[int] = set()
        self.last: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]

    def transaction(self, client: RawProducer) -> tuple[int, list[dict[bytes, bytes]]]:
        """Writes a transaction and leaves it open."""
        self.number += 1
        written: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        for partition in self.random.sample(range(PARTITIONS), self.random.randint(1, PARTITIONS)):
            if client.version == 0:
                eventually(lambda partition=partition: client.add(self.topic, partition) == 0, "the partition is added")
            for _ in range(self.random.randint(1, 3)):
                pairs = {
                    b"key-%d" % self.random.randrange(KEYS): b"%d:" % self.number + bytes(self.random.randrange(300))
                    for _ in range(self.random.randint(1, 4))
                }
                records = [Record(value, key, timestamp_ms=int(time.time() * 1000)) for key, value in pairs.items()]
                assert (error := client.produce(self.topic, partition, *records)) == 0, error
                written[partition] |= pairs
        return self.number, written

    def end(self, client: RawProducer, number: int, written: list[dict[bytes, bytes]]) -> None:
        committed = self.random.random() < 0.6
        if not committed:
            self.aborted.add(number)  # before a reader can see it
        eventually(lambda: client.end(committed) == 0, "the end of a transaction")
        for last, own in zip(self.last, written, strict=True):
            if committed:
                # written one after the other, ended in random order
                last |= {
                    key: value for key, value in own.items() if int(last.get(key, b"0:").partition(b":")[0]) < number
                }

    def run(self, count: int) -> None:
        """Runs up to three concurrent transactions `count` times, ended in random order."""
        with connect(self.broker) as kafka:
            for client in self.clients:
                client.kafka = kafka
            for _ in range(count):
                chosen = self.random.sample(self.clients, self.random.randint(1, 3))
                begun = [(client, *self.transaction(client)) for client in chosen]
                self.random.shuffle(begun)
                for client, number, written in begun:
                    self.end(client, number, written)

    def ready(self) -> bool:
        """Waits until partitions and coordinators serve again."""
        try:
            with connect(self.broker) as kafka:
                for client in self.clients:
                    client.kafka = kafka
                served = all(
                    fetch_committed(kafka, self.topic, partition).error_code == 0 for partition in range(PARTITIONS)
                )
                return served and all(client.state().error_code not in RETRIABLE_AT_START for client in self.clients)
        except (OSError, ConnectionEnded):
            return False

    def check(self) -> None:
        """Only when no transaction is open."""
        with connect(self.broker) as kafka:
            for partition in range(PARTITIONS):
                eventually(lambda partition=partition: stable(kafka, self.topic, partition), "the last markers")
                assert committed_map(kafka, self.topic, partition) == self.last[partition]

    def check_paused_reader(self, partition: int) -> None:
        """A local client reads a part, pauses while the log grows and is compacted, and continues."""
        with mqd.Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap,
                "transport": "shm",
                "group.id": self.topic,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        ) as consumer:
            consumer.assign([TopicPartition(self.topic, partition, 0)])
            assert consumer.transport == "shm", consumer.transport_reason
            seen = [next_record(consumer) for _ in range(10)]
            self.run(20)
            self.check()
            while message := next_record(consumer):
                seen.append(message)
        assert not self.aborted & {int(message.value().partition(b":")[0]) for message in seen}
        assert {message.key(): message.value() for message in seen} == self.last[partition]


def next_record(consumer: mqd.Consumer) -> Any:
    """None at the end of the partition."""
    while True:
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        if message.error() is None:
            return message
        assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
        return None


def stable(kafka: KafkaConnection, topic: str, partition: int) -> bool:
    """Whether the last stable offset has reached the end."""
    found = fetch_committed(kafka, topic, partition)
    return found.last_stable_offset == found.high_watermark and not any(
        one.current_txn_start_offset >= 0 for one in producers(kafka, topic, partition)
    )


def committed_map(kafka: KafkaConnection, topic: str, partition: int) -> dict[bytes, bytes]:
    return {record.key: record.value for record in read_committed_records(kafka, topic, partition, bytes_max=3000)}


class Reader(threading.Thread):
    """Reads the committed records from the beginning, repeatedly: none of an aborted transaction,
    and rising offsets.
    """

    def __init__(self, life: Life, partition: int) -> None:
        super().__init__(daemon=True)
        self.life, self.partition, self.rounds = life, partition, 0
        self.problems: list[str] = []
        self.seen: set[int] = set()
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                with connect(self.life.broker) as kafka:
                    while not self.ending.is_set():
                        records = read_committed_records(
                            kafka,
                            self.life.topic,
                            self.partition,
                            bytes_max=self.life.random.choice((500, 3000, 1 << 20)),
                        )
                        offsets = [record.offset for record in records]
                        if offsets != sorted(set(offsets)):
                            self.problems.append(f"offsets do not rise: {offsets}")
                        self.seen |= {int(record.value.partition(b":")[0]) for record in records}
                        self.rounds += 1
            # a worker that is not up yet; a permanent failure shows in `rounds`
            except (OSError, ConnectionEnded, AssertionError) as error:
                self.last_error = error
                self.ending.wait(0.05)


def sealed_bytes(broker: Broker, topic: str, partition: int) -> int:
    logs = sorted((broker.data_dir / "log" / f"{topic}-{partition}").glob("*.log"))
    return bytes_of(logs[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "turns"), [(7, 2), *(pytest.param(seed, 10, marks=pytest.mark.slow) for seed in range(8, 14))]
)
def test_committed_values_stay_and_aborted_ones_are_never_read(start_broker, seed: int, turns: int) -> None:
    broker = start_broker(workers=2, config=CONFIG)
    life = Life(broker, seed)
    threads = [Reader(life, partition) for partition in range(PARTITIONS)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(turns):
            life.run(20)
            life.check()
            life.check_paused_reader(turn % PARTITIONS)
            if turn % 2:
                kill_and_wait(broker, f"mqd-worker-{turn // 2 % 2}")
                eventually(life.ready, "the broker serves again")
                life.check()
        for partition in range(PARTITIONS):
            eventually(
                lambda partition=partition: sealed_bytes(broker, life.topic, partition) < 8 * SEGMENT_BYTES,
                lambda: f"compaction\n{broker.logs()}",
                30,
            )
        life.check()
    finally:
        for thread in threads:
            thread.ending.set()
        for thread in threads:
            thread.join(30)
    assert not [problem for thread in threads for problem in thread.problems]
    assert all(thread.rounds > 5 for thread in threads), [getattr(thread, "last_error", None) for thread in threads]
    assert not [thread.seen & life.aborted for thread in threads if thread.seen & life.aborted]
    broker.kill_all()  # producer snapshots and the cleaner's checkpoint are lost
    for pattern in (f"{life.topic}-*/*.snapshot", "cleaner-offset-checkpoint*"):
        for path in broker.data_dir.rglob(pattern):
            path.unlink()
    broker.start()
    eventually(life.ready, "the broker serves again")
    life.check()
    life.run(10)
    life.check()
