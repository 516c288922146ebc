"""The cost of a test: its own CPU time and that of the processes it starts, alive or ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from tests import cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_process_that_has_ended_counts():
    before = cpu_seconds.used()
    subprocess.check_call([sys.executable, "-c", BURN])
    assert cpu_seconds.used() - before > 0.25


def test_a_process_that_still_runs_counts_with_what_it_started():
    before = cpu_seconds.used()
    program = f"import subprocess, sys\nsubprocess.check_call([sys.executable, '-c', {BURN!r}])\nprint()\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alive = cpu_seconds.used() - before
        process.communicate("\n")
    assert 0.25 < alive <= cpu_seconds.used() - before + 0.02  # in ticks of 10 ms while it runs


def test_only_tests_that_double_are_slower():
    kept = {"a": 10.0, "b": 2.0, "c": 2.0}
    now = {"a": 19.0, "b": 4.5, "c": 2.9, "new": 5.0, "small": 2.9, "collection": 99.0}
    assert cpu_seconds.slower(now, kept) == {"b": (2.0, 4.5), "new": (2.0, 5.0)}
    assert not cpu_seconds.slower(now, {})


def test_the_slowest_hundred_are_kept(tmp_path):
    path = tmp_path / "durations.json"
    cpu_seconds.keep({"collection": 9e9} | {f"test_{number}": float(number) for number in range(150)}, path)
    kept = cpu_seconds.read(path)
    assert len(kept) == 100 and list(kept)[0] == "test_149" and min(kept.values()) == 50


def test_folders_are_added_up():
    message = cpu_seconds.report(
        {"tests/unit/log/test_a.py::test_b[c/d]": 1.25, "tests/unit/test_e.py::test_f": 2.5}, {}
    )
    assert "3.8  tests/unit\n" in message and "3.8  together" in message


def test_a_session_fixture_is_counted_under_its_own_name(tmp_path):
    meter = cpu_seconds.Meter(tmp_path / "seconds.json")
    test = SimpleNamespace(nodeid="tests/spark/test_a.py::test_b")
    running = meter.pytest_runtest_protocol(test)
    next(running)
    fixture = SimpleNamespace(scope="session", argname="spark")
    made = meter.pytest_fixture_setup(fixture, SimpleNamespace(_pyfuncitem=test))
    next(made)
    subprocess.check_call([sys.executable, "-c", BURN])
    next(made, None)
    next(running, None)
    meter.pytest_sessionfinish()
    seconds = cpu_seconds.read(tmp_path / "seconds.json")
    assert seconds["tests/spark::spark (fixture)"] > 0.25 and seconds[test.nodeid] < 0.1
