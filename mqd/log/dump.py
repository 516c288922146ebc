"""Inspects and verifies stored segments, for `mqd log dump` and `mqd log verify`. Read-only, and
safe next to a running broker: concurrent writes may look cut off at the very end of an active
segment, which is reported as `incomplete`, not as damage.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mqd.log import indexes, segments
from mqd.log.aborted import AbortedTransactions
from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch, parse_header, read_batch, walk
from mqd.log.records import Record, record_times, records

if TYPE_CHECKING:
    import numpy

_CRC_START = 21  # the checksum covers everything from the attributes on
_MAGIC, _MAGIC_POSITION = b"\x02", 16
Progress = Callable[[int, int], None]  # bytes done, total bytes


class SegmentReport(msgspec.Struct):
    path: str
    base_offset: int
    size_bytes: int
    valid_bytes: int
    batch_count: int
    record_count: int
    first_offset: int  # -1: no batch
    next_offset: int  # after the last valid batch; base_offset if none
    max_timestamp_ms: int
    # why the byte at valid_bytes is invalid; None: sound to the end
    problem: str | None = None
    problem_offset: int = -1  # base offset of the bad batch, -1 = not readable
    # the problem is a truncated last batch, as left by a crash or a running writer
    incomplete: bool = False
    index_problems: list[str] = []  # indexes can be rebuilt, so no data is lost
    # in its index of aborted transactions; only when a whole partition is verified
    aborted_problems: list[str] = []


class DirectoryReport(msgspec.Struct):
    path: str
    segments: list[SegmentReport]

    @property
    def sound(self) -> bool:
        return all(
            segment.problem is None and not segment.index_problems and not segment.aborted_problems
            for segment in self.segments
        )

    @property
    def damaged(self) -> bool:
        """Stored records are unreadable (an incomplete last batch of the last segment is not
        damage), or the aborted transactions cannot be reported to read_committed consumers.
        """
        return any(
            segment.aborted_problems
            or (segment.problem is not None and not (segment.incomplete and segment is self.segments[-1]))
            for segment in self.segments
        )


def _base_offset_of(path: Path) -> int:
    if path.suffix != ".log" or len(path.stem) != 20 or not path.stem.isdigit():
        raise ValueError(f"{path}: not a segment; the name of a segment is 20 digits and .log")
    return int(path.stem)


def dump_segment(path: str | os.PathLike[str], check_crc: bool = True) -> Iterator[BatchInfo]:
    """Every batch of a segment file in order, with its `crc_valid`. Raises OSError; CorruptBatch
    for an invalid batch.
    """
    with open(path, "rb") as file:
        for batch in walk(file.fileno(), 0, os.fstat(file.fileno()).st_size):
            yield (
                msgspec.structs.replace(batch, crc_valid=_is_crc_valid(batch, read_batch(file.fileno(), batch)))
                if check_crc
                else batch
            )


def dump_records(path: str | os.PathLike[str], batch: BatchInfo) -> list[Record]:
    """The records of a batch from dump_segment. Raises OSError, CorruptBatch."""
    with open(path, "rb") as file:
        return list(records(batch, read_batch(file.fileno(), batch)))


def _is_crc_valid(batch: BatchInfo, data: bytes) -> bool:
    from mqd import native  # hardware CRC-32C

    return native.crc32c(memoryview(data)[_CRC_START:]) == batch.crc


def verify_segment(
    path: str | os.PathLike[str],
    deep: bool = False,
    progress: Progress | None = None,
    done_bytes: int = 0,
    total_bytes: int = 0,
    aborted: AbortedTransactions | None = None,
) -> SegmentReport:
    """Verifies every header and checksum, that offsets rise, and the segment's indexes; `deep` also
    decodes (decompresses) every record. `done_bytes`, `total_bytes`: of the whole directory,
    for `progress`. Raises OSError.
    """
    path = Path(path)
    base = _base_offset_of(path)
    # Read before the segment: a running broker may append to both in the meantime.
    entries = indexes.read_offset_index(path.parent, base)
    times = indexes.read_time_index(path.parent, base)
    size = path.stat().st_size
    report = SegmentReport(str(path), base, size, 0, 0, 0, -1, base, -1)
    base_offsets: dict[int, int] = {}  # by position, for the offset index
    try:
        for batch in dump_segment(path):
            _verify_batch(path, batch, report, deep)
            if aborted is not None and batch.is_transactional:
                with open(path, "rb") as file:
                    aborted.take(batch, read_batch(file.fileno(), batch) if batch.is_control else b"")
            base_offsets[batch.position] = batch.base_offset
            report.valid_bytes = batch.position + batch.size_bytes
            report.batch_count += 1
            report.record_count += batch.record_count
            report.first_offset = batch.base_offset if report.first_offset < 0 else report.first_offset
            report.next_offset = batch.next_offset
            report.max_timestamp_ms = max(report.max_timestamp_ms, batch.max_timestamp_ms)
            if progress is not None:
                progress(done_bytes + report.valid_bytes, total_bytes or size)
    except CorruptBatch as error:
        report.problem = str(error)
    if report.problem is None and report.valid_bytes < size:
        _report_tail(path, size, report)
    report.index_problems = _verify_indexes(entries, times, report, base_offsets)
    return report


def _verify_batch(path: Path, batch: BatchInfo, report: SegmentReport, deep: bool) -> None:
    if batch.base_offset < report.next_offset:
        report.problem_offset = batch.base_offset
        raise CorruptBatch(
            f"batch at position {batch.position} begins at offset {batch.base_offset}, below {report.next_offset}"
        )
    if not batch.crc_valid:
        report.problem_offset = batch.base_offset
        raise CorruptBatch(
            f"checksum of the batch at position {batch.position} (offsets {batch.base_offset} to {batch.last_offset})"
            " is wrong"
        )
    if deep:
        try:
            with open(path, "rb") as file:
                offsets = [offset for offset, _ in record_times(batch, read_batch(file.fileno(), batch))]
        except CorruptBatch as error:
            report.problem_offset = batch.base_offset
            raise CorruptBatch(f"batch at position {batch.position}: {error}") from error
        if offsets and (offsets[0] < batch.base_offset or offsets[-1] > batch.last_offset):
            report.problem_offset = batch.base_offset
            raise CorruptBatch(f"records of the batch at position {batch.position} have offsets outside of it")


def _report_tail(path: Path, size: int, report: SegmentReport) -> None:
    """Reports the bytes after the last complete batch: a truncated batch, or zeroes."""
    tail_bytes = size - report.valid_bytes
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), HEADER_BYTES, report.valid_bytes)
    report.incomplete = True
    report.problem = f"{tail_bytes} bytes at position {report.valid_bytes} are not a complete batch"
    if len(data) == HEADER_BYTES:
        try:
            report.problem_offset = parse_header(data, 0, report.valid_bytes).base_offset
        except CorruptBatch as error:
            report.problem, report.incomplete = str(error), False
    if report.incomplete and (later_batch := _later_complete_batch(path, size, report)) is not None:
        # a crash or a running writer leaves nothing after an unfinished batch
        report.incomplete = False
        report.problem = (
            f"the batch at position {report.valid_bytes} has a wrong length: a complete one begins at position"
            f" {later_batch.position}, offset {later_batch.base_offset}"
        )


def _later_complete_batch(path: Path, size: int, report: SegmentReport) -> BatchInfo | None:
    """The first batch with a valid checksum in what seems to be the rest of a truncated one."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        at = report.valid_bytes
        while (magic_position := data.find(_MAGIC, at + 1 + _MAGIC_POSITION)) >= 0:
            at = magic_position - _MAGIC_POSITION
            if at + HEADER_BYTES > size:
                return None
            try:
                batch = parse_header(data[at : at + HEADER_BYTES], 0, at)
            except CorruptBatch:
                continue
            if (
                batch.base_offset >= report.next_offset
                and at + batch.size_bytes <= size
                and _is_crc_valid(batch, data[at : at + batch.size_bytes])
            ):
                return batch
    return None


def _verify_indexes(
    entries: numpy.ndarray, times: numpy.ndarray, report: SegmentReport, base_offsets: dict[int, int]
) -> list[str]:
    problems = []
    for offset, position in entries.tolist():
        start = base_offsets.get(position)
        if position < report.valid_bytes and (start is None or start > report.base_offset + offset):
            problems.append(
                f"offset index: the entry for offset {report.base_offset + offset} points to position {position},"
                " where no such batch begins"
            )
            break
    if (
        len(entries)
        and int(entries["offset"][-1]) + report.base_offset >= report.next_offset
        and report.problem is None
    ):
        problems.append(
            f"offset index: has offset {int(entries['offset'][-1]) + report.base_offset}, which the segment does not"
            " hold"
        )
    if len(times) and report.problem is None and int(times["timestamp"][-1]) > report.max_timestamp_ms:
        problems.append(f"time index: has timestamp {int(times['timestamp'][-1])}, newer than any record")
    return problems


def verify_directory(
    path: str | os.PathLike[str], progress: Progress | None = None, deep: bool = False
) -> DirectoryReport:
    """Verifies every segment of a partition's directory, and that the segments are contiguous.
    Raises OSError.
    """
    directory = Path(path)
    bases = segments.base_offsets(directory)
    paths = [segments.segment_path(directory, base) for base in bases]
    sizes = [segment.stat().st_size for segment in paths]
    report = DirectoryReport(str(directory), [])
    aborted = AbortedTransactions()
    may_have_gaps = (directory / "compacted").exists()
    for number, segment in enumerate(paths):
        checked = verify_segment(segment, deep, progress, sum(sizes[:number]), sum(sizes), aborted)
        if checked.problem is None or checked.incomplete:
            checked.aborted_problems = aborted.compare(directory, checked.base_offset, checked.next_offset)
        else:
            aborted = AbortedTransactions()  # transactions that end in the unread part of this segment are unknown
        previous = report.segments[-1] if report.segments else None
        if previous is not None and previous.next_offset > checked.base_offset and checked.problem is None:
            checked.problem = (
                f"begins at offset {checked.base_offset}, but the segment before it reaches {previous.next_offset}"
            )
        elif (
            previous is not None
            and previous.next_offset < checked.base_offset
            and not may_have_gaps
            and previous.problem is None
            and checked.problem is None
        ):
            checked.problem = (
                f"offsets {previous.next_offset} to {checked.base_offset - 1} are missing before it: was a segment"
                " deleted?"
            )
        report.segments.append(checked)
    return report
