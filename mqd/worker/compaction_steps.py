"""The blocking steps of one partition's compaction, which run on the cleaner's thread. Each step is
short: about STEP_BYTES, or one file's flush.
"""

import os
from pathlib import Path

from mqd import native
from mqd.log import segments
from mqd.log.batches import first_timestamp_ms
from mqd.log.compaction import StoredSegment
from mqd.log.segments import TimestampCache
from mqd.protocol.compression import compress, decompress
from mqd.protocol.errors import ProtocolError

STEP_BYTES = 4 << 20


class Uncleanable(Exception):
    """A part of the log cannot be read, so the log is not compacted."""


def list_stored(path: Path, active_base: int, cache: TimestampCache, dirty_from: int) -> list[StoredSegment]:
    """Returns the segments in ascending order, the active one last. Those that may be dirty have
    their first timestamps. Raises OSError.
    """
    listed = segments.list_segments(path, active_base, cache)
    if not listed:
        return []  # the topic is being deleted
    ends = [segment.base_offset for segment in listed[1:]] + [1 << 63]
    return [
        StoredSegment(
            segment,
            first_timestamp_ms(segments.segment_path(path, segment.base_offset)) if end > dirty_from else -1,
            _size(segments.segment_path(path, segment.base_offset, ".index")),
        )
        for segment, end in zip(listed, ends, strict=True)
    ]


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def newest_snapshot(path: Path) -> int:
    """Offset of the newest producer snapshot; -1 = none."""
    with os.scandir(path) as entries:
        return max(
            (
                int(entry.name[:20])
                for entry in entries
                if entry.name.endswith(".snapshot") and entry.name[:20].isdigit()
            ),
            default=-1,
        )


def advance(compaction: native.Compaction, bytes_max: int = STEP_BYTES) -> tuple[bool, int]:
    """Advances the collection of keys, or the current group. Returns (whether it is done, bytes
    read and written). Raises Uncleanable, NativeError.
    """
    processed_bytes = 0
    try:
        state = compaction.step(bytes_max)
        processed_bytes += compaction.done_bytes
        while state in (native.CompactState.DECOMPRESS, native.CompactState.COMPRESS):
            state = compaction.resume(_convert(state, *compaction.unconverted))
            processed_bytes += compaction.done_bytes
            if state == native.CompactState.MORE and processed_bytes < bytes_max:
                state = compaction.step(bytes_max - processed_bytes)
                processed_bytes += compaction.done_bytes
    except native.NativeError as error:
        if error.code in (native.E_CORRUPT, native.E_FULL):
            raise Uncleanable(error.strerror) from error
        raise
    return state == native.CompactState.DONE, processed_bytes


def _convert(state: int, codec: int, data: bytes) -> bytes:
    if state == native.CompactState.COMPRESS:
        return compress(codec, data)
    try:
        return decompress(codec, data)
    except ProtocolError as error:
        raise Uncleanable(f"a batch cannot be decompressed: {error}") from error
