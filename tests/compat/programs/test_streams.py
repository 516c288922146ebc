"""Kafka Streams with exactly_once_v2: windows, joins, and state in RocksDB, while the application
and the broker's processes are killed, with either protocol of its group. Each output has every
result once, and in order.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.compat.java_client import build_java, java_program
from tests.compat.programs.program import Program
from tests.crash.processes import kill_and_wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 3
ORDERS = 3_000
CUSTOMERS = 20
STEP_MS = 50  # between two orders: three to four windows of a minute
KILLS = ("application", "mqd-acceptor", "application", "mqd-worker-0", "application", "mqd-worker-1")
PAUSE_S = 5.0  # between two kills
PATIENCE_S = 300.0
TOPICS = ("customers", "orders", "payments", "enriched", "counts", "paid")


SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.streams.initial.rebalance.delay.ms": "0",
    "group.streams.min.session.timeout.ms": "6000",
    "group.streams.session.timeout.ms": "6000",
    "group.streams.min.heartbeat.interval.ms": "500",
    "group.streams.heartbeat.interval.ms": "500",
}


def application(home: Path, bootstrap: str, directory: Path, protocol: str, replicas: int = 1) -> Program:
    directory.mkdir(exist_ok=True)
    return Program(
        java_program(home, "mqd.programs.Orders", bootstrap, str(directory / "state"), protocol, str(replicas)),
        directory / "application.out",
    )


def create_topics(bootstrap: str, replicas: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = [
        NewTopic(name, PARTITIONS, replicas, config={"cleanup.policy": "compact"} if name == "customers" else {})
        for name in TOPICS
    ]
    for future in admin.create_topics(made).values():
        future.result(60)


def orders_of(part: int) -> range:
    """Which orders are placed before kill number `part`."""
    share = ORDERS // (len(KILLS) + 1)
    return range(part * share, (part + 1) * share if part < len(KILLS) else ORDERS)


def place(bootstrap: str, began_ms: int, numbers: range) -> None:
    # Java's partitioner: joined topics must be partitioned alike
    producer = Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random", "enable.idempotence": True})
    if numbers.start == 0:
        for customer in range(CUSTOMERS):
            producer.produce("customers", f"in {customer}", f"c{customer}", timestamp=began_ms - 60_000)
    for number in numbers:
        at = began_ms + number * STEP_MS
        producer.produce("orders", str(number), f"c{number % CUSTOMERS}", timestamp=at)
        producer.produce("payments", f"{number} coins", str(number), timestamp=at)
    assert producer.flush(PATIENCE_S) == 0


def expected(began_ms: int) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {
        name: collections.defaultdict(list) for name in ("enriched", "counts", "paid")
    }
    for number in range(ORDERS):
        customer, at = number % CUSTOMERS, began_ms + number * STEP_MS
        found["enriched"][f"c{customer}"].append(f"{number} in {customer}")
        window = found["counts"][f"c{customer} {at - at % 60_000}"]
        window.append(str(len(window) + 1))
        found["paid"][str(number)].append(f"c{customer} {number} coins")
    return found


def reader(bootstrap: str, topics: Iterable[str]) -> Consumer:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for topic in topics for index in range(PARTITIONS)])
    return consumer


def committed(consumer: Consumer, found: dict[str, dict[str, list[str]]], seconds: float) -> int:
    """Reads for this long; returns how many results there are."""
    for message in consumer.consume(5_000, seconds):
        if message.error() is not None:
            assert message.error().retriable(), message.error()
            continue
        found[message.topic()][message.key().decode()].append(message.value().decode())
    return sum(len(values) for by_key in found.values() for values in by_key.values())


def difference(expected_results: dict[str, dict[str, list[str]]], found: dict[str, dict[str, list[str]]]) -> str:
    lines = [
        f"{topic} {key}: {found[topic].get(key)} instead of {values}"
        for topic, by_key in expected_results.items()
        for key, values in by_key.items()
        if found[topic].get(key) != values
    ]
    lines += [
        f"{topic} {key}: nothing should be there"
        for topic in found
        for key in found[topic]
        if key not in expected_results[topic]
    ]
    return "\n".join([f"{len(lines)} keys differ", *lines[:5]]) if lines else ""


@pytest.mark.parametrize("protocol", ["classic", "streams"])
def test_each_order_counts_once_while_processes_are_killed(protocol: str, start_broker, tmp_path: Path) -> None:
    home = build_java(Path(__file__).parent / "streams", "programs-streams")
    broker: Broker = start_broker(workers=2, config=SETTINGS)
    began_ms = int(time.time() - 600) // 60 * 60_000
    create_topics(broker.bootstrap)
    expected_results = expected(began_ms)
    found: dict[str, dict[str, list[str]]] = {name: collections.defaultdict(list) for name in expected_results}
    count_all = sum(len(values) for by_key in expected_results.values() for values in by_key.values())
    consumer = reader(broker.bootstrap, expected_results)
    place(broker.bootstrap, began_ms, orders_of(0))
    kills, next_kill_s = list(KILLS), 0.0
    deadline = time.monotonic() + PATIENCE_S
    while (count := committed(consumer, found, 1.0)) < count_all:
        assert time.monotonic() < deadline, (
            f"{count} of {count_all} results\n{difference(expected_results, found)}\n{_end_of(tmp_path)}"
        )
        with application(home, broker.bootstrap, tmp_path, protocol) as program:
            while committed(consumer, found, 1.0) < count_all and not program.ended() and time.monotonic() < deadline:
                # once it makes progress again, the processes that were killed before
                if not kills or committed(consumer, found, 0.1) <= count or time.monotonic() < next_kill_s:
                    continue
                victim = kills.pop(0)
                place(broker.bootstrap, began_ms, orders_of(len(KILLS) - len(kills)))
                next_kill_s = time.monotonic() + PAUSE_S
                count = committed(consumer, found, 0.1)
                deadline = time.monotonic() + PATIENCE_S
                if victim == "application":
                    break
                kill_and_wait(broker, victim)
    committed(consumer, found, 5.0)  # results that should not exist
    consumer.close()
    assert not kills, f"not killed: {kills}"
    assert not (problem := difference(expected_results, found)), f"{problem}\n{_end_of(tmp_path)}"


def _end_of(directory: Path) -> str:
    return (directory / "application.out").read_text(errors="replace")[-4000:]
