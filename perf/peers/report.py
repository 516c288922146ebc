"""The comparison as tables: for the terminal, README.md and docs/performance.md. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from perf.peers import plan
from perf.peers.driving import KAFKA_TOOLS, LEAN
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step
from perf.peers.results import PeerFacts, Run, is_saturated
from perf.report import MISSED, REACHED, markdown_table, number, paragraph

DURABLE = dataclasses.replace(BASE, durable=True)
NOT_MEASURED = "–"
BUSY_MAX = 0.2  # share of all CPUs used by other programs when a run begins; the report mentions a higher one


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: a figure of a step, and whether more of it is better."""

    label: str
    step: Step
    value: str
    unit: str = ""
    more_is_better: bool = False
    scale: float = 1.0


def _at_half(load: Load) -> Step:
    return Step(plan.LATENCY, load, share=plan.SHARE)


def _at_rate(load: Load, rate: int, beside: str = "") -> Step:
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
                _at_half(load),
                "acknowledged_p99_us",
                "ms",
                scale=1e-3,
            )
        )
        rows += [
            Row(
                f"p99 acknowledgement latency at {rate:,} records/s, {fsync}",
                _at_rate(load, rate),
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
            _at_half(BASE),
            "consumed_p99_us",
            "ms",
            scale=1e-3,
        ),
        Row(
            "produced to read, p99 at 100,000 records/s, no fsync",
            _at_rate(BASE, 100_000),
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


def _is_saturated(run: Run, peer: str, step: Step) -> bool:
    return step.kind == plan.LATENCY and is_saturated(run.medians(peer, step))


def cell(run: Run, peer: str, row: Row, best: bool) -> str:
    """The median; bold when it is the best of its row; * when the rate was not sustained."""
    found = run.value(peer, row.step, row.value)
    if found is None:
        return "failed" if run.failure(peer, row.step) else NOT_MEASURED
    text = number(found["median"] * row.scale)
    text = f"**{text}**" if best else text
    return text + ("*" if _is_saturated(run, peer, row.step) else "")


def _best(run: Run, peers: Sequence[PeerFacts], row: Row) -> str | None:
    """The peer with the best figure; None when there are not two to compare. Figures at a rate that was
    not sustained are excluded.
    """
    found = {facts.name: run.value(facts.name, row.step, row.value) for facts in peers}
    medians = {name: value["median"] for name, value in found.items() if value is not None}
    kept = {name: median for name, median in medians.items() if not _is_saturated(run, name, row.step)}
    if len(medians) < 2 or not kept:
        return None
    choose: Callable[..., str] = max if row.more_is_better else min
    return choose(kept, key=lambda name: kept[name])


def table(run: Run, rows: Sequence[Row], heading: str, markdown: bool = True) -> str:
    """Rows and peers without figures are left out."""
    peers = [
        facts
        for facts in run.measured()
        if any(run.value(facts.name, row.step, row.value) or run.failure(facts.name, row.step) for row in rows)
    ]
    lines = []
    for row in rows:
        if all(
            run.value(facts.name, row.step, row.value) is None and not run.failure(facts.name, row.step)
            for facts in peers
        ):
            continue
        best = _best(run, peers, row)
        lines.append((row.label, row.unit, *(cell(run, facts.name, row, facts.name == best) for facts in peers)))
    headings = (heading, "", *(facts.name for facts in peers))
    if markdown:
        return markdown_table(headings, lines, right=range(2, len(headings)))
    return plain_text(headings, lines)


def plain_text(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [[text.replace("**", "") for text in line] for line in (headings, *lines)]
    widths = [max(len(line[column]) for line in every) for column in range(len(headings))]
    text = [
        "  ".join(
            word.ljust(width) if column < 2 else word.rjust(width)
            for column, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in every
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


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
        for row in _replicated_rows()
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
    """(what, mqd, peer, times, bound, verdict) for each target that both sides were measured for."""
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
    return lines


TARGET_HEADINGS = ("target", "mqd", "peer", "times", "bound", "")


def skipped_text(run: Run) -> str:
    lines = [f"{facts.name}: not measured: {facts.skipped}." for facts in run.peers if facts.skipped]
    return "\n".join(lines)


def versions_text(run: Run) -> str:
    """One entry for each program, however many brokers of it were measured."""
    versions = {facts.name.removesuffix(", 3 brokers"): facts.version for facts in run.measured()}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _notes(run: Run, rows: Sequence[Row]) -> str:
    """Notes for the reader of the rows; only those that apply to them."""
    notes = ["Medians; bold is the best of a row"]
    if any(_is_saturated(run, facts.name, row.step) for facts in run.measured() for row in rows):
        notes.append("* the system could not sustain the rate, so this is the delay of a growing queue")
    if any(facts.flush_settings == "" for facts in run.measured()):
        lacking = " and ".join(facts.name for facts in run.measured() if not facts.flush_settings)
        notes.append(
            f"{NOT_MEASURED} not measured, or the peer cannot do it ({lacking}: no fsync before an acknowledgement)"
        )
    return paragraph(". ".join(notes) + ".")


def head_text(run: Run) -> str:
    line = run.line
    machine, how = line["machine"], line["run"]
    rounds = {0: "part of a round", 1: "1 round"}.get(how["rounds"], f"{how['rounds']} rounds")
    busy = how.get("busy_before", 0.0)
    others = (
        f" Other programs used {busy:.0%} of the CPUs when it began, which affects all figures."
        if busy > BUSY_MAX
        else ""
    )
    return paragraph(
        f"`make bench-peers` on {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']},"
        f" {line['date'][:10]}, commit {line['commit'][:10]}: broker and client share these cores."
        f" {versions_text(run)}. 1 KiB records, acks=all, 6 partitions, uncompressed; {rounds}, in which the systems"
        f" run one after the other.{others}"
    )


README_ROWS = (
    "produce, fsync before the acknowledgement",
    "produce, no fsync",
    "p99 acknowledgement latency at 100,000 records/s, fsync before the acknowledgement",
    "broker CPU to produce, fsync before the acknowledgement",
    "memory after load, all processes",
    "start-up on an empty directory",
)


def readme_block(run: Run) -> str:
    """The six figures of README.md; docs/performance.md has all."""
    rows = [row for row in headline_rows() if row.label in README_ROWS]
    return _headline(run, sorted(rows, key=lambda row: README_ROWS.index(row.label)))


def _headline(run: Run, rows: Sequence[Row]) -> str:
    parts = [head_text(run), table(run, rows, "1 KiB records"), _notes(run, rows), skipped_text(run)]
    return "\n\n".join(part for part in parts if part)


# -- docs/performance.md ---------------------------------------------------------------------------


def _throughput_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        step, label = Step(plan.THROUGHPUT, load), load.label()
        rows += [
            Row(label, step, "records_per_s", "produced/s", True),
            Row(label, step, "broker_cpu_s_per_million", "CPU-s per million produced"),
            Row(label, step, "consume_records_per_s", "read/s", True),
            Row(label, step, "consume_broker_cpu_s_per_million", "CPU-s per million read"),
            Row(label, step, "disk_bytes_per_record", "bytes on disk"),
            Row(label, step, "broker_cores", "CPUs the broker used while producing"),
            Row(label, step, "client_cores", "CPUs the client used while producing"),
        ]
    return rows


def _latency_rows(loads: Sequence[Load]) -> list[Row]:
    rows = []
    for load in loads:
        fsync = "fsync" if load.durable else "no fsync"
        half = (_at_half(load), f"{plan.SHARE:.0%} of the broker's maximum rate")
        for step, rate in [half, *((_at_rate(load, rate), f"{rate:,} records/s") for rate in plan.RATES)]:
            label = f"{fsync}, {rate}"
            rows.append(Row(label, step, "rate", "records/s", True))
            for what, words in (("acknowledged", "until acknowledged"), ("consumed", "until read")):
                rows += [
                    Row(label, step, f"{what}_{rank}_us", f"ms {words}, {shown}", scale=1e-3)
                    for rank, shown in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9"))
                ]
            rows.append(Row(label, step, "broker_cpu_s_per_million", "CPU-s per million"))
    return rows


def _mixed_rows() -> list[Row]:
    alone = _at_rate(BASE, plan.MIXED_RATE)
    labels = {BASE: "6 partitions of 1 KiB records", plan.SMALL_TOPICS: "100 partitions of 100 B records"}
    rows = []
    for step in [alone, *plan.mixed()]:
        label = f"{labels[step.load]}, {step.beside or 'alone'}"
        for what, words in (("acknowledged", "until acknowledged"), ("consumed", "until read")):
            rows += [
                Row(label, step, f"{what}_{rank}_us", f"ms {words}, {shown}", scale=1e-3)
                for rank, shown in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9"))
            ]
    return rows


def _replicated_rows() -> list[Row]:
    load = plan.REPLICATED
    produced = Step(plan.THROUGHPUT, load)
    rows = [
        Row("produce", produced, "records_per_s", "records/s", True),
        Row("CPU of all brokers to produce", produced, "broker_cpu_s_per_million", "CPU-s per million"),
        Row("read back", produced, "consume_records_per_s", "records/s", True),
        Row("memory after load, all processes", produced, "pss_mb", "MB (PSS)"),
    ]
    half = (_at_half(load), "half of the cluster's maximum rate")
    for step, rate in [half, *((_at_rate(load, rate), f"{rate:,} records/s") for rate in plan.RATES)]:
        rows += [
            Row(f"{shown} acknowledgement latency at {rate}", step, f"acknowledged_{rank}_us", "ms", scale=1e-3)
            for rank, shown in (("p50", "p50"), ("p99", "p99"))
        ]
    longest = "longest wait for an acknowledgement while the leader is killed"
    return [*rows, Row(longest, Step(plan.FAILOVER, plan.ONE_PARTITION), "failover_seconds", "s")]


def _tool_rows(loads: Sequence[Load]) -> list[Row]:
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


def _lean_rows(loads: Sequence[Load]) -> list[Row]:
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


def spread_table(run: Run) -> str:
    """The spread of the rounds, for the figures of the README's table."""
    peers = run.measured()
    lines = []
    for row in headline_rows():
        cells = []
        for facts in peers:
            found = run.value(facts.name, row.step, row.value)
            cells.append(
                f"{number(found['min'] * row.scale)}–{number(found['max'] * row.scale)} ({found['count']})"
                if found
                else NOT_MEASURED
            )
        if any(text != NOT_MEASURED for text in cells):
            lines.append((row.label, row.unit, *cells))
    return markdown_table(
        ("lowest–highest (measurements)", "", *(facts.name for facts in peers)), lines, right=range(2, 2 + len(peers))
    )


def settings_table(run: Run) -> str:
    lines = [
        (facts.name, facts.version, facts.driver, facts.settings, facts.flush_settings or "cannot")
        for facts in run.measured()
    ]
    return markdown_table(("peer", "version", "driven by", "settings", "fsync before the acknowledgement"), lines)


THROUGHPUT_CHART, LATENCY_CHART = "peers-throughput.png", "peers-latency.png"
CHARTS = {
    THROUGHPUT_CHART: "Throughput and broker CPU of every peer at every load",
    LATENCY_CHART: "p99 latency of every peer against its rate",
}
CAPTIONS = {
    THROUGHPUT_CHART: (
        "The base is 1 KiB, acks=all, uncompressed, 6 partitions, no fsync; the other loads differ as their labels say."
    ),
    LATENCY_CHART: ("At the same rates for all, with a concurrent consumer; an × is a rate that was not sustained."),
}


def _chart(name: str, charts: Collection[str]) -> str:
    return f"![{CHARTS[name]}](images/{name})\n\n{paragraph(CAPTIONS[name])}\n\n" if name in charts else ""


def page_blocks(run: Run, charts: Collection[str] = ()) -> dict[str, str]:
    """The blocks of docs/performance.md, by their marks; `charts`: those that are drawn."""
    neutral = run.loads(plan.THROUGHPUT, plan.NEUTRAL)
    tools = run.loads(plan.THROUGHPUT, KAFKA_TOOLS)
    latencies = run.loads(plan.LATENCY, plan.NEUTRAL)
    notes = _notes(run, _throughput_rows(neutral))
    return {
        "peers-settings": "\n\n".join(
            part for part in (head_text(run), settings_table(run), skipped_text(run)) if part
        ),
        "peers-headline": _headline(run, headline_rows()),
        "peers-throughput": (
            _chart(THROUGHPUT_CHART, charts) + f"{table(run, _throughput_rows(neutral), 'load')}\n\n{notes}"
        ),
        "peers-lean": table(run, _lean_rows(run.loads(plan.PRODUCE, LEAN)), "load"),
        "peers-latency": _chart(LATENCY_CHART, charts) + table(run, _latency_rows(latencies), "latency"),
        "peers-mixed": table(run, _mixed_rows(), f"latency at {plan.MIXED_RATE:,} records/s"),
        "peers-replicated": table(run, _replicated_rows(), "1 KiB records, three replicas"),
        "peers-tools": table(run, _tool_rows(tools), "load"),
        "peers-targets": markdown_table(TARGET_HEADINGS, target_lines(run), right=(1, 2, 3, 4)),
        "peers-footprint": table(run, footprint_rows(), "footprint"),
        "peers-spread": spread_table(run),
    }
