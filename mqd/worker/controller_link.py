"""The connection to the controller: subscribes, receives in order, responds, and reconnects.

    4-byte big-endian length, then msgpack (mqd/cluster/host/messages.py).

The controller may be restarted at any time. After each new subscription it sends the whole image
first, so a missed message has no lasting effect. Bound: MESSAGE_BYTES_MAX per message; messages are
handled one after the other, so the socket is the queue.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from mqd.base import logging
from mqd.base.collector import paused
from mqd.cluster.host.messages import FromController, Subscribe, ToController

MESSAGE_BYTES_MAX = 256 << 20  # 16384 partitions need about 2 MB
RETRY_MS_MIN = 20
RETRY_MS_MAX = 100  # a refused connect costs some microseconds

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromController).decode


class ControllerLink:
    def __init__(self, path: Path, subscribe: Subscribe, on_message: Callable[[FromController], Awaitable[None]]):
        self._path = path
        self._subscribe = subscribe
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._log = logging.get("worker.controller")

    async def run(self) -> None:
        """Runs until cancelled, or until `on_message` raises."""
        retry_ms, was_lost = RETRY_MS_MIN, False
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._path))
            except OSError:
                # the controller is (re)starting: its socket is the only signal, so poll it
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(2 * retry_ms, RETRY_MS_MAX)
                continue
            retry_ms = RETRY_MS_MIN
            try:
                self.send(self._subscribe)
                if was_lost:
                    self._log.info("controller is back")
                await self._receive(reader)
            except (OSError, EOFError, msgspec.DecodeError, ValueError) as error:
                was_lost = True
                self._log.info("controller connection ended", reason=str(error) or type(error).__name__)
            finally:
                self._writer.close()
                self._writer = None
            await asyncio.sleep(retry_ms / 1000)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"a message of {size} bytes, more than {MESSAGE_BYTES_MAX}")
            data = await reader.readexactly(size)
            with paused():
                message = _decode(data)
            await _await_handler(self._on_message(message))

    def send(self, message: ToController) -> None:
        """Sends to the currently connected controller. If there is none, the message is dropped;
        the next controller will send its image.
        """
        if self._writer is None or self._writer.is_closing():
            return
        data = _encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)


class HandlerFailed(RuntimeError):
    """Handling a message failed. The connection is not at fault, so a new one would not help."""


async def _await_handler(work: Awaitable[None]) -> None:
    try:
        await work
    except (OSError, EOFError, ValueError) as error:
        raise HandlerFailed(str(error)) from error
