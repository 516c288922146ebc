"""Reads a partition's records for a local consumer directly from mapped segments, without a request
and without copying.

    reader = PartitionReader(native, "topic", topic_id, partition, offset, isolation_level)
    batch = reader.read(records_max, bytes_max)      # RecordBatchView, or None: no records now, or
                                                     take_problem() says what must be done first
    reader.position                                  # the next offset that read() will return

Uncompressed batches are returned in place. Compressed batches are decompressed in Python
(cramjam), several at a time, and parsed in the same way. Control batches and, with read_committed,
batches of aborted transactions are left out; when the reader reports "aborted", its caller passes the
list of aborted transactions (set_aborted).

    P1  `position` is the offset after the last returned record; decompressed records that were not
        returned yet wait in `_rest`
    P2  a problem is reported when all records before it have been returned, by a read() that returns
        no records
    P3  memory: a block of columns is reused once no array refers to it; up to BLOCK_COUNT_MAX blocks
        are kept
Concurrency: one thread at a time.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from mqd.client.record_batch import Blobs, RecordBatchView, timestamp_type_of
from mqd.native.core import NativeError
from mqd.native.reader import Block, ReadState, ReadStop, SegmentReader, compressed_batch, fill_from_records
from mqd.protocol.compression import decompress
from mqd.protocol.errors import ProtocolError
from mqd.protocol.records import RECORD_BYTES_MIN

BLOCK_RECORDS = 16384
LARGE_BLOCK_RECORDS = 65536  # for a caller that requests, and lags by, more than BLOCK_RECORDS
BLOCK_COUNT_MAX = 4
DECOMPRESSED_TOGETHER_BYTES = 1 << 20  # one read() joins compressed batches up to this size
TURNS_MAX = 16  # iterations of one read() without a record; then it returns None

CORRUPT_MESSAGE = 2


class Problem(NamedTuple):
    """The reason why the reader cannot return the next record.

    kind: "aborted"   the aborted transactions at and after `position` are not known: send a
                      positions-only Fetch (parking.py) for that offset, then call set_aborted
          "range"     the position is out of range (DeleteRecords, retention): seek
          "corrupt"   the next batch cannot be read; text has the reason and offset. skip() leaves it out
          "gone"      the partition cannot be read, because of Kafka's error `code` (3 or 100: it or its
                      topic is unknown)
    """

    kind: str
    code: int = 0
    text: str = ""


_PROBLEM_KINDS = {
    ReadStop.ABORTED: "aborted",
    ReadStop.OUT_OF_RANGE: "range",
    ReadStop.CORRUPT: "corrupt",
    ReadStop.GONE: "gone",
}


class BlockPool:
    """Blocks for BLOCK_RECORDS or LARGE_BLOCK_RECORDS records. A block to which no view refers is reused."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {BLOCK_RECORDS: [], LARGE_BLOCK_RECORDS: []}
        self._idle_reference_count = 0

    def take(self, capacity: int = BLOCK_RECORDS) -> Block:
        pooled = self._blocks.get(capacity)
        if pooled is None:  # for one large compressed batch
            return Block(capacity)
        for block in pooled:
            if sys.getrefcount(block.memory) == self._idle_reference_count:
                return block
        block = Block(capacity)
        if not self._idle_reference_count:
            self._idle_reference_count = sys.getrefcount(block.memory)
        if len(pooled) < BLOCK_COUNT_MAX:
            pooled.append(block)
        return block


class PartitionReader:
    """See the module. Raises OSError (NativeError): EPIPE when the attachment has ended (see move()),
    ETIMEDOUT, EIO.
    """

    is_remote = False  # remote readers: remote_reading.py

    def __init__(
        self,
        native: Any,
        topic: str,
        topic_id: bytes,
        partition: int,
        offset: int,
        isolation_level: int = 0,
        check_crc: bool = True,
        pool: BlockPool | None = None,
    ) -> None:
        """`native`: the attachment (NativeClient), or a SegmentReader. `isolation_level` 1 =
        read_committed. `pool` may be shared by readers of one thread.
        """
        self.topic, self.partition = topic, partition
        self.check_crc = check_crc
        self._reader = (
            native
            if isinstance(native, SegmentReader)
            else SegmentReader.attached(native, topic_id, partition, offset, isolation_level)
        )
        self._pool = BlockPool() if pool is None else pool
        self._probe = Block(0)  # to find the next batch without taking its records
        self._rest: RecordBatchView | None = None  # P1
        self._problem: Problem | None = None

    @property
    def position(self) -> int:
        return int(self._rest.offsets[0]) if self._rest is not None else self._reader.position

    def lag_end(self) -> int:
        """Returns the high watermark or, for read_committed, the last stable offset; -1 = not known now.
        Sends no request.
        """
        return self._reader.lag_end()

    def log_start(self) -> int:
        """Returns the log start offset; -1 = not known now."""
        return self._reader.log_start()

    def lag(self) -> int:
        """Returns the number of offsets between the position and the end; -1 = not known now."""
        end = self._reader.lag_end()
        return -1 if end < 0 else max(0, end - self.position)

    def seek(self, offset: int) -> None:
        """read() continues at `offset`. Drops the list of aborted transactions."""
        self._rest = self._problem = None
        self._reader.seek(offset)

    def move(self, native: Any) -> None:
        """Moves to another attachment after the previous one has ended; the position stays."""
        self._reader.move(native)

    def set_aborted(self, transactions: list[tuple[int, int]], until_offset: int) -> None:
        """Sets the aborted transactions that overlap position .. until_offset, as (producer id, first
        offset).
        """
        self._reader.set_aborted(transactions, until_offset)

    def skip(self) -> None:
        """Skips the batch that take_problem() reported as corrupt. Raises NativeError when its header is
        damaged too: then only seek() continues after the batch.
        """
        self._reader.skip()

    def close(self) -> None:
        """Closes the reader. Returned batches stay valid."""
        self._rest = None
        self._reader.close()

    def take_problem(self) -> Problem | None:
        """Returns, once, why the last read() returned no records; None: the reader had reached the end."""
        problem, self._problem = self._problem, None
        return problem

    # -- reading -----------------------------------------------------------------------------------

    def read(self, records_max: int = BLOCK_RECORDS, bytes_max: int = 1 << 20) -> RecordBatchView | None:
        """Returns the next records, at most `records_max` (uncompressed: also at most
        LARGE_BLOCK_RECORDS). After bytes_max bytes of the log no further batch is begun. Waits only
        for reads from the disk.
        """
        self._problem = None
        if self._rest is not None:
            return self._take_rest(records_max)
        capacity = LARGE_BLOCK_RECORDS if records_max > BLOCK_RECORDS and self.lag() > BLOCK_RECORDS else BLOCK_RECORDS
        for _ in range(TURNS_MAX):
            block = self._pool.take(capacity)
            state = self._reader.next(block, bytes_max, self.check_crc, records_max)
            if block.count:
                return self._view(block, block.count, self._reader.hold(block))
            if state.stop == ReadStop.COMPRESSED:
                batch = self._read_compressed(block, state, min(bytes_max, DECOMPRESSED_TOGETHER_BYTES), records_max)
                if batch is not None or self._problem is not None:
                    return batch
            elif state.stop not in (ReadStop.SEGMENT, ReadStop.FULL):
                self._note_problem(state)
                return None
        return None

    def _note_problem(self, state: ReadState) -> None:
        kind = _PROBLEM_KINDS.get(state.stop)
        if kind is not None:
            self._problem = Problem(kind, state.kafka_error, state.problem)

    def _take_rest(self, records_max: int) -> RecordBatchView:
        rest = self._rest
        assert rest is not None
        if len(rest) <= records_max:
            self._rest = None
            return rest
        self._rest = rest[records_max:]
        return rest[:records_max]

    def _view(self, block: Block, count: int, base: memoryview | bytes) -> RecordBatchView:
        columns = [
            getattr(block, name)[:count]
            for name in (
                "offsets",
                "timestamps_ms",
                "key_positions",
                "key_bytes",
                "value_positions",
                "value_bytes",
                "header_positions",
                "header_bytes",
            )
        ]
        if count * 4 < block.capacity:  # so that views of a few records do not keep a whole block
            columns = [column.copy() for column in columns]
        offsets, timestamps, key_positions, key_bytes, value_positions, value_bytes, header_positions, header_bytes = (
            columns
        )
        # a header section of one byte is a count of 0
        headers = Blobs(base, header_positions, header_bytes) if int(header_bytes.max()) > 1 else None
        return RecordBatchView(
            self.topic,
            self.partition,
            offsets,
            timestamps,
            Blobs(base, key_positions, key_bytes),
            Blobs(base, value_positions, value_bytes),
            headers,
            block.view.leader_epoch,
            timestamp_type_of(block.view.timestamp_type),
        )

    # -- compressed batches ------------------------------------------------------------------------

    def _read_compressed(
        self, block: Block, state: ReadState, bytes_max: int, records_max: int
    ) -> RecordBatchView | None:
        """Reads the compressed batch that `state` describes, and the following batches that fit. None: there
        are no records to return, or self._problem is set.
        """
        parts: list[bytes] = []
        count = size = 0
        joined_attributes: tuple[int, int] | None = None
        limit, batch_block = min(records_max, block.capacity), block
        while state.stop == ReadStop.COMPRESSED and count < limit and size < bytes_max:
            batch, payload = compressed_batch(batch_block, state)
            attributes, record_count = (batch.leader_epoch, batch.timestamp_type), batch.record_count
            if count and (attributes != joined_attributes or count + record_count > limit):
                break
            # compaction leaves batches without records
            data = self._decompress(state.codec, payload) if record_count else b""
            if data is None:
                break
            if record_count * RECORD_BYTES_MIN > len(data):
                self._problem = Problem(
                    "corrupt",
                    CORRUPT_MESSAGE,
                    f"a batch at offset {self._reader.position} claims {record_count} records in {len(data)} bytes",
                )
                break
            if record_count > block.capacity:  # only possible for the first batch
                block = self._pool.take(record_count)
            try:
                added_count = fill_from_records(block, count, batch.header, data, self._reader.position)
            except NativeError as error:
                self._problem = Problem("corrupt", CORRUPT_MESSAGE, str(error.strerror))
                break
            if size:
                for column in (block.key_positions, block.value_positions, block.header_positions):
                    column[count : count + added_count] += size
            parts.append(data)
            joined_attributes, count, size = attributes, count + added_count, size + len(data)
            self._reader.skip()
            batch_block = self._probe
            try:
                state = self._reader.next(batch_block, 1, self.check_crc, 0)
            except NativeError:
                break  # the next read() after these records reads that batch again
        if not count:
            return None
        self._problem = None  # the problem is found again after these records
        self._rest = self._view(block, count, parts[0] if len(parts) == 1 else b"".join(parts))
        return self._take_rest(records_max)

    def _decompress(self, codec: int, payload: memoryview) -> bytes | None:
        try:
            return decompress(codec, payload)
        except ProtocolError as error:
            self._problem = Problem("corrupt", CORRUPT_MESSAGE, f"the batch at offset {self._reader.position}: {error}")
            return None
