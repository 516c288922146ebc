"""Seeded histories of a shared-memory producer with a C core that responds arbitrarily: every
accepted record is reported exactly once, records reported as written are in the log, in order, and
nothing is left behind. Threads and the clock are real, so a seed gives the same calls, not the same
interleaving.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import InitProducerIdResponse
from tests.unit.client.client_broker import FakeBroker
from tests.unit.client.client_native import FakeBatch, FakeProducer, make_producer

PARTITIONS = 3
RETRIABLE = [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.KAFKA_STORAGE_ERROR]
PERMANENT = [ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE]


class History:
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.broker = FakeBroker({"events": PARTITIONS})
        self.broker.answers[requests.INIT_PRODUCER_ID] = lambda request: InitProducerIdResponse(
            producer_id=self.random.randrange(1000), producer_epoch=0
        )
        config: dict[str, Any] = {
            "linger_ms": self.random.choice([0, 1, 5]),
            "enable_idempotence": self.random.random() < 0.5,
            "delivery_timeout_ms": self.random.choice([200, 60_000]),
            "queue_buffering_max_messages": self.random.choice([20, 1000]),
            "retries": self.random.choice([1, 1000]),
        }
        if config["enable_idempotence"]:
            config["retries"] = 1000
        self.producer, self.native = make_producer(monkeypatch, self.broker, **config)
        self.native.capacity = self.random.choice([15, 10_000])
        self.native.fate = self.fate
        self.calm = False
        self.taken = 0
        self.reports: dict[bytes, list[tuple[int, int, int | None]]] = {}

    def fate(self, _batch: FakeBatch) -> int | None:
        dice = self.random.random()
        if self.calm or dice < 0.6:
            return 0
        if dice < 0.75:
            return self.random.choice(RETRIABLE)
        return self.random.choice(PERMANENT) if dice < 0.85 else None

    # -- the application ---------------------------------------------------------------------------

    def value(self) -> bytes:
        self.taken += 1
        return b"%d" % (self.taken - 1)

    def report(self, error: KafkaError | None, message: Any) -> None:
        self.reports.setdefault(message.value(), []).append(
            (error.code() if error else 0, message.partition(), message.offset())
        )

    def report_batch(self, values: list[bytes]) -> Any:
        def report(error: KafkaError | None, delivery: Any) -> None:
            for at, index in enumerate(delivery.indices):
                offset = None if delivery.base_offset is None else delivery.base_offset + at
                self.reports.setdefault(values[index], []).append(
                    (error.code() if error else 0, delivery.partition, offset)
                )

        return report

    def produce(self) -> None:
        value = self.value()
        try:
            self.producer.produce("events", value, partition=self.random.randrange(PARTITIONS), on_delivery=self.report)
        except BufferError:
            self.taken -= 1
            self.producer.poll(0.001)

    def produce_batch(self) -> None:
        values = [self.value() for _ in range(self.random.randrange(1, 60))]
        partitions = [self.random.randrange(PARTITIONS) for _ in values]
        taken = self.producer.produce_batch(
            "events",
            values,
            partition=partitions,
            on_delivery=self.report_batch(values),
            timeout=self.random.choice([0, 0.05]),
        )
        self.taken -= len(values) - taken

    def answer(self) -> None:
        """Batches left without a response get one."""
        with self.producer.attachment.lock:
            for batch in [batch for batch in self.native.batches.values() if batch.state == "sent"]:
                self.native.answer(batch, self.random.choice([0, 0, *RETRIABLE]))

    def worker_dies(self) -> None:
        self.broker.kill()

    def step(self) -> None:
        acts = (
            [self.produce] * 12
            + [self.produce_batch] * 3
            + [lambda: self.producer.poll(0)] * 3
            + [lambda: self.producer.flush(0.01)] * 2
            + [self.answer] * 2
        )
        acts += [self.worker_dies, lambda: self.producer.purge(self.random.random() < 0.8, self.random.random() < 0.3)]
        self.random.choice(acts)()

    # -- invariants --------------------------------------------------------------------------------

    def end(self) -> None:
        self.calm = True
        for _ in range(100):
            self.answer()
            if self.producer.flush(0.2) == 0:
                break
        assert len(self.producer) == 0 and not self.native.batches and not self.producer.outcomes.batches
        assert sorted(map(int, self.reports)) == list(range(self.taken)), "each record taken is reported, no other"
        assert all(len(found) == 1 for found in self.reports.values()), "once"
        for value, [(error, partition, offset)] in self.reports.items():
            if error == 0:
                assert self.native.written[partition][offset] == value
        written = [int(value) for log in self.native.written.values() for value in log]
        reported = {int(value) for value, [(error, _, _)] in self.reports.items() if error == 0}
        assert reported <= set(written) and len(written) == len(set(written))
        for log in self.native.written.values():
            assert log == sorted(log, key=int), "in the order of their production"


@pytest.mark.parametrize("seed", range(15))
def test_history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(seed, monkeypatch)
    try:
        for _ in range(120):
            history.step()
        history.end()
    except KafkaException as error:
        assert history.producer.fatal is None, error
        raise
    finally:
        history.producer.abandon()


def test_a_core_that_writes_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the check can fail: a core that writes twice is detected."""

    class Doubling(FakeProducer):
        def answer(self, batch: FakeBatch, error: int) -> None:
            super().answer(batch, error)
            self.written.setdefault(batch.partition, []).extend(batch.values)

    monkeypatch.setattr("tests.unit.client.client_native.FakeProducer", Doubling)
    history = History(1, monkeypatch)
    with pytest.raises(AssertionError):
        for _ in range(50):
            history.step()
        history.end()
    history.producer.abandon()
