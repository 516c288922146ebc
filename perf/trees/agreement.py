"""`python -m perf.trees.agreement`: whether the last run of `make bench` and of `make bench-peers` agrees
with the runs before it.

Two runs agree about a figure if their ranges (lowest to highest repetition) overlap. By random
variation alone, the ranges of n and m repetitions do not overlap in 2 of (n + m over n) cases: one
in ten for three and three, one in 28 for three and five. So compare the number of figures apart
with the number expected from random variation. Of the run before the last one, all figures that are
apart are printed, those whose medians differ most first.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

RUNS_MAX = 4  # earlier runs that the last one is compared with
HISTORY = Path(__file__).resolve().parents[1] / "history.jsonl"


class Range(NamedTuple):
    lowest: float
    median: float
    highest: float
    count: int  # of repetitions

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.lowest:.4g} to {self.highest:.4g})"


class Difference(NamedTuple):
    name: str
    before: Range
    after: Range

    @property
    def ratio(self) -> float:
        """The larger median, as a multiple of the smaller one."""
        low, high = sorted((abs(self.before.median), abs(self.after.median)))
        return high / low if low else float("inf")


class Comparison(NamedTuple):
    count: int  # figures that both runs have
    apart: list[Difference]  # those whose ranges do not overlap, the most different first
    expected: float  # how many would be apart by random variation alone


def figures_of(line: dict[str, Any]) -> dict[str, Range]:
    """The ranges of a line of perf/history.jsonl, of either laboratory, by name."""
    if "figures" in line:
        return {
            name: Range(one["min"], one["median"], one["max"], one["repetitions"])
            for name, one in line["figures"].items()
        }
    found = {}
    for result in line["results"]:
        # runs before 28 November 2026 have no fixed rates
        step = [result["kind"], result["driver"], result["share"], result.get("rate"), result.get("beside")]
        load = result["load"]
        step += [f"{load['record_bytes']} B", f"acks={load['acks']}", load["compression"]]
        step += [
            f"{load['partitions']} partitions",
            "fsync" if load["durable"] else "",
            f"RF {load.get('replicas', 1)}",
        ]
        text = ", ".join(str(word) for word in step if word)
        for name, one in result["values"].items():
            found[f"{result['peer']}: {text}: {name}"] = Range(one["min"], one["median"], one["max"], one["count"])
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    old, new = figures_of(before), figures_of(after)
    pairs = [Difference(name, old[name], new[name]) for name in new if name in old]
    apart = [one for one in pairs if one.before.lowest > one.after.highest or one.after.lowest > one.before.highest]
    expected = sum(2 / math.comb(one.before.count + one.after.count, one.after.count) for one in pairs)
    return Comparison(len(pairs), sorted(apart, key=lambda one: -one.ratio), expected)


def main(history: Path = HISTORY) -> int:
    lines = [json.loads(line) for line in history.read_text().splitlines() if line.strip()]
    for title, runs in (
        ("make bench", [line for line in lines if "kind" not in line]),
        ("make bench-peers", [line for line in lines if line.get("kind") == "peers"]),
    ):
        if len(runs) < 2:
            print(f"{title}: fewer than two runs in {history}")
            continue
        last = runs[-1]
        for before in runs[-1 - RUNS_MAX : -1]:
            found = compare(before, last)
            print(
                f"{title}, {before['date']} and {last['date']}: {len(found.apart)} of {found.count} figures are apart;"
                f" {found.expected:.0f} would be by random variation alone"
            )
        for one in found.apart:
            print(f"  {one.ratio:5.2f} times: {one.name}: {one.before} and {one.after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
