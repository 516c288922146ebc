"""A TCP proxy that records all bytes: what an eavesdropper between two hosts would see."""

import contextlib
import socket
import threading

from tests.ports import free_port


class Recorder:
    """Listens at `host`, forwards to `target`. `seen`: all bytes of both directions; complete once
    close() has returned.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1", port: int | None = None) -> None:
        self.target = target
        self.seen: list[bytes] = []
        self.count = 0  # of connections
        self._listener = socket.create_server((host, port or free_port()))
        self.address = self._listener.getsockname()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return
            self.count += 1
            try:
                outgoing = socket.create_connection(self.target, 10)
            except OSError:
                incoming.close()
                continue
            outgoing.settimeout(None)
            self._sockets |= {incoming, outgoing}
            for source, sink in ((incoming, outgoing), (outgoing, incoming)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen.append(data)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RD if one is source else socket.SHUT_WR)

    def end_connections(self) -> None:
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_connections()
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
