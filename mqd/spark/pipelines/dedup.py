"""Keeps only the first of several equal records."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def dedup(rows: DataFrame, *, by: Sequence[str], within: str, time: str = "record.timestamp") -> DataFrame:
    """Drops rows whose values of `by` (SQL expressions) have occurred before: in a stream at most
    `within` earlier by `time`, in a batch at any time. The columns are unchanged.

    Which record is the first is only defined within one partition.
    """
    from pyspark.sql import functions as f

    names = [f"_same_{number}" for number in range(len(by))]
    events = rows.withColumn("_event_time", f.expr(time).cast("timestamp")).withWatermark("_event_time", within)
    for name, expression in zip(names, by, strict=True):
        events = events.withColumn(name, f.expr(expression))
    kept_rows = events.dropDuplicatesWithinWatermark(names) if rows.isStreaming else events.dropDuplicates(names)
    return kept_rows.drop("_event_time", *names)
