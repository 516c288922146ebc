"""The shared-memory path, compared with TCP in the same run: the rates of a producer and a consumer on the
broker's host, and the CPU time of both sides.

C programs: perf/native/local (through native/client/client.h). Python: perf/local_load.py, the
package's own client. Both run on the clients' CPU, one worker on CPU 0, so that the kernel accounts
for one core each. TCP's C side is the load generator, whose batches are encoded beforehand: it
spends less than a client that builds them, so its rates are the broker's.

Names of figures are the keys of perf/history.jsonl: a new meaning needs a new name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from perf import loading
from perf.accounting import CpuTime, cpu_time
from perf.bench import Bench
from perf.brokers import Measured
from perf.report import REACHED, Figure, markdown_table, median_text, number, spread

RECORD = 100
BURST_RECORDS = 10_000_000  # 1 GB of records, plus the overhead of the batches
WARM_MEGABYTES = 1_300
RECORD_OVERHEAD = 12  # bytes around such a record in a batch
HEADLINE_RATE, HEADLINE_RECORD, HEADLINE_MILLISECONDS = 800_000, 1024, 5_000
HEADLINE_WARM_MEGABYTES = 4_400
ALONE = "if each side had a whole core"
PYTHON_TARGETS = {"produce_batch": 5e6, "produce": 1.5e6, "consume_batch": 10e6, "consume": 1e6}
# the targets by the names of their figures: pages judge recorded figures by them
TARGETS = {f"local: {what}, shared memory": target for what, target in PYTHON_TARGETS.items()}
PYTHON_RECORDS = {
    "produce_batch": 4_000_000,
    "produce": 500_000,
    "consume_batch": 8_000_000,
    "consume": 1_000_000,
    "poll": 500_000,
}


def broker_of(bench: Bench) -> Measured:
    return bench.brokers.get("local", workers=1)


def polling_broker_of(bench: Bench) -> Measured:
    """A broker whose worker polls for a millisecond before it sleeps."""
    return bench.brokers.get("local-awake", workers=1, config={"worker.spin.us": "1000"})


def socket_of(broker: Measured) -> str:
    return str(broker.broker.data_dir / "run" / "client.sock")


def _finish(command: Sequence[str], timeout_s: float) -> dict:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=loading.ROOT)
    except subprocess.TimeoutExpired:
        raise loading.LoadFailed(f"{' '.join(command)}: not done within {timeout_s:.0f} s") from None
    if done.returncode:
        raise loading.LoadFailed(
            f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:] or done.stdout[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _native(broker: Measured, what: str, **arguments: object) -> tuple[dict, CpuTime]:
    words = {"socket": socket_of(broker), **arguments}
    command = [
        "taskset",
        "-c",
        str(loading.client_cpu()),
        str(loading.build_local()),
        what,
        *(f"{name}={value}" for name, value in words.items()),
    ]
    before = cpu_time(broker.worker_pids)
    result = _finish(command, 180)
    return result, cpu_time(broker.worker_pids) - before


def python_command(broker: Measured, what: str, transport: str, **arguments: object) -> list[str]:
    words = {"transport": transport, "bootstrap": f"127.0.0.1:{broker.port}", **arguments}
    return [
        "taskset",
        "-c",
        str(loading.client_cpu()),
        sys.executable,
        "-m",
        "perf.local_load",
        what,
        *(f"{name}={value}" for name, value in words.items()),
    ]


def _python(broker: Measured, what: str, transport: str, **arguments: object) -> tuple[dict, CpuTime]:
    before = cpu_time(broker.worker_pids)
    result = _finish(python_command(broker, what, transport, **arguments), 180)
    if result["transport"] != transport:
        raise loading.LoadFailed(f"{what} used {result['transport']} instead of {transport}")
    return result, cpu_time(broker.worker_pids) - before


class _Samples:
    """Collects values by name, in the order of their first value."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def load(self, name: str, result: dict, spent: CpuTime) -> None:
        """Adds a rate, and the CPU time of both sides for a million records."""
        self(f"{name}: records/s", result["count"] / result["seconds"])
        self(f"{name}: client", result["client_cpu_seconds"] * 1e6 / result["count"])
        self(f"{name}: broker", spent.run_us / result["count"])

    def add_to(self, bench: Bench, name: str, target: float | None = None, note: str = "") -> None:
        bench.add(f"local: {name}", "records/s", self.values[f"{name}: records/s"], target, at_least=True, note=note)
        bench.add(f"local: {name}, client", "CPU-s per million records", self.values[f"{name}: client"])
        bench.add(f"local: {name}, broker", "CPU-s per million records", self.values[f"{name}: broker"])
        slower = [
            1e6 / max(pair) for pair in zip(self.values[f"{name}: client"], self.values[f"{name}: broker"], strict=True)
        ]
        bench.add(
            f"local: {name}, {ALONE}",
            "records/s",
            slower,
            note="by CPU time: what the busier side does with a core of its own",
        )


def native_produce(bench: Bench) -> None:
    """Records of 100 B that the C client puts into batches in the memory shared with the worker, until
    all are acknowledged (acks=1, flush.on.ack=false).
    """
    broker, samples = broker_of(bench), _Samples()
    for _ in bench.repeat("local: C producer"):
        for batch in (16384, 65536):
            for way in ("shared memory", "TCP"):
                topic = broker.topic(f"local-{bench.serial()}", flush_on_ack="false")
                bench.prepare(WARM_MEGABYTES)
                records = batch // (RECORD + RECORD_OVERHEAD)
                if way == "TCP":
                    arguments = {
                        "connections": 4,
                        "depth": 16,
                        "burst": 8,
                        "count": BURST_RECORDS // records,
                        "milliseconds": 20_000,
                    }
                    result, spent = bench.measure_undisturbed(
                        lambda topic=topic, batch=batch, records=records, arguments=arguments: broker.load(
                            "produce", topic=topic, batch=batch, records=records, acks=1, **arguments
                        )
                    )
                    result = {**result, "count": result["count"] * records}
                else:
                    result, spent = bench.measure_undisturbed(
                        lambda topic=topic, batch=batch: _native(
                            broker,
                            "produce",
                            topic=topic,
                            record=RECORD,
                            batch=batch,
                            count=BURST_RECORDS,
                            milliseconds=20_000,
                        )
                    )
                samples.load(f"C producer, {batch // 1024} KiB batches, {way}", result, spent)
                broker.delete(topic)
            bench.prepare(WARM_MEGABYTES)
            alone = loading.run(
                "files",
                path=bench.brokers.directory,
                files=1,
                batch=batch,
                count=BURST_RECORDS * (RECORD + RECORD_OVERHEAD) // batch,
            )["cpu_us_each"]
            samples(f"floor {batch // 1024}", batch // (RECORD + RECORD_OVERHEAD) / alone * 1e6)
    for batch, target in ((16, 12e6), (64, 20e6)):
        samples.add_to(bench, f"C producer, {batch} KiB batches, shared memory", target)
        samples.add_to(
            bench, f"C producer, {batch} KiB batches, TCP", note="batches encoded beforehand: no client's work is in it"
        )
        bench.add(
            f"local: write(2) of {batch} KiB without a broker, one core",
            "records/s",
            samples.values[f"floor {batch}"],
            note="write(2) into the page cache and nothing else, in the same run",
        )


def native_latency(bench: Bench) -> None:
    """One record, from before it is built until its acknowledgement is processed (acks=1): the worker
    polls, the client spins. TCP against the same worker.
    """
    broker, samples = polling_broker_of(bench), _Samples()
    topic = broker.topic("latency", flush_on_ack="false")
    for _ in bench.repeat("local: round trip"):
        bench.prepare()
        local, _ = _native(broker, "latency", topic=topic, record=RECORD, count=5000, spin=2000)
        tcp, _ = broker.load("latency", topic=topic, batch=200, count=3000, acks=1, cpu=loading.WORKER_CPU)
        samples("shm p50", local["p50_us"])
        samples("shm p99", local["p99_us"])
        samples("tcp p50", tcp["produce"]["p50_us"])
        samples("tcp p99", tcp["produce"]["p99_us"])
        for way in ("shm", "tcp"):
            result, _ = _python(broker, "round_trip", way, topic=topic, record=RECORD, count=1000, spin=2000)
            samples(f"python {way} p50", result["p50_us"])
            samples(f"python {way} p99", result["p99_us"])
    bench.add("local: round trip of one record, p50, shared memory", "µs", samples.values["shm p50"], 15.0)
    bench.add("local: round trip of one record, p99, shared memory", "µs", samples.values["shm p99"], 60.0)
    bench.add("local: round trip of one record, p50, TCP", "µs", samples.values["tcp p50"])
    bench.add("local: round trip of one record, p99, TCP", "µs", samples.values["tcp p99"])
    for way, label in (("shm", "shared memory"), ("tcp", "TCP")):
        for quantile in ("p50", "p99"):
            bench.add(
                f"local: round trip of one record in Python, {quantile}, {label}",
                "µs",
                samples.values[f"python {way} {quantile}"],
            )


def python_produce(bench: Bench) -> None:
    """The package's Producer: arrays of records, and one record a call. On TCP it is librdkafka."""
    broker, samples = broker_of(bench), _Samples()
    for _ in bench.repeat("local: Python producer", 3):
        for what, transports in (("produce_batch", ("shm", "tcp")), ("produce", ("shm", "tcp"))):
            for transport in transports:
                topic = broker.topic(f"local-{bench.serial()}", flush_on_ack="false")
                bench.prepare(600)
                count = PYTHON_RECORDS[what] // (4 if transport == "tcp" else 1)
                result, spent = bench.measure_undisturbed(
                    lambda what=what, transport=transport, topic=topic, count=count: _python(
                        broker, what, transport, topic=topic, record=RECORD, count=count
                    )
                )
                samples.load(f"{what}, {_label(transport)}", result, spent)
                broker.delete(topic)
    for what in ("produce_batch", "produce"):
        samples.add_to(bench, f"{what}, shared memory", PYTHON_TARGETS[what])
        samples.add_to(bench, f"{what}, TCP")


def _label(transport: str) -> str:
    return "shared memory" if transport == "shm" else "TCP"


def python_consume(bench: Bench) -> None:
    """The package's Consumer over a log that is in the page cache: columns, lists of messages, one
    message a call.
    """
    broker, samples = broker_of(bench), _Samples()
    topic = broker.topic("local-filled", flush_on_ack="false")
    bench.prepare(WARM_MEGABYTES)
    _native(
        broker,
        "produce",
        topic=topic,
        record=RECORD,
        batch=65536,
        count=PYTHON_RECORDS["consume_batch"],
        milliseconds=60_000,
    )
    for _ in bench.repeat("local: Python consumer", 3):
        for what in ("consume_batch", "consume", "poll"):
            for transport in ("shm", "tcp"):
                bench.prepare()
                count = PYTHON_RECORDS[what] // (4 if transport == "tcp" else 1)
                result, spent = bench.measure_undisturbed(
                    lambda what=what, transport=transport, count=count: _python(
                        broker, what, transport, topic=topic, record=RECORD, count=count
                    )
                )
                samples.load(f"{what}, {_label(transport)}", result, spent)
    for what in ("consume_batch", "consume", "poll"):
        samples.add_to(
            bench,
            f"{what}, shared memory",
            PYTHON_TARGETS.get(what),
            note="records/s of messages taken one by one from lists" if what == "consume" else "",
        )
        samples.add_to(bench, f"{what}, TCP")


def idle_consumer(bench: Bench) -> None:
    """A consumer that has read everything and waits in poll: its own CPU time, and how much more the
    reactor spends than without it.
    """
    broker, samples = broker_of(bench), _Samples()
    topic = broker.topic("local-idle", flush_on_ack="false")
    for _ in bench.repeat("local: idle consumer", 3):
        samples("no client", _idle_us(broker, 2.0))
        with subprocess.Popen(
            python_command(broker, "idle", "shm", topic=topic, record=RECORD, seconds=4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=loading.ROOT,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            if process.stdout.readline() != "ready\n":
                raise loading.LoadFailed(f"the idle consumer: {process.stderr.read()[-2000:]}")
            time.sleep(0.5)  # it has called poll, and waits
            before = cpu_time([process.pid]).run_us
            samples("worker", _idle_us(broker, 2.0))
            samples("client", (cpu_time([process.pid]).run_us - before) / 2.0)
            _, errors = process.communicate(timeout=60)
            if process.returncode:
                raise loading.LoadFailed(f"the idle consumer: {errors[-2000:]}")
    more = [
        with_it - without
        for with_it, without in zip(samples.values["worker"], samples.values["no client"], strict=True)
    ]
    bench.add(
        "local: idle consumer, its own CPU",
        "CPU-µs/s",
        samples.values["client"],
        10.0,
        note="10 CPU-µs/s is 0.001 % of a core",
    )
    bench.add("local: idle consumer, the reactor's CPU", "CPU-µs/s", more, 10.0)


def _idle_us(broker: Measured, seconds: float) -> float:
    """CPU time of the reactor, which serves clients; the worker also has other threads."""
    before, began = cpu_time(broker.worker_pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_time(broker.worker_pids) - before).reactor_ns / 1e3 / (time.monotonic() - began)


def headline(bench: Bench) -> None:
    """800,000 records of 1 KiB a second for five seconds, open-loop: latency from when a record is due
    to its acknowledgement, and the cores that both sides use.
    """
    broker, samples = broker_of(bench), _Samples()
    for _ in bench.repeat("local: 800,000 records/s of 1 KiB", 3):
        topic = broker.topic(f"local-{bench.serial()}", flush_on_ack="false")
        bench.prepare(HEADLINE_WARM_MEGABYTES)
        result, spent = bench.measure_undisturbed(
            lambda topic=topic: _native(
                broker,
                "pace",
                topic=topic,
                record=HEADLINE_RECORD,
                rate=HEADLINE_RATE,
                milliseconds=HEADLINE_MILLISECONDS,
                batch=65536,
                linger=200,
                data=256 << 20,
            )
        )
        samples("rate", result["count"] / result["seconds"])
        samples("p50", result["p50_us"] / 1e3)
        samples("p99", result["p99_us"] / 1e3)
        samples("max", result["max_us"] / 1e3)
        samples("broker", spent.run_ns / 1e9 / result["seconds"])
        samples("client", result["client_cpu_seconds"] / result["seconds"])
        broker.delete(topic)
    bench.add(
        "local: 1 KiB records at 800,000/s, actual rate",
        "records/s",
        samples.values["rate"],
        0.99 * HEADLINE_RATE,
        at_least=True,
    )
    bench.add("local: 1 KiB records at 800,000/s, acknowledged, p50", "ms", samples.values["p50"])
    bench.add("local: 1 KiB records at 800,000/s, acknowledged, p99", "ms", samples.values["p99"], 2.0)
    bench.add("local: 1 KiB records at 800,000/s, acknowledged, longest", "ms", samples.values["max"])
    bench.add("local: 1 KiB records at 800,000/s, broker", "cores", samples.values["broker"])
    bench.add("local: 1 KiB records at 800,000/s, client", "cores", samples.values["client"])


def page(figures: Sequence[Figure], facts: dict, date: str) -> str:
    """The block of docs/performance.md: every figure of these cases. Rates are shown with the CPU time
    of a million records, and the rate that follows from it when each side has a whole core.
    `facts`: machine(), and how many measurements were disturbed.
    """
    mine = {figure.name.removeprefix("local: "): figure for figure in figures if figure.name.startswith("local: ")}
    lines, others = [], []
    for name, figure in mine.items():
        if figure.unit == "records/s" and f"{name}, client" in mine:
            costs = [number(median(mine[f"{name}, {side}"].values)) for side in ("client", "broker", ALONE)]
            lines.append(
                (name, f"**{number(figure.median)}**", spread(figure), *costs, figure.target_text, figure.verdict)
            )
        elif figure.unit != "CPU-s per million records" and not name.endswith(ALONE):
            unit = f" {figure.unit}" if figure.median > 0 else ""
            others.append(
                (name, f"**{median_text(figure)}**{unit}", spread(figure), figure.target_text, figure.verdict)
            )
    tables = []
    if lines:
        tables.append(
            markdown_table(
                (
                    "records of 100 B",
                    "records/s",
                    "spread",
                    "client, CPU-s per million",
                    "broker, CPU-s per million",
                    f"records/s, {ALONE}",
                    "target",
                    "",
                ),
                lines,
                right=range(1, 7),
            )
        )
    if others:
        tables.append(markdown_table(("", "median", "spread", "target", ""), others, right=range(1, 4)))
    verdicts = [figure.verdict for figure in mine.values() if figure.verdict]
    head = (
        f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, {date[:10]}; one worker on a core, the"
        f" client on another; `flush.on.ack=false`, acks=1. Disturbed by other programs: {facts['disturbed']}"
        " measurements."
    )
    return f"{head} {verdicts.count(REACHED)} of {len(verdicts)} targets reached.\n\n" + "\n\n".join(tables)


CASES: dict[str, Callable[[Bench], None]] = {
    "local-produce": native_produce,
    "local-latency": native_latency,
    "local-python-produce": python_produce,
    "local-python-consume": python_consume,
    "local-idle": idle_consumer,
    "local-headline": headline,
}
