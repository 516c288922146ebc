"""The records of a share group's fetch: acquired ones, gaps, and invalid ones."""

from __future__ import annotations

import pickle
import struct

import pytest

from mqd.client.share.events import GAP, REJECT, Range
from mqd.client.share.records import OFFSET_MAX, Acquired, Fetched, read
from mqd.protocol.errors import ProtocolError
from mqd.protocol.records import Record, encode_batch

PLACE = ("jobs", 3)


def batch(*offsets: int, last: int | None = None, **more) -> bytes:
    records = [Record(b"%d" % at, b"key", 1_000 + at, [("header", b"%d" % at)], at) for at in offsets]
    delta = None if last is None else last - offsets[0]
    return encode_batch(records, base_offset=offsets[0], last_offset_delta=delta, **more)


def run(first: int, last: int, count: int = 1) -> Acquired:
    return Acquired(first_offset=first, last_offset=last, delivery_count=count)


def fetched(data: bytes, *runs: Acquired, crc: bool = True) -> Fetched:
    found = read(PLACE, data, runs, crc)
    assert found.offsets == [message.offset() for message in found.messages]
    return found


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_acquired_records_of_a_batch_with_their_counts(compression: str) -> None:
    found = fetched(batch(*range(10, 20), compression=compression), run(12, 13), run(15, 16, 4))
    assert [(message.offset(), message.delivery_count()) for message in found.messages] == [
        (12, 1),
        (13, 1),
        (15, 4),
        (16, 4),
    ]
    message = found.messages[0]
    assert (message.topic(), message.partition(), message.key(), message.value()) == ("jobs", 3, b"key", b"12")
    assert message.headers() == [("header", b"12")] and message.timestamp()[1] == 1_012
    assert found.acknowledgements == [] and not found.problem


def test_offsets_without_a_record_are_gaps() -> None:
    data = batch(10, 12, last=14) + batch(20, 21)
    found = fetched(data, run(10, 21))
    assert found.offsets == [10, 12, 20, 21]
    assert covered(found) == dict.fromkeys([11, 13, 14, 15, 16, 17, 18, 19], GAP)


def test_control_batches_and_missing_offsets_are_gaps() -> None:
    marker = encode_batch([Record(b"m", b"k", offset=5)], base_offset=5, is_control=True)
    found = fetched(batch(3, 4) + marker, run(3, 9))
    assert found.offsets == [3, 4] and covered(found) == {5: GAP, 6: GAP, 7: GAP, 8: GAP, 9: GAP}


def covered(found: Fetched) -> dict[int, int]:
    kinds: dict[int, int] = {}
    for one in found.acknowledgements:
        for offset in range(one.first, one.last + 1):
            assert kinds.setdefault(offset, one.type) == one.type and offset not in found.offsets
            kinds[offset] = one.type
    return kinds


def test_a_damaged_batch_is_rejected_and_the_next_one_read() -> None:
    damaged = bytearray(batch(4, 5, 6))
    damaged[-1] ^= 1
    found = fetched(batch(2, 3) + bytes(damaged) + batch(7, 8), run(2, 8))
    assert found.offsets == [2, 3, 7, 8] and covered(found) == {4: REJECT, 5: REJECT, 6: REJECT}
    assert "offset 4" in found.problem and "checksum" in found.problem


def test_a_batch_that_declares_too_many_records_is_rejected() -> None:
    lying = bytearray(batch(0, 1))
    struct.pack_into(">i", lying, 57, 1 << 30)
    found = fetched(bytes(lying), run(0, 1), crc=False)
    assert not found.offsets and covered(found) == {0: REJECT, 1: REJECT} and "1073741824" in found.problem


def test_a_batch_with_an_invalid_header_rejects_the_rest() -> None:
    data = bytearray(batch(2, 3))
    data[16] = 1  # magic
    found = fetched(batch(0, 1) + bytes(data), run(0, 3))
    assert found.offsets == [0, 1] and covered(found) == {2: REJECT, 3: REJECT} and "magic" in found.problem


def test_the_cost_of_a_run_depends_only_on_its_records() -> None:
    found = fetched(batch(0, 1), run(0, OFFSET_MAX - 1))
    assert found.offsets == [0, 1] and found.acknowledgements == [Range(2, OFFSET_MAX - 1, GAP)]


@pytest.mark.parametrize(
    "runs",
    [[run(5, 4)], [run(-1, 4)], [run(0, 4), run(4, 5)], [run(8, 9), run(0, 4)], [run(0, OFFSET_MAX)], [run(0, 1, 0)]],
)
def test_invalid_runs_are_refused(runs: list[Acquired]) -> None:
    with pytest.raises(ProtocolError, match="acquired"):
        read(PLACE, batch(0, 1), runs, True)


def test_no_acquired_records() -> None:
    assert fetched(batch(0, 1)) == Fetched([], [], [])
    assert read(PLACE, None, [run(3, 4)], True).acknowledgements == [Range(3, 4, GAP)]


def test_a_message_survives_pickle() -> None:
    (message,) = fetched(batch(7), run(7, 7, 2)).messages
    again = pickle.loads(pickle.dumps(message))
    assert again == message and again.delivery_count() == 2 and again.headers() == [("header", b"7")]
