"""Decompresses a stored batch and iterates over its records.

    record: length varint, attributes int8, timestamp_delta varlong, offset_delta varint, key,
    value, headers (a zig-zag varint length before each; -1 = null)

The broker passes records through undecoded, so a network peer chose these bytes: every length is
checked against the available bytes, and decompression stops at DECOMPRESSED_BYTES_MAX.
"""

from collections.abc import Iterator
from struct import unpack_from

import msgspec

from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch

DECOMPRESSED_BYTES_MAX = 256 << 20
_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16


class Record(msgspec.Struct, frozen=True, gc=False):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def decompress(compression: int, data: bytes) -> bytes:
    """Raises CorruptBatch: unknown codec, damaged data, or more than DECOMPRESSED_BYTES_MAX of
    output.
    """
    if compression == 0:
        return data
    if compression == _SNAPPY:
        return _unsnappy(data)
    import cramjam

    codecs = {_GZIP: cramjam.gzip, _LZ4: cramjam.lz4, _ZSTD: cramjam.zstd}
    if compression not in codecs:
        raise CorruptBatch(f"compression type {compression} is unknown")
    capacity = min(max(1 << 16, 8 * len(data)), DECOMPRESSED_BYTES_MAX)
    while True:
        # a buffer of known size is the only bound on the output of a small hostile input
        out = bytearray(capacity)
        try:
            return bytes(memoryview(out)[: codecs[compression].decompress_into(data, out)])
        except cramjam.DecompressionError as error:
            if capacity == DECOMPRESSED_BYTES_MAX or "whole buffer" not in str(error):
                raise CorruptBatch(f"records cannot be decompressed: {error}") from error
            capacity = min(8 * capacity, DECOMPRESSED_BYTES_MAX)


def _unsnappy(data: bytes) -> bytes:
    """Raw snappy (librdkafka) or the xerial framing of the Java client: 16 bytes of header, then
    blocks of int32 length and raw snappy.
    """
    if not data.startswith(_XERIAL):
        return _raw_snappy(data, DECOMPRESSED_BYTES_MAX)
    parts, at, room = [], _XERIAL_HEADER_BYTES, DECOMPRESSED_BYTES_MAX
    while at < len(data):
        if at + 4 > len(data):
            raise CorruptBatch("a snappy block is cut off")
        size = unpack_from(">i", data, at)[0]
        at += 4
        if size < 0 or at + size > len(data):
            raise CorruptBatch("a snappy block is cut off")
        parts.append(_raw_snappy(data[at : at + size], room))
        room -= len(parts[-1])
        at += size
    return b"".join(parts)


def _raw_snappy(block: bytes, room: int) -> bytes:
    import cramjam

    try:
        if cramjam.snappy.decompress_raw_len(block) > room:
            raise CorruptBatch(f"records would unfold to more than {DECOMPRESSED_BYTES_MAX} bytes")
        return bytes(cramjam.snappy.decompress_raw(block))
    except (cramjam.DecompressionError, ValueError) as error:
        raise CorruptBatch(f"records cannot be decompressed: {error}") from error


class _Cursor:
    """Reads forward, never past the end."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: bytes, at: int = 0):
        self.data, self.at, self.end = data, at, len(data)

    def varint(self) -> int:
        """Zig-zag, at most 64 bits."""
        data, at, result, shift = self.data, self.at, 0, 0
        while True:
            if at >= self.end or shift > 63:
                raise CorruptBatch(f"a varint at byte {self.at} of the records does not end")
            byte = data[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        self.at = at
        return (result >> 1) ^ -(result & 1)

    def take(self, size: int) -> bytes:
        at = self.at
        if size < 0 or size > self.end - at:
            raise CorruptBatch(f"a field of {size} bytes at byte {at} of the records, where {self.end - at} are left")
        self.at = at + size
        return self.data[at : at + size]

    def nullable(self) -> bytes | None:
        size = self.varint()
        return None if size == -1 else self.take(size)


def _payload(batch: BatchInfo, data: bytes) -> bytes:
    if len(data) != batch.size_bytes:
        raise CorruptBatch(
            f"{len(data)} bytes are not the {batch.size_bytes} of the batch at position {batch.position}"
        )
    return decompress(batch.compression, data[HEADER_BYTES:])


def _next(cursor: _Cursor, batch: BatchInfo) -> tuple[int, int, int]:
    """Reads the start of a record: (its end, timestamp, offset); leaves the cursor before the key."""
    size = cursor.varint()
    end = cursor.at + size
    if size < 1 or end > cursor.end:
        raise CorruptBatch(
            f"a record of {size} bytes at byte {cursor.at} of the records, where {cursor.end - cursor.at} are left"
        )
    cursor.take(1)
    timestamp = batch.base_timestamp_ms + cursor.varint()
    return end, batch.max_timestamp_ms if batch.log_append_time else timestamp, batch.base_offset + cursor.varint()


def record_times(batch: BatchInfo, data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, timestamp in ms) of each record; `data`: all bytes of the batch. Raises
    CorruptBatch.
    """
    cursor = _Cursor(_payload(batch, data))
    for _ in range(batch.record_count):
        end, timestamp, offset = _next(cursor, batch)
        if cursor.at > end:
            raise CorruptBatch(f"the record at offset {offset} is longer than it says")
        cursor.at = end
        yield offset, timestamp


def records(batch: BatchInfo, data: bytes) -> Iterator[Record]:
    """Each complete record. Raises CorruptBatch."""
    cursor = _Cursor(_payload(batch, data))
    for _ in range(batch.record_count):
        end, timestamp, offset = _next(cursor, batch)
        key, value = cursor.nullable(), cursor.nullable()
        headers = tuple(_header(cursor) for _ in range(_header_count(cursor)))
        if cursor.at != end:
            raise CorruptBatch(f"the record at offset {offset} does not end where it says")
        yield Record(offset, timestamp, key, value, headers)


def _header_count(cursor: _Cursor) -> int:
    count = cursor.varint()
    if not 0 <= count <= (cursor.end - cursor.at) // 2:  # a header has at least two bytes
        raise CorruptBatch(f"{count} headers cannot be in {cursor.end - cursor.at} bytes")
    return count


def _header(cursor: _Cursor) -> tuple[str, bytes | None]:
    return cursor.take(cursor.varint()).decode("utf-8", "replace"), cursor.nullable()
