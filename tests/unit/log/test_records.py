"""Stored batches read back: records, codecs, and invalid bytes."""

from struct import pack

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqd.log import records as records_module
from mqd.log.batches import HEADER_BYTES, CorruptBatch, parse_header
from mqd.log.records import Record, decompress, record_times, records
from tests.unit.log.log_files import encode_batch, encode_record, varint


def batch_of(payload: bytes, count: int, codec: int = 0):
    data = encode_batch(100, [1000] * count, codec, payload=payload)
    return parse_header(data, 0, 0), data


nullable = st.none() | st.binary(max_size=40)
plain_headers = st.lists(st.tuples(st.text(max_size=10), nullable), max_size=3)
rows = st.lists(st.tuples(nullable, nullable, plain_headers, st.integers(-1000, 10**12)), min_size=1, max_size=6)


@given(rows, st.integers(0, 4))
def test_records_read_back(written, codec: int) -> None:
    payload = b"".join(
        encode_record(i, delta, key, value, headers) for i, (key, value, headers, delta) in enumerate(written)
    )
    if codec:
        from tests.unit.log.log_files import compressed

        payload = compressed(codec, payload)
    batch, data = batch_of(payload, len(written), codec)
    assert list(records(batch, data)) == [
        Record(100 + i, 1000 + delta, key, value, tuple(headers))
        for i, (key, value, headers, delta) in enumerate(written)
    ]
    assert [time for _, time in record_times(batch, data)] == [1000 + delta for _, _, _, delta in written]


@given(st.binary(max_size=120), st.integers(1, 5), st.integers(0, 7))
def test_any_payload_gives_records_or_an_error(payload: bytes, count: int, codec: int) -> None:
    batch, data = batch_of(payload, count, codec)
    for read in (records, record_times):
        try:
            list(read(batch, data))
        except CorruptBatch:
            pass


@pytest.mark.parametrize(
    "payload",
    [b"", varint(1000) + b"x", b"\xff" * 30, varint(-5), varint(3) + b"\0\0\0", encode_record(0, 0, b"k", b"v")[:-1]],
)
def test_records_with_wrong_lengths(payload: bytes) -> None:
    batch, data = batch_of(payload, 1)
    with pytest.raises(CorruptBatch):
        list(records(batch, data))


def test_xerial_snappy_of_the_java_client() -> None:
    text = b"some records " * 50
    blocks = b"".join(
        pack(">i", len(block)) + block
        for block in (bytes(cramjam.snappy.compress_raw(part)) for part in (text[:300], text[300:]))
    )
    assert decompress(2, b"\x82SNAPPY\x00" + pack(">ii", 1, 1) + blocks) == text
    for cut in (1, 5, len(blocks) - 3):
        with pytest.raises(CorruptBatch):
            decompress(2, b"\x82SNAPPY\x00" + pack(">ii", 1, 1) + blocks[:-cut])


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_decompression_bomb_is_stopped(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.log.log_files import compressed

    monkeypatch.setattr(records_module, "DECOMPRESSED_BYTES_MAX", 1 << 20)
    assert len(decompress(codec, compressed(codec, b"\0" * (1 << 20)))) == 1 << 20
    with pytest.raises(CorruptBatch):
        decompress(codec, compressed(codec, b"\0" * ((1 << 20) + 1)))


def test_unknown_compression() -> None:
    with pytest.raises(CorruptBatch, match="compression type 6"):
        decompress(6, b"")


def test_invalid_headers() -> None:
    good = encode_batch(0, [1])
    for at, value in ((16, 1), (8, 0x7F), (8, 0xFF), (23, 0x80)):
        data = bytearray(good)
        data[at] = value
        with pytest.raises(CorruptBatch):
            parse_header(bytes(data), 0, 0)
    with pytest.raises(CorruptBatch):
        parse_header(b"\0" * HEADER_BYTES, 0, 0)
