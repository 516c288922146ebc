"""Topics into Parquet: `PATH/topic=T/date=D/*.parquet`.

Each batch is written by Spark into a staging directory, its files are moved to their places, and one commit (mqd/spark/pipelines/manifest.py) makes them count. A batch that Spark repeats after a crash finds its
commit, or is written again under new names; either way each record counts once.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from mqd.spark.pipelines.manifest import STAGING, Archive, ArchivedFile, Commit, Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, date DATE"
COMPRESSION = "zstd"


def archived(records: DataFrame) -> DataFrame:
    """Records with the column `date` (UTC day of the record's timestamp), in the columns of an archive's files."""
    from pyspark.sql import functions as f

    headers = f.col("headers") if "headers" in records.columns else f.lit(None)
    return records.select(
        "partition", "offset", "timestamp", "timestampType", "key", "value",
        headers.cast("array<struct<key:string,value:binary>>").alias("headers"), "topic", f.to_date(f.to_utc_timestamp("timestamp", f.current_timezone())).alias("date"),
    )  # fmt: skip


def append(batch: DataFrame, archive: Archive, query: str, number: int, ends: dict[str, dict[str, int]] | None = None) -> Commit | None:
    """One batch of a query into the archive; `ends`: the offsets it ends at. None: it is there already, or is empty."""
    if number <= archive.batches.get(query, -1):
        return None
    added = write(archived(batch), archive, f"{query}-{number:09}")
    if not added and not ends:
        return None
    commit = Commit(query, number, added, ends=ends or {})
    archive.commit(commit)
    return commit


def write(frame: DataFrame, archive: Archive, prefix: str) -> list[ArchivedFile]:
    """Rows in an archive's columns as files in their places that no commit names yet. Files hold each partition's records in the order of their offsets."""
    staging = f"{STAGING}/{prefix}-{uuid.uuid4().hex[:8]}"
    where = f"{archive.path.rstrip('/')}/{staging}"
    ordered = frame.sortWithinPartitions("topic", "date", "partition", "offset")
    ordered.write.partitionBy("topic", "date").option("compression", COMPRESSION).mode("overwrite").parquet(where)
    try:
        return _placed(frame.sparkSession, archive, staging, prefix)
    finally:
        archive.filesystem.delete_dir(f"{archive.root}/{staging}")


def read(spark: SparkSession, archive: Archive, files: list[ArchivedFile]) -> DataFrame:
    """The records of some of an archive's files, in its columns."""
    if not files:
        return spark.createDataFrame([], SCHEMA)
    return spark.read.schema(SCHEMA).option("basePath", archive.path).parquet(*archive.full(files))


def _placed(spark: SparkSession, archive: Archive, staging: str, prefix: str) -> list[ArchivedFile]:
    found = []
    for number, (staged, topic, date, spans) in enumerate(_spans(spark, archive, staging)):
        relative = f"topic={topic}/date={date}/{prefix}-{number:05}-{uuid.uuid4().hex[:8]}.parquet"
        size_bytes = archive.filesystem.get_file_info(staged).size
        archive.sync(staged)
        archive.place(staged, relative)
        found.append(ArchivedFile(relative, topic, date, size_bytes, spans))
    return found


def _spans(spark: SparkSession, archive: Archive, staging: str) -> list[tuple[str, str, str, list[Span]]]:
    """Of each staged file: its path in the file system, topic, date, and the offsets of each partition in it. Reads two columns of it."""
    from pyspark.sql import functions as f

    staged = spark.read.schema(SCHEMA).parquet(f"{archive.path.rstrip('/')}/{staging}")
    by_file = staged.groupBy(f.element_at(f.split(f.input_file_name(), "/"), -1).alias("file"), "topic", f.col("date").cast("string").alias("date"), "partition").agg(
        f.min("offset").alias("first"), (f.max("offset") + 1).alias("end"), f.count("*").alias("rows"),
        f.unix_millis(f.min("timestamp")).alias("min_ts"), f.unix_millis(f.max("timestamp")).alias("max_ts"),
    )  # fmt: skip
    files: dict[tuple[str, str, str], list[Span]] = {}
    for row in by_file.collect():
        files.setdefault((row.file, row.topic, row.date), []).append(Span(row.partition, row.first, row.end, row.rows, row.min_ts, row.max_ts))
    root = f"{archive.root}/{staging}"
    return [(f"{root}/topic={topic}/date={date}/{file}", topic, date, sorted(spans, key=lambda span: span.partition)) for (file, topic, date), spans in sorted(files.items())]
