"""Computes measures over windows of event time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame


def aggregate(
    rows: DataFrame,
    *,
    time: str,
    window: str,
    watermark: str,
    measures: Mapping[str, str],
    by: Sequence[str] = (),
    slide: str = "",
) -> DataFrame:
    """Returns rows with the columns `start` and `end` (timestamps of the window), those of `by`,
    and the measures.

    In a stream a window is emitted once, when the watermark has passed its end; a batch emits all
    windows.
    """
    from pyspark.sql import functions as f

    events = rows.withColumn("event_time", f.expr(time).cast("timestamp")).withWatermark("event_time", watermark)
    windows = f.window("event_time", window, slide) if slide else f.window("event_time", window)
    aggregated = events.groupBy(windows, *[f.expr(expression) for expression in by]).agg(
        *[f.expr(expression).alias(name) for name, expression in measures.items()]
    )
    return aggregated.select(
        f.col("window.start").alias("start"),
        f.col("window.end").alias("end"),
        *[f.col(f"`{name}`") for name in aggregated.columns if name != "window"],
    )
