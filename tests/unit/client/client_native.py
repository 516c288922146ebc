"""A Python replacement of the C producer: the test decides the outcome of batches. The rules are
those of native/client/client.h.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.config import TransportChoice, read
from mqd.client.messages import KafkaError, Message
from mqd.client.shm.producer import ShmProducer
from mqd.native import E_INVALID, NativeError
from mqd.native.client import INT64_MAX, Delivery
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import EndTxnResponse, FindCoordinatorResponse, InitProducerIdResponse
from tests.unit.client.client_broker import FakeBroker


class FakeBatch:
    def __init__(self, number: int, topic: int, partition: int) -> None:
        self.number, self.topic, self.partition = number, topic, partition
        self.values: list[bytes | None] = []
        self.state = "open"
        self.maybe_written = False
        self.opened_us = time.monotonic_ns() // 1000


# as in native/client/producer.c: whether a failed batch may be in the log nevertheless
MAYBE_WRITTEN = {
    ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.KAFKA_STORAGE_ERROR,
}
NOT_WRITTEN = {
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    ErrorCode.UNKNOWN_PRODUCER_ID,
    ErrorCode.PRODUCER_FENCED,
}


class FakeProducer:
    """`outcome(batch) -> error code, or None for no response yet` is called once for every send.
    `written`: values by partition, as in the log. `linger_us`: 0 = every send() closes the open
    batch. `memory_bytes`: a larger batch built elsewhere is refused.
    """

    capacity = 10_000
    memory_bytes = 1 << 30
    linger_us = 0

    def __init__(self, client: Any, options: Any) -> None:
        self.client, self.options = client, options
        self.fate: Callable[[FakeBatch], int | None] = lambda batch: 0
        self.batches: dict[int, FakeBatch] = {}
        self.topics: list[str] = []
        self.partition_counts: list[int] = []
        self.written: dict[int, list[bytes | None]] = {}
        self.identities: list[tuple[int, int]] = []
        self.moves = self.batch_number = 0
        self.closed = False
        self._numbers = itertools.count(1)
        self._reported: list[Delivery] = []

    def register_topic(self, name: str, partition_count: int, partitioner: int) -> int:
        if name not in self.topics:
            self.topics.append(name)
            self.partition_counts.append(0)
        number = self.topics.index(name)
        self.partition_counts[number] = partition_count
        return number

    def _open(self, topic: int, partition: int) -> FakeBatch:
        for batch in self.batches.values():
            if batch.state == "open" and (batch.topic, batch.partition) == (topic, partition):
                return batch
        number = next(self._numbers)
        self.batches[number] = FakeBatch(number, topic, partition)
        return self.batches[number]

    def append(self, topic: int, columns: Any, batch_numbers: Any) -> int:
        if self.client.dead:
            raise NativeError(errno.EPIPE, "dead")
        position = 0
        for index in range(columns.count):
            if self.outstanding_records >= self.capacity:
                return index
            if (
                columns.partition if columns.partitions is None else columns.partitions[index]
            ) >= self.partition_counts[topic]:
                if not index:
                    raise NativeError(E_INVALID, "no such partition")
                return index
            size = columns.fixed_value_bytes if columns.value_bytes is None else int(columns.value_bytes[index])
            batch = self._open(
                topic, max(columns.partition if columns.partitions is None else int(columns.partitions[index]), 0)
            )
            batch.values.append(None if size < 0 else bytes(columns.values[position : position + size]))
            position += max(size, 0)
            batch_numbers[index] = batch.number
        return columns.count

    def append_batch(self, topic: int, partition: int, data: bytes) -> int:
        """Its records are not parsed: their values are None."""
        if self.client.dead:
            raise NativeError(errno.EPIPE, "dead")
        if len(data) > self.memory_bytes:
            raise NativeError(E_INVALID, "larger than the memory")
        if self.outstanding_records >= self.capacity:
            return 0
        number = next(self._numbers)
        batch = self.batches[number] = FakeBatch(number, topic, partition)
        batch.values = [None] * int.from_bytes(data[57:61], "big")
        batch.state, self.batch_number = "queued", number
        return number

    def send(self, now_us: int, everything: bool = False) -> None:
        if self.client.dead:
            raise NativeError(errno.EPIPE, "dead")
        for batch in self.batches.values():
            if batch.state == "open" and (
                everything or not self.linger_us or batch.opened_us + self.linger_us <= now_us
            ):
                batch.state = "queued"
        blocked: set[tuple[int, int]] = set()
        for batch in list(self.batches.values()):
            place = (batch.topic, batch.partition)
            if batch.state in ("failed", "sent"):
                blocked.add(place)
            if batch.state == "queued" and place not in blocked:
                self._send_one(batch)
                if batch.number in self.batches:
                    blocked.add(place)

    def _send_one(self, batch: FakeBatch) -> None:
        error = self.fate(batch)
        if error is None:
            batch.state = "sent"
        else:
            self.answer(batch, error)

    def answer(self, batch: FakeBatch, error: int) -> None:
        log = self.written.setdefault(batch.partition, [])
        self._reported.append(
            Delivery(
                batch.number, batch.topic, batch.partition, -1 if error else len(log), -1, len(batch.values), error
            )
        )
        if error:
            batch.state = "failed"
            if error in MAYBE_WRITTEN or error in NOT_WRITTEN:
                batch.maybe_written = error in MAYBE_WRITTEN
        else:
            log.extend(batch.values)
            del self.batches[batch.number]
        self.client.wake()

    def deliveries(self) -> list[Delivery]:
        reported, self._reported = self._reported, []
        return reported

    def next_send_us(self) -> int:
        return min(
            (
                batch.opened_us + self.linger_us
                for batch in self.batches.values()
                if batch.state == "open" and self.linger_us
            ),
            default=INT64_MAX,
        )

    def retry(self, number: int) -> None:
        assert self.batches[number].state == "failed"
        self.batches[number].state = "queued"

    def drop(self, number: int) -> None:
        if number not in self.batches:
            raise NativeError(E_INVALID, "no such batch")
        del self.batches[number]

    def set_identity(self, producer_id: int, producer_epoch: int) -> None:
        if any(batch.state == "sent" for batch in self.batches.values()):
            raise NativeError(E_INVALID, "something is unanswered")
        if any(batch.maybe_written for batch in self.batches.values()):
            raise NativeError(E_INVALID, "a batch may be written")
        self.identities.append((producer_id, producer_epoch))

    def move(self, to: Any) -> None:
        self.client, self.moves = to, self.moves + 1
        for batch in self.batches.values():
            if batch.state == "sent":
                batch.state, batch.maybe_written = "queued", True

    @property
    def outstanding_records(self) -> int:
        return sum(len(batch.values) for batch in self.batches.values())

    @property
    def outstanding_bytes(self) -> int:
        return sum(len(value or b"") for batch in self.batches.values() for value in batch.values)

    def close(self) -> None:
        self.closed = True


def make_producer(monkeypatch: Any, broker: FakeBroker, **config: Any) -> tuple[ShmProducer, FakeProducer]:
    """A shared-memory producer over FakeBroker and FakeProducer; underscores in keys become dots,
    except in callbacks.
    """
    monkeypatch.setattr("mqd.client.shm.producer_driver.NativeProducer", FakeProducer)
    monkeypatch.setattr("mqd.client.shm.producer_driver.opener", lambda *_arguments: broker.attach)
    given = {key if key.endswith("_cb") else key.replace("_", "."): value for key, value in config.items()}
    producer = ShmProducer(
        read({"bootstrap.servers": "x", "linger.ms": 1, "retry.backoff.ms": 1, **given}),
        TransportChoice("shm", "/nowhere", "a test"),
    )
    return producer, producer.native  # type: ignore[return-value]


class Reports:
    """An on_delivery callback: error codes (0 = written) and messages, in the order of the calls.
    `raising`: how many of the first calls raise.
    """

    def __init__(self, raising: int = 0) -> None:
        self.errors: list[int] = []
        self.messages: list[Message] = []
        self._raising = raising

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.errors.append(error.code() if error is not None else 0)
        self.messages.append(message)
        if len(self.errors) <= self._raising:
            raise ValueError(f"report {len(self.errors)}")


# Fixtures: a test module imports both.


@pytest.fixture
def broker() -> FakeBroker:
    """Has three partitions of "events", assigns producer ids from 100 on and ends transactions."""
    broker = FakeBroker({"events": 3})
    numbers = itertools.count(100)
    broker.answers[requests.INIT_PRODUCER_ID] = lambda request: InitProducerIdResponse(
        producer_id=next(numbers), producer_epoch=0
    )
    broker.answers[requests.FIND_COORDINATOR] = lambda request: FindCoordinatorResponse(node_id=1)
    broker.answers[requests.END_TXN] = lambda request: EndTxnResponse(
        producer_id=request.producer_id, producer_epoch=request.producer_epoch + 1
    )
    return broker


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, broker: FakeBroker
) -> Iterator[Callable[..., tuple[ShmProducer, FakeProducer]]]:
    """make(**config) as make_producer; the producers are closed with the test."""
    made: list[ShmProducer] = []

    def make(**config: Any) -> tuple[ShmProducer, FakeProducer]:
        producer, native = make_producer(monkeypatch, broker, **config)
        made.append(producer)
        return producer, native

    yield make
    for producer in made:
        producer.abandon()
