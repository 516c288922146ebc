"""Archives topics as Parquet files: `PATH/topic=T/date=D/*.parquet`.

Each task of a batch writes its own files (mqd/spark/pipelines/parquet.py), and one commit
(mqd/spark/pipelines/manifest.py) makes them valid. When Spark repeats a batch after a crash, either
the batch is already committed, or its files are written again under new names: each record counts
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from mqd.spark.pipelines.manifest import Archive, ArchivedFile, Commit

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    from mqd.spark.pipelines.parquet import ArchivedTask


def with_archive_columns(records: DataFrame) -> DataFrame:
    """The records with the columns of an archive's files, and `topic` and `date` (the UTC day of
    the record's timestamp).
    """
    from pyspark.sql import functions as f

    headers = f.col("headers") if "headers" in records.columns else f.lit(None)
    return records.select(
        "partition",
        "offset",
        "timestamp",
        "timestampType",
        "key",
        "value",
        headers.cast("array<struct<key:string,value:binary>>").alias("headers"),
        "topic",
        f.to_date(f.to_utc_timestamp("timestamp", f.current_timezone())).alias("date"),
    )


def append(
    batch: DataFrame,
    archive: Archive,
    query: str,
    number: int,
    ends: dict[str, dict[str, int]] | None = None,
    *,
    ids: dict[str, str] | None = None,
    in_order: bool = False,
) -> Commit | None:
    """Writes a batch of a query into the archive. Returns None if the batch is already there, or is
    empty.

    ends: the offsets that the batch ends at. ids: the topics' ids (manifest.Commit.topic_ids).
    in_order: each Spark partition already has its records in the order of their offsets, as
    format("mqd") returns them; otherwise they are sorted.
    """
    if archive.has_batch(query, number, ends):
        return None
    records = with_archive_columns(batch)
    added = write(
        records if in_order else records.sortWithinPartitions("topic", "partition", "offset"),
        archive,
        f"{query}-{number:09}",
    )
    if not added and not ends:
        return None
    commit = Commit(query, number, added, ends=ends or {}, topic_ids=ids or {})
    archive.commit(commit)
    return commit


def write(records: DataFrame, archive: Archive, prefix: str) -> list[ArchivedFile]:
    """Writes records, which have the columns of `with_archive_columns` and are in the order of
    offsets within each Spark partition, into files that no commit lists yet.
    """
    from mqd.spark.pipelines.parquet import writer

    return [
        msgspec.json.decode(row.file, type=ArchivedFile)
        for row in records.mapInArrow(writer(archive.path, prefix), "file STRING").collect()
    ]


def scan(spark: SparkSession, tasks: Sequence[Sequence[ArchivedTask]], columns: Sequence[str]) -> DataFrame:
    """Returns the given columns of archived records; `offset` must be one of them. Each element of `tasks`
    becomes a Spark partition, which has the log's partitions one after another, each in the order
    of offsets.
    """
    from mqd.spark.pipelines.parquet import read_in_order
    from mqd.spark.schema import COLUMNS

    def read_all(id_batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in id_batches:
            for index in batch.column("id").to_pylist():
                yield from read_in_order(tasks[index], columns)

    schema = ", ".join(f"{name} {COLUMNS[name]}" for name in columns)
    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read_all, schema)
