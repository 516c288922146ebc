"""`python -m perf beside REVISION [CASE...]`: this tree and an older one, in turns, in one run.

Each tree is measured with its own bench, case by case; each round swaps the order, so that changes
of the machine affect both. Figures are matched by name. A ratio above 1 means
that this tree's figure is larger; whether that is better depends on the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from perf.loading import ROOT
from perf.report import number

Figures = Mapping[str, float]  # median by the figure's name


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of both trees; a value for each round."""

    name: str
    old: list[float]
    new: list[float]

    @property
    def ratios(self) -> list[float]:
        """New to old, by round; a round without an old value above 0 has none."""
        return [new / old for old, new in zip(self.old, self.new, strict=True) if old > 0]


def compare(rounds: Iterable[tuple[Figures, Figures]]) -> list[Row]:
    """The figures that both trees have in every round, in the order of the first."""
    rounds = list(rounds)
    names = [name for name in rounds[0][0] if all(name in side for pair in rounds for side in pair)]
    return [Row(name, [old[name] for old, _ in rounds], [new[name] for _, new in rounds]) for name in names]


def table(rows: Iterable[Row]) -> str:
    lines = [f"{'old':>10} {'new':>10} {'ratio':>6} {'spread':>12}  figure"]
    for row in rows:
        old, new = (number(statistics.median(values)) for values in (row.old, row.new))
        ratios = row.ratios
        ratio = f"{statistics.median(ratios):.3f}" if ratios else "-"
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"
        lines.append(f"{old:>10} {new:>10} {ratio:>6} {spread:>12}  {row.name}")
    return "\n".join(lines)


def checkout(revision: str) -> Path:
    """A tree of `revision` with its own virtual environment, made once. Raises CalledProcessError."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    tree = ROOT / ".build" / "beside" / commit[:12]
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "-C", str(tree), "checkout", "--quiet", "--detach", commit], check=True)
    subprocess.run(["make", "--silent", "venv"], cwd=tree, check=True)
    return tree


def _measure(tree: Path, case: str, quick: bool) -> Figures:
    """Medians by name. The line that the bench adds to its history is read and removed again. Raises
    CalledProcessError.
    """
    history = tree / "perf" / "history.jsonl"
    before = history.read_bytes()
    command = [str(tree / ".venv/bin/python"), "-m", "perf", case, "--record", *(["--quick"] if quick else [])]
    try:
        subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        line = history.read_bytes()[len(before) :]
    finally:
        history.write_bytes(before)
    return {name: figure["median"] for name, figure in json.loads(line)["figures"].items()}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf beside", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two repetitions in each turn")
    arguments = parser.parse_args(words)
    old = checkout(arguments.revision)
    for case in arguments.cases:
        rounds = []
        for number_of_round in range(arguments.rounds):
            order = (old, ROOT) if number_of_round % 2 == 0 else (ROOT, old)
            found = {tree: _measure(tree, case, arguments.quick) for tree in order}
            rounds.append((found[old], found[ROOT]))
        print(f"\n{case}\n{table(compare(rounds))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
