"""mqd's targets, judged from the recorded figures. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from perf.peers import plan
from perf.peers.plan import BASE, Step
from perf.peers.results import Run, is_saturated
from perf.peers.rows import DURABLE, Row, at_half, at_rate, headline_rows, replicated_rows
from perf.report import MISSED, REACHED, number


@dataclasses.dataclass(frozen=True)
class Target:
    """mqd's figure should be at most `bound` times a peer's (at least, where more is better).
    `against`: a peer's name; "": the best of the others. `own`: mqd's name in the table.
    """

    row: Row
    bound: float
    against: str
    own: str = "mqd"


def targets() -> list[Target]:
    rows = {row.label: row for row in headline_rows()}
    requested = [
        ("broker CPU to produce, no fsync", 1 / 4, "Apache Kafka"),
        ("broker CPU to produce, fsync before the acknowledgement", 1 / 4, "Apache Kafka"),
        ("broker CPU to produce, no fsync", 1 / 2, ""),
        ("produce, no fsync", 1.0, ""),
        ("produce, fsync before the acknowledgement", 1.0, ""),
        ("produce, by the leanest client, no fsync", 1.0, ""),
        ("produce, by the leanest client, fsync before the acknowledgement", 1.0, ""),
        ("p99 acknowledgement latency at half of the broker's maximum rate, no fsync", 1 / 3, "Apache Kafka"),
        (
            "p99 acknowledgement latency at half of the broker's maximum rate, fsync before the acknowledgement",
            1 / 3,
            "Apache Kafka",
        ),
        ("memory after load, all processes", 1 / 4, "Apache Kafka"),
        ("start-up on an empty directory", 1 / 5, "Apache Kafka"),
    ]
    clusters = [
        Target(row, 1 / 4, "Apache Kafka, 3 brokers", "mqd, 3 brokers")
        for row in replicated_rows()
        if row.value == "broker_cpu_s_per_million"
    ]
    return [*(Target(rows[label], bound, against) for label, bound, against in requested), *clusters]


def _against(run: Run, target: Target) -> tuple[str, float] | None:
    """The peer that a target compares with, and its figure. `against` "": the best peer other than mqd,
    and other than Kafka where Kafka has a bound of its own.
    """
    own = {other.against for other in targets() if other.row == target.row}
    names = (
        [target.against]
        if target.against
        else [facts.name for facts in run.measured() if facts.name != "mqd" and facts.name not in own]
    )
    found = {
        name: value["median"]
        for name in names
        if (value := run.value(name, target.row.step, target.row.value)) is not None
    }
    if not found:
        return None
    choose: Callable[..., str] = max if target.row.more_is_better else min
    best = choose(found, key=lambda name: found[name])
    return best, found[best]


def target_lines(run: Run) -> list[tuple[str, ...]]:
    """(what, mqd, peer, times, bound, verdict) for each target whose figures were measured."""
    lines = []
    for target in targets():
        own, other = run.value(target.own, target.row.step, target.row.value), _against(run, target)
        if own is None or other is None or not other[1]:
            continue
        times = own["median"] / other[1]
        reached = times >= target.bound if target.row.more_is_better else times <= target.bound
        scale = target.row.scale
        lines.append(
            (
                f"{target.row.label}, {target.row.unit}" + ("" if target.own == "mqd" else f", {target.own}"),
                number(own["median"] * scale),
                f"{other[0]}: {number(other[1] * scale)}",
                number(times),
                f"{'≥' if target.row.more_is_better else '≤'} {number(target.bound)}",
                REACHED if reached else MISSED,
            )
        )
    return [*lines, *_cpu_lines(run), *_tail_lines(run), *_replicated_lines(run)]


CPU_RATIO_MAX = 1 / 4  # of Apache Kafka's, at every load
TAIL_RATIO_MAX = 3.0  # p99.9 as a multiple of p99
# three replicas: mqd's p99 at the lowest rate at which Apache Kafka's is at least this high
REPLICATED_P99_MS_MAX, KAFKA_P99_MS_MIN = 3.0, 5.0


def _cpu_lines(run: Run) -> list[tuple[str, ...]]:
    """The broker's CPU as a multiple of Apache Kafka's: of all loads, those with the lowest and the
    highest ratio, and at how many loads the target is missed.
    """
    lines = []
    for what, value in (("produce", "broker_cpu_s_per_million"), ("read", "consume_broker_cpu_s_per_million")):
        found = []
        for load in run.loads(plan.THROUGHPUT, plan.NEUTRAL):
            own, other = (run.value(name, Step(plan.THROUGHPUT, load), value) for name in ("mqd", "Apache Kafka"))
            if own and other and other["median"]:
                found.append((own["median"] / other["median"], load.label(), own["median"], other["median"]))
        if len(found) < 2:
            continue
        missed = sum(times > CPU_RATIO_MAX for times, *_ in found)
        for rank, (times, label, ours, theirs) in (("lowest", min(found)), ("highest", max(found))):
            verdict = "" if rank == "lowest" else MISSED if missed else REACHED
            lines.append(
                (
                    f"broker CPU to {what}, {rank} ratio among {len(found)} loads: {label}, CPU-s per million",
                    number(ours),
                    f"Apache Kafka: {number(theirs)}",
                    number(times),
                    f"≤ {number(CPU_RATIO_MAX)}",
                    f"{verdict} at {missed} of {len(found)}" if verdict == MISSED and rank == "highest" else verdict,
                )
            )
    return lines


def _tail_lines(run: Run) -> list[tuple[str, ...]]:
    """p99.9 as a multiple of p99 at half of its maximum."""
    lines = []
    for load, own, which in (
        (BASE, "mqd", "no fsync"),
        (DURABLE, "mqd", "fsync before the acknowledgement"),
        (plan.REPLICATED, "mqd, 3 brokers", "mqd, 3 brokers"),
    ):
        found = run.medians(own, at_half(load))
        p99, p999 = found.get("acknowledged_p99_us"), found.get("acknowledged_p999_us")
        if not p99 or p999 is None:
            continue
        reached = p999 <= TAIL_RATIO_MAX * p99 and not is_saturated(found, "acknowledged_p999_us")
        lines.append(
            (
                f"p99.9 acknowledgement latency at half of mqd's maximum rate, {which}, ms",
                number(p999 / 1e3),
                f"own p99: {number(p99 / 1e3)}",
                number(p999 / p99),
                f"≤ {number(TAIL_RATIO_MAX)}",
                REACHED if reached else MISSED,
            )
        )
    return lines


def _replicated_lines(run: Run) -> list[tuple[str, ...]]:
    """The p99 of three replicas at the lowest rate at which Apache Kafka's is high."""
    for rate in plan.RATES:
        step = at_rate(plan.REPLICATED, rate)
        own, other = (
            run.medians(name, step).get("acknowledged_p99_us", 0.0) / 1e3
            for name in ("mqd, 3 brokers", "Apache Kafka, 3 brokers")
        )
        if own and other >= KAFKA_P99_MS_MIN:
            rate_text = f"{rate:,} records/s (the lowest rate at which Kafka's p99 is ≥ {number(KAFKA_P99_MS_MIN)} ms)"
            return [
                (
                    f"p99 acknowledgement latency at {rate_text}, mqd, 3 brokers, ms",
                    number(own),
                    f"Apache Kafka, 3 brokers: {number(other)}",
                    number(own / other),
                    f"≤ {number(REPLICATED_P99_MS_MAX)} ms",
                    REACHED if own <= REPLICATED_P99_MS_MAX else MISSED,
                )
            ]
    return []


TARGET_HEADINGS = ("metric", "mqd", "peer", "ratio", "target", "")
