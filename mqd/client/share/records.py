"""Reads the response of a share group's fetch: the acquired records, the offsets that are gaps, and
those that cannot be read. Sans-I/O.

A response has whole batches and the offsets that the member has acquired; other offsets of the same
batches belong to other members. An acquired offset without a record (a control record, an aborted
record, or one removed by compaction) is a gap. Offsets in a batch that cannot be read are rejected:
otherwise they would be redelivered forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mqd.client.messages import Message
from mqd.client.record_batch import Blobs, RecordBatchView, timestamp_type_of
from mqd.client.share.events import GAP, REJECT, Range, TopicPartitionKey
from mqd.native.core import NativeError
from mqd.native.reader import Block, fill_from_records
from mqd.protocol.compression import decompress
from mqd.protocol.errors import ProtocolError
from mqd.protocol.messages import ShareFetchResponse
from mqd.protocol.records import (
    COMPRESSION_MASK,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    BatchHeader,
    has_valid_crc,
    iterate_batches,
)

OFFSET_MAX = (1 << 63) - 1
Acquired = ShareFetchResponse.AcquiredRecords


class ShareMessage(Message):
    """A record that a share group's member has acquired."""

    __slots__ = ("_delivery_count",)
    _delivery_count: int

    def delivery_count(self) -> int:
        """How many times the record has been acquired, including this time."""
        return self._delivery_count

    def __reduce__(self) -> tuple:
        return _unpickle, (self._fields(), self._delivery_count)


def _unpickle(fields: tuple, delivery_count: int) -> ShareMessage:
    message = ShareMessage(*fields)
    message._delivery_count = delivery_count
    return message


class Fetched(NamedTuple):
    """`offsets`: those of the messages. `acknowledgements`: gaps and rejections. `problem`: why records
    were rejected, or "".
    """

    messages: list[ShareMessage]
    offsets: list[int]
    acknowledgements: list[Range]
    problem: str = ""


def read(
    topic_partition: TopicPartitionKey, data: bytes | None, acquired: Iterable[Acquired], checks_crcs: bool
) -> Fetched:
    """Returns the acquired records of one partition. Its running time depends on how many records and
    acquired ranges there are, not on the length of the ranges. Raises ProtocolError if the ranges are
    invalid.
    """
    runs = _check_runs(acquired)
    fetched = Fetched([], [], [])
    problem = ""
    end = runs[0].first_offset if runs else 0  # the offset after those handled so far
    try:
        for header, batch in iterate_batches(data or b"", allow_partial=True) if runs else ():
            if header.last_offset < end:
                continue
            view = None
            if not header.is_control:
                try:
                    view = _decode_records(topic_partition, header, batch, end, checks_crcs)
                except (ProtocolError, NativeError) as error:
                    rejected = _within(runs, max(header.base_offset, end), header.last_offset, REJECT)
                    fetched.acknowledgements.extend([*_within(runs, end, header.base_offset - 1, GAP), *rejected])
                    problem = (
                        problem
                        or f"{topic_partition[0]} [{topic_partition[1]}], batch at offset {header.base_offset}: {error}"
                    )
                    end = header.last_offset + 1
                    continue
            _add_acquired(view, runs, end, header.last_offset, fetched)
            end = header.last_offset + 1
    except ProtocolError as error:
        fetched.acknowledgements.extend(_within(runs, end, OFFSET_MAX, REJECT))
        problem = problem or f"{topic_partition[0]} [{topic_partition[1]}] at offset {end} and later: {error}"
    else:
        fetched.acknowledgements.extend(_within(runs, end, OFFSET_MAX, GAP))
    return fetched._replace(problem=problem)


def _check_runs(acquired: Iterable[Acquired]) -> list[Acquired]:
    runs, end = list(acquired), 0
    for run in runs:
        if not end <= run.first_offset <= run.last_offset < OFFSET_MAX or run.delivery_count < 1:
            raise ProtocolError(
                f"acquired offsets {run.first_offset} to {run.last_offset}, delivery count {run.delivery_count}, after"
                f" a range that ends at {end - 1}",
                "ShareFetch response",
                "acquired_records",
            )
        end = run.last_offset + 1
    return runs


def _within(runs: list[Acquired], first: int, last: int, ack_type: int) -> list[Range]:
    """Returns the acquired offsets from `first` to `last`, as ranges."""
    return [
        Range(max(run.first_offset, first), min(run.last_offset, last), ack_type)
        for run in runs
        if run.first_offset <= last and run.last_offset >= first and first <= last
    ]


def _decode_records(
    topic_partition: TopicPartitionKey, header: BatchHeader, batch: memoryview, first: int, checks_crcs: bool
) -> RecordBatchView | None:
    """Returns the records of a batch whose offsets are at least `first`."""
    if checks_crcs and not has_valid_crc(batch):
        raise ProtocolError("its checksum is wrong", "record batch", "crc")
    codec, payload = header.attributes & COMPRESSION_MASK, batch[HEADER_BYTES:]
    data = bytes(decompress(codec, payload)) if codec else bytes(payload)
    if header.record_count * RECORD_BYTES_MIN > len(data):
        raise ProtocolError(f"{header.record_count} records in {len(data)} bytes", "record batch", "record_count")
    if not header.record_count:
        return None
    block = Block(header.record_count)
    count = fill_from_records(block, 0, bytes(batch[:HEADER_BYTES]), data, first)
    if not count:
        return None
    offsets = block.offsets[:count]
    if int(offsets[-1]) > header.last_offset or (count > 1 and bool((offsets[1:] <= offsets[:-1]).any())):
        raise ProtocolError("offsets do not ascend, or exceed the last offset", "record batch", "offset_delta")
    sections = Blobs(data, block.header_positions[:count], block.header_bytes[:count])
    return RecordBatchView(
        *topic_partition,
        offsets,
        block.timestamps_ms[:count],
        Blobs(data, block.key_positions[:count], block.key_bytes[:count]),
        Blobs(data, block.value_positions[:count], block.value_bytes[:count]),
        # a section of one byte has no headers
        sections if int(block.header_bytes[:count].max()) > 1 else None,
        block.view.leader_epoch,
        timestamp_type_of(block.view.timestamp_type),
    )


def _add_acquired(view: RecordBatchView | None, runs: list[Acquired], first: int, last: int, fetched: Fetched) -> None:
    """Adds the acquired offsets from `first` to `last` to `fetched`: records of `view`, and gaps."""
    for run in runs:
        low, high = max(run.first_offset, first), min(run.last_offset, last)
        if low > high:
            continue
        if view is None:
            fetched.acknowledgements.append(Range(low, high, GAP))
            continue
        begin, end = view.offsets.searchsorted([low, high + 1]).tolist()
        messages, offsets = [], []
        if begin < end:
            part = view[begin:end]
            offsets, messages = part.offsets.tolist(), list(part.messages(ShareMessage))
            for message in messages:
                message._delivery_count = run.delivery_count
            fetched.messages.extend(messages)
            fetched.offsets.extend(offsets)
        if len(offsets) < high - low + 1:
            fetched.acknowledgements.extend(_gaps(offsets, low, high))


def _gaps(offsets: list[int], low: int, high: int) -> list[Range]:
    """Returns the offsets from `low` to `high` that are not in `offsets`, as ranges."""
    gaps, position = [], low
    for offset in offsets:
        if offset > position:
            gaps.append(Range(position, offset - 1, GAP))
        position = offset + 1
    if position <= high:
        gaps.append(Range(position, high, GAP))
    return gaps
