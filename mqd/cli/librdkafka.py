"""Sets up librdkafka clients for the commands: they do not log, an unreachable broker is reported
immediately, and errors become text.

Importing confluent_kafka costs 50 ms, so modules that every command loads import this one within
functions.
"""

import os
import re
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from mqd.cli import client_security
from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError
from mqd.security.client import TOKEN_AUTH, ClientSecurity

REQUEST_TIMEOUT_S = 15.0
RECENT_ERROR_S = 60.0  # see recent_error()
CONNECT_TIMEOUT_S = 3.0

_API_VERSIONS = 18
_CORRELATION_ID = 0x6D7164  # no response of another protocol has it at this position
_RESPONSE_HEAD = struct.Struct(">ii")  # header of a response: its size, the request's correlation id
_RESPONSE_BYTES_MAX = 1 << 20
_RECEIVE_BYTES = 1024
_CLOSED, _TLS_ALERT = "it closed the connection without a response", "a TLS server answered"

_UNREACHABLE = frozenset(
    {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT}
)
_VERIFICATION = "enable.ssl.certificate.verification"
LOGIN_REMEDY = "check sasl.username, sasl.password and sasl.mechanisms in the client's settings (--client-config FILE)"
TLS_REMEDY = (
    "check security.protocol, ssl.ca.location and, if the listener requires a client's certificate,"
    " ssl.certificate.location in the client's settings (--client-config FILE)"
)
_REMEDIES = {
    KafkaError.TOPIC_ALREADY_EXISTS: "with --if-not-exists that is not an error",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "mqd topic list shows all topics, mqd topic create makes one",
    KafkaError.KAFKA_STORAGE_ERROR: (
        "the broker's disk is full or has failed; its log says which; mqd status shows the data directory"
    ),
    KafkaError.MSG_SIZE_TOO_LARGE: (
        "raise the topic's max.message.bytes (mqd config set topic/NAME), or the client's message.max.bytes (-X)"
    ),
    KafkaError._MSG_TIMED_OUT: "the broker did not acknowledge in time; mqd status shows whether it is running",
}


def _addresses(bootstrap: str) -> list[tuple[str, int]]:
    addresses = []
    for member in filter(None, (part.strip() for part in bootstrap.split(","))):
        match = re.fullmatch(r"(?:\w+://)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?", member)
        if match is None or int(match["port"] or 9092) > 65535:
            raise CliError(f"{member!r} is not HOST:PORT", 2)
        addresses.append((match["six"] or match["host"], int(match["port"] or 9092)))
    if not addresses:
        raise CliError("no broker is named; give -b HOST:PORT", 2)
    return addresses


def unreachable(bootstrap: str, reason: str = "", advertised_by: int | None = None) -> CliError:
    """Returns the error. `advertised_by`: the node that advertises `bootstrap` as its address."""
    why = f" ({reason})" if reason else ""
    if advertised_by is not None:
        return CliError(
            f"cannot reach broker {advertised_by} at {bootstrap}, the address that it advertises{why}; is it running?"
            " If so, set advertised.listeners on it to an address that clients can reach",
            EXIT_UNREACHABLE,
        )
    return CliError(
        f"cannot reach a broker at {bootstrap}{why}; is it running? start one with: mqd up", EXIT_UNREACHABLE
    )


def require_broker(
    bootstrap: str, timeout_s: float = CONNECT_TIMEOUT_S, plaintext: bool = True, advertised_by: int | None = None
) -> tuple[str, int]:
    """Returns the first address that accepts a connection and, without TLS, responds like a Kafka
    broker. Raises CliError if there is none; librdkafka alone would report that only after its time
    limit.
    """
    reason = ""
    refusal: CliError | None = None
    for address in _addresses(bootstrap):
        try:
            with socket.create_connection(address, timeout_s) as connection:
                foreign_response = _foreign_response(connection, timeout_s) if plaintext else None
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        if foreign_response is None:
            return address
        if advertised_by is not None:
            reason = foreign_response
            continue
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        refusal = CliError(
            f"{host}:{address[1]} does not answer plain Kafka requests: {foreign_response}; it probably requires TLS:"
            " give the client's settings with --client-config FILE or MQD_CLIENT_CONFIG"
            if foreign_response in (_CLOSED, _TLS_ALERT)
            else f"{host}:{address[1]} is not a Kafka broker: {foreign_response}; give the broker's port for clients"
            " with -b HOST:PORT (mqd status shows it)",
            EXIT_UNREACHABLE,
        )
    raise refusal or unreachable(bootstrap, reason, advertised_by)


def _foreign_response(connection: socket.socket, timeout_s: float) -> str | None:
    """Sends an ApiVersions request, version 0. Returns None if a Kafka broker answers it; otherwise
    describes what the peer did instead. The time limit covers the whole exchange.
    """
    client = b"mqd-cli"
    request = struct.pack(">hhih", _API_VERSIONS, 0, _CORRELATION_ID, len(client)) + client
    deadline = time.monotonic() + timeout_s
    received = b""
    try:
        connection.sendall(struct.pack(">i", len(request)) + request)
        while len(received) < _RESPONSE_HEAD.size:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(_RECEIVE_BYTES)
            if not part:
                break
            received += part
    except TimeoutError:
        if not received:
            return f"it accepts connections, but sent nothing within {timeout_s:g} s"
    except OSError:
        pass  # a reset; bytes received before it still count
    if len(received) >= _RESPONSE_HEAD.size:
        size, number = _RESPONSE_HEAD.unpack_from(received)
        if 4 <= size <= _RESPONSE_BYTES_MAX and number == _CORRELATION_ID:
            return None
    if not received:
        return _CLOSED
    if received.startswith(b"\x15\x03"):
        return _TLS_ALERT
    line = received.splitlines()[0][:60].decode("ascii", "backslashreplace")
    return f"it answered {line!r}"


def _require_login(bootstrap: str, timeout_s: float, security: ClientSecurity) -> None:
    """Raises CliError if a broker refuses the TLS handshake or the login; librdkafka alone would
    try again until its time limit.
    """
    from mqd.cli.kafka_request import Broker

    try:
        with Broker(bootstrap, timeout_s, security=security):
            pass
    except CliError as error:
        if error.exit_code != EXIT_UNREACHABLE:
            raise
        require_broker(bootstrap, timeout_s, not security.has_tls)  # librdkafka tries all addresses


def base_config(
    bootstrap: str, timeout_s: float = CONNECT_TIMEOUT_S, properties: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Checks that a broker is reachable. Returns the configuration that all clients share, with the
    credentials. `properties`: the client's own properties, which may enable TLS. Raises CliError.
    """
    security = client_security.current(properties)
    if security.protocol != "PLAINTEXT" and security.is_supported and _VERIFICATION not in (properties or {}):
        _require_login(bootstrap, timeout_s, security)
    else:
        require_broker(bootstrap, timeout_s, not security.has_tls)
    config: dict[str, Any] = {
        **{name: value for name, value in security.settings.items() if name != TOKEN_AUTH},
        "bootstrap.servers": bootstrap,
        "client.id": "mqd-cli",
        "broker.address.family": "any",
        "socket.nagle.disable": True,
        # librdkafka also waits half of this before a client's second connection
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 1000,
    }
    if os.environ.get("MQD_DEBUG") != "1":
        config["log_level"] = 0
        config["error_cb"] = note_error
    return config


_REFUSALS = {
    KafkaError._AUTHENTICATION: ("not authenticated", LOGIN_REMEDY),
    KafkaError._SSL: ("no TLS connection", TLS_REMEDY),
}
_admin_ref: Callable[[], Any] = lambda: None
_unresolved_host = ""  # the last host name that librdkafka could not resolve in this process
_unresolved_at = 0.0
_last_refusal: CliError | None = None  # the last refusal of a TLS handshake or a login in this process
_refused_at = 0.0


def note_error(error: KafkaError) -> None:
    """Remembers a host name that does not resolve, or a refused login: librdkafka retries, and in
    the end reports only a timeout.
    """
    global _unresolved_host, _unresolved_at, _last_refusal, _refused_at
    if error.code() in _REFUSALS:
        problem, remedy = _REFUSALS[error.code()]
        reason = re.sub(r" \(after \d+ms in state \w+.*\)$", "", error.str())
        _last_refusal, _refused_at = CliError(f"{problem}: {reason}; {remedy}"), time.monotonic()
    match = re.search(r"Failed to resolve '([^']+)'", error.str()) if error.code() == KafkaError._RESOLVE else None
    if match is not None:
        _unresolved_host, _unresolved_at = match[1], time.monotonic()


def recent_error() -> CliError | None:
    """Returns the cause of a timeout, if librdkafka has reported one within the last minute. While
    a cause persists, librdkafka retries and reports it more often than that.
    """
    admin = _admin_ref()
    if admin is not None:
        admin.poll(0)  # there is no other access to an admin client's errors
    if _last_refusal is not None and time.monotonic() - _refused_at <= RECENT_ERROR_S:
        return _last_refusal
    if not _unresolved_host or time.monotonic() - _unresolved_at > RECENT_ERROR_S:
        return None
    return CliError(
        f"a broker advertises {_unresolved_host}, a name that does not resolve on this host; set advertised.listeners"
        " on that broker to an address that clients can reach, or make the name known here",
        EXIT_UNREACHABLE,
    )


def admin_client(bootstrap: str) -> Any:
    from confluent_kafka.admin import AdminClient

    global _admin_ref
    client = AdminClient(base_config(bootstrap))
    _admin_ref = weakref.ref(client)
    return client


def metadata(client: Any, topic: str | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
    """Returns ClusterMetadata. If `topic` does not exist, it is not created; raises CliError."""
    # a query by name lets a broker create the topic, unless it comes from a consumer
    by_name = topic is not None and isinstance(client, confluent_kafka.Consumer)
    cluster_metadata = (
        client.list_topics(topic, timeout=timeout_s) if by_name else client.list_topics(timeout=timeout_s)
    )
    if topic is not None:
        error = (
            cluster_metadata.topics[topic].error
            if topic in cluster_metadata.topics
            else KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        )
        if error is not None:
            raise resource_error(f"topic {topic}", KafkaException(error))
    return cluster_metadata


def topic_names(bootstrap: str, timeout_s: float) -> list[str]:
    from confluent_kafka.admin import AdminClient

    return sorted(AdminClient(base_config(bootstrap, timeout_s)).list_topics(timeout=timeout_s).topics)


def resource_error(resource: str, error: KafkaException) -> CliError:
    """The error of one resource, such as a topic, prefixed by its name."""
    text, code = explain_kafka(error)
    return CliError(f"{resource}: {text}", code)


def explain_kafka(error: BaseException) -> tuple[str, int]:
    """Returns the text and the exit code for a KafkaException. The text is the broker's own message
    if it sent one, and ends with the remedy if one is known.
    """
    kafka_error = error.args[0] if error.args else None
    if not isinstance(kafka_error, KafkaError):
        return str(error), EXIT_FAILED
    if (cause := recent_error()) and (
        kafka_error.code() in _UNREACHABLE or kafka_error.code() == KafkaError._MSG_TIMED_OUT
    ):
        return cause.message, cause.exit_code
    if kafka_error.code() in _UNREACHABLE:
        return (
            f"no response from the broker ({kafka_error.str()}); is it running? check with: mqd status",
            EXIT_UNREACHABLE,
        )
    text = kafka_error.str()
    text = re.sub(r"^(Unable to produce message: )?(Broker: |Local: )?", "", text)
    remedy = _REMEDIES.get(kafka_error.code())
    return f"{text.rstrip('.')}; {remedy}" if remedy and remedy not in text else text, EXIT_FAILED


def wait_for_futures(
    futures: dict[Any, Any], name_of: Any = str
) -> tuple[list[tuple[str, Any]], list[tuple[str, KafkaException]]]:
    """Waits for all futures. Returns (name, result) of the successful ones, (name, exception) of
    the others.
    """
    done, failed = [], []
    for key, future in futures.items():
        try:
            done.append((name_of(key), future.result()))
        except KafkaException as error:
            failed.append((name_of(key), error))
    return done, failed


def raise_failures(failed: Iterable[tuple[str, KafkaException]]) -> None:
    failures = [resource_error(name, error) for name, error in failed]
    if failures:
        raise CliError(
            "; ".join(failure.message for failure in failures), max(failure.exit_code for failure in failures)
        )


VERSION = f"confluent-kafka {confluent_kafka.__version__}, librdkafka {confluent_kafka.libversion()[0]}"
