"""Ctrl-C while records are written: the command ends at once, and reports the unacknowledged
records.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ports import free_port

confluent_kafka = pytest.importorskip("confluent_kafka")

from mqd.cli import common, main  # noqa: E402
from mqd.cli.topic_writing import Writer  # noqa: E402


class Stdin(io.BytesIO):
    """Calls `at_end` when everything was read."""

    def __init__(self, data: bytes, at_end: Callable[[], None]) -> None:
        super().__init__(data)
        self.buffer, self._at_end = self, at_end

    def read1(self, size: int | None = -1) -> bytes:
        found = super().read1(size)
        if not found:
            self._at_end()
        return found


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", free_port())) as server:
        yield "127.0.0.1:%d" % server.getsockname()[1]


@pytest.mark.parametrize("command", [("produce", "t"), ("cat", "-P", "-t", "t")])
def test_ctrl_c_at_the_end_of_the_input(
    silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """librdkafka's flush would wait until message.timeout.ms."""
    timers: list[threading.Timer] = []

    def soon() -> None:
        timers.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)))
        timers[0].start()

    monkeypatch.setattr(sys, "stdin", Stdin(b"one\ntwo\n", soon))
    flushes: list[float] = []

    class Producer(confluent_kafka.Producer):  # type: ignore[name-defined]  # written in C
        def flush(self, timeout: float = -1) -> int:
            flushes.append(timeout)
            return super().flush(timeout if timeout >= 0 else 2)

    monkeypatch.setattr("mqd.cli.topic_writing.Producer", Producer)
    monkeypatch.setattr("mqd.cli.librdkafka.require_broker", lambda *_: None)  # it would find that no broker responds
    assert main._run([*command, "-b", silent]) == 130
    assert "mqd: interrupted: 2 of 2 records were not acknowledged\n" in capsys.readouterr().err
    timers[0].join()
    assert set(flushes) == {0.2}


class Queue:
    """librdkafka's producer: acknowledges `each_flush` records with each flush, or raises the given
    exception there.
    """

    def __init__(self, flushes: list[int | BaseException]) -> None:
        self.queued, self.flushes = 0, flushes

    def produce(self, *_: object, **__: object) -> None:
        self.queued += 1

    def poll(self, _timeout: float) -> int:
        return 0

    def __len__(self) -> int:
        return self.queued

    def flush(self, _timeout: float) -> int:
        found = self.flushes.pop(0)
        if isinstance(found, BaseException):
            raise found
        self.queued -= found
        return self.queued


def writer(monkeypatch: pytest.MonkeyPatch, flushes: list[int | BaseException]) -> Writer:
    monkeypatch.setattr("mqd.cli.topic_writing.Producer", lambda _config: Queue(flushes))
    monkeypatch.setattr("mqd.cli.topic_writing.base_config", lambda _bootstrap, **_: {})
    return Writer("", {})


def from_a_callback() -> SystemError:
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


def send(writing: Writer, problem: BaseException | None = None) -> None:
    with writing:
        for _ in range(3):
            writing.send("t", b"x", None, [], -1)
        if problem is not None:
            raise problem


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), from_a_callback()])
def test_unacknowledged_records_are_counted_on_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interruption: BaseException
) -> None:
    with pytest.raises(type(interruption)):
        send(writer(monkeypatch, [1, interruption]))
    assert capsys.readouterr().err == "mqd: interrupted: 2 of 3 records were not acknowledged\n"
    assert common.is_interruption(interruption)


@pytest.mark.parametrize(
    ("flushes", "reported"),
    [([1, 2], ""), ([2, KeyboardInterrupt()], "mqd: interrupted: 1 of 3 records were not acknowledged\n")],
)
def test_queued_records_are_written_or_counted_on_interruption(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flushes: list[int | BaseException],
    reported: str,
) -> None:
    writing = writer(monkeypatch, flushes)
    with pytest.raises(KeyboardInterrupt):
        send(writing, KeyboardInterrupt())
    assert capsys.readouterr().err == reported
    assert not flushes


def test_lines_read_before_an_error_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"1\n2\n3\n")
    second.symlink_to("/proc/self/mem")  # opens, and cannot be read from its beginning
    flushes: list[int | BaseException] = [1, 2]
    writer(monkeypatch, flushes)
    assert main._run(["produce", "t", str(first), str(second)]) == 1
    assert not flushes and "Input/output error" in capsys.readouterr().err


def test_an_interruption_in_a_callback_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer(monkeypatch, [from_a_callback()])
    monkeypatch.setattr(sys, "stdin", Stdin(b"one\n", lambda: None))
    assert main._run(["produce", "t"]) == 130
    assert capsys.readouterr().err == "mqd: interrupted: 1 of 1 records were not acknowledged\n"


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_ctrl_c_ends_a_command_that_is_still_stopping(handlers: None) -> None:
    stop = threading.Event()
    common.stop_when_interrupted(stop)
    signal.raise_signal(signal.SIGINT)
    assert stop.is_set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("unread", "code", "reported"), [(True, 0, ""), (False, 1, "mqd: p: a pipe of Spark's\n")])
def test_a_pipeline_succeeds_when_its_progress_is_not_read(
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    unread: bool,
    code: int,
    reported: str,
) -> None:
    import click

    from mqd.cli.verbs import pipeline
    from mqd.spark.pipelines import settings

    stopped: list[bool] = []

    def run(_spark: object, _pipeline: object, report: Callable[[object], None], _stop: threading.Event) -> bool:
        if not unread:
            raise BrokenPipeError("a pipe of Spark's")
        report(SimpleNamespace(batch=1, rows=1, rows_per_s=1.0, took_ms=1, behind=0))
        return True

    def echo(_text: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    running = SimpleNamespace(Progress=object, ReplayStoppedError=LookupError, explain_error=str, run=run)
    session = SimpleNamespace(session=lambda *_: SimpleNamespace(stop=lambda: stopped.append(True)))
    monkeypatch.setitem(sys.modules, "mqd.spark.pipelines.running", running)
    monkeypatch.setitem(sys.modules, "mqd.spark.pipelines.session", session)
    monkeypatch.setattr(settings, "load", lambda *_: SimpleNamespace(name="p", master="local", spark={}))
    monkeypatch.setattr(pipeline, "error_line", lambda _text: None)
    monkeypatch.setattr(click, "echo", echo)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert main._run(["pipeline", "run", "p"]) == code
    assert capfd.readouterr().err == reported and stopped == [True]


def test_ctrl_c_while_the_command_is_imported(tmp_path: Path) -> None:
    """A tenth of a second in which a KeyboardInterrupt would print a traceback."""
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    running = subprocess.Popen(
        [sys.executable, "-m", "mqd", "up"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout.readline() == "importing\n"
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 130 and errors == ""


def test_the_installed_command_handles_ctrl_c_from_its_start() -> None:
    (command,) = (one for one in metadata.distribution("mqd").entry_points if one.name == "mqd")
    assert command.value == "mqd.__main__:main"
