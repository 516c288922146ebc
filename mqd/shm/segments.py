"""Named shared memory: the names of a broker's segments, and how they are created, mapped and
removed.

1. Only the keeper creates segments, and only while it holds the data directory's lock. Existing
   segments with the directory's names therefore belong to a dead broker and may be removed.
2. A segment's memory is reserved when it is created. A store to shared memory that the system
   cannot supply would kill the process with SIGBUS; a refused reservation is an error that names
   the remedy.
3. The keeper holds an flock on its control segment as long as it lives. If that flock is free, the
   broker was killed and not restarted: the next keeper that the same user starts, for any data
   directory, removes the broker's segments. The process that removes them (the broker's successor,
   or a sweeping keeper) holds the flock on the dead broker's control segment meanwhile. Otherwise,
   when several brokers start at the same time, one could remove segments that another has just
   created.
4. Names are used only for creation and removal. Other processes get descriptors from the keeper,
   which stay valid when systemd (RemoveIPC=) or an operator empties /dev/shm under a running
   broker.
5. Names are derived from the data directory's device and inode: the same under every path to it,
   different for each directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import time
from collections.abc import Iterator

import posix_ipc

from mqd.native import ENDPOINT_COUNT_MAX

MODE = 0o600
SHM_DIRECTORY = "/dev/shm"  # where Linux shows POSIX shared memory
# how long to wait for the control segment's lock while a sweep finds that the segment is too young
# to remove; normally microseconds
CONTROL_LOCK_WAIT_S = 1.0
TAKE_OVER_S = 10.0  # how long to wait for another process's sweep, which normally takes milliseconds
SWEEP_AGE_S = 10.0  # younger segments are left alone: a keeper locks its segment microseconds after creating it


class SegmentError(OSError):
    """Shared memory is not available; the message names the cause and the remedy."""


def prefix(data_dir: str | os.PathLike[str]) -> str:
    """The beginning of the segments' names for an existing data directory, such as
    "/mqd-0123456789abcdef".
    """
    status = os.stat(data_dir)
    return "/mqd-" + hashlib.sha256(f"{status.st_dev}:{status.st_ino}:{os.getuid()}".encode()).hexdigest()[:16]


def control_name(base: str) -> str:
    return f"{base}-control"


def links_name(base: str) -> str:
    return f"{base}-links"


def arena_name(base: str, endpoint: int) -> str:
    return f"{base}-arena-{endpoint}"


def create(name: str, size_bytes: int, reserved_bytes: int | None = None) -> mmap.mmap:
    """Creates a zeroed segment and maps it writable. `reserved_bytes` limits the reservation to the
    beginning of the segment; a store to the rest raises SIGBUS if /dev/shm is full. Raises
    SegmentError.
    """
    reserved_bytes = size_bytes if reserved_bytes is None else reserved_bytes
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=MODE)
    except (posix_ipc.Error, OSError) as error:
        raise _segment_error("create", name, error) from error
    try:
        os.posix_fallocate(memory.fd, 0, reserved_bytes)
        os.ftruncate(memory.fd, size_bytes)
        return mmap.mmap(memory.fd, size_bytes)
    except OSError as error:
        posix_ipc.unlink_shared_memory(name)
        raise SegmentError(
            error.errno or errno.ENOMEM,
            f"cannot reserve {reserved_bytes} bytes of shared memory for {name}: {error.strerror or error}; make"
            " /dev/shm larger (docker run --shm-size), or lower worker.count or receive.arena.bytes",
        ) from error
    finally:
        memory.close_fd()


def _segment_error(verb: str, name: str, error: Exception) -> SegmentError:
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return SegmentError(
            errno.EROFS,
            f"{SHM_DIRECTORY} is read-only, and the broker's shared memory is kept there; make it writable:"
            f" mount -o remount,rw {SHM_DIRECTORY}, or in a container --tmpfs {SHM_DIRECTORY}",
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return SegmentError(
        errno.EIO,
        f"cannot {verb} the shared memory segment {name}: {reason}; check that {SHM_DIRECTORY} is mounted and writable",
    )


def open_descriptor(name: str, writable: bool = True) -> int:
    """A descriptor of an existing segment, for other processes: it stays valid after the name is
    removed. Raises SegmentError.
    """
    flags = os.O_RDWR if writable else os.O_RDONLY
    try:
        return os.open(f"{SHM_DIRECTORY}{name}", flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SegmentError(
            error.errno or errno.EIO, f"cannot open the shared memory segment {name}: {error.strerror}"
        ) from error


def attach(fd: int, segment: str, size_bytes: int, writable: bool = True) -> mmap.mmap:
    """Maps a whole segment through the keeper's descriptor, and closes the descriptor. `segment`:
    its name in messages; `size_bytes`: the required minimum size. Raises SegmentError.
    """
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes == 0 or actual_bytes < size_bytes:
            raise SegmentError(
                errno.EINVAL,
                f"the shared memory segment {segment} has {actual_bytes} bytes, expected {size_bytes}: restart the"
                " whole broker",
            )
        return mmap.mmap(fd, actual_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except SegmentError:
        raise
    except OSError as error:
        raise SegmentError(
            error.errno or errno.EIO, f"cannot map the shared memory segment {segment}: {error.strerror}"
        ) from error
    finally:
        os.close(fd)


def free_bytes(data_dir: str | os.PathLike[str]) -> int | None:
    """The shared memory that a broker with this data directory could use if it started now: the
    free memory, plus the remains of a dead broker of this directory. None: unlimited, or unknown.
    """
    try:
        file_system = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return None
    if file_system.f_blocks == 0:
        return None
    removable_bytes = 0
    with contextlib.suppress(OSError):  # no data directory yet
        base = prefix(data_dir)
        for entry in os.scandir(SHM_DIRECTORY):
            if f"/{entry.name}".startswith(f"{base}-"):
                removable_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    return file_system.f_bavail * file_system.f_frsize + removable_bytes


def unlink(name: str) -> bool:
    """Removes a segment's name; False if there is none. Its mappings stay valid. Raises
    SegmentError.
    """
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    except (posix_ipc.Error, OSError) as error:
        raise _segment_error("remove", name, error) from error
    return True


def clean(base: str) -> list[str]:
    """Removes all remaining segments of a broker; returns their names. Only for the holder of the
    directory's lock. The control segment is removed last, because `sweep` looks for it.
    """
    names = [
        *(arena_name(base, endpoint) for endpoint in range(ENDPOINT_COUNT_MAX)),
        links_name(base),
        control_name(base),
    ]
    return [name for name in names if unlink(name)]


def lock_control_segment(name: str) -> int:
    """Takes the keeper's flock on its control segment; the returned descriptor must stay open as
    long as the keeper lives. A sweep may hold the lock briefly, until it sees how young the segment
    is. Raises SegmentError.
    """
    try:
        return _lock(f"{SHM_DIRECTORY}{name}", CONTROL_LOCK_WAIT_S)
    except OSError as error:
        raise SegmentError(errno.EBUSY, f"cannot lock the shared memory segment {name}: {error}") from error


def _lock(path: str, wait_s: float) -> int:
    """Waits for the flock on the segment with this name, and returns the descriptor that holds it;
    the caller must close the descriptor. Raises OSError if there is no such segment,
    BlockingIOError if it is still locked after wait_s.
    """
    deadline = time.monotonic() + wait_s
    while True:
        # O_NONBLOCK: another user's pipe of that name would block us
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd  # and the name stays bound to this segment while we hold it
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise
            time.sleep(0.01)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextlib.contextmanager
def taking_over(base: str) -> Iterator[None]:
    """Ensures exclusive access to a dead broker's segments, to remove and recreate them. Only for
    the holder of the directory's lock. Raises SegmentError.
    """
    try:
        fd = _lock(f"{SHM_DIRECTORY}{control_name(base)}", TAKE_OVER_S)
    except BlockingIOError:
        raise SegmentError(
            errno.EBUSY,
            f"another broker's keeper has been removing the shared memory segments {base}-* for {TAKE_OVER_S:.0f} s:"
            " it may be suspended. Let it continue, or end it",
        ) from None
    except OSError:
        fd = -1  # no segment is left, or none that we may access: then creating the segments reports the error
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _may_sweep(path: str, now: float) -> bool:
    """Whether the segment belongs to this user and is old enough."""
    status = os.stat(path, follow_symlinks=False)
    return status.st_uid == os.getuid() and now - max(status.st_mtime, status.st_ctime) >= SWEEP_AGE_S


def sweep(now: float | None = None) -> list[str]:
    """Removes the segments of this user's brokers that have no keeper any more; returns the names
    of their control segments.
    """
    swept = []
    try:
        entries = os.listdir(SHM_DIRECTORY)
    except OSError:
        return []
    for entry in entries:
        if not re.fullmatch(r"mqd-[0-9a-f]{16}-control", entry):
            continue
        path = f"{SHM_DIRECTORY}/{entry}"
        with contextlib.suppress(OSError):  # the segment is locked by its keeper, another user's, or already gone
            if _may_sweep(path, time.time() if now is None else now):
                fd = _lock(path, 0)
                try:
                    # another segment may have taken its name
                    if _may_sweep(path, time.time() if now is None else now):
                        clean("/" + entry.removesuffix("-control"))
                        swept.append("/" + entry)
                finally:
                    os.close(fd)
    return swept
