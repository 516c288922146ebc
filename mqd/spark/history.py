"""What an archive has of a batch read: `option("archive", PATH)` reads each partition from there as far as it goes, and from the log from there on.

    H1  an offset comes from the archive or from the log, never from both: the archive's end of a partition is where its log begins to be read
    H2  a read begins at the archive's first offset when it begins at `earliest`; other starting offsets may lie before the log's start as long as the archive has them
    H3  records of a task come in the order of their offsets, partition after partition
Only the driver reads the archive's commits (mqd/spark/pipelines/manifest.py); executors open the files that they are given, through pyarrow.fs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqd.spark.options import EARLIEST, SourceOptions
from mqd.spark.pipelines.manifest import Archive, ArchiveError, filesystem
from mqd.spark.planning import Key
from mqd.spark.schema import arrow_schema
from mqd.spark.wire import MqdReadError

ROWS_MAX = 65536


class ArchivedTask(msgspec.Struct, frozen=True):
    """One file of an archive: what of it is wanted, as (partition, start, end)."""

    root: str
    path: str
    topic: str
    spans: tuple[tuple[int, int, int], ...]


def plan(options: SourceOptions, starts: Mapping[Key, int], ends: Mapping[Key, int], latest: Mapping[Key, int]) -> tuple[list[ArchivedTask], dict[Key, int]]:
    """Tasks over the archive, and where the log of each partition begins to be read. Raises MqdReadError."""
    assert options.archive is not None
    try:
        archive = Archive(options.archive)
    except ArchiveError as error:
        raise MqdReadError(str(error)) from error
    archived = {topic: archive.ends(topic) for topic in {topic for topic, _ in starts}}
    log_starts: dict[Key, int] = {}
    for key, start in starts.items():
        end = archived[key[0]].get(key[1], 0)
        if end > latest[key]:
            raise MqdReadError(
                f"{key[0]}-{key[1]}: the archive {options.archive} goes to offset {end} and the log only to {latest[key]}: the topic was made anew after it was archived. "
                "Read the archive's Parquet files by themselves"
            )
        # from the beginning: the log has to go on where the archive ends, or records between the two are lost, which the caller says
        log_starts[key] = end if options.starting.at == EARLIEST and end else max(start, end)
    firsts = {key: 0 for key in starts} if options.starting.at == EARLIEST else dict(starts)
    tasks = []
    for topic in sorted(archived):
        for file in archive.of(topic):
            wanted = tuple(
                (span.partition, max(span.first, firsts[key]), min(span.end, ends[key]))
                for span in file.spans
                if (key := (topic, span.partition)) in firsts and span.end > firsts[key] and span.first < ends[key]
            )
            if wanted:
                tasks.append(ArchivedTask(archive.path, file.path, topic, wanted))
    return tasks, log_starts


def read(task: ArchivedTask, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The task's records as batches of the wanted columns. Raises MqdReadError."""
    files, root = filesystem(task.root)
    columns = [name for name in names if name != "topic"]
    try:
        with files.open_input_file(f"{root}/{task.path}") as file:
            parquet = pq.ParquetFile(file)
            for batch in parquet.iter_batches(ROWS_MAX, columns=[*dict.fromkeys([*columns, "partition", "offset"])]):
                for partition, start, end in task.spans:
                    offset = batch.column("offset")
                    mine = pc.and_(pc.equal(batch.column("partition"), partition), pc.and_(pc.greater_equal(offset, start), pc.less(offset, end)))
                    found = batch.filter(mine)
                    if found.num_rows:
                        yield _shaped(found, names, task.topic)
    except (OSError, pa.ArrowInvalid) as error:
        raise MqdReadError(f"{task.path} of the archive {task.root} cannot be read: {error}") from error


def _shaped(batch: Any, names: Sequence[str], topic: str) -> pa.RecordBatch:
    schema = arrow_schema(names)
    columns = [pa.array([topic]).take(pa.array([0] * batch.num_rows)) if name == "topic" else batch.column(name).cast(schema.field(name).type) for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
