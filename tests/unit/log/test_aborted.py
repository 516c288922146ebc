"""`mqd log verify` compares each .txnindex with the log, and with its checksums in .txnsum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from struct import pack

import pytest

pytest.importorskip("mqd._native")

from mqd.log.dump import verify_directory
from mqd.protocol.records import Record, encode_batch
from tests.unit.log.log_files import crc32c, write_segment

BASE_OFFSET = 10
ABORT = Record(value=b"\0" * 6, key=b"\0\0\0\0", timestamp_ms=0)


def written(producer_id: int, offset: int, record: Record, is_control: bool = False) -> bytes:
    return encode_batch(
        [record],
        base_offset=offset,
        is_transactional=True,
        is_control=is_control,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=-1 if is_control else 0,
    )


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Two aborted transactions: offsets 10 and 12 by producer 7, 11 and 13 by producer 8."""
    data = Record(value=b"aborted", timestamp_ms=0)
    batches = [written(7, 10, data), written(8, 11, data), written(7, 12, ABORT, True), written(8, 13, ABORT, True)]
    write_segment(tmp_path, BASE_OFFSET, batches)
    entries, sums, seed = b"", b"", b""
    for producer_id, first, last, stable in ((7, 10, 12, 11), (8, 11, 13, 14)):
        entries += pack(">hqqqq", 0, producer_id, first, last, stable)
        # a chain of CRCs is the CRC of everything so far
        seed += pack(">q", BASE_OFFSET) + entries[-34:]
        sums += pack(">I", crc32c(seed))
    index(tmp_path).write_bytes(entries)
    checksums(tmp_path).write_bytes(sums)
    return tmp_path


def index(partition: Path) -> Path:
    return partition / f"{BASE_OFFSET:020d}.txnindex"


def checksums(partition: Path) -> Path:
    return partition / f"{BASE_OFFSET:020d}.txnsum"


def problems(partition: Path) -> list[str]:
    report = verify_directory(partition)
    found = report.segments[0].aborted_problems
    assert report.damaged == bool(found) and report.sound == (not found)
    return found


def test_a_consistent_index_is_valid(partition: Path) -> None:
    assert problems(partition) == []


@pytest.mark.parametrize("file", [index, checksums])
def test_every_flipped_byte_of_an_index_and_its_checksums_is_found(
    partition: Path, file: Callable[[Path], Path]
) -> None:
    sound = file(partition).read_bytes()
    for at in range(len(sound)):
        file(partition).write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
        assert problems(partition), f"byte {at}"


def test_an_entry_that_only_its_checksum_contradicts(partition: Path) -> None:
    """Its last stable offset decides which later segments are read, and is not in the log."""
    entries = index(partition).read_bytes()
    index(partition).write_bytes(entries[:-8] + pack(">q", 12))
    assert problems(partition) == ["transaction index: the checksum of the abort at offset 13 is wrong"]


@pytest.mark.parametrize(
    "kept, problem",
    [
        (None, "the checksum of the abort at offset 12 is missing in .txnsum"),
        (0, "the checksum of the abort at offset 12 is missing in .txnsum"),
        (4, "the checksum of the abort at offset 13 is missing in .txnsum"),
    ],
)
def test_lost_checksums_are_found(partition: Path, kept: int | None, problem: str) -> None:
    if kept is None:
        checksums(partition).unlink()
    else:
        checksums(partition).write_bytes(checksums(partition).read_bytes()[:kept])
    assert problems(partition) == [f"transaction index: {problem}"]


def test_a_lost_index_is_found(partition: Path) -> None:
    index(partition).unlink()
    (problem,) = problems(partition)
    assert "the transaction of producer 7 from offset 10, aborted at 12, is not in it" in problem


def test_checksums_of_entries_that_are_lost_are_found(partition: Path) -> None:
    checksums(partition).write_bytes(checksums(partition).read_bytes() + b"\0\0\0\1")
    assert problems(partition) == ["transaction index: .txnsum has 1 checksums without an entry"]


def test_an_entry_being_written_by_a_running_broker_is_not_a_problem(partition: Path) -> None:
    """Its marker and its checksum come after it."""
    being_written = pack(">hqqqq", 0, 9, 14, 15, 16)
    with index(partition).open("ab") as file:
        file.write(being_written)
    assert problems(partition) == []


def test_damage_of_one_segment_is_not_blamed_on_the_index_of_the_next(partition: Path) -> None:
    """The last batch of the segment with the abort is damaged; the segment after it is sound."""
    damaged = partition / f"{BASE_OFFSET:020d}.log"
    data = bytearray(damaged.read_bytes())
    next_offset = verify_directory(partition).segments[-1].next_offset
    data[-1] ^= 1
    damaged.write_bytes(data)
    plain = bytearray(written(-1, next_offset, Record(value=b"v")))
    (partition / f"{next_offset:020d}.log").write_bytes(plain)
    first, second = verify_directory(partition).segments
    assert first.problem is not None and second.problem is None and not second.aborted_problems
