"""Record batches compared with kio, kafka-python and aiokafka, in both directions; mutated batches
only raise ProtocolError.
"""

import io

import aiokafka.record.default_records as aiokafka_records
import kafka.record.default_records as kafka_python_records
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.records.readers import read_batch
from kio.records.writers import write_batch

from mqd.protocol import ProtocolError
from mqd.protocol.compression import CODECS, compress, decompress
from mqd.protocol.records import (
    CRC_START,
    Record,
    crc32c,
    decode_batch,
    decode_batch_header,
    decode_records,
    encode_batch,
    iterate_batches,
)

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)

BLOB = st.none() | st.binary(max_size=20) | st.sampled_from([63, 64, 65, 8191, 8192]).map(bytes)
HEADERS = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8"), max_size=5), st.none() | st.binary(max_size=5)), max_size=3
)
TIMES = st.integers(0, 1 << 42)
RECORDS = st.lists(st.builds(Record, value=BLOB, key=BLOB, timestamp_ms=TIMES, headers=HEADERS), min_size=1, max_size=8)


def numbered(records: list[Record], base_offset: int) -> list[Record]:
    return [
        Record(record.value, record.key, record.timestamp_ms, record.headers, base_offset + number)
        for number, record in enumerate(records)
    ]


def of_others(batch: object) -> list[Record]:
    return [
        Record(
            record.value, record.key, record.timestamp, [(key, value) for key, value in record.headers], record.offset
        )
        for record in batch
    ]


@SETTINGS
@given(RECORDS, st.integers(0, 1 << 40), st.sampled_from(CODECS), st.booleans())
def test_written_batches_are_read(
    records: list[Record], base_offset: int, compression: str, is_transactional: bool
) -> None:
    batch = encode_batch(
        records,
        base_offset=base_offset,
        compression=compression,
        producer_id=9,
        producer_epoch=2,
        base_sequence=5,
        is_transactional=is_transactional,
    )
    assert list(decode_batch(batch)) == numbered(records, base_offset)
    header = decode_batch_header(batch)
    assert (header.last_offset, header.record_count) == (base_offset + len(records) - 1, len(records))
    assert header.max_timestamp_ms == max(record.timestamp_ms for record in records)
    assert (header.compression, header.is_transactional, header.base_sequence) == (compression, is_transactional, 5)


@SETTINGS
@given(RECORDS, st.sampled_from(CODECS))
def test_aiokafka_reads_written_batches(records: list[Record], compression: str) -> None:
    batch = encode_batch(records, base_offset=3, compression=compression)
    theirs = aiokafka_records.DefaultRecordBatch(batch)
    assert theirs.validate_crc()
    assert of_others(theirs) == numbered(records, 3)


@SETTINGS
@given(RECORDS, st.sampled_from(["none", "gzip"]))  # the others need packages that kafka-python does not install
def test_kafka_python_reads_written_batches(records: list[Record], compression: str) -> None:
    batch = encode_batch(records, base_offset=3, compression=compression)
    theirs = kafka_python_records.DefaultRecordBatch(batch)
    assert theirs.validate_crc()
    assert of_others(theirs) == numbered(records, 3)


@pytest.mark.parametrize("module", [aiokafka_records, kafka_python_records], ids=["aiokafka", "kafka-python"])
def test_batches_of_other_implementations_are_read(module: object) -> None:
    @SETTINGS
    @given(RECORDS, st.sampled_from(range(5)) if module is aiokafka_records else st.sampled_from([0, 1]))
    def check(records: list[Record], compression: int) -> None:
        builder = module.DefaultRecordBatchBuilder(2, compression, True, 7, 1, 0, 1 << 20)
        for number, record in enumerate(records):
            builder.append(
                number, timestamp=record.timestamp_ms, key=record.key, value=record.value, headers=record.headers
            )
        batch = bytes(builder.build())
        assert list(decode_records(batch)) == numbered(records, 0)
        assert decode_batch_header(batch).producer_id == 7

    check()


@SETTINGS
@given(RECORDS)
def test_kio_writes_back_the_same_bytes(records: list[Record]) -> None:
    for record in records:
        record.timestamp_ms = record.timestamp_ms % 10**9 * 1000  # kio's times lose milliseconds
    batch = encode_batch(records, base_offset=5, partition_leader_epoch=4)
    theirs, size = read_batch(batch, 0)
    assert size == len(batch)
    buffer = io.BytesIO()
    write_batch(buffer, theirs)
    assert buffer.getvalue() == batch


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(RECORDS, st.sampled_from(CODECS), st.data())
def test_mutated_batches_only_raise_protocol_errors(
    records: list[Record], compression: str, data: st.DataObject
) -> None:
    batch = bytearray(encode_batch(records, compression=compression))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(batch) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                batch[position] = data.draw(st.integers(0, 255))
            case 1:
                del batch[position : position + data.draw(st.integers(1, 4))]
            case 2:
                batch[position:position] = data.draw(st.binary(min_size=1, max_size=6))
        if not batch:
            return
    if data.draw(st.booleans()) and len(batch) > CRC_START:
        batch[CRC_START - 4 : CRC_START] = crc32c(batch[CRC_START:]).to_bytes(4, "big")
    for reader in (
        lambda: list(decode_batch(batch, decompressed_bytes_max=1 << 20)),
        lambda: list(iterate_batches(batch, allow_partial=True)),
    ):
        try:
            reader()
        except ProtocolError:
            pass


@SETTINGS
@given(st.sampled_from(range(1, 5)), st.binary(max_size=200_000), st.data())
def test_mutated_compression_only_raises_protocol_errors(compression: int, payload: bytes, data: st.DataObject) -> None:
    packed = bytearray(compress(compression, payload))
    assert decompress(compression, bytes(packed)) == payload
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(decompress(compression, memoryview(packed), 1 << 20)) <= 1 << 20
    except ProtocolError:
        pass
