"""Printing and verifying stored segments."""

from pathlib import Path

import pytest

pytest.importorskip("mqd._native")

from mqd.log.batches import CorruptBatch
from mqd.log.dump import dump_records, dump_segment, verify_directory, verify_segment
from tests.unit.log.log_files import encode_batch, write_segment


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    write_segment(tmp_path, 0, [encode_batch(0, [10, 11]), encode_batch(2, [12], codec=4), encode_batch(3, [13, 14])])
    write_segment(tmp_path, 5, [encode_batch(5, [15]), encode_batch(6, [16])], seal=False)
    return tmp_path


def first(partition: Path) -> Path:
    return partition / "00000000000000000000.log"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_dump_shows_every_batch_and_its_records(partition: Path) -> None:
    batches = list(dump_segment(first(partition)))
    assert [(b.base_offset, b.last_offset, b.compression_name, b.crc_valid) for b in batches] == [
        (0, 1, "none", True),
        (2, 2, "zstd", True),
        (3, 4, "none", True),
    ]
    assert [(r.offset, r.timestamp_ms, r.key) for b in batches for r in dump_records(first(partition), b)] == [
        (0, 10, b"k0"),
        (1, 11, b"k1"),
        (2, 12, b"k0"),
        (3, 13, b"k0"),
        (4, 14, b"k1"),
    ]


def test_an_intact_directory_has_no_problems(partition: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = verify_directory(partition, lambda done, total: progress.append((done, total)), deep=True)
    assert report.sound and not report.damaged
    assert [(s.batch_count, s.record_count, s.next_offset, s.max_timestamp_ms) for s in report.segments] == [
        (3, 5, 5, 14),
        (2, 2, 7, 16),
    ]
    total = sum(path.stat().st_size for path in partition.glob("*.log"))
    assert progress[-1] == (total, total) and progress == sorted(progress)


def test_every_flipped_byte_is_found(partition: Path) -> None:
    """Except in base offset and leader epoch, which the checksum does not cover: a higher value
    looks valid.
    """
    size = first(partition).stat().st_size
    starts = [batch.position for batch in dump_segment(first(partition))]
    uncovered = {start + at for start in starts for at in (*range(8), *range(12, 16))}
    for at in sorted(set(range(size)) - uncovered):
        flip(first(partition), at)
        report = verify_segment(first(partition))
        assert report.problem is not None, f"byte {at}"
        flip(first(partition), at)
    assert verify_segment(first(partition)).problem is None


def test_damage_is_located(partition: Path) -> None:
    second = list(dump_segment(first(partition)))[1]
    flip(first(partition), second.position + 70)
    report = verify_directory(partition)
    damaged = report.segments[0]
    assert report.damaged and (damaged.valid_bytes, damaged.problem_offset, damaged.next_offset) == (
        second.position,
        2,
        2,
    )
    assert damaged.problem is not None and "offsets 2 to 2" in damaged.problem
    assert [batch.crc_valid for batch in dump_segment(first(partition))] == [True, False, True]


@pytest.mark.parametrize("cut", [1, 30, 70])
def test_a_truncated_last_segment_is_not_damage(partition: Path, cut: int) -> None:
    last = partition / "00000000000000000005.log"
    last.write_bytes(last.read_bytes()[:-cut])
    report = verify_directory(partition)
    assert not report.damaged and not report.sound and report.segments[1].incomplete


def test_a_truncated_older_segment_is_damage(partition: Path) -> None:
    first(partition).write_bytes(first(partition).read_bytes()[:-1])
    assert verify_directory(partition).damaged


def test_invalid_records_are_only_found_when_parsed(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [encode_batch(0, [10, 11], payload=b"\x02garbage")])
    assert verify_directory(tmp_path).sound, "the checksum is right"
    assert verify_directory(tmp_path, deep=True).damaged


def test_segments_that_overlap_are_found(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [encode_batch(0, [10, 11, 12])])
    write_segment(tmp_path, 2, [encode_batch(2, [13])])
    problem = verify_directory(tmp_path).segments[1].problem
    assert problem is not None and "the segment before it reaches 3" in problem


def test_wrong_indexes_are_not_a_loss_of_data(partition: Path) -> None:
    (partition / "00000000000000000000.index").write_bytes(b"\0\0\0\3\0\0\0\7")
    (partition / "00000000000000000000.timeindex").write_bytes(b"\0\0\0\0\0\0\xff\xff\0\0\0\1")
    report = verify_directory(partition)
    assert not report.damaged and not report.sound
    assert [problem.split(":")[0] for problem in report.segments[0].index_problems] == ["offset index", "time index"]


def test_a_segment_that_grows_meanwhile_has_no_wrong_index(tmp_path: Path) -> None:
    batches = [encode_batch(offset, [offset]) for offset in range(6)]
    segment = write_segment(tmp_path, 0, batches[:3], seal=False)

    def append(done: int, total: int) -> None:
        write_segment(tmp_path, 0, batches)

    report = verify_segment(segment, progress=append)
    assert (report.next_offset, report.problem, report.index_problems) == (3, None, [])


def test_files_that_are_not_segments(tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000.log").write_bytes(
        b"hello world, this is certainly not a record batch of any version at all"
    )
    with pytest.raises(CorruptBatch):
        list(dump_segment(tmp_path / "00000000000000000000.log"))
    with pytest.raises(ValueError, match="not a segment"):
        verify_segment(tmp_path / "notes.txt")
