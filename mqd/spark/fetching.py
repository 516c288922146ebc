"""A partition's records over TCP: one Fetch after another, the next in flight while the records
of the current one are processed. No work is done per record.

    # RecordBatchViews, in order, up to the range's end
    for view in TcpBatchViews(cluster, options, range_, report_loss).views(): ...

    F1  `position` is the offset after the last yielded record; a broken connection or a moved
        leader costs only one Fetch
    F2  the records of a response are used in place: a view is valid until the next one is requested
    F3  a response is untrusted: every length is checked against the remaining bytes before it is
        used
    F4  a reader that gets no records for poll_timeout_s, although the range has some, fails instead
        of skipping them
    F5  one broker's response is not enough to report a loss, as for the driver (progress.py S6): a
        missing topic is requested again for MISSING_S, from other brokers too
Sources: the public protocol guide's Fetch, versions 13 to 17; KIP-74 (the first batch is returned
whole), KIP-392 (the nearest replica), KIP-98 (aborted transactions).
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from mqd.client.shm.reading import BlockPool, PartitionReader
from mqd.native import NativeError
from mqd.native.reader import SegmentReader, batches_extent
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FetchRequest
from mqd.spark.options import SourceOptions
from mqd.spark.planning import Range
from mqd.spark.wire import MISSING_CODES, BrokerConnection, BrokerError, Cluster, MqdReadError, is_retriable

log = logging.getLogger("mqd.spark")

VERSION_MIN, VERSION_MAX = 13, 17
MAX_WAIT_MS = 500
FRAME_ROOM_BYTES = 64 << 10  # for the parts of a response other than its records
RECORDS_MAX, BYTES_MAX = 16384, 2 << 20  # limits of one view, so that its columns stay in the CPU cache
PAUSE_S = 0.05
MISSING_S = 5.0  # F5
FETCH = 1  # API key


class PartitionResponse(msgspec.Struct):
    """The response to a Fetch for one partition."""

    error: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]]  # (producer id, first offset)
    preferred_replica: int
    records: memoryview


class _Cursor:
    """Reads a frame; raises ValueError where it ends too early (F3)."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.position = view, 0

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        if layout.size > len(self.view) - self.position:
            raise ValueError(f"cut off at byte {self.position}")
        values = layout.unpack_from(self.view, self.position)
        self.position += layout.size
        return values

    def unsigned_varint(self) -> int:
        value = shift = 0
        while True:
            if self.position >= len(self.view) or shift > 28:
                raise ValueError(f"a length is cut off or too long at byte {self.position}")
            byte = self.view[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def bytes(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.view) - self.position:
            raise ValueError(f"{size} bytes at byte {self.position}, where {len(self.view) - self.position} remain")
        self.position += size
        return self.view[self.position - size : self.position]

    def skip_tags(self) -> None:
        for _ in range(self.unsigned_varint()):
            self.unsigned_varint()
            self.bytes(self.unsigned_varint())


_CORRELATION_ID = struct.Struct(">i")
_TOP_FIELDS = struct.Struct(">ihi")  # throttle time, error, session id
_PARTITION = struct.Struct(">ihqqq")  # index, error, high watermark, last stable offset, log start offset
_ABORTED = struct.Struct(">qq")  # producer id, first offset
_INT32 = struct.Struct(">i")


def parse_response(frame: memoryview, correlation_id: int, topic_id: bytes, partition: int) -> PartitionResponse:
    """The response to a Fetch of version 13 to 17 for one partition; its records are a slice of the
    frame. Raises ValueError for anything else, BrokerError for an error of the whole request.
    """
    cursor = _Cursor(frame)
    (response_id,) = cursor.take(_CORRELATION_ID)
    if response_id != correlation_id:
        raise ValueError(f"a response to request {response_id} where {correlation_id} was expected")
    cursor.skip_tags()
    _, error, _ = cursor.take(_TOP_FIELDS)
    if error:
        raise BrokerError(error, "fetch")
    if cursor.unsigned_varint() != 2 or bytes(cursor.bytes(16)) != topic_id or cursor.unsigned_varint() != 2:
        raise ValueError("a response about partitions that were not requested")
    index, error, high_watermark, last_stable_offset, log_start_offset = cursor.take(_PARTITION)
    if index != partition:
        raise ValueError(f"a response about partition {index} where {partition} was expected")
    aborted = []
    for _ in range(max(0, cursor.unsigned_varint() - 1)):
        aborted.append(cursor.take(_ABORTED))
        cursor.skip_tags()
    (preferred_replica,) = cursor.take(_INT32)
    return PartitionResponse(
        error,
        high_watermark,
        last_stable_offset,
        log_start_offset,
        aborted,
        preferred_replica,
        cursor.bytes(max(0, cursor.unsigned_varint() - 1)),
    )


class _LookupNeeded(Exception):
    """The leader must be looked up again before a retry; the text is reported if no retry
    succeeds.
    """


class _Missing(_LookupNeeded):
    """The requested topic or partition does not exist; the lookup is repeated as in F5."""


class TcpBatchViews:
    """See the module's docstring. `report_loss(offset, text)` reports lost records; it raises
    (failOnDataLoss), or reading continues at `offset`.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: SourceOptions,
        range_: Range,
        report_loss: Callable[[int, str], None],
        pool: BlockPool | None = None,
    ) -> None:
        self._cluster, self._options, self._range, self._report_loss = cluster, options, range_, report_loss
        self._pool = pool or BlockPool()
        self._connection: BrokerConnection | None = None
        self._isolation = int(options.kafka.read_committed)
        self._topic_id = range_.topic_id
        self._replica = -1  # node to read from, as named by the leader; -1: the leader itself
        self._missing_since_s: float | None = None
        buffer_bytes = min(options.kafka.fetch_bytes_max, 64 << 20) + FRAME_ROOM_BYTES
        self._buffers = [bytearray(buffer_bytes), bytearray(buffer_bytes)]
        self._last_progress_s = time.monotonic()
        self.position = range_.start

    @property
    def name(self) -> str:
        return f"{self._range.topic}-{self._range.partition}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def continue_at(self, position: int) -> None:
        """Continues where another reader stopped. The timeout of F4 restarts."""
        self.position, self._last_progress_s = position, time.monotonic()

    def views(self) -> Iterator[Any]:
        """The records from `position` to the range's end. Raises MqdReadError."""
        pause_s = PAUSE_S
        while self.position < self._range.end:
            previous_position = self.position
            try:
                if self._connection is None:
                    self._connect()
                yield from self._read()
            except (_LookupNeeded, OSError, BrokerError) as error:
                self.close()
                if self.position > previous_position:
                    pause_s, self._last_progress_s = PAUSE_S, time.monotonic()
                else:
                    pause_s = min(2 * pause_s, 1.0)
                    if not isinstance(error, _Missing):
                        self._check_timeout(str(error))
                time.sleep(pause_s)  # there is no notification when the broker is back

    def _check_timeout(self, text: str) -> None:
        """Raises MqdReadError after poll_timeout_s without records (F4)."""
        if time.monotonic() - self._last_progress_s > self._options.poll_timeout_s:
            raise MqdReadError(
                f"{self.name}: no records from offset {self.position} on (range {self._range.start} to"
                f" {self._range.end}) within {self._options.poll_timeout_s:g} s: {text or 'the broker returns none'}."
                " kafkaConsumer.pollTimeoutMs sets how long to wait"
            )

    # -- choice of the broker ----------------------------------------------------------------------

    def _connect(self) -> None:
        """Connects to the leader, or to the replica that the leader named. The rest of the range is
        reported as lost if the topic does not exist or was recreated.
        """
        metadata = self._cluster.metadata([self._range.topic])
        topic = metadata.topics.get(self._range.topic)
        if topic is not None and not topic.error and not self._topic_id:
            self._topic_id = topic.topic_id
        if (
            topic is None
            or topic.error in MISSING_CODES
            or (not topic.error and topic.topic_id != self._topic_id)
            or (not topic.error and self._range.partition not in topic.leaders)
        ):
            if self._missing_since_s is None:
                self._missing_since_s = time.monotonic()
            if time.monotonic() - self._missing_since_s < MISSING_S:
                self._cluster.prefer_other_brokers()
                raise _Missing("the topic or partition does not exist")
            problem = (
                "was deleted and recreated under the same name"
                if topic is not None and not topic.error and self._range.partition in topic.leaders
                else "does not exist any more"
            )
            self._report_loss(
                self._range.end,
                f"the topic or partition {problem}: offsets {self.position} to {self._range.end} cannot be read",
            )
            self.position = self._range.end
            raise _LookupNeeded
        self._missing_since_s = None
        leader = topic.leaders[self._range.partition] if not topic.error else -1
        if leader < 0:
            raise _LookupNeeded("the partition has no leader at present")
        node = self._replica if self._replica in metadata.brokers else leader
        self._connection = self._cluster.new_connection(node)
        self._version = self._connection.pick(FETCH, VERSION_MAX)
        if self._version < VERSION_MIN:
            raise MqdReadError(
                f"the broker {self._connection.host}:{self._connection.port} supports Fetch up to version"
                f" {self._version}; format mqd needs {VERSION_MIN} (topics by id): use"
                ' format("kafka") instead'
            )
        self._connection.set_timeout(self._options.kafka.request_timeout_s + MAX_WAIT_MS / 1000)

    def _request(self, offset: int) -> int:
        assert self._connection is not None
        size = self._options.kafka.fetch_bytes_max
        requested = FetchRequest.Partition(
            partition=self._range.partition, fetch_offset=offset, partition_max_bytes=size
        )
        request = FetchRequest(
            max_wait_ms=MAX_WAIT_MS,
            min_bytes=1,
            max_bytes=size,
            isolation_level=self._isolation,
            topics=[FetchRequest.Topic(topic_id=self._topic_id, partitions=[requested])],
            rack_id=self._options.kafka.rack,
        )
        return self._connection.send(request, self._version)

    # -- responses ---------------------------------------------------------------------------------

    def _read(self) -> Iterator[Any]:
        """Reads over the current connection until an error. The next Fetch is sent before the
        records of this one are processed.
        """
        correlation_id, buffer_index = self._request(self.position), 0
        while self.position < self._range.end:
            assert self._connection is not None
            frame = self._connection.receive(self._buffers[buffer_index])
            try:
                response = parse_response(frame, correlation_id, self._topic_id, self._range.partition)
            except ValueError as error:
                raise _LookupNeeded(
                    f"broker {self._connection.host}:{self._connection.port} does not respond like a Kafka broker:"
                    f" {error}"
                ) from error
            self._check_error(response)
            size, next_offset = self._extent(response)
            if next_offset is None:
                self._check_timeout(
                    f"the log ends at {response.high_watermark}, its committed part at {response.last_stable_offset}"
                )
                correlation_id = self._request(self.position)
                continue
            if next_offset < self._range.end:
                correlation_id, buffer_index = self._request(max(next_offset, self.position)), 1 - buffer_index
            yield from self._records(response, size, next_offset)
            self.position = max(self.position, next_offset)
            self._last_progress_s = time.monotonic()

    def _check_error(self, response: PartitionResponse) -> None:
        """Raises _LookupNeeded or MqdReadError. Offsets outside the log are reported as lost."""
        if (
            response.preferred_replica >= 0
            and not len(response.records)
            and not response.error
            and response.preferred_replica != self._replica
        ):
            self._replica = response.preferred_replica
            raise _LookupNeeded
        if not response.error:
            return
        self._replica = -1
        if response.error == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._handle_out_of_range()
            raise _LookupNeeded
        error = BrokerError(response.error, f"fetching {self.name} at offset {self.position}")
        # the next lookup shows whether the topic still exists
        if response.error in MISSING_CODES or is_retriable(response.error):
            raise _LookupNeeded(str(error))
        raise MqdReadError(str(error))

    def _handle_out_of_range(self) -> None:
        earliest, latest = (
            list_offset(self._cluster, self._range, timestamp, self._isolation) for timestamp in (-2, -1)
        )
        if self.position < earliest:
            self._report_loss(
                earliest,
                f"offsets {self.position} to {min(earliest, self._range.end) - 1} were deleted (retention or"
                f" DeleteRecords): the log starts at {earliest}",
            )
            self.position = min(earliest, self._range.end)
        elif self.position > latest:
            self._report_loss(
                self._range.end,
                f"offset {self.position} is beyond the log's end {latest}: the log was truncated, or the topic"
                " recreated",
            )
            self.position = self._range.end

    def _extent(self, response: PartitionResponse) -> tuple[int, int | None]:
        """Returns (size of the whole batches in bytes, the offset after them, or None if there is
        no batch).
        """
        try:
            size, next_offset = batches_extent(response.records) if len(response.records) else (0, None)
        except NativeError as error:
            raise self._corrupt(str(error.strerror)) from error
        if len(response.records) and next_offset is None:
            raise self._corrupt(f"{len(response.records)} bytes that are not a whole record batch")
        if next_offset is not None and next_offset <= self.position:
            raise self._corrupt(f"batches that end at offset {next_offset}")
        return size, next_offset

    def _corrupt(self, text: str) -> MqdReadError:
        return MqdReadError(
            f"{self.name}: a damaged record batch at offset {self.position}: {text}. `mqd log dump` shows it;"
            " to skip it, set startingOffsets to a later offset"
        )

    def _records(self, response: PartitionResponse, size: int, next_offset: int) -> Iterator[Any]:
        reader = PartitionReader(
            SegmentReader.of_memory(response.records[:size], self.position, self._isolation),
            self._range.topic,
            self._topic_id,
            self._range.partition,
            self.position,
            pool=self._pool,
        )
        reader.set_aborted(response.aborted, 2**63 - 1)
        try:
            while True:
                view = reader.read(RECORDS_MAX, BYTES_MAX)
                if view is None:
                    problem = reader.take_problem()
                    if problem is not None:
                        raise self._corrupt(problem.text)
                    if reader.position >= next_offset:
                        return
                    # the reader found no record up to `next_offset`, where the batches end
                    # according to their headers
                    if reader.position <= self.position:
                        raise self._corrupt(
                            f"batches up to offset {next_offset} whose records end at {reader.position}"
                        )
                    self.position = reader.position
                    continue
                self.position = reader.position
                yield view
        finally:
            reader.close()


def list_offset(cluster: Cluster, range_: Range, timestamp: int, isolation: int) -> int:
    """Returns a partition's earliest (-2) or latest (-1) offset, from its leader."""
    from mqd.spark.driver import list_offsets

    def attempt() -> int:
        return list_offsets(cluster, {(range_.topic, range_.partition): timestamp}, isolation)[
            range_.topic, range_.partition
        ]

    return cluster.with_retries(f"offsets of {range_.topic}-{range_.partition}", attempt)
