"""A connection between the acceptors of two hosts: the handshake, TLS if both hosts support it, then
frames. Concurrency: the event loop's thread; one reader.
"""

import asyncio
import contextlib
import socket

from mqd.cluster.membership import handshake
from mqd.cluster.membership.handshake import HandshakeFailed
from mqd.cluster.membership.host_tls import HostTls

FRAME_BYTES_MAX = 16 << 20
READ_BYTES = 256 << 10
LOST_MS_MAX = 10_000  # the kernel disconnects a peer that acknowledges no bytes for this long
REASON_SEND_S = 1.0


def set_socket_options(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS_MAX)


async def authenticate(side: handshake.Initiator | handshake.Responder, connection: socket.socket) -> None:
    """Runs the handshake until both sides have authenticated, or one has refused. Reads no byte
    beyond the handshake. Raises HandshakeFailed, OSError, EOFError, TimeoutError.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(handshake.HANDSHAKE_SECONDS_MAX):
        while side.missing_bytes:
            data = await loop.sock_recv(connection, side.missing_bytes)
            if not data:
                raise EOFError("the peer closed the connection during the handshake")
            out = side.feed(data)
            if out:
                await loop.sock_sendall(connection, out)


class Channel:
    """`tls`: begin() starts it; None: the connection has no TLS."""

    def __init__(self, connection: socket.socket, tls: HostTls | None) -> None:
        self.socket = connection
        self._tls = tls
        self._buffer = b""  # decrypted but not read yet

    async def begin(self) -> None:
        """Does the TLS handshake, if there is TLS. Raises HandshakeFailed, OSError, EOFError,
        TimeoutError.
        """
        if self._tls is None:
            return
        loop, tls = asyncio.get_running_loop(), self._tls
        async with asyncio.timeout(handshake.HANDSHAKE_SECONDS_MAX):
            try:
                await loop.sock_sendall(self.socket, tls.begin())
                while not tls.done:
                    data = await loop.sock_recv(self.socket, READ_BYTES)
                    if not data:
                        raise EOFError("the peer closed the connection during the TLS handshake")
                    await loop.sock_sendall(self.socket, tls.feed(data))
            except HandshakeFailed:
                await self._send_reason(tls)
                raise

    async def _send_reason(self, tls: HostTls) -> None:
        """Sends the reason to the peer before the connection ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(REASON_SEND_S):
                await loop.sock_sendall(self.socket, tls.refusal_bytes)
                self.socket.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(self.socket, READ_BYTES):
                    pass

    def to_wire(self, data: bytes) -> bytes:
        """The bytes to send for `data`, encrypted if there is TLS. Send them in the order of the calls."""
        return data if self._tls is None else self._tls.seal(data)

    async def read_frame(self) -> bytes | None:
        """Returns the next frame without its length, or None at the end. Raises ValueError, OSError,
        EOFError.
        """
        head = await self._read_exactly(4)
        if not head:
            return None
        size = int.from_bytes(head, "big")
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes; at most {FRAME_BYTES_MAX} are allowed")
        frame = await self._read_exactly(size)
        if len(frame) < size:
            raise EOFError("the connection ended within a frame")
        return frame

    async def _read_exactly(self, size: int) -> bytes:
        """Returns b"" if the connection has ended. Raises EOFError if it ends after some of the bytes."""
        parts: list[bytes] = []
        missing_bytes = size
        while missing_bytes:
            part = await self._receive(missing_bytes)
            if not part:
                if parts:
                    raise EOFError("the connection ended within a frame")
                return b""
            parts.append(part)
            missing_bytes -= len(part)
        return b"".join(parts)

    async def _receive(self, size_max: int) -> bytes:
        """Returns b"" at the end of the connection."""
        loop = asyncio.get_running_loop()
        if self._tls is None:
            return await loop.sock_recv(self.socket, min(size_max, READ_BYTES))
        try:
            while not self._buffer:
                self._buffer = self._tls.open(b"")
                if not self._buffer:
                    data = await loop.sock_recv(self.socket, READ_BYTES)
                    if not data:
                        return b""
                    self._buffer = self._tls.open(data)
        except EOFError:
            return b""
        part, self._buffer = self._buffer[:size_max], self._buffer[size_max:]
        return part
