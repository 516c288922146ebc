"""Encodes, walks, checks and decodes record batches with magic 2.

    0   base_offset int64           first record's offset; the broker sets it
    8   batch_length int32          bytes after this field
    12  partition_leader_epoch int32    the broker sets it; the CRC covers neither it nor base_offset
    16  magic int8                  2
    17  crc uint32                  CRC-32C of everything after this field
    21  attributes int16            bits 0-2 compression, 3 timestamps are log append time,
                                    4 transactional, 5 control, 6 base_timestamp is a delete horizon
    23  last_offset_delta int32     last_offset - base_offset; compaction leaves gaps and never lowers it
    27  base_timestamp int64        ms      35  max_timestamp int64     ms
    43  producer_id int64   51  producer_epoch int16    53  base_sequence int32     57  record_count int32
    61  records, as one compressed stream where compression is not none

    record: length varint (bytes after it), attributes int8, timestamp_delta varlong, offset_delta
    varint, key, value (varint size, -1 = null, bytes), header count varint, headers (varint size
    and UTF-8 key, varint size and bytes or -1). Varints are zigzag.

No input is trusted: sizes are checked against the remaining bytes before use, decompression is
bounded, and invalid data raises ProtocolError. Sources: the public protocol guide's "Record Batch";
KIP-98 (producer ids), KIP-110 (zstd), KIP-534 (delete horizon).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from mqd.protocol.compression import CODECS, DECOMPRESSED_BYTES_MAX, codec_number, compress, decompress
from mqd.protocol.crc32c import crc32c
from mqd.protocol.errors import ProtocolError

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES = 61
LOG_OVERHEAD = 12  # base_offset and batch_length, which batch_length itself does not count
CRC_START = 21
NO_TIMESTAMP = -1
RECORD_BYTES_MIN = 7

COMPRESSION_MASK, LOG_APPEND_TIME, TRANSACTIONAL, CONTROL, DELETE_HORIZON = 7, 8, 16, 32, 64


class Record(msgspec.Struct, gc=False):
    """`offset` is absolute; when encoding, -1 stands for the next offset. Header keys are text;
    header values are bytes or None.
    """

    value: bytes | None = None
    key: bytes | None = None
    timestamp_ms: int = NO_TIMESTAMP
    headers: list[tuple[str, bytes | None]] = []
    offset: int = -1


class BatchHeader(msgspec.Struct, gc=False):
    """The 61 bytes before the records."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        return self.batch_length + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def compression(self) -> str:
        number = self.attributes & COMPRESSION_MASK
        return CODECS[number] if number < len(CODECS) else f"unknown {number}"

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)


# -- writing ---------------------------------------------------------------------------------------


def _append_varint(out: bytearray, value: int) -> None:
    """Zigzag, up to 64 bits."""
    value = value << 1 ^ value >> 63
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _append_blob(out: bytearray, blob: bytes | None) -> None:
    if blob is None:
        out.append(1)  # the size -1 in zigzag
    else:
        _append_varint(out, len(blob))
        out += blob


def _append_record(out: bytearray, record: Record, timestamp_delta: int, offset_delta: int) -> None:
    body = bytearray(1)
    _append_varint(body, timestamp_delta)
    _append_varint(body, offset_delta)
    _append_blob(body, record.key)
    _append_blob(body, record.value)
    _append_varint(body, len(record.headers))
    for key, value in record.headers:
        _append_blob(body, key.encode())
        _append_blob(body, value)
    _append_varint(out, len(body))
    out += body


def encode_batch(
    records: Iterable[Record],
    *,
    base_offset: int = 0,
    compression: int | str = "none",
    level: int | None = None,
    partition_leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    log_append_time_ms: int | None = None,
    last_offset_delta: int | None = None,
) -> bytes:
    """Encodes one batch. A record without an offset gets the next one after its predecessor.
    Explicit offsets must rise, and may leave gaps (as in a compacted batch).

    `log_append_time_ms`: if set, the batch's timestamp type is log append time, and this is the
    timestamp of every record. `last_offset_delta` is needed only if the batch's offsets extend beyond its last record.
    Raises ValueError for records or options that cannot form a batch.
    """
    payload, base_timestamp_ms, max_timestamp_ms, count, next_offset = bytearray(), None, NO_TIMESTAMP, 0, base_offset
    for record in records:
        if base_timestamp_ms is None:
            base_timestamp_ms = record.timestamp_ms
        offset = next_offset if record.offset < 0 else record.offset
        if offset < next_offset:
            raise ValueError(f"offset {offset} after {next_offset - 1}: offsets must rise within a batch")
        _append_record(payload, record, record.timestamp_ms - base_timestamp_ms, offset - base_offset)
        max_timestamp_ms = max(max_timestamp_ms, record.timestamp_ms)
        next_offset, count = offset + 1, count + 1
    last_delta = max(0, next_offset - base_offset - 1)
    if last_offset_delta is not None:
        if last_offset_delta < last_delta:
            raise ValueError(f"last_offset_delta {last_offset_delta} is below the last record's {last_delta}")
        last_delta = last_offset_delta
    attributes = codec_number(compression) | TRANSACTIONAL * is_transactional | CONTROL * is_control
    if log_append_time_ms is not None:
        attributes, max_timestamp_ms = attributes | LOG_APPEND_TIME, log_append_time_ms
    body = compress(compression, bytes(payload), level)
    fields = (
        attributes,
        last_delta,
        NO_TIMESTAMP if base_timestamp_ms is None else base_timestamp_ms,
        max_timestamp_ms,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    head = HEADER.pack(base_offset, HEADER_BYTES - LOG_OVERHEAD + len(body), partition_leader_epoch, 2, 0, *fields)
    crc = crc32c(body, crc32c(head[CRC_START:]))
    return head[: CRC_START - 4] + struct.pack(">I", crc) + head[CRC_START:] + body


# -- walking ---------------------------------------------------------------------------------------


def decode_batch_header(buffer: bytes | memoryview, position: int = 0) -> BatchHeader:
    """Returns the header at `position`; reads nothing after it. Raises ProtocolError if the header is
    truncated, has another magic, or has impossible values.
    """
    title = "record batch"
    if position + HEADER_BYTES > len(buffer):
        raise ProtocolError(
            f"cut off: {len(buffer) - position} of {HEADER_BYTES} bytes of a header", title, position=position
        )
    header = BatchHeader(*HEADER.unpack_from(buffer, position))
    if header.magic != 2:
        raise ProtocolError(
            f"magic {header.magic}; only magic 2 is supported (0 and 1 come from clients before Kafka 0.11)",
            title,
            "magic",
            position + 16,
        )
    if header.batch_length < HEADER_BYTES - LOG_OVERHEAD:
        raise ProtocolError(
            f"{header.batch_length} bytes are too few for a batch header", title, "batch_length", position + 8
        )
    if header.last_offset_delta < 0:
        raise ProtocolError(
            f"the last offset delta {header.last_offset_delta} is negative", title, "last_offset_delta", position + 23
        )
    if header.record_count < 0:
        raise ProtocolError(f"the record count {header.record_count} is negative", title, "record_count", position + 57)
    return header


def iterate_batches(
    buffer: bytes | memoryview, *, allow_partial: bool = False
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Yields the header and the bytes of every batch in `buffer`. With `allow_partial` a truncated
    batch at the end is ignored (Fetch responses may have one); otherwise ProtocolError is raised.
    """
    view, position = memoryview(buffer), 0
    while position < len(view):
        if allow_partial and len(view) - position < HEADER_BYTES:
            return
        header = decode_batch_header(view, position)
        end = position + header.size_bytes
        if end > len(view):
            if allow_partial:
                return
            problem = f"cut off: {len(view) - position} of {header.size_bytes} bytes"
            raise ProtocolError(problem, "record batch", "batch_length", position + 8)
        yield header, view[position:end]
        position = end


def has_valid_crc(batch: bytes | memoryview) -> bool:
    """Whether the checksum of one whole batch is correct."""
    return struct.unpack_from(">I", batch, CRC_START - 4)[0] == crc32c(memoryview(batch)[CRC_START:])


# -- reading ---------------------------------------------------------------------------------------


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Reads a zigzag varint of at most 64 bits. Returns (value, position after it). This function
    and those that use it raise ValueError, or IndexError if the data ends too early.
    """
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 64 bits")
    if value > 0xFFFFFFFFFFFFFFFF:
        raise ValueError("a varint of more than 64 bits")
    return value >> 1 ^ -(value & 1), position


def read_blob(data: bytes, position: int, end: int, description: str) -> tuple[bytes | None, int]:
    """Reads a length and that many bytes, which must not extend beyond `end`: (bytes, position
    after them). Length -1 means None. `description` is for error messages, such as "a key".
    """
    size = data[position]
    position += 1
    if size < 0x80:
        size = size >> 1 ^ -(size & 1)
    else:
        size, position = read_varint(data, position - 1)
    if size == -1:
        return None, position
    stop = position + size
    if size < 0 or stop > end:
        raise ValueError(f"{description} of {size} bytes where {end - position} remain")
    return data[position:stop], stop


def read_headers(
    data: bytes, position: int, end: int, errors: str = "strict"
) -> tuple[list[tuple[str, bytes | None]], int]:
    """(headers, position after them). `errors`: as in bytes.decode, for a key that is not UTF-8."""
    count, position = read_varint(data, position)
    if count < 0 or count * 2 > end - position:
        raise ValueError(f"{count} headers where {end - position} bytes remain")
    headers = []
    for _ in range(count):
        key, position = read_blob(data, position, end, "a header key")
        if key is None:
            raise ValueError("a header without a key")
        value, position = read_blob(data, position, end, "a header value")
        headers.append((key.decode(errors=errors), value))
    return headers, position


def _read_record(data: bytes, position: int, header: BatchHeader) -> tuple[Record, int]:
    size, position = read_varint(data, position)
    end = position + size
    if size < RECORD_BYTES_MIN - 1 or end > len(data):
        raise ValueError(f"a record of {size} bytes where {len(data) - position} remain")
    timestamp_delta, position = read_varint(data, position + 1)
    offset_delta, position = read_varint(data, position)
    if not 0 <= offset_delta <= header.last_offset_delta:
        raise ValueError(f"offset delta {offset_delta} is not within 0 to {header.last_offset_delta}")
    key, position = read_blob(data, position, end, "a key")
    value, position = read_blob(data, position, end, "a value")
    headers, position = read_headers(data, position, end)
    if position != end:
        raise ValueError(f"the record's length field is wrong ({end - position} bytes off)")
    timestamp_ms = (
        header.max_timestamp_ms if header.attributes & LOG_APPEND_TIME else header.base_timestamp_ms + timestamp_delta
    )
    return Record(value, key, timestamp_ms, headers, header.base_offset + offset_delta), position


def decode_batch(
    batch: bytes | memoryview, *, verify_crc: bool = True, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX
) -> Iterator[Record]:
    """Yields the records of one whole batch. Raises ProtocolError for a wrong CRC, wrong lengths, and
    compressed data that is damaged or expands too far.
    """
    header = decode_batch_header(batch)
    title = f"record batch at offset {header.base_offset}"
    if header.size_bytes != len(batch):
        raise ProtocolError(
            f"the length field says {header.size_bytes} bytes, but the batch has {len(batch)}", title, "batch_length", 8
        )
    if verify_crc and not has_valid_crc(batch):
        raise ProtocolError(
            f"the checksum is {crc32c(memoryview(batch)[CRC_START:]):#010x}, but the header has {header.crc:#010x}",
            title,
            "crc",
            17,
        )
    data = decompress(header.attributes & COMPRESSION_MASK, memoryview(batch)[HEADER_BYTES:], decompressed_bytes_max)
    if header.record_count * RECORD_BYTES_MIN > len(data):
        raise ProtocolError(f"{header.record_count} records in {len(data)} bytes", title, "record_count", 57)
    position = number = 0
    try:
        while number < header.record_count:
            record, position = _read_record(data, position, header)
            yield record
            number += 1
    except (ValueError, IndexError) as error:  # a UnicodeDecodeError is a ValueError
        problem = "cut off" if isinstance(error, IndexError) else str(error)
        raise ProtocolError(problem, title, f"record {number}", position) from None
    if position != len(data):
        raise ProtocolError(f"{len(data) - position} bytes after the last record", title, "records", position)


def decode_records(
    buffer: bytes | memoryview | None,
    *,
    allow_partial: bool = False,
    verify_crc: bool = True,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
) -> Iterator[Record]:
    """Yields the records of every batch in `buffer` (None: no batches), except control records.
    `decompressed_bytes_max` limits each batch separately.
    """
    for header, batch in iterate_batches(b"" if buffer is None else buffer, allow_partial=allow_partial):
        if not header.is_control:
            yield from decode_batch(batch, verify_crc=verify_crc, decompressed_bytes_max=decompressed_bytes_max)
