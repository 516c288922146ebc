"""Files of running brokers, which may go while they are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def bytes_of(paths: Iterable[Path]) -> int:
    """The sum of their sizes; a file that is gone counts nothing."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def faults_file(data_dir: Path) -> Path:
    """An empty file for MQD_FILE_FAULTS, where a broker's processes can read it when it changes:
    beside its own files (process.sandbox).
    """
    data_dir.mkdir(exist_ok=True)
    made = data_dir / "faults"
    made.write_text("")
    return made
