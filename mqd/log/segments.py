"""The segment files of one partition from a directory listing, with the newest timestamp of each.

A segment is BASEOFFSET.log (20 digits) with BASEOFFSET.index and BASEOFFSET.timeindex (see
indexes.py). Workers use this constantly, so it avoids numpy and reads only the last entry of an
index.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from struct import Struct

import msgspec

_TIME_ENTRY = Struct(">qi")
_LOG_NAME = re.compile(r"([0-9]{20})\.log")
SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex", ".txnsum")


class Segment(msgspec.Struct, frozen=True):
    """One segment of a listing. `max_timestamp_ms` -1: not known (empty, or no timestamps)."""

    base_offset: int
    size_bytes: int
    max_timestamp_ms: int
    mtime_ms: int

    @property
    def age_timestamp_ms(self) -> int:
        """The timestamp for retention by time: the newest record, otherwise the file's modification
        time (Kafka's LogSegment.largestTimestamp).
        """
        return self.max_timestamp_ms if self.max_timestamp_ms >= 0 else self.mtime_ms


def segment_path(directory: Path, base_offset: int, suffix: str = ".log") -> Path:
    return directory / f"{base_offset:020d}{suffix}"


def base_offsets(directory: Path) -> list[int]:
    """Ascending. Raises OSError."""
    with os.scandir(directory) as entries:
        return sorted(int(match[1]) for entry in entries if (match := _LOG_NAME.fullmatch(entry.name)))


# (log path, base offset, start position) -> (valid end position, max timestamp or -1)
ScanMaxTimestamp = Callable[[Path, int, int], tuple[int, int]]


def _last_indexed_timestamp(path: Path) -> int:
    """The newest timestamp of a sealed segment, from the last entry of its time index; -1 = the log
    must be read. Raises OSError other than ENOENT.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TIME_ENTRY.size or size % _TIME_ENTRY.size:
                return -1
            timestamp, relative_offset = _TIME_ENTRY.unpack(
                os.pread(file.fileno(), _TIME_ENTRY.size, size - _TIME_ENTRY.size)
            )
    except FileNotFoundError:
        return -1
    return timestamp if relative_offset >= 0 else -1


class _CachedTimestamps:
    """The cached values of one directory."""

    def __init__(self) -> None:
        self.sealed: dict[int, int] = {}  # base offset -> newest timestamp
        self.active: tuple[int, int, int] | None = None  # base offset, end of the scanned part, newest timestamp


class TimestampCache:
    """Cache of the newest timestamp per segment: sealed segments never change, and of the active
    one only appended data is read again.

    Only one thread at a time uses a directory. Any other may `forget` it concurrently; a result
    that the first thread is computing at that time is not kept. Memory: one small entry per segment
    file of the owned partitions; `forget` drops them.
    """

    def __init__(self, scan: ScanMaxTimestamp):
        self._scan = scan
        self._by_directory: dict[Path, _CachedTimestamps] = {}

    def _cached(self, directory: Path) -> _CachedTimestamps:
        return self._by_directory.setdefault(directory, _CachedTimestamps())

    def newest_in_sealed(self, directory: Path, base_offset: int) -> int:
        newest_by_base = self._cached(directory).sealed
        newest = newest_by_base.get(base_offset)
        if newest is None:
            newest = newest_by_base[base_offset] = self._read_sealed(directory, base_offset)
        return newest

    def _read_sealed(self, directory: Path, base_offset: int) -> int:
        newest = _last_indexed_timestamp(segment_path(directory, base_offset, ".timeindex"))
        if newest > 0:
            return newest
        return self._scan(segment_path(directory, base_offset), base_offset, 0)[1]

    def newest_in_active(self, directory: Path, base_offset: int) -> int:
        cached = self._cached(directory)
        cached_base, position, newest = cached.active or (base_offset, 0, -1)
        if cached_base != base_offset:
            position, newest = 0, -1
        position, scanned_newest = self._scan(segment_path(directory, base_offset), base_offset, position)
        newest = max(newest, scanned_newest)
        cached.active = (base_offset, position, newest)
        return newest

    def forget(self, directory: Path) -> None:
        """Drops the cached values of a directory's segments. From any thread."""
        self._by_directory.pop(directory, None)

    def forget_below(self, directory: Path, base_offset: int) -> None:
        """Drops only the values of segments below `base_offset`. From the thread that uses the
        directory.
        """
        newest_by_base = self._cached(directory).sealed
        for base in [base for base in newest_by_base if base < base_offset]:
            del newest_by_base[base]


def list_segments(directory: Path, active_base_offset: int, cache: TimestampCache) -> list[Segment]:
    """All segments up to the active one, ascending; the active one is last. Raises OSError; a file
    that vanishes in the meantime is left out.
    """
    segments = []
    for base_offset in base_offsets(directory):
        if base_offset > active_base_offset:
            break  # the log has just been rolled to it
        try:
            stat = os.stat(segment_path(directory, base_offset))
            newest = (cache.newest_in_active if base_offset == active_base_offset else cache.newest_in_sealed)(
                directory, base_offset
            )
        except FileNotFoundError:
            continue
        segments.append(Segment(base_offset, stat.st_size, newest, stat.st_mtime_ns // 1_000_000))
    return segments


def files_below(directory: Path, offset: int) -> list[Path]:
    """Files of whole segments below `offset`: every file named by a lower base offset, ascending,
    with the log of a segment last (so that after a crash in the middle the rest is still recognized
    as a segment).
    """
    matching = []
    with os.scandir(directory) as entries:
        for entry in entries:
            stem, dot, suffix = entry.name.partition(".")
            if len(stem) == 20 and stem.isdigit() and int(stem) < offset and dot + suffix in SEGMENT_SUFFIXES:
                matching.append((int(stem), dot + suffix == ".log", entry.name))
    return [directory / name for _, _, name in sorted(matching)]
