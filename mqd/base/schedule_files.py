"""The files in the run directory through which the acceptor and the timer communicate: each is
replaced by a rename, so it can be read at any time.

    run/schedules.json     acceptor -> timer: all schedules, and which partitions this host leads
    run/timer.json         timer -> acceptor: the state of each schedule, for the metrics page
    run/timer.wake         acceptor -> timer: a FIFO, written when schedules.json has changed
    run/timer.lock         locked by the timer as long as it runs, and touched when it starts
    run/timer.end          keeper -> timer: exists while the broker is stopped; the timer ends
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path
from typing import Any

import msgspec

SCHEDULES, STATUS, WAKE, LOCK, END = "schedules.json", "timer.json", "timer.wake", "timer.lock", "timer.end"
LATE_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)
_FLOCK = struct.Struct("@hhqqi")
# the broker's properties that the timer needs
CONFIG_NAMES = ("logging.format", "logging.level", "process.sandbox", "core.files.allow")


class ScheduleTopic(msgspec.Struct, frozen=True):
    """`led`: its partitions that this host leads, with their leader epochs; may be empty."""

    topic: str
    topic_id: bytes
    target: str
    delay_ms: int
    led: dict[int, int]


class Schedules(msgspec.Struct, frozen=True):
    """`config`: the properties named by CONFIG_NAMES; unset ones are omitted."""

    config: dict[str, str] = {}
    topics: list[ScheduleTopic] = []


class PartitionStatus(msgspec.Struct):
    topic: str
    partition: int
    pending: int = 0
    # counts of records since the timer was started
    delivered: int = 0
    unreadable: int = 0  # with unreadable headers: written before the topic became a schedule
    gone: int = 0  # deleted before they were due
    behind_s: float = 0.0  # how long the first undelivered record has been due
    # delivered records by how late they were: a bucket per bound of LATE_BOUNDS_S, and one for
    # later records
    late_buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATE_BOUNDS_S) + 1))
    late_total_s: float = msgspec.field(default=0.0, name="late_s")  # the sum of how late they were


def write(run_dir: Path, name: str, value: Any) -> None:
    """Raises OSError."""
    new_file = run_dir / f"{name}.new"
    new_file.write_bytes(msgspec.json.encode(value))
    os.replace(new_file, run_dir / name)


def read_schedules(run_dir: Path) -> Schedules:
    """The schedules; an empty Schedules if the file does not exist, or cannot be read (another
    version of mqd wrote it).
    """
    try:
        return msgspec.json.decode((run_dir / SCHEDULES).read_bytes(), type=Schedules)
    except (OSError, msgspec.MsgspecError):
        return Schedules()


def read_status(run_dir: Path) -> list[PartitionStatus]:
    """The state of each partition; [] if the file does not exist, or cannot be read (another
    version of mqd wrote it).
    """
    try:
        return msgspec.json.decode((run_dir / STATUS).read_bytes(), type=list[PartitionStatus])
    except (OSError, msgspec.MsgspecError):
        return []


def register_timer(run_dir: Path) -> int:
    """Registers this process as the timer. Returns a descriptor that becomes readable when
    schedules.json has changed. Raises OSError, including if another timer is running.
    """
    lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # held until the process ends
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(lock)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(run_dir / WAKE, 0o600)
        return os.open(run_dir / WAKE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.close(lock)
        raise


def wake(run_dir: Path) -> None:
    """Wakes the timer. Has no effect while no timer runs: a timer reads the schedules when it
    starts.
    """
    with contextlib.suppress(OSError):
        fd = os.open(run_dir / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b"\0")
        finally:
            os.close(fd)


def timer_process(run_dir: Path) -> tuple[int, int] | None:
    """Returns (pid, start time in ms since 1970) of the running timer, according to its lock."""
    try:
        fd = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lock_query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, lock_query))
        return (pid, os.fstat(fd).st_mtime_ns // 1_000_000) if kind != fcntl.F_UNLCK else None
    except OSError:
        return None
    finally:
        os.close(fd)


def allow_timer(run_dir: Path) -> None:
    """Undoes end_timer(). Raises OSError."""
    (run_dir / END).unlink(missing_ok=True)


def may_run(run_dir: Path) -> bool:
    """Whether the timer may run. A timer must register first: then either end_timer() finds it, or
    this function returns False.
    """
    return not (run_dir / END).exists()


def end_timer(run_dir: Path) -> None:
    """Ends the timer if it runs, or as soon as it has started: a supervisord that also runs other
    programs does not stop the timer when the broker stops, and may have just started it.
    """
    with contextlib.suppress(OSError):  # a full disk
        (run_dir / END).touch()
    timer = timer_process(run_dir)
    if timer is not None and timer[0] > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(timer[0], signal.SIGTERM)
