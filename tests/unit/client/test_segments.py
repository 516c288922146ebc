"""Records as a local consumer reads them: from a segment file, without a broker, compared with the
protocol decoder's result for the same bytes.
"""

from __future__ import annotations

import gc
import random
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mqd._native")

from mqd.client.messages import Message, encode_headers  # noqa: E402
from mqd.client.record_batch import Blobs, RecordBatchView  # noqa: E402
from mqd.client.shm.reading import BLOCK_COUNT_MAX, BLOCK_RECORDS, BlockPool, PartitionReader  # noqa: E402
from mqd.native.reader import SegmentReader  # noqa: E402
from mqd.protocol.crc32c import crc32c  # noqa: E402
from mqd.protocol.records import Record, decode_records, encode_batch  # noqa: E402


class Log:
    """A segment file and readers over it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "00000000000000000000.log"
        self.data = bytearray()

    def append(self, batch: bytes) -> Log:
        self.data += batch
        self.path.write_bytes(self.data)
        return self

    def reader(self, offset: int = 0, isolation_level: int = 0, pool: BlockPool | None = None) -> PartitionReader:
        return PartitionReader(
            SegmentReader.of_file(self.path, 0, offset, isolation_level), "things", bytes(16), 3, offset, pool=pool
        )

    def expected(self) -> list[Record]:
        return list(decode_records(bytes(self.data)))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def _records(count: int, start: int = 0) -> list[Record]:
    return [
        Record(
            value=None if i % 11 == 0 else b"" if i % 13 == 0 else b"value %d" % i,
            key=None if i % 5 == 0 else b"key %d" % i,
            timestamp_ms=1_700_000_000_000 + i,
            headers=[("name", b"%d" % i), ("none", None)] if i % 7 == 0 else [],
        )
        for i in range(start, start + count)
    ]


def _all(reader: PartitionReader, records_max: int = 100_000) -> list[Record]:
    found: list[Record] = []
    while (batch := reader.read(records_max)) is not None:
        assert 0 < len(batch) <= records_max
        for i, (offset, timestamp, key, value) in enumerate(batch.records()):
            found.append(Record(value, key, timestamp, batch.headers(i), offset))
        assert reader.position == found[-1].offset + 1 or reader.position > found[-1].offset
    assert reader.take_problem() is None
    return found


def test_columns_of_a_batch(log: Log) -> None:
    log.append(encode_batch(_records(30), partition_leader_epoch=4))
    reader = log.reader(10)
    batch = reader.read()
    assert batch is not None and batch and len(batch) == 20
    assert (batch.topic, batch.partition, batch.leader_epoch, batch.next_offset, reader.position) == (
        "things",
        3,
        4,
        30,
        30,
    )
    assert batch.offsets.dtype == batch.timestamps.dtype == np.int64
    assert batch.offsets.tolist() == list(range(10, 30))
    expected = log.expected()[10:]
    assert batch.keys.to_list() == [record.key for record in expected]
    assert batch.values.to_list() == list(batch.values) == [record.value for record in expected]
    assert [None if view is None else bytes(view) for view in batch.values.views()] == batch.values.to_list()
    assert batch.values[1] is None and batch.keys[1] == b"key 11"
    assert batch.values[5:7].to_list() == batch.values.to_list()[5:7]
    assert batch.values.null_count == 2 and batch.values.nbytes == sum(len(record.value or b"") for record in expected)
    assert batch.headers(4) == [("name", b"14"), ("none", None)] and batch.headers(0) == []
    assert "20 records, offsets 10 to 29" in repr(batch)
    assert reader.read() is None and reader.take_problem() is None


def test_messages_outlive_the_batch(log: Log) -> None:
    log.append(encode_batch(_records(8), partition_leader_epoch=2)).append(
        encode_batch(_records(2, 8), base_offset=8, log_append_time_ms=99)
    )
    reader = log.reader()
    with reader.read() as batch:
        messages = list(batch.messages())
    message = messages[7]
    assert (message.topic(), message.partition(), message.offset(), message.key(), message.value()) == (
        "things",
        3,
        7,
        b"key 7",
        b"value 7",
    )
    assert message.timestamp() == (1, 1_700_000_000_007) and message.leader_epoch() == 2 and message.error() is None
    assert message.headers() == [("name", b"7"), ("none", None)] and messages[1].headers() is None
    assert [one.timestamp() for one in reader.read().messages()] == [(2, 99)] * 2


def test_numpy_shapes(log: Log) -> None:
    log.append(encode_batch([Record(value=struct.pack("<q", i), key=b"k" * (i % 3)) for i in range(10)]))
    batch = log.reader().read()
    assert batch.values.to_numpy("<i8").tolist() == list(range(10))
    assert batch.values.to_numpy().shape == (10, 8) and batch.values.to_numpy().dtype == np.uint8
    assert batch.values.to_numpy([("low", "<i4"), ("high", "<i4")])["low"].tolist() == list(range(10))
    assert batch.keys.to_numpy("S2").tolist() == [b"k" * (i % 3) for i in range(10)]
    assert batch.keys.to_numpy().dtype == object and batch.keys.to_numpy()[2] == b"kk"
    for dtype in ("<i4", "S1"):
        with pytest.raises(ValueError, match="bytes"):
            batch.keys.to_numpy(dtype)
    with pytest.raises(ValueError, match="fixed size"):
        batch.keys.to_numpy(object)


def test_arrow_arrays_are_views(log: Log) -> None:
    arrow = pytest.importorskip("pyarrow")
    values = [None, b"", b"short", b"exactly12byt", b"more than twelve bytes", None, b"x" * 1000] * 30
    log.append(encode_batch([Record(value=value) for value in values]))
    reader = log.reader()
    batch = reader.read()
    array = batch.values.to_arrow()
    assert array.type == arrow.binary_view() and array.null_count == 60 and array.validate(full=True) is None
    address = array.buffers()[2].address
    low = np.frombuffer(batch.values.buffer, np.uint8).ctypes.data
    assert low <= address < low + len(log.data)
    for other in ("binary", "string", "string_view"):
        assert [
            None if value is None else value.encode() if isinstance(value, str) else value
            for value in batch.values.to_arrow(other).to_pylist()
        ] == values
    with pytest.raises(ValueError, match="not one of"):
        batch.values.to_arrow("list")
    batch.release()
    reader.close()
    log.path.unlink()
    gc.collect()
    assert array.to_pylist() == values
    assert batch.released


def test_views_outlive_reader_file_and_batch(log: Log) -> None:
    log.append(encode_batch(_records(100)))
    reader = log.reader()
    batch = reader.read()
    view, part = batch.values.views()[1], batch[20:30]
    offsets = batch.offsets
    batch.release()
    batch.release()
    reader.close()
    log.path.unlink()
    gc.collect()
    assert view == b"value 1" and view.readonly
    assert part.values[1] == b"value 21" and part.offsets.tolist() == list(range(20, 30)) == offsets[20:30].tolist()
    for use in (
        lambda: batch.values,
        lambda: batch.keys,
        lambda: batch.offsets,
        lambda: batch.timestamps,
        lambda: len(batch),
        lambda: batch.headers(0),
        lambda: batch[1:2],
        batch.__enter__,
    ):
        with pytest.raises(ValueError, match=r"batch of things \[3\] was released"):
            use()
    assert not batch and batch.released and "released" in repr(batch)
    with pytest.raises(OSError, match="closed"):
        reader.read()


def test_columns_in_use_are_not_reused(log: Log) -> None:
    for start in range(0, BLOCK_RECORDS * 8, BLOCK_RECORDS // 4):
        log.append(
            encode_batch([Record(value=b"%d" % i) for i in range(start, start + BLOCK_RECORDS // 4)], base_offset=start)
        )
    pool = BlockPool()
    reader, held = log.reader(pool=pool), []
    while (batch := reader.read(BLOCK_RECORDS, 1 << 30)) is not None:
        held.append((batch.offsets, batch.values.sizes))
    assert [int(offsets[0]) for offsets, _ in held] == list(range(0, BLOCK_RECORDS * 8, BLOCK_RECORDS))
    assert all((np.diff(offsets) == 1).all() for offsets, _ in held)
    kept = pool._blocks[BLOCK_RECORDS]
    assert len(kept) == BLOCK_COUNT_MAX
    first = kept[0]
    assert pool.take() not in kept
    held.clear()
    del batch
    assert pool.take() is first


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("records_max", [1, 7, 100, 100_000])
def test_compressed_batches(log: Log, codec: str, records_max: int) -> None:
    log.append(encode_batch(_records(20), compression=codec))
    log.append(encode_batch(_records(30, 20), base_offset=20, compression=codec))
    log.append(encode_batch(_records(30, 50), base_offset=50))
    log.append(encode_batch(_records(30, 80), base_offset=80, compression=codec, partition_leader_epoch=7))
    for offset in (0, 13, 20, 49, 100):
        reader = log.reader(offset)
        assert reader.position == offset
        assert _all(reader, records_max) == log.expected()[offset:]


def test_compressed_batches_are_combined_and_the_rest_waits(log: Log) -> None:
    for start in range(0, 1000, 10):
        log.append(encode_batch(_records(10, start), base_offset=start, compression="zstd"))
    reader = log.reader(5)
    assert len(reader.read(500)) == 495  # whole batches
    assert reader.position == 500
    assert len(reader.read(3)) == 3 and reader.position == 503
    reader.seek(8)
    assert reader.position == 8 and reader.read(1).offsets.tolist() == [8] and reader.position == 9
    assert len(reader.read(100_000)) == 1
    assert _all(reader) == log.expected()[10:]


def test_raw_snappy_and_batches_without_records(log: Log) -> None:
    cramjam = pytest.importorskip("cramjam")
    log.append(encode_batch([], compression="lz4", last_offset_delta=4))
    whole = encode_batch(_records(5), base_offset=5)
    body = bytes(cramjam.snappy.compress_raw(whole[61:]))
    head = bytearray(whole[:61])
    struct.pack_into(">i", head, 8, 49 + len(body))
    head[22] |= 2
    struct.pack_into(">I", head, 17, crc32c(body, crc32c(head[21:])))
    log.append(bytes(head) + body)
    assert [record.offset for record in _all(log.reader())] == [5, 6, 7, 8, 9]
    assert _all(log.reader()) == log.expected()


def test_damage_is_reported_after_the_intact_records(log: Log) -> None:
    log.append(encode_batch(_records(3)))
    bad = bytearray(encode_batch(_records(3, 3), base_offset=3))
    bad[-1] ^= 1
    log.append(bytes(bad)).append(encode_batch(_records(3, 6), base_offset=6))
    reader = log.reader()
    assert reader.read().offsets.tolist() == [0, 1, 2]
    assert reader.read() is None
    problem = reader.take_problem()
    assert (
        problem.kind == "corrupt" and problem.code == 2 and "checksum" in problem.text and reader.take_problem() is None
    )
    reader.skip()
    assert reader.read().offsets.tolist() == [6, 7, 8]


def test_damaged_compression(log: Log) -> None:
    log.append(encode_batch(_records(3), compression="zstd"))
    bad = bytearray(encode_batch(_records(3, 3), base_offset=3, compression="zstd"))
    bad[62] ^= 0xFF
    struct.pack_into(">I", bad, 17, crc32c(bytes(bad[21:])))
    log.append(bytes(bad))
    lying = bytearray(encode_batch(_records(3, 6), base_offset=6, compression="gzip"))
    struct.pack_into(">ii", lying, 23, 1 << 30, 0)
    struct.pack_into(">i", lying, 57, 1 << 30)
    struct.pack_into(">I", lying, 17, crc32c(bytes(lying[21:])))
    log.append(bytes(lying))
    reader = log.reader()
    assert reader.read().offsets.tolist() == [0, 1, 2]
    assert reader.read() is None and "damaged zstd data" in reader.take_problem().text
    reader.skip()
    assert reader.read() is None and f"claims {1 << 30} records" in reader.take_problem().text


def _marker(offset: int, producer_id: int, commit: bool) -> bytes:
    record = Record(value=bytes(6), key=struct.pack(">hh", 0, commit))
    return encode_batch(
        [record], base_offset=offset, producer_id=producer_id, producer_epoch=0, is_transactional=True, is_control=True
    )


def _transactional(offset: int, count: int, producer_id: int, **more: object) -> bytes:
    return encode_batch(
        _records(count, offset),
        base_offset=offset,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
        **more,
    )


def test_aborted_transactions_are_left_out(log: Log) -> None:
    log.append(_transactional(0, 2, 1)).append(_transactional(2, 2, 2, compression="lz4")).append(
        _marker(4, 1, False)
    ).append(_transactional(5, 2, 1, compression="zstd"))
    log.append(_marker(7, 2, True)).append(_marker(8, 1, False))
    reader = log.reader(isolation_level=1)
    assert reader.read() is None and reader.take_problem().kind == "aborted" and reader.position == 0
    reader.set_aborted([(1, 0), (1, 5)], 9)
    assert [record.offset for record in _all(reader)] == [2, 3]
    assert reader.position == 9
    assert [record.offset for record in _all(log.reader())] == [0, 1, 2, 3, 5, 6]


def test_batches_from_messages_have_the_same_interface() -> None:
    messages = [
        Message(
            "t",
            1,
            10 + i,
            None if i == 1 else b"k%d" % i,
            b"v" * i,
            [("h", b"x")] if i == 2 else None,
            timestamp=(1, 50 + i),
            leader_epoch=3,
        )
        for i in range(4)
    ]
    batch = RecordBatchView.from_messages("t", 1, messages)
    assert list(batch.records()) == [
        (10, 50, b"k0", b""),
        (11, 51, None, b"v"),
        (12, 52, b"k2", b"vv"),
        (13, 53, b"k3", b"vvv"),
    ]
    assert (
        batch.headers(2) == [("h", b"x")]
        and batch.headers(0) == []
        and batch.leader_epoch == 3
        and batch.next_offset == 14
    )
    assert [bytes(view) for view in batch.values.views()] == [b"", b"v", b"vv", b"vvv"]
    assert batch[2:].values.to_list() == [b"vv", b"vvv"]
    assert [(one.offset(), one.headers()) for one in batch.messages()] == [
        (10, None),
        (11, None),
        (12, [("h", b"x")]),
        (13, None),
    ]
    empty = RecordBatchView.from_messages("t", 1, [])
    assert not empty and len(empty) == 0 and empty.values.to_list() == [] and "no records" in repr(empty)


def test_blobs_check_corrupted_positions() -> None:
    blobs = Blobs.of_list([b"abc", b"defg", None])
    assert Blobs(blobs.buffer, blobs.positions, blobs.sizes).to_list() == [b"abc", b"defg", None]
    blobs.positions[1] = 1000
    with pytest.raises(ValueError, match="outside"):
        (
            Blobs(blobs.buffer, blobs.positions, blobs.sizes).to_arrow("binary")
            if _has_arrow()
            else Blobs(blobs.buffer, blobs.positions[:2], np.array([4, 4], np.int32)).to_list()
        )


def _has_arrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True


def test_any_log_is_read_as_by_the_decoder(tmp_path: Path) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        (tmp_path / str(seed)).mkdir()
        log, offset = Log(tmp_path / str(seed)), 0
        for _ in range(chance.randrange(1, 12)):
            kept = sorted(chance.sample(range(200), chance.randrange(1, 60)))
            records = [
                Record(
                    chance.choice([None, b"", chance.randbytes(chance.randrange(300))]),
                    chance.choice([None, b"k", b"key" * 20]),
                    chance.randrange(2**40),
                    chance.choice([[], [("h", b"")]]),
                    offset + at,
                )
                for at in kept
            ]
            codec = chance.choice(["none", "none", "gzip", "snappy", "lz4", "zstd"])
            log.append(
                encode_batch(
                    records,
                    base_offset=offset,
                    compression=codec,
                    partition_leader_epoch=chance.randrange(3),
                    last_offset_delta=220,
                )
            )
            offset += 221
        expected = log.expected()
        start = chance.randrange(offset)
        reader = log.reader(start)
        assert _all(reader, chance.choice([1, 5, 50, 1000])) == [
            record for record in expected if record.offset >= start
        ], f"seed {seed}"
        assert reader.position == offset


def test_header_sections_match_the_headers_of_messages() -> None:
    headers = [("a", b"x"), ("b", None)]
    batch = RecordBatchView(
        "t",
        0,
        np.array([0]),
        np.array([1]),
        Blobs.of_list([None]),
        Blobs.of_list([b""]),
        Blobs.of_list([encode_headers(headers)]),
    )
    assert batch.headers(0) == headers == next(batch.messages()).headers()
