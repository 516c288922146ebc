"""Connections between the controllers of hosts. Opens connections, admits other hosts, keeps their
addresses, and sends and receives messages.

Best effort: if there is a live connection, a message is sent over it. Otherwise it waits (a few
messages, for a short time) for the connection that is being opened, or is dropped; the cores repeat
everything that matters. Messages are in order within a connection. A connection opened by either
side serves both directions; a host sends over the same connection until it ends.

Every connection begins with the handshake (mqd/cluster/membership/handshake.py): everything after
it comes from the authenticated node, and nothing before it is passed on. If both hosts
support TLS, the connection continues over TLS (host_tls.py); what is written to it is then
encrypted immediately, so that the bounds below count what is sent.

Bounds
    CONNECTIONS_PER_NODE_MAX  connections to one node; when there are more, the oldest over which
                              this host does not send is closed
    HANDSHAKES_MAX            handshakes in progress; further connections are closed immediately
    SEND_BYTES_MAX            bytes that a peer has not read; beyond this, its connection is closed
    PENDING_MAX               messages that wait for a connection; the oldest is dropped
    a peer that does not acknowledge bytes for LOST_MS_MAX is disconnected by the kernel
    (TCP_USER_TIMEOUT)
"""

import asyncio
import os
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from mqd.base import logging
from mqd.base.host_names import malformed_name_as_oserror
from mqd.cluster.membership import handshake, peer_messages
from mqd.cluster.membership.credentials import Credentials, RefusedHosts
from mqd.cluster.membership.handshake import HandshakeFailed, HandshakeRefused, Hello, Identity, Refusal
from mqd.controller.peer_streams import Reader, Writer, continue_with

CONNECTIONS_PER_NODE_MAX = 4
HANDSHAKES_MAX = 64
SEND_BYTES_MAX = 64 << 20
PENDING_MAX = 64
# This is short because, after an outage, an old connection retransmits at growing intervals: a new
# connection recovers sooner.
LOST_MS_MAX = 3_000
CONNECT_SECONDS_MAX = 2.0
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 1.0
REFUSED_S = 2.0  # after a refusal, the peer is not contacted again for this time

log = logging.get("controller.peers")


def reason_of(error: BaseException) -> str:
    """The plain reason, such as "Connection refused", without asyncio's wrapping."""
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection ended"
    return str(error) or "the connection ended"


def set_options(connection: socket.socket) -> None:
    """Sets socket options, so that small messages are sent immediately and dead peers are detected."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS_MAX)


async def _run_handshake(
    side: handshake.Initiator | handshake.Responder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Runs the handshake to its end. Raises HandshakeFailed, OSError, EOFError, TimeoutError."""
    async with asyncio.timeout(handshake.HANDSHAKE_SECONDS_MAX):
        while side.missing_bytes:
            writer.write(side.feed(await reader.readexactly(side.missing_bytes)))


class Connection:
    """A connection after the handshake. `identity`: the peer's; `sent_identity`: this host's own,
    as sent to the peer.
    """

    def __init__(self, identity: Identity, sent_identity: Identity, reader: Reader, writer: Writer) -> None:
        self.identity, self.sent_identity = identity, sent_identity
        self.reader, self.writer = reader, writer
        set_options(writer.get_extra_info("socket"))

    @property
    def is_open(self) -> bool:
        return not self.writer.is_closing()

    def send(self, frame: bytes) -> None:
        self.writer.write(frame)
        if self.writer.transport.get_write_buffer_size() > SEND_BYTES_MAX:
            log.warning(
                "a host is not reading its messages; disconnected",
                node=self.identity.node_id,
                unread_bytes=SEND_BYTES_MAX,
            )
            self.writer.transport.abort()

    async def receive(self) -> msgspec.Struct | None:
        """Returns the next message, or None if this version does not know its type. Raises
        PeerProtocolError, OSError, EOFError.
        """
        size = peer_messages.body_size(await self.reader.readexactly(peer_messages.LENGTH_BYTES))
        return peer_messages.decode(await self.reader.readexactly(size))


class _Node:
    """The state of one other host."""

    def __init__(self) -> None:
        self.addresses: list[tuple[str, int]] = []  # newest first
        self.connections: list[Connection] = []  # oldest first
        self.current: Connection | None = None
        self.pending: deque[bytes] = deque(maxlen=PENDING_MAX)
        self.connecting: asyncio.Task[None] | None = None
        self.next_try = 0.0  # time.monotonic()
        self.failure_count = 0
        self.logged_failure = ""  # the last logged failure


class Peers:
    """`identity()`: this host's current identity. `decide(hello)`: admits a host and returns the
    identity to respond with, or refuses. `on_message(connection, message)`: in the loop's thread,
    in order of arrival. `on_stream(hello, reader, writer)`: connections for another purpose
    ("gossip"); awaited, then closed. `mismatch_of(identity)`: why a peer that this host has
    connected to is not the expected host; "" = it is. `is_voter(identity)`: whether the host is a
    voter, so that a newcomer with the same node id does not displace it.
    """

    def __init__(
        self,
        credentials: Credentials,
        identity: Callable[[], Identity],
        decide: Callable[[Hello], Identity | Refusal],
        on_message: Callable[[Connection, msgspec.Struct], None],
        on_stream: Callable[[Hello, Reader, Writer], Awaitable[None]] | None = None,
        mismatch_of: Callable[[Identity], str] = lambda identity: "",
        is_voter: Callable[[Identity], bool] = lambda identity: False,
    ) -> None:
        self._credentials = credentials
        self._identity, self._decide = identity, decide
        self._on_message, self._on_stream, self._mismatch_of, self._is_voter = (
            on_message,
            on_stream,
            mismatch_of,
            is_voter,
        )
        self._nodes: dict[int, _Node] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._handshake_count = 0
        self._random = random.Random(os.urandom(8))
        self._ended = False
        self._refused_hosts = RefusedHosts()

    # -- addresses --------------------------------------------------------------------------------

    def add_address(self, node_id: int, host: str, port: int) -> None:
        """Adds an address of a node. The newest is tried first, then up to two older ones."""
        if not host or not port or node_id == self._identity().node_id:
            return
        node = self._nodes.setdefault(node_id, _Node())
        if node.addresses[:1] != [(host, port)]:
            older = [address for address in node.addresses if address != (host, port)]
            node.addresses = [(host, port), *older][:3]
            node.next_try = 0.0

    def connected_nodes(self) -> list[int]:
        """Node ids with a live connection."""
        return sorted(
            node_id for node_id, node in self._nodes.items() if node.current is not None and node.current.is_open
        )

    # -- sending -----------------------------------------------------------------------------------

    def send(self, node_id: int, message: msgspec.Struct) -> None:
        """Best effort, never waits. An overlong message is the sender's bug: raises
        PeerProtocolError.
        """
        node = self._nodes.get(node_id)
        if node is None or self._ended:
            return
        frame = peer_messages.encode(message)
        if node.current is not None and node.current.is_open:
            node.current.send(frame)
            return
        node.pending.append(frame)
        if node.connecting is None and time.monotonic() >= node.next_try:
            node.connecting = self._start_task(self._connect(node_id, node))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self, node_id: int, node: _Node) -> None:
        # the exponent is bounded, too: a host may be unreachable for thousands of attempts
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(node.failure_count, 16)) * self._random.uniform(0.7, 1.3)
        try:
            connection = await self._reach(node_id, node)
        except HandshakeRefused as error:
            self._on_failed(node_id, node, f"refused: {error}", max(wait_s, REFUSED_S))
        except (OSError, EOFError, TimeoutError, HandshakeFailed) as error:
            self._on_failed(node_id, node, reason_of(error), wait_s)
        else:
            node.failure_count, node.logged_failure = 0, ""
            log.info("connected to a host", node=node_id)
            self._start_task(self._receive(connection))
        finally:
            node.connecting = None

    async def _reach(self, node_id: int, node: _Node) -> Connection:
        failure: Exception = OSError("no address is known")
        for host, port in list(node.addresses):
            try:
                connection = await self.open(host, port, "controller")
            except HandshakeRefused:
                raise
            except (OSError, EOFError, TimeoutError, HandshakeFailed) as error:
                failure = error
                continue
            mismatch = self._mismatch_of(connection.identity)
            if connection.identity.node_id == node_id and not mismatch:
                return connection
            connection.writer.close()
            failure = OSError(mismatch or f"{host}:{port} is node {connection.identity.node_id}")
        raise failure

    def _on_failed(self, node_id: int, node: _Node, reason: str, wait_s: float) -> None:
        node.pending.clear()
        node.failure_count += 1
        node.next_try = time.monotonic() + wait_s
        if reason != node.logged_failure:
            node.logged_failure = reason
            log.warning(
                "a host cannot be reached",
                node=node_id,
                addresses=",".join(f"{host}:{port}" for host, port in node.addresses),
                reason=reason,
            )

    async def open(self, host: str, port: int, purpose: str) -> Connection:
        """Opens a connection and completes its handshake. Raises HandshakeFailed, OSError, EOFError,
        TimeoutError.
        """
        with malformed_name_as_oserror(host):
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            sent_identity = self._identity()
            side = self._credentials.initiator(purpose, sent_identity)
            writer.write(side.opening())
            await _run_handshake(side, reader, writer)
            assert side.peer is not None
            return Connection(
                side.peer, sent_identity, *await continue_with(self._credentials.tls(side), reader, writer)
            )
        except BaseException:
            writer.transport.abort()
            raise

    # -- receiving ---------------------------------------------------------------------------------

    async def listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener.dup(), limit=1 << 20)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._handshake_count >= HANDSHAKES_MAX or self._ended:
            writer.transport.abort()
            return
        self._tasks.add(task)
        self._handshake_count += 1
        side = self._credentials.responder(self._decide)
        streams: tuple[Reader, Writer] = reader, writer
        try:
            await _run_handshake(side, reader, writer)
            if side.refused is not None:
                self._log_refusal(side, writer, side.refused.message)
                await writer.drain()
            elif side.done:
                streams = await continue_with(self._credentials.tls(side), reader, writer)
        except (OSError, EOFError, TimeoutError, HandshakeFailed) as error:
            self._log_refusal(side, writer, reason_of(error))
            side.peer = None
        finally:
            self._handshake_count -= 1
        try:
            if side.peer is None:
                return
            self._refused_hosts.on_admitted(side.peer.identity.node_id)
            if side.peer.purpose == "controller":
                assert side.sent_identity is not None
                await self._receive(Connection(side.peer.identity, side.sent_identity, *streams))
            elif self._on_stream is not None:
                await self._on_stream(side.peer, *streams)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _log_refusal(self, side: handshake.Responder, writer: asyncio.StreamWriter, reason: str) -> None:
        """Logs a refusal; for an authenticated host only once for each reason."""
        if not self._refused_hosts.is_new(side.proven_node_id, reason):
            return
        peer_address = writer.get_extra_info("peername")
        log.warning(
            "a connection to the controller's listener was refused",
            address=f"{peer_address[0]}:{peer_address[1]}" if peer_address else "?",
            node=side.proven_node_id if side.proven_node_id is not None else "unproven",
            reason=reason,
        )

    async def _receive(self, connection: Connection) -> None:
        node_id = connection.identity.node_id
        if connection.sent_identity.cluster_id != self._identity().cluster_id:
            # this host has joined a cluster during the handshake, so the peer would ignore what
            # this host sends over this connection
            connection.writer.transport.abort()
            return
        self._on_connected(node_id, connection)
        try:
            while True:
                message = await connection.receive()
                if message is not None:
                    self._on_message(connection, message)
        except (OSError, EOFError):
            pass
        except peer_messages.PeerProtocolError as error:
            log.warning("a host sent an invalid message; disconnected", node=node_id, reason=str(error))
        finally:
            self._on_disconnected(node_id, connection)
            connection.writer.transport.abort()

    def _on_connected(self, node_id: int, connection: Connection) -> None:
        self.add_address(node_id, connection.identity.host, connection.identity.port)
        node = self._nodes.setdefault(node_id, _Node())
        node.connections.append(connection)
        if (
            node.current is None
            or not node.current.is_open
            or (
                node.current.identity.directory_id != connection.identity.directory_id
                and not self._is_voter(node.current.identity)
            )
        ):
            node.current = connection
        self._send_pending(node)
        if len(node.connections) > CONNECTIONS_PER_NODE_MAX:
            oldest = next(connection for connection in node.connections if connection is not node.current)
            oldest.writer.transport.abort()

    @staticmethod
    def _send_pending(node: _Node) -> None:
        while node.pending and node.current is not None and node.current.is_open:
            node.current.send(node.pending.popleft())

    def _on_disconnected(self, node_id: int, connection: Connection) -> None:
        node = self._nodes[node_id]
        node.connections.remove(connection)
        if node.current is connection:
            node.current = node.connections[-1] if node.connections else None
            self._send_pending(node)
            node.next_try = time.monotonic() + BACKOFF_S_MIN * self._random.uniform(0.5, 1.5)

    # -- the end -----------------------------------------------------------------------------------

    def drop(self, should_keep: Callable[[Identity], bool]) -> None:
        """Ends the connections to peers for which `should_keep` returns false."""
        for node in self._nodes.values():
            for connection in list(node.connections):
                if not should_keep(connection.identity):
                    connection.writer.transport.abort()

    async def flush(self, seconds: float = 1.0) -> None:
        """Waits until all sent data has left this process, or `seconds` have passed."""
        connected = [node.current for node in self._nodes.values() if node.current is not None and node.current.is_open]
        for connection in connected:
            connection.writer.transport.set_write_buffer_limits(0)
        drains = [connection.writer.drain() for connection in connected]
        if drains:
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*drains, return_exceptions=True)
            except TimeoutError:
                pass

    async def stop(self) -> None:
        self._ended = True
        if self._server is not None:
            self._server.close()
        self.drop(lambda identity: False)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.2)  # they end with their connections
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
