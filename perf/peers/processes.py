"""Processes of a peer: all that descend from those we started, what the kernel says they used, and
how they are stopped, by pid.

Concurrency: none; everything is read from /proc when asked. A process may end between two looks;
what it used is then lost, which a peer that is to be measured does not do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from perf.accounting import process_clock


class PeerFailed(RuntimeError):
    """A peer did not start, ended, or did not do what was asked; the message holds why."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def tree(roots: Iterable[int]) -> list[int]:
    """The roots and all their descendants, each once."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found and alive(pid):
            found.append(pid)
            waiting += children(pid)
    return found


def alive(pid: int) -> bool:
    """Zombies are not: they use nothing and do nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of all threads, those that ended included. Raises PeerFailed when one is
    gone: its time would be missing.
    """
    total = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns(process_clock(pid))
        except OSError:
            raise PeerFailed(f"process {pid} ended while it was measured") from None
    return total / 1e9


def stop(roots: Iterable[int], seconds: float = 20.0) -> None:
    """SIGTERM to the roots, SIGKILL to whatever of their trees is left after so long. Reaps those
    that are our own children.
    """
    roots = list(roots)
    every = tree(roots)
    for pid in roots:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in every) and time.monotonic() < deadline:
        _reap(roots)
        time.sleep(0.02)  # polls other processes; nothing of theirs can be waited for
    for pid in every:
        if alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in every) and time.monotonic() < deadline:
        _reap(roots)
        time.sleep(0.02)
    _reap(roots)


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def wait_answering(
    answers: Callable[[], bool], dead: Callable[[], str], seconds: float, interval: float = 0.005
) -> float:
    """Asks until `answers` says yes; how long that took. `dead` says why the peer cannot answer any
    more, or "". Raises PeerFailed.
    """
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError, EOFError, ValueError):
            if answers():
                return time.monotonic() - began
        if reason := dead():
            raise PeerFailed(reason)
        if time.monotonic() - began > seconds:
            raise PeerFailed(f"did not answer within {seconds:.0f} s")
        time.sleep(interval)


def disk_bytes(directory: Path) -> int:
    """What the files below it take on the disk (blocks, so preallocated space counts and holes do
    not).
    """
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
