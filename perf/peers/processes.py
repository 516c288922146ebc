"""The processes of a peer: all descendants of those that we started, their resource use according to
the kernel, and how they are stopped, by pid.

Concurrency: none; everything is read from /proc at each call. If a process ends between two calls its
usage is lost; the processes of a measured peer do not end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from perf.accounting import process_clock, user_system_ns


class PeerFailed(RuntimeError):
    """A peer did not start, ended, or did not carry out a request; the message has the reason."""


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
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclasses.dataclass(frozen=True)
class CpuSeconds:
    """CPU time: all of it, by the most precise clock, and in user mode and in the kernel, in ticks."""

    total: float
    user: float
    system: float

    def __sub__(self, before: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.total - before.total, self.user - before.user, self.system - before.system)


def cpu_spent(pids: Iterable[int]) -> CpuSeconds:
    """CPU time of all threads, including ended ones. Raises PeerFailed when a process is gone, because
    its time would be missing.
    """
    total = user = system = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns(process_clock(pid))
            in_user, in_kernel = user_system_ns(pid)
        except OSError:
            raise PeerFailed(f"process {pid} ended while it was measured") from None
        user += in_user
        system += in_kernel
    return CpuSeconds(total / 1e9, user / 1e9, system / 1e9)


def cpu_seconds(pids: Iterable[int]) -> float:
    """The total of cpu_spent."""
    return cpu_spent(pids).total


def stop(roots: Iterable[int], seconds: float = 20.0) -> None:
    """Sends SIGTERM to the roots and, after `seconds`, SIGKILL to all that is left of their trees. Reaps
    our own children.
    """
    roots = list(roots)
    every = tree(roots)
    for pid in roots:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in every) and time.monotonic() < deadline:
        _reap(roots)
        time.sleep(0.02)  # polls, because they are not all our children
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


def wait_until_ready(
    is_ready: Callable[[], bool], exit_reason: Callable[[], str], seconds: float, interval: float = 0.005
) -> float:
    """Calls `is_ready` until it returns True. Returns the seconds that took. `exit_reason` returns why
    the peer has ended, or "" while it runs. Raises PeerFailed.
    """
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError, EOFError, ValueError):
            if is_ready():
                return time.monotonic() - began
        if reason := exit_reason():
            raise PeerFailed(reason)
        if time.monotonic() - began > seconds:
            raise PeerFailed(f"did not respond within {seconds:.0f} s")
        time.sleep(interval)


def disk_bytes(directory: Path) -> int:
    """The disk usage of the files below the directory (in blocks: preallocated space counts, holes do
    not)."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
