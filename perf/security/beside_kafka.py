"""TLS of mqd compared with Apache Kafka's: the same certificate, the same load generator, alternating within one
run; the CPU of all processes of the broker for each megabyte of records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from perf import loading
from perf.bench import Bench
from perf.peers import processes
from perf.peers.apache_kafka import PROPERTIES, ApacheKafka
from perf.peers.peer import Load
from tests.certificates import Authority
from tests.ports import free_port

MIB = 1 << 20
PRODUCED = {"batch": 16384, "acks": 1, "connections": 4, "depth": 16, "burst": 8}
FETCHED = {"bytes": 65536, "connections": 4}
FILLED, WARM, MEASURED = 16_384, 12_000, 12_000  # batches, or fetches; the warm-up is for Java's compiler
TIME_LIMIT_MS = 60_000
REPETITIONS = 3
WHAT: dict[str, tuple[str, dict[str, object]]] = {
    "16 KiB batches produced": ("produce", {"topic": "produced", **PRODUCED}),
    "64 KiB fetched": ("fetch", {"topic": "filled", **FETCHED}),
}
WAYS = {"plain": 0, "TLS": 1}
RATIO_MAX = 0.5  # of Apache Kafka's CPU


class Side:
    """A broker with a plaintext listener and one with TLS. `pids`: of all its processes."""

    def __init__(self, ports: dict[str, int], pids: Callable[[], list[int]], make_topic: Callable[[str], None]) -> None:
        self._ports, self._pids = ports, pids
        self.make_topic = make_topic

    def wait_until_served(self, topic: str) -> None:
        """Waits for the leader of a new topic."""
        end_s = time.monotonic() + TIME_LIMIT_MS / 1000
        while True:
            try:
                self.cost("produce", "plain", topic=topic, count=4, **PRODUCED)
                return
            except loading.LoadFailed:
                if time.monotonic() > end_s:
                    raise

    def cost(self, what: str, way: str, **arguments: object) -> float:
        """CPU-ms for each MiB."""
        pids = self._pids()
        before = processes.cpu_seconds(pids)
        result = loading.run(what, port=self._ports[way], tls=WAYS[way], milliseconds=TIME_LIMIT_MS, **arguments)
        return (processes.cpu_seconds(pids) - before) * 1000 / (result["bytes"] / MIB)


def _mqd(bench: Bench, keystore: Path) -> Side:
    port = free_port()
    config = {"listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}", "ssl.keystore.location": str(keystore)}
    broker = bench.brokers.get("tls-beside-kafka", config=config)
    return Side(
        {"plain": broker.port, "TLS": port}, broker.pids, lambda name: str(broker.topic(name, flush_on_ack="false"))
    )


def _kafka(bench: Bench, keystore: Path) -> tuple[ApacheKafka, Side]:
    """Raises Unavailable."""
    port = free_port()
    peer = ApacheKafka(bench.brokers.directory / "kafka")
    peer.more = {
        "listener.security.protocol.map": f"{PROPERTIES['listener.security.protocol.map']},SSL:SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
    }
    peer.more_listeners = f",SSL://127.0.0.1:{port}"
    peer.prepare()
    peer.start()
    load = Load(acks="1", partitions=1)
    return peer, Side({"plain": peer.port, "TLS": port}, peer.pids, lambda name: peer.make_topic(name, load))


def beside_kafka(bench: Bench) -> str:
    """Batches of 16 KiB produced, 64 KiB fetched; TLS 1.3 with AES-GCM. Returns Kafka's version."""
    keystore = Authority().issue("broker").write(bench.brokers.directory / "broker.pem")
    peer, kafka = _kafka(bench, keystore)
    sides = {"mqd": _mqd(bench, keystore), "Apache Kafka": kafka}
    try:
        for side in sides.values():
            for topic in ("filled", "produced"):
                side.make_topic(topic)
                side.wait_until_served(topic)
            side.cost("produce", "plain", topic="filled", count=FILLED, **PRODUCED)
            for way in WAYS:
                side.cost("produce", way, topic="produced", count=WARM, **PRODUCED)
                side.cost("fetch", way, topic="filled", count=WARM, **FETCHED)
        for what, (verb, arguments) in WHAT.items():
            costs: dict[tuple[str, str], list[float]] = {(name, way): [] for name in sides for way in WAYS}
            for _ in bench.repeat(f"{what}, beside Apache Kafka", REPETITIONS):
                for (name, way), found in costs.items():
                    bench.prepare()
                    found.append(sides[name].cost(verb, way, count=MEASURED, **arguments))
            for way in WAYS:
                for name in sides:
                    bench.add(f"{what}, {way}, {name}", "CPU-ms per MiB", costs[name, way])
                pairs = zip(costs["mqd", way], costs["Apache Kafka", way], strict=True)
                target = RATIO_MAX if way == "TLS" else None
                bench.add(f"{what}, {way}, mqd's part of Apache Kafka's", "times", [a / b for a, b in pairs], target)
        return peer.version()
    finally:
        peer.drop()
        bench.brokers.drop("tls-beside-kafka")
