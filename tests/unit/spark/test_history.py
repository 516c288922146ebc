"""Reads that begin in an archive: which offsets come from archive or log, and the rows of a file."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqd.spark import driver, history
from mqd.spark.offsets import id_text
from mqd.spark.options import LATEST, SourceOptions, source_options
from mqd.spark.pipelines.manifest import Archive, ArchivedFile, Commit, Span
from mqd.spark.pipelines.parquet import ArchivedTask, read
from mqd.spark.planning import Range
from mqd.spark.wire import MqdReadError, Topic

NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")


def options(path: Path, **given: str) -> SourceOptions:
    return source_options({"kafka.bootstrap.servers": "a:1", "subscribe": "t", "archive": str(path), **given}, False)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Partition 0: offsets 2 to 9 in two files; partition 1: 0 to 4, a transaction's end at 5."""
    found = Archive(str(tmp_path / "archive"))
    found.commit(Commit("q", 0, [one(found, "a", {0: (2, 6), 1: (0, 5)})], ends={"t": {"0": 6, "1": 6}}))
    found.commit(Commit("q", 1, [one(found, "b", {0: (6, 10)})]))
    return found


def one(archive: Archive, name: str, ranges: dict[int, tuple[int, int]]) -> ArchivedFile:
    path = Path(archive.root) / f"topic=t/date=2026-11-21/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(partition, offset) for partition, (first, end) in ranges.items() for offset in range(first, end)]
    moment = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    columns = {
        "partition": pa.array([partition for partition, _ in rows], pa.int32()),
        "offset": pa.array([offset for _, offset in rows], pa.int64()),
        "timestamp": pa.array([moment] * len(rows), pa.timestamp("us", "UTC")),
        "timestampType": pa.array([0] * len(rows), pa.int32()),
        "key": pa.array([None] * len(rows), pa.binary()),
        "value": pa.array([b"%d/%d" % row for row in rows], pa.binary()),
        "headers": pa.array([[{"key": "h", "value": b"v"}] if offset % 2 else None for _, offset in rows], headers),
    }
    pq.write_table(pa.table(columns), path)
    spans = [Span(partition, first, end, end - first, 0, 0) for partition, (first, end) in ranges.items()]
    return ArchivedFile(str(path.relative_to(archive.root)), "t", "2026-11-21", path.stat().st_size, spans)


def values(tasks: list[ArchivedTask], names: tuple[str, ...] = NAMES) -> list[bytes]:
    return [value.as_py() for task in tasks for batch in read(task, names) for value in batch.column("value")]


def test_the_log_continues_where_the_archive_ends(archive: Archive) -> None:
    log_starts, ends = {("t", 0): 8, ("t", 1): 3, ("t", 2): 4}, {("t", 0): 20, ("t", 1): 7, ("t", 2): 9}
    tasks, begins = history.plan(options(Path(archive.root)), log_starts, ends, ends)
    assert begins == {("t", 0): [(10, 20)], ("t", 1): [(6, 7)], ("t", 2): [(4, 9)]}
    assert values(tasks) == [b"0/%d" % n for n in range(2, 6)] + [b"1/%d" % n for n in range(5)] + [
        b"0/%d" % n for n in range(6, 10)
    ]


def test_a_gap_between_archive_and_log_is_kept(archive: Archive) -> None:
    _, begins = history.plan(options(Path(archive.root)), {("t", 0): 15}, {("t", 0): 20}, {("t", 0): 20})
    assert begins == {("t", 0): [(10, 20)]}, "the log starts at 15: a reader from 10 is informed of the loss"


def test_a_range_within(archive: Archive) -> None:
    given = options(Path(archive.root), startingOffsets='{"t":{"0":4,"1":5}}')
    tasks, begins = history.plan(
        given, {("t", 0): 4, ("t", 1): 5}, {("t", 0): 8, ("t", 1): 6}, {("t", 0): 20, ("t", 1): 9}
    )
    assert values(tasks) == [b"0/4", b"0/5", b"0/6", b"0/7"]
    assert begins == {("t", 0): [], ("t", 1): []}


def test_records_before_the_archive_come_from_the_log(archive: Archive) -> None:
    """Begun at `latest`, or later than the log: partition 0 is archived from 2 on, partition 3 has
    only the end of a batch.
    """
    archive.commit(Commit("q", 2, [], ends={"t": {"0": 10, "1": 6, "3": 7}}))
    log_starts, ends = {("t", 0): 0, ("t", 3): 0}, {("t", 0): 12, ("t", 3): 9}
    tasks, from_log = history.plan(options(Path(archive.root)), log_starts, ends, ends)
    assert from_log == {("t", 0): [(0, 2), (10, 12)], ("t", 3): [(0, 9)]}
    assert values(tasks) == [b"0/%d" % n for n in range(2, 10)]
    given = options(Path(archive.root), startingOffsets='{"t":{"0":1}}')
    assert history.plan(given, {("t", 0): 1}, {("t", 0): 2}, {("t", 0): 12}) == ([], {("t", 0): [(1, 2)]})


def test_no_archive_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MqdReadError, match="there is no archive at .*/elsewhere"):
        history.plan(options(tmp_path / "elsewhere"), {("t", 0): 0}, {("t", 0): 3}, {("t", 0): 3})


def test_a_recreated_topic_is_detected(archive: Archive) -> None:
    with pytest.raises(
        MqdReadError, match="t-0: the archive .* extends to offset 10 and the log only to 3: the topic was recreated"
    ):
        history.plan(options(Path(archive.root)), {("t", 0): 0}, {("t", 0): 3}, {("t", 0): 3})


def test_a_recreated_topic_is_detected_when_it_has_grown(archive: Archive) -> None:
    old, new = b"o" * 16, b"n" * 16
    archive.commit(Commit("q", 2, [], topic_ids={"t": id_text(old)}))
    where = ({("t", 0): 0}, {("t", 0): 30}, {("t", 0): 30})
    assert history.plan(options(Path(archive.root)), *where, {"t": old, "u": new})[1]
    with pytest.raises(MqdReadError, match="t was recreated after it was archived"):
        history.plan(options(Path(archive.root)), *where, {"t": new})


def test_columns_are_the_sources(archive: Archive) -> None:
    from mqd.spark.schema import arrow_schema

    (task,) = history.plan(options(Path(archive.root)), {("t", 0): 0}, {("t", 0): 4}, {("t", 0): 30})[0]
    (batch,) = read(task, NAMES)
    assert batch.schema == arrow_schema(NAMES)
    assert batch.to_pylist()[1] == {
        "key": None,
        "value": b"0/3",
        "topic": "t",
        "partition": 0,
        "offset": 3,
        "timestamp": datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC),
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"v"}],
    }
    (pruned,) = read(task, ("offset",))
    assert pruned.schema == arrow_schema(("offset",)) and pruned.num_rows == 2


def test_a_damaged_file_is_named(archive: Archive) -> None:
    (Path(archive.root) / "topic=t/date=2026-11-21/a.parquet").write_bytes(b"PAR1 not")
    tasks, _ = history.plan(options(Path(archive.root)), {("t", 0): 0}, {("t", 0): 4}, {("t", 0): 30})
    with pytest.raises(MqdReadError, match=r"a\.parquet of the archive .* cannot be read"):
        values(tasks)


def test_an_archive_that_is_filled_while_a_read_is_planned(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records archived after the log's end was queried are beyond that end; this does not make it
    the archive of another topic.
    """

    class Filling(driver.Driver):
        def partitions(self, skip_missing: bool = False) -> list[tuple[str, int]]:
            self.topics = {"t": Topic("t", b"i" * 16, {0: 1})}
            return [("t", 0)]

        def offsets_by_time(self, timestamps: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
            if LATEST in timestamps.values() and len(archive.files) == 2:
                archive.commit(Commit("q", 2, [one(archive, "c", {0: (10, 14)})]))
            return {key: 12 if at == LATEST else 0 for key, at in timestamps.items()}

    monkeypatch.setattr(driver, "Driver", Filling)
    tasks = driver.plan_batch(options(Path(archive.root)))
    assert [(task.start, task.end) for task in tasks if isinstance(task, Range)] == [(0, 2), (10, 12)]
    assert values([task for task in tasks if isinstance(task, ArchivedTask)]) == [b"0/%d" % n for n in range(2, 10)]
