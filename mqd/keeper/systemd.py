"""Notifications of a broker to systemd (sd_notify(3)): one datagram each, without a library.

    READY=1       every process serves
    WATCHDOG=1    the keeper responds, and every process has responded to it within RESPONSE_S
    STOPPING=1    the broker is shutting down

supervisord's loop feeds the watchdog, so a hang there is noticed as well. Only running processes
are probed: supervisord watches those that are starting or recovering.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from mqd.shm.keeper_messages import Probed, ProbeQuery

RESPONSE_S = 5.0
PROBE_S = 2.0  # the longest time between two probes
PACKET_BYTES_MAX = 64 << 10


class ServiceManager:
    """The systemd service manager; does nothing if systemd did not start this process."""

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        self._address = address
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> ServiceManager:
        """Takes systemd's variables out of `environment`, so that no child inherits them."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, watchdog_pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", str(pid))
        is_watched = bool(address) and microseconds.isdigit() and watchdog_pid == str(pid)
        return cls(address, int(microseconds) / 1e6 if is_watched else 0.0)

    def notify(self, *states: str) -> None:
        """Sends a message. Never blocks or fails: a manager that does not read loses the message."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(states).encode(), address)
        except OSError:
            pass


class WatchdogFeeder:
    """Feeds the watchdog from supervisord's loop, which calls tick() on every iteration. While it
    waits for the keeper, it is registered with that loop as a dispatcher. `dispatchers`:
    supervisord's, by file descriptor.
    """

    def __init__(
        self,
        manager: ServiceManager,
        keeper_socket: Path,
        dispatchers: MutableMapping[int, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._path = keeper_socket
        self._dispatchers = dispatchers
        self._clock = clock
        self._period_s = min(PROBE_S, manager.watchdog_s / 4)
        self._next_probe_s = self._sent_s = 0.0
        self._status = ""
        self._connection: socket.socket | None = None
        self.fd = -1

    def tick(self) -> None:
        if not self._manager.watchdog_s or self._clock() < self._next_probe_s:
            return
        self._next_probe_s = self._clock() + self._period_s
        self.handle_read_event()
        if self._connection is not None:
            if self._clock() - self._sent_s > RESPONSE_S:
                self._report("the keeper does not answer")
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(os.fspath(self._path))
            connection.send(msgspec.msgpack.encode(ProbeQuery(RESPONSE_S)))
        except OSError:
            connection.close()
            self._report("the keeper is unreachable")
            return
        self._connection, self.fd, self._sent_s = connection, connection.fileno(), self._clock()
        self._dispatchers[self.fd] = self

    def _report(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self._manager.notify(f"STATUS={status}")

    # -- supervisord's dispatcher ------------------------------------------------------------------

    def readable(self) -> bool:
        return self._connection is not None

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        if self._connection is None:
            return
        try:
            response = msgspec.msgpack.decode(self._connection.recv(PACKET_BYTES_MAX), type=Probed)
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            self._report("the keeper's response is malformed")
        else:
            if response.silent:
                self._report(f"does not answer: {', '.join(response.silent)}")
            else:
                self._manager.notify("WATCHDOG=1")
                self._report("every process answers")
        self.close()

    def handle_error(self) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._dispatchers.pop(self.fd, None)
            self._connection.close()
            self._connection, self.fd = None, -1
