"""The HTTP server of the metrics page and the health checks: one thread, at most CONNECTIONS_MAX
connections, GET /metrics, /health/live, /health/ready and nothing else.

Any local user can connect, so no client, active or idle, may cost the acceptor more than these
bounds:

M1  at most CONNECTIONS_MAX descriptors. When all are taken, a new connection evicts the one that
    has been idle the longest (at least GRACE_S, which also bounds the rate of accepted
    connections). A scraper that sends its request immediately gets a response even if others stay
    silent.
M2  a connection is closed if its request is not complete REQUEST_S after the accept, if the page is
    not ready RENDER_S after that, or if its client has not read the page RESPONSE_S after that.
M3  the page is rendered by one thread at a time, for all requests that arrive before it is done.
    Each rendering is followed by a pause: PAUSE_FACTOR times the CPU time that it took, and at
    least PAUSE_MIN_S. So rendering never takes more than a quarter of a CPU. A scrape that arrives sooner waits,
    so a response is never older than the duration of one rendering.
M4  a request is at most REQUEST_BYTES_MAX; a TLS handshake is part of the request's time.
M5  if a token is configured, a request without it gets only an error; /health needs no token,
    because probes have none.
M6  a health check is decided by the acceptor's loop; a check that it does not decide within
    HEALTH_S fails.

Concurrency: one thread. The rendering thread hands over its page in `_rendered`, the acceptor's loop
hands over its decisions in `_decisions`; both then wake this thread through the eventfd.
"""

import contextlib
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from mqd.acceptor.metrics.health import LIVE, READY
from mqd.base import logging
from mqd.base.listeners import Listener

CONNECTIONS_MAX = 64
BACKLOG = 128
GRACE_S = 0.1
REQUEST_S = 5.0
RENDER_S = 30.0
RESPONSE_S = 10.0
HEALTH_S = 5.0
PAUSE_MIN_S = 0.1
PAUSE_FACTOR = 3
REQUEST_BYTES_MAX = 8192
SEND_BUFFER_BYTES = 256 << 10
ACCEPT_PAUSE_S = 0.1  # after an accept failed for lack of descriptors or memory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
log = logging.get("acceptor.metrics")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8", headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{headers}Connection:"
        " close\r\n\r\n"
    )
    return head.encode() + body


PAGE = "/metrics"
_PATHS = {path.encode(): path for path in (PAGE, LIVE, READY)}
_NOT_FOUND = _response("404 Not Found", b"only /metrics, /health/live and /health/ready exist\n")
_NOT_ALLOWED = _response("405 Method Not Allowed", b"only GET is supported\n", headers="Allow: GET\r\n")
_NO_TOKEN = _response(
    "401 Unauthorized", b"the request lacks the token of metrics.token.file\n", headers="WWW-Authenticate: Bearer\r\n"
)
_HTTPS_EXPECTED = _response("400 Bad Request", b"this port expects https\n")
_TLS_HANDSHAKE = 0x16  # the first byte
_BAD_REQUEST = _response("400 Bad Request", b"this is not an HTTP request\n")
_TOO_LARGE = _response("431 Request Header Fields Too Large", b"the request is too large\n")
_HEALTHY = _response("200 OK", b"ok\n")
_UNRESPONSIVE = _response("503 Service Unavailable", b"the acceptor does not respond\n")
_FAILED = _response("500 Internal Server Error", b"the metrics cannot be rendered; the acceptor's log says why\n")


class _Token(Protocol):
    def permits(self, request: bytes) -> bool: ...


class _Tls(Protocol):
    def current(self) -> ssl.SSLContext: ...


class HealthChecks(Protocol):
    """How the acceptor decides health checks."""

    def check(self, path: str, on_decided: Callable[[list[str]], None]) -> None:
        """Calls `on_decided` in the acceptor's thread with the faults, one line each."""


class _Client:
    """`to_send` None: the request is incomplete, or the response for `awaited_path` is not ready
    yet. `progress_s`: the time of the last receive or send. Times are time.monotonic().
    """

    __slots__ = (
        "deadline_s",
        "events",
        "progress_s",
        "received",
        "is_in_handshake",
        "socket",
        "to_send",
        "awaited_path",
    )

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.received = b""
        self.events = selectors.EVENT_READ
        self.is_in_handshake = False  # a TLS handshake that is not complete
        self.awaited_path = ""
        self.to_send: memoryview | None = None
        self.progress_s = now
        self.deadline_s = now + REQUEST_S


def route(received: bytes, token: _Token | None = None) -> bytes | str | None:
    """Returns the requested path if it is served here, or else the complete error response; None
    while the request is incomplete.
    """
    if received[:1] == bytes([_TLS_HANDSHAKE]):
        return _BAD_REQUEST  # a TLS handshake, in which no end of a request would ever be found
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return _TOO_LARGE if len(received) > REQUEST_BYTES_MAX else None
    words = received[: received.index(b"\r\n")].split(b" ")
    path = _PATHS.get(words[1].partition(b"?")[0]) if len(words) == 3 else None
    if token is not None and path not in (LIVE, READY) and not token.permits(received[:end]):
        return _NO_TOKEN
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _BAD_REQUEST
    if words[0] != b"GET":
        return _NOT_ALLOWED
    return _NOT_FOUND if path is None else path


class MetricsServer:
    """`render()` returns the page's text. It is called in a thread of its own; it may take long, and
    may raise.
    """

    def __init__(
        self,
        listener: socket.socket,
        render: Callable[[], bytes],
        checks: HealthChecks,
        token: _Token | None = None,
        tls: _Tls | None = None,
    ) -> None:
        self._listener = listener
        self._checks = checks
        self._decisions: deque[tuple[_Client, list[str]]] = deque()
        self._token, self._tls = token, tls
        self._render = render
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._accepting_from_s = 0.0  # when to begin accepting (again); inf: it is accepting
        self._render_from_s = float("inf")  # inf: not requested
        self._paused_until_s = 0.0  # after a rendering
        self._is_rendering = False
        self._rendered: bytes | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False

    @property
    def connection_count(self) -> int:
        return len(self._clients)

    def start(self) -> None:
        """Starts the server's thread. It ends with the process, or after stop()."""
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)

    # -- the loop ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._run()
        except Exception:
            log.exception("the metrics port is no longer served")
        finally:
            for client in list(self._clients):
                self._close(client)
            self._selector.close()
            self._listener.close()

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        while not self._is_stopping:
            now = time.monotonic()
            for client in [client for client in self._clients if client.deadline_s <= now]:
                if client.awaited_path in (LIVE, READY):
                    self._respond(client, _UNRESPONSIVE)
                else:
                    self._close(client)
            if self._accepting_from_s <= now:
                self._accepting_from_s = float("inf")
                self._selector.register(self._listener, selectors.EVENT_READ)
            if self._render_from_s <= now and not self._is_rendering:
                self._begin_rendering()
            due_s = min(self._accepting_from_s, self._render_from_s, *(client.deadline_s for client in self._clients))
            for key, _ in self._selector.select(None if due_s == float("inf") else max(0.0, due_s - now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    self._on_wake()
                elif key.data in self._clients:  # otherwise another connection has evicted it in this turn
                    self._on_client(key.data)

    def _accept(self) -> None:
        while True:
            now = time.monotonic()
            if len(self._clients) >= CONNECTIONS_MAX:
                oldest = min(self._clients, key=lambda client: client.progress_s)
                if oldest.progress_s + GRACE_S > now:
                    self._pause(oldest.progress_s + GRACE_S)
                    return
                if not self._has_pending_connection():
                    return
                self._close(oldest)
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                log.warning("the metrics port cannot accept connections for now", reason=str(error))
                self._pause(now + ACCEPT_PAUSE_S)
                return
            self._admit(connection, now)

    def _admit(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # reset in the meantime; the read reports it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        client = _Client(connection, now)
        try:
            self._selector.register(connection, selectors.EVENT_READ, client)
        except OSError:  # fs.epoll.max_user_watches
            connection.close()
            return
        self._clients.add(client)
        self._on_client(client)  # most requests are already complete

    def _has_pending_connection(self) -> bool:
        """Whether a connection waits to be accepted: an idle one is closed only then."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        return bool(poll.poll(0))

    def _pause(self, until_s: float) -> None:
        self._selector.unregister(self._listener)
        self._accepting_from_s = until_s

    def _close(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _watch(self, client: _Client, events: int) -> None:
        if client.events != events:
            client.events = events
            self._selector.modify(client.socket, events, client)

    # -- one connection ----------------------------------------------------------------------------

    def _on_client(self, client: _Client) -> None:
        try:
            if client.to_send is not None:
                self._send(client)
            elif self._tls is None or self._continue_handshake(client, self._tls):
                self._receive(client)
        except ssl.SSLWantReadError:
            self._watch(client, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(client, selectors.EVENT_WRITE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(client)

    def _continue_handshake(self, client: _Client, tls: _Tls) -> bool:
        """Continues the TLS handshake. Returns whether it is complete."""
        if not isinstance(client.socket, ssl.SSLSocket):
            first = client.socket.recv(1, socket.MSG_PEEK)
            if not first:
                self._close(client)
                return False
            if first[0] != _TLS_HANDSHAKE:
                client.socket.recv(REQUEST_BYTES_MAX)  # closing with unread bytes would reset the connection
                self._begin_response(client, _HTTPS_EXPECTED)
                return False
            if not self._wrap(client, tls):
                return False
        if client.is_in_handshake:
            assert isinstance(client.socket, ssl.SSLSocket)
            client.socket.do_handshake()
            client.is_in_handshake = False
            self._watch(client, selectors.EVENT_READ)
        return True

    def _wrap(self, client: _Client, tls: _Tls) -> bool:
        """Returns False if the client has reset the connection: wrap_socket() has then failed, and has
        already closed the socket.
        """
        self._selector.unregister(client.socket)
        try:
            client.socket = tls.current().wrap_socket(
                client.socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
            self._selector.register(client.socket, client.events, client)
        except (OSError, ValueError):
            self._clients.discard(client)
            client.socket.close()
            return False
        client.is_in_handshake = True
        return True

    def _receive(self, client: _Client) -> None:
        data = client.socket.recv(REQUEST_BYTES_MAX)
        if not data or client.awaited_path:  # it has disconnected, or has sent more than one request
            self._close(client)
            return
        client.received += data
        client.progress_s = time.monotonic()
        routed = route(client.received, self._token)
        if routed is None:
            if isinstance(client.socket, ssl.SSLSocket) and client.socket.pending():
                self._receive(client)
            return
        if routed is _NO_TOKEN:
            log.warning("a request for the metrics lacks the token")
        client.received = b""
        if isinstance(routed, bytes):
            self._begin_response(client, routed)
            return
        client.awaited_path = routed
        client.deadline_s = client.progress_s + (RENDER_S if routed == PAGE else HEALTH_S)
        if routed != PAGE:
            self._checks.check(routed, partial(self._on_decided, client))
        elif not self._is_rendering:
            self._render_from_s = max(client.progress_s, self._paused_until_s)

    def _on_decided(self, client: _Client, faults: list[str]) -> None:
        """Called in the acceptor's thread."""
        self._decisions.append((client, faults))
        os.eventfd_write(self._wake, 1)

    def _begin_response(self, client: _Client, response: bytes) -> None:
        client.awaited_path = ""
        client.to_send = memoryview(response)
        client.progress_s = time.monotonic()
        client.deadline_s = client.progress_s + RESPONSE_S
        self._watch(client, selectors.EVENT_WRITE)
        self._send(client)

    def _send(self, client: _Client) -> None:
        assert client.to_send is not None
        client.to_send = client.to_send[client.socket.send(client.to_send) :]
        client.progress_s = time.monotonic()
        if not client.to_send:
            if isinstance(client.socket, ssl.SSLSocket):
                with contextlib.suppress(OSError, ValueError):
                    client.socket.unwrap()  # sends close_notify; the client's is not awaited
            self._close(client)

    # -- the page ----------------------------------------------------------------------------------

    def _begin_rendering(self) -> None:
        self._is_rendering, self._render_from_s = True, float("inf")
        try:
            threading.Thread(target=self._render_page, name="metrics-page", daemon=True).start()
        except RuntimeError:  # no thread is available
            self._hand_over(_FAILED)

    def _render_page(self) -> None:
        try:
            page = _response("200 OK", self._render(), CONTENT_TYPE)
        except Exception:
            log.exception("the metrics cannot be rendered")
            page = _FAILED
        self._hand_over(page, time.thread_time())

    def _hand_over(self, page: bytes, cpu_s: float = 0.0) -> None:
        self._paused_until_s = time.monotonic() + max(PAUSE_MIN_S, PAUSE_FACTOR * cpu_s)
        self._rendered = page
        os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._decisions:
            client, faults = self._decisions.popleft()
            if client in self._clients and client.awaited_path:  # else it has disconnected, or HEALTH_S is over
                body = "".join(f"{fault}\n" for fault in faults).encode()
                self._respond(client, _response("503 Service Unavailable", body) if faults else _HEALTHY)
        if self._rendered is not None:
            page, self._rendered, self._is_rendering = self._rendered, None, False
            for client in [client for client in self._clients if client.awaited_path == PAGE]:
                self._respond(client, page)

    def _respond(self, client: _Client, response: bytes) -> None:
        """Begins the response to a client that has waited."""
        try:
            self._begin_response(client, response)
        except ssl.SSLWantReadError:
            self._watch(client, selectors.EVENT_READ)
        except (ssl.SSLWantWriteError, BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(client)


def listen(configured: Listener, usual_port: int, is_fixed: bool) -> socket.socket | None:
    """Listens on the port of `configured`; if that is 0 and not fixed, on `usual_port`. If a port
    that is not fixed is taken, uses a free one instead, and logs that. Returns None if this host
    cannot listen.
    """
    first = configured.port if is_fixed or configured.port else usual_port if usual_port <= 65535 else 0
    family = socket.AF_INET6 if ":" in configured.host else socket.AF_INET
    for port in (first,) if is_fixed else dict.fromkeys((first, 0)):
        try:
            return socket.create_server((configured.host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            if is_fixed:
                log.error("the metrics listener cannot listen: there is no metrics page", port=port, reason=reason)
            else:
                log.warning("the metrics port is taken; a free one is used instead", port=port, reason=reason)
    return None
