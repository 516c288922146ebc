"""SIGTERM and Ctrl-C while Spark starts: started processes end. PySpark is simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mqd.cli.verbs.demo import on_terminate
from mqd.spark.pipelines import session


class Pyspark:
    """Starts its gateway, a process that would keep running, and is then interrupted, or fails."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.java: subprocess.Popen[bytes] | None = None
        self.gateway = SimpleNamespace(Popen=subprocess.Popen)

    def appName(self, _name: str) -> Pyspark:  # noqa: N802 - PySpark's name
        return self

    def master(self, _url: str) -> Pyspark:
        return self

    def config(self, _key: str, _value: str) -> Pyspark:
        return self

    def getOrCreate(self) -> Any:  # noqa: N802 - PySpark's name
        self.java = self.gateway.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        if not self.number:
            raise FileNotFoundError("bin/spark-submit")
        os.kill(os.getpid(), self.number)
        raise AssertionError("not interrupted")


@pytest.fixture
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pyspark]:
    played = Pyspark(request.param)
    for name, about in {
        "pyspark": {"java_gateway": played.gateway},
        "pyspark.errors": {"PySparkRuntimeError": RuntimeError},
        "pyspark.sql": {"SparkSession": SimpleNamespace(builder=played)},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(about)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(session, "require_spark", lambda: None)
    monkeypatch.setattr(session, "_silence_query_errors", lambda: None)
    before = signal.signal(signal.SIGTERM, on_terminate)
    yield played
    signal.signal(signal.SIGTERM, before)
    if played.java is not None:
        played.java.kill()
        played.java.communicate()


@pytest.mark.parametrize(
    "started, raised", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], indirect=["started"]
)
def test_java_ends_with_an_interrupted_start(started: Pyspark, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        session.session("s", "local[*]")
    assert started.java is not None and started.java.returncode == -signal.SIGKILL
    assert started.gateway.Popen is subprocess.Popen


@pytest.mark.parametrize("started", [0], indirect=True)
def test_a_start_that_fails_leaves_java_to_pyspark(started: Pyspark) -> None:
    with pytest.raises(session.SettingsError):
        session.session("s", "local[*]")
    assert started.java is not None and started.java.poll() is None
