"""Connections to the workers of other hosts, mutually authenticated
(mqd/cluster/membership/handshake.py) before any other byte is read. If both sides use TLS, the
reactor starts TLS with the next byte.

Concurrency: the event loop's thread.
"""

import asyncio
import socket
from typing import NamedTuple

from mqd.base.host_names import malformed_name_as_oserror
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import HandshakeFailed, Identity

LOST_MS_MAX = 10_000  # the kernel disconnects a peer that acknowledges no bytes for this long


class DialledConnection(NamedTuple):
    socket: socket.socket  # non-blocking; no byte beyond the handshake has been read
    tls: bool  # the reactor continues it with TLS


async def dial(
    credentials: Credentials, identity: Identity, host: str, port: int, node_id: int, worker: int, timeout_s: float
) -> DialledConnection:
    """Connects to `worker` of the host `node_id`. Raises OSError (including TimeoutError),
    EOFError, HandshakeFailed.
    """
    loop = asyncio.get_running_loop()
    connection: socket.socket | None = None
    done = False
    try:
        async with asyncio.timeout(timeout_s):
            with malformed_name_as_oserror(host):
                family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            connection = socket.socket(family, kind, protocol)
            _set_options(connection)
            await loop.sock_connect(connection, address)
            initiator = credentials.initiator("data", identity, worker)
            await loop.sock_sendall(connection, initiator.opening())
            while initiator.missing_bytes:
                data = await loop.sock_recv(connection, initiator.missing_bytes)
                if not data:
                    raise EOFError("the leader closed the connection in the handshake")
                if reply := initiator.feed(data):
                    await loop.sock_sendall(connection, reply)
        if initiator.peer is None or initiator.peer.node_id != node_id:
            raise HandshakeFailed(f"{host}:{port} is not host {node_id}")
        done = True
        return DialledConnection(connection, initiator.uses_tls)
    finally:
        if connection is not None and not done:
            connection.close()


def _set_options(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS_MAX)
