"""The C client's Python interface without a broker: columns are checked before C reads them, and
batches equal those of the protocol's encoder byte for byte.
"""

from __future__ import annotations

import errno
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mqd.native import E_INVALID, NativeError, ffi
from mqd.native import client as native_client
from mqd.native.client import Client, Columns, Delivery, Partitioner, Producer, partition_for, records_encode
from mqd.protocol.records import Record, encode_batch


def _sizes(blobs: list[bytes | None]) -> np.ndarray:
    return np.array([-1 if blob is None else len(blob) for blob in blobs], np.int32)


def _joined(blobs: list[bytes | None]) -> bytes:
    return b"".join(blob or b"" for blob in blobs)


def _blob(chance: random.Random) -> bytes | None:
    return None if chance.random() < 0.2 else chance.randbytes(chance.choice((0, 1, 5, 63, 64, 300, 9000)))


def _encoded(columns: Columns, room: int = 1 << 20) -> bytes:
    out = bytearray(room)
    size, taken = records_encode(columns, out)
    assert taken == columns.count
    return bytes(out[:size])


@pytest.mark.parametrize("seed", range(5))
def test_batches_equal_the_protocol_encoders(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 100)
    values, keys = [_blob(chance) for _ in range(count)], [_blob(chance) for _ in range(count)]
    times = [chance.choice((0, 5, 1_700_000_000_000, -1)) + chance.randrange(100) for _ in range(count)]
    columns = Columns(
        count=count,
        values=_joined(values),
        value_bytes=_sizes(values),
        keys=_joined(keys),
        key_bytes=_sizes(keys),
        timestamps_ms=np.array(times, np.int64),
    )
    records = [Record(value, key, time) for value, key, time in zip(values, keys, times, strict=True)]
    assert _encoded(columns, 4 << 20) == encode_batch(records)


def test_columns_that_are_the_same_for_all() -> None:
    columns = Columns(count=3, values=b"aabbcc", fixed_value_bytes=2, timestamp_ms=7)
    assert _encoded(columns) == encode_batch([Record(value, None, 7) for value in (b"aa", b"bb", b"cc")])
    assert _encoded(Columns(count=2, timestamp_ms=7)) == encode_batch([Record(None, None, 7)] * 2)


def test_header_sections_are_copied_unchanged() -> None:
    section = b"\x02\x02n\x02v"  # one header, "n": b"v"
    columns = Columns(
        count=2,
        values=b"ab",
        fixed_value_bytes=1,
        headers=section + b"\x00",
        header_bytes=np.array([5, 1], np.int32),
        timestamp_ms=7,
    )
    assert _encoded(columns) == encode_batch([Record(b"a", None, 7, [("n", b"v")]), Record(b"b", None, 7)])


def test_records_that_do_not_fit_are_left_for_the_next_batch() -> None:
    columns = Columns(count=100, values=bytes(1000), fixed_value_bytes=10, timestamp_ms=7)
    out = bytearray(61 + 17 * 40 + 5)
    size, taken = records_encode(columns, out)
    assert (size, taken) == (61 + 17 * 40, 40)
    assert bytes(out[:size]) == encode_batch([Record(bytes(10), None, 7)] * 40)
    assert records_encode(columns, bytearray(61)) == (0, 0)
    assert records_encode(columns, bytearray(1000), records_max=3)[1] == 3


@pytest.mark.parametrize(
    ("what", "columns"),
    [
        ("values has 5 bytes", {"count": 3, "values": b"short", "fixed_value_bytes": 2}),
        ("values has 1 bytes", {"count": 2, "values": b"a", "value_bytes": [1, 1]}),
        ("value_bytes has 1 elements", {"count": 2, "values": b"abc", "value_bytes": [1]}),
        ("keys has 0 bytes", {"count": 1, "key_bytes": [1]}),
        ("headers has 1 bytes", {"count": 1, "headers": b"\0", "header_bytes": [2]}),
        ("partitions has 1 elements", {"count": 2, "partitions": [0]}),
        ("timestamps_ms has 1 elements", {"count": 2, "timestamps_ms": [0]}),
    ],
)
def test_columns_too_short_never_reach_c(what: str, columns: dict) -> None:
    with pytest.raises(NativeError, match=what) as caught:
        records_encode(Columns(**columns), bytearray(1000))
    assert caught.value.code == E_INVALID


@pytest.mark.parametrize(
    "sizes",
    [
        {"value_bytes": [-2]},
        {"key_bytes": [-2]},
        {"headers": b"", "header_bytes": [0]},
        {"headers": b"", "header_bytes": [-1]},
    ],
)
def test_impossible_sizes_are_refused(sizes: dict) -> None:
    with pytest.raises(NativeError) as caught:
        records_encode(Columns(count=1, **sizes), bytearray(1000))
    assert caught.value.code == E_INVALID


def test_a_key_has_one_partition() -> None:
    # Java's UtilsTest
    assert partition_for(Partitioner.MURMUR2, b"foobar", 1 << 30) == (-790332482 & 0x7FFFFFFF) % (1 << 30)
    assert {partition_for(Partitioner.CONSISTENT_RANDOM, None, 3) for _ in range(200)} == {0, 1, 2}
    assert partition_for(Partitioner.RANDOM, b"x", 0) == -1


def test_without_a_broker_the_cause_is_reported(tmp_path) -> None:
    with pytest.raises(NativeError, match="check that the broker is running") as caught:
        Client(tmp_path / "client.sock")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(NativeError, match="must have 1 to 107 bytes"):
        Client("/" + "x" * 200)


def test_outcomes_interrupted_by_ctrl_c_are_returned_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C core reports each only once."""
    left = [3, 0]

    def deliveries(_pointer: Any, out: Any, _count: int) -> int:
        for index in range(count := left.pop(0)):
            out[index].batch = index + 1
        return count

    def interrupted(*_arguments: Any) -> Delivery:
        monkeypatch.setattr(native_client, "Delivery", Delivery)
        raise KeyboardInterrupt

    producer = Producer.__new__(Producer)
    producer._pointer, producer._unreturned_count, producer._deliveries = (
        object(),
        0,
        ffi.new("struct mqd_delivery[]", Producer.DELIVERIES_MAX),
    )
    monkeypatch.setattr(native_client, "lib", SimpleNamespace(mqd_producer_deliveries=deliveries))
    monkeypatch.setattr(native_client, "Delivery", interrupted)
    with pytest.raises(KeyboardInterrupt):
        producer.deliveries()
    assert [reported.batch for reported in producer.deliveries()] == [1, 2, 3] and producer.deliveries() == []
