"""Produce requests to this host's broker through shared memory, with the interface of
wire.BrokerConnection. A request is copied once, into the memory from which the broker reads it.

    L1  one request at a time is outstanding (producing.py S1), so the next response belongs to it
    L2  when the attachment has ended (the worker died), calls raise OSError and the caller closes
        the link. It then calls find() again; if that returns None, it uses TCP
Concurrency: one thread. A forked child may not use its parent's link.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from mqd.native import NativeError
from mqd.native.client import CORRELATION_ID_END, Client
from mqd.protocol.api import encode_request
from mqd.protocol.headers import KNOWN
from mqd.shm import rendezvous
from mqd.spark.encoding import MqdWriteError
from mqd.spark.options import KafkaSettings

MEMORY_BYTES = 12 << 20
FRAME_BYTES_MAX = 5 << 20  # the largest request: two of them fit into MEMORY_BYTES
ATTACH_TIMEOUT_MS = 3000


def find(host: str, port: int, settings: KafkaSettings) -> LocalLink | None:
    """A link to the broker at this address; None: use TCP. Raises MqdWriteError when transport=shm
    is impossible.
    """
    if settings.transport == "tcp":
        return None
    result = rendezvous.find(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    reason = result.reason
    if result.path is not None:
        try:
            return LocalLink(result.path, result.server, host, port, settings)
        except NativeError as error:
            reason = str(error)
    if settings.transport == "shm":
        raise MqdWriteError(
            f"option transport: shm: the broker {host}:{port} cannot be reached through shared memory: {reason}."
            " With auto, TCP is used instead"
        )
    return None


class LocalLink:
    """Raises OSError when the attachment has ended."""

    def __init__(self, path: str, server: str, host: str, port: int, settings: KafkaSettings) -> None:
        self.host, self.port = host, port
        self._client_id, self._timeout_s = settings.client_id, settings.request_timeout_s
        self._request_numbers = itertools.count(1)
        self._response: bytes | None = None
        self._client = Client(
            path,
            client_id=settings.client_id,
            data_bytes=MEMORY_BYTES,
            request_bytes=MEMORY_BYTES,
            timeout_ms=ATTACH_TIMEOUT_MS,
            server=server,
        )

    def pick(self, api_key: int, version_max: int) -> int:
        """The version to use. The broker is of this build: the memory of another build's broker
        could not be attached.
        """
        return min(KNOWN[api_key].max_version, version_max)

    def send(self, request: Any, version: int) -> int:
        """Returns the correlation id. ValueError: the request is larger than FRAME_BYTES_MAX."""
        correlation_id = next(self._request_numbers) % (CORRELATION_ID_END - 1) + 1
        frame = encode_request(request, version, correlation_id, self._client_id)
        if len(frame) > FRAME_BYTES_MAX:
            raise ValueError(f"a request of {len(frame)} bytes")
        deadline = time.monotonic() + self._timeout_s
        while not self._client.submit(frame):
            self._wait(deadline, "did not accept a request")
        self._client.flush()
        return correlation_id

    def ready(self, seconds: float) -> bool:
        """Whether a response has arrived; waits for it for up to `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            self._response = self._response or self._client.next_response()
            if self._response is not None:
                return True
            remaining_s = deadline - time.monotonic()
            # even if no time remains: the response may have arrived already
            if self._client.wait(max(0, int(remaining_s * 1e6))):
                self._client.poll()
            if remaining_s <= 0:
                self._response = self._client.next_response()
                return self._response is not None

    def receive(self) -> bytes:
        """The next response, without its length field."""
        if not self.ready(self._timeout_s):
            raise TimeoutError(
                f"broker {self.host}:{self.port} did not respond within {self._timeout_s:g} s"
                " (kafka.request.timeout.ms)"
            )
        response, self._response = self._response, None
        assert response is not None
        return response

    def close(self) -> None:
        self._client.close()

    def _wait(self, deadline: float, problem: str) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(
                f"broker {self.host}:{self.port} {problem} within {self._timeout_s:g} s (kafka.request.timeout.ms)"
            )
        if self._client.wait(int(remaining_s * 1e6)):
            self._client.poll()
