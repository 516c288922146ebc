"""The results: samples, their medians and spreads, and the line of perf/history.jsonl. Pure except
for the files that it reads and writes.

A sample is one measurement of one step on one peer; a result is all samples of the same (peer,
driver, step), each figure with median, minimum, maximum and count.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from perf.peers.peer import Load
from perf.peers.plan import Step
from perf.peers.processes import CpuSeconds
from perf.report import rounded

KIND = "peers"


@dataclasses.dataclass
class Sample:
    peer: str
    step: Step
    round: int
    values: dict[str, float]


@dataclasses.dataclass
class Failure:
    peer: str
    step: Step
    round: int
    reason: str


@dataclasses.dataclass
class PeerFacts:
    """`skipped`: why it was not measured, or "" ."""

    name: str
    version: str = ""
    settings: str = ""
    flush_settings: str = ""
    driver: str = ""
    skipped: str = ""


def _cpu_values(broker_cpu: CpuSeconds, records: int) -> dict[str, float]:
    """The broker's CPU-seconds per million records: all, in user mode, in the kernel."""
    return {
        "broker_cpu_s_per_million": broker_cpu.total / records * 1e6,
        "broker_user_cpu_s_per_million": broker_cpu.user / records * 1e6,
        "broker_system_cpu_s_per_million": broker_cpu.system / records * 1e6,
    }


def throughput_values(produced: dict, broker_cpu: CpuSeconds, load: Load) -> dict[str, float]:
    """The figures of one producing run: records/s, MB/s of payload, broker and client CPU-seconds per
    million records.
    """
    rate = produced["records"] / produced["seconds"]
    values = {
        "records_per_s": rate,
        "mb_per_s": rate * load.record_bytes / 1e6,
        **_cpu_values(broker_cpu, produced["records"]),
        "broker_cores": broker_cpu.total / produced["seconds"],
    }
    if "client_cpu_seconds" in produced:
        values["client_cores"] = produced["client_cpu_seconds"] / produced["seconds"]
    return values


def latency_values(measured: dict, broker_cpu: CpuSeconds) -> dict[str, float]:
    """Percentiles as `acknowledged_p99_us`; `reached`: the share of `rate` that was sustained; CPU of the
    whole run, warm-up included, over all its records. `late`: how much later than due the load
    generator sent, which the latencies include; its p99 shows whether the generator was the
    bottleneck.
    """
    values = _cpu_values(broker_cpu, measured["records"])
    for what in ("acknowledged", "consumed", "end_to_end", "late"):
        for key, value in measured.get(what, {}).items():
            if key not in ("count", "p90_us") and (what != "late" or key == "p99_us"):
                values[f"{what}_{key}"] = value
    for key in ("rate", "reached"):
        if key in measured:
            values[key] = measured[key]
    if "client_cpu_seconds" in measured:
        values["client_cores"] = measured["client_cpu_seconds"] / measured["seconds"]
    return values


def is_saturated(values: dict[str, float], figure: str) -> bool:
    """Whether the rate was not sustained, so that `figure`, if it is a latency, is that of a growing
    queue. A reader can be too slow (`consumed_...`) for records that are acknowledged in time.
    """
    reader_is_late = values.get("consumed_p50_us", 0.0) > 500_000
    return values.get("reached", 1.0) < 0.97 * values.get("rate", 1.0) or (
        figure.startswith("consumed_") and reader_is_late
    )


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "count": len(values),
    }


def step_json(step: Step) -> dict:
    return {
        "kind": step.kind,
        "driver": step.driver,
        "share": step.share,
        "rate": step.rate,
        "beside": step.beside,
        "load": dataclasses.asdict(step.load),
    }


def step_of(result: dict) -> Step:
    """The step of a line of the history; lines before 28 November 2026 have no fixed rates."""
    return Step(
        result["kind"],
        Load(**result["load"]),
        result["driver"],
        result["share"],
        result.get("rate"),
        result.get("beside", ""),
    )


def aggregate(samples: Iterable[Sample]) -> list[dict]:
    """One dict for each peer and step, in the order of their first samples. Steps that differ only
    in `everyone` are the same.
    """
    grouped: dict[tuple, list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((sample.peer, dataclasses.replace(sample.step, everyone=False)), []).append(sample)
    found = []
    for (peer, step), group in grouped.items():
        names = list(dict.fromkeys(name for sample in group for name in sample.values))
        values = {name: summary([sample.values[name] for sample in group if name in sample.values]) for name in names}
        found.append({"peer": peer, **step_json(step), "values": values})
    return found


def history_line(
    date: str,
    commit: str,
    machine: dict,
    peers: Iterable[PeerFacts],
    samples: Iterable[Sample],
    failures: Iterable[Failure],
    run: dict,
) -> str:
    """`run`: rounds, minutes, and other conditions of the measurement."""
    failed = [
        {"peer": failure.peer, **step_json(failure.step), "round": failure.round, "reason": failure.reason}
        for failure in failures
    ]
    line = {
        "kind": KIND,
        "date": date,
        "commit": commit,
        "machine": machine,
        "run": run,
        "peers": [dataclasses.asdict(facts) for facts in peers],
        "results": aggregate(samples),
        "failures": failed,
    }
    return json.dumps(line, ensure_ascii=False)


def last_run(history: Path) -> dict:
    """The last line of kind peers. Raises ValueError when there is none."""
    lines = [json.loads(line) for line in history.read_text().splitlines() if line.strip()] if history.exists() else []
    found = [line for line in lines if line.get("kind") == KIND]
    if not found:
        raise ValueError(f"{history} has no comparison yet: run `make bench-peers` first")
    return found[-1]


class Run:
    """A history line, with lookups by peer and step."""

    def __init__(self, line: dict) -> None:
        self.line = line
        self.peers = [PeerFacts(**facts) for facts in line["peers"]]
        self._results = {
            (result["peer"], step_of(result)): result["values"]
            for result in line["results"]
            if not result.get("common")  # a rate of that run only
        }

    def measured(self) -> list[PeerFacts]:
        return [facts for facts in self.peers if not facts.skipped]

    def value(self, peer: str, step: Step, name: str) -> dict | None:
        """Median, min, max, count; None when it was not measured."""
        values = self._results.get((peer, dataclasses.replace(step, everyone=False)))
        return None if values is None else values.get(name)

    def medians(self, peer: str, step: Step) -> dict[str, float]:
        values = self._results.get((peer, dataclasses.replace(step, everyone=False)), {})
        return {name: found["median"] for name, found in values.items()}

    def failure(self, peer: str, step: Step) -> str:
        """The last reason, or ""."""
        requested = step_json(step)
        reasons = [
            failed["reason"]
            for failed in self.line["failures"]
            if failed["peer"] == peer and all(failed.get(key) == value for key, value in requested.items())
        ]
        return reasons[-1] if reasons else ""

    def loads(self, kind: str, driver: str) -> list[Load]:
        """The loads of single brokers that did nothing else."""
        steps = [step_of(result) for result in self.line["results"]]
        found = [
            step.load
            for step in steps
            if (step.kind, step.driver, step.beside) == (kind, driver, "") and step.load.replicas == 1
        ]
        return list(dict.fromkeys(found))
