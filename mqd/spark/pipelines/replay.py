"""An archive back into topics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.manifest import Archive, ArchiveError, ArchivedFile
from mqd.spark.pipelines.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = Mapping[str, Mapping[str, int]]


def replay(spark: SparkSession, archive: Archive, *, topics: list[str], to: Mapping[str, str], starting_timestamp: str = "", ending_timestamp: str = "",
           starting_offsets: Offsets | None = None, ending_offsets: Offsets | None = None) -> DataFrame:  # fmt: skip
    """Columns of the sink (topic, partition, key, value, headers, timestamp), each Spark partition with whole partitions of the log in the order of their offsets.

    Raises ArchiveError for a topic that the archive does not have, SettingsError for a time that is not one.
    """
    from pyspark.sql import functions as f

    wanted = topics or archive.topics
    missing = [topic for topic in wanted if topic not in archive.topics]
    if missing:
        raise ArchiveError(f"{archive.path} has nothing of {', '.join(missing)}; it has {', '.join(archive.topics) or 'no topic at all'}")
    first_ms, end_ms = _milliseconds("starting_timestamp", starting_timestamp), _milliseconds("ending_timestamp", ending_timestamp)
    files = [file for topic in wanted for file in archive.of(topic) if _within(file, first_ms, end_ms)]
    found = archiving.read(spark, archive, files)
    if first_ms is not None:
        found = found.where(f.unix_millis("timestamp") >= first_ms)
    if end_ms is not None:
        found = found.where(f.unix_millis("timestamp") < end_ms)
    for offsets, holds in ((starting_offsets, f.col("offset").__ge__), (ending_offsets, f.col("offset").__lt__)):
        for topic, partitions in (offsets or {}).items():
            for partition, offset in partitions.items():
                elsewhere = (f.col("topic") != topic) | (f.col("partition") != int(partition))
                found = found.where(elsewhere | holds(offset))
    count = len({(file.topic, span.partition) for file in files for span in file.spans})
    names = f.col("topic")
    for topic, other in to.items():
        names = f.when(f.col("topic") == topic, f.lit(other)).otherwise(names)
    ordered = found.repartition(max(1, min(count, 200)), "topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    return ordered.select(names.alias("topic"), "partition", "key", "value", "headers", "timestamp")


def _milliseconds(name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"{name}: {text!r} is not a time like 2026-11-21T10:00:00+01:00") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _within(file: ArchivedFile, first_ms: int | None, end_ms: int | None) -> bool:
    """Whether the file may have records of that time."""
    return any((first_ms is None or span.max_timestamp >= first_ms) and (end_ms is None or span.min_timestamp < end_ms) for span in file.spans)
