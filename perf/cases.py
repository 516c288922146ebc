"""The cases of the bench. Each takes a Bench and adds figures to it; things that are compared are
measured in alternating turns.

Names of figures are the keys of perf/history.jsonl: a new meaning needs a new name.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
import urllib.request
from collections.abc import Callable

from mqd.keeper.loop import DEATH_WINDOW_S
from perf import cases_coordinators, cases_local, loading
from perf.accounting import CpuTime, cpu_time, pss_bytes
from perf.bench import Bench
from perf.brokers import Measured
from perf.micro import compaction as compaction_bench
from perf.paced import headline
from perf.security import connections, tls

BACKENDS = ("uring", "epoll")
LABELS = {"uring": "io_uring", "epoll": "epoll"}
FILL_BATCH_COUNT = 20_000  # of 16 KiB: 328 MB
WARM_MEGABYTES = 600  # more than any measurement below appends

# size of a batch -> how to saturate one worker with it: connections, batches in flight on each, batches
# in one send, batches of one measurement
SATURATE: dict[int, dict[str, int]] = {
    16384: {"connections": 4, "depth": 16, "burst": 8, "count": 24_000},
    1024: {"connections": 8, "depth": 128, "burst": 64, "count": 240_000},
    200: {"connections": 8, "depth": 256, "burst": 128, "count": 700_000},
}


def _microseconds_each(result: dict, spent: CpuTime) -> float:
    return spent.run_us / result["count"]


# -- produce ---------------------------------------------------------------------------------------


def _produce_fresh(bench: Bench, broker: Measured, size: int, **more: object) -> tuple[dict, CpuTime]:
    """Produces into a new topic that is deleted afterwards, so that the page cache stays small and every
    repetition starts in the same state.
    """
    topic = broker.topic(f"produce-{size}-{bench.serial()}", flush_on_ack="false")
    bench.prepare(WARM_MEGABYTES)
    try:
        return broker.load(
            "produce", topic=topic, batch=size, acks=1, milliseconds=10_000, **{**SATURATE[size], **more}
        )
    finally:
        broker.delete(topic)


def produce(bench: Bench) -> None:
    """The cost of appending a batch, with its CRC: acks=1 without flush."""
    targets = {16384: 15.0, 1024: 3.0, 200: 1.0}
    for size, target in targets.items():
        cost: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        rate: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        kernel: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for _ in bench.repeat(f"produce {size}"):
            for backend in BACKENDS:
                result, spent = bench.measure_undisturbed(
                    lambda backend=backend, size=size: _produce_fresh(bench, bench.brokers.get(backend), size)
                )
                cost[backend].append(_microseconds_each(result, spent))
                rate[backend].append(result["count"] / result["seconds"])
                kernel[backend].append(spent.kernel_percent)
        for backend in BACKENDS:
            what = (
                f"{'16 KiB' if size == 16384 else '1 KiB' if size == 1024 else '200-byte'} batch appended,"
                f" {LABELS[backend]}"
            )
            if size == 200:
                bench.add(
                    what,
                    "batches per CPU-second of a worker",
                    [1e6 / value for value in cost[backend]],
                    1e6,
                    at_least=True,
                )
            else:
                bench.add(what, "CPU-µs", cost[backend], target)
            bench.add(f"{what}, rate", "batches/s", rate[backend])
            bench.add(f"{what}, in the kernel", "% of CPU time", kernel[backend])


def flush(bench: Bench) -> None:
    """acks=all with group commit: what the disk allows."""
    cost: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    rate: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in bench.repeat("acks=all with flush", 3):
        for backend in BACKENDS:
            broker = bench.brokers.get(backend)
            topic = broker.topic(f"flush-{bench.serial()}")
            result, spent = broker.load(
                "produce",
                topic=topic,
                batch=16384,
                acks=-1,
                connections=4,
                depth=16,
                burst=8,
                count=12_000,
                milliseconds=1500,
            )
            cost[backend].append(_microseconds_each(result, spent))
            rate[backend].append(result["bytes"] / result["seconds"] / 1e6)
            broker.delete(topic)
    for backend in BACKENDS:
        bench.add(f"16 KiB batch flushed (acks=all, 64 in flight), {LABELS[backend]}", "CPU-µs", cost[backend])
        bench.add(f"16 KiB batch flushed, rate, {LABELS[backend]}", "MB/s", rate[backend])


# -- fetch -----------------------------------------------------------------------------------------


def filled_topic(broker: Measured, name: str = "filled", partitions: int = 1) -> str:
    """A topic with 328 MB of 16 KiB batches, in the page cache."""
    if name not in broker.topics:
        broker.topic(name, partitions, flush_on_ack="false")
        broker.load(
            "produce",
            topic=name,
            partitions=partitions,
            batch=16384,
            acks=1,
            milliseconds=60_000,
            **{**SATURATE[16384], "count": FILL_BATCH_COUNT},
        )
    return name


def fetch(bench: Bench) -> None:
    """Hot reads of 64 KiB and catching up by 1 MiB; sendfile on both backends compared with copying."""
    brokers = {
        "io_uring": bench.brokers.get("uring"),
        "epoll": bench.brokers.get("epoll"),
        "copying": bench.brokers.get("copy"),
    }
    topics = {name: filled_topic(broker) for name, broker in brokers.items()}
    ways = {"64 KiB": {"bytes": 65536, "connections": 4}, "1 MiB": {"bytes": 1 << 20, "connections": 4}}
    for way, arguments in ways.items():
        cost: dict[str, list[float]] = {name: [] for name in brokers}
        rate: dict[str, list[float]] = {name: [] for name in brokers}
        per_second: dict[str, list[float]] = {name: [] for name in brokers}
        for _ in bench.repeat(f"fetch {way}"):
            for name, broker in brokers.items():
                bench.prepare()
                result, spent = bench.measure_undisturbed(
                    lambda broker=broker, name=name, arguments=arguments: broker.load(
                        "fetch", topic=topics[name], milliseconds=500, **arguments
                    )
                )
                cost[name].append(_microseconds_each(result, spent))
                rate[name].append(result["bytes"] / result["seconds"] / 1e9)
                per_second[name].append(result["bytes"] / spent.run_ns)
        for name in brokers:
            hot = way == "64 KiB"
            bench.add(f"fetch of {way}, {name}", "CPU-µs", cost[name], 20.0 if hot and name != "copying" else None)
            bench.add(
                f"fetches of {way}, {name}, throughput",
                "GB/s",
                rate[name],
                2.0 if not hot and name != "copying" else None,
                at_least=True,
            )
            bench.add(f"fetches of {way}, {name}, per CPU-second", "GB per CPU-second", per_second[name])
        saved = [100 * (1 - sent / copied) for sent, copied in zip(cost["io_uring"], cost["copying"], strict=True)]
        bench.add(f"sendfile saves of copying's CPU, {way}", "%", saved, note="expected beforehand: 65 %")


def parked(bench: Bench) -> None:
    """A hundred caught-up consumers compared with none, while nothing arrives."""
    broker = bench.brokers.get("uring")
    topic = broker.topic("parked")
    without, with_them = [], []
    for _ in bench.repeat("caught-up consumers", 3):
        for values, count in ((without, 0), (with_them, 100)):
            if not count:
                values.append(_idle_microseconds(broker, 3.0))
                continue
            with loading.parked(port=broker.port, topic=topic, connections=count):
                time.sleep(0.5)  # until the last fetch is parked: the generator knows only that it has sent it
                values.append(_idle_microseconds(broker, 5.0))
    more = [(busy - idle) / 100 for busy, idle in zip(with_them, without, strict=True)]
    bench.add(
        "caught-up consumer, nothing arrives",
        "CPU-µs/s",
        more,
        10.0,
        note="100 consumers parked, less the same worker without any; 10 CPU-µs/s is 0.001 % of a core",
    )


def _idle_microseconds(broker: Measured, seconds: float) -> float:
    """CPU-µs that the workers spend in a second while there are no requests."""
    before, began = cpu_time(broker.worker_pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_time(broker.worker_pids) - before).run_us / (time.monotonic() - began)


# -- one at a time ---------------------------------------------------------------------------------


def latency(bench: Bench) -> None:
    """One record at a time: a client, an idle broker; echo and fdatasync in the same run."""
    found: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in bench.repeat("latency"):
        for backend in BACKENDS:
            broker = bench.brokers.get(backend)
            flushed, unflushed = broker.topic("latency"), broker.topic("latency-unflushed", flush_on_ack="false")
            label = LABELS[backend]
            bench.prepare()
            one, _ = broker.load("latency", topic=flushed, batch=200, count=3000, acks=1, cpu=loading.WORKER_CPU)
            keep(f"p50 {label}", one["produce"]["p50_us"])
            keep(f"p99 {label}", one["produce"]["p99_us"])
            keep(f"echo p50 {label}", one["echo"]["p50_us"])
            keep(f"times echo {label}", one["produce"]["p99_us"] / one["echo"]["p99_us"])
            every, _ = broker.load(
                "latency",
                topic=flushed,
                batch=200,
                count=400,
                acks=-1,
                cpu=loading.WORKER_CPU,
                path=bench.brokers.directory / "fdatasync",
            )
            keep(f"all {label}", every["produce"]["p50_us"])
            keep(f"sync {label}", every["fdatasync"]["p50_us"])
            keep(f"above {label}", every["produce"]["p50_us"] - every["fdatasync"]["p50_us"])
            for name, topic in (("e2e", unflushed), ("e2e flushed", flushed)):
                result, _ = broker.load("end_to_end", topic=topic, batch=200, count=400, acks=1)
                keep(f"{name} {label}", result["end_to_end"]["p50_us"])
    for label in LABELS.values():
        bench.add(f"produce one record, acks=1, p50, {label}", "µs", found[f"p50 {label}"], 80.0)
        bench.add(f"produce one record, acks=1, p99, {label}", "µs", found[f"p99 {label}"])
        bench.add(f"echo server in the same rounds, p50, {label}", "µs", found[f"echo p50 {label}"])
        bench.add(f"p99 as a multiple of the echo server's, {label}", "times", found[f"times echo {label}"], 5.0)
        bench.add(f"produce one record, acks=all, p50, {label}", "µs", found[f"all {label}"])
        bench.add(f"fdatasync in the same rounds, p50, {label}", "µs", found[f"sync {label}"])
        bench.add(f"acks=all, p50 minus that of fdatasync, {label}", "µs", found[f"above {label}"], 100.0)
        bench.add(f"produce to consume, p50, flush.on.ack=false, {label}", "µs", found[f"e2e {label}"], 200.0)
        bench.add(
            f"produce to consume, p50, flush.on.ack=true, {label}",
            "µs",
            found[f"e2e flushed {label}"],
            note="the default: a consumer sees a record only when it is on disk, so this has an fdatasync in it",
        )


# -- the whole broker ------------------------------------------------------------------------------


def idle(bench: Bench) -> None:
    """Memory and CPU of all processes of an idle 2-worker broker."""
    broker = bench.brokers.get("idle")
    pids = broker.pids()
    time.sleep(3)  # start-up work is over
    shares = []
    for _ in bench.repeat("idle broker", 3):
        before, began = cpu_time(pids).run_us, time.monotonic()
        time.sleep(10 if not bench.quick else 3)
        shares.append((cpu_time(pids).run_us - before) / 1e6 / (time.monotonic() - began) * 100)
    bench.add("idle, all processes of a 2-worker broker", "% of a CPU", shares, 0.3)
    bench.add("memory, all processes of an idle 2-worker broker", "MB (PSS)", [pss_bytes(pids) / 1e6], 250.0)
    bench.brokers.drop("idle")


def ready(bench: Bench) -> None:
    """The time from the command to `mqd ready`, on an empty directory."""
    seconds = []
    for _ in bench.repeat("ready on an empty directory"):
        bench.prepare()
        seconds.append(bench.brokers.get("idle").broker.ready_seconds)
        bench.brokers.drop("idle")
    bench.add("ready, empty directory, 2 workers", "s", seconds, 0.4)


def restart(bench: Bench) -> None:
    """The time from kill -9 of a worker until the broker is ready again; the workers in turn, with
    pauses long enough for the keeper not to treat the kills as a crash loop and delay the restart.
    """
    broker = bench.brokers.get("idle").broker
    seconds = []
    for number in bench.repeat("restart of a killed worker", 8):
        time.sleep(DEATH_WINDOW_S / 4 + 0.5)
        name = f"mqd-worker-{number % 2}"
        victim = broker.pid(name)
        assert victim is not None
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while broker.pid(name) in (None, victim) or not broker.status()["ready"]:
            time.sleep(0.005)
        seconds.append(time.monotonic() - began)
    bench.add("restart of a killed worker, 2 workers", "s", seconds, 0.3)
    bench.brokers.drop("idle")


def ready_full(bench: Bench) -> None:
    """Like ready(), after kill -9 with 10 GB of log."""
    gigabytes = 10 if not bench.quick else 1
    broker = bench.brokers.get("full", workers=2, config={"worker.cpus": ""})
    topic = broker.topic("full", 4, flush_on_ack="false")
    seconds = []
    for round_number in bench.repeat(f"ready with {gigabytes} GB", 3):
        batches = gigabytes * 1_000_000_000 // 16384 if round_number == 0 else 20_000
        broker.load(
            "produce",
            topic=topic,
            partitions=4,
            connections=4,
            depth=16,
            burst=8,
            batch=16384,
            acks=1,
            count=batches,
            milliseconds=150_000,
            timeout_s=240,
        )
        broker.broker.kill_all()
        bench.prepare()
        seconds.append(broker.broker.start().ready_seconds)
        broker.worker_pids = broker.broker.pids("worker")
    bench.add(f"ready, {gigabytes} GB of log after kill -9, 2 workers", "s", seconds, 3.0 if gigabytes == 10 else None)
    bench.brokers.drop("full")


def partitions(bench: Bench) -> None:
    """2,000 partitions compared with one, by the same connections. Under full load the batches that
    arrive for one partition in a turn share a write, those for 2,000 partitions cannot. With a single
    batch in flight no batches share a write, which shows the cost of the number of partitions alone.
    """
    broker = bench.brokers.get("many")
    many = broker.topic("many", 2000, flush_on_ack="false")
    saturated = {"connections": 8, "depth": 16, "burst": 8}
    ways = (
        ("16 KiB batches", 16384, {**saturated, "count": 24_000}, 25.0),
        ("1 KiB batches", 1024, {**saturated, "count": 120_000}, None),
        ("16 KiB batches, one in flight", 16384, {"connections": 1, "depth": 1, "burst": 1, "count": 8_000}, None),
    )
    # every partition has its first segment
    broker.load(
        "produce",
        topic=many,
        partitions=2000,
        batch=16384,
        acks=1,
        milliseconds=20_000,
        **{**saturated, "count": 16_000},
    )
    for label, size, arguments, target in ways:
        lost, rate_lost = [], []
        for _ in bench.repeat(f"2,000 partitions, {label}"):
            one, one_spent = bench.measure_undisturbed(
                lambda size=size, arguments=arguments: _produce_fresh(bench, broker, size, **arguments)
            )
            two, two_spent = bench.measure_undisturbed(
                lambda size=size, arguments=arguments: _produce_many(bench, broker, many, size, arguments)
            )
            lost.append(100 * (1 - _microseconds_each(one, one_spent) / _microseconds_each(two, two_spent)))
            rate_lost.append(100 * (1 - (two["count"] / two["seconds"]) / (one["count"] / one["seconds"])))
        bench.add(
            f"throughput lost with 2,000 partitions instead of 1, {label}",
            "% of throughput per CPU-second",
            lost,
            target,
        )
        bench.add(f"throughput lost with 2,000 partitions instead of 1, {label}, by rate", "% of rate", rate_lost)
    bench.brokers.drop("many")
    alone: dict[int, list[float]] = {1: [], 2000: []}
    for _ in bench.repeat("write(2) without a broker", 3):
        for files, values in alone.items():
            bench.prepare(2 * WARM_MEGABYTES)
            values.append(
                loading.run("files", path=bench.brokers.directory, files=files, batch=16380, count=24_000)[
                    "cpu_us_each"
                ]
            )
    for files, values in alone.items():
        bench.add(f"write(2) of 16 KiB without a broker, to one of {files:,} files", "CPU-µs", values)


def _produce_many(bench: Bench, broker: Measured, topic: str, size: int, arguments: dict) -> tuple[dict, CpuTime]:
    bench.prepare(WARM_MEGABYTES)
    return broker.load("produce", topic=topic, partitions=2000, batch=size, acks=1, milliseconds=20_000, **arguments)


def _forwarded_batches(broker: Measured) -> float:
    """Batches that the workers have forwarded to one another, from the broker's own metrics."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{broker.broker.status()['metrics_port']}/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if "batches_forwarded" in line and not line.startswith("#") and "_created" not in line
    )


def forward(bench: Bench) -> None:
    """Batches that arrive at the worker that owns their partition, compared with batches that are
    forwarded to the other worker.
    """
    broker = bench.brokers.get("two")
    for size, label in ((16384, "16 KiB"), (1024, "1 KiB")):
        cost: dict[str, list[float]] = {"local": [], "forwarded": []}
        for number in bench.repeat(f"forwarding {size}", 3):
            for attempt in range(FORWARD_ATTEMPTS):
                way, value = _forward_once(bench, broker, size, shift=attempt % 2)
                if way:
                    cost[way].append(value)
                if min(map(len, cost.values())) > number:
                    break
            else:
                raise loading.LoadFailed(f"the connections were never distributed both ways in {attempt + 1} attempts")
        for way, values in cost.items():
            bench.add(f"{label} batch {way}, both workers", "CPU-µs", values)
        more = statistics.median(cost["forwarded"]) - statistics.median(cost["local"])
        bench.add(f"CPU added by forwarding, {label} batch", "CPU-µs more", [more])


def _forward_once(bench: Bench, broker: Measured, size: int, shift: int) -> tuple[str, float]:
    """("local" or "forwarded", CPU-µs a batch); "" instead if the two connections went to the same worker."""
    topic = broker.topic(f"forward-{bench.serial()}", 2, flush_on_ack="false")
    arguments = {**SATURATE[size], "connections": 2, "partitions": 2, "shift": shift}
    arguments["count"] = SATURATE[size]["count"] // 2
    before = _forwarded_batches(broker)
    result, spent = broker.load("produce", topic=topic, batch=size, acks=1, milliseconds=10_000, **arguments)
    share = (_forwarded_batches(broker) - before) / result["count"]
    broker.delete(topic)
    way = "local" if share < 0.05 else "forwarded" if share > 0.95 else ""
    return way, _microseconds_each(result, spent)


def disk(bench: Bench) -> None:
    """The disk: its fdatasync alone."""
    values = []
    for _ in range(3):
        values.append(loading.run("sync", path=bench.brokers.directory / "fdatasync", count=200)["fdatasync"]["p50_us"])
    bench.add("fdatasync of 1 KiB, p50", "µs", values)


def compaction(bench: Bench) -> None:
    """Compaction of 1 KiB records to the last value of each key, by one core."""
    for codec, target in (("none", 100.0), ("zstd", None)):
        values = [
            compaction_bench.megabytes_per_cpu_second(bench.brokers.directory, codec)
            for _ in bench.repeat(f"compaction, {codec}", 3)
        ]
        bench.add(
            f"compaction of 1 KiB records, {'uncompressed' if codec == 'none' else codec}",
            "MB per CPU-second",
            values,
            target,
            at_least=True,
        )


# -- surge ------------------------------------------------------------------------------------------

STEADY_CLIENTS = 10
SURGE_FACTOR = 10  # the rate of the surging producer, as a multiple of that of each other one
STEADY_LOAD = {
    "batch": 16384,
    "rate": 1_000,
    "acks": -1,
    "connections": STEADY_CLIENTS,
    "partitions": STEADY_CLIENTS + 1,
}
SURGE_MS, SURGE_QUICK_MS = 4_000, 2_000
SURGE_WARM_MS = 1_000
FORWARD_ATTEMPTS = 12  # the acceptor distributes connections; two of one load may go to the same worker
SURGE_RATIO_MAX = 1.5
SURGE_WAYS = {"flushed before the answer": "true", "answered from memory": "false"}


def _surge_order(number: int) -> tuple[int, ...]:
    """The surge factors of round `number`, 0 meaning none; the order alternates between rounds."""
    return (0, SURGE_FACTOR) if number % 2 == 0 else (SURGE_FACTOR, 0)


def _surge_ratios(tails: dict[int, list[float]]) -> list[float]:
    """For each round, the p99 of the other producers during the surge, as a multiple of their p99 without it."""
    return [surged / alone for surged, alone in zip(tails[SURGE_FACTOR], tails[0], strict=True)]


def _steady_p99_us(bench: Bench, broker: Measured, topic: str, surge: int) -> float:
    milliseconds = SURGE_QUICK_MS if bench.quick else SURGE_MS
    arguments = {**STEADY_LOAD, "surge": surge, "milliseconds": milliseconds, "warm_milliseconds": SURGE_WARM_MS}
    bench.prepare()
    result, _ = broker.load("paced", topic=topic, **arguments)
    return float(result["acknowledged"]["p99_us"])


def surge(bench: Bench) -> None:
    """The effect of one producer's surge on others. Open loop: latencies count from when a request was due."""
    broker = bench.brokers.get("surge")
    for number, (way, flush) in enumerate(SURGE_WAYS.items()):
        topic = broker.topic(f"surge-{number}", partitions=STEADY_CLIENTS + 1, flush_on_ack=flush)
        tails: dict[int, list[float]] = {0: [], SURGE_FACTOR: []}
        for turn in bench.repeat(f"a surge, {way}"):
            for times in _surge_order(turn):
                tails[times].append(_steady_p99_us(bench, broker, topic, times))
        bench.add(f"p99 of {STEADY_CLIENTS} producers, {way}", "µs", tails[0])
        bench.add(
            f"p99 of {STEADY_CLIENTS} producers beside one with {SURGE_FACTOR} times the rate, {way}",
            "µs",
            tails[SURGE_FACTOR],
        )
        name = f"p99 beside a producer with {SURGE_FACTOR} times the rate, as a multiple of that without it, {way}"
        bench.add(name, "times", _surge_ratios(tails), SURGE_RATIO_MAX)
    bench.brokers.drop("surge")


# In the order in which they run: the largest first, since it touches the memory that the others use later.
CASES: dict[str, Callable[[Bench], None]] = {
    "ready_full": ready_full,
    "ready": ready,
    "restart": restart,
    "idle": idle,
    "disk": disk,
    "latency": latency,
    **headline.CASES,
    "produce": produce,
    "fetch": fetch,
    "parked": parked,
    "partitions": partitions,
    "forward": forward,
    "flush": flush,
    "compaction": compaction,
    "surge": surge,
    **cases_coordinators.CASES,
    **cases_local.CASES,
    **tls.CASES,
    **connections.CASES,
}
