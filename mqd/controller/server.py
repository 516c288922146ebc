"""The controller's socket: subscribers connect, receive all messages in order, and respond.
Framing: 4-byte big-endian length, then msgpack.

Bounds: a message from a subscriber has at most REQUEST_BYTES_MAX bytes; a subscriber that leaves
SEND_BYTES_MAX unread is disconnected (it reconnects and gets the image); SUBSCRIBER_COUNT_MAX
connections.
"""

import asyncio
import os
from collections.abc import Callable, Hashable
from pathlib import Path

import msgspec

from mqd.base import logging
from mqd.cluster.host import audited
from mqd.cluster.host.messages import Change, FromController, Request, Response, Subscribe, ToController
from mqd.security.audit import Audit
from mqd.shm.attach import peer_credentials

REQUEST_BYTES_MAX = 16 << 20
SEND_BYTES_MAX = 192 << 20
SUBSCRIBER_COUNT_MAX = 256
PROCESS_ROLES = ("acceptor", "worker")

log = logging.get("controller.server")
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ToController)


class InvalidMessage(Exception):
    """A subscriber sent an invalid message. Not raised for errors in handling a valid message."""


def _decode(data: bytes) -> ToController:
    try:
        return _decoder.decode(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidMessage(str(error)) from error


class Connection:
    """One subscriber, identified by its number in the cores."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.name = f"connection-{number}"
        self._writer = writer
        # for the audit log, only if the subscriber is a tool: its identity, and the changes that have
        # no response yet (request id -> change)
        self._tool_identity: dict[str, object] = {}
        self._audited_changes: dict[int, Change] = {}

    def on_subscribe(self, message: Subscribe) -> None:
        self.name = f"{message.role}-{message.index}" if message.role == "worker" else message.role
        if message.role not in PROCESS_ROLES:
            pid, uid = peer_credentials(self._writer.get_extra_info("socket"))
            self._tool_identity = {"by": f"uid {uid}", "pid": pid, "through": "controller.sock"}

    def on_request(self, request: Request) -> None:
        if self._tool_identity and isinstance(request.change, audited.AUDITED_CHANGES) and not request.validate_only:
            self._audited_changes[request.request_id] = request.change

    def audit(self, audit: Audit, response: Response) -> None:
        change = self._audited_changes.pop(response.request_id, None)
        for event, fields in audited.lines(change, response) if change is not None else ():
            audit.write(event, **self._tool_identity, **fields)

    def audit_unanswered(self, audit: Audit) -> None:
        """The tool has disconnected; its changes may have been made."""
        for change in self._audited_changes.values():
            audit.write("requested, outcome not known", **self._tool_identity, change=type(change).__name__)

    def send(self, message: FromController) -> None:
        if self._writer.is_closing():
            return
        data = _encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)
        if self._writer.transport.get_write_buffer_size() > SEND_BYTES_MAX:
            log.warning(
                "a subscriber is not reading its messages; disconnected",
                subscriber=self.name,
                unread_bytes=SEND_BYTES_MAX,
            )
            self._writer.transport.abort()

    def abort(self) -> None:
        self._writer.transport.abort()


class Server:
    """`on_message(connection, message)` and `on_end(connection)` are called in the loop's thread,
    in order of arrival. Changes requested by tools (not by processes of the broker on behalf of
    clients) are written to `audit` here.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[Connection, ToController], None],
        on_end: Callable[[Connection], None],
        audit: Audit,
    ) -> None:
        self._path = path
        self._audit = audit
        self._on_message = on_message
        self._on_end = on_end
        self._connections: dict[Hashable, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_number = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        old_umask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), backlog=128)
        finally:
            os.umask(old_umask)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        self._path.unlink(missing_ok=True)

    def send(self, number: Hashable, message: FromController) -> None:
        """Sends nothing if the connection has ended in the meantime."""
        connection = self._connections.get(number)
        if connection is not None:
            if isinstance(message, Response):
                connection.audit(self._audit, message)
            connection.send(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= SUBSCRIBER_COUNT_MAX:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._last_number += 1
        connection = self._connections[self._last_number] = Connection(self._last_number, writer)
        try:
            await self._receive(connection, reader)
        except (OSError, EOFError):
            pass
        except InvalidMessage as error:
            log.warning(
                "subscriber sent an invalid message; disconnected", subscriber=connection.name, reason=str(error)
            )
        finally:
            self._tasks.discard(task)
            del self._connections[connection.number]
            self._on_end(connection)
            connection.audit_unanswered(self._audit)
            writer.close()

    async def _receive(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        is_subscribed = False
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > REQUEST_BYTES_MAX:
                raise InvalidMessage(f"a message of {size} bytes; at most {REQUEST_BYTES_MAX} are allowed")
            message = _decode(await reader.readexactly(size))
            if isinstance(message, Subscribe) == is_subscribed:
                raise InvalidMessage("Subscribe must be the first message, and only the first")
            if isinstance(message, Subscribe):
                is_subscribed = True
                connection.on_subscribe(message)
            elif isinstance(message, Request):
                connection.on_request(message)
            try:
                self._on_message(connection, message)
            except Exception:  # a bug
                log.exception(
                    "a subscriber's message cannot be handled; disconnected",
                    subscriber=connection.name,
                    message=type(message).__name__,
                )
                return
