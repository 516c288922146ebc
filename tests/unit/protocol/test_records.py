"""Record batches: bytes written by real clients, every way in which a batch can be invalid, and the
bound on decompression.
"""

import base64
import struct

import cramjam
import pytest

from mqd.protocol import ProtocolError
from mqd.protocol.compression import CODECS, compress, decompress
from mqd.protocol.crc32c import crc32c, crc32c_fallback
from mqd.protocol.records import (
    CRC_START,
    HEADER_BYTES,
    Record,
    decode_batch,
    decode_batch_header,
    decode_records,
    encode_batch,
    has_valid_crc,
    iterate_batches,
)

# Batches as librdkafka 2.16 (confluent-kafka) and kcat with librdkafka 2.0.2 sent them in Produce;
# base85.
GOLDEN = {
    "librdkafka gzip": (
        "00000000000001U000000y->tIRF6w0006200E27<!Ar^00E27<!A!`|NsC0|NsC0|NsC0{{R3010RbB00000000APVqsulV9QRee860mm{XdnFmgy1rbH$~"
        "rX<F9%nVFSj3dwg3_=VnETE`oWB>pMe`IC`0ssI"
    ),
    "librdkafka snappy": (
        "00000000000001Z000000(=YmRsaG30006200E27<!Ar^00E27<!A!`|NsC0|NsC0|NsC0{{R301BL`Zf&>5n00wJidEf(fVQh6}ApQmb{ssX41^}i805k*w"
        "VFED%Vgc?000II5{r~~~00I600mc9UC;$=w1Ox_aWqAPr"
    ),
    "librdkafka lz4": (
        "00000000000001V000000uEpU)c^wk0006200E27<!Ar^00E27<!A!`|NsC0|NsC0|NsC0{{R300|X*X7+^qxGynhq{{n&p00006Yh`)h19o9-b!8w10N3vX"
        "0$~C%0%8H~0{{X70RREtumBPO1Ox_aWqAPr00000"
    ),
    "librdkafka zstd": (
        "00000000000001R000000%Ys?9{>aZ0006200E27<!Ar^00E27<!Ax`0000001u!50{{R30000011PmG{Qy|C0RW@|f&>5n00wJidEf(fVQh6}AOr$o0x<$&"
        "0qz3;0s;X55&#4Q25V(`0RRF3?}0_B=TKz{"
    ),
    "kcat snappy": (
        "000000000000018000000%u|Dy8r?J0003100E)=JR0W!00E)=JR0Z!|NsC0|NsC0|NsC0{{R300)_%K?gIb-00H0wc42IFWgz|r0R9F5{ssW11^_ew7ytkQ"
        "0St3xV{dL`00"
    ),
    "kcat lz4": (
        "00000000000001C000000@9Y!@&E$>0003100E)=JR4R300E)=JR4U3|NsC0|NsC0|NsC0{{R300t6yW7+^qxApigX@9qNt0005t19o9-b!8w10N3CE7ytkQ"
        "0St3xV{dL`0000000"
    ),
}

LONG = b"value " * 40
FROM_LIBRDKAFKA = [
    Record(value=LONG, key=b"key", timestamp_ms=1700000000000, headers=[("a", b"1"), ("b", None)], offset=0),
    Record(value=LONG, key=None, timestamp_ms=1700000000001, offset=1),
    Record(value=None, key=b"key", timestamp_ms=1700000000002, offset=2),
]


@pytest.mark.parametrize("name", GOLDEN)
def test_batches_of_real_clients(name: str) -> None:
    batch = base64.b85decode(GOLDEN[name])
    header = decode_batch_header(batch)
    assert (header.compression, header.size_bytes, header.magic) == (name.split()[1], len(batch), 2)
    records = list(decode_batch(batch))
    if name.startswith("kcat"):
        assert [record.value for record in records] == [LONG, b"second"]
    else:
        assert records == FROM_LIBRDKAFKA
    if name == "librdkafka zstd":  # sent by an idempotent producer
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4000, 3, 0)


def resealed(batch: bytes | bytearray) -> bytes:
    """Recomputes the CRC, so that the checks after it are tested."""
    return (
        bytes(batch[: CRC_START - 4]) + struct.pack(">I", crc32c(bytes(batch[CRC_START:]))) + bytes(batch[CRC_START:])
    )


def patched(batch: bytes, position: int, layout: str, value: int) -> bytes:
    data = bytearray(batch)
    struct.pack_into(layout, data, position, value)
    return resealed(data)


BATCH = encode_batch(
    [Record(b"one", b"k", 1000, [("h", b"v")]), Record(b"two", None, 1005)], base_offset=100, partition_leader_epoch=7
)


def test_a_plain_batch_byte_by_byte() -> None:
    head = "0000000000000064 0000004a 00000007 02"
    rest = "0000 00000001 00000000000003e8 00000000000003ed ffffffffffffffff ffff ffffffff 00000002"
    records = "1c 00 00 00 02 6b 06 6f6e65 02 02 68 02 76" + "12 00 0a 02 01 06 74776f 00"
    assert (
        bytes.fromhex(head) + struct.pack(">I", crc32c(bytes.fromhex(rest + records))) + bytes.fromhex(rest + records)
        == BATCH
    )
    assert has_valid_crc(BATCH)
    assert [record.offset for record in decode_batch(BATCH)] == [100, 101]


def test_offsets_with_gaps_and_a_longer_reach() -> None:
    batch = encode_batch([Record(b"a", offset=12), Record(b"b", offset=15)], base_offset=10, last_offset_delta=9)
    header = decode_batch_header(batch)
    assert (header.base_offset, header.last_offset, header.record_count) == (10, 19, 2)
    assert [record.offset for record in decode_batch(batch)] == [12, 15]
    with pytest.raises(ValueError, match="offsets must rise"):
        encode_batch([Record(b"a", offset=5), Record(b"b", offset=5)])
    with pytest.raises(ValueError, match="below the last"):
        encode_batch([Record(b"a"), Record(b"b")], last_offset_delta=0)


def test_log_append_time_applies_to_every_record() -> None:
    batch = encode_batch([Record(b"a", timestamp_ms=5), Record(b"b", timestamp_ms=9)], log_append_time_ms=77)
    assert decode_batch_header(batch).is_log_append_time
    assert [record.timestamp_ms for record in decode_batch(batch)] == [77, 77]


def test_an_empty_batch_and_control_batches() -> None:
    empty = encode_batch([], base_offset=5, last_offset_delta=3)
    assert list(decode_batch(empty)) == [] and decode_batch_header(empty).last_offset == 8
    control = encode_batch(
        [Record(b"\0" * 6, b"\0\0\0\1")], is_control=True, is_transactional=True, producer_id=1, producer_epoch=0
    )
    assert [record.value for record in decode_records(empty + control + BATCH)] == [b"one", b"two"]
    assert list(decode_records(None)) == []


def test_iterating_over_batches_with_a_truncated_one() -> None:
    both = BATCH + encode_batch([Record(b"x" * 100)], base_offset=102)
    assert [header.base_offset for header, _ in iterate_batches(both)] == [100, 102]
    for size in range(len(BATCH) + 1, len(both)):
        assert [header.base_offset for header, _ in iterate_batches(both[:size], allow_partial=True)] == [100]
        with pytest.raises(ProtocolError, match="cut off"):
            list(iterate_batches(both[:size]))


@pytest.mark.parametrize(
    ("position", "layout", "value", "field"),
    [
        (8, ">i", 48, "batch_length"),
        (8, ">i", -1, "batch_length"),
        (8, ">i", 0x7FFFFFFF, "batch_length"),
        (16, ">b", 1, "magic"),
        (21, ">h", 7, "attributes"),
        (23, ">i", -5, "last_offset_delta"),
        (23, ">i", 0, "record 1"),  # an offset beyond the last
        (57, ">i", -1, "record_count"),
        (57, ">i", 0x7FFFFFFF, "record_count"),
        (57, ">i", 1, "records"),  # bytes left over
        (61, ">B", 0xFE, "record 0"),  # the first record's length
        (65, ">B", 0x80, "record 0"),
        (65, ">B", 0x03, "record 0"),  # a key of -2 bytes
        (71, ">B", 0x7E, "record 0"),  # 63 headers
    ],
)
def test_invalid_batches(position: int, layout: str, value: int, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        list(decode_batch(patched(BATCH, position, layout, value)))
    assert caught.value.field == field


def test_a_flipped_bit_anywhere_is_detected() -> None:
    for position in range(CRC_START - 4, len(BATCH)):
        data = bytearray(BATCH)
        data[position] ^= 1
        with pytest.raises(ProtocolError) as caught:
            list(decode_batch(bytes(data)))
        assert caught.value.field == "crc" or position in (23, 57)  # signs and counts are checked first
    assert list(decode_batch(BATCH[:17] + b"\0\0\0\0" + BATCH[21:], verify_crc=False)) == list(decode_batch(BATCH))


@pytest.mark.parametrize("compression", CODECS)
def test_the_bound_on_decompression_is_exact(compression: str) -> None:
    number, data = CODECS.index(compression), b"z" * 100_000
    packed = compress(compression, data)
    assert decompress(number, packed, 100_000) == data
    with pytest.raises(ProtocolError, match="more than 99999 bytes"):
        decompress(number, packed, 99_999)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_a_decompression_bomb_is_refused(compression: str) -> None:
    bomb = encode_batch([Record(bytes(3 << 20))], compression=compression)
    with pytest.raises(ProtocolError, match="expands to more than 1048576 bytes"):
        list(decode_batch(bomb, decompressed_bytes_max=1 << 20))
    assert len(next(decode_batch(bomb)).value) == 3 << 20


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_damaged_compression_is_an_error_of_the_protocol(compression: str) -> None:
    whole = compress(compression, bytes(range(256)) * 300)
    for hostile in (b"", b"\0", whole[:-3], whole[: len(whole) // 2], b"garbage" * 9, b"\xff" * 40):
        try:
            decompress(CODECS.index(compression), hostile)  # some truncated and random inputs are legal in some formats
        except ProtocolError as error:
            assert error.field == "records"


def test_snappy_both_framings() -> None:
    data = bytes(range(256)) * 1000
    framed = compress("snappy", data)
    assert framed.startswith(b"\x82SNAPPY\0\0\0\0\1\0\0\0\1")
    assert decompress(2, framed) == data
    assert decompress(2, bytes(cramjam.snappy.compress_raw(data))) == data
    with pytest.raises(ProtocolError, match="block"):
        decompress(2, framed[:16] + b"\x7f\xff\xff\xff" + framed[20:])
    with pytest.raises(ProtocolError, match="claim"):
        decompress(2, b"\x80\x80\x80\x20" + b"\0" * 10)  # ten bytes that would be 64 MiB


def test_lz4_blocks_are_independent() -> None:
    assert compress("lz4", b"x" * 200_000)[4] & 0x20, "Java refuses linked blocks"


@pytest.mark.parametrize("size", [0, 1, 9, 2047, 2048, 2049, 4096, 70_001])
def test_crc32c(size: int) -> None:
    data = bytes(number * 31 & 255 for number in range(size))
    slow = 0xFFFFFFFF
    for byte in data:
        slow ^= byte
        for _ in range(8):
            slow = slow >> 1 ^ (0x82F63B78 if slow & 1 else 0)
    assert crc32c_fallback(data) == crc32c(data) == slow ^ 0xFFFFFFFF
    assert crc32c(data[size // 3 :], crc32c(data[: size // 3])) == crc32c(data)
    assert crc32c_fallback(data[size // 3 :], crc32c_fallback(data[: size // 3])) == crc32c(data)


def test_crc32c_check_value() -> None:
    assert crc32c(b"123456789") == crc32c_fallback(b"123456789") == 0xE3069283
    assert crc32c_fallback(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_header_size() -> None:
    assert len(encode_batch([])) == HEADER_BYTES
