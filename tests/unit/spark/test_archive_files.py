"""A task's writes to an archive, without Spark: files by topic and day, their offset ranges and
order, and reading them back.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqd.spark.pipelines import manifest, parquet
from mqd.spark.pipelines.manifest import KEEP_S, Archive, ArchivedFile, ArchiveError, Commit
from mqd.spark.pipelines.parquet import ArchivedTask, OrderError, read, read_in_order, write_files
from mqd.spark.schema import arrow_schema
from mqd.spark.wire import MqdReadError

DAY_MS = 24 * 3600 * 1000
HEADERS = arrow_schema(["headers"]).field("headers").type
Row = tuple[str, int, int, int]  # topic, partition, offset, milliseconds of the epoch


def batch(rows: list[Row]) -> pa.RecordBatch:
    """In Spark's form: times in the session's time zone."""
    times = pa.array([1000 * row[3] for row in rows], pa.int64())
    return pa.record_batch(
        {
            "partition": pa.array([row[1] for row in rows], pa.int32()),
            "offset": pa.array([row[2] for row in rows], pa.int64()),
            "timestamp": times.cast(pa.timestamp("us", "Europe/Berlin")),
            "timestampType": pa.array([0] * len(rows), pa.int32()),
            "key": pa.array([None] * len(rows), pa.binary()),
            "value": pa.array([b"%s-%d/%d" % (row[0].encode(), row[1], row[2]) for row in rows]),
            "headers": pa.array([[("h", b"1"), ("h", None)] if row[2] % 2 else None for row in rows], HEADERS),
            "topic": pa.array([row[0] for row in rows]),
            "date": times.cast(pa.timestamp("us")).cast(pa.date32()),
        }
    )


def offsets(root: Path, file: ArchivedFile, partition: int, start: int, end: int) -> list[int]:
    task = ArchivedTask(str(root), file.path, file.topic, ((partition, start, end),))
    return [offset for found in read(task, ("offset",)) for offset in found.column("offset").to_pylist()]


def test_each_day_of_a_topic_is_a_file_that_lists_its_contents(tmp_path: Path) -> None:
    rows = [("a", 0, 0, 5), ("a", 0, 1, 3), ("a", 0, 2, DAY_MS + 1), ("b.x-1", 7, 40, 9)]
    made = write_files(iter([batch(rows), batch([("a", 0, 3, 8), ("a", 1, 9, 2)])]), str(tmp_path), "q-0")
    reported = {
        (file.topic, file.date): [
            (span.partition, span.first, span.end, span.rows, span.min_timestamp, span.max_timestamp)
            for span in file.spans
        ]
        for file in made
    }
    assert reported == {
        ("a", "1970-01-01"): [(0, 0, 4, 3, 3, 8), (1, 9, 10, 1, 2, 2)],
        ("a", "1970-01-02"): [(0, 2, 3, 1, DAY_MS + 1, DAY_MS + 1)],
        ("b.x-1", "1970-01-01"): [(7, 40, 41, 1, 9, 9)],
    }
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")) == sorted(
        file.path for file in made
    )
    assert all(
        file.path.startswith(f"topic={file.topic}/date={file.date}/q-0-")
        and file.size_bytes == (tmp_path / file.path).stat().st_size
        for file in made
    )


def test_archived_rows_are_read_back(tmp_path: Path) -> None:
    (file,) = write_files(
        iter([batch([("t", 2, 5, 1_700_000_000_123), ("t", 2, 7, 1_700_000_000_456)])]), str(tmp_path), "q"
    )
    names = ("topic", "key", "value", "headers", "timestamp", "partition", "offset")
    (found,) = read(ArchivedTask(str(tmp_path), file.path, "t", ((2, 0, 100),)), names)
    moment = datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC).replace(microsecond=123_000)
    assert found.schema == arrow_schema(names)
    headers = [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    assert found.to_pylist()[0] == {
        "topic": "t",
        "key": None,
        "value": b"t-2/5",
        "headers": headers,
        "timestamp": moment,
        "partition": 2,
        "offset": 5,
    }


@pytest.mark.parametrize("read_bytes", [1 << 20, 1])
def test_alternating_days_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    """With random days, in two batches of two partitions; read in batches of many records, and of
    one.
    """
    monkeypatch.setattr(parquet, "READ_BYTES", read_bytes)
    chance = random.Random(7)
    made = []
    for first in (0, 500):
        made += write_files(
            iter(
                [
                    batch(
                        [
                            ("t", partition, offset, chance.randrange(3) * DAY_MS)
                            for offset in range(first, first + 500, 1 + partition)
                        ]
                    )
                    for partition in range(2)
                ]
            ),
            str(tmp_path),
            "q",
        )
    tasks = [
        ArchivedTask(str(tmp_path), file.path, "t", ((span.partition, max(span.first, 13), span.end),))
        for file in made
        for span in file.spans
    ]
    found = [
        (row["partition"], row["offset"])
        for one in read_in_order(reversed(tasks), ("partition", "offset"))
        for row in one.to_pylist()
    ]
    assert found == [(0, offset) for offset in range(13, 1000)] + [(1, offset) for offset in range(14, 1000, 2)]


def test_row_groups_outside_the_range_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)  # a row group for each batch
    (file,) = write_files(
        iter(
            [
                batch([("t", partition, offset, 0) for offset in range(first, first + 4)])
                for partition in range(3)
                for first in (0, 4)
            ]
        ),
        str(tmp_path),
        "q",
    )
    assert pq.ParquetFile(tmp_path / file.path).num_row_groups == 6
    assert offsets(tmp_path, file, 1, 2, 6) == [2, 3, 4, 5]
    assert offsets(tmp_path, file, 2, 7, 9) == [7]
    assert offsets(tmp_path, file, 2, 8, 9) == offsets(tmp_path, file, 3, 0, 9) == []
    requests: list[list[int]] = []
    kept = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, *given: object, **named: object) -> Iterator[pa.RecordBatch]:
        requests.append(list(named["row_groups"]))  # type: ignore[call-overload]
        return kept(self, *given, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    offsets(tmp_path, file, 1, 2, 4)
    assert requests == [[2]]


@pytest.mark.parametrize("batches", [[[3, 2]], [[2, 2]], [[1, 2], [2, 3]], [[4], [1]]])
def test_records_out_of_order_are_refused(tmp_path: Path, batches: list[list[int]]) -> None:
    with pytest.raises(OrderError, match="records of t-0 are not in the order of their offsets"):
        write_files((batch([("t", 0, offset, 0) for offset in one]) for one in batches), str(tmp_path), "q")


def test_a_record_without_a_time_is_refused(tmp_path: Path) -> None:
    found = batch([("t", 0, 0, 0), ("t", 0, 1, 0)])
    dates = pa.array([None, found.column("date")[1].as_py()], pa.date32())
    with pytest.raises(ArchiveError, match="without topic or timestamp"):
        write_files(iter([found.set_column(found.schema.get_field_index("date"), "date", dates)]), str(tmp_path), "q")


def test_times_beyond_all_dates_are_filed_under_the_nearest_date(tmp_path: Path) -> None:
    """A producer may write any time, such as seconds instead of milliseconds; the record keeps it."""
    times = [-62_200_000_000_000, -62_135_596_800_000, 0, 253_402_300_799_999, 1_700_000_000_000_000]
    made = write_files(iter([batch([("t", 0, offset, time) for offset, time in enumerate(times)])]), str(tmp_path), "q")
    assert sorted((file.date, file.row_count, file.path.split("/")[1]) for file in made) == [
        (date, rows, f"date={date}") for date, rows in (("0001-01-01", 2), ("1970-01-01", 1), ("9999-12-31", 2))
    ]
    assert all(manifest._OWN_FILE.fullmatch(file.path) for file in made)
    tasks = [
        ArchivedTask(str(tmp_path), file.path, "t", ((span.partition, span.first, span.end),))
        for file in made
        for span in file.spans
    ]
    found = [
        moment
        for one in read_in_order(tasks, ("offset", "timestamp"))
        for moment in one.column("timestamp").cast(pa.int64()).to_pylist()
    ]
    assert found == [1000 * time for time in times]


def test_many_days_do_not_keep_many_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "FILES_OPEN_MAX", 2)
    monkeypatch.setattr(parquet, "UNWRITTEN_BYTES_MAX", 0)
    made = write_files(
        iter(
            [batch([("t", 0, day, day * DAY_MS) for day in range(5)]), batch([("t", 0, 5, 4 * DAY_MS), ("t", 0, 6, 0)])]
        ),
        str(tmp_path),
        "q",
    )
    assert sorted((file.date, file.spans[0].first, file.spans[0].end) for file in made) == [
        ("1970-01-01", 0, 1),
        ("1970-01-01", 6, 7),
        ("1970-01-02", 1, 2),
        ("1970-01-03", 2, 3),
        ("1970-01-04", 3, 4),
        ("1970-01-05", 4, 6),
    ]


def test_alternating_days_make_one_file_each(tmp_path: Path) -> None:
    made = write_files(
        (batch([("t", 0, 40 * turn + day, day * DAY_MS) for day in range(40)]) for turn in range(5)), str(tmp_path), "q"
    )
    assert sorted((file.date, file.row_count) for file in made) == sorted(
        (str(datetime.date(1970, 1, 1) + datetime.timedelta(day)), 5) for day in range(40)
    )


def test_large_values_are_read_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "READ_BYTES", 1 << 20)
    one = batch([("t", 0, offset, 0) for offset in range(40)])
    values = pa.array([random.Random(offset).randbytes(100_000) for offset in range(40)])
    (file,) = write_files(
        iter([one.set_column(one.schema.get_field_index("value"), "value", values)]), str(tmp_path), "q"
    )
    sizes = [found.num_rows for found in read(ArchivedTask(str(tmp_path), file.path, "t", ((0, 0, 40),)), ("value",))]
    assert sum(sizes) == 40 and max(sizes) <= 11


def test_a_flipped_bit_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "COMPRESSION", "none")  # a decompressor might detect it, too
    (file,) = write_files(iter([batch([("t", 0, offset, 0) for offset in range(1000)])]), str(tmp_path), "q")
    path = tmp_path / file.path
    meta = pq.ParquetFile(path).metadata.row_group(0)
    column = next(
        meta.column(number) for number in range(meta.num_columns) if meta.column(number).path_in_schema == "value"
    )
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(MqdReadError, match=r"cannot be read \(t-0 0 to 999\)"):
        list(read(ArchivedTask(str(tmp_path), file.path, "t", ((0, 0, 1000),)), ("value",)))


def test_no_record_no_file(tmp_path: Path) -> None:
    assert write_files(iter([batch([])]), str(tmp_path), "q") == [] == write_files(iter([]), str(tmp_path), "q")
    assert not list(tmp_path.iterdir())


# -- what is compacted while it is read ------------------------------------------------------------


def files_of(root: Path, *offsets: list[int]) -> list[ArchivedFile]:
    """A file of partition 0 for each range."""
    return [
        file
        for one in offsets
        for file in write_files(iter([batch([("t", 0, offset, 0) for offset in one])]), str(root), "q")
    ]


def tasks_of(root: Path, files: list[ArchivedFile]) -> list[ArchivedTask]:
    return [
        ArchivedTask(str(root), file.path, "t", tuple((span.partition, span.first, span.end) for span in file.spans))
        for file in files
    ]


def compact(archive: Archive, files: list[ArchivedFile]) -> list[ArchivedFile]:
    """All into one file, and vacuum an hour later."""
    rows = sorted(
        {
            ("t", span.partition, offset, 0)
            for file in files
            for span in file.spans
            for offset in offsets(Path(archive.root), file, span.partition, 0, 1 << 40)
        }
    )
    (large,) = write_files(iter([batch(rows)]), archive.root, "compacted")
    archive.commit(Commit("", -1, [large], [file.path for file in files]))
    archive.sweep(time.time() + KEEP_S + 1)
    assert not any((Path(archive.root) / file.path).exists() for file in files)
    return [large]


def test_files_compacted_during_a_replay_are_read_at_their_new_place(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    files = files_of(tmp_path, [*range(10)], [*range(10, 20)], [*range(20, 30)])
    for number, file in enumerate(files):
        archive.commit(Commit("q", number, [file]))
    tasks = [
        ArchivedTask(task.root, task.path, "t", ((0, max(start, 3), min(end, 27)),))
        for task in tasks_of(tmp_path, files)
        for _, start, end in task.spans
    ]
    reading = read_in_order(tasks, ("offset", "value"))
    found = next(reading).column("offset").to_pylist()
    late = files_of(tmp_path, [*range(30, 40)])
    archive.commit(Commit("q", 3, late))
    compact(archive, compact(archive, files) + late)
    found += [offset for one in reading for offset in one.column("offset").to_pylist()]
    assert found == [*range(3, 27)]


def test_alternating_files_merged_into_one_are_read_once(tmp_path: Path) -> None:
    """A large file is kept between small ones that are compacted, and is compacted with them later."""
    archive = Archive(str(tmp_path))
    small, large, other = files_of(tmp_path, [*range(10)], [*range(10, 20)], [*range(20, 30)])
    for number, file in enumerate((small, large, other)):
        archive.commit(Commit("q", number, [file]))
    files = compact(archive, [small, other]) + [large]
    tasks = tasks_of(tmp_path, files)
    compact(archive, files)
    assert [offset for one in read_in_order(tasks, ("offset",)) for offset in one.column("offset").to_pylist()] == [
        *range(30)
    ]


def test_reading_continues_after_a_file_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(str(tmp_path))
    files = write_files(
        iter([batch([("t", partition, offset, 0) for partition in range(2) for offset in range(10)])]),
        str(tmp_path),
        "q",
    )
    archive.commit(Commit("q", 0, files))
    monkeypatch.setattr(parquet, "READ_BYTES", 1)  # one record at a time
    kept, gone = parquet._read_batches, list[Exception]()

    def batches(*given: object) -> Iterator[pa.RecordBatch]:
        for one in kept(*given):  # type: ignore[arg-type]
            if gone:
                raise gone.pop()
            yield one

    monkeypatch.setattr(parquet, "_read_batches", batches)
    reading = read(tasks_of(tmp_path, files)[0], ("value",), follow_compaction=True)
    found = [next(reading).column("value")[0].as_py() for _ in range(13)]
    compact(archive, files)
    gone.append(FileNotFoundError("no such key"))
    found += [value for one in reading for value in one.column("value").to_pylist()]
    assert not gone
    assert found == [b"t-%d/%d" % (partition, offset) for partition in range(2) for offset in range(10)]


def test_a_file_compacted_meanwhile_is_reported(tmp_path: Path) -> None:
    """Its records are indistinguishable from its neighbours', which other tasks read."""
    archive = Archive(str(tmp_path))
    files = files_of(tmp_path, [*range(10)], [*range(10, 20)])
    archive.commit(Commit("q", 0, files))
    compact(archive, files)
    with pytest.raises(MqdReadError, match=r"\(t-0 0 to 9\) was compacted meanwhile, .* Read it again"):
        list(read(tasks_of(tmp_path, files)[0], ("value",)))


def test_a_missing_committed_file_is_an_error(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    files = files_of(tmp_path, [*range(10)])
    archive.commit(Commit("q", 0, files))
    (tmp_path / files[0].path).unlink()
    for reading in (
        read(tasks_of(tmp_path, files)[0], ("value",)),
        read_in_order(tasks_of(tmp_path, files), ("offset",)),
    ):
        with pytest.raises(MqdReadError, match=r"cannot be read \(t-0 0 to 9\)"):
            list(reading)
