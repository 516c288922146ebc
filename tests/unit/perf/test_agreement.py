"""`python -m perf.trees.agreement`: which figures of two runs do not overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf.trees import agreement


def bench(**figures: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "date": "today",
        "figures": {
            name: {"min": low, "median": middle, "max": high, "repetitions": 3}
            for name, (low, middle, high) in figures.items()
        },
    }


def peers(peer: str, rate: int, median: float) -> dict[str, Any]:
    load = {"record_bytes": 1024, "acks": "all", "compression": "none", "partitions": 6, "durable": True, "replicas": 1}
    result = {"peer": peer, "kind": "latency", "driver": "neutral", "share": None, "rate": rate, "beside": ""}
    values = {"p99_ms": {"min": median, "median": median, "max": median, "count": 1}}
    return {"kind": "peers", "date": "today", "results": [{**result, "load": load, "values": values}]}


def test_ranges_that_do_not_overlap_are_differences_the_largest_first() -> None:
    before = bench(same=(1, 2, 3), touching=(1, 2, 3), apart=(1, 2, 3), far=(1, 2, 3), gone=(1, 1, 1))
    after = bench(same=(2, 2, 2), touching=(3, 4, 5), apart=(4, 5, 6), far=(0.1, 0.2, 0.9), new=(1, 1, 1))
    found = agreement.compare(before, after)
    assert found.count == 4 and found.expected == pytest.approx(0.4)
    assert [(one.name, round(one.ratio, 1)) for one in found.apart] == [("far", 10.0), ("apart", 2.5)]


def test_a_result_of_the_peers_is_named_by_all_that_distinguishes_it() -> None:
    (name,) = agreement.figures_of(peers("mqd", 10_000, 1.0))
    assert name == "mqd: latency, neutral, 10000, 1024 B, acks=all, none, 6 partitions, fsync, RF 1: p99_ms"
    assert agreement.compare(peers("mqd", 10_000, 1.0), peers("mqd", 300_000, 1.0)) == (0, [], 0)


def test_the_last_run_of_each_kind_is_compared_with_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "history.jsonl"
    lines = [bench(a=(9, 9, 9)), bench(a=(1, 1, 1)), peers("mqd", 1, 1.0), bench(a=(2, 2, 2))]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert agreement.main(history) == 0
    output = capsys.readouterr().out
    heading = "make bench, today and today: 1 of 1 figures are apart; 0 would be by random variation alone\n"
    assert heading + heading + "   2.00 times: a: 1 (1 to 1) and 2 (2 to 2)\n" in output
    assert "make bench-peers: fewer than two runs" in output
