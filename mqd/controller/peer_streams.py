"""Streams between controllers, with or without TLS. With TLS, what is written is encrypted
immediately and waits in the transport, so that the transport's limits and `drain()` apply to both.
"""

import asyncio
import contextlib
from typing import Any

from mqd.cluster.membership import handshake
from mqd.cluster.membership.handshake import HandshakeFailed
from mqd.cluster.membership.host_tls import HostTls

READ_BYTES = 256 << 10
REASON_SEND_TIMEOUT_S = 1.0


class TlsReader:
    """Implements the part of asyncio.StreamReader that is used here."""

    def __init__(self, tls: HostTls, reader: asyncio.StreamReader) -> None:
        self._tls, self._reader = tls, reader
        self._buffer = bytearray()

    async def _receive(self) -> bool:
        """Receives more bytes. False: the peer has ended the connection."""
        try:
            plain = self._tls.open(b"")
            while not plain:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    return False
                plain = self._tls.open(data)
        except EOFError:
            return False
        self._buffer += plain
        return True

    async def readexactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not await self._receive():
                raise asyncio.IncompleteReadError(bytes(self._buffer), size)
        return self._take(size)

    async def read(self, size: int) -> bytes:
        if not self._buffer:
            await self._receive()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


class TlsWriter:
    """Implements the part of asyncio.StreamWriter that is used here."""

    def __init__(self, tls: HostTls, writer: asyncio.StreamWriter) -> None:
        self._tls, self._writer = tls, writer

    def write(self, data: bytes) -> None:
        self._writer.write(self._tls.seal(data))

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self._writer.transport

    async def drain(self) -> None:
        await self._writer.drain()

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    def get_extra_info(self, name: str) -> Any:
        return self._writer.get_extra_info(name)


Reader = asyncio.StreamReader | TlsReader
Writer = asyncio.StreamWriter | TlsWriter


async def continue_with(
    tls: HostTls | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[Reader, Writer]:
    """Returns the streams for use after the handshake. With `tls`, starts TLS first. Raises
    HandshakeFailed, OSError, EOFError, TimeoutError.
    """
    if tls is None:
        return reader, writer
    async with asyncio.timeout(handshake.HANDSHAKE_SECONDS_MAX):
        try:
            writer.write(tls.begin())
            while not tls.done:
                data = await reader.read(READ_BYTES)
                if not data:
                    raise EOFError("the peer ended the connection in the TLS handshake")
                writer.write(tls.feed(data))
        except HandshakeFailed:
            await _send_reason(tls, reader, writer)
            raise
    return TlsReader(tls, reader), TlsWriter(tls, writer)


async def _send_reason(tls: HostTls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends the reason for the end of the connection, and waits until the peer has closed it."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(REASON_SEND_TIMEOUT_S):
            writer.write(tls.refusal_bytes)
            writer.write_eof()
            while await reader.read(READ_BYTES):
                pass
