"""The columns of a read, which are those of Spark's Kafka source, and the subset that a query
requests.

Spark does not prune columns for Python data sources. Use `.schema("value binary")` on the reader to
prune them explicitly: it may list any of the columns, in any order, with their types; others are
refused.
Sources: Spark's Structured Streaming + Kafka Integration Guide (the columns); the types are exact,
because Spark compares Arrow schemas for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mqd.spark.options import MqdOptionError

if TYPE_CHECKING:
    import pyarrow

HEADERS = "headers"
# name -> Spark's type in DDL, in the order of Kafka's source; headers only with includeHeaders
COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    HEADERS: "array<struct<key:string,value:binary>>",
}


def column_names(include_headers: bool) -> tuple[str, ...]:
    return tuple(name for name in COLUMNS if include_headers or name != HEADERS)


def ddl(include_headers: bool) -> str:
    """The result of DataSource.schema()."""
    return ", ".join(f"{name} {COLUMNS[name]}" for name in column_names(include_headers))


def requested_columns(schema: Any) -> tuple[str, ...]:
    """Returns the column names of a StructType from Spark, which is either the schema of ddl() or
    the user's own. Raises MqdOptionError for a column that a record does not have.
    """
    requested = []
    for field in schema.fields:
        ddl_type = COLUMNS.get(field.name)
        if ddl_type is None:
            raise MqdOptionError(
                f"there is no column {field.name!r} in format mqd; there are {', '.join(COLUMNS)}. Select and cast"
                " after load() instead of giving another schema"
            )
        if field.dataType.simpleString() != ddl_type:
            raise MqdOptionError(
                f"column {field.name} is {ddl_type} in format mqd and not {field.dataType.simpleString()}: cast it"
                " after load()"
            )
        requested.append(field.name)
    if not requested:
        raise MqdOptionError(
            "a schema without columns reads nothing: leave .schema() out, or list some of " + ", ".join(COLUMNS)
        )
    return tuple(requested)


def arrow_schema(columns: Sequence[str]) -> pyarrow.Schema:
    """The Arrow schema that Spark expects for these columns: equal to pyspark's
    to_arrow_schema(schema, timezone="UTC").
    """
    import pyarrow as pa

    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestampType": pa.int32(),
        HEADERS: pa.list_(header),
    }
    return pa.schema([pa.field(name, types[name]) for name in columns])
