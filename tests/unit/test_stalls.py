"""tests/stalls.py: processes that it stops continue, and those that a test has stopped stay
stopped.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stalls
from tests.polling import eventually


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_is_stopped_for_a_moment(process: subprocess.Popen) -> None:
    made = stalls.Stalls("seed", 1.0)
    stopping = threading.Thread(target=made.stop, args=(process.pid, 600.0))
    stopping.start()
    eventually(lambda: state(process.pid) == "T", "it is stopped")
    made.over.set()  # the test has ended
    stopping.join()
    eventually(lambda: state(process.pid) == "S", "it continues")


def test_processes_stopped_by_the_test_stay_stopped(process: subprocess.Popen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_held", set())
    made = stalls.Stalls("seed", 1.0)
    stopping = threading.Thread(target=made.stop, args=(process.pid, 600.0))
    stopping.start()
    eventually(lambda: state(process.pid) == "T", "it is stopped")
    stalls._kill_and_remember(process.pid, signal.SIGSTOP)
    made.over.set()
    stopping.join()
    assert state(process.pid) == "T"
    made.stop(process.pid, 0.0)
    assert state(process.pid) == "T"
    stalls._kill_and_remember(process.pid, signal.SIGCONT)
    eventually(lambda: state(process.pid) == "S", "it continues")
