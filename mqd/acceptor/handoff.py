"""Passes accepted sockets to workers, to the least loaded first."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Sequence

from mqd.base import logging

PENDING_FORGET_S = 0.05  # by then a live worker has counted the connections handed to it
# the worker's socket is full or being replaced; another worker may have room
_NO_ROOM = (errno.ENOBUFS, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNREFUSED)

log = logging.get("acceptor.handoff")


class Handoff:
    """`load_of(worker)` (its number of connections, or of attachments) and `is_running(worker)` come
    from the control segment.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], load_of: Callable[[int], int], is_running: Callable[[int], bool]
    ) -> None:
        self.sockets = sockets
        self._load_of = load_of
        self._is_running = is_running
        # connections handed to each worker since _counting_since_s; `load_of` may not include them yet
        self._handed_counts = [0] * len(sockets)
        self._counting_since_s = 0.0

    def _least_loaded_first(self) -> list[int]:
        """Workers that are not running come last: the keeper holds their sockets."""
        now = time.monotonic()
        if now - self._counting_since_s > PENDING_FORGET_S:
            self._handed_counts = [0] * len(self.sockets)
            self._counting_since_s = now
        return sorted(
            range(len(self.sockets)),
            key=lambda worker: (not self._is_running(worker), self._load_of(worker) + self._handed_counts[worker]),
        )

    def send(self, connection: socket.socket, message: bytes) -> bool:
        """Returns True if a worker has taken the connection, or False if no worker has room. If True,
        this process's copy of the connection is closed. Raises OSError for other failures, such as a
        descriptor that is not a socket.
        """
        for worker in self._least_loaded_first():
            try:
                socket.send_fds(
                    self.sockets[worker], [message], [connection.fileno()], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                )
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                log.warning("a connection cannot be passed to a worker", worker=worker, reason=str(error))
                continue
            self._handed_counts[worker] += 1
            connection.close()
            return True
        return False
