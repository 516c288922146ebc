"""What a worker's cleaner has done, as a file of the run directory: the worker writes it whole, the
acceptor reads it at each scrape.

    run/compaction.W.json      one Report; W is the worker

It is a notice, not a record: neither flushed nor written through the file layer, and replaced by a
rename, so that no reader meets half of it.
"""

import os
from pathlib import Path

import msgspec


class Cleaned(msgspec.Struct):
    """One partition of a compacted topic."""

    topic: str
    partition: int
    dirty_ratio: float = 0.0  # when it was last looked at
    runs: int = 0
    finished_ms: int = 0  # since 1970; 0 = never
    uncleanable: str = ""  # why it is left as it is


class Report(msgspec.Struct):
    """Sums of this life of the worker."""

    runs: int = 0
    failures: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    records_read: int = 0
    records_kept: int = 0
    seconds: float = 0.0
    partitions: list[Cleaned] = []


def _path(run_dir: Path, worker: int) -> Path:
    return run_dir / f"compaction.{worker}.json"


def write(run_dir: Path, worker: int, report: Report) -> None:
    """Blocking. Raises OSError."""
    path = _path(run_dir, worker)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(report))
    os.replace(fresh, path)


def read(run_dir: Path, worker: int) -> Report:
    """Empty when there is no such file, or none that can be understood (another version's)."""
    try:
        return msgspec.json.decode(_path(run_dir, worker).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError):
        return Report()
