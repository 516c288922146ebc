"""Replays an archive into topics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.manifest import Archive, ArchiveError
from mqd.spark.pipelines.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqd.spark.pipelines.parquet import ArchivedTask

Offsets = Mapping[str, Mapping[str, int]]


def replay(
    spark: SparkSession,
    archive: Archive,
    *,
    topics: list[str],
    to: Mapping[str, str],
    starting_timestamp: str = "",
    ending_timestamp: str = "",
    starting_offsets: Offsets | None = None,
    ending_offsets: Offsets | None = None,
) -> DataFrame:
    """Returns the records, with the columns of the sink (topic, partition, key, value, headers,
    timestamp). Each Spark partition contains the records of one log partition, in offset order.

    Raises ArchiveError for a topic that the archive does not have. Raises SettingsError for an
    invalid time, or if `to` or the offsets name a topic or partition that is not replayed.
    """
    requested = topics or archive.topics
    missing = [topic for topic in requested if topic not in archive.topics]
    if missing:
        raise ArchiveError(
            f"{archive.path} has no records of {', '.join(missing)}; it has"
            f" {', '.join(archive.topics) or 'no topic at all'}"
        )
    _refuse_unknown(archive, requested, to, starting_offsets or {}, ending_offsets or {})
    first_ms = _milliseconds("starting_timestamp", starting_timestamp)
    end_ms = _milliseconds("ending_timestamp", ending_timestamp)
    from pyspark.sql import functions as f

    tasks = _tasks(archive, requested, (first_ms, end_ms), (starting_offsets or {}, ending_offsets or {}))
    records = archiving.scan(spark, tasks, ("topic", "partition", "offset", "key", "value", "headers", "timestamp"))
    if first_ms is not None:
        records = records.where(f.unix_millis("timestamp") >= first_ms)
    if end_ms is not None:
        records = records.where(f.unix_millis("timestamp") < end_ms)
    target = f.col("topic")
    for topic, target_topic in to.items():
        target = f.when(f.col("topic") == topic, f.lit(target_topic)).otherwise(target)
    return records.select(target.alias("topic"), "partition", "key", "value", "headers", "timestamp")


def _refuse_unknown(
    archive: Archive, topics: list[str], to: Mapping[str, str], starting: Offsets, ending: Offsets
) -> None:
    """Raises SettingsError for an unknown name. If a mistyped name were ignored, a topic would be
    replayed into itself, or in full.
    """
    for setting, given in (("to", to), ("starting_offsets", starting), ("ending_offsets", ending)):
        unknown = [topic for topic in given if topic not in topics]
        if unknown:
            raise SettingsError(
                f"{setting}: {unknown[0]!r} is not among the topics that are replayed; they are {', '.join(topics)}"
            )
    for setting, offsets in (("starting_offsets", starting), ("ending_offsets", ending)):
        for topic, partitions in offsets.items():
            archived = sorted(archive.ends(topic))
            wrong = [partition for partition in partitions if partition not in map(str, archived)]
            if wrong:
                raise SettingsError(
                    f"{setting}: the archive {archive.path} has no partition {wrong[0]!r} of {topic}; it has"
                    f" {', '.join(map(str, archived))}"
                )


def _tasks(
    archive: Archive, topics: list[str], times: tuple[int | None, int | None], offsets: tuple[Offsets, Offsets]
) -> list[list[ArchivedTask]]:
    """Returns, for each partition, the list of files that may contain requested records."""
    from mqd.spark.pipelines.parquet import ArchivedTask

    by_partition: dict[tuple[str, int], list[ArchivedTask]] = {}
    for topic in topics:
        for file, span in ((each, span) for each in archive.files_of(topic) for span in each.spans):
            start = max(span.first, _bound(offsets[0], topic, span.partition, 0))
            end = min(span.end, _bound(offsets[1], topic, span.partition, span.end))
            if (
                start < end
                and (times[0] is None or span.max_timestamp >= times[0])
                and (times[1] is None or span.min_timestamp < times[1])
            ):
                by_partition.setdefault((topic, span.partition), []).append(
                    ArchivedTask(archive.path, file.path, topic, ((span.partition, start, end),))
                )
    return [tasks for _, tasks in sorted(by_partition.items())]


def _bound(offsets: Offsets, topic: str, partition: int, default: int) -> int:
    return int(offsets.get(topic, {}).get(str(partition), default))


def _milliseconds(name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"{name}: {text!r} is not a time like 2026-11-21T10:00:00+01:00") from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
