"""A member of an exactly-once copy job, as a separate process: reads committed records in a group,
writes them to the same partition of another topic in transactions that include the group's offsets.
By librdkafka ("transport": "tcp") or mqd's own client ("shm").

    python -m tests.crash.copy_job '{"bootstrap": "127.0.0.1:9092", "group": "g", "source": "a",
    "target": "b", "name": "copy-0", "seed": 1, "consumer": {}, "transport": "tcp"}'

SIGUSR1 makes it print its stack. Exits with 0 after SIGTERM, with 1 when its producer is fenced or
its state unknown: its supervisor restarts it, as a user's would.

Precautions that an application must take, and this one does: the group's metadata is read before
the records, so that a member that has lost a partition meanwhile is refused; records that a
rebalance interrupts are dropped; after an abort it reads again from where it began.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

import mqd

BATCH_RECORDS_MAX = 200
STEP_SECONDS = 5.0
ABORTED_SHARE = 0.1
# librdkafka 2.10 to 2.16 waits forever, whatever the timeout, for a group's coordinator that
# Metadata no longer contains (its issues 5456 and 5511): the process then ends itself. Only around
# the call in question: other hangs must be found.
HUNG_SECONDS = 20.0
# librdkafka 2.16 by default restarts from the bootstrap servers when all brokers are down; in a
# cluster of one broker, whose connections end together, it then keeps a broker that it is about to
# forget, and waits for it forever with its pending requests (TxnOffsetCommit, seen), whatever the
# timeout.
_QUICK_RETRIES = {
    "metadata.recovery.strategy": "none",
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "log_level": 0,
    "topic.metadata.refresh.interval.ms": 2000,
}


class Copier:
    def __init__(self, settings: dict) -> None:
        self.source, self.target = settings["source"], settings["target"]
        self.chance = random.Random(f"{settings['seed']} {settings['name']}")
        self.is_stopping = self.is_moved = False
        self.may_hang = settings["transport"] == "tcp"
        common = {"bootstrap.servers": settings["bootstrap"], "client.id": settings["name"], **_QUICK_RETRIES}
        library: Any = confluent_kafka
        if settings["transport"] == "shm":
            library, common["transport"] = mqd, "shm"
        self.producer = library.Producer(
            {
                **common,
                "transactional.id": settings["name"],
                "transaction.timeout.ms": 8_000,
                "linger.ms": 1,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 200,
                "request.timeout.ms": 3_000,
                "message.timeout.ms": 8_000,
            }
        )
        self.consumer = library.Consumer(
            {
                **common,
                "group.id": settings["group"],
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                "fetch.error.backoff.ms": 20,
                "error_cb": lambda _error: None,
                **settings["consumer"],
            }
        )

    def stop(self, *_signal: object) -> None:
        self.is_stopping = True

    def run(self) -> None:
        self.patiently(self.producer.init_transactions, 30.0)
        self.consumer.subscribe([self.source], on_assign=self.on_moved, on_revoke=self.on_moved, on_lost=self.on_moved)
        while not self.is_stopping:
            member = self.consumer.memberid()
            metadata = self.consumer.consumer_group_metadata()
            batch = self.take()
            if batch and member and member == self.consumer.memberid():
                self.copy(batch, metadata)
            elif batch:
                self.read_again(batch)
        self.consumer.close()

    def on_moved(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self.is_moved = True

    def take(self) -> list[Message]:
        """Nothing when a rebalance intervenes."""
        self.is_moved = False
        batch: list[Message] = []
        expected = self.chance.randrange(1, BATCH_RECORDS_MAX)
        while len(batch) < expected:
            message = self.consumer.poll(0.05)
            if self.is_moved:
                self.read_again([*batch, message] if message is not None and message.error() is None else batch)
                return []
            if message is None:
                break
            if message.error() is None:
                batch.append(message)
        return batch

    def copy(self, batch: list[Message], metadata: object) -> None:
        try:
            self.producer.begin_transaction()
            for message in batch:
                self.producer.produce(self.target, message.value(), message.key(), message.partition())
            ends = {message.partition(): message.offset() + 1 for message in batch}
            offsets = [TopicPartition(self.source, partition, end) for partition, end in ends.items()]
            with self.not_hanging():
                self.patiently(self.producer.send_offsets_to_transaction, offsets, metadata, STEP_SECONDS)
            if self.chance.random() < ABORTED_SHARE:
                self.abort(batch)
                return
            self.patiently(self.producer.commit_transaction, STEP_SECONDS)
            print(f"committed {ends}", flush=True)
        except KafkaException as error:
            print(f"refused: {error}", flush=True)
            if not error.args[0].txn_requires_abort():
                raise
            self.abort(batch)

    @contextlib.contextmanager
    def not_hanging(self) -> Iterator[None]:
        if self.may_hang:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def abort(self, batch: list[Message]) -> None:
        self.patiently(self.producer.abort_transaction, STEP_SECONDS)
        print("aborted", flush=True)
        self.read_again(batch)

    def read_again(self, batch: list[Message]) -> None:
        """From the first of them, if the partition is still this member's."""
        firsts: dict[int, int] = {}
        for message in batch:
            firsts.setdefault(message.partition(), message.offset())
        mine = {one.partition for one in self.consumer.assignment()}
        for partition, offset in firsts.items():
            if partition in mine:
                self.consumer.seek(TopicPartition(self.source, partition, offset))

    def patiently(self, call: Callable[..., object], *arguments: object) -> None:
        while True:
            try:
                call(*arguments)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or self.is_stopping:
                    raise


def main() -> int:
    faulthandler.register(signal.SIGUSR1)  # prints the stack when it hangs
    copier = Copier(json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, copier.stop)
    try:
        copier.run()
    except KafkaException as error:
        print(f"ends: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
