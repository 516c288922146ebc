"""Builds compressed batches from record columns, closes and compresses them, and passes each whole
batch to the C core.

The C core does not compress (cramjam does), so it cannot build these batches in place: a
partition's records wait here as pieces of columns until batch.size, batch.num.messages or linger.ms
closes their batch.

1. A record is in one piece of one open batch, or in a closed batch that waits for room (`_ready`),
   or in the C core. `record_count` counts the first two.
2. While a closed batch waits for room no more records are accepted, which keeps the order in a
   partition.
3. Data is copied: the caller may reuse its memory.
Concurrency: with the attachment's lock held.
"""

from __future__ import annotations

import collections
import struct
import time
from typing import Any

import numpy as np

from mqd.client.columns import Column
from mqd.client.messages import KafkaError, local_error
from mqd.client.partitioner import NAMES
from mqd.client.shm.delivering import Delivery
from mqd.client.shm.staging import Chunk, Refused, TakenCount
from mqd.native.client import Columns, partition_for, records_encode
from mqd.protocol.compression import codec_number, compress

_HEADER_BYTES = 61
# upper bound for everything in a record except its key, value and headers: length, attributes,
# deltas, sizes and header count, mostly varints
_RECORD_OVERHEAD_MAX = 36
# the shared memory has room for at least this many batches, even if compression saves nothing;
# part of it is used for requests
_BATCHES_MIN = 4
_NEVER = float("inf")
# partitioners that send a record without a key (consistent_random: or with an empty key) to any
# partition
_SPREADING_PARTITIONERS = {"random", "consistent_random", "murmur2_random", "fnv1a_random"}


class _Batch:
    """A partition's batch, which takes records until it is closed. `pieces`: the records. `parts`: who
    waits for their outcome (delivering.Delivery). `data`: the encoded batch, None before encoding.
    `refused`: the error if the C core will never take the batch.
    """

    __slots__ = ("count", "data", "opened_at", "parts", "partition", "pieces", "refused", "size_bytes", "stage")

    def __init__(self, stage: Any, partition: int) -> None:
        self.stage, self.partition = stage, partition
        self.pieces: list[Chunk] = []
        self.parts: list[tuple[Any, Any, int]] = []
        self.count = self.size_bytes = 0
        self.data: bytes | None = None
        self.refused: KafkaError | None = None
        self.opened_at = time.monotonic()


class Compressor:
    def __init__(self, producer: Any) -> None:
        config = producer.config
        self._producer = producer
        self.enabled = config["compression.type"] not in ("none", "inherit")
        self._codec = codec_number(config["compression.type"]) if self.enabled else 0
        level = config["compression.level"]
        self._level = None if level < 0 or config["compression.type"] == "snappy" else level
        self._partitioner = NAMES.index(config["partitioner"])
        self._spreads_keyless = config["partitioner"] in _SPREADING_PARTITIONERS
        self._batch_bytes, self._batch_records = (
            min(config["batch.size"], producer.memory_bytes // _BATCHES_MIN),
            config["batch.num.messages"],
        )
        self._linger_s = config["linger.ms"] / 1000
        self._open: dict[tuple[int, int], _Batch] = {}
        self._ready: collections.deque[_Batch] = collections.deque()
        self._sticky: dict[int, int] = {}
        self.record_count = 0

    def append(self, stage: Any, chunk: Chunk, waiters: Any, taken: TakenCount, first_index: int) -> None:
        """Adds the chunk's records up to the first one whose partition does not exist; raises
        Refused if that is its first record. Adds none while closed batches wait for room. Adds none
        while no broker is attached either: all records of a batch time out together with its
        first record.
        """
        chunk = _up_to_unknown_partition(chunk, stage.partition_count)
        self._pass_on()
        if self._ready or not self._producer.attachment.attached:
            return
        count = chunk.values.count
        partitions = self._choose_partitions(stage, chunk)
        first = int(partitions[0])
        pieces: list[tuple[int, Chunk, Any]] = []
        if (partitions == first).all():
            pieces.append((first, _copy(chunk), range(first_index, first_index + count)))
        else:
            for partition in np.unique(partitions).tolist():
                chosen = np.flatnonzero(partitions == partition)
                pieces.append((partition, _select(chunk, chosen), (chosen + first_index).tolist()))
        self._producer.transactions.note_write()
        for partition, piece, indices in pieces:
            self._add(stage, partition, piece, waiters, indices)
        taken.count = count
        self._pass_on()  # if Ctrl-C interrupts the compression of a batch, its records are still here

    def _choose_partitions(self, stage: Any, chunk: Chunk) -> np.ndarray:
        """Returns the partition of each record."""
        count, partition_count = chunk.values.count, stage.partition_count
        if chunk.partitions is None and chunk.partition >= 0:
            return np.full(count, chunk.partition, np.int32)
        requested = np.full(count, -1, np.int32) if chunk.partitions is None else chunk.partitions
        if (requested >= 0).all():
            return requested
        sticky = self._sticky_partition(stage)
        if chunk.keys is None and self._spreads_keyless:
            return np.where(requested >= 0, requested, np.int32(sticky))
        keys = [None] * count if chunk.keys is None else chunk.keys.items()
        no_key = (None, b"") if NAMES[self._partitioner] == "consistent_random" else (None,)
        return np.array(
            [
                (
                    partition
                    if partition >= 0
                    else (
                        sticky
                        if self._spreads_keyless and (key in no_key or self._partitioner == 0)
                        else partition_for(self._partitioner, key, partition_count)
                    )
                )
                for partition, key in zip(requested.tolist(), keys, strict=True)
            ],
            np.int32,
        )

    def _sticky_partition(self, stage: Any) -> int:
        sticky = self._sticky.get(stage.number)
        if sticky is None or (stage.number, sticky) not in self._open:
            sticky = self._sticky[stage.number] = partition_for(0, None, stage.partition_count)
        return sticky

    def _add(self, stage: Any, partition: int, piece: Chunk, waiters: Any, indices: Any) -> None:
        start, count = 0, piece.values.count
        while start < count:
            batch = self._open.get((stage.number, partition))
            if batch is None:
                batch = self._open[stage.number, partition] = _Batch(stage, partition)
            end = self._fitting_end(batch, piece, start)
            if end == start:
                self._close(batch)
                continue
            part = piece if end - start == count else piece.part(start, end)
            batch.pieces.append(part)
            batch.parts.append(
                (waiters, indices[start:end], end - start) if waiters is not None else (None, None, end - start)
            )
            batch.count += end - start
            batch.size_bytes += _size_bytes(part)
            self.record_count += end - start
            if batch.size_bytes >= self._batch_bytes or batch.count >= self._batch_records or end < count:
                self._close(batch)
            start = end

    def _fitting_end(self, batch: _Batch, piece: Chunk, start: int) -> int:
        """Returns the index in the piece at which the batch is full. An empty batch takes at least one
        record."""
        end = min(piece.values.count, start + self._batch_records - batch.count)
        room = self._batch_bytes - batch.size_bytes
        if _size_bytes(piece, start, end) <= room:
            return end
        low, high = start + (batch.count == 0), end
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _size_bytes(piece, start, middle) <= room else (low, middle - 1)
        return low

    # -- closing -----------------------------------------------------------------------------------

    def _close(self, batch: _Batch) -> None:
        """Closes a batch without encoding it. Encoding takes time, and Ctrl-C could interrupt it before
        it is known which batch each record is in.
        """
        del self._open[batch.stage.number, batch.partition]
        self._ready.append(batch)

    def _encode(self, batch: _Batch) -> bytes:
        columns = _join(batch.pieces)
        buffer = bytearray(_HEADER_BYTES + batch.size_bytes + 16)
        size, encoded = records_encode(columns, buffer)
        assert encoded == batch.count, f"{encoded} of {batch.count} records fit"
        records = bytes(memoryview(buffer)[_HEADER_BYTES:size])
        compressed = compress(self._codec, records, self._level)
        if len(compressed) >= len(records):
            return bytes(memoryview(buffer)[:size])
        header = buffer[:_HEADER_BYTES]
        struct.pack_into(">i", header, 8, _HEADER_BYTES - 12 + len(compressed))
        struct.pack_into(">h", header, 21, self._codec)
        return bytes(header) + compressed

    def _pass_on(self) -> None:
        """Passes closed batches to the C core while it has room, up to one that it refuses. The refused
        batch is not reported here, because _fail() may empty the stage from which the caller takes
        records.
        """
        producer = self._producer
        while self._ready and producer.hold_reason is None and self._ready[0].refused is None:
            batch = self._ready[0]
            if batch.data is None:
                batch.data = self._encode(batch)
                continue  # a signal handler may have passed it on meanwhile
            outstanding_before = producer.native.outstanding_records
            try:
                number = producer.appender.append_batch(batch.stage, batch.partition, batch.data)
                if not number:
                    return
                self._register(batch, number)
            except Refused as refused:
                batch.refused = refused.error
            except BaseException:  # Ctrl-C, perhaps after the C core has accepted the batch
                if producer.native.outstanding_records > outstanding_before:
                    self._register(batch, producer.native.batch_number)
                raise

    def _register(self, batch: _Batch, number: int) -> None:
        """Registers the batch that the C core has accepted. May be called again after an interrupt."""
        self._producer.outcomes.add_batch(batch.stage.number, number, batch.parts, batch.opened_at)
        if self._ready and self._ready[0] is batch:
            self.record_count -= batch.count
            self._ready.popleft()

    def on_turn(self, now: float, close_all: bool) -> float:
        """Closes the batches whose linger time has passed; with `close_all`, all batches. Returns the
        time at which the next batch is due.
        """
        if not self._open and not self._ready:
            return _NEVER
        due = _NEVER
        for batch in list(self._open.values()):
            if close_all or batch.opened_at + self._linger_s <= now:
                self._close(batch)
            else:
                due = min(due, batch.opened_at + self._linger_s)
        self._pass_on()
        while self._ready and (error := self._ready[0].refused) is not None:
            self._producer.outcomes.records_failed += self._fail([self._ready.popleft()], error)
            self._producer.attachment.changed.notify_all()
            self._pass_on()
        return due

    def drop_all(self, error: KafkaError) -> None:
        """Fails all records of open and closed batches; their transaction must be aborted."""
        self.expire(_NEVER, error)

    def expire(self, opened_by: float, error: KafkaError) -> int:
        """Like drop_all(), but only for batches opened at or before `opened_by`. Returns the number of
        records."""
        expired = [batch for batch in (*self._ready, *self._open.values()) if batch.opened_at <= opened_by]
        if not expired:
            return 0
        self._ready = collections.deque(batch for batch in self._ready if batch.opened_at > opened_by)
        self._open = {key: batch for key, batch in self._open.items() if batch.opened_at > opened_by}
        return self._fail(expired, error)

    def _fail(self, batches: list[_Batch], error: KafkaError) -> int:
        """Reports the records of these batches, which the caller has removed, as failed. Returns their
        number."""
        count = sum(batch.count for batch in batches)
        self.record_count -= count
        for batch in batches:
            self._producer.put(Delivery(batch.stage.topic, batch.partition, -1, -1, error, batch.parts))
        self._producer.transactions.mark_broken(error)
        return count


def _up_to_unknown_partition(chunk: Chunk, partition_count: int) -> Chunk:
    """Returns the chunk up to the first record whose partition does not exist. Raises Refused if that
    record is the chunk's first.
    """
    first = chunk.partition if chunk.partitions is None else int(chunk.partitions[0])
    if first >= partition_count:
        raise Refused(local_error(KafkaError._UNKNOWN_PARTITION))
    if chunk.partitions is not None and chunk.partitions.max() >= partition_count:
        return chunk.part(0, int(np.argmax(chunk.partitions >= partition_count)))
    return chunk


def _size_bytes(piece: Chunk, start: int = 0, end: int | None = None) -> int:
    """Returns an upper bound of the encoded size."""
    end = piece.values.count if end is None else end
    columns = [column for column in (piece.values, piece.keys, piece.headers) if column is not None]
    return (
        sum(column.position(end) - column.position(start) for column in columns) + (end - start) * _RECORD_OVERHEAD_MAX
    )


def _copy(chunk: Chunk) -> Chunk:
    """Returns a copy of the chunk in its own memory."""

    def copy_column(column: Column) -> Column:
        sizes = None if column.sizes is None else np.array(column.sizes)
        return Column(column.count, bytes(column.data), sizes, column.fixed_bytes)

    timestamps = None if chunk.timestamps is None else np.array(chunk.timestamps)
    return chunk._replace(
        values=copy_column(chunk.values),
        keys=None if chunk.keys is None else copy_column(chunk.keys),
        headers=None if chunk.headers is None else copy_column(chunk.headers),
        partitions=None,
        timestamps=timestamps,
        entries=None,
    )


def _select(chunk: Chunk, chosen: np.ndarray) -> Chunk:
    """Returns the chosen records of the chunk, in new memory."""
    indices = chosen.tolist()

    def select_column(column: Column) -> Column:
        items = column.items()
        sizes = column.all_sizes()[chosen]
        return Column(len(indices), b"".join([items[index] or b"" for index in indices]), sizes)

    timestamps = None if chunk.timestamps is None else chunk.timestamps[chosen]
    return chunk._replace(
        values=select_column(chunk.values),
        keys=None if chunk.keys is None else select_column(chunk.keys),
        headers=None if chunk.headers is None else select_column(chunk.headers),
        partitions=None,
        timestamps=timestamps,
        entries=None,
    )


def _join(pieces: list[Chunk]) -> Columns:
    counts = [piece.values.count for piece in pieces]
    timestamps = [
        np.full(count, piece.timestamp_ms, np.int64) if piece.timestamps is None else piece.timestamps
        for piece, count in zip(pieces, counts, strict=True)
    ]
    columns = Columns(
        count=sum(counts),
        values=b"".join(piece.values.data for piece in pieces),
        value_bytes=np.concatenate([piece.values.all_sizes() for piece in pieces]),
        timestamps_ms=np.concatenate(timestamps),
    )
    if any(piece.keys is not None for piece in pieces):
        columns.keys = b"".join(piece.keys.data for piece in pieces if piece.keys is not None)
        columns.key_bytes = np.concatenate(
            [_sizes_or(piece.keys, count, -1) for piece, count in zip(pieces, counts, strict=True)]
        )
    if any(piece.headers is not None for piece in pieces):
        columns.headers = b"".join(
            b"\0" * count if piece.headers is None else bytes(piece.headers.data)
            for piece, count in zip(pieces, counts, strict=True)
        )
        columns.header_bytes = np.concatenate(
            [_sizes_or(piece.headers, count, 1) for piece, count in zip(pieces, counts, strict=True)]
        )
    return columns


def _sizes_or(column: Column | None, count: int, default: int) -> np.ndarray:
    return np.full(count, default, np.int32) if column is None else column.all_sizes()
