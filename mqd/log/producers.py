"""What a partition knows of its producers, from its files: the newest producer snapshot, and the batches since. For DescribeProducers: nothing is asked of the owner, which
has better things to do. Blocking; call it off an event loop. Nothing at or beyond the given end is looked at.

The snapshot's bytes are described at the head of native/mqd_producers.h. A snapshot that is damaged or vanishes is passed over: an older one, or the log, says the same.
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mqd.log import segments
from mqd.log.batches import BatchInfo, CorruptBatch, read_batch, walk
from mqd.native import crc32c

_NAME = re.compile(r"([0-9]{20})\.snapshot")
_MAGIC = 0x4D514450
_HEAD = struct.Struct(">IHHIIq")
_PRODUCER = {1: struct.Struct(">qqhBBI"), 2: struct.Struct(">qqhBBiq")}
_BATCH = struct.Struct(">iiq")
_BYTES_MAX = 1 << 30
_ATTEMPTS = 5


class ProducerState(msgspec.Struct):
    """-1 for what is not known, or is not."""

    producer_id: int
    producer_epoch: int
    last_sequence: int = -1
    last_timestamp_ms: int = -1
    coordinator_epoch: int = -1
    transaction_first_offset: int = -1


def describe(directory: str | os.PathLike[str], log_start_offset: int, end_offset: int) -> list[ProducerState]:
    """By producer id. Raises OSError, CorruptBatch."""
    path = Path(directory)
    for attempt in range(_ATTEMPTS):
        try:
            from_offset, producers = _newest_snapshot(path, end_offset)
            for batch, fd in _batches(path, max(from_offset, log_start_offset), end_offset):
                _add(producers, batch, fd)
            return [producers[producer_id] for producer_id in sorted(producers)]
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def read_snapshot(data: bytes) -> tuple[int, dict[int, ProducerState]]:
    """(offset: the state after all records below it, producers by id). Raises ValueError for what is no snapshot."""
    try:
        magic, version, _, crc, count, offset = _HEAD.unpack_from(data)
        if magic != _MAGIC or version not in _PRODUCER or crc != crc32c(data[12:]):
            raise ValueError("no producer snapshot, or a damaged one")
        producers, at, layout = {}, _HEAD.size, _PRODUCER[version]
        for _ in range(count):
            producer_id, timestamp_ms, epoch, batch_count, _flags, *rest = layout.unpack_from(data, at)
            at += layout.size
            state = ProducerState(producer_id, epoch, last_timestamp_ms=timestamp_ms)
            if version == 2:
                state.coordinator_epoch, state.transaction_first_offset = rest
            for _ in range(batch_count):
                state.last_sequence = _BATCH.unpack_from(data, at)[1]
                at += _BATCH.size
            producers[producer_id] = state
    except struct.error as error:
        raise ValueError(f"a producer snapshot that ends too early: {error}") from None
    return offset, producers


def _newest_snapshot(directory: Path, end_offset: int) -> tuple[int, dict[int, ProducerState]]:
    with os.scandir(directory) as entries:
        offsets = sorted((int(match[1]) for entry in entries if (match := _NAME.fullmatch(entry.name))), reverse=True)
    for offset in offsets:
        if offset > end_offset:
            continue
        try:
            with open(directory / f"{offset:020d}.snapshot", "rb") as file:
                found, producers = read_snapshot(file.read(_BYTES_MAX))
        except (FileNotFoundError, ValueError):
            continue
        if found == offset:
            return offset, producers
    return 0, {}


def _batches(directory: Path, from_offset: int, end_offset: int) -> Iterator[tuple[BatchInfo, int]]:
    bases = segments.base_offsets(directory)
    for number, base in enumerate(bases):
        if base >= end_offset or (number + 1 < len(bases) and bases[number + 1] <= from_offset):
            continue
        fd = os.open(segments.segment_path(directory, base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for batch in walk(fd, 0, os.fstat(fd).st_size):
                if batch.base_offset >= end_offset:
                    return
                if batch.base_offset >= from_offset:
                    yield batch, fd
        finally:
            os.close(fd)


def _add(producers: dict[int, ProducerState], batch: BatchInfo, fd: int) -> None:
    if batch.producer_id < 0:
        return
    state = producers.setdefault(batch.producer_id, ProducerState(batch.producer_id, batch.producer_epoch))
    state.last_timestamp_ms = batch.max_timestamp_ms
    if batch.producer_epoch > state.producer_epoch:
        state.producer_epoch, state.last_sequence = batch.producer_epoch, -1
    if batch.control:
        state.transaction_first_offset = -1
        state.coordinator_epoch = _coordinator_epoch(read_batch(fd, batch), state.coordinator_epoch)
        return
    if batch.base_sequence >= 0:
        state.last_sequence = (batch.base_sequence + batch.last_offset - batch.base_offset) & 0x7FFFFFFF
    if batch.transactional and state.transaction_first_offset < 0:
        state.transaction_first_offset = batch.base_offset


def _coordinator_epoch(batch: bytes, otherwise: int) -> int:
    """Of a marker: its one record's value is version int16 and coordinator epoch int32, followed by the count of headers."""
    if len(batch) < 68 or batch[-1] != 0:
        return otherwise
    version, epoch = struct.unpack_from(">hi", batch, len(batch) - 7)
    if version < 0:
        raise CorruptBatch("a marker of a negative version")
    return epoch
