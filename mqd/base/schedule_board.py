"""What the acceptor and the timer tell each other, as files in the run directory: each is replaced
by a rename, and may be read by anyone at any time.

    run/schedules.json     acceptor -> timer: the schedules of this host
    run/timer.json         timer -> acceptor: how they are doing, for the metrics page
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

SCHEDULES, STATUS = "schedules.json", "timer.json"
LATE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)
CONFIG = ("log.format", "log.level", "process.sandbox", "core.files.allow")


class ScheduleTopic(msgspec.Struct, frozen=True):
    """`led`: its partitions that this host leads, with their leader epochs; maybe none."""

    topic: str
    topic_id: bytes
    target: str
    delay_ms: int
    led: dict[int, int]


class Schedules(msgspec.Struct, frozen=True):
    """`config`: the broker's properties that the timer needs, as far as they are set."""

    config: dict[str, str] = {}
    topics: list[ScheduleTopic] = []


class PartitionStatus(msgspec.Struct):
    topic: str
    partition: int
    pending: int = 0
    delivered: int = 0  # since the timer was started
    unreadable: int = 0  # since then: records that were written before the topic was a schedule
    gone: int = 0  # since then: records that were deleted before they were due
    behind_s: float = 0.0  # how long what is due now has been due
    # of the delivered: how late, by LATE_S and one more for those that were later
    late_buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATE_S) + 1))
    late_s: float = 0.0  # their sum


def write(run_dir: Path, name: str, value: Any) -> None:
    """Raises OSError."""
    fresh = run_dir / f"{name}.new"
    fresh.write_bytes(msgspec.json.encode(value))
    os.replace(fresh, run_dir / name)


def read_schedules(run_dir: Path) -> Schedules:
    """None are there, if there is no such file, or one of another version."""
    try:
        return msgspec.json.decode((run_dir / SCHEDULES).read_bytes(), type=Schedules)
    except (OSError, msgspec.MsgspecError):
        return Schedules()


def read_status(run_dir: Path) -> list[PartitionStatus]:
    """As read_schedules."""
    try:
        return msgspec.json.decode((run_dir / STATUS).read_bytes(), type=list[PartitionStatus])
    except (OSError, msgspec.MsgspecError):
        return []
