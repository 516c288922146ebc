"""TLS compared with plain text: two listeners of one broker, the same topics, measured alternately.

Names of figures are the keys of perf/history.jsonl: a new meaning needs a new name.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from perf import loading
from perf.accounting import CpuTime, cpu_time, pss_bytes
from perf.bench import Bench
from perf.brokers import Measured
from tests.certificates import Authority
from tests.ports import free_port

FILL = {"batch": 16384, "acks": 1, "connections": 4, "depth": 16, "burst": 8}
IDLE_COUNT = 400
WAYS = {"plain": 0, "TLS": 1}


def _start(bench: Bench) -> tuple[Measured, dict[str, int]]:
    """The broker, and the ports by way."""
    port = free_port()
    keystore = Authority().issue("broker").write(bench.brokers.directory / "broker.pem")
    config = {"listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}", "ssl.keystore.location": str(keystore)}
    broker = bench.brokers.get("tls", config=config)
    return broker, {"plain": broker.port, "TLS": port}


def _load(broker: Measured, what: str, **arguments: object) -> tuple[dict, CpuTime]:
    before = cpu_time(broker.worker_pids)
    result = loading.run(what, **arguments)
    return result, cpu_time(broker.worker_pids) - before


def tls(bench: Bench) -> None:
    """CPU of the whole worker for 64 KiB fetched and 16 KiB produced, TLS 1.3 with AES-GCM."""
    broker, ports = _start(bench)
    filled = broker.topic("filled", flush_on_ack="false")
    _load(broker, "produce", topic=filled, port=broker.port, count=20_000, milliseconds=60_000, **FILL)
    works: dict[str, Callable[[str], tuple[dict, CpuTime]]] = {
        "fetch of 64 KiB": lambda way: _load(
            broker, "fetch", topic=filled, port=ports[way], tls=WAYS[way], bytes=65536, connections=4, milliseconds=1000
        ),
        "16 KiB batch appended": lambda way: _produce(bench, broker, ports[way], WAYS[way]),
        "fetch of 1 MiB": lambda way: _load(
            broker,
            "fetch",
            topic=filled,
            port=ports[way],
            tls=WAYS[way],
            bytes=1 << 20,
            connections=4,
            milliseconds=1000,
        ),
    }
    targets = {"fetch of 64 KiB": 3.5, "16 KiB batch appended": 2.5}
    for what, work in works.items():
        cost: dict[str, list[float]] = {way: [] for way in WAYS}
        speed: list[float] = []
        for _ in bench.repeat(f"{what}, TLS"):
            for way in WAYS:
                bench.prepare()
                result, spent = bench.measure_undisturbed(lambda way=way, work=work: work(way))
                cost[way].append(spent.run_us / result["count"])
                if way == "TLS":
                    speed.append(result["bytes"] / spent.run_ns)
        for way, other in (("plain", "TLS"), ("TLS", "plain")):
            bench.add(f"{what}, {way}, alternating with {other}", "CPU-µs", cost[way])
        ratio = [secure / plain for secure, plain in zip(cost["TLS"], cost["plain"], strict=True)]
        bench.add(f"{what}, TLS as a multiple of plain", "times", ratio, targets.get(what))
        if what == "fetch of 1 MiB":
            bench.add("fetches of 1 MiB, TLS, per CPU-second", "GB per CPU-second", speed, 1.0, at_least=True)
    bench.brokers.drop("tls")


def _produce(bench: Bench, broker: Measured, port: int, secure: int) -> tuple[dict, CpuTime]:
    topic = broker.topic(f"produce-{bench.serial()}", flush_on_ack="false")
    try:
        return _load(broker, "produce", topic=topic, port=port, tls=secure, count=12_000, milliseconds=20_000, **FILL)
    finally:
        broker.delete(topic)


def tls_idle(bench: Bench) -> None:
    """Memory of a connection that waits for records, over TLS and plain."""
    broker, ports = _start(bench)
    topic = broker.topic("parked")
    held: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in bench.repeat("idle TLS connections", 3):
        for way, secure in WAYS.items():
            before = pss_bytes(broker.worker_pids)
            with loading.parked(port=ports[way], tls=secure, topic=topic, connections=IDLE_COUNT):
                time.sleep(1.0)  # until the last of them is parked: the generator only knows that it has sent
                held[way].append((pss_bytes(broker.worker_pids) - before) / IDLE_COUNT / 1024)
            time.sleep(0.5)
    for way in WAYS:
        bench.add(f"memory of an idle connection, {way}", "KiB", held[way][:1], note="the first measurement")
    more = held["TLS"][0] - held["plain"][0]
    bench.add("memory of an idle connection, TLS above plain", "KiB", [more], 16.0)
    bench.brokers.drop("tls")


CASES: dict[str, Callable[[Bench], None]] = {"tls": tls, "tls_idle": tls_idle}
