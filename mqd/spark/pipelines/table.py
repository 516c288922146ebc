"""The latest value of each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LATEST_COLUMNS = ("value", "timestamp", "partition", "offset")


def table(records: DataFrame) -> DataFrame:
    """Columns key, value (null: deleted), timestamp, partition, offset of the last record of each
    key. Records without a key cannot be in a table and are dropped.

    All records of a key are in one partition (of one topic), so the highest offset is the last one.
    """
    from pyspark.sql import functions as f

    last = f.max_by(f.struct(*[f.col(name) for name in _LATEST_COLUMNS]), f.col("offset")).alias("last")
    return records.where(f.col("key").isNotNull()).groupBy("key").agg(last).select("key", "last.*")
