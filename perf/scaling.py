"""`python -m perf scaling`: how records/s and CPU grow with workers and with clients, fitted by the
Universal Scalability Law.

Two questions, each with a curve of its own:

* **Clients**: connections with one batch in flight each, 1 to 16 of them, against one worker. The law
  is fitted to wall-clock rates.
* **Workers**: under full load from 16 connections. A machine of few cores cannot run many workers and
  their clients at the same time, so wall-clock rates mean little; instead, the CPU time of a record is
  measured when n workers share the partitions (n - 1 of n batches arrive at a worker that does not
  own theirs). n ÷ that time is the rate of n workers with cores of their own. It includes everything
  that grows with the number of workers except contention between cores for caches and memory
  bandwidth.

Points with more workers than cores are in the second curve only, and marked. All points are measured in
turns within one run, several times.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from perf import loading, usl
from perf.accounting import CpuTime, cpu_time, machine, pss_bytes
from perf.bench import Bench
from perf.brokers import Measured
from perf.charts import Series, line_chart
from perf.report import markdown_table, number, rounded

CLIENTS = (1, 2, 4, 8, 16)
PARTITIONS = 16
BATCH_BYTES, RECORDS = 16384, 16  # records of 1 KiB
CLOSED = {"depth": 1, "burst": 1, "spin": 0, "count": 20_000, "milliseconds": 900}
FULL = {"depth": 16, "burst": 8, "spin": 1, "count": 24_000, "milliseconds": 1500}
WARM_MEGABYTES = 500
REPETITIONS = 5
RESULT = loading.ROOT / "perf" / "scaling.json"
CHART = loading.ROOT / "docs" / "scaling.svg"


def worker_counts(cores: int) -> list[int]:
    """1, 2, 3, 4, then by powers of two up to the cores: at least up to 4, so that the law has more
    points than parameters.
    """
    return sorted({1, 2, 3, 4, *(count for count in (8, 16, 32, 64, cores) if count <= cores)})


def _client_cpus(workers: int) -> list[int]:
    """The CPUs that no worker has, or the last one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[workers:] or allowed[-1:]


def _worker_cpus(workers: int) -> str:
    """A CPU for each worker; none is pinned when there are too few."""
    allowed = sorted(os.sched_getaffinity(0))
    return ",".join(str(cpu) for cpu in allowed[:workers]) if workers <= len(allowed) else ""


def _load(
    broker: Measured, topic: str, clients: int, arguments: Mapping[str, int], cpus: Sequence[int]
) -> tuple[dict[str, float], CpuTime]:
    """`clients` connections from as many load generators as there are CPUs for them. Raises
    LoadFailed.
    """
    programs = min(clients, len(cpus))
    shares = [clients // programs + (index < clients % programs) for index in range(programs)]
    before = cpu_time(broker.worker_pids)
    started = []
    for index, share in enumerate(shares):
        words = {
            **arguments,
            "count": arguments["count"] // programs,
            "connections": share,
            "shift": index * (PARTITIONS // programs),
            "topic": topic,
            "partitions": PARTITIONS,
        }
        words |= {"batch": BATCH_BYTES, "records": RECORDS, "acks": 1, "port": broker.port}
        command = [
            "taskset",
            "-c",
            str(cpus[index]),
            str(loading.build()),
            "produce",
            *(f"{name}={value}" for name, value in words.items()),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = []
    for process in started:
        out, errors = process.communicate(timeout=120)
        if process.returncode:
            raise loading.LoadFailed(f"{clients} clients: {errors.strip() or out.strip()}")
        results.append(json.loads(out))
    spent = cpu_time(broker.worker_pids) - before
    records = sum(result["count"] for result in results) * RECORDS
    seconds = max(result["seconds"] for result in results)
    figures = {
        "records_per_s": records / seconds,
        "cpu_us_per_record": spent.run_us / records,
        "client_cpu_us_per_record": sum(r["client_cpu_seconds"] for r in results) * 1e6 / records,
        "worker_cores": spent.run_ns / 1e9 / seconds,
        "seconds": seconds,
    }
    return figures, spent


def measure(bench: Bench) -> dict:
    """The content of perf/scaling.json: for each point, the values of every repetition."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, dict[str, dict[str, list[float]]]] = {"clients": {}, "workers": {}}
    memory: dict[str, int] = {}

    def sample(
        curve: str, count: int, broker: Measured, clients: int, arguments: Mapping[str, int], cpus: Sequence[int]
    ) -> None:
        topic = broker.topic(f"{curve}-{bench.serial()}", PARTITIONS, flush_on_ack="false")
        bench.prepare(WARM_MEGABYTES)

        def once() -> tuple[dict[str, float], CpuTime]:
            return _load(broker, topic, clients, arguments, cpus)

        # workers that share CPUs with the clients or with each other have to wait for them
        alone = len(broker.worker_pids) < cores
        for name, value in (bench.measure_undisturbed(once) if alone else once())[0].items():
            found[curve].setdefault(str(count), {}).setdefault(name, []).append(rounded(value))
        broker.delete(topic)

    broker = bench.brokers.get("scaling-1", workers=1, config={"worker.cpus": _worker_cpus(1)})
    for _ in bench.repeat("scaling by clients", REPETITIONS):
        for clients in CLIENTS:
            sample("clients", clients, broker, clients, CLOSED, _client_cpus(1))
    counts = worker_counts(cores)
    for _ in bench.repeat("scaling by workers", REPETITIONS):
        for workers in counts:
            broker = bench.brokers.get(
                f"scaling-{workers}", workers=workers, config={"worker.cpus": _worker_cpus(workers)}
            )
            sample("workers", workers, broker, CLIENTS[-1], FULL, _client_cpus(workers))
    for workers in counts:
        memory[str(workers)] = pss_bytes(bench.brokers.get(f"scaling-{workers}").pids())
        bench.brokers.drop(f"scaling-{workers}")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**machine(), "disturbed": f"{bench.disturbed} of {bench.measured}"},
        "cores": cores,
        "batch_bytes": BATCH_BYTES,
        "records_per_batch": RECORDS,
        "curves": found,
        "memory_bytes_by_workers": memory,
    }


# -- evaluation ------------------------------------------------------------------------------------


def by_clients(result: dict) -> dict[int, list[float]]:
    return {int(count): values["records_per_s"] for count, values in result["curves"]["clients"].items()}


def by_workers(result: dict) -> dict[int, list[float]]:
    """Records/s that each number of workers would reach with cores of their own."""
    return {
        int(count): [int(count) * 1e6 / cost for cost in values["cpu_us_per_record"]]
        for count, values in result["curves"]["workers"].items()
    }


def memory_of(result: dict) -> tuple[int, int]:
    """Bytes of a broker without workers, and of each worker, by least squares over the brokers
    measured.
    """
    points = sorted((int(count), size) for count, size in result["memory_bytes_by_workers"].items())
    mean_count, mean_size = (
        sum(count for count, _ in points) / len(points),
        sum(size for _, size in points) / len(points),
    )
    spread = sum((count - mean_count) ** 2 for count, _ in points)
    each = sum((count - mean_count) * (size - mean_size) for count, size in points) / spread if spread else 0.0
    return round(max(0.0, mean_size - each * mean_count)), round(max(0.0, each))


def _between(values: Sequence[float], spell: Callable[[float], str] = number) -> str:
    return f"{spell(min(values))}–{spell(max(values))}"


def _fit_lines(title: str, fit: usl.Fit) -> tuple[str, ...]:
    def ranged(name: str) -> str:
        interval = fit.interval(name)
        return f"{number(getattr(fit, name))} ({number(interval.low)}–{number(interval.high)})"

    peak = "none" if fit.peak == float("inf") else number(fit.peak)
    return (
        title,
        ranged("rate"),
        ranged("contention"),
        ranged("coherency") if fit.identified > 2 else "not identifiable",
        f"{100 * fit.error:.1f} %",
        peak,
    )


def page(result: dict) -> str:
    """The block of docs/performance.md."""
    clients, workers, cores = usl.fit(by_clients(result)), usl.fit(by_workers(result)), result["cores"]
    lines = []
    for count, values in result["curves"]["clients"].items():
        rates = values["records_per_s"]
        lines.append(
            (
                count,
                number(median(rates)),
                _between(rates),
                number(clients.at(int(count))),
                number(100 * median(values["worker_cores"])),
                number(median(values["cpu_us_per_record"])),
            )
        )
    of_clients = markdown_table(
        ("clients", "records/s", "spread", "predicted by the law below", "worker, % of a core", "CPU-µs a record"),
        lines,
        right=range(6),
    )
    lines = []
    for count, values in result["curves"]["workers"].items():
        alone = by_workers(result)[int(count)]
        mark = "" if int(count) <= cores else " *"
        lines.append(
            (
                count + mark,
                number(median(values["cpu_us_per_record"])),
                number(median(alone)),
                _between(alone),
                number(workers.at(int(count))),
                number(median(values["records_per_s"])),
                number(result["memory_bytes_by_workers"][count] / 1e6),
            )
        )
    of_workers = markdown_table(
        (
            "workers",
            "CPU-µs a record",
            "records/s with cores of their own",
            "spread",
            "predicted by the law below",
            "records/s here",
            "memory, MB",
        ),
        lines,
        right=range(7),
    )
    fits = markdown_table(
        (
            "",
            "records/s with n = 1 (95 % interval)",
            "contention (95 % interval)",
            "coherency (95 % interval)",
            "error",
            "peak at",
        ),
        [_fit_lines("clients of one worker", clients), _fit_lines("workers", workers)],
        right=range(1, 6),
    )
    further = [count for count in (4, 8, 16, 32) if count > cores]
    guesses = []
    for count in further:
        interval = workers.interval_at(count)
        guesses.append(
            (
                str(count),
                number(workers.at(count)),
                f"{number(interval.low)}–{number(interval.high)}",
                number(workers.at(count) / workers.at(1)),
            )
        )
    guessed = markdown_table(
        ("workers, each with a core", "records/s", "95 %", "relative to one worker"), guesses, right=range(4)
    )
    crowded = max(map(int, result["curves"]["workers"])) > cores
    crowded_note = " `*`: more workers than cores; their CPU time includes the switching between them."
    facts = result["machine"]
    repetitions = max(len(values["records_per_s"]) for values in result["curves"]["clients"].values())
    return "\n\n".join(
        (
            (
                f"{cores} cores of {facts['cpu']}, Linux {facts['kernel']}, {result['date'][:10]}; {repetitions}"
                f" repetitions, medians. Records of 1 KiB, {result['records_per_batch']} in a batch, {PARTITIONS}"
                f" partitions, acks=1, `flush.on.ack=false`. Disturbed by other programs: {facts['disturbed']}"
                " measurements in which workers had CPUs of their own."
            ),
            "Clients with one batch in flight each, against one worker on a core of its own:",
            of_clients,
            (
                "Workers under as much load as they can take. The third column is the one to compare: n ÷ the CPU time"
                " of a record. The wall-clock rates are those of this machine, whose cores the clients"
                f" share.{crowded_note if crowded else ''}"
            ),
            of_workers,
            "The law, fitted: X(n) = rate · n ÷ (1 + contention · (n - 1) + coherency · n · (n - 1)).",
            fits,
            f"![Records per second by clients and by workers]({CHART.name})",
            (
                f"Extrapolated to machines that were **not** measured. {cores} cores cannot show how strongly more"
                " cores compete for caches and memory, so these are upper bounds: run `python -m perf scaling` on the"
                " machine in question."
            ),
            guessed,
        )
    )


def _points(measured: Mapping[int, Sequence[float]]) -> list[tuple[float, float, float, float]]:
    return [(count, min(values), median(values), max(values)) for count, values in measured.items()]


def chart(result: dict) -> str:
    clients, workers = usl.fit(by_clients(result)), usl.fit(by_workers(result))
    most = max(*by_clients(result), 8)

    def steps(limit: float) -> list[float]:
        return [1 + (limit - 1) * step / 60 for step in range(61)]

    largest = max(by_workers(result))
    return line_chart(
        "Records of 1 KiB per second",
        "clients, or workers with a core each",
        "records/s",
        [
            Series(
                "clients of one worker: measured, and the law",
                _points(by_clients(result)),
                [(n, clients.at(n)) for n in steps(most)],
            ),
            Series(
                "workers with cores of their own: from CPU time, and the law",
                _points(by_workers(result)),
                [(n, workers.at(n)) for n in steps(largest)],
            ),
            Series(
                "the same, continued",
                curve=[(n, workers.at(n)) for n in steps(2 * largest) if n >= largest],
                dashed=True,
            ),
        ],
    )


def write(result: dict, page_path: Path) -> None:
    from perf import report

    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    CHART.write_text(chart(result))
    page_path.write_text(report.replace_block(page_path.read_text(), "scaling", page(result)))
    print(f"wrote {RESULT.name}, {CHART.name} and {page_path.name}", file=sys.stderr)
