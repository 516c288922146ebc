"""Encodes dead letters (KIP-1191): their error headers, and the transactional batches that hold
them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mqd.coordinator.share.dead_letter_writer import Letter
from mqd.protocol.records import Record, encode_batch

PREFIX = "__dlq.errors."
REJECTED_MESSAGE = "Offset rejected by client."
EXHAUSTED_MESSAGE = "Offset delivery count exceeded the threshold."
RECORD_OVERHEAD_BYTES = 64  # upper bound of the encoded size of a record's length and time fields
BATCH_OVERHEAD_BYTES = 61


class LetterSource(NamedTuple):
    """The share-partition that the letters come from, and its delivery limit."""

    topic: str
    partition: int
    group_id: str
    delivery_limit: int


class CopiedFields(NamedTuple):
    """The parts of a record that are copied into its dead letter."""

    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def headers_of(source: LetterSource, letter: Letter) -> list[tuple[str, bytes | None]]:
    is_exhausted = letter.deliveries >= source.delivery_limit
    values = {
        "topic": source.topic,
        "partition": source.partition,
        "offset": letter.offset,
        "group": source.group_id,
        "delivery.count": letter.deliveries,
        "message": EXHAUSTED_MESSAGE if is_exhausted else REJECTED_MESSAGE,
    }
    return [(PREFIX + name, str(value).encode()) for name, value in values.items()]


def size_upper_bound(record: Record) -> int:
    return (
        RECORD_OVERHEAD_BYTES
        + len(record.key or b"")
        + len(record.value or b"")
        + sum(len(name.encode()) + len(value or b"") + 10 for name, value in record.headers)
    )


def letter_records(
    source: LetterSource, letters: Sequence[Letter], copied: dict[int, CopiedFields], now_ms: int, batch_bytes_max: int
) -> list[Record]:
    """`copied`: by offset, what the letters copy from their source records. A letter that would
    exceed the maximum size of a batch has only its error headers.
    """
    records = []
    for letter in letters:
        error_headers = headers_of(source, letter)
        source_record = copied.get(letter.offset, CopiedFields())
        # a record that is itself a dead letter: the new error headers replace the old ones
        kept_headers = [header for header in source_record.headers if not header[0].startswith(PREFIX)]
        record = Record(
            key=source_record.key,
            value=source_record.value,
            headers=[*kept_headers, *error_headers],
            timestamp_ms=now_ms,
        )
        if size_upper_bound(record) + BATCH_OVERHEAD_BYTES > batch_bytes_max:
            record = Record(key=None, value=None, headers=error_headers, timestamp_ms=now_ms)
        records.append(record)
    return records


def batches(records: Iterable[Record], batch_bytes_max: int, producer_id: int, producer_epoch: int) -> list[bytes]:
    """Transactional batches without sequence numbers, as coordinators write them."""
    groups: list[list[Record]] = []
    bytes_left = 0
    for record in records:
        size = size_upper_bound(record)
        if not groups or size > bytes_left:
            groups.append([])
            bytes_left = batch_bytes_max - BATCH_OVERHEAD_BYTES
        groups[-1].append(record)
        bytes_left -= size
    return [
        encode_batch(group, producer_id=producer_id, producer_epoch=producer_epoch, is_transactional=True)
        for group in groups
    ]
