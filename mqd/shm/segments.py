"""Named shared memory: what the segments of a broker are called, how they are made, mapped and cleaned away.

1. A segment is made by the keeper alone, and only while it holds the data directory's lock; so whatever bears the directory's names then is a dead
   broker's and may be removed.
2. Its memory is reserved when it is made. A store into shared memory that the system cannot supply would kill the process with SIGBUS; a refused
   reservation is an error with a way out.
3. Names follow from the data directory's device and inode: the same under every path to it, different for each directory.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os

import posix_ipc

from mqd.native import ENDPOINT_COUNT_MAX

MODE = 0o600


class SegmentError(OSError):
    """Shared memory cannot be had; the message names the cause and the way out."""


def prefix(data_dir: str | os.PathLike[str]) -> str:
    """"/mqd-0123456789abcdef" for an existing data directory."""
    about = os.stat(data_dir)
    return "/mqd-" + hashlib.sha256(f"{about.st_dev}:{about.st_ino}:{os.getuid()}".encode()).hexdigest()[:16]


def control_name(base: str) -> str:
    return f"{base}-control"


def links_name(base: str) -> str:
    return f"{base}-links"


def arena_name(base: str, endpoint: int) -> str:
    return f"{base}-arena-{endpoint}"


def create(name: str, size_bytes: int) -> mmap.mmap:
    """A new segment of zeroes, all of it reserved, mapped writable. Raises SegmentError."""
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=MODE)
    except (posix_ipc.Error, OSError) as error:
        raise SegmentError(errno.EIO, f"cannot create the shared memory segment {name}: {error}; is /dev/shm mounted and writable?") from error
    try:
        os.posix_fallocate(memory.fd, 0, size_bytes)
        return mmap.mmap(memory.fd, size_bytes)
    except OSError as error:
        posix_ipc.unlink_shared_memory(name)
        raise SegmentError(
            error.errno or errno.ENOMEM,
            f"cannot reserve {size_bytes} bytes of shared memory for {name}: {error.strerror or error}; make /dev/shm larger (docker run --shm-size),"
            " or lower worker.count or receive.arena.bytes",
        ) from error
    finally:
        memory.close_fd()


def attach(name: str, size_bytes: int | None = None, writable: bool = True) -> mmap.mmap:
    """Maps an existing segment, whole. `size_bytes`: what it must have at least. Raises SegmentError."""
    try:
        memory = posix_ipc.SharedMemory(name, 0, read_only=not writable)
    except posix_ipc.ExistentialError as error:
        raise SegmentError(errno.ENOENT, f"there is no shared memory segment {name}: its keeper has ended") from error
    except (posix_ipc.Error, OSError) as error:
        raise SegmentError(errno.EACCES, f"cannot open the shared memory segment {name}: {error}") from error
    try:
        actual = os.fstat(memory.fd).st_size
        if actual == 0 or (size_bytes is not None and actual < size_bytes):
            raise SegmentError(errno.EINVAL, f"the shared memory segment {name} has {actual} bytes, expected {size_bytes or 'some'}: restart the whole broker")
        return mmap.mmap(memory.fd, actual, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        memory.close_fd()


def unlink(name: str) -> bool:
    """False when there is none. Mappings of it stay valid."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


def clean(base: str) -> list[str]:
    """Removes every segment of a broker that may be left; returns their names. Only for whoever holds the directory's lock."""
    names = [control_name(base), links_name(base), *(arena_name(base, endpoint) for endpoint in range(ENDPOINT_COUNT_MAX))]
    return [name for name in names if unlink(name)]
