"""Starts and runs the queries of pipelines, from their settings.

Every stream resumes from its checkpoint. Sinks are exactly-once: a topic by mqd's transactions,
Parquet by Spark's own file sink, an archive by its manifest. Sources skip aborted records: failed
attempts of our own sinks are in the log, too.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mqd.spark.offsets import IDS
from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines import compacting
from mqd.spark.pipelines.aggregate import aggregate
from mqd.spark.pipelines.dedup import dedup
from mqd.spark.pipelines.manifest import Archive as ArchiveFiles
from mqd.spark.pipelines.manifest import ArchivedFile
from mqd.spark.pipelines.replay import replay
from mqd.spark.pipelines.route import route
from mqd.spark.pipelines.settings import (
    ONCE,
    READ_COMMITTED,
    Aggregate,
    Archive,
    Dedup,
    Pipeline,
    Replay,
    Route,
    SettingsError,
    Sink,
    Source,
    StreamJoin,
    Table,
)
from mqd.spark.pipelines.stream_join import stream_join, with_event_time
from mqd.spark.pipelines.table import table
from mqd.spark.pipelines.values import RECORD, as_rows, decode_values, encode_rows
from mqd.spark.sink_options import AT_LEAST_ONCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

log = logging.getLogger("mqd.spark")

FORMAT = "mqd"
POLL_S = 0.5
OVERLOAD_MESSAGES = ("failed to connect back", "CANNOT_OPEN_SOCKET")
"""Spark's messages when one of its Python processes takes longer than ten seconds to start. No
setting changes that limit.
"""
CANCELLED = "SPARK_JOB_CANCELLED"
"""Spark's message for a cancelled job."""
STOP_MESSAGES = (CANCELLED, "InterruptedException", "InterruptedIOException", "ClosedByInterruptException")
"""Spark's messages for a job that ends because its query is being stopped."""
_USER_ERROR_MARKERS = (
    "MqdMissingError:",
    "MqdOptionError:",
    "MqdReadError:",
    "MqdWriteError:",
    ".ArchiveError:",
    ".OrderError:",
    "[USER_RAISED_EXCEPTION]",
)
"""In Spark's message, each precedes the text of an error that is meant for the user."""
_LAST_PYTHON_ERROR = re.compile(r"^((?:[\w.]*(?:Error|Exception))?: \S.*)$", re.MULTILINE)
"""The line with the error's text. In an error of Py4J, Java's text is in a line that begins with a
colon."""


class ReplayStoppedError(Exception):
    """A replay was stopped before its end; the text says which of its records were written."""


class Progress(msgspec.Struct, frozen=True):
    """Reports one batch of a stream, or a whole batch job. For a batch job, `batch` is -1, and
    `rows` is -1 if the rows were not counted.
    """

    name: str
    batch: int
    rows: int
    rows_per_s: float
    took_ms: int
    behind: int
    """Records in the topics that are still to be read; -1: not known."""


def absolute_path(path: str) -> str:
    """Makes a relative path absolute, because Spark would leave resolving it to the JVM."""
    return path if "://" in path or path.startswith("file:") else os.path.abspath(path)


def _checkpoint(pipeline: Pipeline) -> str:
    return absolute_path(pipeline.checkpoint or f"checkpoints/{pipeline.name}")


def _read_checkpoint_file(spark: SparkSession, pipeline: Pipeline, name: str) -> str:
    """Returns the text of a file in the checkpoint. It is read through Spark, because a path like
    hdfs:///... or s3a://... can be opened only with Spark's settings.
    """
    literal = re.sub(r"([{}\[\]*?\\])", r"\\\1", f"{_checkpoint(pipeline)}/{name}")  # Spark takes paths as globs
    row = spark.read.text(literal, wholetext=True).first()
    assert row is not None, f"{name} of the checkpoint is empty"
    return str(row[0])


# -- reading and writing ---------------------------------------------------------------------------


def read_stream(spark: SparkSession, source: Source, pipeline: Pipeline, headers: bool = False) -> DataFrame:
    """Returns the records of a pipeline's source as a stream. The stream's progress is committed as
    the offsets of the consumer group that has the pipeline's name.
    """
    reader = (
        spark.readStream.format(FORMAT)
        .option("kafka.bootstrap.servers", pipeline.bootstrap)
        .option("startingOffsets", source.starting)
    )
    reader = (
        reader.option("subscribe", ",".join(source.topics))
        if source.topics
        else reader.option("subscribePattern", source.pattern)
    )
    reader = (
        reader.option("groupId", pipeline.name).option("includeHeaders", str(headers).lower()).options(**READ_COMMITTED)
    )
    return reader.options(**source.options).load()


def _to_topic(frame: DataFrame, pipeline: Pipeline, topic: str | None, options: Mapping[str, str]) -> DataStreamWriter:
    writer = (
        frame.writeStream.format(FORMAT)
        .outputMode("append")
        .option("kafka.bootstrap.servers", pipeline.bootstrap)
        .options(**options)
    )
    return writer.option("topic", topic) if topic else writer


def _to_sink(frame: DataFrame, pipeline: Pipeline, sink: Sink) -> DataStreamWriter:
    if sink.topic:
        return _to_topic(encode_rows(frame, sink.key), pipeline, sink.topic, sink.options)
    plain = frame.drop(RECORD) if RECORD in frame.columns else frame
    return (
        plain.writeStream.format("parquet")
        .outputMode("append")
        .option("path", absolute_path(sink.path))
        .options(**sink.options)
    )


# -- the pipelines ---------------------------------------------------------------------------------


def _batch_end(spark: SparkSession, pipeline: Archive, number: int) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """The end offsets and topic ids of a batch, from the offset log in the checkpoint. A file of
    the log has a line with its version, one for the query, then one for each source.
    """
    offsets = msgspec.json.decode(_read_checkpoint_file(spark, pipeline, f"offsets/{number}").splitlines()[2])
    return {topic: partitions for topic, partitions in offsets.items() if topic != IDS}, offsets.get(IDS, {})


def _archive(spark: SparkSession, pipeline: Archive) -> DataStreamWriter:
    archive = ArchiveFiles(pipeline.path)
    archive.vacuum()
    skipped: set[str] = set()

    def append(batch: DataFrame, number: int) -> None:
        ends, ids = _batch_end(spark, pipeline, number)
        archiving.append(batch, archive, pipeline.name, number, ends, ids=ids, in_order=True)
        _compact(
            spark,
            archive,
            compacting.find_due(archive, pipeline.file_mb << 20, pipeline.compact_from_files, skipped),
            skipped,
        )

    return read_stream(spark, pipeline.source, pipeline, headers=True).writeStream.foreachBatch(append)


def _compact(spark: SparkSession, archive: ArchiveFiles, due: list[list[ArchivedFile]], skipped: set[str]) -> None:
    """Compacts small files into large ones. Groups that cannot be compacted are reported and added
    to `skipped`; archiving continues without them, because the log's retention does not wait.
    """
    groups = [group for group in due if all(file.path in archive.files and file.path not in skipped for file in group)]
    if not groups:
        return
    try:
        compacting.compact(spark, archive, groups)
    except Exception as error:
        if any(message in str(error) for message in STOP_MESSAGES):
            raise
        if len(groups) > 1:  # one Spark job compacts all groups: its error does not name the group
            for group in groups:
                _compact(spark, archive, [group], skipped)
            return
        paths = [file.path for file in groups[0]]
        skipped.update(paths)
        log.warning(
            "compacting %d files of %s, %s to %s, failed: %s; they are skipped until the pipeline is restarted,"
            " archiving continues",
            len(paths),
            archive.path,
            paths[0],
            paths[-1],
            explain_error(error).rstrip("."),
        )


def _aggregate(spark: SparkSession, pipeline: Aggregate) -> DataStreamWriter:
    events = decode_values(read_stream(spark, pipeline.source, pipeline), pipeline.value)
    windows = aggregate(
        events,
        time=pipeline.time,
        window=pipeline.window,
        slide=pipeline.slide,
        watermark=pipeline.watermark,
        by=pipeline.by,
        measures=pipeline.measures,
    )
    return _to_sink(windows, pipeline, pipeline.sink)


def _dedup(spark: SparkSession, pipeline: Dedup) -> DataStreamWriter:
    records = read_stream(spark, pipeline.source, pipeline, headers=True)
    first_records = dedup(
        decode_values(records, pipeline.value) if pipeline.value else as_rows(records),
        by=pipeline.by,
        time=pipeline.time,
        within=pipeline.within,
    )
    if pipeline.sink.path:
        return _to_sink(first_records.select("record.*"), pipeline, pipeline.sink)
    return _to_topic(
        first_records.select("record.key", "record.value", "record.headers"),
        pipeline,
        pipeline.sink.topic,
        pipeline.sink.options,
    )


def _route(spark: SparkSession, pipeline: Route) -> DataStreamWriter:
    records = read_stream(spark, pipeline.source, pipeline, headers=True)
    routed = route(
        records,
        value=pipeline.value,
        rules=pipeline.rules,
        dead_letters=pipeline.dead_letters,
        otherwise=pipeline.otherwise,
    )
    return _to_topic(routed, pipeline, None, pipeline.options)


def _stream_join(spark: SparkSession, pipeline: StreamJoin) -> DataStreamWriter:
    sides = []
    for name, side in (("left", pipeline.left), ("right", pipeline.right)):
        renamed = msgspec.structs.replace(pipeline, name=f"{pipeline.name}-{name}")  # each has its own consumer group
        rows = decode_values(read_stream(spark, side.source, renamed), side.value)
        sides.append(with_event_time(rows, time=side.time, watermark=side.watermark).drop(RECORD))
    return _to_sink(
        stream_join(*sides, on=pipeline.on, how=pipeline.how, select=pipeline.select), pipeline, pipeline.sink
    )


def _table(spark: SparkSession, pipeline: Table) -> DataStreamWriter:
    @functools.cache
    def application() -> str:
        """The name and id of the query, for txnAppId. The id changes with a new checkpoint, whose
        batch numbers start again at 0: under the name alone, these batches would be dropped as
        repeated.
        """
        return f"{pipeline.name}-{msgspec.json.decode(_read_checkpoint_file(spark, pipeline, 'metadata'))['id']}"

    def append(changes: DataFrame, number: int) -> None:
        writer = changes.select("key", "value").write.format(FORMAT).mode("append").options(**pipeline.options)
        writer = writer.option("kafka.bootstrap.servers", pipeline.bootstrap).option("topic", pipeline.changelog)
        writer.option("txnAppId", application()).option("txnVersion", str(number)).save()

    return table(read_stream(spark, pipeline.source, pipeline)).writeStream.outputMode("update").foreachBatch(append)


def _replay(spark: SparkSession, pipeline: Replay) -> None:
    records = replay(
        spark,
        ArchiveFiles(pipeline.path),
        topics=pipeline.topics,
        to=pipeline.to,
        starting_timestamp=pipeline.starting_timestamp,
        ending_timestamp=pipeline.ending_timestamp,
        starting_offsets=pipeline.starting_offsets,
        ending_offsets=pipeline.ending_offsets,
    )
    records.write.format(FORMAT).mode("append").option("kafka.bootstrap.servers", pipeline.bootstrap).options(
        **pipeline.options
    ).save()


_STREAM_WRITERS: dict[type, Callable[[SparkSession, Any], DataStreamWriter]] = {
    Archive: _archive,
    Aggregate: _aggregate,
    Dedup: _dedup,
    Route: _route,
    StreamJoin: _stream_join,
    Table: _table,
}


# -- running ---------------------------------------------------------------------------------------


def start(spark: SparkSession, pipeline: Pipeline) -> StreamingQuery:
    """Starts the query of a pipeline that is a stream."""
    writer = (
        _STREAM_WRITERS[type(pipeline)](spark, pipeline)
        .queryName(pipeline.name)
        .option("checkpointLocation", _checkpoint(pipeline))
    )
    return (
        writer.trigger(availableNow=True)
        if pipeline.trigger == ONCE
        else writer.trigger(processingTime=pipeline.trigger)
    ).start()


def run(spark: SparkSession, pipeline: Pipeline, report: Callable[[Progress], None], stop: threading.Event) -> bool:
    """Runs a pipeline until it ends or `stop` is set. When it is stopped, the current batch is
    abandoned, and the next start repeats it. Returns whether the pipeline reached its end. Raises
    the query's error, or ReplayStoppedError.
    """
    if isinstance(pipeline, Replay):
        _replay_until(spark, pipeline, stop)
        return True
    query = start(spark, pipeline)
    last_batch = -1
    try:
        while True:
            ended = query.awaitTermination(POLL_S)
            for progress in query.recentProgress:
                if progress["batchId"] > last_batch and progress["numInputRows"] > 0:
                    last_batch = progress["batchId"]
                    report(_progress(pipeline.name, progress))
            if ended or stop.is_set():
                return bool(ended)
    finally:
        query.stop()


def _replay_until(spark: SparkSession, pipeline: Replay, stop: threading.Event) -> None:
    """Runs a replay. It is a single call into Spark, which does not return early on a signal, so
    another thread cancels its job when `stop` is set. Raises ReplayStoppedError, or the replay's
    error.
    """
    group, ended = f"{pipeline.name}-{uuid.uuid4().hex}", threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            if stop.is_set():
                spark.sparkContext.cancelJobGroup(group)  # repeatedly: its job may not have begun

    watcher = threading.Thread(target=watch, name=f"stop of {pipeline.name}", daemon=True)
    spark.sparkContext.setJobGroup(group, f"replay {pipeline.name}")
    watcher.start()
    try:
        _replay(spark, pipeline)
    except Exception as error:
        if stop.is_set() and CANCELLED in str(error):  # the sink has aborted: it commits only after the job
            raise ReplayStoppedError(_stopped_text(pipeline)) from error
        raise
    finally:
        ended.set()
        watcher.join()
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def _stopped_text(pipeline: Replay) -> str:
    if any(
        name.lower() == "delivery" and value.strip().lower() == AT_LEAST_ONCE
        for name, value in pipeline.options.items()
    ):
        return (
            "stopped before its end; the records written so far stay (delivery is at-least-once), and the next"
            " start writes them all again"
        )
    return "stopped before its end: nothing was written; the next start begins again"


def _progress(name: str, progress: Any) -> Progress:
    behind = [_behind(source["endOffset"], source["latestOffset"]) for source in progress["sources"]]
    return Progress(
        name,
        progress["batchId"],
        progress["numInputRows"],
        progress["processedRowsPerSecond"] or 0.0,
        progress["batchDuration"] or 0,
        -1 if None in behind else sum(count for count in behind if count is not None),
    )


def _behind(end: str | None, latest: str | None) -> int | None:
    """Returns the number of records between two offsets, each given as the source's JSON, where
    keys that are not topics begin with @. None: not known, as for a batch that is repeated after a
    crash ("null": Spark did not request the latest offsets).
    """
    end_offsets, latest_offsets = (msgspec.json.decode(encoded) if encoded else None for encoded in (end, latest))
    if end_offsets is None or latest_offsets is None:
        return None
    topics = [topic for topic in latest_offsets if not topic.startswith("@")]
    return sum(
        max(0, offset - end_offsets.get(topic, {}).get(partition, 0))
        for topic in topics
        for partition, offset in latest_offsets[topic].items()
    )


def explain_error(error: BaseException) -> str:
    """The cause of a query's failure, without Spark's and Java's stack traces."""
    if isinstance(error, (SettingsError, ReplayStoppedError)):
        return str(error)
    text = str(error)
    if any(message in text for message in OVERLOAD_MESSAGES):
        return (
            "a Python process of Spark did not start within Spark's limit of ten seconds: this machine is"
            " overloaded; try again when it is less busy"
        )
    for marker in _USER_ERROR_MARKERS:
        if marker in text:
            return text.split(marker, 1)[1].strip().splitlines()[0]
    if "Traceback (most recent call last):" in text and (raised := _LAST_PYTHON_ERROR.findall(text)):
        return raised[-1].removeprefix(": ")
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)
