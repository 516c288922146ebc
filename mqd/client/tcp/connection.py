"""A blocking TCP connection to a broker, for one request at a time, with TLS, version negotiation and
authentication. For clients that do not use librdkafka (share consumers, Spark).
Raises OSError if the broker cannot be reached or the connection ends, ProtocolError if the data is
not Kafka's protocol, or NotAuthenticated.

    T1  a connection that failed, or received an unexpected response, is closed and never used again:
        responses come in the order of the requests, so after a lost response no later one would match
    T2  a response has the length that the broker announces, at most FRAME_BYTES_MAX
Concurrency: one thread, except for interrupt(). After fork the parent's objects must not be used.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import ssl
import struct
from typing import Any

from mqd.protocol import codec
from mqd.protocol.api import decode_response, encode_request, with_length
from mqd.protocol.errors import ProtocolError, error_name
from mqd.protocol.headers import KNOWN
from mqd.protocol.messages import ApiVersionsRequest
from mqd.security.client import ClientSecurity, NotAuthenticated

FRAME_BYTES_MAX = 256 << 20
CONNECT_TIMEOUT_S = 10.0


class NoCommonVersion(Exception):
    """The broker and this client have no version of an API in common."""


class Connection:
    """See the module. `software`: the client software name in ApiVersions (KIP-511)."""

    def __init__(
        self,
        host: str,
        port: int,
        client_id: str,
        timeout_s: float,
        security: ClientSecurity | None = None,
        software: str = "mqd",
    ) -> None:
        self.host, self.port, self._client_id = host, port, client_id
        security = security or ClientSecurity()
        self._correlation_ids = itertools.count(1)
        self.closed = False  # T1
        self.versions: dict[int, tuple[int, int]] = {}
        try:
            self._socket = socket.create_connection((host, port), min(CONNECT_TIMEOUT_S, timeout_s))
        except OSError as error:
            raise ConnectionError(f"broker {host}:{port} cannot be reached: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(timeout_s)
        try:
            self._socket = security.secure(self._socket, host)
            response = self.request(
                ApiVersionsRequest(client_software_name=software, client_software_version="0.1.0"), version=3
            )
            if response.error_code:
                raise self._broken_error(f"ApiVersions failed with {error_name(response.error_code)}")
            self.versions = {entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys}
            security.authenticate(lambda _, request, version: self.request(request, version=version))
        except NotAuthenticated as error:
            self.close()
            raise NotAuthenticated(f"not authenticated at {host}:{port}: {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()

    def interrupt(self) -> None:
        """Ends a request() that waits in another thread. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def pick(self, api_key: int, version_max: int = 1 << 14) -> int:
        """Returns the newest version that the broker and this client support. Raises NoCommonVersion."""
        spec, (first, last) = KNOWN[api_key], self.versions.get(api_key, (0, -1))
        version = min(spec.max_version, last, version_max)
        if version < max(spec.min_version, first):
            offered = f"versions {first} to {last}" if last >= 0 else "no version"
            raise NoCommonVersion(
                f"broker {self.host}:{self.port} and this client have no version of {spec.name} in common: the broker"
                f" supports {offered}, the client {spec.min_version} to {min(spec.max_version, version_max)}"
            )
        return version

    def request(self, request: Any, version_max: int = 1 << 14, version: int | None = None) -> Any:
        """Sends a request and returns the decoded response."""
        api_key = codec.message_of(type(request))[0].api_key
        correlation_id = self.send(request, version if version is not None else self.pick(api_key, version_max))
        frame = self.receive()
        try:
            received_id, response = decode_response(
                frame, api_key, version if version is not None else self.pick(api_key, version_max)
            )
        except ProtocolError as error:
            raise self._broken_error(str(error)) from error
        if received_id != correlation_id:
            raise self._broken_error(f"a response to request {received_id} where {correlation_id} was expected")
        return response

    def send(self, request: Any, version: int) -> int:
        """Sends a request; returns its correlation id."""
        correlation_id = next(self._correlation_ids)
        try:
            self._socket.sendall(with_length(encode_request(request, version, correlation_id, self._client_id)))
        except OSError as error:
            raise self._end_error(error) from error
        return correlation_id

    def ready(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns True as soon as there is data or the connection has ended."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def receive(self, memory: bytearray | None = None) -> memoryview:
        """Returns the next frame, without its length, in `memory` if it is large enough, else in new
        memory. The frame must not be written to.
        """
        header = bytearray(4)
        self._fill(memoryview(header))
        (size,) = struct.unpack(">i", header)
        if not 4 <= size <= FRAME_BYTES_MAX:
            raise self._broken_error(f"a frame of {size} bytes")
        view = memoryview(memory if memory is not None and len(memory) >= size else bytearray(size))[:size]
        self._fill(view)
        return view

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            try:
                received = self._socket.recv_into(view[filled:])
            except OSError as error:
                raise self._end_error(error) from error
            if not received:
                raise self._end_error(None)
            filled += received

    def _end_error(self, error: OSError | None) -> ConnectionError:
        self.close()
        return ConnectionError(f"broker {self.host}:{self.port}: {error or 'it has closed the connection'}")

    def _broken_error(self, problem: str) -> ConnectionError:
        self.close()
        return ConnectionError(f"broker {self.host}:{self.port} does not respond like a Kafka broker: {problem}")
