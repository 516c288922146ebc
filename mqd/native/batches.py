"""Validates batches and segment files in raw form, and locates records in them.

numpy is imported by the one method that needs it. Concurrency: functions are stateless; a
RecordPositions belongs to one thread, and the result of walk() is overwritten by the next walk().
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from mqd.native.core import E_INVALID, NativeError, bytes_of, check, ffi, lib

if TYPE_CHECKING:
    import numpy

BATCH_HEADER_BYTES = lib.MQD_BATCH_HEADER_BYTES


class BatchHeader(msgspec.Struct, gc=False):
    """The decoded header of a record batch, magic 2; fields as in struct mqd_batch."""

    base_offset: int
    size_bytes: int
    partition_leader_epoch: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int


class ScanResult(msgspec.Struct, gc=False):
    """The result of segment_scan. `reason`: why the data at `valid_bytes` is
    invalid; None: the file is valid to its end.
    """

    valid_bytes: int
    batch_count: int
    record_count: int
    next_offset: int
    max_timestamp_ms: int
    last_leader_epoch: int
    reason: str | None


def crc32c(data: Any, crc: int = 0) -> int:
    memory = bytes_of(data, writable=False)
    return lib.mqd_crc32c(crc, memory, len(memory))


def _batch_header(batch: Any) -> BatchHeader:
    return BatchHeader(*[getattr(batch, name) for name in BatchHeader.__struct_fields__])


def batch_validate(data: Any) -> tuple[int, str, BatchHeader]:
    """Checks whether `data` is exactly one valid batch. Returns (Kafka error code or 0, reason or
    "", the header, with only the fields that could be read).
    """
    memory, batch, reason = bytes_of(data, writable=False), ffi.new("struct mqd_batch *"), ffi.new("const char **")
    error = lib.mqd_batch_validate(memory, len(memory), batch, reason)
    text = ffi.string(reason[0]).decode() if reason[0] != ffi.NULL else ""
    return error, text if error else "", _batch_header(batch)


def batch_decode(data: Any) -> BatchHeader:
    """Decodes the header without checking the CRC. Raises NativeError: E_INVALID for fewer than
    61 bytes, E_CORRUPT when the bytes cannot be a batch.
    """
    memory, batch = bytes_of(data, writable=False), ffi.new("struct mqd_batch *")
    if len(memory) < BATCH_HEADER_BYTES:
        raise NativeError(E_INVALID, f"a batch header has {BATCH_HEADER_BYTES} bytes, not {len(memory)}")
    check(lib.mqd_batch_decode(memory, len(memory), batch))
    return _batch_header(batch)


def segment_scan(
    log_path: str | os.PathLike[str], base_offset: int, from_position: int = 0, check_crc: bool = True
) -> ScanResult:
    """Walks the batches of one segment file. Raises NativeError when the file cannot be read;
    invalid bytes are a result, not an error.
    """
    out = ffi.new("struct mqd_scan_result *")
    check(lib.mqd_segment_scan(os.fsencode(log_path), base_offset, from_position, check_crc, out), log_path)
    reason = ffi.string(out.reason).decode() if out.reason != ffi.NULL else None
    return ScanResult(
        out.valid_bytes,
        out.batch_count,
        out.record_count,
        out.next_offset,
        out.max_timestamp_ms,
        out.last_leader_epoch,
        reason,
    )


class WalkStop(IntEnum):
    """enum mqd_walk_stop."""

    # why RecordPositions.walk() stopped
    END = lib.MQD_WALK_END
    END_OFFSET = lib.MQD_WALK_END_OFFSET
    FULL = lib.MQD_WALK_FULL
    OTHER = lib.MQD_WALK_OTHER  # a valid batch that walk() cannot locate records in, such as a compressed one
    CORRUPT = lib.MQD_WALK_CORRUPT


class RecordPositions:
    """The positions of keys and values of stored uncompressed batches (struct mqd_record_location),
    up to `capacity` records at a time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._out = ffi.new("struct mqd_record_location[]", capacity)
        self._walk = ffi.new("struct mqd_record_walk *")
        self._bytes = ffi.buffer(self._out)

    def walk(
        self, data: bytes, position: int, next_offset: int, end_offset: int
    ) -> tuple[WalkStop, int, int, numpy.ndarray]:
        """Walks from `position` on. Returns (why the walk stopped, the position where it stopped,
        the offset after the last processed batch, an array int32[n, 4] with the position and size
        of each key and of each value; size -1 = null).
        """
        import numpy

        memory, walk = bytes_of(data, writable=False), self._walk
        walk.position, walk.next_offset = position, next_offset
        lib.mqd_records_locate(memory, len(memory), end_offset, walk, self._out, self._capacity)
        positions = numpy.frombuffer(self._bytes, numpy.int32, 4 * walk.record_count).reshape(-1, 4)
        return WalkStop(walk.stop), walk.position, walk.next_offset, positions


def validate_records(records: Any, record_count: int, unkeyed_count_max: int) -> tuple[int, list[int]]:
    """Parses uncompressed `records`. Returns how many of them have no key, and the indexes of at
    most the first `unkeyed_count_max` of those. Raises ValueError if the bytes are not
    `record_count` records.
    """
    memory, unkeyed, reason = (
        bytes_of(records, writable=False),
        ffi.new("int32_t[]", unkeyed_count_max),
        ffi.new("const char **"),
    )
    count = lib.mqd_records_validate(memory, len(memory), record_count, unkeyed, unkeyed_count_max, reason)
    if count < 0:
        raise ValueError(ffi.string(reason[0]).decode())
    return count, list(unkeyed[0 : min(count, unkeyed_count_max)])
