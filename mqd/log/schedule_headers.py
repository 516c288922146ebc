"""The headers of a record in a topic with `schedule.to`: when it is delivered, or which pending
record it cancels. Used by the acceptor, which refuses records with invalid headers, and by the
timer, which delivers.

    mqd-deliver-at: MS     at this time, in milliseconds since the epoch
    mqd-delay-ms: MS       this long after the record's timestamp; without either, schedule.delay.ms
    mqd-cancel: OFFSET     neither this record nor the pending one at OFFSET is delivered
    mqd-replace: OFFSET    this record is delivered instead of the pending one at OFFSET

Values are decimal ASCII. As everywhere in Kafka, the last of several headers with the same name
applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mqd.protocol.records import read_blob, read_headers, read_varint

DELIVER_AT, DELAY, CANCEL, REPLACE = "mqd-deliver-at", "mqd-delay-ms", "mqd-cancel", "mqd-replace"
HEADERS = frozenset((DELIVER_AT, DELAY, CANCEL, REPLACE))
DELAY_MS_MAX = 366 * 86_400_000  # a year, even a leap year
# Groups with this prefix hold the progress of schedules; transactional ids with the same prefix
# fence old timers.
GROUP_PREFIX = "__mqd-timer."
_PREFIX = b"mqd-"
_DIGITS_MAX = 18  # fits into int64


class InvalidScheduleHeader(ValueError):
    """A header is invalid; the message says which and why."""


class DeliveryPlan(NamedTuple):
    due_ms: int  # -1: the record itself is not delivered
    cancelled_offset: int = -1  # offset of the pending record that is not delivered; -1: none


def plan_delivery(
    encoded_headers: bytes | None, timestamp_ms: int, default_delay_ms: int, now_ms: int | None = None
) -> DeliveryPlan:
    """`encoded_headers`: the record's headers as stored in the log. `now_ms`: the due time may be
    at most DELAY_MS_MAX after it; None: not checked. Raises InvalidScheduleHeader.
    """
    values = _schedule_headers(encoded_headers)
    cancelled_offset = -1
    if CANCEL in values:
        if len(values) > 1:
            raise InvalidScheduleHeader(f"{CANCEL} cannot be combined with {DELIVER_AT}, {DELAY} or {REPLACE}")
        return DeliveryPlan(-1, _number(CANCEL, values[CANCEL]))
    if REPLACE in values:
        cancelled_offset = _number(REPLACE, values[REPLACE])
    if DELIVER_AT in values:
        if DELAY in values:
            raise InvalidScheduleHeader(f"{DELIVER_AT} cannot be combined with {DELAY}")
        due_ms = _number(DELIVER_AT, values[DELIVER_AT])
    else:
        delay_ms = _number(DELAY, values[DELAY]) if DELAY in values else default_delay_ms
        if delay_ms > DELAY_MS_MAX:
            raise InvalidScheduleHeader(f"{DELAY} is more than a year ({DELAY_MS_MAX})")
        due_ms = max(timestamp_ms, 0) + delay_ms
    if now_ms is not None and due_ms > now_ms + DELAY_MS_MAX:
        raise InvalidScheduleHeader("it would be delivered more than a year from now")
    return DeliveryPlan(due_ms, cancelled_offset)


def _schedule_headers(encoded: bytes | None) -> dict[str, bytes | None]:
    if encoded is None or _PREFIX not in encoded:
        return {}
    try:
        headers, _ = read_headers(encoded, 0, len(encoded), "replace")
    except (ValueError, IndexError) as error:
        raise InvalidScheduleHeader(f"its headers cannot be read: {error}") from None
    return {name: value for name, value in headers if name in HEADERS}


def header_sections(records: bytes, record_count: int) -> Iterator[tuple[int, bytes]]:
    """Yields the timestamp delta and the encoded headers of each record. `records`: those of a
    batch, decompressed and validated.
    """
    position = 0
    for _ in range(record_count):
        size, position = read_varint(records, position)
        end = position + size
        timestamp_delta, position = read_varint(records, position + 1)
        _, position = read_varint(records, position)
        for field in ("a key", "a value"):
            _, position = read_blob(records, position, end, field)
        yield timestamp_delta, records[position:end]
        position = end


def _number(name: str, value: bytes | None) -> int:
    if value is None or not value.isdigit() or len(value) > _DIGITS_MAX:
        raise InvalidScheduleHeader(f"{name} is not a decimal number of 1 to {_DIGITS_MAX} digits")
    return int(value)
