"""The sparse indexes of a segment, as numpy arrays. Entries are Kafka's, big-endian:

    .index      relative offset int32 (first of a batch), position int32
    .timeindex  largest timestamp so far int64, relative offset int32 (last of its batch)

Indexes are hints: sparse, written after the data that they point to, rebuilt by recovery, and
perhaps with half an entry at the end while their owner writes. Entries are truncated to the valid
prefix (offsets and keys rise); where the hint is insufficient, the log itself is read. numpy is
imported in the functions that need it, so that a broker starts without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mqd.log.segments import segment_path

if TYPE_CHECKING:
    import numpy

OFFSET_INDEX = [("offset", ">i4"), ("position", ">i4")]
TIME_INDEX = [("timestamp", ">i8"), ("offset", ">i4")]
_INDEX_BYTES_MAX = 256 << 20


def _read_index(path: Path, fields: list[tuple[str, str]]) -> numpy.ndarray:
    import numpy

    dtype = numpy.dtype(fields)
    try:
        with open(path, "rb") as file:
            data = file.read(_INDEX_BYTES_MAX)
    except FileNotFoundError:
        return numpy.empty(0, dtype)
    return numpy.frombuffer(data, dtype, count=len(data) // dtype.itemsize)


def _valid_prefix(entries: numpy.ndarray, key: str) -> numpy.ndarray:
    """The entries before the first one whose offset does not rise or whose `key` falls (zeroes of
    a preallocated end, torn writes).
    """
    import numpy

    if not len(entries):
        return entries
    offsets, keys = entries["offset"].astype(numpy.int64), entries[key].astype(numpy.int64)
    if offsets[0] < 0 or keys[0] < 0:
        return entries[:0]
    falls = numpy.flatnonzero((numpy.diff(offsets) <= 0) | (numpy.diff(keys) < 0))
    return entries[: int(falls[0]) + 1] if len(falls) else entries


def read_time_index(directory: Path, base_offset: int) -> numpy.ndarray:
    """Returns the valid prefix, with the fields TIME_INDEX; offsets are relative to base_offset. An
    index whose only entry is zero is treated as empty.
    """
    entries = _valid_prefix(_read_index(segment_path(directory, base_offset, ".timeindex"), TIME_INDEX), "timestamp")
    return entries[:0] if len(entries) == 1 and not entries["timestamp"][0] and not entries["offset"][0] else entries


def read_offset_index(directory: Path, base_offset: int) -> numpy.ndarray:
    """Returns the valid prefix, with the fields OFFSET_INDEX; offsets are relative to base_offset."""
    return _valid_prefix(_read_index(segment_path(directory, base_offset, ".index"), OFFSET_INDEX), "position")
