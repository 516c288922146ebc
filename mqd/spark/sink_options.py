"""Options and columns of the sink: those of Spark's Kafka sink, and some of mqd's own.

    topic                 the topic of every row; default: the column `topic`
    delivery              exactly-once (default; a batch is one transaction, and a repeated batch
                          is dropped) or at-least-once
    txnAppId, txnVersion  batch writes: the name of an application, and a number that rises with each
                          of its writes; a write is dropped if one with the same name and version has
                          been committed before
    kafka.*               as in the Java producer: compression.type, batch.size, max.request.size,
                          delivery.timeout.ms, transaction.timeout.ms, acks, max.block.ms

Columns: `value` (needed), `key` (both string or binary), `topic` (string), `partition` (int),
`headers` (array<struct<key string, value binary>>), `timestamp` (timestamp: the record's own time,
which Kafka's sink does not have; default: now). Other columns are ignored, as in Kafka's sink. A
null value is a tombstone. Whatever can be checked in advance is checked when Spark plans the write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mqd.spark.options import REFUSED_BY_SINK, KafkaSettings, MqdOptionError, SparkOptions, kafka_settings

EXACTLY_ONCE, AT_LEAST_ONCE = "exactly-once", "at-least-once"
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")  # in the order of Kafka's codec numbers
_HEADERS = "array<struct<key:string,value:binary>>"
# column -> its allowed types, by Spark's names
COLUMNS = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
    "timestamp": ("timestamp", "timestamp_ntz"),
}
_NOT_TOPICS = frozenset((".", ".."))


class SinkOptions(msgspec.Struct, frozen=True):
    """All options of a write. `columns`: the schema's name for each of COLUMNS; "" if it has
    none.
    """

    kafka: KafkaSettings
    columns: tuple[str, ...]
    topic: str | None = None
    is_exactly_once: bool = True
    compression: int = 0
    batch_bytes: int = 512 << 10
    request_bytes: int = 4 << 20
    acks: int = -1
    delivery_timeout_s: float = 120.0
    topic_timeout_s: float = 60.0
    transaction_timeout_ms: int = 900_000
    app_id: str | None = None
    app_version: int = 0


def sink_options(spark_options: Mapping[str, str], schema: Any, streaming: bool) -> SinkOptions:
    """Raises MqdOptionError."""
    options = SparkOptions(spark_options)
    refused = {
        **REFUSED_BY_SINK,
        "transactional.id": (
            "the sink derives its own from the query's id; for batch writes there are txnAppId and txnVersion"
        ),
    }
    kafka = kafka_settings(options, refused, "producer")
    others = SparkOptions(kafka.others)
    topic = _topic(options)
    is_exactly_once = options.choice("delivery", (EXACTLY_ONCE, AT_LEAST_ONCE), EXACTLY_ONCE) == EXACTLY_ONCE
    app_id, app_version = _application(options, streaming, is_exactly_once)
    if is_exactly_once and others.text("enable.idempotence", "true").strip().lower() == "false":
        raise MqdOptionError(
            "option kafka.enable.idempotence: exactly-once delivery needs true; leave it out, or set delivery"
            " to at-least-once"
        )
    return SinkOptions(
        kafka,
        _columns(schema, topic),
        topic,
        is_exactly_once,
        compression=COMPRESSIONS.index(others.choice("compression.type", COMPRESSIONS, "none")),
        batch_bytes=min(max(others.integer("batch.size", 512 << 10), 16 << 10), 4 << 20),
        request_bytes=min(max(others.integer("max.request.size", 4 << 20), 64 << 10), 64 << 20),
        acks=_acks(others, is_exactly_once),
        delivery_timeout_s=others.integer("delivery.timeout.ms", 120_000) / 1000,
        topic_timeout_s=others.integer("max.block.ms", 60_000) / 1000,
        transaction_timeout_ms=others.integer("transaction.timeout.ms", 900_000, 1000),
        app_id=app_id,
        app_version=app_version,
    )


def _topic(options: SparkOptions) -> str | None:
    topic = options.text("topic")
    if topic is not None and (not topic.strip() or topic in _NOT_TOPICS or len(topic) > 249):
        raise MqdOptionError(f"option topic: {topic!r} is not a topic name")
    return topic


def _application(options: SparkOptions, streaming: bool, is_exactly_once: bool) -> tuple[str | None, int]:
    app_id, version = options.text("txnAppId"), options.integer("txnVersion", None, 0)
    if (app_id is None) != (version is None) or app_id == "":
        raise MqdOptionError(
            "txnAppId and txnVersion go together: the name of an application, and a number that rises with each of its"
            " writes"
        )
    if app_id is not None and streaming:
        raise MqdOptionError(
            "txnAppId and txnVersion are for batch writes, in foreachBatch for example; a streaming write is"
            " identified by its query's id and batch"
        )
    if app_id is not None and not is_exactly_once:
        raise MqdOptionError(
            "txnAppId makes a write exactly once, but delivery is at-least-once. Leave one of them out"
        )
    return app_id, version or 0


def _acks(others: SparkOptions, is_exactly_once: bool) -> int:
    acks = {"all": -1, "-1": -1, "1": 1}.get(others.text("acks", "all").strip().lower())
    if acks is None or (is_exactly_once and acks != -1):
        raise MqdOptionError(
            f"option kafka.acks: {others.text('acks')!r} is not allowed; it must be 'all'"
            + (" for exactly-once delivery" if is_exactly_once else " or '1'")
        )
    return acks


def _columns(schema: Any, topic: str | None) -> tuple[str, ...]:
    """Returns the schema's name for each of COLUMNS. Case is ignored, as in Kafka's sink."""
    schema_names: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name in COLUMNS:
            if name in schema_names:
                raise MqdOptionError(f"column {name} appears twice: as {schema_names[name]} and {field.name}")
            _check_type(name, field.dataType.simpleString())
            schema_names[name] = field.name
    if "value" not in schema_names:
        columns = ", ".join(field.name for field in schema.fields) or "none"
        raise MqdOptionError(
            f"column value (string or binary) is required and not among the rows' columns ({columns}): use for instance"
            ' df.selectExpr("to_json(struct(*)) AS value")'
        )
    if topic is None and "topic" not in schema_names:
        raise MqdOptionError("the target is missing: set the option topic, or add a string column topic")
    return tuple(schema_names.get(name, "") for name in COLUMNS)


def _check_type(name: str, kind: str) -> None:
    if name == "timestamp" and kind not in COLUMNS[name]:
        raise MqdOptionError(
            f"column timestamp is {kind}: the record's own time must be a timestamp. Cast it, rename it, or leave"
            " it out"
        )
    if kind not in COLUMNS[name]:
        raise MqdOptionError(
            f"column {name} is {kind}, and must be {' or '.join(COLUMNS[name])}: cast it before writing"
        )


def column_name(options: SinkOptions, name: str) -> str | None:
    """Returns the rows' name for one of COLUMNS, which may differ in case; None if the rows do not
    have this column.
    """
    return options.columns[tuple(COLUMNS).index(name)] or None
