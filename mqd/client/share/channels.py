"""The channels for a share consumer's requests: TCP connections, each with its own thread, and
shared-memory attachments. send() does not wait; on_response(response, error) is called once, unless
send() raises or the channel is closed first.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mqd.base.property_values import ConfigError
from mqd.client.messages import KafkaError, KafkaException, failure, local_error
from mqd.client.requests import FIND_COORDINATOR
from mqd.client.share.events import Send
from mqd.client.shm.attachment import Attachment
from mqd.client.tcp.connection import Connection, NoCommonVersion
from mqd.protocol.errors import ProtocolError
from mqd.protocol.headers import KNOWN
from mqd.security.client import ClientSecurity, NotAuthenticated

_log = logging.getLogger("mqd.client")
OnResponse = Callable[[Any, KafkaError | None], None]
GetAddresses = Callable[[], list[tuple[str, int]]]


class Channel(Protocol):
    def send(self, request: Send, on_response: OnResponse) -> None:
        """Sends a request. If it raises KafkaException, on_response is not called."""

    def close(self) -> None:
        """Closes the channel. Requests under way may end without on_response()."""


class AttachmentChannel:
    """A channel through a shared-memory attachment. While the broker is down, requests fail immediately
    or use `fallback`; they do not wait for the broker, because other brokers may lead its partitions by then.
    """

    def __init__(self, attachment: Attachment, fallback: Channel | None = None) -> None:
        self._attachment, self._fallback = attachment, fallback

    def send(self, request: Send, on_response: OnResponse) -> None:
        attachment = self._attachment
        if not attachment.attached:
            if self._fallback is None:
                raise failure(KafkaError._TRANSPORT, "shared memory: the broker is down", retriable=True)
            self._fallback.send(request, on_response)
            return
        version = attachment.api.pick(request.api_key)
        _require_version(version, request)
        timeout_s = attachment.request_timeout_s + request.wait_ms / 1000
        attachment.send(request.api_key, version, request.message, on_response, timeout_s)

    def close(self) -> None:
        self._attachment.close()
        if self._fallback is not None:
            self._fallback.close()


class _QueuedRequest(NamedTuple):
    request: Send
    on_response: OnResponse


class TcpChannel:
    """Connects at the first request, and reconnects at the first request after the connection was lost;
    tries the addresses in turn. `get_security()` returns the settings for the next connection.
    """

    def __init__(
        self,
        name: str,
        get_addresses: GetAddresses,
        client_id: str,
        timeout_s: float,
        get_security: Callable[[], ClientSecurity],
    ) -> None:
        self._get_addresses, self._get_security = get_addresses, get_security
        self._client_id, self._timeout_s = client_id, timeout_s
        self._requests: queue.SimpleQueue[_QueuedRequest | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._next_address = 0
        self._is_closed = False
        self._lock = threading.Lock()  # guards _connection and _is_closed
        self._thread = threading.Thread(target=self._run, name=f"mqd-share-{name}", daemon=True)
        self._thread.start()

    def send(self, request: Send, on_response: OnResponse) -> None:
        self._requests.put(_QueuedRequest(request, on_response))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.interrupt()
        self._requests.put(None)

    def _run(self) -> None:
        while (queued := self._requests.get()) is not None:
            try:
                response = self._request(queued.request)
            except KafkaException as problem:
                queued.on_response(None, problem.args[0])
            except Exception as problem:
                if not isinstance(problem, (OSError, ProtocolError)):  # a bug in mqd; the request still ends
                    _log.exception("a share consumer's request has failed")
                self._drop_connection()
                queued.on_response(None, local_error(KafkaError._TRANSPORT, str(problem), retriable=True))
            else:
                queued.on_response(response, None)
        self._drop_connection()

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request(self, request: Send) -> Any:
        connection = self._connection if self._connection is not None else self._connect()
        try:
            version = connection.pick(request.api_key)
        except NoCommonVersion as error:
            raise failure(KafkaError._UNSUPPORTED_FEATURE, str(error)) from None
        _require_version(version, request)
        connection.set_timeout(self._timeout_s + request.wait_ms / 1000)
        return connection.request(request.message, version=version)

    def _connect(self) -> Connection:
        addresses = self._get_addresses()
        if not addresses:
            raise OSError("the broker's address is not known")
        host, port = addresses[self._next_address % len(addresses)]
        self._next_address += 1
        try:
            connection = Connection(host, port, self._client_id, self._timeout_s, self._get_security())
        except (NotAuthenticated, ConfigError) as error:  # ConfigError: unusable certificates
            raise failure(KafkaError._AUTHENTICATION, str(error)) from None
        with self._lock:
            if not self._is_closed:
                self._connection = connection
                return connection
        connection.close()
        raise OSError("the consumer is closed")


def _require_version(version: int, request: Send) -> None:
    if version < request.version_min:
        name = KNOWN[request.api_key].name
        needed_by = "share consumers need" if request.api_key == FIND_COORDINATOR else "renew() and consume() need"
        raise failure(
            KafkaError._UNSUPPORTED_FEATURE,
            f"the broker does not support version {request.version_min} of {name}, which {needed_by}",
        )


def close_all(channels: list[Channel]) -> None:
    for channel in channels:
        with contextlib.suppress(KafkaException, OSError):
            channel.close()
