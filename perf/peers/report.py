"""The comparison as tables: for the terminal, README.md and docs/performance.md. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from perf.peers import plan
from perf.peers.driving import KAFKA_TOOLS, LEAN
from perf.peers.results import PeerFacts, Run, is_saturated
from perf.peers.rows import (
    Row,
    footprint_rows,
    headline_rows,
    latency_rows,
    lean_rows,
    mixed_rows,
    replicated_rows,
    throughput_rows,
    tool_rows,
)
from perf.peers.targets import TARGET_HEADINGS, target_lines
from perf.report import markdown_table, number, paragraph

NOT_MEASURED = "–"
CLUSTER = ", 3 brokers"  # how the names of clusters end
BUSY_MAX = 0.2  # share of all CPUs used by other programs when a run begins; the report mentions a higher one


def _is_saturated(run: Run, peer: str, row: Row) -> bool:
    return row.step.kind == plan.LATENCY and is_saturated(run.medians(peer, row.step), row.value)


def cell(run: Run, peer: str, row: Row, best: bool) -> str:
    """The median; bold when it is the best of its row; * when the rate was not sustained."""
    found = run.value(peer, row.step, row.value)
    if found is None:
        return "failed" if run.failure(peer, row.step) else NOT_MEASURED
    text = number(found["median"] * row.scale)
    text = f"**{text}**" if best else text
    return text + ("*" if _is_saturated(run, peer, row) else "")


def _best(run: Run, peers: Sequence[PeerFacts], row: Row) -> str | None:
    """The peer with the best figure; None when there are not two to compare. Figures at a rate that was
    not sustained are excluded.
    """
    found = {facts.name: run.value(facts.name, row.step, row.value) for facts in peers}
    medians = {name: value["median"] for name, value in found.items() if value is not None}
    kept = {name: median for name, median in medians.items() if not _is_saturated(run, name, row)}
    if not row.has_best or len(medians) < 2 or not kept:
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


def skipped_text(run: Run) -> str:
    lines = [f"{facts.name}: not measured: {facts.skipped}." for facts in run.peers if facts.skipped]
    return "\n".join(lines)


def versions_text(run: Run) -> str:
    """One entry for each program, however many brokers of it were measured."""
    versions = {facts.name.removesuffix(CLUSTER): facts.version for facts in run.measured()}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _notes(run: Run, rows: Sequence[Row]) -> str:
    """Notes for the reader of the rows; only those that apply to them."""
    notes = ["Medians; bold is the best of a row"]
    if any(_is_saturated(run, facts.name, row) for facts in run.measured() for row in rows):
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


def spread_table(run: Run, rows: Sequence[Row], clusters: bool) -> str:
    """The spread of the rounds, for these rows, of the clusters or of the single brokers."""
    peers = [facts for facts in run.measured() if facts.name.endswith(CLUSTER) == clusters]
    lines = []
    for row in rows:
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
    if not lines:
        return ""
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
    notes = _notes(run, throughput_rows(neutral))
    tails = [row for row in mixed_rows() if "_p99_" in row.value and row.has_best]
    spreads = [spread_table(run, [*headline_rows(), *tails], False), spread_table(run, replicated_rows(), True)]
    return {
        "peers-settings": "\n\n".join(
            part for part in (head_text(run), settings_table(run), skipped_text(run)) if part
        ),
        "peers-headline": _headline(run, headline_rows()),
        "peers-throughput": (
            _chart(THROUGHPUT_CHART, charts) + f"{table(run, throughput_rows(neutral), 'load')}\n\n{notes}"
        ),
        "peers-lean": table(run, lean_rows(run.loads(plan.PRODUCE, LEAN)), "load"),
        "peers-latency": _chart(LATENCY_CHART, charts) + table(run, latency_rows(latencies), "latency"),
        "peers-mixed": table(run, mixed_rows(), f"latency at {plan.MIXED_RATE:,} records/s"),
        "peers-replicated": table(run, replicated_rows(), "1 KiB records, three replicas"),
        "peers-tools": table(run, tool_rows(tools), "load"),
        "peers-targets": markdown_table(TARGET_HEADINGS, target_lines(run), right=(1, 2, 3, 4)),
        "peers-footprint": table(run, footprint_rows(), "footprint"),
        "peers-spread": "\n\n".join(spread for spread in spreads if spread),
    }
