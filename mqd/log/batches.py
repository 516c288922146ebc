"""Reads the headers of the record batches in a segment file (format: mqd/protocol/records.py). For
the records inside the batches, see records.py.

A batch was checked when it was appended, but the file may have been damaged since, and a reader may
run while its owner writes: everything is checked again here.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mqd.protocol.compression import CODECS
from mqd.protocol.records import (
    COMPRESSION_MASK,
    CONTROL,
    HEADER,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    LOG_OVERHEAD,
    TRANSACTIONAL,
)

BATCH_BYTES_MAX = 1 << 30
_READ_BYTES = 256 << 10


class CorruptBatch(ValueError):
    """Stored bytes are not a record batch, or its records contradict the header."""


class BatchInfo(msgspec.Struct, frozen=True, gc=False):
    """A header and its position. Timestamps in ms; offsets named `last` are inclusive."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    partition_leader_epoch: int
    crc: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    crc_valid: bool | None = None  # None: not checked

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def compression(self) -> int:
        return self.attributes & COMPRESSION_MASK

    @property
    def compression_name(self) -> str:
        return CODECS[self.compression] if self.compression < len(CODECS) else f"unknown ({self.compression})"

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)


def parse_header(data: bytes, at: int, position: int) -> BatchInfo:
    """`data[at:]` must hold at least HEADER_BYTES; `position` is its position in the file. Raises
    CorruptBatch.
    """
    (
        base_offset,
        length,
        leader_epoch,
        magic,
        crc,
        attributes,
        last_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    ) = HEADER.unpack_from(data, at)
    if magic != 2 and length > 0:
        raise CorruptBatch(f"magic {magic} at position {position}: only record batches with magic 2 are stored")
    if not HEADER_BYTES - LOG_OVERHEAD <= length <= BATCH_BYTES_MAX or base_offset < 0 or last_delta < 0 or count < 0:
        raise CorruptBatch(
            f"no batch header at position {position}: length {length}, base offset {base_offset}, {count} records"
        )
    return BatchInfo(
        position,
        LOG_OVERHEAD + length,
        base_offset,
        base_offset + last_delta,
        leader_epoch,
        crc,
        attributes,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )


def walk(fd: int, position: int, end_position: int) -> Iterator[BatchInfo]:
    """Yields the headers, beginning at `position`, a batch boundary. Ends at `end_position`, at the
    end of the file, or at a batch that the file holds only in part; raises CorruptBatch for an
    invalid header. Reads ahead in blocks, and skips the bodies of large batches.
    """
    block, start = b"", position
    while position + HEADER_BYTES <= end_position:
        if not start <= position <= start + len(block) - HEADER_BYTES:
            start, block = position, os.pread(fd, min(_READ_BYTES, end_position - position), position)
            if len(block) < HEADER_BYTES:
                return
        batch = parse_header(block, position - start, position)
        if position + batch.size_bytes > end_position:
            return
        yield batch
        position += batch.size_bytes


def first_timestamp_ms(path: Path) -> int:
    """The newest timestamp of a segment's first batch (Kafka's rollingBasedTimestamp); -1 = empty
    or unreadable. Raises OSError, but not for a missing file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
        return parse_header(data, 0, 0).max_timestamp_ms if len(data) == HEADER_BYTES else -1
    except (FileNotFoundError, CorruptBatch):
        return -1


def read_batch(fd: int, batch: BatchInfo) -> bytes:
    """Returns all bytes of a batch. Raises CorruptBatch if the file ends inside it."""
    data = os.pread(fd, batch.size_bytes, batch.position)
    if len(data) != batch.size_bytes:
        raise CorruptBatch(f"the file ends inside the batch at position {batch.position}")
    return data
