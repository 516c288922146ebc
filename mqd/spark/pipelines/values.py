"""Converts between records and rows.

Rows that pipelines work on have the fields of the decoded value as columns, and one column
`record`: a struct with the rest of the record (key, topic, partition, offset, timestamp, headers,
and the original value). When a pipeline starts, a value.schema with a field named `record` is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.spark.pipelines.settings import SettingsError, Value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORD = "record"
CORRUPT = "_corrupt_value"


def as_rows(records: DataFrame) -> DataFrame:
    """Records (the columns of format("mqd")) as rows with `record` only."""
    from pyspark.sql import functions as f

    return records.select(f.struct(*[f.col(name) for name in records.columns]).alias(RECORD))


def parse_values(records: DataFrame, settings: Value) -> DataFrame:
    """Returns the columns `record`, `value` (a struct; null if the record has no value) and
    `_corrupt_value` (string: the text of a value that does not match the schema, otherwise null).
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructType

    schema = _schema(settings)
    text = f.col(f"{RECORD}.value").cast("string")
    with_corrupt = StructType([*schema.fields]).add(CORRUPT, StringType())
    value_column = f.from_json(text, with_corrupt, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT})
    return (
        as_rows(records)
        .withColumn("value", value_column)
        .withColumn(CORRUPT, f.col(f"value.{CORRUPT}"))
        .withColumn("value", f.col("value").dropFields(CORRUPT))
    )


def decode_values(records: DataFrame, settings: Value) -> DataFrame:
    """Rows with the fields of the value as columns. A malformed value stops the query (the error
    names its topic, partition and offset), or its record is dropped.
    """
    from pyspark.sql import functions as f

    decoded_rows = parse_values(records, settings)
    if settings.malformed == "drop":
        decoded_rows = decoded_rows.where(f.col(CORRUPT).isNull())
    else:
        decoded_rows = decoded_rows.withColumn(
            "value", f.when(f.col(CORRUPT).isNull(), f.col("value")).otherwise(f.raise_error(_error_text()))
        )
    return decoded_rows.select("value.*", RECORD)


def encode_rows(frame: DataFrame, key: str) -> DataFrame:
    """Returns the rows as two columns: "key", the value of the SQL expression in the parameter
    `key` as a string (without this column if the parameter is ""), and "value", the JSON of all
    columns but "record".
    """
    from pyspark.sql import functions as f

    fields = [f.col(f"`{name}`") for name in frame.columns if name != RECORD]
    value = f.to_json(f.struct(*fields), {"ignoreNullFields": "false"}).alias("value")
    return frame.select(f.expr(key).cast("string").alias("key"), value) if key else frame.select(value)


def _schema(settings: Value):
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    try:
        schema = StructType.fromDDL(settings.schema)
    except (ParseException, ValueError) as error:
        raise SettingsError(f"value.schema is not a schema: {str(error).strip().splitlines()[0]}") from None
    reserved = {RECORD, CORRUPT} & {name.lower() for name in schema.names}
    if reserved:
        raise SettingsError(
            f"value.schema has a field {sorted(reserved)[0]!r}; that name is reserved for the record's metadata"
        )
    return schema


def _error_text():
    from pyspark.sql import functions as f

    position = [
        f.col(f"{RECORD}.topic"),
        f.lit("-"),
        f.col(f"{RECORD}.partition").cast("string"),
        f.lit(", offset "),
        f.col(f"{RECORD}.offset").cast("string"),
    ]
    remedy = f.lit(". Set value.malformed=drop, or send such records elsewhere with a `route` pipeline.")
    return f.concat(f.lit("the value is not JSON that matches value.schema: "), *position, remedy)
