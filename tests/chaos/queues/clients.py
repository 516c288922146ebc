"""Clients of the features on top of logs. Beside the lines of history.py they write

    due        a record that is sent to the schedule: when it is due, as time of the wall clock and of
               CLOCK_MONOTONIC, or that it cancels another one
    arrived    a record of the schedule's target, with its timestamp: when it was delivered
    delivered  a record that a member of the share group got
    settle     a member begins to acknowledge it; written before the request is sent
    settled    the outcome: "ok", or the error
    unique     an id was acknowledged

queue-producer     idempotent: jobs and scheduled records, some of which cancel an earlier one
queue-transactor   transactions over both
queue-consumer     reads committed records, as "consumer" of client.py
queue-share        a member of the share group, of librdkafka or (`mqd`) of mqd's client
queue-dedup        sends the ids 0, 1, ... to the topic with deduplication, without idempotence, each
                   until it is acknowledged; another life begins with 0 again
queue-dedup-transactor
                   the same in transactions, some of which are aborted and sent again
queue-drain        at the end: returns when everything that was scheduled has been delivered, and the
                   share group has finished everything
queue-reader       as "reader" of client.py
"""

from __future__ import annotations

import collections
import time
from typing import Any

from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, Producer, ShareConsumer, TopicPartition

import mqd
from tests.chaos.client import (
    FINISH_SECONDS,
    IN_FLIGHT_MAX,
    STEP_SECONDS,
    AssignedConsumer,
    Client,
    IdempotentProducer,
    Reader,
    Sender,
    Transactor,
    report,
)
from tests.chaos.queues import ACCEPT, DUE, GROUP, JOBS, LATER, PARTITIONS, REJECT, RELEASE, UNIQUE, outcome_of, tag_of
from tests.crash.checker import identity_of, make_value
from tests.interaction.share_members import lag
from tests.kafka_connection import ConnectionEnded

TYPES = {ACCEPT: AcknowledgeType.ACCEPT, RELEASE: AcknowledgeType.RELEASE, REJECT: AcknowledgeType.REJECT}
DELAY_MAX_MS = 15_000
CANCEL_AHEAD_S = 3.0  # a record is cancelled so long before it is due, or longer
DRAIN_SECONDS = 150.0


class _Scheduling(Sender):
    """Jobs have a tag, scheduled records the time at which they are due."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._due_ns: dict[int, int] = {}
        self._cancellable: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)  # offset, number

    def headers(self, number: int, topic: str, partition: int) -> list[tuple[str, str]]:
        if topic == JOBS:
            return [("tag", tag_of(number))]
        if self.chance.random() < 0.1 and (found := self._cancel(partition)) is not None:
            self.writer.write("due", number=number, cancels=found[1])
            return [("mqd-cancel", str(found[0]))]
        delay_ms = self.delay_ms()
        # the clocks in this order: so it is due no earlier than recorded
        due_ns = time.monotonic_ns() + (delay_ms - 1) * 1_000_000
        due_ms = time.time_ns() // 1_000_000 + delay_ms
        self._due_ns[number] = due_ns
        self.writer.write("due", number=number, due_ns=due_ns, due_ms=due_ms)
        return [("mqd-delay-ms", str(delay_ms)) if number % 2 else ("mqd-deliver-at", str(due_ms))]

    def delay_ms(self) -> int:
        return self.chance.randrange(1, 3_000 if self.chance.random() < 0.7 else DELAY_MAX_MS)

    def acknowledged(self, number: int, topic: str, partition: int, offset: int) -> None:
        if topic == LATER and number in self._due_ns:
            self._cancellable[partition].append((offset, number))

    def _cancel(self, partition: int) -> tuple[int, int] | None:
        """A record that is pending for some time yet."""
        earliest_ns = time.monotonic_ns() + int(CANCEL_AHEAD_S * 1e9)
        found = [one for one in self._cancellable[partition] if self._due_ns[one[1]] > earliest_ns]
        self._cancellable[partition] = found
        return found.pop(self.chance.randrange(len(found))) if found else None


class QueueProducer(_Scheduling, IdempotentProducer):
    pass


class QueueTransactor(_Scheduling, Transactor):
    pass


def _write_arrival(client: Client, message: Any) -> None:
    if message.topic() == DUE:
        client.writer.write(
            "arrived", value=report(message.value()), time_ms=message.timestamp()[1], at_ns=time.monotonic_ns()
        )


class QueueConsumer(AssignedConsumer):
    def saw(self, message: Any) -> None:
        _write_arrival(self, message)


class QueueReader(Reader):
    def saw(self, message: Any) -> None:
        _write_arrival(self, message)


class Sharer(Client):
    """Takes jobs, and acknowledges each as outcome_of() says."""

    def _consumer(self) -> Any:
        settings = {
            "bootstrap.servers": self.settings["bootstrap"],
            "client.id": self.name,
            "group.id": GROUP,
            "share.acknowledgement.mode": "explicit",
        }
        if self.settings.get("mqd"):
            return mqd.ShareConsumer({**settings, "transport": "tcp"})
        return ShareConsumer({**settings, "log_level": 0, "reconnect.backoff.max.ms": 500})

    def run(self) -> int:
        consumer = self._consumer()
        consumer.subscribe([JOBS])
        while not self.ending:
            try:
                self.writer.worked(self._take(consumer))
            except KafkaException as error:
                self.writer.worked(False)
                self.note(error)
                if error.args[0].fatal():
                    return 1
                time.sleep(0.2)  # a broker far away: the next request is sent after a pause
        self.writer.flush()
        consumer.close()
        return 0

    def _take(self, consumer: Any) -> bool:
        """Whether an acknowledgement was confirmed."""
        taken = []
        for message in consumer.poll(0.5):
            if message.error() is not None:
                self.note(message.error())
                continue
            value, count = report(message.value()), message.delivery_count()
            self.writer.write(
                "delivered",
                value=value,
                count=count,
                partition=message.partition(),
                offset=message.offset(),
                at_ns=time.monotonic_ns(),
            )
            outcome = outcome_of(identity_of(message.value())[1], count)
            consumer.acknowledge(message, TYPES[outcome])
            taken.append((value, count, outcome, message.partition()))
        if not taken:
            return False
        for value, count, outcome, _ in taken:
            self.writer.write("settle", value=value, count=count, outcome=outcome)
        status = self._commit(consumer)
        at_ns = time.monotonic_ns()
        for value, count, outcome, partition in taken:
            self.writer.write(
                "settled",
                value=value,
                count=count,
                outcome=outcome,
                status=status.get(partition, "unknown"),
                at_ns=at_ns,
            )
        return "ok" in status.values()

    def _commit(self, consumer: Any) -> dict[int, str]:
        """By partition: "ok", or the error."""
        try:
            found = consumer.commit_sync(STEP_SECONDS)
        except KafkaException as error:
            self.note(f"commit: {error}")
            return {}
        return {one.partition: "ok" if error is None else error.args[0].name() for one, error in found.items()}


class Deduplicated(Client):
    """Retries each id until it is acknowledged."""

    def run(self) -> int:
        self.again: collections.deque[int] = collections.deque()
        self.producer = Producer(
            {**self.common(), "enable.idempotence": False, "acks": "all", "linger.ms": 10, "message.timeout.ms": 8_000}
        )
        number, due, until = 0, time.monotonic(), 0.0
        while not self.ending or self.again or len(self.producer):
            if self.ending:
                until = until or time.monotonic() + FINISH_SECONDS
                if time.monotonic() > until:
                    self.note(f"{len(self.again) + len(self.producer)} ids were not acknowledged")
                    break
            while self.again and len(self.producer) < IN_FLIGHT_MAX:
                self._send(self.again.popleft())
            if not self.ending and time.monotonic() >= due and len(self.producer) < IN_FLIGHT_MAX:
                self._send(number)
                number += 1
                due = max(due + 1 / self.settings["rate"], time.monotonic() - 0.2)
            self.producer.poll(0.005)
        self.writer.flush()
        return 0

    def _send(self, number: int) -> None:
        def on_delivery(error: KafkaError | None, _message: Any) -> None:
            self.writer.worked(error is None)
            if error is None:
                self.writer.write("unique", number=number)
            else:
                self.again.append(number)

        self.producer.produce(
            UNIQUE,
            make_value(self.name, number),
            headers={"dedup-id": str(number)},
            partition=number % PARTITIONS[UNIQUE],
            on_delivery=on_delivery,
        )


class DeduplicatedTransactor(Transactor):
    """Its ids are those of no other client."""

    FIRST = 1_000_000_000
    following = FIRST

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._pending: list[int] = []  # of transactions that were not committed, or perhaps not

    def transaction(self) -> None:
        self.txn += 1
        for _ in range(self.chance.randrange(2, 12)):
            self._pending.append(self.following)
            self.following += 1
        self.producer.begin_transaction()
        for number in self._pending:
            self.producer.produce(
                UNIQUE,
                make_value(self.name, number),
                headers={"dedup-id": str(number)},
                partition=number % PARTITIONS[UNIQUE],
            )
        if self.chance.random() < 0.3:
            self.finish("abort")
            return
        if self.producer.flush(STEP_SECONDS):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records of a transaction", False, False, True))
        self.finish("commit")
        for number in self._pending:
            self.writer.write("unique", number=number)
        self._pending = []


class Drain(QueueProducer):
    """Records that are due after all others, one in each partition of the schedule: a partition is
    delivered in order.
    """

    def delay_ms(self) -> int:
        return DELAY_MAX_MS + 1_000

    def run(self) -> int:
        self.begin()
        for partition in range(PARTITIONS[LATER]):
            self.send(place=(LATER, partition))
        assert self.producer.flush(FINISH_SECONDS) == 0
        until = time.monotonic() + DRAIN_SECONDS
        expected = {f"{self.name}:{number}" for number in range(self.number)}
        consumer = AssignedConsumer({**self.settings, "name": f"{self.name}-reader"}).make()
        consumer.assign([TopicPartition(DUE, partition, 0) for partition in range(PARTITIONS[DUE])])
        while expected:
            assert time.monotonic() < until, f"{expected} did not come out of the schedule within {DRAIN_SECONDS:.0f} s"
            expected -= {report(message.value()) for message in consumer.consume(500, 0.2) if not message.error()}
        consumer.close()
        hosts = [tuple(host) for host in self.settings["hosts"]]
        while any(found := self._lag(hosts)) or not found:
            assert time.monotonic() < until, f"the lag of {GROUP} is {found} after {DRAIN_SECONDS:.0f} s"
            time.sleep(0.5)  # between two queries of the lag; members of other processes reduce it
        return 0

    @staticmethod
    def _lag(hosts: list[tuple[str, int]]) -> list[int]:
        try:
            return lag(hosts, GROUP)
        except (OSError, ConnectionEnded):
            return []


ROLES: dict[str, type[Client]] = {
    "queue-producer": QueueProducer,
    "queue-transactor": QueueTransactor,
    "queue-consumer": QueueConsumer,
    "queue-share": Sharer,
    "queue-dedup": Deduplicated,
    "queue-dedup-transactor": DeduplicatedTransactor,
    "queue-drain": Drain,
    "queue-reader": QueueReader,
}
