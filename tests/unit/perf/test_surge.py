"""The surge beside quiet producers: its rounds, its ratio, and the load generator's parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from perf import cases
from perf.report import Figure


class _Bench:
    """A bench whose loads take the given numbers of microseconds."""

    def __init__(self, *tails_us: float) -> None:
        self.quick = False
        self.figures: dict[str, Figure] = {}
        self.asked: list[dict[str, Any]] = []
        self._tails_us = list(tails_us)
        self.brokers = SimpleNamespace(get=lambda name: self, drop=lambda name: None)

    def topic(self, name: str, **_: object) -> str:
        return name

    def load(self, what: str, **arguments: object) -> tuple[dict[str, Any], None]:
        self.asked.append({"what": what, **arguments})
        return {"acknowledged": {"p99_us": self._tails_us.pop(0)}}, None

    def prepare(self) -> None: ...

    def repeat(self, what: str) -> range:
        return range(3)

    def add(self, name: str, unit: str, values: list[float], target: float | None = None) -> None:
        self.figures[name] = Figure(name, unit, values, target, False, "")


def test_rounds_take_turns_and_are_compared_pairwise() -> None:
    bench = _Bench(100, 120, 300, 200, 100, 130, *[50] * 6)  # alone 100, 200, 100; beside 120, 300, 130
    cases.surge(bench)  # type: ignore[arg-type]
    assert [one["surge"] for one in bench.asked[:6]] == [0, 10, 10, 0, 0, 10]
    assert {one["what"] for one in bench.asked} == {"paced"}
    ways = list(cases.SURGE_WAYS)
    first = bench.figures[f"p99 beside a producer with 10 times the rate, as a multiple of that without it, {ways[0]}"]
    assert first.values == [1.2, 1.5, 1.3] and first.median == 1.3 and first.target == cases.SURGE_RATIO_MAX
    assert bench.figures[f"p99 of 10 producers, {ways[0]}"].values == [100, 200, 100]
    assert bench.figures[f"p99 of 10 producers beside one with 10 times the rate, {ways[0]}"].values == [120, 300, 130]


def test_the_surge_sends_ten_times_as_much_as_each_of_ten() -> None:
    assert cases.STEADY_LOAD["connections"] == cases.STEADY_CLIENTS == 10 and cases.SURGE_FACTOR == 10
    assert cases.STEADY_LOAD["partitions"] == cases.STEADY_CLIENTS + 1, "no client waits for another's partition"
