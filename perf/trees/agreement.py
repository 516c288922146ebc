"""`python -m perf.trees.agreement`: whether the last two runs of `make bench` and of `make bench-peers` agree.

Two runs agree about a figure if their ranges (lowest to highest repetition) overlap. Of two runs of
three repetitions each, one figure in ten does not overlap at random, so a handful proves nothing; a
figure whose medians also differ much is printed first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

HISTORY = Path(__file__).resolve().parents[1] / "history.jsonl"


class Difference(NamedTuple):
    name: str
    before: tuple[float, float, float]  # lowest, median, highest
    after: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        """The larger median, as a multiple of the smaller one."""
        low, high = sorted((abs(self.before[1]), abs(self.after[1])))
        return high / low if low else float("inf")


def figures_of(line: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """The ranges of a line of perf/history.jsonl, of either laboratory, by name."""
    if "figures" in line:
        return {name: (one["min"], one["median"], one["max"]) for name, one in line["figures"].items()}
    found = {}
    for result in line["results"]:
        # runs before 28 November 2026 have no fixed rates
        step = [result["kind"], result["driver"], result["share"], result.get("rate"), result.get("beside")]
        load = result["load"]
        step += [f"{load['record_bytes']} B", f"acks={load['acks']}", load["compression"]]
        step += [f"{load['partitions']} partitions", "fsync" if load["durable"] else "", f"RF {load['replicas']}"]
        text = ", ".join(str(word) for word in step if word)
        for name, one in result["values"].items():
            found[f"{result['peer']}: {text}: {name}"] = (one["min"], one["median"], one["max"])
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, list[Difference]]:
    """(number of figures that both lines have, those whose ranges do not overlap, the most different first)."""
    old, new = figures_of(before), figures_of(after)
    common = [name for name in new if name in old]
    apart = [
        Difference(name, old[name], new[name])
        for name in common
        if old[name][0] > new[name][2] or new[name][0] > old[name][2]
    ]
    return len(common), sorted(apart, key=lambda one: -one.ratio)


def main(history: Path = HISTORY) -> int:
    lines = [json.loads(line) for line in history.read_text().splitlines() if line.strip()]
    for title, runs in (
        ("make bench", [line for line in lines if "figures" in line]),
        ("make bench-peers", [line for line in lines if line.get("kind") == "peers"]),
    ):
        if len(runs) < 2:
            print(f"{title}: fewer than two runs in {history}")
            continue
        count, apart = compare(*runs[-2:])
        print(f"{title}, {runs[-2]['date']} and {runs[-1]['date']}: {count - len(apart)} of {count} figures agree")
        for one in apart:
            print(f"  {one.ratio:5.2f} times: {one.name}: {one.before} and {one.after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
