"""Files of running brokers, which may be deleted while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def bytes_of(paths: Iterable[Path]) -> int:
    """The sum of their sizes; a deleted file counts as 0."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def faults_file(data_dir: Path) -> Path:
    """An empty file for MQD_FILE_FAULTS beside the broker's own files, where its sandboxed
    processes can read it when it changes (process.sandbox).
    """
    data_dir.mkdir(exist_ok=True)
    made = data_dir / "faults"
    made.write_text("")
    return made
