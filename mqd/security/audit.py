"""logs/audit.log: denied operations, and changes of rules and users. One JSON object per line.

Each process that authorizes requests (the acceptor and the workers) logs a denial at most once per
WINDOW_S for each principal, address, operation and resource; the next line for the same denial has
the number of denials in between.
Bounds: DENIALS_MAX different denials in WINDOW_S; beyond that, only their number is logged.

The processes share the file and append each line with one write. The process that finds the file
larger than SIZE_BYTES_MAX renames it to audit.log.1; KEPT_FILE_COUNT of these older files are kept.

Invariants
    F1  a file is renamed from audit.log only once: a process renames it only while it holds the
        file's lock and the file still has that name
    F2  a line that is written while another process renames the file is in the renamed file, so it
        is neither lost nor cut
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from mqd.base import logging
from mqd.security.acl import Operation, ResourceType, name_of

WINDOW_S = 10.0
DENIALS_MAX = 10_000
SIZE_BYTES_MAX, KEPT_FILE_COUNT = 64 << 20, 4
MODE = 0o600

log = logging.get("audit")


class SharedFile:
    """A file that several processes append lines to."""

    def __init__(self, path: Path, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._path = path
        self._size_bytes_max = size_bytes_max
        self._fd = -1
        self._is_torn = False  # the last line was cut off

    def append(self, line: bytes) -> None:
        """Appends one line. Raises OSError."""
        if self._fd < 0 or not self._is_current():
            self._open()
        text = b"\n" + line if self._is_torn else line
        self._is_torn = os.write(self._fd, text) < len(text)
        if self._is_torn:
            raise OSError(errno.ENOSPC, "only a part of the line was written", str(self._path))
        if os.fstat(self._fd).st_size >= self._size_bytes_max:
            self._rename()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_current(self) -> bool:
        try:
            current_status = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(current_status, os.fstat(self._fd))

    def _open(self) -> None:
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)

    def _rename(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current():
                for number in range(KEPT_FILE_COUNT, 0, -1):
                    source = self._numbered_path(number - 1) if number > 1 else self._path
                    if source.exists():
                        source.replace(self._numbered_path(number))
        except BlockingIOError:
            pass  # another process holds the lock, and is renaming the file
        finally:
            self.close()  # releases the lock, even if the renaming has failed

    def _numbered_path(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class Audit:
    """The audit log of this process. If `path` is None, nothing is written."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = SharedFile(path) if path is not None else None
        # (principal, host, operation, type, name) -> [time of the last line, denials since]
        self._denials: dict[tuple[str, str, int, int, str], list[float]] = {}
        self._swept_s = 0.0  # time at which expired entries were last dropped
        self._unlogged_count = 0  # denials since then that have no line

    def record_denial(
        self,
        principal: str,
        host: str,
        operation: int,
        resource_type: int,
        name: str,
        is_only_logged: bool,
        count: int = 1,
    ) -> None:
        """Writes a denial, or only counts it. `is_only_logged`: the operation is allowed
        nevertheless (authorizer.log.only). `count`: how many identical denials this call reports.
        """
        now = self._clock()
        key = (principal, host, operation, resource_type, name)
        entry = self._denials.get(key)
        if entry is not None and now - entry[0] < WINDOW_S:
            entry[1] += count
            return
        if entry is None and len(self._denials) >= DENIALS_MAX and not self._sweep(now):
            self._unlogged_count += count
            return
        self._denials[key] = [now, 0]
        suppressed = count - 1 + (int(entry[1]) if entry is not None else 0)
        self.write(
            "would be denied, but allowed by authorizer.log.only" if is_only_logged else "denied",
            principal=principal,
            host=host,
            operation=name_of(Operation, operation),
            resource_type=name_of(ResourceType, resource_type),
            resource=name,
            **({"suppressed": suppressed} if suppressed else {}),
        )

    def _sweep(self, now: float) -> bool:
        """Drops expired entries; returns whether there is room for another. Does so at most once per
        window, so that in a flood of different denials each costs only a lookup.
        """
        if now - self._swept_s < WINDOW_S:
            return False
        self._swept_s = now
        kept = {key: entry for key, entry in self._denials.items() if now - entry[0] < WINDOW_S}
        self._unlogged_count += sum(int(entry[1]) for key, entry in self._denials.items() if key not in kept)
        self._denials = kept
        if self._unlogged_count:
            self.write("denied", suppressed=self._unlogged_count)
            self._unlogged_count = 0
        return len(self._denials) < DENIALS_MAX

    def write(self, event: str, **fields: object) -> None:
        """Appends an event. A failing disk does not stop the broker; the error goes to the process's
        own log.
        """
        if self._file is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._clock()))
        line = json.dumps({"time": f"{stamp}Z", "event": event, **fields}, ensure_ascii=True)
        try:
            self._file.append(line.encode() + b"\n")
        except OSError as error:
            log.error("the audit log cannot be written", reason=str(error), event=event)
