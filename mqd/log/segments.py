"""The segment files of one partition as a directory listing shows them, and the newest timestamp of each.

A segment is BASEOFFSET.log (20 digits) with BASEOFFSET.index and BASEOFFSET.timeindex beside it. Index entries are Kafka's, big-endian:
    .index      relative offset int32, position int32
    .timeindex  largest timestamp so far int64, relative offset int32
Indexes are hints: sparse, rebuilt by recovery, perhaps with zeroes or half an entry at their end while their owner writes. What is read here is cut to the
prefix that makes sense (timestamps and offsets rise), and the log itself is asked where the hint does not suffice.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy

OFFSET_INDEX = numpy.dtype([("offset", ">i4"), ("position", ">i4")])
TIME_INDEX = numpy.dtype([("timestamp", ">i8"), ("offset", ">i4")])
_LOG_NAME = re.compile(r"([0-9]{20})\.log")
FILES_OF_A_SEGMENT = (".log", ".index", ".timeindex", ".txnindex")
_INDEX_BYTES_MAX = 256 << 20


class Segment(msgspec.Struct, frozen=True):
    """One segment of a listing. `max_timestamp_ms` -1: not known (empty, or no timestamps)."""

    base_offset: int
    size_bytes: int
    max_timestamp_ms: int
    mtime_ms: int

    @property
    def age_timestamp_ms(self) -> int:
        """What retention by time goes by: the newest record, else the file's modification (Kafka's LogSegment.largestTimestamp)."""
        return self.max_timestamp_ms if self.max_timestamp_ms >= 0 else self.mtime_ms


def segment_path(directory: Path, base_offset: int, suffix: str = ".log") -> Path:
    return directory / f"{base_offset:020d}{suffix}"


def base_offsets(directory: Path) -> list[int]:
    """Ascending. Raises OSError."""
    with os.scandir(directory) as entries:
        return sorted(int(match[1]) for entry in entries if (match := _LOG_NAME.fullmatch(entry.name)))


def _read_index(path: Path, dtype: numpy.dtype) -> numpy.ndarray:
    try:
        with open(path, "rb") as file:
            data = file.read(_INDEX_BYTES_MAX)
    except FileNotFoundError:
        return numpy.empty(0, dtype)
    return numpy.frombuffer(data, dtype, count=len(data) // dtype.itemsize)


def _sound_prefix(entries: numpy.ndarray, key: str) -> numpy.ndarray:
    """The entries up to the first that does not rise (zeroes of a preallocated end, torn writes)."""
    if not len(entries):
        return entries
    offsets, keys = entries["offset"].astype(numpy.int64), entries[key].astype(numpy.int64)
    if offsets[0] < 0 or keys[0] < 0:
        return entries[:0]
    falls = numpy.flatnonzero((numpy.diff(offsets) <= 0) | (numpy.diff(keys) < 0))
    return entries[: int(falls[0]) + 1] if len(falls) else entries


def read_time_index(directory: Path, base_offset: int) -> numpy.ndarray:
    """dtype TIME_INDEX, the sound prefix; offsets relative to base_offset. A first entry of zeroes counts as none."""
    entries = _sound_prefix(_read_index(segment_path(directory, base_offset, ".timeindex"), TIME_INDEX), "timestamp")
    return entries[:0] if len(entries) == 1 and not entries["timestamp"][0] and not entries["offset"][0] else entries


def read_offset_index(directory: Path, base_offset: int) -> numpy.ndarray:
    """dtype OFFSET_INDEX, the sound prefix."""
    return _sound_prefix(_read_index(segment_path(directory, base_offset, ".index"), OFFSET_INDEX), "position")


ScanMaxTimestamp = Callable[[Path, int, int], tuple[int, int]]  # (log path, base offset, from position) -> (valid end position, max timestamp or -1)


class TimestampCache:
    """Newest timestamp per segment, remembered: sealed segments never change, of the active one only what was appended since is read again.

    Not thread-safe. Bound: one small entry per segment file of the owned partitions; `forget` and `keep_only` drop them."""

    def __init__(self, scan: ScanMaxTimestamp):
        self._scan = scan
        self._sealed: dict[tuple[Path, int], int] = {}
        self._active: dict[Path, tuple[int, int, int]] = {}  # base offset, scanned to, max timestamp

    def sealed(self, directory: Path, base_offset: int) -> int:
        key = (directory, base_offset)
        if key not in self._sealed:
            self._sealed[key] = self._of_sealed(directory, base_offset)
        return self._sealed[key]

    def _of_sealed(self, directory: Path, base_offset: int) -> int:
        raw = _read_index(segment_path(directory, base_offset, ".timeindex"), TIME_INDEX)
        entries = _sound_prefix(raw, "timestamp")
        if len(entries) and entries["timestamp"][-1] > 0 and not raw[len(entries) :]["timestamp"].any():  # nothing but zeroes after the prefix
            return int(entries["timestamp"][-1])
        return self._scan(segment_path(directory, base_offset), base_offset, 0)[1]

    def active(self, directory: Path, base_offset: int) -> int:
        known_base, position, newest = self._active.get(directory, (base_offset, 0, -1))
        if known_base != base_offset:
            position, newest = 0, -1
        position, found = self._scan(segment_path(directory, base_offset), base_offset, position)
        newest = max(newest, found)
        self._active[directory] = (base_offset, position, newest)
        return newest

    def forget(self, directory: Path, below: int | None = None) -> None:
        """Drops what is known of a directory's segments (all, or those with a base offset below `below`)."""
        for key in [key for key in self._sealed if key[0] == directory and (below is None or key[1] < below)]:
            del self._sealed[key]
        if below is None:
            self._active.pop(directory, None)


def list_segments(directory: Path, active_base_offset: int, cache: TimestampCache) -> list[Segment]:
    """All segments up to the active one, ascending; the active one is last. Raises OSError; a file that vanishes meanwhile is left out."""
    found = []
    for base_offset in base_offsets(directory):
        if base_offset > active_base_offset:
            break  # being rolled to just now
        try:
            stat = os.stat(segment_path(directory, base_offset))
            newest = (cache.active if base_offset == active_base_offset else cache.sealed)(directory, base_offset)
        except FileNotFoundError:
            continue
        found.append(Segment(base_offset, stat.st_size, newest, stat.st_mtime_ns // 1_000_000))
    return found


def files_below(directory: Path, offset: int) -> list[Path]:
    """Files of whole segments below `offset`: every file named by a base offset lower than it, ascending, the log of a segment last (what is left after a
    crash in the middle is then still seen as a segment)."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            stem, dot, suffix = entry.name.partition(".")
            if len(stem) == 20 and stem.isdigit() and int(stem) < offset and dot + suffix in FILES_OF_A_SEGMENT:
                found.append((int(stem), dot + suffix == ".log", entry.name))
    return [directory / name for _, _, name in sorted(found)]
