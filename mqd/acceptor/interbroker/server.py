"""The inter-broker listener: connections of other hosts' workers go to the worker that they name;
those of other hosts' acceptors are served here.

    accept -> handshake (mqd/cluster/membership/handshake.py), both sides authenticated, then
        hello.worker >= 0    handed to that worker, with the peer's node id (flag 2 of the hand-off
                             packet) and, if both hosts support TLS, flag 4: the worker begins TLS
        hello.worker == -1   TLS, if both hosts support it (host_tls.py), then Kafka frames, only of
                             the APIs in SERVED_APIS, and Envelopes of clients' requests (local/relay.py)

Transaction markers from a host are accepted only from the newest of its connections that have sent
markers: an older connection was abandoned, or its acceptor has died. The older one is closed before
the newer one's markers are served, and nothing from it is served afterwards. Otherwise a marker
delayed by the network could arrive after a marker of the newer connection, and end the producer's
next transaction.

No input is read as a request before the peer has proven that it holds the cluster's key. These are
refused: another cluster, a node id that is not registered (as far as this host knows), a directory
id that differs from the registered one (a wiped host is a different host), and a worker that does
not exist.

Bounds: HANDSHAKES_MAX in progress, further ones are closed immediately; FRAME_BYTES_MAX per
request; IN_FLIGHT_MAX requests per connection. Concurrency: the event loop's thread.
"""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence

from mqd.acceptor.accepting import MAGIC
from mqd.acceptor.interbroker.channel import Channel, authenticate, set_socket_options
from mqd.acceptor.metadata import Metadata
from mqd.base import logging
from mqd.base.host_names import packed_ip
from mqd.cluster.membership import handshake
from mqd.cluster.membership.credentials import Credentials, RefusedHosts
from mqd.cluster.membership.handshake import HandshakeFailed, Hello, Identity, Refusal

HANDSHAKES_MAX = 64
IN_FLIGHT_MAX = 4096  # this many, because the members of a group wait for each other in JoinGroup
BATCH_CONNECTIONS_MAX = 64  # connections accepted in one pass
PAUSE_S = 0.1
FLAG_PEER, FLAG_TLS = 2, 4
PACKET = struct.Struct("<IHH16sHH16si16x")
ACCEPTOR = -1  # hello.worker: the connection is not for a worker
# ListOffsets, AddPartitionsToTxn, EndTxn, WriteTxnMarkers, DescribeProducers, ListTransactions
SERVED_APIS = frozenset((2, 24, 26, 27, 61, 66))
MARKERS_PREFIX = (27).to_bytes(2, "big")  # first bytes of a WriteTxnMarkers

log = logging.get("acceptor.between")
assert PACKET.size == 64

# (frame, node id of the peer) -> the response's frame; None: no response, the connection ends
Serve = Callable[[bytes, int], Awaitable[bytes | None]]


def own_identity(metadata: Metadata, node_id: int) -> Identity | None:
    """This host's identity as its peers know it; None before it is registered."""
    registration = metadata.brokers.get(node_id)
    if registration is None or not metadata.cluster_id:
        return None
    return Identity(node_id, registration.directory_id, metadata.cluster_id)


def admission(hello: Hello, metadata: Metadata, node_id: int, worker_count: int) -> Identity | Refusal:
    """Decides whether a host that holds the cluster's key may connect: returns this host's identity,
    or the refusal.
    """
    identity = own_identity(metadata, node_id)
    peer = metadata.brokers.get(hello.identity.node_id)
    if hello.purpose != "data":
        return Refusal(
            handshake.REFUSED_PURPOSE,
            f"this is the inter-broker listener; {hello.purpose} belongs on controller.listener",
        )
    if identity is None:
        return Refusal(handshake.REFUSED_BUSY, f"host {node_id} is not part of a cluster yet")
    if hello.identity.cluster_id != identity.cluster_id:
        return Refusal(
            handshake.REFUSED_CLUSTER,
            f"host {node_id} belongs to cluster {identity.cluster_id}, not to {hello.identity.cluster_id or 'none'}",
        )
    if hello.identity.node_id == node_id:
        return Refusal(handshake.REFUSED_IDENTITY, f"node id {node_id} is this host's own")
    if peer is None:
        return Refusal(handshake.REFUSED_BUSY, f"host {node_id} has no registration of node {hello.identity.node_id}")
    if peer.directory_id and hello.identity.directory_id and peer.directory_id != hello.identity.directory_id:
        return Refusal(handshake.REFUSED_IDENTITY, f"node {peer.node_id} is registered with another metadata directory")
    if not ACCEPTOR <= hello.worker < worker_count:
        return Refusal(
            handshake.REFUSED_WORKER, f"host {node_id} has {worker_count} workers; there is no worker {hello.worker}"
        )
    return identity


class InterbrokerServer:
    """`serve`: answers requests of other hosts' acceptors."""

    def __init__(
        self,
        listener: socket.socket,
        handoffs: Sequence[socket.socket],
        credentials: Credentials,
        metadata: Metadata,
        node_id: int,
        serve: Serve,
    ) -> None:
        self._listener = listener
        self._handoffs = handoffs
        self._credentials = credentials
        self._refused_hosts = RefusedHosts()
        self._metadata = metadata
        self._node_id = node_id
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        # numbers the connections in the order of their authentication
        self._connection_numbers = itertools.count(1)
        # node id -> the newest connection that has sent markers
        self._marker_connections: dict[int, tuple[int, asyncio.Task[None]]] = {}
        self._handshake_count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listener.setblocking(False)
        loop.add_reader(self._listener.fileno(), self._on_readable)

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._loop = None
        for task in self._tasks:
            task.cancel()

    # -- accepting ---------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        assert self._loop is not None
        for _ in range(BATCH_CONNECTIONS_MAX):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("a connection from another host cannot be accepted for now", reason=str(error))
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume_accepting)
                return
            if self._handshake_count >= HANDSHAKES_MAX:
                connection.close()
                continue
            self._handshake_count += 1
            task = self._loop.create_task(self._serve_connection(connection, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resume_accepting(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._listener.fileno(), self._on_readable)

    async def _serve_connection(self, connection: socket.socket, address: tuple) -> None:
        in_handshake = True
        side = self._credentials.responder(self._decide)
        try:
            set_socket_options(connection)
            await authenticate(side, connection)
            if not side.done:
                if side.refused is not None and self._refused_hosts.is_new(side.proven_node_id, side.refused.message):
                    log.info(
                        "another host's connection is refused",
                        node=side.proven_node_id,
                        address=address[0],
                        reason=side.refused.message,
                    )
                return
            hello = side.peer
            assert hello is not None
            if hello.worker >= 0:
                self._hand_over(connection, hello, address, side.uses_tls)
                return
            channel = Channel(connection, self._credentials.tls(side))
            await channel.begin()
            self._refused_hosts.on_admitted(hello.identity.node_id)
            self._handshake_count -= 1
            in_handshake = False
            await self._respond_all(channel, hello.identity.node_id)
        except HandshakeFailed as error:
            if self._refused_hosts.is_new(side.proven_node_id, str(error)):
                log.warning(
                    "a connection to the inter-broker listener is closed",
                    node=side.proven_node_id if side.proven_node_id is not None else "unproven",
                    address=address[0],
                    reason=str(error),
                )
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            log.debug(
                "a connection from another host ended", address=address[0], reason=str(error) or type(error).__name__
            )
        finally:
            self._handshake_count -= in_handshake
            connection.close()  # a worker has its own copy

    def _decide(self, hello: Hello) -> Identity | Refusal:
        return admission(hello, self._metadata, self._node_id, len(self._handoffs))

    def _hand_over(self, connection: socket.socket, hello: Hello, address: tuple, tls: bool) -> None:
        """Hands the connection over immediately; if the worker's socket is full, the peer reconnects."""
        local = connection.getsockname()
        packet = PACKET.pack(
            MAGIC,
            0,
            FLAG_PEER | FLAG_TLS * tls,
            packed_ip(address[0]),
            address[1],
            local[1],
            packed_ip(local[0]),
            hello.identity.node_id,
        )
        try:
            socket.send_fds(
                self._handoffs[hello.worker], [packet], [connection.fileno()], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except OSError as error:
            log.warning(
                "another host's connection cannot be passed to a worker",
                worker=hello.worker,
                node=hello.identity.node_id,
                reason=str(error),
            )

    # -- serving -----------------------------------------------------------------------------------

    async def _respond_all(self, channel: Channel, node: int) -> None:
        """Answers requests until the connection ends. The handlers run concurrently: a marker that waits
        for its partition does not delay other requests. Responses are matched by correlation id.
        """
        assert self._loop is not None
        connection = channel.socket
        number = next(self._connection_numbers)
        write_lock, slots = asyncio.Lock(), asyncio.Semaphore(IN_FLIGHT_MAX)
        under_way: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        async def respond(frame: bytes) -> None:
            try:
                response = await self._serve(frame, node)
                if response is None:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                async with write_lock:
                    await loop.sock_sendall(connection, channel.to_wire(len(response).to_bytes(4, "big") + response))
            except OSError:
                pass  # the peer is gone; it retries elsewhere
            except Exception:
                log.exception("no response to another host's request can be sent; the connection is closed", node=node)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                slots.release()

        try:
            while (frame := await channel.read_frame()) is not None:
                if frame.startswith(MARKERS_PREFIX) and not await self._admit_markers(node, number):
                    return
                await slots.acquire()
                task = loop.create_task(respond(frame))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _admit_markers(self, node: int, number: int) -> bool:
        """Returns False if a connection of this node newer than connection `number` has sent markers.
        Otherwise closes any older connection that has sent markers, and returns True.
        """
        newest, task = self._marker_connections.get(node, (0, None))
        if number > newest:
            current_task = asyncio.current_task()
            assert current_task is not None
            self._marker_connections[node] = number, current_task
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        return number >= newest
