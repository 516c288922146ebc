"""A file that is given up when a broker starts, so that one can start on a disk without a free
byte: its own small files and the first lines of its logs have room then. Taken back when it serves
and when it has ended, as much of it as fits. (The metadata log has a reserve of its own:
mqd/cluster/raft/store.py.)
"""

from __future__ import annotations

import contextlib
import os

from mqd.base.paths import Layout

RESERVE_BYTES = 1 << 20
BYTES_MIN = 64 << 10


def give_up(places: Layout) -> None:
    with contextlib.suppress(OSError):
        places.reserve.unlink(missing_ok=True)


def take_back(places: Layout) -> None:
    """Without it the broker goes on; so it raises nothing."""
    size = RESERVE_BYTES
    with contextlib.suppress(OSError):
        fd = os.open(places.reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while size >= BYTES_MIN:
                try:
                    os.posix_fallocate(fd, 0, size)
                    return
                except OSError:
                    os.ftruncate(fd, 0)
                    size //= 2
        finally:
            os.close(fd)
