"""How many records a group has left to read of a partition that is being retired, not counting
offsets after the last record.
"""

from __future__ import annotations

import pytest

from mqd.cli.retirement import has_nothing_to_read
from mqd.coordinator.log import marker_batch
from mqd.protocol.records import Record, encode_batch

MINE, OTHER = 7, 8


def records(base_offset: int, count: int = 2, producer_id: int = MINE) -> bytes:
    return encode_batch(
        [Record(value=b"x") for _ in range(count)],
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=producer_id >= 0,
    )


def marker(offset: int, commit: bool, producer_id: int = MINE) -> bytes:
    return offset.to_bytes(8, "big") + marker_batch(producer_id, 0, 0, commit, 1)[8:]


@pytest.mark.parametrize(
    ("what", "data", "aborted", "offset", "end", "expected"),
    [
        ("a marker", marker(5, True), [], 5, 6, True),
        ("markers of two", marker(5, True) + marker(6, False, OTHER), [], 5, 7, True),
        ("an aborted transaction", records(5) + marker(7, False), [(MINE, 5)], 5, 8, True),
        ("one that began before", records(5) + marker(7, False), [(MINE, 3)], 6, 8, True),
        ("a committed transaction", records(5) + marker(7, True), [], 5, 8, False),
        (
            "aborted, then committed by the same",
            records(5) + marker(7, False) + records(8) + marker(10, True),
            [(MINE, 5)],
            5,
            11,
            False,
        ),
        (
            "aborted twice",
            records(5) + marker(7, False) + records(8) + marker(10, False),
            [(MINE, 5), (MINE, 8)],
            5,
            11,
            True,
        ),
        (
            "another's committed one between",
            records(5) + records(7, 1, OTHER) + marker(8, False) + marker(9, True, OTHER),
            [(MINE, 5)],
            5,
            10,
            False,
        ),
        ("no transaction's", records(5, 1, -1), [], 5, 6, False),
        ("read already, in the middle of a batch's end", records(3, 2, -1) + marker(5, True), [], 5, 6, True),
        ("open: not told of yet", b"", [], 5, 7, False),
        ("cut off", marker(5, True) + records(6)[:40], [], 5, 8, False),
    ],
)
def test_records_that_an_application_receives(
    what: str, data: bytes, aborted: list[tuple[int, int]], offset: int, end: int, expected: bool
) -> None:
    assert has_nothing_to_read(data, aborted, offset, end) == expected, what
