"""An archive's list of files: commits, repetitions, two writers, damage, what is swept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqd.spark.pipelines.compacting import due
from mqd.spark.pipelines.manifest import KEEP_S, LOG, Archive, ArchivedFile, ArchiveError, Commit, Span


def file(path: str, first: int, end: int, partition: int = 0, topic: str = "t", size: int = 100) -> ArchivedFile:
    return ArchivedFile(f"topic={topic}/date=2026-11-21/{path}", topic, "2026-11-21", size, [Span(partition, first, end, end - first, 1000, 2000)])


def put(archive: Archive, one: ArchivedFile, age_s: float = 0) -> Path:
    path = Path(archive.root) / one.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    moment = path.stat().st_mtime - age_s
    os.utime(path, (moment, moment))
    return path


def test_commits_are_found_again(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [file("a", 0, 10), file("b", 5, 7, partition=1)]))
    archive.commit(Commit("q", 3, [file("c", 12, 20)]))
    again = Archive(str(tmp_path))
    assert again.files == archive.files
    assert (again.ends("t"), again.batches, again.topics) == ({0: 20, 1: 7}, {"q": 3}, ["t"])


def test_an_archive_goes_to_where_its_last_batch_ended(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [file("a", 0, 10)], ends={"t": {"0": 11, "1": 0}}))
    archive.commit(Commit("q", 1, [], ends={"t": {"0": 12, "1": 0}}))
    assert Archive(str(tmp_path)).ends("t") == {0: 12, 1: 0}, "behind the last record the end of a transaction"


def test_another_reader_sees_what_came_since(tmp_path: Path) -> None:
    reader, writer = Archive(str(tmp_path)), Archive(str(tmp_path))
    writer.commit(Commit("q", 0, [file("a", 0, 10)]))
    assert not reader.files
    reader.refresh()
    assert reader.ends("t") == {0: 10}


def test_a_batch_counts_once(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 4, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="batch 4 of q is in"):
        archive.commit(Commit("q", 4, [file("b", 10, 20)]))
    archive.commit(Commit("other", 4, [file("b", 10, 20)]))


def test_two_writers_are_refused(tmp_path: Path) -> None:
    first, second = Archive(str(tmp_path)), Archive(str(tmp_path))
    first.commit(Commit("q", 0, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="another writer"):
        second.commit(Commit("q", 0, [file("b", 0, 10)]))


def test_an_offset_is_in_one_file(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="both have offset 9 of t-0"):
        archive.commit(Commit("q", 1, [file("b", 9, 12)]))
    archive.commit(Commit("q", 1, [file("b", 9, 12, topic="u"), file("c", 9, 12, partition=1)]))
    archive.commit(Commit("", -1, [file("d", 0, 10)], removed=[file("a", 0, 10).path]))
    assert archive.ends("t") == {0: 10, 1: 12}
    with pytest.raises(ArchiveError, match="10 records were to be compacted and 9 came of it"):
        archive.commit(Commit("", -1, [file("e", 0, 9)], removed=[file("d", 0, 10).path]))
    archive.commit(Commit("q", 2, [file("f", 20, 30), file("g", 22, 40)]))  # two days in turns: of one batch
    with pytest.raises(ArchiveError, match="cannot be taken out"):
        archive.commit(Commit("", -1, [], removed=["never"]))


def test_half_a_commit_does_not_count_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [file("a", 0, 10)]))
    (tmp_path / LOG / "000000000001.json.new").write_bytes(b'{"query": "q", "ba')
    assert Archive(str(tmp_path)).ends("t") == {0: 10}
    (tmp_path / LOG / "000000000001.json").write_bytes(b'{"query": "q", "ba')
    with pytest.raises(ArchiveError, match=r"000000000001\.json is damaged"):
        Archive(str(tmp_path))


def test_vacuum_takes_what_no_commit_names_and_is_old(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    named, young, old = put(archive, file("a", 0, 10), 2 * KEEP_S), put(archive, file("b", 10, 20)), put(archive, file("c", 10, 20), 2 * KEEP_S)
    archive.commit(Commit("q", 0, [file("a", 0, 10)]))
    log = tmp_path / LOG / "000000000000.json"
    os.utime(log, (0, 0))
    assert archive.vacuum() == [file("c", 10, 20).path]
    assert [path.exists() for path in (named, young, old, log)] == [True, True, False, True]


def test_small_files_of_a_day_are_packed_in_the_order_of_offsets(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [file(f"f{number}", number * 10, number * 10 + 10, size=30) for number in reversed(range(7))]))
    archive.commit(Commit("q", 1, [file("large", 100, 110, size=90), file("else", 0, 1, topic="u", size=1)]))
    assert due(archive, 100, 8) == []
    assert due(archive, 100, 0) == []
    groups = due(archive, 100, 7)
    assert [[one.spans[0].first for one in group] for group in groups] == [[0, 10, 20], [30, 40, 50]]
