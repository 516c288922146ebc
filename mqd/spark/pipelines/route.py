"""Filters records and distributes them to topics, with dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.spark.pipelines.values import CORRUPT, RECORD, parse_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from mqd.spark.pipelines.settings import Rule, Value

REASON_HEADER = "mqd.reason"
FROM_HEADER = "mqd.from"


def route(
    records: DataFrame, *, value: Value, rules: Sequence[Rule], dead_letters: str, otherwise: str = ""
) -> DataFrame:
    """Returns the records with the column `topic`: the topic of the first matching rule, or
    `otherwise` if no rule matches (if that is "", the record is dropped). Records whose value
    cannot be decoded go to `dead_letters`. Key, value and headers are unchanged.

    A dead letter has two additional headers: `mqd.reason` (why) and `mqd.from`
    (topic-partition@offset).
    """
    from pyspark.sql import functions as f

    rows = parse_values(records, value).select("value.*", RECORD, CORRUPT)
    target = f.lit(otherwise or None).cast("string")
    for rule in reversed(rules):
        target = f.when(f.expr(rule.when), f.lit(rule.topic)).otherwise(target)
    dead = f.col(CORRUPT).isNotNull()
    return rows.select(
        f.when(dead, f.lit(dead_letters)).otherwise(target).alias("topic"),
        f.col(f"{RECORD}.key").alias("key"),
        f.col(f"{RECORD}.value").alias("value"),
        f.when(dead, f.concat(_headers(records), _dead_letter_headers())).otherwise(_headers(records)).alias("headers"),
    ).where(f.col("topic").isNotNull())


def _headers(records: DataFrame):
    from pyspark.sql import functions as f

    empty = f.array().cast("array<struct<key:string,value:binary>>")
    return f.coalesce(f.col(f"{RECORD}.headers"), empty) if "headers" in records.columns else empty


def _dead_letter_headers():
    from pyspark.sql import functions as f

    origin = f.concat_ws(
        "",
        f.col(f"{RECORD}.topic"),
        f.lit("-"),
        f.col(f"{RECORD}.partition").cast("string"),
        f.lit("@"),
        f.col(f"{RECORD}.offset").cast("string"),
    )
    reason = f.lit("the value is not JSON that matches value.schema")
    return f.array(
        *[
            f.struct(f.lit(name).alias("key"), text.cast("binary").alias("value"))
            for name, text in ((REASON_HEADER, reason), (FROM_HEADER, origin))
        ]
    )
