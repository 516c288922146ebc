"""Clients on this host: accepted on the client socket, identified, and handed to the worker that
serves the fewest of them.

    connect -> hello (struct mqd_local_hello), then
        refused here    struct mqd_local_welcome with the reason, and the connection is closed
        handed over     the worker creates the memory and sends the welcome

The checks here need no worker: the layout's version and hash, and that this broker listens at the
address where the client would connect over TCP (mqd/shm/rendezvous.py). The client's identity comes
from the kernel (SO_PEERCRED), not from the client. It is sent along with the socket, for the
worker's log and for every request that the worker passes back to the acceptor.

Hand-off packet, 64 bytes (struct mqd_local_handoff): magic, listener id 0xffff, flags 1, then data
bytes uint64, reply bytes, submission count, uid uint32, pid int32, client id 32 bytes,
NUL-terminated. The client's principal follows, if authorization is enabled (authorizer.class.name;
principals.py).

Bounds: HELLO_COUNT_MAX clients that have not sent a hello, each for HELLO_S; beyond that the oldest
is dropped. At most WAITING_COUNT_MAX clients wait for room in a worker's hand-off socket.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from mqd import native
from mqd.acceptor.accepting import BATCH_CONNECTIONS_MAX, MAGIC, PAUSE_S, accept_advice
from mqd.acceptor.broker_state import LISTENER_LOCAL
from mqd.acceptor.handoff import Handoff
from mqd.acceptor.local.principals import LocalPrincipals
from mqd.base import logging
from mqd.base.blocking_queries import in_thread
from mqd.shm.attach import peer_credentials

LAYOUT_MAGIC = 0x314C434F4C44514D  # MQD_LOCAL_MAGIC
LAYOUT_VERSION = 2  # MQD_LOCAL_LAYOUT_VERSION
HELLO = struct.Struct("<QIIQQII64s72s")
WELCOME = struct.Struct("<QQIi232s")
HANDOFF = struct.Struct("<IHHQIIIi32s")
FLAG_LOCAL = 1
HELLO_S = 5.0
HELLO_COUNT_MAX = 128
WAITING_COUNT_MAX = 64

log = logging.get("acceptor.local")
assert (HELLO.size, WELCOME.size, HANDOFF.size) == (176, 256, 64)


class Hello(NamedTuple):
    """The fields of struct mqd_local_hello that the acceptor reads."""

    submission_count: int
    data_bytes: int
    reply_bytes: int
    client_id: bytes
    # the address where the client would connect over TCP; "": the client was configured with the
    # socket path instead of an address
    server: str


def parse_hello(packet: bytes, abi_hash: int) -> Hello | str | None:
    """Returns the parsed hello; the reason for a refusal; or None if the client speaks another
    protocol.
    """
    if len(packet) < 16:
        return None
    magic, version = struct.unpack_from("<QI", packet)
    if magic != LAYOUT_MAGIC:
        return None
    if version != LAYOUT_VERSION:
        return (
            f"the client has layout version {version}, this broker {LAYOUT_VERSION}: install the same version of mqd"
            " for both, or connect over TCP"
        )
    if len(packet) != HELLO.size:
        return (
            f"the client's hello has {len(packet)} bytes, not {HELLO.size}: install the same version of mqd for both,"
            " or connect over TCP"
        )
    _, _, submission_count, client_hash, data_bytes, reply_bytes, _, client_id, server = HELLO.unpack(packet)
    if client_hash != abi_hash:
        return (
            "the client and this broker were built from different sources (their layouts differ): install the same"
            " version of mqd for both, or connect over TCP"
        )
    return Hello(
        submission_count,
        data_bytes,
        reply_bytes,
        client_id.split(b"\0")[0],
        server.split(b"\0")[0].decode(errors="replace"),
    )


def handoff_packet(hello: Hello, uid: int, pid: int, principal: str = "") -> bytes:
    return (
        HANDOFF.pack(
            MAGIC,
            LISTENER_LOCAL,
            FLAG_LOCAL,
            hello.data_bytes,
            hello.reply_bytes,
            hello.submission_count,
            uid & 0xFFFFFFFF,
            pid,
            hello.client_id[:31],
        )
        + principal.encode()
    )


def refuse(connection: socket.socket, error: int, reason: str) -> None:
    """Sends the reason and closes the connection."""
    try:
        connection.send(
            WELCOME.pack(LAYOUT_MAGIC, 0, 0, error, reason.encode()[:231]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        )
    except OSError:
        pass  # the client has gone already
    connection.close()


class LocalClients:
    """`listener` None: local clients are disabled. `attachment_count_of(worker)` and `is_running(worker)`
    come from the control segment. `servers`: the addresses that this broker listens on
    (rendezvous.server_name). `principals` None: clients have no principals.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        handoffs: Sequence[socket.socket],
        attachment_count_of: Callable[[int], int],
        is_running: Callable[[int], bool],
        servers: Collection[str],
        principals: LocalPrincipals | None = None,
    ) -> None:
        self._servers = servers
        self._principals = principals
        self._awaiting_principal: set[socket.socket] = set()  # their principals are being looked up
        self._listener = listener
        self._handoff = Handoff(handoffs, attachment_count_of, is_running)
        self._abi_hash = native.local_abi_hash()
        # connections without a hello yet, the oldest first
        self._awaiting_hello: dict[socket.socket, asyncio.TimerHandle] = {}
        self._waiting: deque[tuple[socket.socket, bytes]] = deque()  # no worker's hand-off socket had room
        self._retry_timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._listener is not None:
            self._listener.setblocking(False)
            loop.add_reader(self._listener.fileno(), self._on_readable, self._listener)

    def stop(self) -> None:
        """Clients that have not been handed over must reconnect."""
        if self._loop is None:
            return
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
        for connection in list(self._awaiting_hello):
            self._forget(connection)
            connection.close()
        for connection in [*self._awaiting_principal, *(waiting for waiting, _ in self._waiting)]:
            connection.close()
        self._awaiting_principal.clear()
        self._waiting.clear()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._loop = None

    # -- hello -------------------------------------------------------------------------------------

    def _on_readable(self, listener: socket.socket) -> None:
        assert self._loop is not None
        for _ in range(BATCH_CONNECTIONS_MAX):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EINVAL):
                    continue
                log.error(f"cannot accept local clients for now{accept_advice(error)}", reason=str(error))
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume, listener)
                return
            connection.setblocking(False)
            if len(self._awaiting_hello) >= HELLO_COUNT_MAX:
                self._drop(next(iter(self._awaiting_hello)), "too many clients have connected without sending a hello")
            self._awaiting_hello[connection] = self._loop.call_later(
                HELLO_S, self._drop, connection, f"no hello within {HELLO_S:.0f} s"
            )
            self._loop.add_reader(connection.fileno(), self._on_hello, connection)

    def _resume(self, listener: socket.socket) -> None:
        if self._loop is not None:
            self._loop.add_reader(listener.fileno(), self._on_readable, listener)

    def _forget(self, connection: socket.socket) -> None:
        assert self._loop is not None
        self._awaiting_hello.pop(connection).cancel()
        self._loop.remove_reader(connection.fileno())

    def _drop(self, connection: socket.socket, reason: str) -> None:
        log.warning("a local client was dropped", reason=reason, pid=peer_credentials(connection)[0])
        self._forget(connection)
        connection.close()

    def _on_hello(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(4096)  # the kernel closes descriptors that come with it
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        self._forget(connection)
        if not packet:
            connection.close()  # the client only probed for a listener
            return
        pid, uid = peer_credentials(connection)
        hello = parse_hello(packet, self._abi_hash)
        if isinstance(hello, Hello) and (not hello.server or hello.server in self._servers):
            self._find_principal(connection, hello, uid, pid)
            return
        elif isinstance(hello, Hello):
            reason = (
                f"this broker does not listen on {hello.server}, the address that the client is configured with (a"
                " broker in another network namespace may have the same socket path); the client uses TCP"
            )
            refuse(connection, native.E_STALE, reason)
        elif hello is not None:
            reason = hello
            refuse(connection, native.E_LAYOUT, reason)
        else:
            reason = "its first packet is not the hello of an mqd client"
            connection.close()
        log.warning("a local client was refused", pid=pid, uid=uid, reason=reason)

    def _find_principal(self, connection: socket.socket, hello: Hello, uid: int, pid: int) -> None:
        principals = self._principals
        if principals is None or principals.is_resolved(uid):
            principal = "" if principals is None else principals.find(uid)
            self._on_principal(connection, hello, uid, pid, principal)
            return
        if len(self._awaiting_principal) >= HELLO_COUNT_MAX:
            refuse(connection, native.E_FULL, "the principals of too many clients are being looked up; try again")
            return
        try:
            lookup = in_thread(partial(principals.find, uid))
        except RuntimeError as error:
            refuse(connection, native.E_FULL, f"the client's principal cannot be looked up: {error}")
            return
        self._awaiting_principal.add(connection)
        lookup.add_done_callback(partial(self._on_lookup_ended, connection, hello, uid, pid))

    def _on_lookup_ended(
        self, connection: socket.socket, hello: Hello, uid: int, pid: int, lookup: asyncio.Future[str | None]
    ) -> None:
        if connection in self._awaiting_principal:  # otherwise the acceptor has stopped
            self._awaiting_principal.discard(connection)
            self._on_principal(connection, hello, uid, pid, lookup.result())

    def _on_principal(self, connection: socket.socket, hello: Hello, uid: int, pid: int, principal: str | None) -> None:
        if principal is not None:
            self._hand_over(connection, handoff_packet(hello, uid, pid, principal))
            return
        reason = (
            f"user id {uid} has no principal here: it has no login name, no rule of local.principal.mapping.rules"
            " applies to it, or it is a super user, who must authenticate; use TCP"
        )
        refuse(connection, native.E_INVALID, reason)
        log.warning("a local client was refused", pid=pid, uid=uid, reason=reason)

    # -- handing over ------------------------------------------------------------------------------

    def _hand_over(self, connection: socket.socket, message: bytes) -> None:
        if not self._waiting and self._handoff.send(connection, message):
            return
        if len(self._waiting) >= WAITING_COUNT_MAX:
            refuse(
                connection,
                native.E_FULL,
                "the workers are too busy to take another client; try again, or connect over TCP",
            )
            return
        self._waiting.append((connection, message))
        self._try_later()

    def _try_later(self) -> None:
        if self._retry_timer is None and self._loop is not None:
            self._retry_timer = self._loop.call_later(PAUSE_S, self._hand_over_waiting)

    def _hand_over_waiting(self) -> None:
        self._retry_timer = None
        while self._waiting and self._handoff.send(*self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._try_later()
