"""Transactions while processes are killed: each is in all of its partitions or in none, matching
the result that its producer got, and none stays open.

Producers are raw (tests/interaction/transactional.py): every request whose response was lost is
resent, as clients do, and a producer whose outcome is unknown restarts.
"""

from __future__ import annotations

import random
import threading

import pytest

from tests.broker import Broker
from tests.crash.processes import kill_and_wait
from tests.interaction.traffic import PRODUCE
from tests.interaction.transactional import RawProducer, connect, fetch_committed, producers, read_committed, topic_of
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import eventually

PARTITIONS = 3
VICTIMS = ("mqd-acceptor", "mqd-worker-0", "mqd-worker-1")
LOST = (OSError, ConnectionEnded)
RETRIABLE = {3, 5, 6, 7, 14, 15, 16, 19, 51, 56, 100}
# The producer must restart: fenced by its own repetition, aborted by a timeout, a sequence number
# that lost its predecessor.
START_OVER = {45, 47, 48, 49, 59, 90, 120}


class Writer(threading.Thread):
    """Transaction after transaction: one record with its number into every partition."""

    def __init__(self, broker: Broker, topic: str, name: str, version: int, seed: int) -> None:
        super().__init__()
        self.broker, self.topic, self.version, self.label = broker, topic, version, name
        self.chance = random.Random(f"{seed} {name}")
        self.stopping = threading.Event()
        self.kafka: KafkaConnection | None = None
        self.outcomes: dict[bytes, bool | None] = {}  # None: the outcome is unknown
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                producer = self.patiently(self.begin)
                while producer is not None and not self.stopping.is_set() and self.transaction(producer):
                    pass
        except BaseException as error:  # reported to the test
            self.failure = error

    def patiently(self, work):
        """Retries until there is a result; a lost connection is reopened."""
        while True:
            try:
                if self.kafka is None:
                    self.kafka = connect(self.broker)
                found = work()
                if found is not None:
                    return found
            except LOST:
                if self.kafka is not None:
                    self.kafka.close()
                self.kafka = None
            if self.stopping.wait(0.02):
                return None

    def begin(self) -> RawProducer | None:
        assert self.kafka is not None
        producer = RawProducer(self.kafka, self.label, self.version)
        error = producer.init().error_code
        assert error == 0 or error in RETRIABLE, error
        return producer if error == 0 else None

    def transaction(self, producer: RawProducer) -> bool:
        """False: restart."""
        value = f"{self.label}-{len(self.outcomes)}".encode()
        committed = self.chance.random() < 0.8
        self.outcomes[value] = None
        if self.version == 0 and not self.step(producer, lambda: producer.add(self.topic, *range(PARTITIONS))):
            return False
        request = producer.request(self.topic, dict.fromkeys(range(PARTITIONS), (value,)))
        if not self.step(
            producer, lambda: self.worst(self.kafka.call(PRODUCE, 12 if self.version == 2 else 10, request))
        ):  # type: ignore[union-attr]
            return False
        if not self.step(producer, lambda: producer.end(committed)):
            return False
        self.outcomes[value] = committed
        return True

    @staticmethod
    def worst(response) -> int:
        errors = [partition.error_code for partition in response.responses[0].partition_responses]
        final = [error for error in errors if error and error not in RETRIABLE]
        return (final or [error for error in errors if error] or [0])[0]

    def step(self, producer: RawProducer, request) -> bool:
        """Retries until the response is final."""

        def once() -> int | None:
            producer.kafka = self.kafka  # type: ignore[assignment]
            error = request()
            return None if error in RETRIABLE else error

        error = self.patiently(once)
        assert error is None or error == 0 or error in START_OVER, f"error {error}"
        return error == 0


def check(kafka: KafkaConnection, topic: str, writers: list[Writer]) -> None:
    def open_transactions() -> list:
        return [
            one
            for index in range(PARTITIONS)
            for one in producers(kafka, topic, index)
            if one.current_txn_start_offset >= 0
        ]

    for writer in writers:
        if writer.version == 2:
            RawProducer(kafka, writer.label).init()  # ends its previous transaction
        else:
            RawProducer(kafka, writer.label, 0).init()
    eventually(lambda: not open_transactions(), lambda: f"no transaction stays open: {open_transactions()}")
    seen = [read_committed(kafka, topic, index) for index in range(PARTITIONS)]
    for index, values in enumerate(seen):
        assert len(values) == len(set(values)), f"partition {index} has a record twice"
        assert (
            fetch_committed(kafka, topic, index).last_stable_offset
            == fetch_committed(kafka, topic, index).high_watermark
        )
    assert set(seen[0]) == set(seen[1]) == set(seen[2]), (
        f"torn: {[sorted(set(seen[0]) ^ set(other))[:5] for other in seen[1:]]}"
    )
    for writer in writers:
        reported = {value: outcome for value, outcome in writer.outcomes.items() if outcome is not None}
        assert {value for value, outcome in reported.items() if outcome} <= set(seen[0]), (
            "a confirmed commit is missing"
        )
        assert not {value for value, outcome in reported.items() if not outcome} & set(seen[0]), (
            "a confirmed abort is there"
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("io_backend", ["epoll", pytest.param("io_uring", marks=pytest.mark.slow)])
def test_transactions_under_kills(start_broker, rounds, seed, io_backend):
    broker = start_broker(config={"io.backend": io_backend})
    chance = random.Random(f"{seed} {io_backend}")
    with connect(broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    writers = [Writer(broker, topic, f"writer-{number}", version, seed) for number, version in enumerate((2, 2, 0))]
    for writer in writers:
        writer.start()

    def progress() -> int:
        return sum(outcome is not None for writer in writers for outcome in writer.outcomes.copy().values())

    def is_moving(before: int) -> bool:
        return progress() > before + 10 or any(writer.failure for writer in writers)

    try:
        eventually(lambda: is_moving(0), lambda: f"transactions are committed\n{broker.logs()}")
        for _ in range(rounds(2, 40)):
            threading.Event().wait(chance.uniform(0, 0.3))
            kill_and_wait(broker, chance.choice(VICTIMS))
            before = progress()
            eventually(
                lambda before=before: is_moving(before), lambda: f"transactions are committed again\n{broker.logs()}"
            )
    finally:
        for writer in writers:
            writer.stopping.set()
        for writer in writers:
            writer.join(30)
    assert not [writer.failure for writer in writers if writer.failure], [repr(writer.failure) for writer in writers]
    with connect(broker) as kafka:
        check(kafka, topic, writers)
