"""One broker per directory: an flock on DIRECTORY/.lock, held by the keeper and by every worker.

1. The lock belongs to the open file description, which the workers get from the keeper. It is free
   only when the keeper and all workers are gone, so a new broker never runs while a worker of the
   old one still writes.
2. The file contains the pid of the process that took the lock: for messages, never for decisions,
   because the kernel releases the lock when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

LOCK_NAME = ".lock"
ATTEMPT_COUNT = 10
ATTEMPT_INTERVAL_S = 0.01


class DirectoryInUse(OSError):
    """Another broker holds the directory. `holder_pid` is its pid, or None if the lock file does
    not contain it.
    """

    holder_pid: int | None = None


def _read_holder_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).split(b"\n")[0].strip()
    return int(text) if text.isdigit() else None


def lock_file(path: str | os.PathLike[str]) -> int | None:
    """The locked descriptor of `path` (created if missing), or None if another process holds the
    lock. Raises OSError if it cannot be opened.

    Tools take the lock briefly to see whether it is held (is_locked), while a broker keeps it.
    Therefore this function tries a few times before it gives up.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_uid == os.getuid():
            # users who can open the file can lock it, and then the broker would not start
            os.fchmod(fd, 0o600)
        for attempt in range(ATTEMPT_COUNT):
            if attempt:
                time.sleep(ATTEMPT_INTERVAL_S)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                continue
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _write_holder_pid(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        # a full disk must not keep the broker from starting: the broker may be needed to make room
        if error.errno != errno.ENOSPC:
            os.close(fd)
            raise


def _explain(error: OSError, directory: Path) -> OSError:
    if error.errno == errno.EROFS:
        return OSError(error.errno, f"{directory} is on a read-only file system; choose another directory")
    if error.errno in (errno.EACCES, errno.EPERM):
        return OSError(
            error.errno,
            f"{directory} is not writable for this user; change its owner or mode, or choose another directory",
        )
    if error.errno == errno.ENOSPC:
        return OSError(
            error.errno, f"{directory} is on a full file system; free some space, or choose another directory"
        )
    return OSError(error.errno, f"cannot use {directory}: {error.strerror}")


def lock_directory(directory: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None) -> int:
    """Creates the directory if missing and locks it. Returns the descriptor, which holds the lock
    until its last copy is closed.

    Raises DirectoryInUse, or OSError if the directory cannot be written; both name the remedy.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = lock_file(path / LOCK_NAME)
        if fd is not None:
            _write_holder_pid(fd)
            return fd
    except OSError as error:
        raise _explain(error, path) from error
    raise _in_use(path, Path(data_dir) if data_dir is not None else path)


def _in_use(directory: Path, data_dir: Path) -> DirectoryInUse:
    holder_pid = None
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            holder_pid = _read_holder_pid(fd)
        finally:
            os.close(fd)
    except OSError:
        pass
    holder_text = f"another broker (pid {holder_pid})" if holder_pid is not None else "another broker"
    if directory == data_dir:
        remedy = f"stop it with: mqd down --data-dir {data_dir}, or choose another directory with --data-dir"
    else:
        remedy = "stop that broker, or choose other log.dirs"
    error = DirectoryInUse(errno.EBUSY, f"{holder_text} is using {directory}; {remedy}")
    error.holder_pid = holder_pid
    return error


def lock_directories(directories: Iterable[str | os.PathLike[str]], data_dir: str | os.PathLike[str]) -> list[int]:
    """Locks all or none; a directory that is named twice (or by two paths) is locked once. Raises
    the same errors as lock_directory.
    """
    fds: list[int] = []
    locked_paths: set[str] = set()
    try:
        for directory in directories:
            if (real_path := os.path.realpath(directory)) not in locked_paths:
                locked_paths.add(real_path)
                fds.append(lock_directory(directory, data_dir))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether any process holds this lock file now. Takes the lock briefly. False if the file does
    not exist.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
