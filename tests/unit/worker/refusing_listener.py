"""A listening socket with a waiting connection that cannot be accepted."""

from __future__ import annotations

import errno
import os
import socket


class RefusingListener:
    """`failures`: errno of each accept(), in order; then `ever`, by default that there are no more
    connections. `asked`: the number of calls.
    """

    def __init__(self, failures: list[int], ever: int = errno.EAGAIN) -> None:
        self.failures, self.ever, self.requested = failures, ever, 0
        self._readable, self._other = socket.socketpair()
        self._other.send(b"x")

    def fileno(self) -> int:
        return self._readable.fileno()

    def setblocking(self, blocking: bool) -> None:
        pass

    def accept(self) -> tuple[socket.socket, object]:
        self.requested += 1
        code = self.failures.pop(0) if self.failures else self.ever
        raise OSError(code, os.strerror(code))

    def close(self) -> None:
        self._readable.close()
        self._other.close()
