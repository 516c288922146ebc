"""Requests to the acceptors of other hosts, over the inter-broker listener: transaction markers,
and requests to coordinators.

All requests to a host share one connection, which is opened on first use and reopened after it has
ended. A connection is kept as long as the peer is registered with the same epoch at the same
address: a restarted host is a new peer.

Bounds: IN_FLIGHT_MAX requests to one host; further ones are refused. Concurrency: the event loop's
thread.
"""

import asyncio
import socket
from typing import Any

from mqd.acceptor.interbroker.channel import Channel, authenticate, set_socket_options
from mqd.acceptor.interbroker.server import own_identity
from mqd.acceptor.metadata import Metadata
from mqd.base import logging
from mqd.base.host_names import malformed_name_as_oserror
from mqd.base.tasks import timeout
from mqd.cluster.host.messages import BrokerImage
from mqd.cluster.membership import handshake
from mqd.cluster.membership.credentials import Credentials
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.codec import message_of
from mqd.protocol.errors import ProtocolError

CONNECT_S_MAX = 3.0
IN_FLIGHT_MAX = 10_000
RETRY_S = 0.1  # minimum delay after a failure

log = logging.get("acceptor.peers")


class PeerError(Exception):
    """The request could not be sent or was not answered: whether the host has carried it out is
    unknown.
    """


class _Connection:
    def __init__(self, broker: BrokerImage, channel: Channel) -> None:
        self.broker = broker
        self.channel = channel
        self.socket = channel.socket
        self.waiting: dict[int, asyncio.Future[bytes]] = {}  # by correlation id
        self.write_lock = asyncio.Lock()
        self.read_task: asyncio.Task[None] | None = None
        # resolved when the socket's buffer has room, for which send() waits
        self._room: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Raises OSError, also if close() is called in the meantime. Only one call may run at a time."""
        unsent = memoryview(self.channel.to_wire(data))
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except (BlockingIOError, InterruptedError):
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        room: asyncio.Future[None] = self._loop.create_future()

        def on_writable() -> None:
            if not room.done():
                room.set_result(None)

        self._room = room
        self._loop.add_writer(self.socket, on_writable)
        try:
            await room
        finally:
            self._room = None
            if self.socket.fileno() >= 0:
                self._loop.remove_writer(self.socket)

    def close(self) -> None:
        """Removes the socket from the event loop before it is closed, because the next socket may get
        the same descriptor.
        """
        if self.socket.fileno() >= 0:
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self.socket.close()
        if self.read_task is not None:
            self.read_task.cancel()
        if self._room is not None and not self._room.done():
            self._room.set_exception(ConnectionAbortedError("the connection ended"))
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(PeerError(f"the connection to host {self.broker.node_id} ended"))
        self.waiting.clear()


def _peer_key(broker: BrokerImage) -> tuple[int, str, int]:
    return broker.epoch, broker.inter_broker_host, broker.inter_broker_port


class Peers:
    def __init__(self, metadata: Metadata, node_id: int, credentials: Credentials) -> None:
        self._metadata = metadata
        self._node_id = node_id
        self._credentials = credentials
        self._connections: dict[int, _Connection] = {}
        self._connecting: dict[int, asyncio.Task[_Connection]] = {}
        self._retry_at_s: dict[int, float] = {}
        self._correlation_id = 0

    def close(self) -> None:
        for task in self._connecting.values():
            task.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def request(self, node_id: int, request: object, version: int, timeout_s: float) -> Any:
        """Returns the response. Raises PeerError."""
        try:
            async with timeout(timeout_s):
                connection = await self._get_connection(node_id)
                return await self._request(connection, request, version)
        except TimeoutError:
            raise PeerError(f"host {node_id} has not answered within {timeout_s} s") from None

    async def _request(self, connection: _Connection, request: object, version: int) -> object:
        if len(connection.waiting) >= IN_FLIGHT_MAX:
            raise PeerError(f"{IN_FLIGHT_MAX} requests to host {connection.broker.node_id} are already in flight")
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        correlation_id = self._correlation_id
        frame = encode_request(request, version, correlation_id)
        future = connection.waiting[correlation_id] = asyncio.get_running_loop().create_future()
        try:
            await self._write(connection, len(frame).to_bytes(4, "big") + frame)
            response = await future
        except OSError as error:
            self._drop(connection)
            raise PeerError(f"host {connection.broker.node_id}: {error}") from error
        finally:
            connection.waiting.pop(correlation_id, None)
            if future.done() and not future.cancelled():
                # close() may have set an exception before the write ended: retrieve it, so that
                # asyncio does not log it
                future.exception()
        try:
            return decode_response(response, message_of(type(request))[0].api_key, version)[1]
        except ProtocolError as error:
            self._drop(connection)
            raise PeerError(f"host {connection.broker.node_id} sent an invalid response: {error}") from error

    async def _write(self, connection: _Connection, data: bytes) -> None:
        async with connection.write_lock:
            is_complete = False
            try:
                await connection.send(data)
                is_complete = True
            finally:
                if not is_complete:  # part of a frame was sent: the peer could not parse the next one
                    self._drop(connection)

    # -- connections -------------------------------------------------------------------------------

    async def _get_connection(self, node_id: int) -> _Connection:
        broker = self._metadata.brokers.get(node_id)
        if broker is None or not broker.inter_broker_host:
            raise PeerError(f"host {node_id} is not registered, or has no listener for other hosts")
        existing = self._connections.get(node_id)
        if existing is not None:
            if _peer_key(existing.broker) == _peer_key(broker):
                return existing
            self._drop(existing)
        task = self._connecting.get(node_id)
        if task is None:
            if asyncio.get_running_loop().time() < self._retry_at_s.get(node_id, 0.0):
                raise PeerError(f"host {node_id} could not be reached a moment ago")
            task = self._connecting[node_id] = asyncio.get_running_loop().create_task(self._connect(broker))
            task.add_done_callback(lambda done: self._on_connected(node_id, done))
        return await asyncio.shield(task)

    def _on_connected(self, node_id: int, task: "asyncio.Task[_Connection]") -> None:
        self._connecting.pop(node_id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._retry_at_s[node_id] = asyncio.get_running_loop().time() + RETRY_S
            log.info("another host cannot be reached", node=node_id, reason=str(error))

    async def _connect(self, broker: BrokerImage) -> _Connection:
        identity = own_identity(self._metadata, self._node_id)
        if identity is None:
            raise PeerError("this host is not registered yet")
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                loop = asyncio.get_running_loop()
                with malformed_name_as_oserror(broker.inter_broker_host):
                    family, kind, protocol, _, address = (
                        await loop.getaddrinfo(
                            broker.inter_broker_host, broker.inter_broker_port, type=socket.SOCK_STREAM
                        )
                    )[0]
                connection = socket.socket(family, kind, protocol)
                set_socket_options(connection)
                await loop.sock_connect(connection, address)
                side = self._credentials.initiator("data", identity)
                await loop.sock_sendall(connection, side.opening())
                await authenticate(side, connection)
                channel = Channel(connection, self._credentials.tls(side))
                await channel.begin()
            if side.peer is None or side.peer.node_id != broker.node_id:
                raise PeerError(f"{broker.inter_broker_host}:{broker.inter_broker_port} is not host {broker.node_id}")
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, PeerError) or not isinstance(
                error, OSError | EOFError | TimeoutError | handshake.HandshakeFailed
            ):
                raise
            raise PeerError(f"host {broker.node_id}: {str(error) or type(error).__name__}") from error
        opened = _Connection(broker, channel)
        opened.read_task = asyncio.get_running_loop().create_task(self._read(opened))
        self._connections[broker.node_id] = opened  # before _read() can drop the connection
        return opened

    async def _read(self, connection: _Connection) -> None:
        try:
            while (frame := await connection.channel.read_frame()) is not None:
                future = connection.waiting.get(int.from_bytes(frame[:4], "big"))
                if future is not None and not future.done():
                    future.set_result(frame)
        except (OSError, EOFError, ValueError) as error:
            log.info(
                "connection to another host ended",
                node=connection.broker.node_id,
                reason=str(error) or type(error).__name__,
            )
        connection.read_task = None
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.get(connection.broker.node_id) is connection:
            del self._connections[connection.broker.node_id]
        connection.close()
