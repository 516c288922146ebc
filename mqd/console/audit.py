"""Writes a line of JSON for each change made from a page: user, address, command and outcome."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

COMMAND_MAX = 4000  # characters; a command can contain a long record key


class Audit:
    """Appends to a file (0600), or to stderr. Thread-safe. A change that cannot be recorded is not
    made: write(), which is called first, raises OSError.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._file = sys.stderr if path is None else open(path, "a", opener=_open_private)

    def write(self, user: str, address: str, command: str, outcome: str) -> None:
        """`outcome`: "begun" before the change, then "done" or why it failed."""
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "user": user or None,
                "address": address,
                "command": command if len(command) <= COMMAND_MAX else f"{command[:COMMAND_MAX]} [cut]",
                "outcome": outcome,
            }
        )
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
