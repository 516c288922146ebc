"""Options of `format("mqd")`: those of Spark's Kafka source and sink, with the same names, values
and refusals, and mqd's own.

1. Names are case-insensitive, like Spark's own. `kafka.*` is configuration of Kafka's clients:
   supported properties are used, those that would break Spark's guarantees are refused
   (REFUSED_BY_SOURCE, REFUSED_BY_SINK), and the rest is ignored, as in Spark's Kafka source.
2. A wrong value is refused before a broker is contacted: MqdOptionError names the option, the value
   and the allowed values.
3. Options that are only for the other kind of query (batch or streaming) are ignored with a
   warning, or refused if they would change what the query reads. Spark's Kafka source does the
   same.

fetchOffset.numRetries is accepted without effect: retries are limited by time
(kafka.default.api.timeout.ms, kafkaConsumer.pollTimeoutMs).

mqd's own: `transport` (auto, shm, tcp), `encryption.*` (values are encrypted and decrypted by
mqd.client.encryption), `groupId` (a query's progress is committed as this consumer group's
offsets), `archive` (a batch begins with the records in this directory). Source: Spark's Structured
Streaming + Kafka Integration Guide.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, overload

import msgspec

from mqd.base.property_values import ConfigError
from mqd.client.encryption import settings as encryption_settings
from mqd.client.encryption.settings import Encryption
from mqd.security import client
from mqd.security.client import ClientSecurity

log = logging.getLogger("mqd.spark")

EARLIEST, LATEST = -2, -1  # as in the JSON of offsets
STRATEGIES = ("assign", "subscribe", "subscribepattern")
TRANSPORTS = ("auto", "shm", "tcp")
_REFUSED_BY_BOTH = {"interceptor.classes": "interceptors could change records without Spark's knowledge"}
REFUSED_BY_SOURCE = {
    **_REFUSED_BY_BOTH,
    "auto.offset.reset": (
        "set startingOffsets to earliest or latest; startingOffsets applies only to a new query, which afterwards"
        " continues from its checkpoint"
    ),
    "key.deserializer": "keys are read as bytes: deserialize them with DataFrame operations",
    "value.deserializer": "values are read as bytes: deserialize them with DataFrame operations",
    "enable.auto.commit": "offsets are kept in the query's checkpoint; set groupId to commit them for a group too",
}
REFUSED_BY_SINK = {
    **_REFUSED_BY_BOTH,
    "key.serializer": "keys are written as bytes: serialize them with DataFrame operations into binary or string",
    "value.serializer": "values are written as bytes: serialize them with DataFrame operations into binary or string",
}
_DURATION = re.compile(r"(\d+)\s*(us|ms|s|m|min|h|d)?", re.I)
_UNIT_MS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class MqdOptionError(ValueError):
    """An invalid option of a query; the message names it and the allowed values."""


# -- reading options one by one --------------------------------------------------------------------


class SparkOptions:
    """Spark's options by lower-case name."""

    def __init__(self, spark_options: Mapping[str, str]) -> None:
        self.values = {str(name).lower(): str(value) for name, value in spark_options.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.values

    @overload
    def text(self, name: str, default: str) -> str: ...

    @overload
    def text(self, name: str, default: None = None) -> str | None: ...

    def text(self, name: str, default: str | None = None) -> str | None:
        return self.values.get(name.lower(), default)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.strip().lower() not in ("true", "false"):
            raise MqdOptionError(f"option {name}: {value!r} is neither true nor false")
        return value.strip().lower() == "true"

    @overload
    def integer(self, name: str, default: int, minimum: int = 1) -> int: ...

    @overload
    def integer(self, name: str, default: None = None, minimum: int = 1) -> int | None: ...

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise MqdOptionError(f"option {name}: {value!r} is not a whole number") from None
        if number < minimum:
            raise MqdOptionError(f"option {name}: {number} is less than {minimum}")
        return number

    def duration_ms(self, name: str, default: int) -> int:
        """Spark's durations: 15m, 30s, 100ms; a bare number is milliseconds."""
        value = self.text(name)
        if value is None:
            return default
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise MqdOptionError(f"option {name}: {value!r} is not a duration like 500ms, 30s, 15m")
        return int(int(match[1]) * _UNIT_MS[(match[2] or "ms").lower()])

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = (self.text(name, default) or "").strip().lower()
        if value not in allowed:
            raise MqdOptionError(f"option {name}: {value!r} is not one of {', '.join(allowed)}")
        return value


class KafkaSettings(msgspec.Struct, frozen=True):
    """The settings of `kafka.*` that are used, and `transport`. Times are in seconds."""

    bootstrap_servers: str
    client_id: str = "spark-mqd"
    transport: str = "auto"
    read_committed: bool = False
    request_timeout_s: float = 30.0
    rack: str = ""
    fetch_bytes_max: int = 4 << 20
    others: dict[str, str] = {}  # settings without a field here, by lower-case name without "kafka."
    security: dict[str, str] = {}  # settings of mqd.security.client.ClientSecurity
    encryption: Encryption | None = None


def kafka_settings(options: SparkOptions, refused: Mapping[str, str], client_kind: str = "consumer") -> KafkaSettings:
    """`refused`: REFUSED_BY_SOURCE or REFUSED_BY_SINK; `client_kind`: for messages. Raises
    MqdOptionError.
    """
    kafka_properties = {name[6:]: value for name, value in options.values.items() if name.startswith("kafka.")}
    servers = kafka_properties.pop("bootstrap.servers", "").strip()
    if not servers:
        raise MqdOptionError(f"Option 'kafka.bootstrap.servers' must be specified for configuring Kafka {client_kind}")
    for name in kafka_properties:
        if name in refused:
            raise MqdOptionError(f"Kafka option '{name}' is not supported: {refused[name]}")
    security, transport = _security(kafka_properties), options.choice("transport", TRANSPORTS, "auto")
    if security.protocol != "PLAINTEXT":
        if transport == "shm":
            raise MqdOptionError(
                f"option transport: shm authenticates as the process's user, but kafka.security.protocol="
                f"{security.protocol} uses another identity; leave one of them out"
            )
        transport = "tcp"
    isolation = kafka_properties.pop("isolation.level", "read_uncommitted").strip().lower()
    if isolation not in ("read_committed", "read_uncommitted"):
        raise MqdOptionError(
            f"option kafka.isolation.level: {isolation!r} is neither read_committed nor read_uncommitted"
        )
    numbers = {}
    for name, default in (("request.timeout.ms", 30_000), ("max.partition.fetch.bytes", 4 << 20)):
        numbers[name] = (
            SparkOptions({name: kafka_properties.pop(name)}).integer(name, default)
            if name in kafka_properties
            else default
        )
    return KafkaSettings(
        servers,
        kafka_properties.pop("client.id", "spark-mqd"),
        transport,
        isolation == "read_committed",
        numbers["request.timeout.ms"] / 1000,
        kafka_properties.pop("client.rack", ""),
        min(numbers["max.partition.fetch.bytes"], 64 << 20),
        kafka_properties,
        dict(security.settings),
        _encryption(options),
    )


def _encryption(options: SparkOptions) -> Encryption | None:
    """Raises MqdOptionError."""
    for name in options.values:
        # if it were ignored, values would be stored in plain text
        if name.startswith("kafka." + encryption_settings.PREFIX):
            raise MqdOptionError(f"option {name} is mqd's own: leave out kafka.")
    try:
        return encryption_settings.take(dict(options.values))
    except ConfigError as error:
        raise MqdOptionError(f"option {error}") from None


def _security(kafka_properties: dict[str, str]) -> ClientSecurity:
    """The security settings, which are removed from `kafka_properties`. Raises MqdOptionError."""
    names = [name for name in kafka_properties if name == "security.protocol" or name.startswith(("sasl.", "ssl."))]
    try:
        security = client.security_from_properties({name: kafka_properties.pop(name).strip() for name in names})
    except ConfigError as error:
        raise MqdOptionError(f"option kafka.{error}") from None
    if security.protocol == "PLAINTEXT" and "sasl.mechanisms" in security.settings:
        raise MqdOptionError(
            "option kafka.sasl.mechanism: kafka.security.protocol is PLAINTEXT, which does not authenticate"
        )
    return security


# -- where a query begins and ends -----------------------------------------------------------------

Offsets = dict[str, dict[int, int]]  # topic -> partition -> the next offset to read, or EARLIEST, LATEST


class Boundary(msgspec.Struct, frozen=True):
    """Where a range begins or ends. Exactly one field is set: `symbolic`, EARLIEST or LATEST for
    every partition; `offsets`; `timestamps` (ms) by partition; `timestamp` (ms) for every
    partition.
    """

    symbolic: int | None = None
    offsets: Offsets | None = None
    timestamps: Offsets | None = None
    timestamp: int | None = None


class SourceOptions(msgspec.Struct, frozen=True):
    """All options of a read. `topics` is set for subscribe and assign, `assigned` for assign,
    `pattern` (unanchored) for subscribePattern.
    """

    kafka: KafkaSettings
    topics: tuple[str, ...] = ()
    assigned: dict[str, list[int]] | None = None
    pattern: str | None = None
    starting: Boundary = Boundary(symbolic=LATEST)
    ending: Boundary = Boundary(symbolic=LATEST)
    timestamp_without_match: str = "error"  # startingOffsetsByTimestampStrategy
    fail_on_data_loss: bool = True
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 900_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    include_headers: bool = False
    poll_timeout_s: float = 120.0
    retries: int = 3
    retry_interval_s: float = 0.01
    group_id: str | None = None
    archive: str | None = None


def _archive(options: SparkOptions, streaming: bool, starting: Boundary, ending: Boundary) -> str | None:
    """Returns the directory of the archive, whose records a batch reads first. Raises MqdOptionError."""
    path = options.text("archive")
    if path is None:
        return None
    if streaming:
        raise MqdOptionError(
            "option archive is for spark.read: a stream begins in the log; read the archive in a batch first, or replay"
            " it into a topic"
        )
    if any(boundary.timestamp is not None or boundary.timestamps is not None for boundary in (starting, ending)):
        raise MqdOptionError(
            "option archive needs limits by offset: leave out the timestamp options, and filter on the column timestamp"
            " after load()"
        )
    return path


def source_options(spark_options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """Raises MqdOptionError."""
    options = SparkOptions(spark_options)
    kafka = kafka_settings(options, REFUSED_BY_SOURCE)
    topics, assigned, pattern = _strategy(options)
    _warn_ignored(options, streaming)
    if streaming and any(name in options for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")):
        raise MqdOptionError(
            "ending offset not valid in streaming queries: leave out endingOffsets, endingOffsetsByTimestamp and"
            " endingTimestamp, or use spark.read"
        )
    starting = _boundary(options, "starting", LATEST if streaming else EARLIEST)
    ending = _boundary(options, "ending", LATEST)
    if not streaming:
        _check_batch_boundaries(starting, ending)
    if options.text("groupId", "x") == "":
        raise MqdOptionError("option groupId: an empty name is not a consumer group")
    offsets_min, offsets_max = options.integer("minOffsetsPerTrigger"), options.integer("maxOffsetsPerTrigger")
    if offsets_min is not None and offsets_max is not None and offsets_min > offsets_max:
        raise MqdOptionError(
            f"The value of minOffsetPerTrigger({offsets_min}) is higher than the maxOffsetsPerTrigger({offsets_max}):"
            " no batch would ever start"
        )
    return SourceOptions(
        kafka,
        topics,
        assigned,
        pattern,
        starting,
        ending,
        timestamp_without_match=options.choice("startingOffsetsByTimestampStrategy", ("error", "latest"), "error"),
        fail_on_data_loss=options.boolean("failOnDataLoss", True),
        max_offsets_per_trigger=offsets_max,
        min_offsets_per_trigger=offsets_min,
        max_trigger_delay_ms=options.duration_ms("maxTriggerDelay", 900_000),
        min_partitions=options.integer("minPartitions"),
        max_records_per_partition=options.integer("maxRecordsPerPartition"),
        include_headers=options.boolean("includeHeaders", False),
        poll_timeout_s=options.integer("kafkaConsumer.pollTimeoutMs", 120_000, 0) / 1000,
        retries=options.integer("fetchOffset.numRetries", 3, 0),
        retry_interval_s=options.integer("fetchOffset.retryIntervalMs", 10, 0) / 1000,
        group_id=options.text("groupId"),
        archive=_archive(options, streaming, starting, ending),
    )


def _strategy(options: SparkOptions) -> tuple[tuple[str, ...], dict[str, list[int]] | None, str | None]:
    """(topics, assigned, pattern), as in SourceOptions."""
    strategies = [name for name in STRATEGIES if name in options]
    if not strategies:
        raise MqdOptionError(
            "One of the following options must be specified for Kafka source: subscribe, subscribePattern, assign"
        )
    if len(strategies) > 1:
        raise MqdOptionError(
            "Only one of the following options can be specified for Kafka source: subscribe, subscribePattern, assign;"
            f" there are {', '.join(strategies)}"
        )
    value = (options.text(strategies[0]) or "").strip()
    if strategies[0] == "assign":
        assigned = parse_assign(value)
        return tuple(assigned), assigned, None
    if strategies[0] == "subscribe":
        topics = tuple(dict.fromkeys(topic.strip() for topic in value.split(",") if topic.strip()))
        if not topics:
            raise MqdOptionError(f"No topics to subscribe to as specified value for option 'subscribe' is '{value}'")
        return topics, None, None
    if not value:
        raise MqdOptionError("Pattern to subscribe is empty as specified value for option 'subscribePattern' is ''")
    try:
        re.compile(value)
    except re.error as error:
        raise MqdOptionError(f"option subscribePattern: {value!r} is not a regular expression: {error}") from None
    return (), None, value


def _warn_ignored(options: SparkOptions, streaming: bool) -> None:
    if "kafka.group.id" in options:
        log.warning(
            "kafka.group.id is accepted without effect: records are read without a consumer group. To see a"
            " streaming query's lag as a group's, set groupId"
        )
    for name in (
        ("groupIdPrefix",)
        if streaming
        else ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupId")
    ):
        if name in options:
            log.warning("%s option ignored%s", name, "" if streaming else " in batch queries")


def _check_batch_boundaries(starting: Boundary, ending: Boundary) -> None:
    if starting.symbolic == LATEST:
        raise MqdOptionError(
            "starting offset can't be latest for batch queries: specify earliest, offsets or a timestamp"
        )
    if ending.symbolic == EARLIEST:
        raise MqdOptionError(
            "ending offset can't be earliest for batch queries: specify latest, offsets or a timestamp"
        )
    for boundary, disallowed, side in ((starting, LATEST, "starting"), (ending, EARLIEST, "ending")):
        for topic, partitions in (boundary.offsets or {}).items():
            for partition, offset in partitions.items():
                if offset == disallowed:
                    raise MqdOptionError(
                        f"{side} offset for {topic}-{partition} can't be"
                        f" {'latest' if disallowed == LATEST else 'earliest'} for batch queries"
                    )


def _boundary(options: SparkOptions, side: str, default: int) -> Boundary:
    """The boundary from the first of these options that is set: timestamp, offsets by timestamp,
    offsets.
    """
    timestamp = options.text(f"{side}Timestamp")
    if timestamp is not None:
        return Boundary(timestamp=_parse_timestamp(f"{side}Timestamp", timestamp))
    by_timestamp = options.text(f"{side}OffsetsByTimestamp")
    if by_timestamp is not None:
        return Boundary(timestamps=parse_offsets(by_timestamp, f"{side}OffsetsByTimestamp", minimum=0))
    value = options.text(f"{side}Offsets")
    if value is None:
        return Boundary(symbolic=default)
    symbolic = {"earliest": EARLIEST, "latest": LATEST}.get(value.strip().lower())
    return (
        Boundary(offsets=parse_offsets(value, f"{side}Offsets", minimum=EARLIEST))
        if symbolic is None
        else Boundary(symbolic=symbolic)
    )


def _parse_timestamp(name: str, value: str) -> int:
    if not value.strip().isdigit():
        raise MqdOptionError(f"option {name}: {value!r} is not a timestamp in milliseconds since 1970")
    return int(value)


def parse_assign(text: str) -> dict[str, list[int]]:
    """The partitions in JSON such as {"topic": [0, 1]}. Raises MqdOptionError."""
    assigned = _json_object(text, "assign", '{"topic":[0,1]}')
    for topic, partitions in assigned.items():
        if not isinstance(partitions, list) or not all(
            type(index) is int and 0 <= index < 2**31 for index in partitions
        ):
            raise MqdOptionError(
                f'option assign: {topic} has {partitions!r}; Expected e.g. {{"topicA":[0,1],"topicB":[0,1]}}'
            )
    if not any(assigned.values()):
        raise MqdOptionError(f"No topicpartitions to assign as specified value for option 'assign' is '{text}'")
    return {topic: sorted(set(partitions)) for topic, partitions in sorted(assigned.items()) if partitions}


def parse_offsets(text: str, name: str, minimum: int) -> Offsets:
    """The offsets in JSON such as {"topic": {"0": 23, "1": -2}}, each at least `minimum`. Names
    that begin with @ (topic ids in mqd's own offsets) are left out. Raises MqdOptionError.
    """
    by_topic = _json_object(text, name, '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}')
    offsets: Offsets = {}
    for topic, partitions in by_topic.items():
        if topic.startswith("@"):
            continue
        if not isinstance(partitions, dict) or not all(index.isdigit() and int(index) < 2**31 for index in partitions):
            raise MqdOptionError(
                f'option {name}: {topic} has {partitions!r}; Expected e.g. {{"topicA":{{"0":23,"1":-1}}}}'
            )
        for index, number in partitions.items():
            if type(number) is not int or not minimum <= number < 2**63:
                raise MqdOptionError(
                    f"option {name}: {topic}-{index} has {number!r}, not a"
                    f" number{' of milliseconds' if minimum == 0 else ''} of at least {minimum}"
                )
        offsets[topic] = {int(index): number for index, number in partitions.items()}
    return offsets


def _json_object(text: str, name: str, example: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise MqdOptionError(f"option {name}: Expected e.g. {example}, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise MqdOptionError(f"option {name}: Expected e.g. {example}, got {text!r}")
    return value
