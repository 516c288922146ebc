"""Pieces of long runs: each writes its line, lines are summed, and findings are reported with the
command that repeats the run.
"""

import json

import pytest

from tests.sim import long
from tests.sim.schedules import Outcome


def _outcome(work: tuple[int, str]) -> tuple[Outcome, float]:
    seed, kind = work
    return (
        Outcome(seed, "P3" if seed == 8 else "", "a record was lost" if seed == 8 else "", 100, 5, 7, 2, 0, {}, kind),
        0.5,
    )


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(long, "PIECE", 3)
    monkeypatch.setattr(long, "TURN", ("", "members"))
    return tmp_path / "history.jsonl"


def test_a_piece_of_real_schedules_writes_its_line(small):
    clock = iter((0.0, 0.5, 1.0))
    assert long.run(1.0, 40, 1, small, lambda: next(clock))
    (line,) = map(json.loads, small.read_text().splitlines())
    assert (line["first"], line["kind"], line["schedules"], line["found"]) == (40, "", 3, [])
    assert line["events"] > 3 * 1_500 and line["faults"] > 0 and line["acked"] > 0 and line["cpu_s"] > 0


def test_findings_are_reported(small, monkeypatch, capsys):
    monkeypatch.setattr(long, "_timed", _outcome)
    clock = iter((0.0, 0.5, 0.9, 1.3))
    assert not long.run(1.0, 4, 1, small, lambda: next(clock))
    assert "python -m tests.sim.replay 8 --kind members" in capsys.readouterr().out
    assert long.main(["--add-up", "--results", str(small)]) == 0
    output = capsys.readouterr().out
    assert "as drawn     3 schedules, 300 events, 15 faults, 6 leader epochs, 21 acknowledged" in output
    assert "all          6 schedules, 600 events" in output
    assert "found: P3: 8 (members, at " in output


def test_a_summary_without_runs(small, capsys):
    long.main(["--add-up", "--results", str(small)])
    assert capsys.readouterr().out == "no runs\n"
