"""The sum of several runs: the lines written by `python -m tests.chaos --results FILE`, added up
over pieces and days. Pure except for the reading.

Seconds are of faults, not of starting and checking. A run that did not complete counts its faults
and its failure, and neither seconds nor records: nothing was checked. Client seconds: of every
sender and of the consumer, one for each second of the faults; served when an operation succeeded in
it. Runs from before these were recorded only have their shares, and are weighted as SENDERS and
READERS clients.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SENDERS, READERS = 4, 1
SUMS = ("acknowledged", "unknown", "refused", "polled", "transactions", "transactions_unknown")


@dataclass
class Total:
    runs: int = 0
    ended: int = 0
    seconds: float = 0.0
    faults: int = 0
    seeds: list[int] = field(default_factory=list)
    sums: Counter = field(default_factory=Counter)
    anomalies: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    # [served, all]
    client_seconds: dict[str, list[float]] = field(default_factory=lambda: {"writer": [0.0, 0.0], "reader": [0.0, 0.0]})
    kinds: dict[str, list[int]] = field(default_factory=dict)
    heal_s_max: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.anomalies and not self.failures and self.runs > 0


def add_up(lines: Iterable[str]) -> Total:
    total = Total()
    for line in lines:
        if line.strip().startswith("{"):
            _add(total, json.loads(line))
    return total


def _add(total: Total, run: dict) -> None:
    total.runs += 1
    total.seeds.append(run["seed"])
    total.faults += run["faults"]
    total.anomalies.update(run["anomalies"])
    if run["failure"]:
        total.failures.append(f"seed {run['seed']}: {run['failure'].splitlines()[0]}")
    if "writers_available" not in run:
        return
    total.ended += 1
    seconds = run.get("fault_seconds", run["seconds"])
    total.seconds += seconds
    total.heal_s_max = max(total.heal_s_max, run["heal_s"])
    for kind, (served, everything) in run.get("kinds", {}).items():
        known = total.kinds.get(kind, [0, 0])
        total.kinds[kind] = [known[0] + served, known[1] + everything]
    total.sums.update({name: run.get(name, 0) for name in SUMS})
    for role, clients in (("writer", SENDERS), ("reader", READERS)):
        everything = run.get(f"{role}_seconds", clients * seconds)
        total.client_seconds[role][0] += run.get(f"{role}_seconds_served", everything * run[f"{role}s_available"])
        total.client_seconds[role][1] += everything


def of_files(paths: Iterable[Path]) -> Total:
    return add_up(line for path in paths for line in path.read_text().splitlines())


def _share(served: float, everything: float) -> str:
    return (
        f"{served:.0f} of {everything:.0f} client seconds ({100 * served / everything:.2f} %)"
        if everything
        else "no client seconds"
    )


def report(total: Total) -> str:
    served, everything = (sum(one[place] for one in total.client_seconds.values()) for place in (0, 1))
    return "\n".join(
        (
            (
                f"runs: {total.runs}, of which {total.ended} came to their end; {total.seconds:.0f} s of faults"
                f" ({total.seconds / 3600:.2f} h), {total.faults} faults"
            ),
            f"seeds: {', '.join(map(str, sorted(total.seeds)))}",
            ", ".join(f"{name}: {total.sums[name]}" for name in SUMS),
            "anomalies: "
            + (", ".join(f"{kind} x {count}" for kind, count in sorted(total.anomalies.items())) or "none"),
            *(f"failure: {text}" for text in total.failures),
            (
                f"available: writers {_share(*total.client_seconds['writer'])}, readers"
                f" {_share(*total.client_seconds['reader'])}, all {_share(served, everything)}"
            ),
            *(
                f"    writers, from its beginning to the next fault: {kind:14} {_share(*found)}"
                for kind, found in sorted(total.kinds.items())
            ),
            f"longest healing: {total.heal_s_max:.1f} s",
        )
    )
