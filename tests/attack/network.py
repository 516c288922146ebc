"""A proxy in front of the broker's TLS listener, whose connection can be cut, stopped or slowed
down.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time

from tests.ports import free_port

CHUNK_BYTES = 1 << 16
TICK_S = 0.005


class Proxy(threading.Thread):
    """From `port` to `to_port`, in one thread. A fault lasts until `heal`."""

    def __init__(self, to_port: int = 0) -> None:
        super().__init__(daemon=True)
        self.to_port = to_port
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[socket.socket, socket.socket] = {}
        self._commands: list[str] = []
        self._ending = threading.Event()
        self._silent: str | None = None  # "both", "there", "back"
        self._delay_s = 0.0

    def fault(self, rng: random.Random) -> str:
        """Begins a fault; returns its name."""
        kind = rng.choice(("reset", "close", "silent", "deaf there", "deaf back", "slow", "flap"))
        self._commands.append(kind)
        return kind

    def heal(self) -> None:
        self._commands.append("heal")

    def end(self) -> None:
        self._ending.set()
        self.join(10)

    def run(self) -> None:
        while not self._ending.is_set():
            while self._commands:
                self._obey(self._commands.pop(0))
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif not self._holds(key.data):
                    self._carry(key.fileobj)
            if self._delay_s or self._silent:
                time.sleep(self._delay_s or TICK_S)
        self._cut(reset=False)
        self._listener.close()

    def _obey(self, command: str) -> None:
        self._silent, self._delay_s = None, 0.0
        match command:
            case "reset" | "flap":
                self._cut(reset=True)
                self._delay_s = 0.05 if command == "flap" else 0.0
            case "close":
                self._cut(reset=False)
            case "silent":
                self._silent = "both"
            case "deaf there":
                self._silent = "there"
            case "deaf back":
                self._silent = "back"
            case "slow":
                self._delay_s = 0.1
            case _:
                pass

    def _holds(self, direction: str) -> bool:
        return self._silent in ("both", direction)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.to_port), timeout=5)
        except OSError:
            client.close()
            return
        for one, other, direction in ((client, server, "there"), (server, client, "back")):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(10)  # bytes that were read are forwarded first
            self._lines[one] = other
            self._selector.register(one, selectors.EVENT_READ, direction)

    def _carry(self, one: socket.socket) -> None:
        other = self._lines.get(one)
        if other is None:
            return
        try:
            data = one.recv(CHUNK_BYTES)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._close(one, other)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            if self._lines.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()

    def _cut(self, reset: bool) -> None:
        for end in list(self._lines):
            if reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close(end)
