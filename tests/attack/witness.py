"""Well-behaved clients with rights: they record each response, the latency of one's records, and
the memory of each of the broker's processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from confluent_kafka import Consumer, Producer

from tests.attack.target import ALICE, TOPICS, Target
from tests.broker import Broker
from tests.crash.checker import FinalLog, History, check, summary
from tests.crash.workload import FINISH_SECONDS, IDEMPOTENT, LoadConsumer, LoadProducer, read_log, wait_until
from tests.interaction.traffic import must_produce

RATE = 150  # records a second of each producer
LATENCY_PAUSE_S = 0.02
MEMORY_PAUSE_S = 1.0
MIB = 1 << 20


class Witnesses:
    """Two idempotent producers and a consumer, over TLS and through the proxy."""

    def __init__(self, target: Target, seed: int) -> None:
        settings = target.librdkafka(ALICE)
        topics = {"good": TOPICS["good"]}
        self._target, self._topics = target, topics
        bootstrap = str(settings["bootstrap.servers"])
        self.producers = [
            LoadProducer(
                f"p{seed}.{n}",
                bootstrap,
                topics,
                seed,
                RATE,
                {**settings, **IDEMPOTENT, "message.timeout.ms": 600_000},
                Producer,
            )
            for n in range(2)
        ]

        def consumer(own: dict) -> Consumer:
            return Consumer({**settings, **own, "group.id": "good-witness"})

        self.consumers = [LoadConsumer(f"c{seed}", bootstrap, topics, consumer)]

    def start(self) -> None:
        for one in (*self.producers, *self.consumers):
            one.start()
        self.wait_for_progress()

    def wait_for_progress(self, seconds: float = 120.0) -> None:
        before = [len(one.acknowledged) for one in self.producers], [len(one.seen) for one in self.consumers]

        def moved() -> bool:
            now = [len(one.acknowledged) for one in self.producers], [len(one.seen) for one in self.consumers]
            return all(new > old for new, old in zip(sum(now, []), sum(before, []), strict=True))

        wait_until(moved, seconds, lambda: f"no progress: {self.errors()}\n{self._target.broker.logs()}")

    def errors(self) -> list[str]:
        return [text for one in self.producers for text in (*one.errors, *one.failed)] + [
            text for one in self.consumers for text in one.errors
        ]

    def finish(self) -> tuple[int, list[str]]:
        """The number of acknowledged records, and the violations."""
        for one in self.producers:
            one.end()
        for one in self.producers:
            one.join(FINISH_SECONDS + 10)
        with self._target.connect(ALICE) as kafka:
            final: dict[tuple[str, int], FinalLog] = {
                (topic, partition): read_log(kafka, topic, partition)
                for topic, count in self._topics.items()
                for partition in range(count)
            }
        for consumer in self.consumers:
            consumer.until = {key: log.log_end_offset for key, log in final.items()}
        for consumer in self.consumers:
            consumer.join(FINISH_SECONDS)
            if consumer.is_alive():
                consumer.errors.append(f"{consumer.name} does not reach the end: {consumer.positions}")
                consumer.end()
        history = History(
            [ack for one in self.producers for ack in one.acknowledged],
            [seen for one in self.consumers for seen in one.seen],
            {one.name: one.sent for one in self.producers},
            {one.name for one in self.producers if one.idempotent},
        )
        violations = check(history, final)
        found = [summary(violations)] if violations else []
        return len(history.acknowledged), found + self.errors()[:10]


class Latencies(threading.Thread):
    """One record at a time with acks=all, over TLS; reconnects when its broker is gone."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self._target, self._ending = target, threading.Event()
        self._found: list[tuple[float, float]] = []  # when, how long

    def run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(Exception), self._target.connect(ALICE) as kafka:
                while not self._ending.wait(LATENCY_PAUSE_S):
                    began = time.monotonic()
                    must_produce(kafka, "good-latency", 0, b"how long")
                    self._found.append((began, time.monotonic() - began))
            self._ending.wait(0.1)

    def since(self, began: float) -> list[float]:
        return sorted(seconds for when, seconds in list(self._found) if when >= began)

    def end(self) -> None:
        self._ending.set()
        self.join(30)


def in_words(latencies: list[float]) -> str:
    if not latencies:
        return "no record"
    part = lambda share: 1000 * latencies[min(len(latencies) - 1, int(share * len(latencies)))]  # noqa: E731
    return f"p50 {part(0.5):.1f} p99 {part(0.99):.1f} max {1000 * latencies[-1]:.0f} ms of {len(latencies)}"


class Memory(threading.Thread):
    """The maximum private memory of the processes of each name; shared memory is measured
    elsewhere.
    """

    def __init__(self, brokers: Iterable[Broker]) -> None:
        super().__init__(daemon=True)
        self._brokers, self._ending = list(brokers), threading.Event()
        self.most: dict[str, int] = {}

    def run(self) -> None:
        while not self._ending.wait(MEMORY_PAUSE_S):
            for broker in self._brokers:
                with contextlib.suppress(Exception):
                    for process in broker.running():
                        found = anonymous_bytes(process["pid"])
                        self.most[process["name"]] = max(self.most.get(process["name"], 0), found)

    def taken(self) -> dict[str, int]:
        """In MiB, since the last call."""
        most, self.most = self.most, {}
        return {name: size // MIB for name, size in sorted(most.items())}

    def end(self) -> None:
        self._ending.set()
        self.join(30)


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
