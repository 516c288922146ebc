"""A report on a worker's cleaner, as a file in the run directory: the worker writes it whole, the
acceptor reads it at each scrape.

    run/compaction.W.json      one Report; W is the worker

It is informational: neither flushed nor written through the file layer. It is replaced by a rename,
so that no reader sees a partial file.
"""

import os
from pathlib import Path

import msgspec


class PartitionReport(msgspec.Struct):
    """One partition of a compacted topic."""

    topic: str
    partition: int
    dirty_ratio: float = 0.0  # at the last check
    runs: int = 0
    finished_ms: int = 0  # since 1970; 0 = never
    uncleanable: str = ""  # why it is not compacted


class Report(msgspec.Struct):
    """Totals since the worker started."""

    runs: int = 0
    failures: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    records_read: int = 0
    records_kept: int = 0
    seconds: float = 0.0
    partitions: list[PartitionReport] = []


def _path(run_dir: Path, worker: int) -> Path:
    return run_dir / f"compaction.{worker}.json"


def write(run_dir: Path, worker: int, report: Report) -> None:
    """Blocking. Raises OSError."""
    path = _path(run_dir, worker)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(report))
    os.replace(temporary, path)


def read(run_dir: Path, worker: int) -> Report:
    """The report; empty if the file does not exist, or cannot be read (another version of mqd wrote
    it).
    """
    try:
        return msgspec.json.decode(_path(run_dir, worker).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError):
        return Report()
