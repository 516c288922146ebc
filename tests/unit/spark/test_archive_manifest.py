"""An archive's list of files: commits, repetitions, two writers, damage, snapshots, vacuum,
compaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.spark.pipelines import manifest
from mqd.spark.pipelines.archive import append
from mqd.spark.pipelines.compacting import find_due
from mqd.spark.pipelines.manifest import COMMITS, KEEP_S, SNAPSHOTS, Archive, ArchivedFile, ArchiveError, Commit, Span


def file(path: str, first: int, end: int, partition: int = 0, topic: str = "t", size: int = 100) -> ArchivedFile:
    return ArchivedFile(
        f"topic={topic}/date=2026-11-21/{path}.parquet",
        topic,
        "2026-11-21",
        size,
        [Span(partition, first, end, end - first, 1000, 2000)],
    )


def put(archive: Archive, one: ArchivedFile, age_s: float = 0) -> Path:
    path = Path(archive.root) / one.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * one.size_bytes)
    moment = path.stat().st_mtime - age_s
    os.utime(path, (moment, moment))
    return path


def commit(archive: Archive, one: Commit) -> None:
    """With the files that it adds, as written by the tasks of a batch."""
    for added in one.added:
        if not (Path(archive.root) / added.path).exists():
            put(archive, added)
    archive.commit(one)


def commits(path: Path) -> list[str]:
    return sorted(os.listdir(path / COMMITS))


def test_commits_are_found_again(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 0, [file("a", 0, 10), file("b", 5, 7, partition=1)]))
    commit(archive, Commit("q", 3, [file("c", 12, 20)]))
    again = Archive(str(tmp_path))
    assert again.files == archive.files
    assert (again.ends("t"), again.batches, again.topics) == ({0: 20, 1: 7}, {"q": 3}, ["t"])


def test_an_archive_ends_where_its_last_batch_ended(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 0, [file("a", 0, 10)], ends={"t": {"0": 11, "1": 0}}))
    commit(archive, Commit("q", 1, [], ends={"t": {"0": 12, "1": 0}}))
    assert Archive(str(tmp_path)).ends("t") == {0: 12, 1: 0}, "behind the last record the end of a transaction"


def test_another_reader_sees_later_commits(tmp_path: Path) -> None:
    reader, writer = Archive(str(tmp_path)), Archive(str(tmp_path))
    commit(writer, Commit("q", 0, [file("a", 0, 10)]))
    assert not reader.files
    reader.refresh()
    assert reader.ends("t") == {0: 10}


def test_a_batch_counts_once(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 4, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="batch 4 of q is in"):
        commit(archive, Commit("q", 4, [file("b", 10, 20)]))
    commit(archive, Commit("other", 4, [file("b", 10, 20)]))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = Archive(str(tmp_path)), Archive(str(tmp_path))
    commit(first, Commit("q", 0, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="another writer .commit 0 there is batch 0 of q"):
        commit(second, Commit("q", 0, [file("b", 0, 10)]))


@pytest.mark.parametrize("links", [True, False])
def test_one_of_two_concurrent_writers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Both have checked, and found none."""
    first, second = Archive(str(tmp_path)), Archive(str(tmp_path))
    for archive in (first, second):
        monkeypatch.setattr(archive, "_exists", lambda path: False)
        monkeypatch.setattr(archive, "_local", links)
    write_temporary: Callable[[str, bytes], str] = first._write_temporary

    def between(target: str, body: bytes) -> str:
        aside = write_temporary(target, body)
        commit(second, Commit("q", 0, [file("b", 0, 10)]))
        return aside

    monkeypatch.setattr(first, "_write_temporary", between)
    if links:
        with pytest.raises(ArchiveError, match="another writer"):
            commit(first, Commit("q", 0, [file("a", 0, 10)]))
        assert list(Archive(str(tmp_path)).files) == list(second.files) == [file("b", 0, 10).path]
        assert commits(tmp_path) == ["000000000000.json"], "nothing is left aside"
        return
    commit(first, Commit("q", 0, [file("a", 0, 10)]))
    with pytest.raises(
        ArchiveError,
        match="another writer .commit 0 there is batch 0 of q.: .*; the commits of this writer were overwritten",
    ):
        commit(second, Commit("q", 1, [file("c", 10, 20)]))


def test_a_commit_that_was_replaced_at_once_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links: another writer's commit was moved onto this one's before it was read
    back.
    """
    archive, other = Archive(str(tmp_path)), Commit("other", 7, [])
    monkeypatch.setattr(archive, "_local", False)
    monkeypatch.setattr(archive, "_read_body", lambda path: b'{"query":"other","batch":7,"added":[]}')
    with pytest.raises(ArchiveError, match=f"another writer .commit 0 there is {other}.: stop one"):
        commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    assert not archive.files


def test_without_hard_links_commits_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(str(tmp_path))
    monkeypatch.setattr(archive, "_local", False)
    for number in range(3):
        commit(archive, Commit("q", number, [file(f"{number}", number, number + 1)]))
    assert commits(tmp_path) == [f"{number:012}.json" for number in range(3)]
    late = Archive(str(tmp_path))
    monkeypatch.setattr(late, "_local", False)
    commit(archive, Commit("q", 3, []))
    with pytest.raises(ArchiveError, match="commit 3 there is batch 3 of q"):
        commit(late, Commit("q", 3, []))


def test_a_batch_is_committed_together_with_its_offsets(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 4, [file("a", 0, 10)], ends={"t": {"0": 11, "1": 0}}))
    assert not archive.has_batch("q", 5, {"t": {"0": 20}})
    assert not archive.has_batch("other", 0, {"t": {"0": 20}})
    assert archive.has_batch("q", 4, {"t": {"0": 11, "1": 0}})
    assert archive.has_batch("q", 3)
    for ends, message in (
        ({"t": {"0": 12, "1": 0}}, "t-0 ended at 11 there, at 12 now"),
        ({"t": {"1": 3}}, "t-1 ended at 0 there, at 3 now"),
        ({"u": {"0": 1}}, "u-0 ended at 0 there, at 1 now"),
    ):
        with pytest.raises(
            ArchiveError,
            match=f"batch 0 of q is in .* already, but with other offsets .{message}.: the checkpoint was lost",
        ):
            archive.has_batch("q", 0, ends)
    with pytest.raises(ArchiveError, match="t-0 ended at 11 there, at 12 now"):
        append(None, archive, "q", 0, {"t": {"0": 12}})  # type: ignore[arg-type]
    assert append(None, archive, "q", 4, {"t": {"0": 11}}) is None  # type: ignore[arg-type]


def test_a_file_that_the_driver_does_not_see_is_reported(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    put(archive, file("a", 0, 10))
    with pytest.raises(
        ArchiveError,
        match=(
            r"b\.parquet .t-0 from 10 to 20. was written with 100 bytes and is not here: .* do not see the same file"
            r" system"
        ),
    ):
        archive.commit(Commit("q", 0, [file("a", 0, 10), file("b", 10, 20)]))
    with pytest.raises(ArchiveError, match="was written with 99 bytes and has 100 bytes here"):
        archive.commit(Commit("q", 0, [file("a", 0, 10, size=99)]))
    assert not (tmp_path / COMMITS).exists()


def test_an_offset_is_in_one_file(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    with pytest.raises(ArchiveError, match="both have offset 9 of t-0"):
        commit(archive, Commit("q", 1, [file("b", 9, 12)]))
    commit(archive, Commit("q", 1, [file("b", 9, 12, topic="u"), file("c", 9, 12, partition=1)]))
    commit(archive, Commit("", -1, [file("d", 0, 10)], removed=[file("a", 0, 10).path]))
    assert archive.ends("t") == {0: 10, 1: 12}
    with pytest.raises(
        ArchiveError, match="10 records of t, 2026-11-21, were compacted into 9; .*d.parquet: t-0 from 0 to 10"
    ):
        commit(archive, Commit("", -1, [file("e", 0, 9)], removed=[file("d", 0, 10).path]))
    commit(archive, Commit("q", 2, [file("f", 20, 30), file("g", 22, 40)]))  # two alternating days, of one batch
    with pytest.raises(ArchiveError, match="cannot be removed"):
        commit(archive, Commit("", -1, [], removed=["never"]))


def test_a_partial_commit_is_ignored_and_a_damaged_one_reported(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    (tmp_path / COMMITS / "000000000001.json.new").write_bytes(b'{"query": "q", "ba')
    assert Archive(str(tmp_path)).ends("t") == {0: 10}
    (tmp_path / COMMITS / "000000000001.json").write_bytes(b'{"query": "q", "ba')
    with pytest.raises(ArchiveError, match=r"000000000001\.json is damaged"):
        Archive(str(tmp_path))


def test_vacuum_deletes_old_files_that_no_commit_names(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    named, young, old = (
        put(archive, file("a", 0, 10), 2 * KEEP_S),
        put(archive, file("b", 10, 20)),
        put(archive, file("c", 10, 20), 2 * KEEP_S),
    )
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    log = tmp_path / COMMITS / "000000000000.json"
    os.utime(log, (0, 0))
    assert archive.vacuum() == [file("c", 10, 20).path]
    assert [path.exists() for path in (named, young, old, log)] == [True, True, False, True]


def test_vacuum_keeps_files_of_others(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    others = [
        "checkpoint/offsets/0",
        "notes.txt",
        "topic=t/README",
        "topic=t/date=2026-11-21/_SUCCESS",
        "topic=t/date=today/x.parquet",
        "topic=t/date=2026-11-21/deep/x.parquet",
        "other/topic=t/date=2026-11-21/x.parquet",
    ]
    mine = ["topic=t/date=2026-11-21/x.parquet", "_mqd/staging/0/x.parquet"]
    for name in (*others, *mine):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, (0, 0))
    assert sorted(archive.vacuum()) == sorted(mine)
    assert all((tmp_path / name).exists() for name in others)
    assert not any((tmp_path / name).exists() for name in mine)


def test_vacuum_respects_other_writers_commits(tmp_path: Path) -> None:
    stale, archive = Archive(str(tmp_path)), Archive(str(tmp_path))
    put(archive, file("a", 0, 10), 2 * KEEP_S)
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    assert stale.vacuum() == []


@pytest.mark.parametrize("swept", ["vacuum", "sweep"])
def test_a_removed_file_stays_for_its_readers(tmp_path: Path, swept: str) -> None:
    """However old it is."""
    archive = Archive(str(tmp_path))
    path = put(archive, file("a", 0, 10), 3 * KEEP_S)
    commit(archive, Commit("q", 0, [file("a", 0, 10)]))
    commit(archive, Commit("", -1, [file("b", 0, 10)], removed=[file("a", 0, 10).path]))
    for one in (archive, Archive(str(tmp_path))):
        getattr(one, swept)()
        assert path.exists()
    archive.sweep(time.time() + KEEP_S - 60)
    assert path.exists()
    getattr(archive, swept)(time.time() + KEEP_S + 1)
    assert not path.exists()
    assert (tmp_path / file("b", 0, 10).path).exists()


def test_an_archive_is_opened_from_its_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SNAPSHOT_INTERVAL", 2)
    archive = Archive(str(tmp_path))
    for number in range(6):
        commit(
            archive, Commit("q", number, [file(f"{number}", number, number + 1)], ends={"t": {"0": number + 1, "3": 5}})
        )
    path = put(archive, file("0", 0, 1), 3 * KEEP_S)
    commit(archive, Commit("", -1, [file("c", 0, 1)], removed=[file("0", 0, 1).path]))
    assert sorted(os.listdir(tmp_path / SNAPSHOTS)) == ["000000000004.json", "000000000006.json"]
    commit(archive, Commit("q", 6, []))
    whole = Archive(str(tmp_path))
    for number in range(4):
        (tmp_path / COMMITS / f"{number:012}.json").unlink()
    (tmp_path / SNAPSHOTS / "000000000008.json").write_bytes(b'{"files"')
    again = Archive(str(tmp_path))
    for found in (whole, again):
        assert (found.files, found.batches, found.ends("t")) == (archive.files, {"q": 6}, {0: 6, 3: 5})
        found.vacuum()
        assert path.exists(), "it was taken out a moment ago, which the snapshot says"
    commit(again, Commit("q", 7, []))
    assert commits(tmp_path)[-1] == "000000000008.json"


def test_small_files_of_a_day_are_packed_in_the_order_of_offsets(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(
        archive,
        Commit("q", 0, [file(f"f{number}", number * 10, number * 10 + 10, size=30) for number in reversed(range(7))]),
    )
    commit(archive, Commit("q", 1, [file("large", 100, 110, size=90), file("else", 0, 1, topic="u", size=1)]))
    assert find_due(archive, 100, 8) == []
    assert find_due(archive, 100, 0) == []
    groups = find_due(archive, 100, 7)
    assert [[one.spans[0].first for one in group] for group in groups] == [[0, 10, 20], [30, 40, 50]]
    groups = find_due(archive, 100, 6, excluded={file("f1", 10, 20).path})
    assert [[one.spans[0].first for one in group] for group in groups] == [[0, 20, 30], [40, 50, 60]]


def test_a_large_file_is_not_written_again_for_a_few_small_ones(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(
        archive,
        Commit(
            "q",
            0,
            [
                file("large", 0, 100, size=400),
                *(file(f"s{number}", 100 + number, 101 + number, size=10) for number in range(20)),
            ],
        ),
    )
    assert [{one.size_bytes for one in group} for group in find_due(archive, 1000, 4)] == [{10}], "the small ones alone"
    commit(archive, Commit("q", 1, [file(f"m{number}", 200 + number, 201 + number, size=100) for number in range(2)]))
    assert [{one.size_bytes for one in group} for group in find_due(archive, 1000, 4)] == [{10, 100, 400}], (
        "as large as it is, together"
    )


def test_each_record_is_rewritten_only_a_few_times(tmp_path: Path) -> None:
    """A day of batches with 64 partitions each."""
    archive = Archive(str(tmp_path))
    written = count_max = 0
    batches = 512
    for batch in range(batches):
        for partition in range(64):
            one = file(f"{batch}-{partition}", batch, batch + 1, partition, size=10)
            archive.files[one.path] = one
        for place, group in enumerate(find_due(archive, 1 << 30, 16)):
            for one in group:
                del archive.files[one.path]
            size = sum(one.size_bytes for one in group)
            archive.files[f"c{batch}-{place}"] = ArchivedFile(
                f"c{batch}-{place}", "t", "2026-11-21", size, [Span(0, batch, batch + 1, 1, 0, 0)]
            )
            written += size
        count_max = max(count_max, len(archive.files))
    assert written / (batches * 640) <= 10, "log2(512) and the first time; rewritten each minute it was 257"
    assert count_max <= 16
    assert sum(one.size_bytes for one in archive.files.values()) == batches * 640


def test_packing_does_not_leave_a_large_file_with_a_small_one(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    commit(
        archive,
        Commit(
            "q",
            0,
            [
                *(file(f"s{number:02}", number, number + 1, size=10) for number in range(17)),
                file("large", 20, 50, size=40),
                file("z", 50, 51, size=10),
            ],
        ),
    )
    assert [len(group) for group in find_due(archive, 200, 4)] == [17]


def test_a_recreated_topic_is_archived_elsewhere(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive.commit(Commit("q", 0, [], ends={"t": {"0": 5}}, topic_ids={"t": "one"}))
    again = Archive(str(tmp_path))
    again.commit(Commit("q", 1, [], ends={"t": {"0": 6}}, topic_ids={"t": "one", "u": "two"}))
    with pytest.raises(ArchiveError, match="u was recreated"):
        again.commit(Commit("q", 2, [], ends={"t": {"0": 7}}, topic_ids={"t": "one", "u": "three"}))
