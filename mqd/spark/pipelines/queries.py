"""Spark SQL over topics: every topic named in a query becomes a view.

A view has the fields of the JSON values as columns, and the struct `record` (key and value as text,
topic, partition, offset, timestamp). Fields come from a given schema, or are inferred from the
topic's first SAMPLE_COUNT values. A topic whose values are not JSON objects has only `record`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mqd.spark.pipelines.settings import READ_COMMITTED, Value
from mqd.spark.pipelines.values import RECORD, as_rows, decode_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLE_COUNT = 1000
FORMAT = "mqd"


def topics_in(query: str, topics: Sequence[str]) -> list[str]:
    """Returns the topics whose names occur in the query; an occurrence may also be something else,
    such as a column. Names with characters other than letters, digits and _ must be in backquotes,
    as everywhere in SQL.
    """
    return [topic for topic in topics if re.search(rf"(?<![\w.-]){re.escape(topic)}(?![\w-])", query)]


def add_view(
    spark: SparkSession,
    topic: str,
    bootstrap: str,
    schema: str | None = None,
    live: bool = False,
    starting: str = "earliest",
) -> None:
    """Makes the topic a view of the session. `schema`: the fields, in DDL; "" = only `record`;
    None = infer the fields from a sample. `live`: whether to make it a streaming view.
    """
    reader = spark.readStream if live else spark.read
    records = (
        reader.format(FORMAT)
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", starting)
        .options(**READ_COMMITTED)
        .load()
    )
    if schema is None:
        schema = infer_schema(spark, topic, bootstrap)
    decoded_rows = decode_values(records, Value(schema=schema, malformed="drop")) if schema else as_rows(records)
    texts = decoded_rows.withColumn(
        RECORD,
        decoded_rows[RECORD]
        .withField("key", decoded_rows[RECORD]["key"].cast("string"))
        .withField("value", decoded_rows[RECORD]["value"].cast("string")),
    )
    texts.createOrReplaceTempView(f"`{topic}`")


def infer_schema(spark: SparkSession, topic: str, bootstrap: str) -> str:
    """DDL of the JSON objects among the topic's first values; "" if there are none."""
    records = (
        spark.read.format(FORMAT)
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .options(**READ_COMMITTED)
        .load()
    )
    values = [
        row.value
        for row in records.selectExpr("CAST(value AS STRING) AS value")
        .where("value LIKE '{%'")
        .limit(SAMPLE_COUNT)
        .collect()
    ]
    if not values:
        return ""
    schema = (
        spark.read.option("columnNameOfCorruptRecord", "_corrupt_value")
        .json(spark.sparkContext.parallelize(values, 1))
        .schema
    )
    return ", ".join(
        f"`{field.name}` {field.dataType.simpleString()}"
        for field in schema.fields
        if field.name not in ("_corrupt_value", RECORD)
    )


def prepare_query(
    spark: SparkSession,
    query: str,
    topics: Sequence[str],
    bootstrap: str,
    schemas: Mapping[str, str],
    live: bool = False,
    starting: str = "earliest",
) -> DataFrame:
    """Makes views of the query's topics, and returns its DataFrame."""
    for topic in topics_in(query, topics):
        add_view(spark, topic, bootstrap, schemas.get(topic), live, starting)
    return spark.sql(query)
