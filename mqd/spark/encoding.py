"""Encodes Arrow columns into record batches, each for one partition. The C core
(mqd_records_encode) encodes the bytes; Arrow sorts the rows by partition.

    encoder.add(arrow_batch)       rows are buffered until batches are large enough
    encoder.ready_batches(), .remaining_batches()
                                   Batch objects; their bytes have no producer id and sequence yet

    E1  rows of one partition keep their order
    E2  a batch is at most options.batch_bytes before compression, unless it is one row
    E3  a row with a key goes to the partition that Java's default partitioner (murmur2) chooses;
        rows without a key go to one partition, chosen at random for each round of batches
        (KIP-480); the column `partition` takes precedence
Concurrency: one task. Importing this module loads PyArrow and the native core; the sink does so
when a task writes.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqd.base.property_values import ConfigError
from mqd.client import columns
from mqd.client.columns import Column
from mqd.native import crc32c
from mqd.native.client import Columns, Partitioner, partitions_for, records_encode
from mqd.protocol.compression import compress
from mqd.spark.headers import HeadersError
from mqd.spark.headers import encode as encode_headers
from mqd.spark.sink_options import COLUMNS, SinkOptions, column_name

HEADER_BYTES = 61
GATHER_BYTES = 4 << 20  # a topic's rows are buffered up to this size in Arrow, so that its batches are large
RECORD_OVERHEAD_MAX = 40
_TRANSACTIONAL = 1 << 4
_IDENTITY = struct.Struct(">qhi")  # producer id, epoch, base sequence: from byte 43 on


class MqdWriteError(RuntimeError):
    """Rows cannot be written; the message names the topic, the cause and the remedy."""


class TopicRows:
    """Rows of one topic, as columns, sorted by partition. A Batch has a range of them."""

    __slots__ = ("headers", "keys", "timestamp_ms", "timestamps", "values")

    def __init__(
        self,
        values: Column,
        keys: Column | None,
        headers: Column | None,
        timestamps: np.ndarray | None,
        timestamp_ms: int,
    ) -> None:
        self.values, self.keys, self.headers = values, keys, headers
        self.timestamps, self.timestamp_ms = timestamps, timestamp_ms

    def to_native(self, start: int, end: int) -> Columns:
        selected = Columns(count=end - start, timestamp_ms=self.timestamp_ms)
        values = self.values.part(start, end)
        selected.values, selected.value_bytes = values.data, values.sizes
        selected.fixed_value_bytes = values.fixed_bytes
        if self.keys is not None:
            keys = self.keys.part(start, end)
            selected.keys, selected.key_bytes = keys.data, keys.all_sizes()
        if self.headers is not None:
            headers = self.headers.part(start, end)
            selected.headers, selected.header_bytes = headers.data, headers.all_sizes()
        if self.timestamps is not None:
            selected.timestamps_ms = self.timestamps[start:end]
        return selected

    def size_bytes(self, start: int, end: int) -> int:
        """Upper bound of the encoded size."""
        columns_present = [column for column in (self.values, self.keys, self.headers) if column is not None]
        return (
            sum(column.position(end) - column.position(start) for column in columns_present)
            + (end - start) * RECORD_OVERHEAD_MAX
        )


class Batch:
    """One record batch: rows start .. end - 1. The sender sets `first_sent_s` and `sequence`."""

    __slots__ = ("data", "end", "first_sent_s", "partition", "rows", "sequence", "start", "topic")

    def __init__(self, topic: str, partition: int, rows: TopicRows, start: int, end: int, data: bytearray) -> None:
        self.topic, self.partition, self.rows = topic, partition, rows
        self.start, self.end, self.data = start, end, data
        self.sequence = -1
        self.first_sent_s = 0.0

    @property
    def count(self) -> int:
        return self.end - self.start

    def stamp(self, producer_id: int, producer_epoch: int, sequence: int, is_transactional: bool) -> None:
        """Writes the producer's identity, the sequence and the checksum into the batch."""
        if is_transactional:
            self.data[22] |= _TRANSACTIONAL
        self.sequence = sequence
        _IDENTITY.pack_into(self.data, 43, producer_id, producer_epoch, sequence)
        struct.pack_into(">I", self.data, 17, crc32c(memoryview(self.data)[21:]))

    def split_in_half(self, codec: int) -> list[Batch]:
        """Encodes the same rows as two batches."""
        middle = (self.start + self.end) // 2
        return [
            half
            for start, end in ((self.start, middle), (middle, self.end))
            for half in encode(self.topic, self.partition, self.rows, start, end, 1 << 30, codec)
        ]


def encode(
    topic: str, partition: int, rows: TopicRows, start: int, end: int, batch_bytes: int, codec: int
) -> Iterator[Batch]:
    """Encodes rows start .. end - 1, which belong to one partition."""
    buffer = bytearray(min(batch_bytes, HEADER_BYTES + rows.size_bytes(start, end)))
    while start < end:
        size, row_count = records_encode(rows.to_native(start, end), buffer)
        if not row_count:  # one row is larger than the batch size
            large = bytearray(HEADER_BYTES + rows.size_bytes(start, start + 1))
            size, row_count = records_encode(rows.to_native(start, start + 1), large)
            yield Batch(topic, partition, rows, start, start + row_count, _copy_compressed(large, size, codec))
        else:
            yield Batch(topic, partition, rows, start, start + row_count, _copy_compressed(buffer, size, codec))
        start += row_count


def _copy_compressed(buffer: bytearray, size: int, codec: int) -> bytearray:
    """A copy of the encoded batch, compressed if that makes it smaller."""
    if codec:
        records = bytes(memoryview(buffer)[HEADER_BYTES:size])
        compressed = compress(codec, records)
        if len(compressed) < len(records):
            data = bytearray(buffer[:HEADER_BYTES])
            struct.pack_into(">i", data, 8, HEADER_BYTES - 12 + len(compressed))
            struct.pack_into(">h", data, 21, codec)
            data += compressed
            return data
    return bytearray(memoryview(buffer)[:size])


class Encoder:
    """`partition_count(topic)`: called once for each round of batches. Raises MqdWriteError."""

    def __init__(self, options: SinkOptions, partition_count: Callable[[str], int]) -> None:
        self._options = options
        self._partition_count = partition_count
        self._names = {name: column_name(options, name) for name in COLUMNS}
        self._buffered: dict[str, list[pa.RecordBatch]] = {}
        self._buffered_bytes: dict[str, int] = {}
        self.row_count = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.row_count += batch.num_rows
        for topic, rows in self._by_topic(batch):
            self._buffered.setdefault(topic, []).append(rows)
            self._buffered_bytes[topic] = self._buffered_bytes.get(topic, 0) + rows.nbytes

    def ready_batches(self) -> Iterator[Batch]:
        """The batches of those topics for which enough records are buffered."""
        for topic in [topic for topic, size in self._buffered_bytes.items() if size >= GATHER_BYTES]:
            yield from self._encode(topic)

    def remaining_batches(self) -> Iterator[Batch]:
        for topic in list(self._buffered):
            yield from self._encode(topic)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not batch.num_rows:
            return
        if self._options.topic is not None:
            yield self._options.topic, batch
            return
        topics = batch.column(batch.schema.get_field_index(self._names["topic"]))
        if topics.null_count:
            raise MqdWriteError(
                f"{topics.null_count} rows have a null topic: set the option topic for all rows, or filter them out"
            )
        topic_names = pc.unique(topics).to_pylist()
        for topic in topic_names:
            yield topic, batch if len(topic_names) == 1 else batch.filter(pc.equal(topics, topic))

    # -- one topic ---------------------------------------------------------------------------------

    def _encode(self, topic: str) -> Iterator[Batch]:
        buffered = self._buffered.pop(topic)
        del self._buffered_bytes[topic]
        # several chunks if a column has more than 2 GiB
        for batch in buffered if len(buffered) == 1 else pa.Table.from_batches(buffered).combine_chunks().to_batches():
            yield from self._encode_batch(topic, batch)

    def _encode_batch(self, topic: str, batch: pa.RecordBatch) -> Iterator[Batch]:
        partitions = self._partitions(topic, batch)
        first = int(partitions[0])
        if (partitions == first).all():
            spans = [(first, 0, len(partitions))]
        else:
            order = np.argsort(partitions, kind="stable")
            batch = batch.take(pa.array(order))
            used_partitions, starts = np.unique(partitions[order], return_index=True)
            ends = [*starts[1:].tolist(), len(partitions)]
            spans = list(zip(used_partitions.tolist(), starts.tolist(), ends, strict=True))
        rows = self._rows(topic, batch)
        for partition, start, end in spans:
            yield from encode(topic, partition, rows, start, end, self._options.batch_bytes, self._options.compression)

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array | None:
        actual_name = self._names[name]
        return None if actual_name is None else batch.column(batch.schema.get_field_index(actual_name))

    def _keys(self, batch: pa.RecordBatch) -> Column | None:
        keys = self._column(batch, "key")
        return None if keys is None or keys.null_count == len(keys) else columns.pack(keys, "key")

    def _partitions(self, topic: str, batch: pa.RecordBatch) -> np.ndarray:
        """The partition of every row, as int32."""
        count = self._partition_count(topic)
        column = self._column(batch, "partition")
        partitions = (
            np.full(batch.num_rows, -1, np.int32) if column is None else np.array(column.fill_null(-1), np.int32)
        )
        if (
            column is not None
            and len(partitions)
            and (partitions.max() >= count or partitions.min() < -1 or (partitions < 0).sum() != column.null_count)
        ):
            invalid = next(index for index in column.to_pylist() if index is not None and not 0 <= index < count)
            raise MqdWriteError(
                f"topic {topic} has partitions 0 to {count - 1}, but a row has {invalid} in the column partition; if"
                " the column is null, the key determines the partition"
            )
        keys = self._keys(batch)
        native = Columns(count=batch.num_rows, fixed_value_bytes=0)
        if keys is not None:
            native.keys, native.key_bytes = keys.data, keys.all_sizes()
        partitions_for(Partitioner.MURMUR2_RANDOM, native, count, random.randrange(count), partitions)
        return partitions

    def _rows(self, topic: str, batch: pa.RecordBatch) -> TopicRows:
        now_ms = time.time_ns() // 1_000_000
        values = self._column(batch, "value")
        timestamps = self._column(batch, "timestamp")
        timestamps_ms = None
        if timestamps is not None:
            in_ms = pc.cast(timestamps, pa.timestamp("ms", tz=timestamps.type.tz), safe=False).cast(pa.int64())
            timestamps_ms = np.array(in_ms.fill_null(now_ms), np.int64)
        keys = self._keys(batch)
        return TopicRows(
            self._seal(topic, columns.pack(values, "value"), keys), keys, self._headers(batch), timestamps_ms, now_ms
        )

    def _seal(self, topic: str, values: Column, keys: Column | None) -> Column:
        encryption = self._options.kafka.encryption
        if encryption is None:
            return values
        from mqd.client.encryption.payload import PayloadError, shared_sealer

        try:
            return shared_sealer(encryption).seal_column(topic, values, keys)
        except ConfigError as error:
            raise MqdWriteError(f"option {error}") from None
        except PayloadError as error:
            raise MqdWriteError(f"topic {topic}: {error}") from error

    def _headers(self, batch: pa.RecordBatch) -> Column | None:
        headers = self._column(batch, "headers")
        if headers is None or headers.null_count == len(headers):
            return None
        try:
            return encode_headers(headers)
        except HeadersError as error:
            raise MqdWriteError(f"column 'headers': {error}; every header needs a key") from None
