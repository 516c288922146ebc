"""Decompresses a stored batch and iterates over its records (format: mqd/protocol/records.py).

The broker passes records through undecoded, so a network peer chose these bytes: every length is
checked against the available bytes, and decompression stops at DECOMPRESSED_BYTES_MAX. Unlike a
client, this module also accepts header keys that are not UTF-8, and offsets that the header of the
batch does not allow.
"""

import contextlib
from collections.abc import Iterator

import msgspec

from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch
from mqd.protocol import compression as codecs
from mqd.protocol.errors import ProtocolError
from mqd.protocol.records import read_blob, read_headers, read_varint

DECOMPRESSED_BYTES_MAX = 256 << 20


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
    if compression == codecs.NONE:
        return data
    try:
        return codecs.decompress(compression, data, DECOMPRESSED_BYTES_MAX)
    except ProtocolError as error:
        raise CorruptBatch(f"records cannot be decompressed: {error.problem}") from error


def _payload(batch: BatchInfo, data: bytes) -> bytes:
    if len(data) != batch.size_bytes:
        raise CorruptBatch(
            f"{len(data)} bytes are not the {batch.size_bytes} of the batch at position {batch.position}"
        )
    return decompress(batch.compression, data[HEADER_BYTES:])


@contextlib.contextmanager
def _as_corrupt_batch() -> Iterator[None]:
    try:
        yield
    except IndexError:
        raise CorruptBatch("the records end inside a record") from None
    except ValueError as error:
        raise error if isinstance(error, CorruptBatch) else CorruptBatch(str(error)) from None


def _read_record_start(data: bytes, position: int, batch: BatchInfo) -> tuple[int, int, int, int]:
    """Reads the start of a record: (position of its key, its end, timestamp, offset)."""
    size, at = read_varint(data, position)
    end = at + size
    if size < 1 or end > len(data):
        raise CorruptBatch(
            f"a record of {size} bytes at byte {at} of the records, where {len(data) - at} bytes are left"
        )
    delta, at = read_varint(data, at + 1)
    offset_delta, at = read_varint(data, at)
    timestamp = batch.max_timestamp_ms if batch.is_log_append_time else batch.base_timestamp_ms + delta
    return at, end, timestamp, batch.base_offset + offset_delta


def record_times(batch: BatchInfo, data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, timestamp in ms) of each record; `data`: all bytes of the batch. Raises
    CorruptBatch.
    """
    payload, position = _payload(batch, data), 0
    with _as_corrupt_batch():
        for _ in range(batch.record_count):
            key_position, position, timestamp, offset = _read_record_start(payload, position, batch)
            if key_position > position:
                raise CorruptBatch(f"the record at offset {offset} is longer than its length field")
            yield offset, timestamp


def records(batch: BatchInfo, data: bytes) -> Iterator[Record]:
    """Each record with its key, value and headers. Raises CorruptBatch."""
    payload, position = _payload(batch, data), 0
    with _as_corrupt_batch():
        for _ in range(batch.record_count):
            at, position, timestamp, offset = _read_record_start(payload, position, batch)
            key, at = read_blob(payload, at, position, "a key")
            value, at = read_blob(payload, at, position, "a value")
            headers, at = read_headers(payload, at, position, "replace")
            if at != position:
                raise CorruptBatch(f"the record at offset {offset} does not end at its stated length")
            yield Record(offset, timestamp, key, value, tuple(headers))
