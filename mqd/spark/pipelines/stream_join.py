"""Joins rows of two streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def stream_join(
    left: DataFrame, right: DataFrame, *, on: str, how: str = "inner", select: Sequence[str] = ("left.*", "right.*")
) -> DataFrame:
    """The joined rows. `on` and `select` refer to the two sides as `left` and `right`; each has
    `event_time` (added by `with_event_time`).
    """
    from pyspark.sql import functions as f

    return left.alias("left").join(right.alias("right"), f.expr(on), how).selectExpr(*select)


def with_event_time(rows: DataFrame, *, time: str, watermark: str) -> DataFrame:
    """The rows with `event_time` and a watermark on it."""
    from pyspark.sql import functions as f

    return rows.withColumn("event_time", f.expr(time).cast("timestamp")).withWatermark("event_time", watermark)
