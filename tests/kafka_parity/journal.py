"""A run's results, a line of JSON for each case, so that a run of hours can be interrupted and
continued: a compared case is not repeated unless it showed a difference.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from tests.kafka_parity.compare import Allowed, Difference, Table

Case = tuple[str, int, int, int]  # API, version, seed, number


class Journal:
    """`path` None keeps it in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.found: dict[Case, list[Difference]] = {}
        self.fleeting: dict[Case, list[Difference]] = {}  # differences that did not recur
        self.met: set[str] = set()  # the lines of the table that some case has met
        for line in path.read_text().splitlines() if path and path.exists() else ():
            self._take(json.loads(line))

    def _take(self, entry: dict) -> None:
        if "met" in entry:
            self.met.update(entry["met"])
        else:
            case = tuple(entry["case"])
            self.found[case] = [Difference(*values) for values in entry["found"]]
            self.fleeting[case] = [Difference(*values) for values in entry.get("fleeting", ())]

    def is_done(self, case: Case) -> bool:
        return self.found.get(case) == []

    def add(self, cases: dict[Case, tuple[Iterable[Difference], Iterable[Difference]]], table: Table) -> None:
        """The differences of cases, reproduced and not, replacing an earlier outcome."""
        met = {name(entry) for entry in table.used_entries()} - self.met
        entries: list[dict] = [{"met": sorted(met)}] if met else []
        for case, (found, fleeting) in cases.items():
            entry = {"case": case, "found": [dataclasses.astuple(difference) for difference in found]}
            if fleeting:
                entry["fleeting"] = [dataclasses.astuple(difference) for difference in fleeting]
            entries.append(entry)
        for entry in entries:
            self._take(entry)
        if self._path is not None:
            with open(self._path, "a") as journal:
                journal.writelines(json.dumps(entry) + "\n" for entry in entries)

    def unmet(self, table: Table) -> list[Allowed]:
        return [entry for entry in table.unused() if name(entry) not in self.met]


def name(entry: Allowed) -> str:
    said = f" {entry.said!r}" if entry.said else ""
    return f"{entry.api} {entry.versions} {entry.field} {entry.kafka!r} {entry.mqd!r} {entry.order}{said}"
