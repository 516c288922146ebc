"""A ballast file that is deleted when a broker starts, so that the broker can start on a full disk:
its small files and the first log lines then have room. The ballast file is recreated, as large as
free space allows, once the broker is ready and again after it has ended. (The metadata log has a
reserve of its own: mqd/cluster/raft/store.py.)
"""

from __future__ import annotations

import contextlib
import os

from mqd.base.paths import Layout

RESERVE_BYTES = 1 << 20
RESERVE_BYTES_MIN = 64 << 10


def release(places: Layout) -> None:
    with contextlib.suppress(OSError):
        places.reserve.unlink(missing_ok=True)


def recreate(places: Layout) -> None:
    """Creates the file, as large as free space allows. Never raises: the broker works without it."""
    size = RESERVE_BYTES
    with contextlib.suppress(OSError):
        fd = os.open(places.reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while size >= RESERVE_BYTES_MIN:
                try:
                    os.posix_fallocate(fd, 0, size)
                    return
                except OSError:
                    os.ftruncate(fd, 0)
                    size //= 2
        finally:
            os.close(fd)
