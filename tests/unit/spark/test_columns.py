"""Record batches into Arrow, compared with the decoder in Python: every codec, nulls, headers,
truncation, damage.
"""

from __future__ import annotations

import random

import pytest

pa = pytest.importorskip("pyarrow", reason="the Arrow columns need pyarrow: pip install 'mqd[spark]'")

from mqd.client.shm.reading import PartitionReader  # noqa: E402
from mqd.native import NativeError  # noqa: E402
from mqd.native.columns import ArrowRows  # noqa: E402
from mqd.native.reader import SegmentReader, batches_extent  # noqa: E402
from mqd.protocol.compression import CODECS  # noqa: E402
from mqd.protocol.records import Record, decode_records, encode_batch  # noqa: E402
from mqd.spark.reading import BatchBuilder  # noqa: E402
from mqd.spark.schema import column_names  # noqa: E402

ALL = column_names(include_headers=True)


def _random_record(rng: random.Random) -> Record:
    def blob(size_max: int) -> bytes | None:
        return None if rng.random() < 0.15 else rng.randbytes(rng.choice((0, 1, 5, rng.randrange(size_max))))

    headers = [(rng.choice(("", "a", "kopf", "ä€😀")), blob(20)) for _ in range(rng.choice((0, 0, 1, 3)))]
    return Record(
        value=blob(300),
        key=blob(40),
        timestamp_ms=rng.choice((-1, 0, 1_700_000_000_000 + rng.randrange(10**9))),
        headers=headers,
    )


def _log(rng: random.Random, codec: str, batch_count: int = 8) -> bytes:
    parts, offset = [], rng.randrange(100)
    for _ in range(batch_count):
        records = [_random_record(rng) for _ in range(rng.randrange(1, 40))]
        append_time = rng.choice((None, None, 1_600_000_000_000))
        parts.append(
            encode_batch(
                records,
                base_offset=offset,
                compression=codec,
                log_append_time_ms=append_time,
                last_offset_delta=len(records) + rng.randrange(3),
            )
        )
        offset += len(records) + rng.randrange(3, 6)
    return b"".join(parts)


def _batches(data: bytes, columns=ALL, rows_max: int = 64, start: int = 0, isolation: int = 0, aborted=()) -> list:
    size, following = batches_extent(data)
    assert size == len(data)
    reader = PartitionReader(SegmentReader.of_memory(data, start, isolation), "orders", b"", 3, start)
    reader.set_aborted(list(aborted), 2**63 - 1)
    builder, out = BatchBuilder(columns, "orders", 3, rows_max), []
    while reader.position < following:
        view = reader.read(50, 1 << 20)
        if view is None:
            problem = reader.take_problem()
            if problem is not None:
                raise ValueError(problem.text)
        else:
            out += builder.add(view)
    out += builder.remaining()
    for batch in out:
        batch.validate(full=True)
    return out


def _rows(batches: list) -> list[dict]:
    return [row for batch in batches for row in batch.to_pylist()]


def _expected(record: Record, kind: int) -> dict:
    return {
        "key": record.key,
        "value": record.value,
        "topic": "orders",
        "partition": 3,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "timestampType": kind,
        "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
    }


def _with_ms(row: dict) -> dict:
    return {**row, "timestamp": round(row["timestamp"].timestamp() * 1000)}


@pytest.mark.parametrize("codec", CODECS)
def test_the_result_equals_the_python_decoders(codec: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        data = _log(rng, codec)
        records = list(decode_records(data))
        rows = [_with_ms(row) for row in _rows(_batches(data))]
        assert rows == [_expected(record, row["timestampType"]) for record, row in zip(records, rows, strict=True)]
        assert {row["timestampType"] for row in rows} <= {0, 1}


def test_only_selected_columns_in_their_order() -> None:
    data = _log(random.Random(1), "none")
    first, *_ = _batches(data, ("offset", "topic", "value"), rows_max=1000)
    assert first.schema.names == ["offset", "topic", "value"]
    assert first.column("value").to_pylist() == [record.value for record in decode_records(data)]


def test_batches_keep_their_memory_while_others_are_filled() -> None:
    data = _log(random.Random(2), "none", batch_count=20)
    batches = _batches(data, rows_max=16)  # all are held at once
    assert len(batches) > 10
    assert [row["offset"] for row in _rows(batches)] == [record.offset for record in decode_records(data)]


def test_memory_is_reused() -> None:
    rows = ArrowRows(16, 1 << 12, ["value"])
    data = encode_batch([Record(value=b"x" * 100)] * 16)
    seen = set()
    for _ in range(20):
        reader = PartitionReader(SegmentReader.of_memory(data), "t", b"", 0, 0)
        assert rows.append(reader.read()) == 16
        count, columns = rows.finish()
        seen.add(columns["value"].buffers()[2].address)
        del columns
    assert count == 16
    assert len(seen) <= 2


def test_a_record_larger_than_the_buffers() -> None:
    rows = ArrowRows(8, 64, ["key", "value", "headers"])
    big = Record(value=b"v" * 1000, key=b"k" * 300, headers=[("h" * 200, b"w" * 500)] * 40)
    data = encode_batch([Record(value=b"small"), big, Record(value=b"last")])
    view = PartitionReader(SegmentReader.of_memory(data), "t", b"", 0, 0).read()
    got, start = [], 0
    while start < len(view):
        start += rows.append(view, start)
        got += rows.finish()[1]["value"].to_pylist()
    assert got == [b"small", b"v" * 1000, b"last"]


def test_times_out_of_arrows_range() -> None:
    data = encode_batch([Record(value=b"", timestamp_ms=2**62)])
    (batch,) = _batches(data)
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [(2**63 - 1) // 1000 * 1000]


def test_header_keys_that_are_not_utf8_are_replaced() -> None:
    data = bytearray(
        encode_batch([Record(value=b"v", headers=[("key", b"1")]), Record(value=b"w", headers=[("other", None)])])
    )
    at = data.index(b"key")
    data[at] = 0xFF
    reader = PartitionReader(SegmentReader.of_memory(data), "t", b"", 0, 0, check_crc=False)
    builder = BatchBuilder(("headers",), "t", 0, 100)
    list(builder.add(reader.read()))
    (batch,) = builder.remaining()
    batch.validate(full=True)
    assert batch.column("headers").to_pylist() == [
        [{"key": "\ufffdey", "value": b"1"}],
        [{"key": "other", "value": None}],
    ]


def test_aborted_transactions_are_left_out() -> None:
    def transactional(offset: int, producer: int, value: bytes) -> bytes:
        return encode_batch(
            [Record(value=value)],
            base_offset=offset,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=True,
        )

    def marker(offset: int, producer: int, commit: bool) -> bytes:
        record = Record(key=b"\0\0" + (b"\0\1" if commit else b"\0\0"), value=b"\0" * 6)
        return encode_batch(
            [record], base_offset=offset, producer_id=producer, producer_epoch=0, is_transactional=True, is_control=True
        )

    data = b"".join(
        (
            transactional(0, 1, b"aborted"),
            transactional(1, 2, b"kept"),
            marker(2, 1, False),
            transactional(3, 1, b"later"),
            marker(4, 1, True),
            marker(5, 2, True),
        )
    )
    assert [row["value"] for row in _rows(_batches(data, isolation=1, aborted=[(1, 0)]))] == [b"kept", b"later"]
    assert [row["value"] for row in _rows(_batches(data))] == [b"aborted", b"kept", b"later"]


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_detected(codec: str) -> None:
    data = bytearray(_log(random.Random(5), codec, batch_count=1))
    data[-1] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        _batches(bytes(data))


def test_damaged_headers_have_a_separate_error() -> None:
    data = bytearray(encode_batch([Record(value=b"good"), Record(value=b"v", headers=[("key", b"1")])]))
    data[data.index(b"key") - 1] = 0x7F  # its size: beyond the record
    view = PartitionReader(SegmentReader.of_memory(data), "t", b"", 0, 0, check_crc=False).read()
    rows = ArrowRows(8, 64, ["value", "headers"])
    with pytest.raises(NativeError, match="headers of the record at offset 1 are damaged"):
        rows.append(view)


def test_any_bytes_give_rows_or_an_error() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        data = bytearray(_log(rng, rng.choice(CODECS), batch_count=2))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            size, following = batches_extent(data)
        except NativeError:
            continue
        if not size:
            continue
        reader = PartitionReader(SegmentReader.of_memory(data[:size]), "t", b"", 0, 0, check_crc=False)
        builder = BatchBuilder(ALL, "t", 0, 16)
        try:
            while reader.position < following:
                view = reader.read(10)
                if view is None and reader.take_problem() is not None:
                    break
                for batch in builder.add(view) if view is not None else ():
                    batch.validate(full=True)
        except NativeError:
            continue
