"""Lookups in a partition's files, usable by any process: an offset by time, the newest timestamp,
a time by offset, the end of a leader epoch.

The reader is not the owner: it opens the files read-only, never reads at or beyond the given high
watermark (below it bytes never change), and lists the files again if some vanish (retention).
Indexes are only hints (see indexes.py). Blocking; call it off an event loop. Corrupt bytes below
the high watermark raise CorruptBatch naming the segment.

Semantics are Kafka's: ListOffsets by time gives the earliest offset of a record with at least the
wanted timestamp; KIP-734 for the newest timestamp; OffsetForLeaderEpoch as in
LeaderEpochFileCache.endOffsetFor.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mqd.log import indexes, segments
from mqd.log.batches import BatchInfo, CorruptBatch, read_batch, walk
from mqd.log.records import Record, record_times, records

EPOCH_CHECKPOINT = "leader-epoch-checkpoint"
_ATTEMPTS = 5
_T = TypeVar("_T")
_UNBOUNDED = 1 << 62


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp_ms: int


class EpochEnd(NamedTuple):
    leader_epoch: int
    end_offset: int


UNKNOWN = OffsetAndTimestamp(-1, -1)
UNKNOWN_EPOCH = EpochEnd(-1, -1)


class _SegmentVanished(Exception):
    """A segment was deleted between the listing and the reading."""


def offset_for_timestamp(
    directory: str | os.PathLike[str], timestamp_ms: int, log_start_offset: int, high_watermark: int
) -> OffsetAndTimestamp:
    """The earliest record at or after `timestamp_ms` in [log_start_offset, high_watermark), with
    its own timestamp; UNKNOWN if there is none.

    Raises OSError, CorruptBatch.
    """
    return _retry(_offset_for_timestamp, Path(directory), timestamp_ms, log_start_offset, high_watermark)


def max_timestamp(directory: str | os.PathLike[str], log_start_offset: int, high_watermark: int) -> OffsetAndTimestamp:
    """The first record with the newest timestamp in [log_start_offset, high_watermark); UNKNOWN if
    there is no record. Raises OSError, CorruptBatch.
    """
    return _retry(_max_timestamp, Path(directory), log_start_offset, high_watermark)


def timestamp_at_or_after(
    directory: str | os.PathLike[str], offset: int, log_start_offset: int, high_watermark: int
) -> OffsetAndTimestamp:
    """The first record at or after `offset` in [log_start_offset, high_watermark); UNKNOWN if there
    is none. Raises OSError, CorruptBatch.
    """
    return _retry(_timestamp_at_or_after, Path(directory), offset, log_start_offset, high_watermark)


def records_at(directory: str | os.PathLike[str], offsets: Sequence[int], bytes_max: int) -> tuple[int, list[Record]]:
    """Returns (number of offsets searched, the records found); ends after reading `bytes_max` of
    batches. `offsets` are ascending and below the high watermark; those that the log does not have
    are left out. Raises OSError, CorruptBatch.
    """
    return _retry(_records_at, Path(directory), offsets, bytes_max)


def _retry(query: Callable[..., _T], directory: Path, *arguments: Any) -> _T:
    for attempt in range(_ATTEMPTS):
        try:
            return query(directory, *arguments)
        except _SegmentVanished as vanished:
            if attempt == _ATTEMPTS - 1:
                raise OSError(f"{directory}: segments vanish faster than they can be read") from vanished
    raise AssertionError


def _overlapping_bases(directory: Path, log_start_offset: int, high_watermark: int) -> list[int]:
    """Base offsets of the segments that overlap [log_start_offset, high_watermark)."""
    bases = segments.base_offsets(directory)
    following = [*bases[1:], _UNBOUNDED]
    return [
        base for base, end in zip(bases, following, strict=True) if end > log_start_offset and base < high_watermark
    ]


def _newest_timestamp_hint(directory: Path, base: int) -> int:
    """Upper bound of a sealed segment's timestamps, as a hint: its last time index entry; -1 =
    there is none, and the log must be read.
    """
    entries = indexes.read_time_index(directory, base)
    return int(entries["timestamp"][-1]) if len(entries) else -1


def _offset_for_timestamp(
    directory: Path, timestamp_ms: int, log_start_offset: int, high_watermark: int
) -> OffsetAndTimestamp:
    bases = _overlapping_bases(directory, log_start_offset, high_watermark)
    for number, base in enumerate(bases):
        is_sealed = number + 1 < len(bases)
        if is_sealed and 0 <= _newest_timestamp_hint(directory, base) < timestamp_ms:
            continue
        result = _search_segment(directory, base, timestamp_ms, log_start_offset, high_watermark)
        if result is not None:
            return result
    return UNKNOWN


def _search_segment(
    directory: Path, base: int, timestamp_ms: int, log_start_offset: int, high_watermark: int
) -> OffsetAndTimestamp | None:
    """Searches one segment. All records up to an index entry with an older timestamp are older, so
    the walk starts there.
    """
    entries = indexes.read_time_index(directory, base)
    older_count = int(entries["timestamp"].searchsorted(timestamp_ms, side="left"))
    from_offset = max(base + int(entries["offset"][older_count - 1]) if older_count else base, log_start_offset)
    with _Reader(directory, base) as reader:
        for batch in reader.batches(from_offset, high_watermark):
            if batch.max_timestamp_ms < timestamp_ms or batch.last_offset < log_start_offset:
                continue
            for offset, timestamp in reader.record_times(batch):
                if timestamp >= timestamp_ms and log_start_offset <= offset < high_watermark:
                    return OffsetAndTimestamp(offset, timestamp)
    return None


def _max_timestamp(directory: Path, log_start_offset: int, high_watermark: int) -> OffsetAndTimestamp:
    best: OffsetAndTimestamp = UNKNOWN
    bases = _overlapping_bases(directory, log_start_offset, high_watermark)
    for number, base in enumerate(bases):
        is_sealed = number + 1 < len(bases)
        if is_sealed and 0 <= _newest_timestamp_hint(directory, base) <= best.timestamp_ms:
            continue
        best = _newest_in_segment(directory, base, log_start_offset, high_watermark, best)
    return best


def _timestamp_at_or_after(
    directory: Path, offset: int, log_start_offset: int, high_watermark: int
) -> OffsetAndTimestamp:
    first = max(offset, log_start_offset)
    for base in _overlapping_bases(directory, first, high_watermark):
        with _Reader(directory, base) as reader:
            for batch in reader.batches(first, high_watermark):
                for record_offset, timestamp in reader.record_times(batch):
                    if first <= record_offset < high_watermark:
                        return OffsetAndTimestamp(record_offset, timestamp)
    return UNKNOWN


def _records_at(directory: Path, offsets: Sequence[int], bytes_max: int) -> tuple[int, list[Record]]:
    results: list[Record] = []
    bytes_left, searched_count, end = bytes_max, 0, offsets[-1] + 1
    for base in _overlapping_bases(directory, offsets[0], end):
        with _Reader(directory, base) as reader:
            for batch in reader.batches(offsets[searched_count], end):
                if bytes_left <= 0:
                    return searched_count, results
                requested = {offset for offset in offsets[searched_count:] if offset <= batch.last_offset}
                searched_count += len(requested)
                if any(offset >= batch.base_offset for offset in requested):
                    bytes_left -= batch.size_bytes
                    results += [record for record in reader.records(batch) if record.offset in requested]
                if searched_count == len(offsets):
                    return searched_count, results
    return len(offsets), results


def _newest_in_segment(
    directory: Path, base: int, log_start_offset: int, high_watermark: int, best: OffsetAndTimestamp
) -> OffsetAndTimestamp:
    """The first record with the newest timestamp, or `best` if none is newer. Of the index
    entries, let E be the first with the newest timestamp: the walk starts at the entry before E,
    because all records before that entry are older.
    """
    entries = indexes.read_time_index(directory, base)
    from_offset = max(base, log_start_offset)
    if len(entries):
        first = int(entries["timestamp"].searchsorted(entries["timestamp"][-1], side="left"))
        if first and base + int(entries["offset"][first]) < high_watermark:
            from_offset = max(base + int(entries["offset"][first - 1]), from_offset)
    with _Reader(directory, base) as reader:
        candidate: BatchInfo | None = None
        for batch in reader.batches(from_offset, high_watermark):
            if batch.base_offset < log_start_offset or batch.next_offset > high_watermark:
                # its newest record may be outside the range
                best = reader.newest_record(batch, log_start_offset, high_watermark, best)
            elif batch.max_timestamp_ms > max(best.timestamp_ms, candidate.max_timestamp_ms if candidate else -1):
                candidate = batch
        if candidate is None:
            return best
        newest = reader.newest_record(candidate, log_start_offset, high_watermark, UNKNOWN)
        return max(newest, best, key=lambda result: (result.timestamp_ms, -result.offset))


class _Reader:
    """One segment, open for reading."""

    def __init__(self, directory: Path, base: int):
        self._directory, self._base = directory, base
        self._path = segments.segment_path(directory, base)

    def __enter__(self) -> "_Reader":
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _SegmentVanished from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _position(self, offset: int) -> int:
        entries = indexes.read_offset_index(self._directory, self._base)
        self._require_same_log()
        entry_count = int(entries["offset"].searchsorted(offset - self._base, side="right"))
        return int(entries["position"][entry_count - 1]) if entry_count else 0

    def _require_same_log(self) -> None:
        """Compaction replaces the log, then the index: an index of another log file does not apply
        to this one.
        """
        try:
            if os.stat(self._path).st_ino != os.fstat(self._fd).st_ino:
                raise _SegmentVanished
        except FileNotFoundError as error:
            raise _SegmentVanished from error

    def batches(self, from_offset: int, high_watermark: int) -> Iterator[BatchInfo]:
        """The batches from the one that contains `from_offset` (or an earlier one) to the high watermark."""
        position = self._position(from_offset)
        try:
            for batch in walk(self._fd, position, os.fstat(self._fd).st_size):
                if batch.base_offset >= high_watermark:
                    return
                if batch.last_offset >= from_offset:
                    yield batch
                if batch.next_offset >= high_watermark:
                    return  # the next batch may be half written
        except CorruptBatch as error:
            raise CorruptBatch(f"{self._path}: {error}") from error

    def records(self, batch: BatchInfo) -> Iterator[Record]:
        try:
            yield from records(batch, read_batch(self._fd, batch))
        except CorruptBatch as error:
            raise CorruptBatch(f"{self._path}: {error}") from error

    def newest_record(
        self, batch: BatchInfo, log_start_offset: int, high_watermark: int, best: OffsetAndTimestamp
    ) -> OffsetAndTimestamp:
        for offset, timestamp in self.record_times(batch):
            if timestamp > best.timestamp_ms and log_start_offset <= offset < high_watermark:
                best = OffsetAndTimestamp(offset, timestamp)
        return best

    def record_times(self, batch: BatchInfo) -> Iterator[tuple[int, int]]:
        try:
            yield from record_times(batch, read_batch(self._fd, batch))
        except CorruptBatch as error:
            raise CorruptBatch(f"{self._path}: batch at offset {batch.base_offset}: {error}") from error


# -- leader epochs ---------------------------------------------------------------------------------


def read_leader_epochs(directory: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """(leader epoch, its first offset), ascending, from leader-epoch-checkpoint (Kafka's text
    format); [] if there is none. Raises OSError, ValueError.
    """
    path = Path(directory) / EPOCH_CHECKPOINT
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    try:
        version, count = int(lines[0]), int(lines[1])
        rows = [line.split(" ") for line in lines[2:] if line]
        if version != 0 or len(rows) != count:
            raise ValueError(f"version {version}, {count} entries announced, {len(rows)} found")
        epochs = [(int(epoch), int(start)) for epoch, start in rows]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: not a leader epoch checkpoint: {error}") from error
    return sorted(epochs)


def epoch_end_offset(epochs: list[tuple[int, int]], leader_epoch: int, log_end_offset: int) -> EpochEnd:
    """The largest epoch not above `leader_epoch` (if there is none, `leader_epoch` itself), and its
    end offset. UNKNOWN_EPOCH: `leader_epoch` is negative or above all epochs of the log.
    """
    if leader_epoch < 0 or not epochs or leader_epoch > epochs[-1][0]:
        return UNKNOWN_EPOCH
    if leader_epoch == epochs[-1][0]:
        return EpochEnd(leader_epoch, log_end_offset)
    higher_start = next(start for epoch, start in epochs if epoch > leader_epoch)
    floor = max((epoch for epoch, _ in epochs if epoch <= leader_epoch), default=leader_epoch)
    return EpochEnd(floor, higher_start)


def leader_epoch_end_offset(
    directory: str | os.PathLike[str], leader_epoch: int, log_end_offset: int, current_leader_epoch: int = -1
) -> EpochEnd:
    """Like epoch_end_offset, from the partition's files. `current_leader_epoch`: a current epoch
    that has no record, and thus no entry, yet.
    """
    epochs = read_leader_epochs(directory)
    if current_leader_epoch >= 0 and (not epochs or epochs[-1][0] < current_leader_epoch):
        epochs.append((current_leader_epoch, log_end_offset))
    return epoch_end_offset(epochs, leader_epoch, log_end_offset)
