"""Writes and reads Parquet files of records in Spark's executors: Arrow batches through pyarrow.fs,
without rows in the JVM.

    writer(root, prefix)              writes records into an archive's files; for
                                      DataFrame.mapInArrow, on the columns of
                                      `archive.with_archive_columns`
    read(task, columns)               reads some offsets of one file
    read_in_order(tasks, columns)     reads many files, partition after partition; if a file was
                                      compacted and deleted meanwhile, reads its successors instead

Invariants
1. A file holds each partition's records in the order of their offsets. Records must be
   passed in that order, or they are refused: nothing is sorted here.
2. Files have unique names. A file belongs to the archive once a commit lists it
   (mqd/spark/pipelines/manifest.py). The driver writes the commit when all tasks have reported
   their files; a later vacuum deletes the files of failed or repeated tasks.
3. A file and its folder are on disk before the task reports it.
Sources: Parquet's format (encodings, logical types), as pyarrow writes it; every reader that
supports Parquet 2.0 can read the files.
"""

from __future__ import annotations

import collections
import resource
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqd.spark.pipelines.manifest import Archive, ArchivedFile, ArchiveError, Span, filesystem, sync
from mqd.spark.schema import arrow_schema
from mqd.spark.wire import MqdReadError

COLUMNS = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
COMPRESSION = "zstd"
GROUP_BYTES = 32 << 20
"""Size in memory at which a row group is written."""
UNWRITTEN_BYTES_MAX = 96 << 20
"""Limit of the unwritten bytes in all files of a task; beyond it the largest row group is
written."""
FILES_OPEN_MAX = 128
ROWS_MAX, READ_BYTES = 65536, 16 << 20
"""Rows and bytes of a batch that is read, whichever limit comes first."""
BUFFER_BYTES, MERGED_BUFFER_BYTES = 1 << 20, 64 << 10
"""Read buffer of each column: for one file, and for many at the same time."""


DAY_MIN, DAY_MAX = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31, in days since the Unix epoch: the range of dates in folder names and
in Python."""


class OrderError(Exception):
    """Records were not passed in the order of their offsets."""


# -- writing ---------------------------------------------------------------------------------------


def writer(root: str, prefix: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the function that each task runs: it takes records with topic and date, writes them
    into files below `root`, and yields a row for each file, with the column `file` (ArchivedFile as
    JSON).
    """

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoded_files = [msgspec.json.encode(file).decode() for file in write_files(batches, root, prefix)]
        yield pa.record_batch({"file": pa.array(encoded_files, pa.string())})

    return write


def write_files(batches: Iterable[pa.RecordBatch], root: str, prefix: str) -> list[ArchivedFile]:
    """Writes records into files. Raises OrderError; ArchiveError for a record without a topic or
    timestamp.
    """
    task = _TaskWriter(root, prefix)
    for batch in batches:
        for topic, date, records in _split_by_day(batch):
            task.add(topic, date, records)
    return task.close()


class _TaskWriter:
    """Writes the files of one task: one for each topic and day, or more if there are too many to
    keep open at the same time.
    """

    def __init__(self, root: str, prefix: str) -> None:
        self._filesystem, self._root = filesystem(root)
        self._prefix = prefix
        self._files: dict[tuple[str, str], _FileWriter] = {}  # the most recently written file is the last
        self._closed_files: list[ArchivedFile] = []

    def add(self, topic: str, date: str, records: pa.RecordBatch) -> None:
        file = self._files.get((topic, date))
        if file is None:
            file = self._files[topic, date] = _FileWriter(self._filesystem, self._root, topic, date, self._prefix)
        file.add(records)
        if file.unwritten_bytes >= GROUP_BYTES:
            self._write(file)
        while sum(file.unwritten_bytes for file in self._files.values()) > UNWRITTEN_BYTES_MAX:
            self._write(max(self._files.values(), key=lambda file: file.unwritten_bytes))

    def close(self) -> list[ArchivedFile]:
        self._closed_files += [file.close() for file in self._files.values()]
        folders = {
            folder
            for file in self._closed_files
            for folder in (file.path.rsplit("/", 1)[0], file.path.split("/", 1)[0])
        }
        for folder in (*sorted(folders), *([""] if folders else [])):
            sync(self._filesystem, f"{self._root}/{folder}".rstrip("/"))
        return self._closed_files

    def _write(self, file: _FileWriter) -> None:
        self._files[file.topic, file.date] = self._files.pop((file.topic, file.date))
        file.write_group()
        open_files = [file for file in self._files.values() if file.is_open]
        if len(open_files) > FILES_OPEN_MAX:
            self._closed_files.append(self._files.pop((open_files[0].topic, open_files[0].date)).close())


def _split_by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, str, pa.RecordBatch]]:
    """Splits a batch by topic and date; usually all its records have the same."""
    columns = batch.select(["topic", "date"])
    if columns.column("date").null_count or columns.column("topic").null_count:
        raise ArchiveError(f"a record without topic or timestamp cannot be archived: set both ({_describe(batch)})")
    columns = columns.set_column(1, "date", _clamp_dates(columns.column("date")))
    days = pa.Table.from_batches([columns]).group_by(["topic", "date"]).aggregate([]).to_pylist()
    for day in days:
        records = batch
        if len(days) > 1:
            records = batch.filter(
                pc.and_(pc.equal(columns.column("topic"), day["topic"]), pc.equal(columns.column("date"), day["date"]))
            )
        yield day["topic"], str(day["date"]), records


def _clamp_dates(dates: pa.Array) -> pa.Array:
    """Replaces dates before DAY_MIN or after DAY_MAX by these limits: producers may set any
    timestamp. The timestamps themselves are unchanged.
    """
    days = dates.cast(pa.int32())
    return pc.min_element_wise(pc.max_element_wise(days, DAY_MIN), DAY_MAX).cast(pa.int32()).cast(pa.date32())


def _describe(batch: pa.RecordBatch) -> str:
    return (
        f"it is one of {batch.num_rows} records that begin at"
        f" {batch.column('topic')[0]}-{batch.column('partition')[0]}, offset {batch.column('offset')[0]}"
    )


class _FileWriter:
    """A file that is being written. It is created with its first row group."""

    def __init__(self, file_system: Any, root: str, topic: str, date: str, prefix: str) -> None:
        self._filesystem, self._root = file_system, root
        self.topic, self.date = topic, date
        self._path = f"topic={topic}/date={date}/{prefix}-{uuid.uuid4().hex[:16]}.parquet"
        self._schema = arrow_schema(COLUMNS)
        self._parquet: Any = None
        self._group: list[pa.RecordBatch] = []
        self.unwritten_bytes = 0
        self._spans: dict[int, Span] = {}

    @property
    def is_open(self) -> bool:
        return self._parquet is not None

    def add(self, records: pa.RecordBatch) -> None:
        columns = [records.column(field.name).cast(field.type) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._add_to_spans(batch)
        self._group.append(batch)
        self.unwritten_bytes += batch.nbytes

    def write_group(self) -> None:
        if not self._group:
            return
        table = pa.Table.from_batches(self._group)
        if self._parquet is None:
            self._open()
        self._parquet.write_table(table, row_group_size=table.num_rows)
        self._group, self.unwritten_bytes = [], 0

    def close(self) -> ArchivedFile:
        """Completes the file and makes it durable; the task syncs its folder."""
        self.write_group()
        self._parquet.close()
        self._sink.close()
        path = f"{self._root}/{self._path}"
        sync(self._filesystem, path)
        spans = sorted(self._spans.values(), key=lambda span: span.partition)
        return ArchivedFile(self._path, self.topic, self.date, self._filesystem.get_file_info(path).size, spans)

    def _open(self) -> None:
        path = f"{self._root}/{self._path}"
        self._filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        self._sink = self._filesystem.open_output_stream(path)
        encodings = {"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"}
        self._parquet = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression=COMPRESSION,
            use_dictionary=["partition", "timestampType"],
            column_encoding=encodings,
            write_page_checksum=True,
        )

    def _add_to_spans(self, batch: pa.RecordBatch) -> None:
        for partition in pc.unique(batch.column("partition")).to_pylist():
            matching = batch.select(["partition", "offset", "timestamp"])
            if len(matching) and pc.min_max(matching.column("partition")).as_py() != {
                "min": partition,
                "max": partition,
            }:
                matching = matching.filter(pc.equal(matching.column("partition"), partition))
            offsets = matching.column("offset")
            times = pc.min_max(matching.column("timestamp").cast(pa.int64())).as_py()
            first, end = offsets[0].as_py(), offsets[-1].as_py() + 1
            span = self._spans.get(partition)
            is_in_order = pc.all(pc.less(offsets[:-1], offsets[1:])).as_py() is not False
            if not is_in_order or (span is not None and first < span.end):
                raise OrderError(
                    f"records of {self.topic}-{partition} are not in the order of their offsets at {first}: this is a"
                    " bug in mqd unless you have called append(in_order=True) with records in another order"
                )
            low_ms, high_ms = times["min"] // 1000, times["max"] // 1000
            if span is not None:
                first, low_ms, high_ms = (span.first, min(low_ms, span.min_timestamp), max(high_ms, span.max_timestamp))
            self._spans[partition] = Span(
                partition, first, end, len(matching) + (span.rows if span else 0), low_ms, high_ms
            )


# -- reading ---------------------------------------------------------------------------------------


class ArchivedTask(msgspec.Struct, frozen=True):
    """One file of an archive, and the wanted offset ranges as (partition, start, end)."""

    root: str
    path: str
    topic: str
    spans: tuple[tuple[int, int, int], ...]


def read_in_order(tasks: Iterable[ArchivedTask], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Reads partition after partition, each from all its files, in the order of its offsets. Each
    task has one span; `names` includes offset. Raises MqdReadError.

    Around midnight, offsets of two days' files may interleave: overlapping files are merged, batch
    by batch. `tasks` must include all overlapping files of a day: if two of them are compacted
    meanwhile, each of their tasks reads the records of both from the new file, and _merge drops the
    second copies.
    """
    overlapping: list[ArchivedTask] = []
    end: tuple[str, int, int] | None = None
    for task in sorted(tasks, key=lambda task: (task.topic, task.spans[0])):
        ((partition, start, stop),) = task.spans
        if end is not None and (task.topic, partition, start) >= end:
            yield from _merge(overlapping, names)
            overlapping, end = [], None
        overlapping.append(task)
        end = max(end or (task.topic, partition, stop), (task.topic, partition, stop))
    yield from _merge(overlapping, names)


def _merge(tasks: list[ArchivedTask], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Merges the records of overlapping files. A file is opened when its first offset is reached,
    and closed after its last.
    """
    if len(tasks) < 2:
        for task in tasks:
            yield from read(task, names, follow_compaction=True)
        return
    _raise_open_file_limit(len(tasks))
    rows_max = max(ROWS_MAX // len(tasks), 64)
    unopened, open_files = collections.deque(sorted(tasks, key=lambda task: task.spans[0][1])), list[_FileReader]()
    while unopened or open_files:
        while unopened and (not open_files or unopened[0].spans[0][1] <= min(file.last_offset for file in open_files)):
            file = _FileReader(read(unopened.popleft(), names, rows_max, MERGED_BUFFER_BYTES, follow_compaction=True))
            if file.batch is not None:
                open_files.append(file)
        if not open_files:
            continue
        until_offset = min(file.last_offset for file in open_files)
        parts = [part for file in open_files if (part := file.take(until_offset)) is not None]
        open_files = [file for file in open_files if file.batch is not None]
        yield from _drop_duplicates(pa.Table.from_batches(parts).sort_by("offset").combine_chunks()).to_batches()


def _drop_duplicates(table: pa.Table) -> pa.Table:
    """Drops the second copy of each record that two tasks have read. `table`: records of one
    partition, in the order of their offsets.
    """
    offsets = table.column("offset").combine_chunks()
    is_repeated = pc.equal(offsets[1:], offsets[:-1])
    return (
        table.filter(pa.concat_arrays([pa.array([True]), pc.invert(is_repeated)]))
        if pc.any(is_repeated).as_py()
        else table
    )


def _raise_open_file_limit(count: int) -> None:
    """Allows `count` files, or as many as the system permits, to be open at the same time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 256:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (hard if hard != resource.RLIM_INFINITY and hard < count + 256 else count + 256, hard),
        )


class _FileReader:
    """A file that is being read. `batch`: its next records; None at its end."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.batch: Any = next(batches, None)

    @property
    def last_offset(self) -> int:
        return self.batch.column("offset")[-1].as_py()

    def take(self, until_offset: int) -> pa.RecordBatch | None:
        """Returns the records up to and including `until_offset`, which must not exceed
        `last_offset`.
        """
        count = pc.sum(pc.less_equal(self.batch.column("offset"), until_offset)).as_py()
        taken = self.batch.slice(0, count)
        self.batch = self.batch.slice(count) if count < self.batch.num_rows else next(self._batches, None)
        return taken if count else None


def read(
    task: ArchivedTask,
    names: Sequence[str],
    rows_max: int = ROWS_MAX,
    buffer_bytes: int = BUFFER_BYTES,
    follow_compaction: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The task's records as batches of the wanted columns, partition after partition. Raises
    MqdReadError.

    follow_compaction: if the file was compacted and deleted meanwhile, reads the files that
    replaced it, which may have records of neighbouring files between those of this one
    (read_in_order).
    """
    remaining_spans = list(task.spans)
    try:
        try:
            yield from _read_file(task, remaining_spans, names, rows_max, buffer_bytes)
            return
        except FileNotFoundError:
            replacements = _replacements(task, remaining_spans)
            if not replacements:
                raise
        if not follow_compaction:
            raise MqdReadError(
                f"{task.path} of the archive {task.root} ({_describe_spans(task)}) was compacted meanwhile, and deleted"
                " an hour later. Read it again in smaller parts, or with compact_from_files = 0 in the archive's"
                " pipeline until the read has ended"
            )
        for batch in read_in_order(replacements, names if "offset" in names else (*names, "offset")):
            yield batch.select(list(names))
    except (OSError, pa.ArrowInvalid, ArchiveError) as error:
        raise MqdReadError(
            f"{task.path} of the archive {task.root} cannot be read ({_describe_spans(task)}): {error}"
        ) from error


def _describe_spans(task: ArchivedTask) -> str:
    return ", ".join(f"{task.topic}-{partition} {start} to {end - 1}" for partition, start, end in task.spans)


def _read_file(
    task: ArchivedTask,
    remaining_spans: list[tuple[int, int, int]],
    names: Sequence[str],
    rows_max: int,
    buffer_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Reads `remaining_spans`, and removes the returned offsets from them, so that the caller can
    continue with other files: on an object store even an open file may be deleted.
    """
    file_system, root = filesystem(task.root)
    columns = list(dict.fromkeys([*(name for name in names if name != "topic"), "partition", "offset"]))
    with file_system.open_input_file(f"{root}/{task.path}") as file:
        parquet = pq.ParquetFile(file, buffer_size=buffer_bytes, page_checksum_verification=True)
        while remaining_spans:
            partition, start, end = remaining_spans[0]
            for batch in _read_batches(parquet, columns, rows_max, remaining_spans[0]):
                offset = batch.column("offset")
                matching = pc.and_(
                    pc.equal(batch.column("partition"), partition),
                    pc.and_(pc.greater_equal(offset, start), pc.less(offset, end)),
                )
                records = batch if pc.all(matching).as_py() else batch.filter(matching)
                if records.num_rows:
                    remaining_spans[0] = (partition, records.column("offset")[-1].as_py() + 1, end)
                    yield _to_schema(records, names, task.topic)
            del remaining_spans[0]


def _replacements(task: ArchivedTask, spans: Iterable[tuple[int, int, int]]) -> list[ArchivedTask]:
    """The files into which the task's file was compacted: files of the same day, by invariant 4 of
    manifest.py. Empty if the archive still lists the file, or has no other with these records.
    Raises ArchiveError.
    """
    archive = Archive(task.root)
    if task.path in archive.files:
        return []
    return [
        ArchivedTask(task.root, file.path, task.topic, ((partition, max(start, span.first), min(end, span.end)),))
        for file in archive.files_of(task.topic)
        if file.path.split("/")[1] == task.path.split("/")[1]
        for span in file.spans
        for partition, start, end in spans
        if span.partition == partition and span.first < end and start < span.end
    ]


def _read_batches(
    parquet: pq.ParquetFile, columns: list[str], rows_max: int, span: tuple[int, int, int]
) -> Iterator[pa.RecordBatch]:
    """Reads the row groups that may have records of the span, one by one. A batch has at most
    READ_BYTES, or one record.
    """
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if _may_overlap(group, *span):
            rows = READ_BYTES * group.num_rows // max(group.total_byte_size, 1)
            yield from parquet.iter_batches(max(1, min(rows, rows_max)), row_groups=[number], columns=columns)


def _may_overlap(group: Any, partition: int, start: int, end: int) -> bool:
    """Whether a row group may have records of this range, by its statistics."""
    for number in range(group.num_columns):
        column = group.column(number)
        low, high = {"partition": (partition, partition), "offset": (start, end - 1)}.get(
            column.path_in_schema, (None, None)
        )
        if (
            low is not None
            and column.is_stats_set
            and column.statistics.has_min_max
            and not (column.statistics.min <= high and low <= column.statistics.max)
        ):
            return False
    return True


def _to_schema(batch: Any, names: Sequence[str], topic: str) -> pa.RecordBatch:
    schema = arrow_schema(names)
    columns = [
        (
            pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows)
            if name == "topic"
            else batch.column(name).cast(schema.field(name).type)
        )
        for name in names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
