"""Latency at a high rate that every client may expect: 150,000 records of 1 KiB a second through TCP,
acks=all, to six partitions, with and without a flush before the answer.

The load is open-loop and has encoded its frames beforehand, 16 records in each, so nearly all of the
time is the broker's. Latencies count from when the first record of a request is due: the load sends
the request when its last one is.

Names of figures are the keys of perf/history.jsonl: a new meaning needs a new name.
"""

from __future__ import annotations

from collections.abc import Callable

from perf import loading
from perf.accounting import CpuTime
from perf.bench import Bench
from perf.brokers import Measured

RATE = 150_000  # records/s, 153.6 MB/s of values
RECORDS = 16  # in a request
VALUE, RECORD_OVERHEAD, BATCH_HEADER = 1024, 9, 61
BATCH = BATCH_HEADER + RECORDS * (VALUE + RECORD_OVERHEAD)
FILL_US = (RECORDS - 1) * 1e6 / RATE  # from when the first record of a request is due until its last one is
PARTITIONS = 6
LOAD = {
    "batch": BATCH,
    "records": RECORDS,
    "rate": RATE // RECORDS,
    "acks": -1,
    "connections": PARTITIONS,
    "partitions": PARTITIONS,
    "warm_milliseconds": 1_000,
}
MILLISECONDS, QUICK_MILLISECONDS = 5_000, 2_000
WARM_MEGABYTES = 1_100  # more than one turn appends
SYNC_COUNT = 1_000
P99_MS_MAX, ABOVE_FDATASYNC_MS_MAX, TAIL_RATIO_MAX = 2.0, 3.0, 3.0
WAYS = ("flush.on.ack=false", "flush.on.ack=true")


def _turn(bench: Bench, broker: Measured, way: str) -> tuple[dict, CpuTime]:
    """Into a new topic, which is deleted afterwards. With flushes, fdatasync alone is measured first, of
    as many bytes as one request has.
    """
    flushed = way == "flush.on.ack=true"
    topic = broker.topic(f"headline-{bench.serial()}", PARTITIONS, flush_on_ack=str(flushed).lower())
    found = {}
    try:
        if flushed:
            bench.prepare()
            path = bench.brokers.directory / "fdatasync"
            found = loading.run("sync", path=path, batch=BATCH, count=SYNC_COUNT)
        bench.prepare(WARM_MEGABYTES)
        milliseconds = QUICK_MILLISECONDS if bench.quick else MILLISECONDS
        result, spent = broker.load("paced", topic=topic, milliseconds=milliseconds, **LOAD)
    finally:
        broker.delete(topic)
    return {**result, **found}, spent


def headline(bench: Bench) -> None:
    broker = bench.brokers.get("headline")
    found: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in bench.repeat(f"{RATE:,} records/s of 1 KiB", 3):
        for way in WAYS:
            result, spent = bench.measure_undisturbed(lambda way=way: _turn(bench, broker, way))
            p50, p99, p999 = ((result["acknowledged"][f"{rank}_us"] + FILL_US) / 1e3 for rank in ("p50", "p99", "p999"))
            keep(f"p50 {way}", p50)
            keep(f"p99 {way}", p99)
            keep(f"p999 {way}", p999)
            keep(f"tail {way}", p999 / p99)
            keep(f"late {way}", result["late"]["p99_us"] / 1e3)
            keep(f"broker {way}", spent.run_ns / 1e9 / result["seconds"])
            if "fdatasync" in result:
                disk = result["fdatasync"]["p99_us"] / 1e3
                keep("fdatasync", disk)
                keep("above", p99 - disk)
    what = f"{RATE:,} records/s of 1 KiB, acks=all"
    for way in WAYS:
        bench.add(f"{what}, acknowledged, p50, {way}", "ms", found[f"p50 {way}"])
        target = P99_MS_MAX if way == "flush.on.ack=false" else None
        bench.add(f"{what}, acknowledged, p99, {way}", "ms", found[f"p99 {way}"], target)
        if way == "flush.on.ack=true":
            bench.add(f"fdatasync of {RECORDS} such records in the same turns, p99", "ms", found["fdatasync"])
            bench.add(f"{what}, p99 minus that of fdatasync, {way}", "ms", found["above"], ABOVE_FDATASYNC_MS_MAX)
        bench.add(f"{what}, acknowledged, p99.9, {way}", "ms", found[f"p999 {way}"])
        bench.add(f"{what}, p99.9 as a multiple of p99, {way}", "times", found[f"tail {way}"], TAIL_RATIO_MAX)
        bench.add(
            f"{what}, sent later than due, p99, {way}",
            "ms",
            found[f"late {way}"],
            note="the latencies include it; if it is as large as they are, the load could not send faster",
        )
        bench.add(f"{what}, broker, {way}", "cores", found[f"broker {way}"])
    bench.brokers.drop("headline")


CASES: dict[str, Callable[[Bench], None]] = {"headline": headline}
