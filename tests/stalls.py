"""`pytest -p tests.stalls --stall SEED`: stops processes at random, as a busy machine does.

While a test runs, one process at a time is stopped for 50 to 1500 ms: one that the test has
started, or pytest itself. A test that fails then does not wait for something that it depends on.
Processes that a test stops itself (SIGSTOP by os.kill) are left alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SHORTEST_S, LONGEST_S = 0.05, 1.5
PYTEST_SHARE = 0.1  # of the stalls
SHOWN_MAX = 60
_kill = os.kill
_lock = threading.Lock()
_held: set[int] = set()  # stopped by the test
_stalls = pytest.StashKey["Stalls"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stall", default="", metavar="SEED", help="stop random processes of the tests for a moment")
    parser.addoption("--stall-gap", type=float, default=1.0, metavar="SECONDS", help="between two stalls, at most")


def _kill_and_remember(pid: int, number: int) -> None:
    with _lock:
        if number == signal.SIGSTOP:
            _held.add(pid)
        elif number == signal.SIGCONT:
            _held.discard(pid)
        _kill(pid, number)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    return [one for child in _children(pid) for one in (child, *_descendants(child))]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    except OSError:
        return False


class Stalls(threading.Thread):
    def __init__(self, seed: str, gap_s: float) -> None:
        super().__init__(name="stalls", daemon=True)
        self.chance, self.gap_s = random.Random(seed), gap_s
        self.over = threading.Event()
        self.began = time.monotonic()
        self.log: list[str] = []

    def run(self) -> None:
        while not self.over.wait(self.gap_s * self.chance.random() ** 2):
            seconds = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self.chance.random()
            if self.chance.random() < PYTEST_SHARE:
                self.note(seconds, "pytest")
                subprocess.run(["sh", "-c", f"kill -STOP $PPID; sleep {seconds:.3f}; kill -CONT $PPID"])
            elif running := list(filter(_is_running, _descendants(os.getpid()))):
                self.stop(self.chance.choice(running), seconds)

    def stop(self, pid: int, seconds: float) -> None:
        with _lock, contextlib.suppress(ProcessLookupError):
            if pid in _held:
                return
            _kill(pid, signal.SIGSTOP)
            self.note(seconds, f"process {pid}")
        self.over.wait(seconds)
        with _lock, contextlib.suppress(ProcessLookupError):
            if pid not in _held:
                _kill(pid, signal.SIGCONT)

    def note(self, seconds: float, what: str) -> None:
        self.log.append(f"after {time.monotonic() - self.began:.2f} s, for {seconds:.2f} s: {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    seed = item.config.getoption("--stall")
    if not seed:
        return (yield)
    _held.clear()
    os.kill = _kill_and_remember
    stalls = item.stash[_stalls] = Stalls(f"{seed} {item.nodeid}", item.config.getoption("--stall-gap"))
    stalls.start()
    try:
        return (yield)
    finally:
        stalls.over.set()
        stalls.join()
        os.kill = _kill


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and _stalls in item.stash:
        report.sections.append(("stalls", "\n".join(item.stash[_stalls].log[-SHOWN_MAX:])))
    return report
