"""Headers of scheduled records."""

from __future__ import annotations

import pytest

from mqd.log.schedule_headers import DELAY_MS_MAX, DeliveryPlan, InvalidScheduleHeader, header_sections, plan_delivery
from mqd.native import batches
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch

NOW_MS = 1_800_000_000_000
YEAR = DELAY_MS_MAX


def section(**headers: str | bytes | None) -> bytes:
    named = [
        (name.replace("_", "-"), value.encode() if isinstance(value, str) else value) for name, value in headers.items()
    ]
    return sections([Record(b"v", b"k", NOW_MS, named)])[0][1]


def sections(records: list[Record]) -> list[tuple[int, bytes]]:
    return list(header_sections(bytes(encode_batch(records)[HEADER_BYTES:]), len(records)))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, DeliveryPlan(NOW_MS + 7)),
        ({"mqd_other": "5"}, DeliveryPlan(NOW_MS + 7)),
        ({"mqd_delay_ms": "0"}, DeliveryPlan(NOW_MS)),
        ({"mqd_delay_ms": "250"}, DeliveryPlan(NOW_MS + 250)),
        ({"mqd_delay_ms": str(YEAR)}, DeliveryPlan(NOW_MS + YEAR)),
        ({"mqd_deliver_at": "0"}, DeliveryPlan(0)),
        ({"mqd_deliver_at": str(NOW_MS + 5)}, DeliveryPlan(NOW_MS + 5)),
        ({"mqd_cancel": "17"}, DeliveryPlan(-1, 17)),
        ({"mqd_replace": "17"}, DeliveryPlan(NOW_MS + 7, 17)),
        ({"mqd_replace": "17", "mqd_delay_ms": "1"}, DeliveryPlan(NOW_MS + 1, 17)),
    ],
)
def test_plans(headers: dict[str, str], expected: DeliveryPlan) -> None:
    assert plan_delivery(section(**headers), NOW_MS, 7, NOW_MS) == expected


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"mqd_delay_ms": "soon"}, "mqd-delay-ms is not a decimal number"),
        ({"mqd_delay_ms": "-1"}, "not a decimal number"),
        ({"mqd_delay_ms": ""}, "not a decimal number"),
        ({"mqd_delay_ms": None}, "not a decimal number"),
        ({"mqd_delay_ms": "9" * 19}, "not a decimal number"),
        ({"mqd_delay_ms": str(1_000_000 * YEAR)}, "more than a year"),
        ({"mqd_deliver_at": str(NOW_MS + YEAR + 1)}, "more than a year"),
        ({"mqd_deliver_at": "1", "mqd_delay_ms": "1"}, "mqd-deliver-at cannot be combined with mqd-delay-ms"),
        ({"mqd_cancel": "1", "mqd_delay_ms": "1"}, "mqd-cancel cannot be combined with"),
        ({"mqd_replace": "x"}, "mqd-replace is not"),
    ],
)
def test_invalid_values(headers: dict[str, str | None], word: str) -> None:
    with pytest.raises(InvalidScheduleHeader, match=word):
        plan_delivery(section(**headers), NOW_MS, 0, NOW_MS)


@pytest.mark.parametrize("headers", [{}, {"mqd_delay_ms": "0"}, {"mqd_other": "5"}])
def test_a_timestamp_far_in_the_future(headers: dict[str, str]) -> None:
    assert plan_delivery(section(**headers), NOW_MS + YEAR, 0, NOW_MS) == DeliveryPlan(NOW_MS + YEAR)
    with pytest.raises(InvalidScheduleHeader, match="more than a year"):
        plan_delivery(section(**headers), NOW_MS + YEAR + 1, 0, NOW_MS)


def test_invalid_header_sections() -> None:
    with pytest.raises(InvalidScheduleHeader, match="cannot be read"):
        plan_delivery(b"\x7fmqd-", NOW_MS, 0)


def test_the_last_of_equal_headers_counts_and_a_record_may_have_no_timestamp() -> None:
    record = Record(b"v", None, NOW_MS, [("mqd-delay-ms", b"1"), ("mqd-delay-ms", b"2")])
    assert plan_delivery(sections([record])[0][1], NOW_MS, 0) == DeliveryPlan(NOW_MS + 2)
    assert plan_delivery(None, -1, 5) == DeliveryPlan(5)


def test_sections_of_a_batch() -> None:
    records = [Record(b"v" * 300, None, NOW_MS + 3 * n, [("h", b"%d" % n)]) for n in range(200)]
    found = sections(records)
    assert [delta for delta, _ in found] == [3 * n for n in range(200)]
    assert all(b"%d" % n in one for n, (_, one) in enumerate(found))
    assert batches.validate_records(bytes(encode_batch(records)[HEADER_BYTES:]), 200, 1)[0] == 200
