"""Changes settings of a machine, and restores them from a journal of their earlier values.

C1  An entry is on disk before its setting is changed, so every change can be undone.
C2  If a setting is changed again, the journal keeps the value from before the first change.
C3  A setting that another program has changed in the meantime is not restored.
C4  Only files below /sys and /proc are written, whatever the journal says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mqd.cli.common import CliError
from mqd.cli.machine.settings import Setting, selected_value
from mqd.cli.machine.storage import read_text

JOURNAL = Path("/var/lib/mqd-tune/journal.json")
JOURNAL_BYTES_MAX = 1 << 20
_ALLOWED_PREFIXES = ("/sys/", "/proc/sys/", "/proc/irq/")


class JournalEntry(NamedTuple):
    """`path`: absolute, without the prefix `root` (which only tests set)."""

    path: str
    before: str
    after: str


class Outcome(NamedTuple):
    path: str
    done: bool
    text: str


class Journal:
    """Entries in the order of the changes. Raises CliError if the file is not a journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[JournalEntry] = self._read()

    def _read(self) -> list[JournalEntry]:
        try:
            with open(self.path, "rb") as file:
                parsed: Any = json.loads(file.read(JOURNAL_BYTES_MAX))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CliError(f"{self.path} cannot be read: {error}") from error
        entries = []
        for fields_by_name in parsed if isinstance(parsed, list) else [None]:
            fields = (
                [fields_by_name.get(name) for name in JournalEntry._fields]
                if isinstance(fields_by_name, dict)
                else [None]
            )
            if not all(isinstance(field, str) for field in fields):
                raise CliError(f"{self.path} is not a journal of mqd tune; move it away to start a new one")
            entries.append(JournalEntry(*fields))
        return entries

    def write(self) -> None:
        """Writes the journal, which is on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.entries:
            self.path.unlink(missing_ok=True)
            return
        new = self.path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump([entry._asdict() for entry in self.entries], file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def record(self, path: str, before: str, after: str) -> None:
        index = next((i for i, entry in enumerate(self.entries) if entry.path == path), None)
        if index is None:
            self.entries.append(JournalEntry(path, before, after))
        else:
            self.entries[index] = self.entries[index]._replace(after=after)  # C2
        self.write()


def _resolve(root: Path, path: str) -> Path:
    """Returns the file below `root`. Raises CliError if it is not a kernel setting (C4)."""
    if not path.startswith(_ALLOWED_PREFIXES) or ".." in Path(path).parts:
        raise CliError(f"the journal names {path}, which is not a setting of the kernel: it was not changed")
    return root / path.lstrip("/")


def _write(path: Path, value: str) -> str:
    """Returns "", or the reason for a failure: the kernel may refuse a value, or set another one."""
    try:
        with open(path, "w") as file:
            file.write(value)
    except OSError as error:
        return error.strerror or str(error)
    current = selected_value(read_text(path) or "")
    return "" if current == value else f"it is now {current}"


def apply(root: Path, journal: Journal, settings: Iterable[Setting]) -> list[Outcome]:
    outcomes = []
    for setting in settings:
        for file, value in setting.writes.items():
            path = "/" + str(file.relative_to(root))
            target = _resolve(root, path)
            before = selected_value(read_text(target) or "")
            journal.record(path, before, value)  # C1
            error = _write(target, value)
            current = selected_value(read_text(target) or "")
            if current != value:  # for C3: the kernel rounded the value, or applied only part of it
                journal.record(path, before, current)
            outcomes.append(Outcome(path, not error, error or f"{before} -> {value}"))
    return outcomes


def undo(root: Path, journal: Journal) -> list[Outcome]:
    """Restores the settings. Settings that could not be restored stay in the journal; those that
    another program has changed do not.
    """
    outcomes, remaining_entries = [], []
    for entry in reversed(journal.entries):
        target = _resolve(root, entry.path)
        current = selected_value(read_text(target) or "")
        if current == entry.before:
            outcomes.append(Outcome(entry.path, True, f"is {current} already"))
        elif current != entry.after and read_text(target) is not None:  # C3
            outcomes.append(
                Outcome(entry.path, True, f"left at {current}: it was changed after mqd tune set {entry.after}")
            )
        elif error := _write(target, entry.before):
            remaining_entries.append(entry)
            outcomes.append(Outcome(entry.path, False, error))
        else:
            outcomes.append(Outcome(entry.path, True, f"{entry.after} -> {entry.before}"))
    journal.entries = remaining_entries[::-1]
    journal.write()
    return outcomes
