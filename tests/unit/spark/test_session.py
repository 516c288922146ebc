"""The settings of a Spark session, the output at its start, and the demo's picture. Without Spark."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from mqd.cli.verbs.demo_spark import Window, by_hour_and_month
from mqd.spark.pipelines.running import explain_error
from mqd.spark.pipelines.session import captured_stderr, log_level

GREETS = (
    "import sys; print('hello', file=sys.stderr, flush=True); print('up', flush=True); sys.stdin.readline();"
    " print('later', file=sys.stderr, flush=True)"
)


def start() -> subprocess.Popen[str]:
    """A process that has printed its greeting; this process's stderr is read by then."""
    process = subprocess.Popen([sys.executable, "-c", GREETS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.write(2, b"mine\n")
    while struct.unpack("i", fcntl.ioctl(2, termios.FIONREAD, bytes(4)))[0]:
        time.sleep(0.01)  # another thread reads the pipe that replaces stderr; there is no event to wait for
    return process


def reading() -> threading.Thread:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "stderr of Spark")
    return thread


def test_greetings_are_held_back_and_later_output_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    with captured_stderr():
        process, thread = start(), reading()
    process.communicate("go on")
    thread.join(20)
    assert capfd.readouterr().err == "later\n"


def test_a_start_that_fails_is_fully_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), captured_stderr():
        process, thread = start(), reading()
        raise ValueError
    process.communicate("go on")
    thread.join(20)
    assert capfd.readouterr().err == "hello\nmine\nlater\n"


def test_a_local_log_is_silent_unless_asked() -> None:
    assert (
        log_level("local[*]", {}),
        log_level("spark://host:7077", {}),
        log_level("local", {"spark.log.level": "INFO"}),
    ) == ("FATAL", "ERROR", "INFO")


def test_the_demos_picture_uses_the_airports_local_time() -> None:
    windows = [Window("EWR", datetime(2013, month, 1, 12, tzinfo=UTC), 150, 30, 10.0 * month) for month in (1, 7)] + [
        Window("EWR", datetime(2013, 2, 2, 3, tzinfo=UTC), 99, 99, None)
    ]
    assert by_hour_and_month(windows, ZoneInfo("America/New_York")) == ({7: 10.0, 8: 70.0}, {1: 20.0, 7: 20.0}), (
        "in summer another hour; few flights have no mean"
    )


def test_an_overloaded_machine_is_reported() -> None:
    assert "overloaded" in explain_error(
        RuntimeError(
            "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back. SQLSTATE:"
            " XXKST\n=== Streaming Query ==="
        )
    )
    assert explain_error(RuntimeError("[OTHER] first line\nsecond")) == "[OTHER] first line"
