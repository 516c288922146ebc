"""The reader of mapped segments (native/client/reader.h): columns over a partition's records, and
the mappings that they point into.

A `Block` is memory for columns, and a `SegmentReader` fills it. Keys, values and headers are not
copied: their positions count from the mapping's first byte.

Lifetime: `SegmentReader.hold` returns the mapping as a read-only memoryview. The view, its slices
and arrays over them keep the mapping: it is unmapped when the last of them is freed, even if the
segment, the reader, the attachment or the broker has ended. Concurrency: a reader is used by one
thread at a time; readers run concurrently with each other and with other calls on their attachment.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum

import msgspec
import numpy as np

from mqd.native.core import NativeError, check, checked_topic_id, failure, ffi, lib


class ReadStop(IntEnum):
    """enum mqd_read_stop."""

    END = lib.MQD_READ_END
    FULL = lib.MQD_READ_FULL
    SEGMENT = lib.MQD_READ_SEGMENT
    COMPRESSED = lib.MQD_READ_COMPRESSED
    ABORTED = lib.MQD_READ_ABORTED
    OUT_OF_RANGE = lib.MQD_READ_OUT_OF_RANGE
    CORRUPT = lib.MQD_READ_CORRUPT
    GONE = lib.MQD_READ_GONE


BATCH_HEADER_BYTES = 61

_INT64_COLUMNS = ("offsets", "timestamps_ms", "key_positions", "value_positions", "header_positions")
_INT32_COLUMNS = ("key_bytes", "value_bytes", "header_bytes")
_BLOCK_BYTES_PER_RECORD = 8 * len(_INT64_COLUMNS) + 4 * len(_INT32_COLUMNS)


class Block:
    """Columns for `capacity` records. `offsets` and `timestamps_ms` are int64, positions int64
    (bytes from the view's base), sizes int32 (-1 = null).

    Arrays over it (slices too) keep `memory` alive.
    """

    __slots__ = (*_INT64_COLUMNS, *_INT32_COLUMNS, "_pointer", "capacity", "memory", "view")

    offsets: np.ndarray
    timestamps_ms: np.ndarray
    key_positions: np.ndarray
    value_positions: np.ndarray
    header_positions: np.ndarray
    key_bytes: np.ndarray
    value_bytes: np.ndarray
    header_bytes: np.ndarray

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = np.empty(capacity * _BLOCK_BYTES_PER_RECORD, np.uint8)
        self.view = ffi.new("struct mqd_record_view *")
        self.view.capacity = capacity
        self._pointer = ffi.from_buffer("uint8_t[]", self.memory)  # its own reference to `memory`
        position = 0
        for names, dtype, c_type, width in (
            (_INT64_COLUMNS, np.int64, "int64_t *", 8),
            (_INT32_COLUMNS, np.int32, "int32_t *", 4),
        ):
            for name in names:
                setattr(self, name, self.memory[position : position + capacity * width].view(dtype))
                setattr(
                    self.view,
                    name,
                    ffi.cast(c_type if "positions" not in name else "uint64_t *", self._pointer + position),
                )
                position += capacity * width

    @property
    def count(self) -> int:
        return self.view.count


class ReadState(msgspec.Struct):
    """Why the records of a view end; see enum mqd_read_stop."""

    stop: ReadStop
    codec: int = 0
    compressed_position: int = 0
    compressed_bytes: int = 0
    kafka_error: int = 0
    problem: str = ""


class SegmentReader:
    """Reads one partition, beginning at an offset. Raises NativeError (an OSError): EPIPE when the
    attachment has ended, ETIMEDOUT, EIO.
    """

    def __init__(self, handle: object, referenced: object = None) -> None:
        if handle == ffi.NULL:
            raise failure()
        self._reader = handle
        self._referenced = referenced  # objects that the C side may point to
        self._state = ffi.new("struct mqd_read_state *")

    @classmethod
    def attached(
        cls, client: object, topic_id: bytes, partition_index: int, offset: int, isolation_level: int = 0
    ) -> SegmentReader:
        """`client`: the attachment (mqd.native.client.Client). `isolation_level` 1 = read_committed."""
        return cls(
            lib.mqd_segment_reader_open(
                _pointer(client), checked_topic_id(topic_id), partition_index, offset, isolation_level
            )
        )

    @classmethod
    def of_file(
        cls, path: str | os.PathLike[str], base_offset: int, offset: int = 0, isolation_level: int = 0
    ) -> SegmentReader:
        """Reads one .log file by itself, without a broker."""
        return cls(lib.mqd_segment_reader_open_file(os.fsencode(path), base_offset, offset, isolation_level))

    @classmethod
    def of_memory(
        cls, batches: bytes | bytearray | memoryview, offset: int = 0, isolation_level: int = 0
    ) -> SegmentReader:
        """Reads record batches from memory that the reader keeps alive; the memory must not change
        while the reader or a view from hold() is in use.
        """
        pointer = ffi.from_buffer("uint8_t[]", batches)
        return cls(lib.mqd_segment_reader_open_memory(pointer, len(pointer), offset, isolation_level), pointer)

    def _checked_reader(self) -> object:
        if self._reader is None:
            raise NativeError(lib.MQD_E_INVALID, "this reader was closed")
        return self._reader

    def close(self) -> None:
        """Closes the reader; views from hold() stay valid."""
        reader, self._reader = self._reader, None
        if reader is not None:
            lib.mqd_segment_reader_close(reader)

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None:
            self.close()

    def move(self, client: object) -> None:
        """Moves the reader to another attachment. Raises NativeError when that attachment has
        already ended.
        """
        check(lib.mqd_segment_reader_move(self._checked_reader(), _pointer(client)))

    def seek(self, offset: int) -> None:
        lib.mqd_segment_reader_seek(self._checked_reader(), offset)

    @property
    def position(self) -> int:
        return lib.mqd_segment_reader_position(self._checked_reader())

    def lag_end(self) -> int:
        """The offset that lag is measured to: the high watermark or, for read_committed, the last
        stable offset; -1 = not known now.
        """
        return lib.mqd_segment_reader_lag_end(self._checked_reader())

    def log_start(self) -> int:
        return lib.mqd_segment_reader_log_start(self._checked_reader())

    def set_aborted(self, transactions: list[tuple[int, int]], until_offset: int) -> None:
        """Sets the aborted transactions below `until_offset` that overlap the records not read yet,
        as (producer id, first offset).
        """
        producers = ffi.new("int64_t[]", [producer_id for producer_id, _ in transactions] or [0])
        first_offsets = ffi.new("int64_t[]", [first_offset for _, first_offset in transactions] or [0])
        check(
            lib.mqd_segment_reader_set_aborted(
                self._checked_reader(), producers, first_offsets, len(transactions), until_offset
            )
        )

    def next(
        self, block: Block, bytes_max: int, check_crc: bool = True, record_count_max: int | None = None
    ) -> ReadState:
        """Fills `block` with at most record_count_max records, and sets block.count. Begins no further
        batch once `bytes_max` bytes of the segment have been walked. Returns why it stopped.
        """
        state, view = self._state, block.view
        view.capacity = block.capacity if record_count_max is None else min(record_count_max, block.capacity)
        check(lib.mqd_segment_reader_next(self._checked_reader(), bytes_max, check_crc, view, state))
        stop = ReadStop(state.stop)
        if stop <= ReadStop.SEGMENT:
            return ReadState(stop)
        problem = ffi.string(lib.mqd_error_message()).decode("utf-8", "replace") if stop == ReadStop.CORRUPT else ""
        return ReadState(
            stop, state.codec, state.compressed_position, state.compressed_bytes, state.kafka_error, problem
        )

    def skip(self) -> None:
        """Skips the compressed or corrupt batch that stopped the last call."""
        check(lib.mqd_segment_reader_skip(self._checked_reader()))

    def hold(self, block: Block) -> memoryview:
        """The bytes that the positions in `block` count from; see Lifetime. Call it after next()
        and before the following call of next().
        """
        mapping = lib.mqd_segment_reader_hold(self._checked_reader())
        if not mapping:
            return memoryview(b"")
        view = block.view
        owned = ffi.gc(
            ffi.cast("const uint8_t *", view.base),
            lambda _, mapping=mapping: lib.mqd_client_mapping_release(ffi.NULL, mapping),
        )
        return memoryview(ffi.buffer(owned, view.base_bytes)).toreadonly()


def _pointer(client: object) -> object:
    return getattr(client, "pointer", client)


class CompressedBatch(msgspec.Struct):
    """The fields needed from a compressed batch's header; `header` is a copy of all of it."""

    header: bytes
    leader_epoch: int
    timestamp_type: int
    record_count: int


def compressed_batch(block: Block, state: ReadState) -> tuple[CompressedBatch, memoryview]:
    """The batch that stopped the last call of next() with COMPRESSED, and a view of its
    compressed bytes, which is valid until next() is called again.
    """
    start = block.view.base + state.compressed_position
    header = bytes(ffi.buffer(start, BATCH_HEADER_BYTES))
    payload = memoryview(
        ffi.buffer(start + BATCH_HEADER_BYTES, state.compressed_bytes - BATCH_HEADER_BYTES)
    ).toreadonly()
    epoch, attributes, record_count = struct.unpack(">12xi5xh34xi", header)
    return CompressedBatch(header, epoch, attributes >> 3 & 1, record_count), payload


def fill_from_records(block: Block, start: int, header: bytes | memoryview, records: bytes, from_offset: int) -> int:
    """Parses the records of a decompressed batch, except those below `from_offset`, into the rows
    of `block` that begin with `start`. Returns how many records it has stored. Positions count from
    records[0]. Raises NativeError (E_CORRUPT).
    """
    view = ffi.new("struct mqd_record_view *")
    for name in _INT64_COLUMNS + _INT32_COLUMNS:
        setattr(view, name, getattr(block.view, name) + start)
    view.capacity = block.capacity - start
    check(
        lib.mqd_segment_records(
            ffi.from_buffer("uint8_t[]", header), ffi.from_buffer("uint8_t[]", records), len(records), from_offset, view
        )
    )
    block.view.leader_epoch, block.view.timestamp_type = view.leader_epoch, view.timestamp_type
    return view.count


def batches_extent(batches: bytes | bytearray | memoryview) -> tuple[int, int | None]:
    """The extent of the complete batches at the start of a Fetch response's records: (their size in
    bytes, the offset after them; None if there are no complete batches). Raises NativeError
    (E_CORRUPT).
    """
    next_offset = ffi.new("int64_t *", -1)
    pointer = ffi.from_buffer("uint8_t[]", batches)
    size = check(lib.mqd_batches_extent(pointer, len(pointer), next_offset))
    return size, next_offset[0] if size else None


def gather(
    base: memoryview, positions: np.ndarray, sizes: np.ndarray, with_offsets: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Copies the blobs of a column into one array (uint8). `with_offsets`: also returns the start of
    each blob and the end of the last (int64). Nulls are treated as empty.
    """
    positions, sizes = np.ascontiguousarray(positions, np.int64), np.ascontiguousarray(sizes, np.int32)
    count = len(sizes)
    total = int(np.maximum(sizes, 0).sum(dtype=np.int64))
    _check_bounds(base, positions, sizes)
    out = np.empty(total, np.uint8)
    offsets = np.empty(count + 1, np.int64) if with_offsets else None
    check(
        lib.mqd_columns_gather(
            _bytes(base),
            ffi.cast("uint64_t *", ffi.from_buffer(positions)),
            ffi.cast("int32_t *", ffi.from_buffer(sizes)),
            count,
            ffi.from_buffer("uint8_t[]", out),
            total,
            ffi.NULL if offsets is None else ffi.cast("int64_t *", ffi.from_buffer(offsets)),
        )
    )
    return out, offsets


def arrow_views(base: memoryview, positions: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Arrow's BinaryView over `base`: (16 bytes for each record, validity bitmap, count of nulls,
    origin: the byte of `base` at which data buffer 0 begins).
    """
    positions, sizes = np.ascontiguousarray(positions, np.int64), np.ascontiguousarray(sizes, np.int32)
    count = len(sizes)
    _check_bounds(base, positions, sizes)
    origin = int(positions.min()) if count else 0
    views, validity = np.empty((count, 16), np.uint8), np.empty((count + 7) // 8, np.uint8)
    null_count = lib.mqd_columns_arrow(
        _bytes(base),
        origin,
        ffi.cast("uint64_t *", ffi.from_buffer(positions)),
        ffi.cast("int32_t *", ffi.from_buffer(sizes)),
        count,
        ffi.from_buffer("uint8_t[]", views),
        ffi.from_buffer("uint8_t[]", validity),
    )
    return views, validity, check(null_count), origin


def _bytes(base: memoryview) -> object:
    return ffi.from_buffer("uint8_t[]", base)


def _check_bounds(base: memoryview, positions: np.ndarray, sizes: np.ndarray) -> None:
    """Raises ValueError if a blob is not within `base`: the arrays belong to the caller, which may
    have written to them.
    """
    if len(sizes) and (int(positions.min()) < 0 or int((positions + np.maximum(sizes, 0)).max()) > len(base)):
        raise ValueError("a position lies outside the buffer")
