"""The history of clients, one JSON line per event, one file per client; and reading all of them.

Times are CLOCK_MONOTONIC nanoseconds, the same for all processes of the machine (namespaces do not
change them). A value names its producer and its number, with a checksum: tests/crash/checker.py,
make_value. Records outside transactions have `txn` None.

    send     a record was passed to the client; the line is written when its outcome is known: "ok"
             with its offset, "fail" (certainly not written), "info" (unknown)
    ask      the end of a transaction is requested: `wish` "commit" or "abort", at `begin_ns`
    end      its outcome: "ok", or "info" (unknown), which is also assumed when this line is missing
    assign   a consumer's partitions from here on; `epoch` counts assignments, positions are reset
    poll     a record was returned to a consumer
    offsets  a member of a group committed its position, successfully
    alive    a client's operation succeeded (or failed: `ok` False) in this second; used for
             availability
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

Place = tuple[str, int]  # topic, partition


@dataclass(frozen=True, slots=True)
class Send:
    client: str
    number: int
    topic: str
    partition: int
    status: str
    offset: int
    begin_ns: int
    end_ns: int
    txn: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    client: str
    txn: int
    wish: str
    status: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Poll:
    client: str
    epoch: int
    topic: str
    partition: int
    offset: int
    value: str  # hex of bytes that no producer created, else "producer:number"
    at_ns: int


@dataclass(frozen=True, slots=True)
class Commit:
    client: str
    group: str
    topic: str
    partition: int
    offset: int  # the next one to read
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class History:
    sends: list[Send] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)  # the last one of a transaction counts
    polls: list[Poll] = field(default_factory=list)  # in the order of each client
    # client -> second -> [successes, failures]
    alive: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    notes: list[dict] = field(default_factory=list)  # errors of clients, for readers of the results


@dataclass(slots=True)
class FinalLog:
    """A reader's result at the end, after healing: of all records (`all`), and of committed ones
    (`committed`): (offset, value as in Poll).
    """

    start: int
    end: int
    all: list[tuple[int, str]]
    committed: list[tuple[int, str]]


class Writer:
    """One client's file. Every line is complete, except possibly the last one of a killed process."""

    def __init__(self, path: Path, client: str) -> None:
        self._file: IO[str] = path.open("a", buffering=1)
        self._client = client
        self._counts = [0, 0]
        self._second = 0

    def write(self, kind: str, **fields: object) -> None:
        self._file.write(json.dumps({"kind": kind, "client": self._client, **fields}) + "\n")

    def worked(self, ok: bool) -> None:
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            self.flush()
            self._second = second
        self._counts[not ok] += 1

    def flush(self) -> None:
        if any(self._counts):
            self.write("alive", second=self._second, ok=self._counts[0], bad=self._counts[1])
            self._counts = [0, 0]


def read(paths: Iterable[Path]) -> History:
    history = History()
    for path in sorted(paths):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                one = json.loads(line)
            except ValueError:
                if number >= len(lines) - 2:
                    continue  # the process was killed while it wrote it
                raise
            _take(history, one)
    return history


def _take(history: History, one: dict) -> None:
    kind, client = one.pop("kind"), one["client"]
    match kind:
        case "send":
            history.sends.append(Send(**one))
        case "ask":
            history.ends.append(End(**one, status="info", end_ns=one["begin_ns"]))
        case "end":
            history.ends.append(End(**one))
        case "poll":
            history.polls.append(Poll(**one))
        case "offsets":
            history.commits.append(Commit(**one))
        case "alive":
            counts = history.alive.setdefault(client, {}).setdefault(one["second"], [0, 0])
            counts[0] += one["ok"]
            counts[1] += one["bad"]
        case _:
            history.notes.append({"kind": kind, **one})


def served(history: History, clients: Iterable[str], first_second: int, end_second: int) -> tuple[int, int]:
    """(client seconds with a success, all client seconds)."""
    worked = total = 0
    for client in clients:
        seconds = history.alive.get(client, {})
        for second in range(first_second, end_second):
            total += 1
            worked += bool(seconds.get(second, (0, 0))[0])
    return worked, total
