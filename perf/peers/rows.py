"""The rows of the comparison's tables: for each row, the step and the figure that it shows. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from perf.peers import plan
from perf.peers.driving import KAFKA_TOOLS, LEAN
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step

DURABLE = dataclasses.replace(BASE, durable=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: a figure of a step, and whether more of it is better. `has_best`: whether the
    best peer's figure is bold.
    """

    label: str
    step: Step
    value: str
    unit: str = ""
    more_is_better: bool = False
    scale: float = 1.0
    has_best: bool = True


def lateness(label: str, step: Step) -> Row:
    """How much later than due the load generator sent; the latencies include it."""
    return Row(label, step, "late_p99_us", "ms by which records were sent late, p99", scale=1e-3, has_best=False)


def at_half(load: Load) -> Step:
    return Step(plan.LATENCY, load, share=plan.SHARE)


def at_rate(load: Load, rate: int, beside: str = "") -> Step:
    return Step(plan.LATENCY, load, rate=rate, beside=beside)


def headline_rows() -> list[Row]:
    rows = []
    for load, fsync in ((BASE, "no fsync"), (DURABLE, "fsync before the acknowledgement")):
        rows.append(Row(f"produce, {fsync}", Step(plan.THROUGHPUT, load), "records_per_s", "records/s", True))
        rows.append(
            Row(
                f"broker CPU to produce, {fsync}",
                Step(plan.THROUGHPUT, load),
                "broker_cpu_s_per_million",
                "CPU-s per million",
            )
        )
        rows.append(
            Row(
                f"produce, by the leanest client, {fsync}",
                Step(plan.PRODUCE, load, LEAN),
                "records_per_s",
                "records/s",
                True,
            )
        )
        rows.append(
            Row(
                f"p99 acknowledgement latency at half of the broker's maximum rate, {fsync}",
                at_half(load),
                "acknowledged_p99_us",
                "ms",
                scale=1e-3,
            )
        )
        rows += [
            Row(
                f"p99 acknowledgement latency at {rate:,} records/s, {fsync}",
                at_rate(load, rate),
                "acknowledged_p99_us",
                "ms",
                scale=1e-3,
            )
            for rate in plan.RATES
        ]
    rows += [
        Row("read back", Step(plan.THROUGHPUT), "consume_records_per_s", "records/s", True),
        Row("broker CPU to read", Step(plan.THROUGHPUT), "consume_broker_cpu_s_per_million", "CPU-s per million"),
        Row(
            "produced to read, p99 at half of the broker's maximum rate, no fsync",
            at_half(BASE),
            "consumed_p99_us",
            "ms",
            scale=1e-3,
        ),
        Row(
            "produced to read, p99 at 100,000 records/s, no fsync",
            at_rate(BASE, 100_000),
            "consumed_p99_us",
            "ms",
            scale=1e-3,
        ),
        Row(
            "produce, by Kafka's own tool", Step(plan.THROUGHPUT, BASE, KAFKA_TOOLS), "records_per_s", "records/s", True
        ),
        Row(
            "read back, by Kafka's own tool",
            Step(plan.THROUGHPUT, BASE, KAFKA_TOOLS),
            "consume_records_per_s",
            "records/s",
            True,
        ),
        Row(
            "one record there and back, average, by Kafka's own tool",
            Step(plan.LATENCY, BASE, KAFKA_TOOLS),
            "end_to_end_average_us",
            "ms",
            scale=1e-3,
        ),
        Row("memory after load, all processes", Step(plan.THROUGHPUT), "pss_mb", "MB (PSS)"),
        Row("memory when idle, all processes", Step(plan.START), "idle_pss_mb", "MB (PSS)"),
        Row("start-up on an empty directory", Step(plan.START), "start_seconds", "s"),
        Row("disk for a record", Step(plan.THROUGHPUT), "disk_bytes_per_record", "bytes"),
    ]
    return rows


def throughput_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        step, label = Step(plan.THROUGHPUT, load), load.label()
        rows += [
            Row(label, step, "records_per_s", "produced/s", True),
            Row(label, step, "broker_cpu_s_per_million", "CPU-s per million produced"),
            Row(label, step, "broker_user_cpu_s_per_million", "of these in user mode"),
            Row(label, step, "broker_system_cpu_s_per_million", "of these in the kernel"),
            Row(label, step, "consume_records_per_s", "read/s", True),
            Row(label, step, "consume_broker_cpu_s_per_million", "CPU-s per million read"),
            Row(label, step, "disk_bytes_per_record", "bytes on disk"),
            Row(label, step, "broker_cores", "CPUs the broker used while producing"),
            Row(label, step, "client_cores", "CPUs the client used while producing"),
        ]
    return rows


def latency_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        fsync = "fsync" if load.durable else "no fsync"
        half = (at_half(load), f"{plan.SHARE:.0%} of the broker's maximum rate")
        for step, rate in [half, *((at_rate(load, rate), f"{rate:,} records/s") for rate in plan.RATES)]:
            label = f"{fsync}, {rate}"
            rows.append(Row(label, step, "rate", "records/s", True))
            for what, words in (("acknowledged", "until acknowledged"), ("consumed", "until read")):
                rows += [
                    Row(label, step, f"{what}_{rank}_us", f"ms {words}, {shown}", scale=1e-3)
                    for rank, shown in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9"))
                ]
            rows += [lateness(label, step), Row(label, step, "broker_cpu_s_per_million", "CPU-s per million")]
    return rows


def mixed_rows() -> list[Row]:
    alone = at_rate(BASE, plan.MIXED_RATE)
    labels = {BASE: "6 partitions of 1 KiB records", plan.SMALL_TOPICS: "100 partitions of 100 B records"}
    rows = []
    for step in [alone, *plan.mixed()]:
        label = f"{labels[step.load]}, {step.beside or 'alone'}"
        for what, words in (("acknowledged", "until acknowledged"), ("consumed", "until read")):
            rows += [
                Row(label, step, f"{what}_{rank}_us", f"ms {words}, {shown}", scale=1e-3)
                for rank, shown in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9"))
            ]
        rows.append(lateness(label, step))
    return rows


def replicated_rows() -> list[Row]:
    load = plan.REPLICATED
    produced = Step(plan.THROUGHPUT, load)
    rows = [
        Row("produce", produced, "records_per_s", "records/s", True),
        Row("CPU of all brokers to produce", produced, "broker_cpu_s_per_million", "CPU-s per million"),
        Row("read back", produced, "consume_records_per_s", "records/s", True),
        Row("memory after load, all processes", produced, "pss_mb", "MB (PSS)"),
    ]
    half = (at_half(load), "half of the cluster's maximum rate")
    rows.append(Row(half[1], half[0], "rate", "records/s", True))
    for step, rate in [half, *((at_rate(load, rate), f"{rate:,} records/s") for rate in plan.RATES)]:
        rows += [
            Row(f"{shown} acknowledgement latency at {rate}", step, f"acknowledged_{rank}_us", "ms", scale=1e-3)
            for rank, shown in (("p50", "p50"), ("p99", "p99"))
        ]
    longest = "longest wait for an acknowledgement while the leader is killed"
    return [*rows, Row(longest, Step(plan.FAILOVER, plan.ONE_PARTITION), "failover_seconds", "s")]


def tool_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        label = load.label()
        through, latency = Step(plan.THROUGHPUT, load, KAFKA_TOOLS), Step(plan.LATENCY, load, KAFKA_TOOLS)
        rows += [
            Row(label, through, "records_per_s", "ProducerPerformance, records/s", True),
            Row(label, through, "acknowledged_p99_us", "its p99 at full speed, ms", scale=1e-3),
            Row(label, through, "broker_cpu_s_per_million", "broker CPU-s per million produced"),
            Row(label, through, "consume_records_per_s", "ConsumerPerformance, records/s", True),
            Row(label, through, "consume_broker_cpu_s_per_million", "broker CPU-s per million read"),
            Row(label, latency, "end_to_end_average_us", "EndToEndLatency, average, ms", scale=1e-3),
            Row(label, latency, "end_to_end_p99_us", "EndToEndLatency, p99, whole ms", scale=1e-3),
        ]
    return rows


def lean_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        step, label = Step(plan.PRODUCE, load, LEAN), load.label()
        rows += [
            Row(label, step, "records_per_s", "produced/s", True),
            Row(label, step, "broker_cpu_s_per_million", "broker CPU-s per million produced"),
            Row(label, step, "broker_cores", "CPUs the broker used"),
            Row(label, step, "client_cores", "CPUs the client used"),
        ]
    return rows


def footprint_rows() -> list[Row]:
    return [
        Row("start-up on an empty directory", Step(plan.START), "start_seconds", "s"),
        Row("memory when idle, all processes", Step(plan.START), "idle_pss_mb", "MB (PSS)"),
        Row("memory after load, all processes", Step(plan.THROUGHPUT), "pss_mb", "MB (PSS)"),
    ]
