"""One client of the chaos tests, as a separate process in the clients' namespace; its results go
into its history file (history.py).

    python -m tests.chaos.client '{"role": "producer", "name": "p1", "bootstrap": "...", "topics":
    {"t": 3}, "history": "p1.jsonl", "seed": 1, "rate": 100}'

    producer     idempotent, acks=all: record after record to random partitions
    transactor   transactions over several partitions and topics; some are aborted; after a fatal
                 error it restarts with the same transactional.id
    consumer     reads committed records of all partitions from the start, without a group
    member       reads committed records in a group ("group"), commits them; other members join and
                 leave
    python-*     producer and consumer of another library: client_python.py
    guests       of a secured cluster: guests/process.py
    queue-*      of the features on top of logs: queues/clients.py
    reader       at the end: every partition from start to end, twice (all, committed): prints
                 {"topic-partition": FinalLog}

SIGTERM ends it after completing pending work (at most FINISH_SECONDS). librdkafka with its own
retries, as in an application.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from tests.chaos.history import Writer
from tests.crash.checker import identity_of, make_value

FINISH_SECONDS = 45.0
STEP_SECONDS = 10.0
IN_FLIGHT_MAX = 500
TRANSACTION_TIMEOUT_MS = 20_000
QUICK = {
    "metadata.recovery.strategy": "none",
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "log_level": 0,
    "topic.metadata.refresh.interval.ms": 2_000,
    "socket.timeout.ms": 5_000,
    "socket.connection.setup.timeout.ms": 3_000,
    "broker.address.ttl": 1_000,
}
# After these errors, and only these, nothing was written. After all others it may have been.
NOT_WRITTEN = (KafkaError._PURGE_QUEUE, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD)


def report(value: bytes | None) -> str:
    """A value in the form used by histories."""
    try:
        producer, number = identity_of(value)
        return f"{producer}:{number}"
    except ValueError:
        return (value or b"").hex() or "00"


class Client:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.name: str = settings["name"]
        self.chance = random.Random(f"{settings['seed']} {self.name}")
        self.writer = Writer(Path(settings["history"]), self.name)
        self.places = [(topic, partition) for topic, count in settings["topics"].items() for partition in range(count)]
        self.ending = False

    def end(self, *_signal: object) -> None:
        self.ending = True

    def common(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.settings["bootstrap"],
            "client.id": self.name,
            "error_cb": lambda _error: None,
            **self.settings.get("login", {}),
            **QUICK,
        }

    def note(self, error: object) -> None:
        self.writer.write("error", text=str(error), at_ns=time.monotonic_ns())

    def saw(self, message: Any) -> None:
        """A record that a consumer returned."""

    def run(self) -> int:
        raise NotImplementedError


class Sender(Client):
    """Numbers increase over all lives; each record's line is written when its outcome is known."""

    number = 0
    producer: Any = None

    def headers(self, number: int, topic: str, partition: int) -> list[tuple[str, str]]:
        """Of the record that is sent next."""
        return []

    def acknowledged(self, number: int, topic: str, partition: int, offset: int) -> None:
        """Does nothing by default."""

    def send(self, txn: int | None = None, place: tuple[str, int] | None = None) -> None:
        topic, partition = place or self.chance.choice(self.places)
        number, begin_ns = self.number, time.monotonic_ns()
        self.number += 1

        def on_delivery(error: KafkaError | None, message: Any) -> None:
            status = "ok" if error is None else "fail" if error.code() in NOT_WRITTEN else "info"
            offset = message.offset() if error is None and message.offset() is not None else -1
            self.writer.write(
                "send",
                number=number,
                topic=topic,
                partition=partition,
                status=status,
                offset=offset,
                begin_ns=begin_ns,
                end_ns=time.monotonic_ns(),
                txn=txn,
            )
            if txn is None:
                self.writer.worked(error is None)
            if offset >= 0:
                self.acknowledged(number, topic, partition, offset)

        try:
            self.producer.produce(
                topic,
                make_value(self.name, number),
                f"{self.name}-{number % 20}",
                partition,
                headers=self.headers(number, topic, partition),
                on_delivery=on_delivery,
            )
        except (BufferError, KafkaException) as error:
            code = error.args[0].code() if isinstance(error, KafkaException) else None
            self.writer.write(
                "send",
                number=number,
                topic=topic,
                partition=partition,
                status="fail",
                offset=-1,
                begin_ns=begin_ns,
                end_ns=time.monotonic_ns(),
                txn=txn,
            )
            self.note(error)
            if code is not None and (error.args[0].fatal() or error.args[0].txn_requires_abort()):
                raise


class IdempotentProducer(Sender):
    def begin(self) -> None:
        self.producer = Producer(
            {
                # into its .stderr: when and why it gets another producer id
                **self.common(),
                "log_level": 7,
                "debug": "eos",
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "request.timeout.ms": 5_000,
                "retry.backoff.ms": 50,
                "retry.backoff.max.ms": 500,
                # never: a record that times out makes librdkafka continue with another producer id,
                # and resend its in-flight batches of other partitions
                "message.timeout.ms": 0,
            }
        )

    def run(self) -> int:
        self.begin()
        due = time.monotonic()
        while not self.ending:
            try:
                burst = self.chance.randrange(1, 20)
                for _ in range(burst):
                    self.send()
            except KafkaException:  # fatal: the same application restarts, as another producer
                self.producer.flush(STEP_SECONDS)
                self.begin()
            due = max(due + burst / self.settings["rate"], time.monotonic() - 0.2)
            while not self.ending and (len(self.producer) > IN_FLIGHT_MAX or time.monotonic() < due):
                self.producer.poll(0.02)
        left = self.producer.flush(FINISH_SECONDS)
        self.writer.flush()
        if left:
            self.note(f"{left} records were neither acknowledged nor refused")
        return 0


class Transactor(Sender):
    txn = 0

    def begin(self) -> None:
        """A new instance: the coordinator aborts the transaction that the previous one left open."""
        while not self.ending:
            try:
                self.producer = Producer(
                    {
                        **self.common(),
                        "transactional.id": self.settings["transactional"],
                        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                        "linger.ms": 1,
                        "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
                        "request.timeout.ms": 5_000,
                        "retry.backoff.ms": 50,
                        "retry.backoff.max.ms": 500,
                    }
                )
                self.producer.init_transactions(STEP_SECONDS)
                return
            except KafkaException as error:
                self.writer.worked(False)
                self.note(f"init: {error}")
                time.sleep(0.2)  # a broker far away: the next request is sent after a pause

    def run(self) -> int:
        self.begin()
        while not self.ending:
            try:
                self.transaction()
                self.writer.worked(True)
            except KafkaException as error:
                self.writer.worked(False)
                self.note(error)
                self.recover(error)
            time.sleep(self.chance.random() * 2 / self.settings["rate"])  # the load's own rate
        self.writer.flush()
        return 0

    def transaction(self) -> None:
        self.txn += 1
        places = self.chance.sample(self.places, min(len(self.places), self.chance.randrange(1, 4)))
        self.producer.begin_transaction()
        for _ in range(self.chance.randrange(2, 12)):
            self.send(self.txn, self.chance.choice(places))
        if self.chance.random() < 0.2:
            self.finish("abort")
        else:
            if self.producer.flush(STEP_SECONDS):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records of a transaction", False, False, True))
            self.finish("commit")

    def finish(self, wish: str) -> None:
        begin_ns = time.monotonic_ns()
        self.writer.write("ask", txn=self.txn, wish=wish, begin_ns=begin_ns)
        call = self.producer.commit_transaction if wish == "commit" else self.producer.abort_transaction
        deadline = time.monotonic() + FINISH_SECONDS
        while True:
            try:
                call(STEP_SECONDS)
                break
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise
        self.writer.write("end", txn=self.txn, wish=wish, status="ok", begin_ns=begin_ns, end_ns=time.monotonic_ns())

    def recover(self, error: KafkaException) -> None:
        """A refused commit that must be aborted was not committed; after other errors the outcome
        is unknown, and it restarts.
        """
        if error.args[0].txn_requires_abort():
            try:
                self.finish("abort")
                return
            except KafkaException as again:
                self.note(f"abort: {again}")
        with contextlib.suppress(KafkaException):
            self.producer.purge()
        self.producer.poll(0.1)
        self.begin()


class AssignedConsumer(Client):
    epoch = 0

    def make(self, **more: Any) -> Consumer:
        return Consumer(
            {
                **self.common(),
                "group.id": self.settings.get("group", self.name),
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "check.crcs": True,
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 50,
                **more,
            }
        )

    def take(self, consumer: Consumer) -> list[Any]:
        messages = []
        for message in consumer.consume(200, 0.2):
            if message.error() is not None:
                self.note(message.error())
                continue
            messages.append(message)
            self.saw(message)
            self.writer.write(
                "poll",
                epoch=self.epoch,
                topic=message.topic(),
                partition=message.partition(),
                offset=message.offset(),
                value=report(message.value()),
                at_ns=time.monotonic_ns(),
            )
        self.writer.worked(bool(messages))
        return messages

    def run(self) -> int:
        consumer = self.make(**{"auto.offset.reset": "error"})
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in self.places])
        while not self.ending:
            self.take(consumer)
        self.writer.flush()
        consumer.close()
        return 0


class Member(AssignedConsumer):
    def run(self) -> int:
        consumer = self.make(
            **(
                {
                    "session.timeout.ms": 6_000,
                    "partition.assignment.strategy": self.chance.choice(("range", "cooperative-sticky")),
                }
                if not self.settings.get("protocol")
                else {"group.protocol": "consumer"}
            )
        )

        def moved(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
            self.epoch += 1  # positions are reset; records read and not committed are repeated

        consumer.subscribe(list(self.settings["topics"]), on_assign=moved, on_revoke=moved, on_lost=moved)
        while not self.ending:
            messages = self.take(consumer)
            if messages:
                self.commit(consumer, messages)
        self.writer.flush()
        consumer.close()
        return 0

    def commit(self, consumer: Consumer, messages: list[Any]) -> None:
        ends: dict[tuple[str, int], int] = {}
        for message in messages:
            ends[(message.topic(), message.partition())] = message.offset() + 1
        begin_ns = time.monotonic_ns()
        try:
            consumer.commit(
                offsets=[TopicPartition(topic, partition, offset) for (topic, partition), offset in ends.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            self.note(f"commit: {error}")
            return
        for (topic, partition), offset in ends.items():
            self.writer.write(
                "offsets",
                group=self.settings["group"],
                topic=topic,
                partition=partition,
                offset=offset,
                begin_ns=begin_ns,
                end_ns=time.monotonic_ns(),
            )


class Reader(Client):
    """Retries until it has read everything; the cluster is healthy by then."""

    def run(self) -> int:
        final = {}
        for topic, partition in self.places:
            low, high = self.watermarks(topic, partition)
            everything = self.read(topic, partition, low, high, "read_uncommitted")
            committed = self.read(topic, partition, low, high, "read_committed")
            final[f"{topic}/{partition}"] = {"start": low, "end": high, "all": everything, "committed": committed}
        print(json.dumps(final), flush=True)
        return 0

    def consumer(self, isolation: str) -> Consumer:
        return Consumer(
            {
                **self.common(),
                "group.id": self.name,
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "check.crcs": True,
                "fetch.wait.max.ms": 50,
            }
        )

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        consumer = self.consumer("read_uncommitted")
        deadline = time.monotonic() + FINISH_SECONDS
        while True:
            try:
                low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), STEP_SECONDS)
                consumer.close()
                return low, high
            except KafkaException:
                if time.monotonic() > deadline:
                    raise

    def read(self, topic: str, partition: int, low: int, high: int, isolation: str) -> list[tuple[int, str]]:
        """To the end reported by the broker (an end of partition at or beyond `high`, or where it
        stays for FINISH_SECONDS: a hanging transaction).
        """
        consumer = self.consumer(isolation)
        consumer.assign([TopicPartition(topic, partition, low)])
        found: list[tuple[int, str]] = []
        deadline = time.monotonic() + FINISH_SECONDS
        while time.monotonic() < deadline:
            for message in consumer.consume(500, 0.5):
                error = message.error()
                if error is None:
                    self.saw(message)
                    found.append((message.offset(), report(message.value())))
                    deadline = time.monotonic() + FINISH_SECONDS
                elif error.code() == KafkaError._PARTITION_EOF and message.offset() >= high:
                    consumer.close()
                    return [one for one in found if one[0] < high]
        consumer.close()
        return [one for one in found if one[0] < high]


ROLES = {
    "producer": IdempotentProducer,
    "transactor": Transactor,
    "consumer": AssignedConsumer,
    "member": Member,
    "reader": Reader,
}


def role_of(name: str) -> type[Client]:
    """Other modules are only imported where they are needed."""
    if name in ROLES:
        return ROLES[name]
    from tests.chaos import client_python
    from tests.chaos.guests import process
    from tests.chaos.queues import clients

    return (client_python.ROLES | process.ROLES | clients.ROLES)[name]


def main() -> int:
    settings = json.loads(sys.argv[1])
    client = role_of(settings["role"])(settings)
    signal.signal(signal.SIGTERM, client.end)
    return client.run()


if __name__ == "__main__":
    sys.exit(main())
