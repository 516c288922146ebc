"""Idempotent and transactional producers of mqd's client through shared memory, while workers and
acceptors are killed: no record is lost, duplicated or out of order.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import KafkaError, KafkaException, Producer
from tests.broker import Broker
from tests.client_reading import read_all

PARTITIONS = 6


class Load:
    """Producers in threads of this process, until `seconds` have passed."""

    def __init__(self, broker: Broker, seconds: float) -> None:
        self.broker = broker
        self.end = time.monotonic() + seconds
        self.sent: dict[str, int] = {}
        self.committed = 0
        self.problems: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, run: Callable[[str], None], name: str) -> None:
        def guarded() -> None:
            try:
                run(name)
            except BaseException as problem:
                self.problems.append(f"{name}: {problem!r}")
                raise

        self._threads.append(threading.Thread(target=guarded, name=name))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads) and not self.problems, self.problems

    def idempotent(self, name: str) -> None:
        errors: list[KafkaError] = []
        config = {"enable.idempotence": True, "linger.ms": 2, "compression.type": "lz4" if name == "0" else "none"}
        with Producer({"bootstrap.servers": self.broker.bootstrap, "transport": "shm", **config}) as producer:
            number = 0
            while time.monotonic() < self.end:
                values = [f"{name}:{number + index}" for index in range(50)]
                keys = [f"{name}-{(number + index) % 10}" for index in range(50)]
                number += producer.produce_batch(
                    "plain", values, keys, on_delivery=lambda error, _delivery: errors.append(error) if error else None
                )
                producer.poll(0.005)
            assert producer.flush(60) == 0 and not errors, errors[:3]
        self.sent[name] = number

    def transactional(self, name: str) -> None:
        with Producer(
            {"bootstrap.servers": self.broker.bootstrap, "transport": "shm", "transactional.id": f"crash-{name}"}
        ) as producer:
            producer.init_transactions(60)
            number = 0
            while time.monotonic() < self.end:
                try:
                    producer.begin_transaction()
                    for index in range(20):
                        producer.produce("transactions", f"{name}:{number}:{index}", key=f"{index}")
                    if number % 3 == 2:
                        producer.abort_transaction(60)
                    else:
                        _until_known(producer.commit_transaction)
                        self.committed += 20
                except KafkaException as problem:
                    if not problem.args[0].txn_requires_abort():
                        raise
                    producer.abort_transaction(60)
                number += 1
        self.sent[name] = number


def _until_known(commit: Callable[[float], None]) -> None:
    while True:
        try:
            return commit(60)
        except KafkaException as problem:
            if not problem.args[0].retriable():
                raise


def _start(start_broker: Callable[..., Broker], rng: random.Random, topic: str) -> Broker:
    broker = start_broker(
        workers=2, config={"log.flush.on.ack": "false", "io.backend": rng.choice(["epoll", "io_uring"])}
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(20)
    return broker


def _kill(broker: Broker, rng: random.Random, load: Load, pause_seconds_max: float) -> None:
    kills = 0
    while time.monotonic() < load.end - 1:
        time.sleep(rng.uniform(0.3, pause_seconds_max))  # the load runs
        pids = broker.pids("acceptor" if rng.random() < 0.2 else "worker")
        with contextlib.suppress(ProcessLookupError):
            if pids:
                os.kill(rng.choice(pids), signal.SIGKILL)
                kills += 1
    assert kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "seconds"), [(1, 4.0), *(pytest.param(seed, 12.0, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_idempotent(start_broker: Callable[..., Broker], seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    broker = _start(start_broker, rng, "plain")
    load = Load(broker, seconds)
    for name in ("0", "1"):
        load.start(load.idempotent, name)
    _kill(broker, rng, load, seconds / 5)
    load.join()
    _check(read_all(broker, "plain", load.sent["0"] + load.sent["1"], seconds=60))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 5))
def test_transactional(start_broker: Callable[..., Broker], seed: int) -> None:
    rng = random.Random(seed)
    broker = _start(start_broker, rng, "transactions")
    load = Load(broker, 10.0)
    for name in ("0", "1"):
        load.start(load.transactional, name)
    _kill(broker, rng, load, 2.0)
    load.join()
    found = [message.value() for message in read_all(broker, "transactions", load.committed, seconds=60)]
    assert len(set(found)) == len(found)


def _check(messages: list) -> None:
    by_key: dict[bytes, list[int]] = collections.defaultdict(list)
    for message in messages:
        by_key[message.key()].append(int(message.value().partition(b":")[2]))
    for numbers in by_key.values():
        assert numbers == list(range(numbers[0], numbers[0] + 10 * len(numbers), 10)), (
            "each once, in the order of its key"
        )
