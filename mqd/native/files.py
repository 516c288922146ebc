"""Changes to the files that Python keeps beside the log. They go through native/base/file, where
tests can observe every change and make it fail.

Concurrency: functions are stateless; a descriptor belongs to its opener.
"""

from __future__ import annotations

import os
from typing import Any

from mqd.native.core import bytes_of, check, lib


def file_replace(path: str | os.PathLike[str], data: Any) -> None:
    """Replaces the file atomically and durably: afterwards, even after a power failure, it has all
    of `data`, or (on an error) its previous contents.
    """
    memory = bytes_of(data, writable=False)
    check(lib.mqd_file_replace(os.fsencode(path), memory, len(memory)), path)


def file_open_append(path: str | os.PathLike[str], position: int) -> int:
    """Opens for appending at `position`; bytes after it are truncated. Returns a file descriptor
    for the calls below.
    """
    return check(lib.mqd_file_open_append(os.fsencode(path), position), path)


def file_append(fd: int, data: Any, position: int) -> None:
    """Writes all of `data` at `position` or raises. Not durable before file_flush."""
    memory = bytes_of(data, writable=False)
    check(lib.mqd_file_append(fd, memory, len(memory), position))


def file_flush(fd: int) -> None:
    """Calls fdatasync. A failure is final for the file: the disk's contents are unknown, and a
    later call that succeeds proves nothing.
    """
    check(lib.mqd_file_flush(fd))


def file_close(fd: int) -> None:
    check(lib.mqd_file_close(fd))


def file_unlink(path: str | os.PathLike[str]) -> None:
    check(lib.mqd_file_unlink(os.fsencode(path)), path)


def file_rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    check(lib.mqd_file_rename(os.fsencode(source), os.fsencode(target)), source)


def file_mkdir(path: str | os.PathLike[str], mode: int = 0o755) -> None:
    check(lib.mqd_file_mkdir(os.fsencode(path), mode), path)


def file_sync_directory(path: str | os.PathLike[str]) -> None:
    check(lib.mqd_file_sync_directory(os.fsencode(path)), path)
