"""The effect of the settings for latency and throughput, as Markdown for docs/performance.md: one block
for each setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from perf.accounting import cpu_time
from perf.bench import Bench
from perf.brokers import Measured
from perf.cases import SATURATE, WARM_MEGABYTES
from perf.report import markdown_table, number, paragraph
from perf.revision import provenance


def _group_commit(bench: Bench) -> str:
    """acks=all from 1 and from 16 producers, one record in flight each."""
    lines = []
    for window in (0, 200, 1000, 5000):
        broker = bench.brokers.get(f"window-{window}", config={"log.flush.linger.us": str(window)})
        topic = broker.topic("window", 4)
        single, many, cost = [], [], []
        for _ in bench.repeat(f"log.flush.linger.us={window}", 3):
            result, _ = broker.load("latency", topic=topic, batch=1024, count=200, acks=-1)
            single.append(result["produce"]["p50_us"])
            result, spent = broker.load(
                "produce",
                topic=topic,
                partitions=4,
                batch=1024,
                acks=-1,
                connections=16,
                depth=1,
                spin=0,
                milliseconds=800,
            )
            many.append(result["count"] / result["seconds"])
            cost.append(spent.run_us / result["count"])
        lines.append((str(window), number(median(single)), number(median(many)), number(median(cost))))
        bench.brokers.drop(f"window-{window}")
    return markdown_table(
        ("`log.flush.linger.us`", "one producer, p50 µs", "16 producers, batches/s", "CPU-µs a batch"),
        lines,
        right=range(4),
    )


def _flush_on_ack(bench: Bench) -> str:
    broker = bench.brokers.get("uring")
    lines = []
    for flush in ("true", "false"):
        topic = broker.topic(f"ack-{flush}", flush_on_ack=flush)
        for acks in (1, -1):
            p50, p99, rate = [], [], []
            for _ in bench.repeat(f"flush.on.ack={flush}, acks={acks}", 3):
                result, _ = broker.load("latency", topic=topic, batch=1024, count=300, acks=acks)
                p50.append(result["produce"]["p50_us"])
                p99.append(result["produce"]["p99_us"])
                result, _ = broker.load(
                    "produce",
                    topic=topic,
                    batch=16384,
                    acks=acks,
                    connections=4,
                    depth=16,
                    burst=8,
                    count=8000,
                    milliseconds=1000,
                )
                rate.append(result["bytes"] / result["seconds"] / 1e6)
            lines.append(
                (
                    flush,
                    "all" if acks < 0 else str(acks),
                    number(median(p50)),
                    number(median(p99)),
                    number(median(rate)),
                )
            )
        broker.delete(topic)
    return markdown_table(
        ("`flush.on.ack`", "`acks`", "one record, p50 µs", "p99 µs", "16 KiB batches, 64 in flight, MB/s"),
        lines,
        right=range(2, 5),
    )


def _batch_size(bench: Bench) -> str:
    broker = bench.brokers.get("uring")
    lines = []
    for size in (200, 1024, 4096, 16384, 65536):
        arguments = {
            **SATURATE.get(size, {"connections": 8, "depth": 64, "burst": 32}),
            "count": min(300_000, 320_000_000 // size),
        }
        cost, rate = [], []
        for _ in bench.repeat(f"batches of {size} bytes", 3):
            topic = broker.topic(f"batch-{bench.serial()}", flush_on_ack="false")
            bench.prepare(WARM_MEGABYTES)
            result, spent = broker.load("produce", topic=topic, batch=size, acks=1, milliseconds=5000, **arguments)
            cost.append(spent.run_us / result["count"])
            rate.append(result["bytes"] / result["seconds"] / 1e6)
            broker.delete(topic)
        each = median(cost)
        lines.append((f"{size:,}", number(each), number(size / each), number(1e6 / each), number(median(rate))))
    return markdown_table(
        ("bytes of a batch", "CPU-µs a batch", "MB per CPU-second", "batches per CPU-second", "MB/s reached"),
        lines,
        right=range(5),
    )


def _spin(bench: Bench) -> str:
    lines = []
    for spin in (0, 50, 200):
        broker = bench.brokers.get(f"spin-{spin}", config={"worker.spin.us": str(spin)})
        topic = broker.topic("spin", flush_on_ack="false")
        p50, p99, cost, idle = [], [], [], []
        for _ in bench.repeat(f"worker.spin.us={spin}", 3):
            result, spent = broker.load("latency", topic=topic, batch=200, count=2000, acks=1)
            p50.append(result["produce"]["p50_us"])
            p99.append(result["produce"]["p99_us"])
            cost.append(spent.run_us / 2050)
            before, began = cpu_time(broker.worker_pids), time.monotonic()
            time.sleep(1)
            idle.append((cpu_time(broker.worker_pids) - before).run_us / (time.monotonic() - began) / 1e4)
        lines.append((str(spin), number(median(p50)), number(median(p99)), number(median(cost)), number(median(idle))))
        bench.brokers.drop(f"spin-{spin}")
    return markdown_table(
        ("`worker.spin.us`", "one record, acks=1, p50 µs", "p99 µs", "CPU-µs a record", "idle worker, % of a CPU"),
        lines,
        right=range(5),
    )


def _fetch_minimum(bench: Bench) -> str:
    """A producer that sends a record every 2 ms; a consumer that requests more at a time."""
    broker = bench.brokers.get("uring")
    lines = []
    for minimum, wait in ((1, 500), (1, 5), (65536, 5), (65536, 20)):
        topic = broker.topic("minimum", flush_on_ack="false")
        delay = []
        for _ in bench.repeat(f"fetch.min.bytes={minimum}, wait {wait}", 3):
            result, _ = broker.load(
                "end_to_end", topic=topic, batch=1024, count=100, acks=1, bytes_min=minimum, wait_ms=wait
            )
            delay.append(result["end_to_end"]["p50_us"])
        lines.append((f"{minimum:,}", str(wait), number(median(delay))))
    return markdown_table(
        ("`fetch.min.bytes`", "`fetch.max.wait.ms`", "produce to consume of one 1 KiB record, p50 µs"),
        lines,
        right=range(3),
    )


def _fetch_size(bench: Bench, named: list[tuple[str, Measured]], sizes: tuple[int, ...]) -> list[tuple[str, ...]]:
    lines = []
    for size in sizes:
        cost: dict[str, list[float]] = {name: [] for name, _ in named}
        for _ in bench.repeat(f"fetches of {size} bytes", 3):
            for name, broker in named:
                result, spent = broker.load(
                    "fetch", topic=_small_batches(broker), bytes=size, connections=4, milliseconds=300
                )
                cost[name].append(spent.run_us / result["count"])
        each = [median(cost[name]) for name, _ in named]
        lines.append(
            (
                f"{size:,}",
                *(number(value) for value in each),
                f"{100 * (1 - each[0] / each[1]):.0f} %",
                number(size / each[0]),
            )
        )
    return lines


def _small_batches(broker: Measured) -> str:
    """A topic of 1 KiB batches, so that a fetch of any size returns as many bytes as requested."""
    if "small" not in broker.topics:
        broker.topic("small", flush_on_ack="false")
        broker.load(
            "produce", topic="small", batch=1024, acks=1, milliseconds=20_000, **{**SATURATE[1024], "count": 200_000}
        )
    return "small"


def _sendfile(bench: Bench) -> str:
    always = bench.brokers.get("always", config={"sendfile.bytes.min": "0"})
    lines = _fetch_size(
        bench,
        [("sendfile", always), ("copying", bench.brokers.get("copy"))],
        (2048, 4096, 8192, 16384, 65536, 262144, 1 << 20),
    )
    bench.brokers.drop("always")
    return markdown_table(
        ("bytes of a response", "sendfile, CPU-µs", "copying, CPU-µs", "saved", "MB per CPU-second by sendfile"),
        lines,
        right=range(5),
    )


BLOCKS: dict[str, Callable[[Bench], str]] = {
    "group-commit": _group_commit,
    "flush-on-ack": _flush_on_ack,
    "batch-size": _batch_size,
    "worker-spin": _spin,
    "fetch-minimum": _fetch_minimum,
    "sendfile": _sendfile,
}


def settings_page(bench: Bench) -> dict[str, str]:
    """Block name -> Markdown. Needs several minutes."""
    head = paragraph(f"{provenance('python -m perf settings')}.")
    return {"settings": head, **{name: measure(bench) for name, measure in BLOCKS.items()}}
