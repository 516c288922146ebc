"""Hours of simulated clusters, in pieces that accumulate over days:

    python -m tests.sim.long --seconds 3600 --first 500000        for an hour, on all cores, the
                                                                  kinds of plans.py in turn; a line
                                                                  of tests/sim/history.jsonl for
                                                                  each piece
    python -m tests.sim.long --add-up                             the sum of all pieces: schedules,
                                                                  events, faults, CPU-hours,
                                                                  findings

Exit code 1 when an invariant was violated; the command that repeats that seed is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.sim.schedules import Outcome, outcome, report

HISTORY = Path(__file__).with_name("history.jsonl")
TURN = ("", "transactions", "", "members", "", "coordinators", "", "retire", "last_markers")  # "": as drawn
PIECE = 60  # schedules, of one kind
SUMS = ("schedules", "events", "faults", "acked", "elections", "cpu_s")


def _timed(work: tuple[int, str]) -> tuple[Outcome, float]:
    began = time.process_time()
    found = outcome(work[0], kind=work[1])
    return found, time.process_time() - began


def line_of(first: int, kind: str, found: list[tuple[Outcome, float]], commit: str) -> dict:
    results = [result for result, _ in found]
    return {
        "commit": commit,
        "kind": kind,
        "first": first,
        "schedules": len(results),
        "events": sum(result.events for result in results),
        "faults": sum(result.faults for result in results),
        "acked": sum(result.acked for result in results),
        "elections": sum(result.elections for result in results),
        "cpu_s": round(sum(seconds for _, seconds in found), 1),
        "found": [f"{result.name}: {result.seed}" for result in results if result.name],
    }


def summary(lines: Iterable[dict]) -> str:
    sums: dict[str, Counter] = {}
    found = []
    for line in lines:
        for kind in (line["kind"] or "as drawn", "all"):
            sums.setdefault(kind, Counter()).update({name: line[name] for name in SUMS})
        found += [f"{one} ({line['kind'] or 'as drawn'}, at {line['commit']})" for one in line["found"]]
    kinds = [
        f"{kind:12} {total['schedules']:.0f} schedules, {total['events']:.0f} events, {total['faults']:.0f} faults,"
        f" {total['elections']:.0f} leader epochs, {total['acked']:.0f} acknowledged; {total['cpu_s'] / 3600:.2f}"
        " CPU-hours"
        for kind, total in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    return "\n".join([*kinds, *(f"found: {one}" for one in found)] if kinds else ["no runs"])


def _commit() -> str:
    return (
        subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HISTORY.parent
        ).stdout.strip()
        or "unknown"
    )


def run(seconds: float, first: int, lanes: int, results: Path, now: Callable[[], float] = time.monotonic) -> bool:
    """True: no violation. Pieces are never cut: the last ends after `seconds`."""
    ends, commit, clean = now() + seconds, _commit(), True
    with multiprocessing.get_context("fork").Pool(lanes) as pool:
        for piece in range(1 << 30):
            if now() >= ends:
                break
            seed, kind = first + piece * PIECE, TURN[piece % len(TURN)]
            found = list(pool.imap(_timed, [(seed + index, kind) for index in range(PIECE)]))
            line = line_of(seed, kind, found, commit)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if line["found"]:
                clean = False
                print(report([result for result, _ in found]), flush=True)
    return clean


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.long", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--first", type=int, default=1, help="seed")
    parser.add_argument("--lanes", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, default=HISTORY, help="a file that each piece's line is appended to")
    parser.add_argument("--add-up", action="store_true", help="run nothing; say what the pieces in --results come to")
    given = parser.parse_args(words)
    if given.add_up:
        print(summary(map(json.loads, given.results.read_text().splitlines() if given.results.exists() else ())))
        return 0
    return not run(given.seconds, given.first, given.lanes, given.results)


if __name__ == "__main__":
    sys.exit(main())
