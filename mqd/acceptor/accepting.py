"""Accepts connections and hands each to the worker that has the fewest.

Each descriptor is sent with one packet of 64 bytes (little-endian): magic "ONC1" uint32, listener
id uint16, flags uint16 (1: a local client, then the rest is as in mqd/acceptor/local/clients.py),
peer address 16 bytes, peer port uint16, local port uint16, local address 16 bytes, 4 bytes of padding,
the connection limits of the address and of the listener (uint32 each, 0: no limit), padding.
IPv4 addresses are mapped (::ffff:a.b.c.d).

No accepted connection is dropped, except by limits (connection_limits.py): when every hand-off
socket is full, at most BATCH_CONNECTIONS_MAX connections wait here and accepting pauses; clients
then wait in the kernel's queue. When accept fails because descriptors run out (EMFILE) or for
another local reason, accepting pauses for PAUSE_S; existing connections continue.
"""

import asyncio
import errno
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from mqd.acceptor.connection_limits import NO_LIMIT, ConnectionLimits
from mqd.acceptor.handoff import Handoff
from mqd.base import logging
from mqd.base.host_names import packed_ip

MAGIC = 0x31434E4F
PACKET = struct.Struct("<IHH16sHH16s4xII8x")
BATCH_CONNECTIONS_MAX = 64  # accepted per event; as many may wait for a worker
PAUSE_S = 0.1
# Connections of addresses that connect too fast are held for a moment, then closed. At most this
# many are held; further ones are closed immediately.
DELAYED_COUNT_MAX = 1024
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# The client left before it was served, or the new connection has a network error: see accept(2).
# EOPNOTSUPP is listed there too, but pauses accepting: it can also mean that the listener
# cannot accept connections at all.
_CONNECTION_GONE = (
    *(errno.ECONNABORTED, errno.EPROTO, errno.ENOTCONN, errno.EINVAL, errno.ECONNRESET),
    *(errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH, errno.ENETUNREACH),
)

log = logging.get("acceptor.accepting")
assert PACKET.size == 64


def packet(
    listener_id: int,
    peer_ip: bytes,
    peer_port: int,
    local_address: tuple,
    address_limit: int = 0,
    listener_limit: int = 0,
) -> bytes:
    local_ip = packed_ip(local_address[0])
    return PACKET.pack(
        MAGIC, listener_id, 0, peer_ip, peer_port, local_address[1], local_ip, address_limit, listener_limit
    )


def accept_advice(error: OSError) -> str:
    """What the operator can do if accept() fails with `error`; "" if no remedy is known."""
    return "; raise the limit of open files (ulimit -n)" if error.errno in _OUT_OF_DESCRIPTORS else ""


class Acceptor:
    """`connection_count_of(worker)` and `is_running(worker)` come from the control segment."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handoffs: Sequence[socket.socket],
        connection_count_of: Callable[[int], int],
        is_running: Callable[[int], bool],
        limits: ConnectionLimits,
    ) -> None:
        self._listeners = listeners
        self._limits = limits
        self._paused_listeners: set[int] = set()  # listeners that exceed their connection rate
        self._delayed: set[socket.socket] = set()
        self._handoff = Handoff(handoffs, connection_count_of, is_running)
        self._waiting: deque[tuple[socket.socket, bytes]] = deque()  # accepted; no worker had room
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused = True
        self._watched: set[int] = set()  # workers whose hand-off sockets are watched for room
        self.accepted_count = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for listener in self._listeners:
            listener.setblocking(False)
        for handoff in self._handoff.sockets:
            handoff.setblocking(False)
        self._resume()

    def stop(self) -> None:
        """Connections not yet accepted stay in the kernel's queue, for the next acceptor."""
        self._pause()
        for worker in list(self._watched):
            self._unwatch(worker)
        for connection in [*(connection for connection, _ in self._waiting), *self._delayed]:
            connection.close()
        self._waiting.clear()
        self._delayed.clear()

    def _resume(self) -> None:
        if self._paused and self._loop is not None:
            self._paused = False
            for listener_id in set(range(len(self._listeners))) - self._paused_listeners:
                self._listen(listener_id)

    def _listen(self, listener_id: int) -> None:
        assert self._loop is not None
        listener = self._listeners[listener_id]
        self._loop.add_reader(listener.fileno(), self._on_readable, listener_id, listener)

    def _pause(self) -> None:
        if not self._paused and self._loop is not None:
            self._paused = True
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())

    # -- accepting ---------------------------------------------------------------------------------

    def _on_readable(self, listener_id: int, listener: socket.socket) -> None:
        for _ in range(BATCH_CONNECTIONS_MAX):
            if self._paused:
                return
            now_ns = time.monotonic_ns()
            wait_s = self._limits.wait_s(listener_id, now_ns)
            if wait_s:
                self._pause_listener(listener_id, wait_s)
                return
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _CONNECTION_GONE:
                    continue
                self._pause_after_error(error)
                return
            self._limits.on_accepted(listener_id, now_ns)
            address = packed_ip(peer[0])
            delay_s = self._limits.address_delay_s(address, now_ns)
            if delay_s:
                self._close_later(connection, delay_s)
            else:
                self._take(connection, listener_id, address, peer[1])

    def _pause_listener(self, listener_id: int, wait_s: float) -> None:
        assert self._loop is not None
        self._paused_listeners.add(listener_id)
        self._loop.remove_reader(self._listeners[listener_id].fileno())
        self._loop.call_later(wait_s, self._resume_listener, listener_id)

    def _resume_listener(self, listener_id: int) -> None:
        self._paused_listeners.discard(listener_id)
        if not self._paused:
            self._listen(listener_id)

    def _close_later(self, connection: socket.socket, delay_s: float) -> None:
        """Delays the close: otherwise the client would reconnect immediately."""
        if len(self._delayed) >= DELAYED_COUNT_MAX:
            connection.close()
            return
        assert self._loop is not None
        self._delayed.add(connection)
        self._loop.call_later(delay_s, self._close_delayed, connection)

    def _close_delayed(self, connection: socket.socket) -> None:
        self._delayed.discard(connection)
        connection.close()

    def _pause_after_error(self, error: OSError) -> None:
        """The connection stays in the kernel's queue, so the listener would be readable again at once."""
        log.error(f"cannot accept connections for now{accept_advice(error)}", reason=str(error))
        self._pause()
        assert self._loop is not None
        self._loop.call_later(PAUSE_S, self._resume_unless_full)

    def _take(self, connection: socket.socket, listener_id: int, address: bytes, port: int) -> None:
        address_limit = self._limits.address_limit(address)
        if not address_limit:
            connection.close()
            return
        address_limit = 0 if address_limit == NO_LIMIT else address_limit
        listener_limit = self._limits.listener_limits[listener_id]
        try:
            # O_NONBLOCK stays set in the worker, whose sendfile must never block on a client that
            # does not read.
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            message = packet(listener_id, address, port, connection.getsockname(), address_limit, listener_limit)
        except OSError:
            connection.close()  # the client has reset it in the meantime
            return
        self.hand_over(connection, message)

    def hand_over(self, connection: socket.socket, message: bytes) -> None:
        """Passes the connection to a worker, now or when one has room. Takes ownership of the socket."""
        self.accepted_count += 1
        if self._waiting or not self._handoff.send(connection, message):
            self._waiting.append((connection, message))
            if len(self._waiting) >= BATCH_CONNECTIONS_MAX:
                self._pause()
            self._watch_for_room()

    def _watch_for_room(self) -> None:
        assert self._loop is not None
        for worker, handoff in enumerate(self._handoff.sockets):
            if worker not in self._watched:
                self._watched.add(worker)
                self._loop.add_writer(handoff.fileno(), self._on_writable, worker)

    def _unwatch(self, worker: int) -> None:
        assert self._loop is not None
        self._watched.discard(worker)
        self._loop.remove_writer(self._handoff.sockets[worker].fileno())

    def _on_writable(self, worker: int) -> None:
        waiting_before = len(self._waiting)
        self._hand_over_waiting()
        # The hand-off socket is writable, yet nothing can be sent: the cause is not a full buffer, so
        # the event would fire again immediately.
        if len(self._waiting) == waiting_before:
            for watched_worker in list(self._watched):
                self._unwatch(watched_worker)
            assert self._loop is not None
            self._loop.call_later(PAUSE_S, self._hand_over_waiting)

    def _hand_over_waiting(self) -> None:
        while self._waiting and self._handoff.send(*self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._watch_for_room()
        else:
            for watched_worker in list(self._watched):
                self._unwatch(watched_worker)
        self._resume_unless_full()

    def _resume_unless_full(self) -> None:
        if len(self._waiting) < BATCH_CONNECTIONS_MAX:
            self._resume()
