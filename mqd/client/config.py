"""Configuration: confluent_kafka's dictionaries, with librdkafka's keys and those that this package
adds.

1. librdkafka validates its own keys: unknown keys, values out of range and contradictions raise the
   same KafkaException as confluent_kafka, on either transport.
2. Keys without a meaning for shared memory (socket.*, ssl.*, sasl.*, broker.*) are accepted there,
   but have no effect.
3. Added keys: transport, mqd.socket.path, mqd.buffer.bytes, mqd.spin.us, encryption.*, and a
   callable as partitioner. They never reach librdkafka.

`choose_transport` returns a client's transport, and the reason in words.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import confluent_kafka

from mqd.base.property_values import ConfigError
from mqd.client.encryption import settings as encryption_settings
from mqd.client.encryption.settings import Encryption
from mqd.client.messages import KafkaError, failure
from mqd.shm import rendezvous

log = logging.getLogger("mqd.client")

TRANSPORTS = ("auto", "shm", "tcp")
_OWN_DEFAULTS = {"transport": "auto", "mqd.socket.path": None, "mqd.buffer.bytes": 0, "mqd.spin.us": 20}
_ALIASES = {
    "request.required.acks": "acks",
    "message.timeout.ms": "delivery.timeout.ms",
    "queue.buffering.max.ms": "linger.ms",
    "message.send.max.retries": "retries",
    "compression.codec": "compression.type",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "metadata.broker.list": "bootstrap.servers",
    "dr_cb": "on_delivery",
    "dr_msg_cb": "on_delivery",
}
# librdkafka's defaults for the keys that are used with shared memory
_PRODUCER_DEFAULTS: dict[str, Any] = {
    "bootstrap.servers": "",
    "client.id": "mqd",
    "acks": -1,
    "request.timeout.ms": 30_000,
    "delivery.timeout.ms": 300_000,
    "enable.idempotence": False,
    "enable.gapless.guarantee": False,
    "transactional.id": None,
    "transaction.timeout.ms": 60_000,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 1_048_576,
    "linger.ms": 5.0,
    "retries": 2_147_483_647,
    "retry.backoff.ms": 100,
    "retry.backoff.max.ms": 1000,
    "compression.type": "none",
    "compression.level": -1,
    "batch.num.messages": 10_000,
    "batch.size": 1_000_000,
    "message.max.bytes": 1_000_000,
    "max.in.flight.requests.per.connection": 1_000_000,
    "partitioner": "consistent_random",
    "sticky.partitioning.linger.ms": 10,
    "statistics.interval.ms": 0,
    "delivery.report.only.error": False,
    "topic.metadata.refresh.interval.ms": 300_000,
    "topic.metadata.propagation.max.ms": 30_000,
    "socket.timeout.ms": 60_000,
    "allow.auto.create.topics": True,
    "security.protocol": "plaintext",
    "error_cb": None,
    "stats_cb": None,
    "on_delivery": None,
    "logger": None,
}
_NAMED_VALUES = {"acks": {"all": -1}}
_TRUE, _FALSE = {"true", "t", "1"}, {"false", "f", "0"}
IDEMPOTENT_IN_FLIGHT_MAX = 5

ClientClass = type[confluent_kafka.Producer] | type[confluent_kafka.Consumer]


class Settings(NamedTuple):
    """`own`: this package's keys; `rdkafka`: librdkafka's keys, as the user wrote them. `logger`,
    `partitioner` (if it is a callable) and `encryption` (the encryption.* keys): None if not set.
    """

    own: dict[str, Any]
    rdkafka: dict[str, Any]
    logger: Any
    partitioner: Callable[[bytes | None, int], int] | None
    encryption: Encryption | None = None


def read(config: Mapping[str, Any] | None, more: Mapping[str, Any] = {}) -> Settings:
    """Splits a client's arguments into Settings. Raises KafkaException (_INVALID_ARG) for a wrong
    value of an added key, TypeError if `config` is not a dictionary.
    """
    if config is None and not more:
        raise TypeError("expected configuration dict")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"expected configuration dict, not {type(config).__name__}")
    remaining = {**(config or {}), **more}
    logger = remaining.pop("logger", None)
    own = {key: remaining.pop(key, default) for key, default in _OWN_DEFAULTS.items()}
    for key in remaining:
        if isinstance(key, str) and key.startswith("mqd."):
            raise failure(KafkaError._INVALID_ARG, f'No such configuration property: "{key}"')
    if own["transport"] not in TRANSPORTS:
        raise failure(
            KafkaError._INVALID_ARG,
            f'Invalid value "{own["transport"]}" for configuration property "transport": auto, shm or tcp',
        )
    for key in ("mqd.buffer.bytes", "mqd.spin.us"):
        own[key] = _number(key, own[key], int)
    partitioner = remaining.pop("partitioner") if callable(remaining.get("partitioner")) else None
    try:
        encryption = encryption_settings.take(remaining)
    except ConfigError as error:
        raise failure(KafkaError._INVALID_ARG, str(error)) from error
    return Settings(own, remaining, logger, partitioner, encryption)


def check(settings: Settings, client_class: ClientClass) -> None:
    """Raises what confluent_kafka raises for this configuration. Takes about 2 ms, because librdkafka
    creates a client (which does not connect).
    """
    properties = {
        key: value
        for key, value in settings.rdkafka.items()
        if key not in ("bootstrap.servers", "metadata.broker.list")
    }
    probe = client_class({**properties, "log_level": 0})
    del probe


class ProducerConfig:
    """The values of librdkafka's keys that a shared-memory producer uses, as Python numbers,
    booleans and strings: `config["linger.ms"]`.
    """

    def __init__(self, settings: Settings) -> None:
        configured: dict[str, Any] = {}
        topic_config = settings.rdkafka.get("default.topic.config") or {}
        for key, value in {**topic_config, **settings.rdkafka}.items():
            configured[_ALIASES.get(key, key)] = value
        self.values = {
            key: convert_value(key, configured.get(key), default) for key, default in _PRODUCER_DEFAULTS.items()
        }
        self.partitioner = settings.partitioner
        values = self.values
        if values["transactional.id"]:
            values["enable.idempotence"] = True
        if values["enable.idempotence"]:
            values["acks"] = -1
            values["max.in.flight.requests.per.connection"] = min(
                values["max.in.flight.requests.per.connection"], IDEMPOTENT_IN_FLIGHT_MAX
            )
        if values["transactional.id"] and "delivery.timeout.ms" not in configured:
            values["delivery.timeout.ms"] = min(values["delivery.timeout.ms"], values["transaction.timeout.ms"])

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def convert_value(key: str, value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, str) and value in _NAMED_VALUES.get(key, {}):
        return _NAMED_VALUES[key][value]
    if isinstance(default, bool):
        return _boolean(key, value)
    if isinstance(default, (int, float)):
        return _number(key, value, type(default))
    return (
        value.lower()
        if key in ("compression.type", "security.protocol", "partitioner") and isinstance(value, str)
        else value
    )


def _boolean(key: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise failure(KafkaError._INVALID_ARG, f'Expected bool value for "{key}": true or false')


def _number(key: str, value: Any, number_type: type) -> Any:
    try:
        return number_type(float(value)) if number_type is float or not isinstance(value, (int, str)) else int(value)
    except (TypeError, ValueError):
        raise failure(KafkaError._INVALID_ARG, f'Invalid value for configuration property "{key}"') from None


# -- the transport ---------------------------------------------------------------------------------


class TransportChoice(NamedTuple):
    """`transport`: "shm" or "tcp"; `socket_path`: for shm; `reason`: in words, for the log and
    `transport_reason`.
    """

    transport: str
    socket_path: str | None
    reason: str
    server: str = ""  # the address that the broker at socket_path must serve


def choose_transport(settings: Settings) -> TransportChoice:
    """Returns the transport to try first. Raises KafkaException if transport=shm is required but not
    possible.
    """
    requested = settings.own["transport"]
    if requested == "tcp":
        return TransportChoice("tcp", None, "transport=tcp")
    servers = str(settings.rdkafka.get("bootstrap.servers") or settings.rdkafka.get("metadata.broker.list") or "")
    protocol = str(settings.rdkafka.get("security.protocol") or "plaintext").lower()
    if requested == "auto" and protocol != "plaintext":
        return TransportChoice(
            "tcp",
            None,
            f"security.protocol={protocol} authenticates a TCP connection; with transport=shm a client is identified"
            " by its process's user",
        )
    broker_socket = rendezvous.find(servers, settings.own["mqd.socket.path"])
    if broker_socket.path is not None:
        return TransportChoice("shm", broker_socket.path, broker_socket.reason, broker_socket.server)
    if requested == "shm":
        raise failure(KafkaError._TRANSPORT, f"transport=shm: {broker_socket.reason}")
    return TransportChoice("tcp", None, f"no shared memory: {broker_socket.reason}")
