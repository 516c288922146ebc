"""`mqd demo-spark` verifies its own outcome: the correct one passes, and each kind of error is
found.
"""

from __future__ import annotations

import importlib.util
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mqd.cli import main as main_module
from mqd.cli.common import EXIT_USAGE, CliError
from mqd.cli.verbs import demo_spark
from mqd.cli.verbs.demo_spark import compare_output, draw


class Window(NamedTuple):
    start: datetime
    origin: str
    flights: int
    delayed: int = 1
    mean_delay: float | None = 12.5
    p95_delay: int = 40


FLIGHTS = [
    {"origin": origin, "time_hour": f"2013-01-01T{hour:02}:00:00Z"}
    for origin in ("EWR", "JFK")
    for hour in (10, 11)
    for _ in range(3)
]


def windows() -> list[Window]:
    return [Window(datetime(2013, 1, 1, hour), origin, 3) for origin in ("EWR", "JFK") for hour in (10, 11)]


def report(rows: list[Window]) -> list[dict[str, Any]]:
    return [{"origin": row.origin, "start": row.start.isoformat() + ".000Z", "flights": row.flights} for row in rows]


def failed(rows: list[Window], topic: list[dict[str, Any]]) -> set[str]:
    return {check.name for check in compare_output(FLIGHTS, rows, topic) if not check.passed}


def test_the_correct_outcome_passes() -> None:
    assert failed(windows(), report(windows())) == set()


def test_each_kind_of_error_is_found() -> None:
    rows = windows()
    assert failed(rows[1:], report(rows[1:])) == {"flights", "windows"}, "a window was never reported"
    assert failed([*rows, rows[0]], report(rows)) == {"windows"}, "one was reported twice"
    assert failed([rows[0]._replace(flights=2), *rows[1:]], report(rows)) == {"flights", "windows", "topic"}, (
        "a flight is missing"
    )
    assert failed(rows, report(rows)[1:]) == {"topic"}
    assert failed(rows, [*report(rows), report(rows)[0]]) == {"topic"}


def test_a_failed_production_is_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was only a traceback, and the demo reported what Spark made of the records that were there."""

    def fail(*_: object) -> float:
        raise CliError("3 records were not acknowledged")

    monkeypatch.setattr(demo_spark, "produce", fail)
    monkeypatch.setattr("mqd.spark.pipelines.running.start", lambda *_: None)
    broker = SimpleNamespace(bootstrap="127.0.0.1:1", directory=tmp_path)
    with pytest.raises(CliError, match="3 records were not acknowledged"):
        demo_spark._run_pipelines(None, broker, [], None)  # type: ignore[arg-type]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture; the demo does without it")
    assert draw([*windows(), Window(datetime(2013, 2, 1, 3), "LGA", 2, mean_delay=None)], tmp_path / "delays.png")
    assert (tmp_path / "delays.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "pyspark, java_home, message",
    [
        (False, None, "PySpark is missing; install it with: pip install 'mqd[spark]'"),
        (True, None, "there is no java on the PATH; install it, on Debian and Ubuntu with: apt install openjdk-17"),
        (True, "/nowhere", "JAVA_HOME is /nowhere, which has no bin/java"),
    ],
)
def test_missing_requirements_of_spark_are_reported_before_a_broker_is_started(
    pyspark: bool,
    java_home: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if pyspark else None) if name == "pyspark" else find_spec(name),
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mqd.cli.verbs.demo_spark.Broker", None)
    if java_home is None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    else:
        monkeypatch.setenv("JAVA_HOME", java_home)
    assert main_module._run(["demo-spark", "--records", "1"]) == EXIT_USAGE
    out, error = capfd.readouterr()
    assert out == "" and error.count("\n") == 1 and message in error
