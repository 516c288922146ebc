"""The headline's load, its turns and its figures, without a broker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import cases, loading
from perf.accounting import CpuTime
from perf.paced import headline
from perf.report import MISSED, NOT_ALWAYS, REACHED, Figure


class _Bench:
    """A bench whose loads take the given (p99, p99.9) in microseconds."""

    quick = False

    def __init__(self, *tails_us: tuple[float, float]) -> None:
        self.figures: dict[str, Figure] = {}
        self.asked: list[dict[str, Any]] = []
        self.topics: list[tuple[str, object]] = []
        self.warmed: list[int] = []
        self._tails_us = list(tails_us)
        self.brokers = SimpleNamespace(get=lambda name: self, drop=lambda name: None, directory=Path("/nowhere"))
        self.serial = lambda: len(self.topics)
        self.delete = lambda name: self.topics.append((name, "deleted"))
        self.prepare = lambda megabytes=0: self.warmed.append(megabytes)
        self.repeat = lambda what, count: range(count)
        self.measure_undisturbed = lambda measure: measure()

    def topic(self, name: str, partitions: int, flush_on_ack: str) -> str:
        assert partitions == 6
        self.topics.append((name, flush_on_ack))
        return name

    def load(self, what: str, **arguments: object) -> tuple[dict[str, Any], CpuTime]:
        self.asked.append({"what": what, **arguments})
        p99, p999 = self._tails_us.pop(0)
        acknowledged = {"p50_us": p99 / 2, "p99_us": p99 - headline.FILL_US, "p999_us": p999 - 100}
        return {"acknowledged": acknowledged, "late": {"p99_us": 40.0}, "seconds": 6.0}, CpuTime(3_000_000_000)

    def add(self, name: str, unit: str, values: list[float], target: float | None = None, note: str = "") -> None:
        self.figures[name] = Figure(name, unit, values, target, False, note)


def test_the_load_is_150_mb_a_second_in_whole_requests() -> None:
    load = headline.LOAD
    assert load["rate"] * load["records"] == 150_000
    assert load["rate"] * load["records"] * headline.VALUE >= 150e6
    assert headline.FILL_US == 100
    assert load["batch"] == 61 + 16 * (1024 + 9) and load["acks"] == -1 and load["connections"] == 6
    seconds = (load["warm_milliseconds"] + headline.MILLISECONDS) / 1e3
    assert load["rate"] * load["batch"] * seconds < headline.WARM_MEGABYTES << 20


def test_each_way_has_its_bound_and_both_have_that_of_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "run", lambda what, **_: {"fdatasync": {"p99_us": 500.0}})
    bench = _Bench((1900, 3800), (3400, 13600), (2100, 4200), (3500, 7000), (1000, 2000), (3600, 7200))
    headline.headline(bench)  # type: ignore[arg-type]
    bounded = {name: figure for name, figure in bench.figures.items() if figure.target is not None}
    what = "150,000 records/s of 1 KiB, acks=all"
    assert {name: (figure.target, figure.verdict) for name, figure in bounded.items()} == {
        f"{what}, acknowledged, p99, flush.on.ack=false": (2.0, NOT_ALWAYS),
        f"{what}, p99.9 as a multiple of p99, flush.on.ack=false": (3.0, REACHED),
        f"{what}, p99 minus that of fdatasync, flush.on.ack=true": (3.0, NOT_ALWAYS),
        f"{what}, p99.9 as a multiple of p99, flush.on.ack=true": (3.0, NOT_ALWAYS),
    }
    assert bounded[f"{what}, p99 minus that of fdatasync, flush.on.ack=true"].values == pytest.approx([2.9, 3.0, 3.1])
    assert bench.figures[f"{what}, broker, flush.on.ack=true"].median == 0.5
    assert Figure("", "", [2.1], headline.P99_MS_MAX).verdict == MISSED


def test_memory_is_touched_immediately_before_each_load_and_topics_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "run", lambda what, **_: {"fdatasync": {"p99_us": 500.0}})
    bench = _Bench(*[(1000, 2000)] * 6)
    headline.headline(bench)  # type: ignore[arg-type]
    assert bench.warmed == [1_100, 0, 1_100] * 3
    assert [state for _, state in bench.topics] == ["false", "deleted", "true", "deleted"] * 3
    assert {(one["what"], one["milliseconds"]) for one in bench.asked} == {("paced", 5_000)}


def test_the_bench_runs_it() -> None:
    assert cases.CASES["headline"] is headline.headline
