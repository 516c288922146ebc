"""Records as Parquet files, and back, in Spark's executors: Arrow batches through pyarrow.fs, never as rows of the JVM.

    writer(root, prefix)              records into an archive's files; for DataFrame.mapInArrow, on columns of `archive.archived`
    read(task, columns)               some offsets of one file
    read_in_order(tasks, columns)     many files, partition after partition

Invariants
1. A file holds each partition's records in the order of their offsets. Who writes hands them over in that order; what is not is refused, nothing is sorted here.
2. Files have names that nobody else takes. They count when a commit names them (mqd/spark/pipelines/manifest.py), which the driver writes when all tasks have said theirs; what a
   failed or repeated task has left is deleted by a later vacuum.
3. A file is on disk, and its folder, too, before the task says it.
Sources: Parquet's format (encodings, logical types), as pyarrow writes it; every reader of Parquet since 2.0 takes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqd.spark.pipelines.manifest import ArchivedFile, ArchiveError, Span, filesystem, sync
from mqd.spark.schema import arrow_schema
from mqd.spark.wire import MqdReadError

COLUMNS = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
COMPRESSION = "zstd"
GROUP_BYTES = 32 << 20
"""Of a row group in memory. It bounds what a reader of the file holds, and what a writer does for each file that it has open."""
FILES_OPEN_MAX = 16
BUFFER_BYTES = 1 << 20
ROWS_MAX = 65536
MERGED_ROWS_MIN = 64


class OrderError(Exception):
    """Records were not handed over in the order of their offsets."""


# -- writing -----------------------------------------------------------------------------------------------------------------------------


def writer(root: str, prefix: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A task's function: it takes records with topic and date, and gives a row `file` (ArchivedFile as JSON) for each file that it has written below `root`."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = [msgspec.json.encode(file).decode() for file in written(batches, root, prefix)]
        yield pa.record_batch({"file": pa.array(made, pa.string())})

    return write


def written(batches: Iterator[pa.RecordBatch], root: str, prefix: str) -> list[ArchivedFile]:
    """Raises OrderError, ArchiveError for a record without topic or timestamp."""
    open_files: dict[tuple[str, str], _File] = {}
    done = []
    for batch in batches:
        for topic, date, records in _by_day(batch):
            if (topic, date) not in open_files:
                if len(open_files) == FILES_OPEN_MAX:
                    done.append(open_files.pop(next(iter(open_files))).close())
                open_files[topic, date] = _File(root, topic, date, prefix)
            open_files[topic, date].add(records)
    return done + [file.close() for file in open_files.values()]


def _by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, str, pa.RecordBatch]]:
    """A batch's records by topic and date; as a rule all are of one."""
    columns = batch.select(["topic", "date"])
    if columns.column("date").null_count or columns.column("topic").null_count:
        raise ArchiveError("a record without topic or timestamp cannot be archived: give it both")
    days = pa.Table.from_batches([columns]).group_by(["topic", "date"]).aggregate([]).to_pylist()
    for day in days:
        records = batch
        if len(days) > 1:
            records = batch.filter(pc.and_(pc.equal(columns.column("topic"), day["topic"]), pc.equal(columns.column("date"), day["date"])))
        yield day["topic"], str(day["date"]), records


class _File:
    """A file that is being written."""

    def __init__(self, root: str, topic: str, date: str, prefix: str) -> None:
        self._files, self._root = filesystem(root)
        self._topic, self._date = topic, date
        self._folder = f"topic={topic}/date={date}"
        self._path = f"{self._folder}/{prefix}-{uuid.uuid4().hex[:16]}.parquet"
        self._files.create_dir(f"{self._root}/{self._folder}", recursive=True)
        self._schema = arrow_schema(COLUMNS)
        self._sink = self._files.open_output_stream(f"{self._root}/{self._path}")
        encodings = {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"}
        self._parquet = pq.ParquetWriter(self._sink, self._schema, compression=COMPRESSION, use_dictionary=["partition", "timestampType"], column_encoding=encodings)
        self._group: list[pa.RecordBatch] = []
        self._bytes = 0
        self._spans: dict[int, Span] = {}

    def add(self, records: pa.RecordBatch) -> None:
        columns = [records.column(field.name).cast(field.type) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._count(batch)
        self._group.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= GROUP_BYTES:
            self._write_group()

    def close(self) -> ArchivedFile:
        self._write_group()
        self._parquet.close()
        self._sink.close()
        path = f"{self._root}/{self._path}"
        for place in (path, path.rsplit("/", 1)[0], path.rsplit("/", 2)[0], self._root):
            sync(self._files, place)
        spans = sorted(self._spans.values(), key=lambda span: span.partition)
        return ArchivedFile(self._path, self._topic, self._date, self._files.get_file_info(path).size, spans)

    def _write_group(self) -> None:
        if self._group:
            table = pa.Table.from_batches(self._group)
            self._parquet.write_table(table, row_group_size=table.num_rows)
        self._group, self._bytes = [], 0

    def _count(self, batch: pa.RecordBatch) -> None:
        for partition in pc.unique(batch.column("partition")).to_pylist():
            mine = batch.select(["partition", "offset", "timestamp"])
            if len(mine) and pc.min_max(mine.column("partition")).as_py() != {"min": partition, "max": partition}:
                mine = mine.filter(pc.equal(mine.column("partition"), partition))
            offsets, times = mine.column("offset"), pc.min_max(mine.column("timestamp").cast(pa.int64())).as_py()
            first, end = offsets[0].as_py(), offsets[-1].as_py() + 1
            so_far = self._spans.get(partition)
            in_order = pc.all(pc.less(offsets[:-1], offsets[1:])).as_py() is not False
            if not in_order or (so_far is not None and first < so_far.end):
                raise OrderError(f"records of {self._topic}-{partition} are not in the order of their offsets at {first}: sort them by topic, partition and offset")
            low_ms, high_ms = times["min"] // 1000, times["max"] // 1000
            if so_far is not None:
                first, low_ms, high_ms = so_far.first, min(low_ms, so_far.min_timestamp), max(high_ms, so_far.max_timestamp)
            self._spans[partition] = Span(partition, first, end, len(mine) + (so_far.rows if so_far else 0), low_ms, high_ms)


# -- reading -----------------------------------------------------------------------------------------------------------------------------


class ArchivedTask(msgspec.Struct, frozen=True):
    """One file of an archive: what of it is wanted, as (partition, start, end)."""

    root: str
    path: str
    topic: str
    spans: tuple[tuple[int, int, int], ...]


def read_in_order(tasks: Iterable[ArchivedTask], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Partition after partition, each from all its files in the order of its offsets; `tasks` have one span each, `names` has offset. Raises MqdReadError.

    Around midnight files of two days may hold offsets in turns: those that overlap are merged, batch by batch.
    """
    overlapping: list[ArchivedTask] = []
    end: tuple[str, int, int] | None = None
    for task in sorted(tasks, key=lambda one: (one.topic, one.spans[0])):
        ((partition, start, stop),) = task.spans
        if end is not None and (task.topic, partition, start) >= end:
            yield from _merged(overlapping, names)
            overlapping, end = [], None
        overlapping.append(task)
        end = max(end or (task.topic, partition, stop), (task.topic, partition, stop))
    yield from _merged(overlapping, names)


def _merged(tasks: list[ArchivedTask], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    if len(tasks) < 2:
        for task in tasks:
            yield from read(task, names)
        return
    rest = [_Rest(read(task, names, max(ROWS_MAX // len(tasks), MERGED_ROWS_MIN))) for task in tasks]
    while rest := [one for one in rest if one.batch is not None]:
        until = min(one.last for one in rest)
        found = pa.Table.from_batches([part for one in rest if (part := one.take(until)) is not None])
        yield from found.sort_by("offset").combine_chunks().to_batches()


class _Rest:
    """What is still to come of one file."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.batch = next(batches, None)

    @property
    def last(self) -> int:
        return self.batch.column("offset")[-1].as_py()

    def take(self, until: int) -> pa.RecordBatch | None:
        """Records up to an offset, it included; at most those of one batch, whose end is not before `until`."""
        count = pc.sum(pc.less_equal(self.batch.column("offset"), until)).as_py()
        found = self.batch.slice(0, count)
        self.batch = self.batch.slice(count) if count < self.batch.num_rows else next(self._batches, None)
        return found if count else None


def read(task: ArchivedTask, names: Sequence[str], rows_max: int = ROWS_MAX) -> Iterator[pa.RecordBatch]:
    """The task's records as batches of the wanted columns, partition after partition. Raises MqdReadError."""
    files, root = filesystem(task.root)
    columns = list(dict.fromkeys([*(name for name in names if name != "topic"), "partition", "offset"]))
    try:
        with files.open_input_file(f"{root}/{task.path}") as file:
            parquet = pq.ParquetFile(file, buffer_size=BUFFER_BYTES)
            for partition, start, end in task.spans:
                groups = [number for number in range(parquet.num_row_groups) if _may_have(parquet.metadata.row_group(number), partition, start, end)]
                for batch in parquet.iter_batches(rows_max, row_groups=groups, columns=columns) if groups else ():
                    offset = batch.column("offset")
                    mine = pc.and_(pc.equal(batch.column("partition"), partition), pc.and_(pc.greater_equal(offset, start), pc.less(offset, end)))
                    found = batch if pc.all(mine).as_py() else batch.filter(mine)
                    if found.num_rows:
                        yield _shaped(found, names, task.topic)
    except (OSError, pa.ArrowInvalid) as error:
        raise MqdReadError(f"{task.path} of the archive {task.root} cannot be read: {error}") from error


def _may_have(group: Any, partition: int, start: int, end: int) -> bool:
    """Whether a row group may hold such records, by its statistics."""
    for number in range(group.num_columns):
        column = group.column(number)
        low, high = {"partition": (partition, partition), "offset": (start, end - 1)}.get(column.path_in_schema, (None, None))
        if low is not None and column.is_stats_set and column.statistics.has_min_max and not (column.statistics.min <= high and low <= column.statistics.max):
            return False
    return True


def _shaped(batch: Any, names: Sequence[str], topic: str) -> pa.RecordBatch:
    schema = arrow_schema(names)
    columns = [pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows) if name == "topic" else batch.column(name).cast(schema.field(name).type) for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
