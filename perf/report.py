"""Figures, verdicts, and their output: the table, perf/history.jsonl,
docs/performance.md. Pure except for the files that it writes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

REACHED, MISSED = "reached", "missed"
NOT_ALWAYS = "not in every run"  # the median reaches the target, the spread crosses it
BELOW = "below what can be measured"  # a difference of two measurements that came out at 0 or less


# units that older lines of the history name differently
UNITS = {
    "batches/s per CPU-second of a worker": "batches per CPU-second of a worker",
    "MB/s per CPU-second": "MB per CPU-second",
}


@dataclasses.dataclass
class Figure:
    """One measured quantity: a value for each repetition. `target`: the highest permitted value, or
    with `at_least` the lowest; None: for information.
    """

    name: str
    unit: str
    values: list[float]
    target: float | None = None
    at_least: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name} has no values")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        """ "" when there is no target. REACHED only when every repetition reaches it; MISSED when
        the median does not.
        """
        if self.target is None:
            return ""
        if not self._reaches(self.median):
            return MISSED
        return REACHED if all(map(self._reaches, self.values)) else NOT_ALWAYS

    def _reaches(self, value: float) -> bool:
        return self.target is None or (value >= self.target if self.at_least else value <= self.target)

    @property
    def target_text(self) -> str:
        return "" if self.target is None else f"{'≥' if self.at_least else '≤'} {number(self.target)}"

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "unit": self.unit,
            "median": rounded(self.median),
            "min": rounded(min(self.values)),
            "max": rounded(max(self.values)),
            "repetitions": len(self.values),
        }
        if self.target is not None:
            found |= {"target": self.target, "at_least": self.at_least, "verdict": self.verdict}
        if self.note:
            found["note"] = self.note
        return found

    @classmethod
    def from_json(cls, name: str, found: dict) -> Figure:
        """Creates a figure with its median, minimum and maximum as the only values: the tables show
        no others."""
        values = [found["min"], found["median"], found["max"]]
        unit = UNITS.get(found["unit"], found["unit"])
        return cls(name, unit, values, found.get("target"), found.get("at_least", False), found.get("note", ""))


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def number(value: float) -> str:
    """The value for readers: three significant digits, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    text = f"{value:.3g}"
    return f"{float(text):g}"


def median_text(figure: Figure) -> str:
    return number(figure.median) if figure.median > 0 else BELOW


def spread(figure: Figure) -> str:
    """Lowest to highest; values below 0 are noise, and shown as 0."""
    return f"{number(max(0, min(figure.values)))}–{number(max(0, max(figure.values)))}"


HEADINGS = ("what", "figure", "spread", "unit", "target", "verdict")


def rows(figures: Iterable[Figure]) -> list[tuple[str, ...]]:
    return [
        (figure.name, median_text(figure), spread(figure), figure.unit, figure.target_text, figure.verdict)
        for figure in figures
    ]


def plain_table(figures: Sequence[Figure]) -> str:
    lines = [HEADINGS, *rows(figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    right = {1, 2, 4}
    text = [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"* {figure.name}: {figure.note}" for figure in figures if figure.note]
    return "\n".join(text + ([""] + notes if notes else []))


def paragraph(text: str) -> str:
    """The text, wrapped like all prose on the pages."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    right = set(right)
    out = [
        "| " + " | ".join(headings) + " |",
        "|" + "|".join(" ---: " if index in right else " --- " for index in range(len(headings))) + "|",
    ]
    return "\n".join(out + ["| " + " | ".join(line) + " |" for line in lines])


# -- history ---------------------------------------------------------------------------------------


CASES_KIND = "cases"  # of a line with the figures of some cases only
TRIAL_KIND = "trial"  # of a line of --quick, which no page shows


def history_line(date: str, commit: str, machine: dict, figures: Iterable[Figure], **more: object) -> str:
    """`more`: for a line that is not a whole run, its `kind`, and `cases`, their names."""
    return json.dumps(
        {
            **more,
            "date": date,
            "commit": commit,
            "machine": machine,
            "figures": {figure.name: figure.to_json() for figure in figures},
        },
        ensure_ascii=False,
    )


def last_run(history: Path) -> dict:
    """The last line of `make bench`; lines of another kind (`make bench-peers`, some cases only) are
    skipped. Raises ValueError when there is none.
    """
    return last_runs(history)[0]


def last_runs(history: Path) -> list[dict]:
    """The last whole run, and all later runs of some cases. Raises ValueError when there is no whole run."""
    lines = [json.loads(line) for line in history.read_text().splitlines() if line.strip()] if history.exists() else []
    whole = [number for number, line in enumerate(lines) if "kind" not in line]
    if not whole:
        raise ValueError(f"{history} has no line yet: run `make bench` first")
    return [lines[whole[-1]], *(line for line in lines[whole[-1] :] if line.get("kind") == CASES_KIND)]


# -- pages -----------------------------------------------------------------------------------------


def replace_block(text: str, name: str, block: str) -> str:
    """Replaces the text between <!-- NAME:begin --> and <!-- NAME:end -->. Raises ValueError unless each
    occurs once, in this order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page needs one {begin} and, after it, one {end}")
    return re.sub(
        re.escape(begin) + r".*?" + re.escape(end), lambda _: f"{begin}\n{block.strip()}\n{end}", text, flags=re.S
    )


LATER = "†"  # marks a figure of a later run of some cases


def _run_text(run: dict) -> str:
    machine = run["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, {run['date'][:10]},"
        f" commit {run['commit'][:10]}"
    )


def _later_text(runs: Iterable[dict]) -> str:
    """Names the runs that the marked figures are from, each with its machine."""
    parts = [f"`python -m perf {' '.join(run['cases'])}` on {_run_text(run)}" for run in runs]
    return f" {LATER}: measured later, without the other cases: {'; '.join(parts)}." if parts else ""


def figures_of(run: dict, targets: Mapping[str, float] = types.MappingProxyType({})) -> list[Figure]:
    """The figures of a history line. `targets`, by figure, replace those at the time of the run."""
    return [
        Figure.from_json(name, {**found, "target": targets[name]} if name in targets else found)
        for name, found in run["figures"].items()
    ]


def page_block(run: dict, later: Sequence[dict] = (), targets: Mapping[str, float] = types.MappingProxyType({})) -> str:
    """The figures of one history line that have a target, for docs/performance.md. Figures of `later`
    runs of some cases replace those of the same name, and are marked. `targets`: see figures_of.
    """
    source = {name: one for one in (run, *later) for name in one["figures"]}
    figures = {figure.name: figure for one in (run, *later) for figure in figures_of(one, targets)}
    with_target = [figure for figure in figures.values() if figure.target is not None]
    shown = [source[figure.name] for figure in with_target]
    lines = [
        (
            figure.name if one is run else f"{figure.name} {LATER}",
            f"**{median_text(figure)}**",
            figure.unit,
            spread(figure),
            figure.target_text,
            figure.verdict,
        )
        for figure, one in zip(with_target, shown, strict=True)
    ]
    table = markdown_table(
        ("one worker core, unless stated otherwise", "median", "", "spread", "target", ""), lines, right=(1, 3, 4)
    )
    reached = sum(figure.verdict == REACHED for figure in with_target)
    head = f"`make bench` on {_run_text(run)}"
    disk = run["figures"].get("fdatasync of 1 KiB, p50")
    tail = f"; the disk's fdatasync took {number(disk['median'])} µs (p50) in the same run" if disk else ""
    text = (
        f"{head}{tail}. {reached} of {len(with_target)} targets reached in every repetition. CPU time is the kernel's"
        " accounting, all threads of the worker."
    )
    text += _later_text(one for one in later if any(one is other for other in shown))
    return f"{paragraph(text)}\n\n{table}"
