"""Sends single Kafka requests to a broker and returns the responses, for APIs that librdkafka's
admin client lacks (quotas among others). Blocking; every wait is bounded.

A connection that has ended, or whose response is late or invalid, is closed: the next request opens
another.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mqd.cli import client_security
from mqd.cli.common import EXIT_UNREACHABLE, CliError
from mqd.cli.librdkafka import LOGIN_REMEDY, TLS_REMEDY, require_broker, unreachable
from mqd.protocol import decode_response, encode_request, with_length
from mqd.protocol.headers import API_VERSIONS_KEY, KNOWN
from mqd.protocol.messages import message_class
from mqd.security import client

TIMEOUT_S = 30.0
FRAME_BYTES_MAX = 256 << 20
CLIENT_ID = "mqd-cli"
RECONNECT_S = 60.0  # long enough for a broker to restart, or a cluster to detect that one is down
_RETRY_S = 0.5
_REMEDIES = {
    "SECURITY_DISABLED": "start the broker with mqd up --secure, or set authorizer.class.name",
    "DELEGATION_TOKEN_AUTH_DISABLED": "set delegation.token.secret.key, to the same value on all brokers",
}

T = TypeVar("T")


class Broker:
    """`with Broker(bootstrap) as broker: broker.request(48, DescribeClientQuotasRequest(...))`.
    Raises CliError. `advertised_by`: the node that advertises this address, if another broker
    reported the address. `security`: used instead of the credentials of --client-config.
    """

    def __init__(
        self,
        bootstrap: str,
        timeout_s: float = TIMEOUT_S,
        advertised_by: int | None = None,
        security: client.ClientSecurity | None = None,
    ) -> None:
        self._security = client_security.current() if security is None else security
        self._bootstrap, self._timeout_s, self._advertised_by = bootstrap, timeout_s, advertised_by
        self._socket: socket.socket | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._correlation_id = 0

    def __enter__(self) -> "Broker":
        self._connect()
        return self

    def _connect(self) -> None:
        security = self._security
        address = require_broker(self._bootstrap, plaintext=not security.has_tls, advertised_by=self._advertised_by)
        try:
            self._socket = security.secure(socket.create_connection(address, self._timeout_s), address[0])
        except ssl.SSLError as error:
            raise self._tls_failure(error) from None
        except OSError as error:
            raise unreachable(self._bootstrap, error.strerror or str(error), self._advertised_by) from None
        response = self._call(
            API_VERSIONS_KEY,
            message_class(API_VERSIONS_KEY, "Request")(client_software_name="mqd-cli", client_software_version="1"),
            3,
        )
        self._versions = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
        try:
            security.authenticate(self._call)
        except client.NotAuthenticated as error:
            self.__exit__()
            raise CliError(f"not authenticated at {self._bootstrap}: {error}; {LOGIN_REMEDY}") from None

    def _tls_failure(self, error: ssl.SSLError) -> CliError:
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"the broker's certificate: {error.verify_message}"
        else:
            reason = error.reason or str(error)
        return CliError(f"no TLS connection to {self._bootstrap}: {reason}; {TLS_REMEDY}")

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def request(self, api_key: int, request: object, version_max: int = 1 << 15, version_min: int = 0) -> Any:
        """Sends the request in the newest version that both sides support, from `version_min` to
        `version_max`, and returns the response.
        """
        if self._socket is None:
            self._connect()
        api, supported = KNOWN[api_key], self._versions.get(api_key, (0, -1))
        version = min(api.max_version, supported[1], version_max)
        if version < max(api.min_version, supported[0], version_min):
            raise CliError(
                f"the broker at {self._bootstrap} does not support {api.name}: it is not mqd, or an older version"
            )
        return self._call(api_key, request, version)

    def supports(self, api_key: int) -> bool:
        return api_key in self._versions

    def is_mqd(self) -> bool:
        """Whether the broker is mqd. Call this before a request with mqd's own fields: other
        brokers would ignore them and carry out the rest. Raises CliError.
        """
        request = message_class(API_VERSIONS_KEY, "Request")(
            client_software_name="mqd-cli", client_software_version="1"
        )  # in its newest version: older ones leave out features whose lowest version is 0
        return any(
            feature.name == "mqd.version" for feature in self.request(API_VERSIONS_KEY, request).supported_features
        )

    def _call(self, api_key: int, request: object, version: int) -> Any:
        assert self._socket is not None
        self._correlation_id += 1
        frame = with_length(encode_request(request, version, self._correlation_id, CLIENT_ID))
        try:
            self._socket.sendall(frame)
            (size,) = struct.unpack(">i", self._receive(4))
            if not 4 <= size <= FRAME_BYTES_MAX:
                raise CliError(f"{self._bootstrap} does not speak the Kafka protocol")
            response_id, response = decode_response(self._receive(size), api_key, version)
            if response_id != self._correlation_id:
                raise CliError(
                    f"{self._bootstrap} does not speak the Kafka protocol: it sent a response to"
                    f" request {response_id}; one to request {self._correlation_id} was expected"
                )
            return response
        except ssl.SSLError as error:
            self.__exit__()
            raise self._tls_failure(error) from None
        except OSError as error:
            self.__exit__()
            if isinstance(error, ConnectionError) and self._versions and not self._security.has_sasl:
                raise CliError(
                    f"the broker at {self._bootstrap} closed the connection ({KNOWN[api_key].name}); if it is running,"
                    " its listener requires a login: give the client's settings with --client-config FILE",
                    EXIT_UNREACHABLE,
                ) from None
            raise unreachable(self._bootstrap, f"{KNOWN[api_key].name}: {error}") from None
        except BaseException:
            self.__exit__()
            raise

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the broker closed the connection")
            data += part
        return bytes(data)


def with_retries(attempt: Callable[[], T]) -> T:
    """Calls attempt(), and retries for RECONNECT_S while no broker is reachable: the operation
    that the caller waits for continues in the cluster. Raises CliError.
    """
    deadline = time.monotonic() + RECONNECT_S
    while True:
        try:
            return attempt()
        except CliError as error:
            if error.exit_code != EXIT_UNREACHABLE or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)  # there is no notification when a broker is back


def check(subject: str, error_code: int, message: str | None) -> None:
    """Raises CliError with the broker's message, or Kafka's name of the code."""
    if error_code:
        raise CliError(f"{subject}: {error_text(error_code, message)}")


def error_text(error_code: int, message: str | None = None) -> str:
    from mqd.protocol.errors import ERRORS

    error = ERRORS.get(error_code)
    name = error.name if error else str(error_code)
    remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
    return f"{(message or (error.message if error else 'unknown error')).rstrip('.')} ({name}){remedy}"
