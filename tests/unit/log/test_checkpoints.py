"""State that survives a shutdown, a crash and a changed number of workers; and the order in which
it is written.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqd.log import checkpoints
from mqd.log.checkpoints import (
    CheckpointEntry,
    CheckpointError,
    CheckpointWriter,
    format_checkpoint,
    open_directory,
    parse_checkpoint,
)
from tests.unit.log.log_files import PlainFiles

A, B = b"a" * 16, b"b" * 16

names = st.text(st.sampled_from("abcXYZ019._-"), min_size=1, max_size=30)
entries = st.builds(
    CheckpointEntry,
    topic=names,
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
    topic_id=st.none() | st.binary(min_size=16, max_size=16),
)


@given(st.lists(entries, max_size=20))
def test_a_checkpoint_reads_back(written: list[CheckpointEntry]) -> None:
    assert parse_checkpoint(format_checkpoint(written)) == written


@given(st.binary(max_size=200))
def test_any_bytes_give_entries_or_a_checkpoint_error(data: bytes) -> None:
    try:
        parse_checkpoint(data)
    except CheckpointError:
        pass


def test_a_cut_off_checkpoint_is_refused() -> None:
    data = format_checkpoint([CheckpointEntry("t", 0, 10, A), CheckpointEntry("t", 1, 11, A)])
    for size in range(len(data) - 1):
        with pytest.raises(CheckpointError):
            parse_checkpoint(data[:size])
            pytest.fail(f"{size} of {len(data)} bytes were taken for a whole checkpoint")


def test_kafkas_version_is_read() -> None:
    assert parse_checkpoint(b"0\n1\nt 3 17\n") == [CheckpointEntry("t", 3, 17, None)]


def life(
    directory: Path,
    worker: int,
    worker_count: int,
    points: list[CheckpointEntry],
    starts: list[CheckpointEntry],
    clean: bool = False,
) -> checkpoints.TrustedPoints:
    """One start (and, if clean, shutdown) of a worker; returns the checkpoints that it trusted at
    its start.
    """
    files = PlainFiles()
    found = open_directory(directory, worker, worker_count, files)
    CheckpointWriter(directory, worker, files, found).write(points, starts)
    if clean:
        checkpoints.write_clean_shutdown(directory, worker, 7, files)
    return found.trusted_points(worker)


def test_first_start_knows_nothing(tmp_path: Path) -> None:
    trust = open_directory(tmp_path, 0, 1, PlainFiles()).trusted_points(0)
    assert (
        trust.recovery_point("t", 0, A),
        trust.log_start_offset("t", 0, A),
        trust.had_clean_shutdown("t", 0, A),
    ) == (-1, 0, False)


def test_a_clean_shutdown_is_trusted_once(tmp_path: Path) -> None:
    life(tmp_path, 0, 1, [CheckpointEntry("t", 0, 100, A)], [CheckpointEntry("t", 0, 20, A)], clean=True)
    trust = life(tmp_path, 0, 1, [CheckpointEntry("t", 0, 100, A)], [])
    assert (
        trust.recovery_point("t", 0, A),
        trust.log_start_offset("t", 0, A),
        trust.had_clean_shutdown("t", 0, A),
    ) == (100, 20, True)
    assert not open_directory(tmp_path, 0, 1, PlainFiles()).trusted_points(0).had_clean_shutdown("t", 0, A), (
        "the life in between did not end well"
    )


def test_the_marker_is_deleted_before_anything_is_written(tmp_path: Path) -> None:
    life(tmp_path, 0, 1, [CheckpointEntry("t", 0, 100, A)], [], clean=True)
    files = PlainFiles()
    found = open_directory(tmp_path, 0, 1, files)
    CheckpointWriter(tmp_path, 0, files, found).write([CheckpointEntry("t", 0, 101, A)], [])
    assert [change for change in files.changes if change[0] != "sync"][0] == ("unlink", "clean-shutdown.0")
    assert files.changes[1][0] == "sync", "its removal must be on disk first"


def test_topic_of_the_same_name_inherits_nothing(tmp_path: Path) -> None:
    life(tmp_path, 0, 1, [CheckpointEntry("t", 0, 100, A)], [CheckpointEntry("t", 0, 50, A)], clean=True)
    trust = open_directory(tmp_path, 0, 1, PlainFiles()).trusted_points(0)
    assert (
        trust.recovery_point("t", 0, B),
        trust.log_start_offset("t", 0, B),
        trust.had_clean_shutdown("t", 0, B),
    ) == (-1, 0, False)


def test_partition_that_changed_workers_keeps_its_log_start(tmp_path: Path) -> None:
    """Two workers, then three: partition 1 moves from worker 1 to worker 2, and worker 1 writes its
    file before worker 2 reads.
    """
    life(tmp_path, 1, 2, [CheckpointEntry("t", 1, 100, A)], [CheckpointEntry("t", 1, 60, A)], clean=True)
    life(tmp_path, 1, 3, [], [])
    trust = open_directory(tmp_path, 2, 3, PlainFiles()).trusted_points(2)
    assert (trust.recovery_point("t", 1, A), trust.log_start_offset("t", 1, A)) == (100, 60)
    assert not trust.had_clean_shutdown("t", 1, A), "another worker's marker proves nothing for this one"


def test_of_two_checkpoints_the_more_conservative_value_counts(tmp_path: Path) -> None:
    life(tmp_path, 0, 2, [CheckpointEntry("t", 0, 100, A)], [CheckpointEntry("t", 0, 10, A)])
    life(tmp_path, 1, 2, [CheckpointEntry("t", 0, 70, A)], [CheckpointEntry("t", 0, 30, A)], clean=True)
    trust = open_directory(tmp_path, 1, 2, PlainFiles()).trusted_points(1)
    assert (trust.recovery_point("t", 0, A), trust.log_start_offset("t", 0, A)) == (70, 30)
    assert not trust.had_clean_shutdown("t", 0, A), "the other worker may have written since"


def test_the_marker_of_a_former_worker_is_not_trusted_later(tmp_path: Path) -> None:
    """Worker 1 shuts down cleanly; a run with one worker writes its partition and crashes; then
    there are two workers again.
    """
    life(tmp_path, 1, 2, [CheckpointEntry("t", 1, 100, A)], [], clean=True)
    life(tmp_path, 0, 1, [CheckpointEntry("t", 1, 500, A)], [])
    trust = open_directory(tmp_path, 1, 2, PlainFiles()).trusted_points(1)
    assert not trust.had_clean_shutdown("t", 1, A)
    assert trust.recovery_point("t", 1, A) == 100


def test_after_pruning_only_own_entries_remain(tmp_path: Path) -> None:
    files = PlainFiles()
    life(
        tmp_path,
        0,
        1,
        [CheckpointEntry("t", 0, 100, A), CheckpointEntry("t", 1, 200, A), CheckpointEntry("t", 2, 300, A)],
        [CheckpointEntry("t", 1, 5, A)],
    )
    writer = CheckpointWriter(tmp_path, 0, files, open_directory(tmp_path, 0, 2, files))
    writer.write([CheckpointEntry("t", 0, 110, A)], [])
    path = tmp_path / f"{checkpoints.RECOVERY_POINT}.0"
    assert parse_checkpoint(path.read_bytes()) == [
        CheckpointEntry("t", 0, 110, A),
        CheckpointEntry("t", 1, 200, A),
        CheckpointEntry("t", 2, 300, A),
    ]
    writer.drop_carried([("t", 2)])  # partition 2 is ours, but could not be opened
    assert writer.write([CheckpointEntry("t", 0, 110, A)], [])
    assert parse_checkpoint(path.read_bytes()) == [CheckpointEntry("t", 0, 110, A), CheckpointEntry("t", 2, 300, A)]


def test_orphans_are_removed(tmp_path: Path) -> None:
    for worker in range(3):
        life(tmp_path, worker, 3, [CheckpointEntry("t", worker, 1, A)], [CheckpointEntry("t", worker, 1, A)])
    removed = checkpoints.remove_orphans(tmp_path, 2, PlainFiles())
    assert sorted(path.name for path in removed) == [f"{checkpoints.LOG_START}.2", f"{checkpoints.RECOVERY_POINT}.2"]


def test_nothing_is_written_when_nothing_changed(tmp_path: Path) -> None:
    files = PlainFiles()
    writer = CheckpointWriter(tmp_path, 0, files, open_directory(tmp_path, 0, 1, files))
    assert writer.write([CheckpointEntry("t", 0, 1, A)], [])
    before = list(files.changes)
    assert not writer.write([CheckpointEntry("t", 0, 1, A)], [])
    assert files.changes == before


def test_a_failed_write_is_retried(tmp_path: Path) -> None:
    files = PlainFiles()
    writer = CheckpointWriter(tmp_path, 0, files, open_directory(tmp_path, 0, 1, files))
    files.fail_on.add(("replace", f"{checkpoints.RECOVERY_POINT}.0"))
    with pytest.raises(OSError):
        writer.write([CheckpointEntry("t", 0, 1, A)], [CheckpointEntry("t", 0, 1, A)])
    files.fail_on.clear()
    assert writer.write([CheckpointEntry("t", 0, 1, A)], [CheckpointEntry("t", 0, 1, A)])
    assert open_directory(tmp_path, 0, 1, files).trusted_points(0).recovery_point("t", 0, A) == 1


def test_a_damaged_file_is_reported_and_the_others_count(tmp_path: Path) -> None:
    life(tmp_path, 0, 2, [CheckpointEntry("t", 0, 100, A)], [])
    (tmp_path / f"{checkpoints.RECOVERY_POINT}.1").write_bytes(b"1\n3\n")
    found = open_directory(tmp_path, 0, 2, PlainFiles())
    assert len(found.problems) == 1 and "3 entries announced" in found.problems[0]
    assert found.trusted_points(0).recovery_point("t", 0, A) == 100
