"""Batches whose records cannot be parsed are refused, so that no consumer stops at their offset
(record.validation).
"""

from __future__ import annotations

import random
import struct
import uuid

import pytest
from confluent_kafka import Consumer, TopicPartition

from mqd.protocol.crc32c import crc32c
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import CreateTopicsRequest, ProduceRequest
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection

PRODUCE, CREATE_TOPICS = 0, 19
CRC_AT, CRC_END = 17, 21
GOOD = [Record(b"first", key=b"k"), Record(b"second"), Record(None, headers=[("name", b"value")])]


def with_records(records: bytes, count: int = 3, compression: str = "none") -> bytes:
    """A batch with a correct header and checksum, around arbitrary bytes."""
    header = bytearray(encode_batch([Record(b"x")] * count, compression=compression)[:HEADER_BYTES])
    struct.pack_into(">i", header, 8, HEADER_BYTES + len(records) - 12)
    batch = header + records
    struct.pack_into(">I", batch, CRC_AT, crc32c(bytes(batch[CRC_END:])))
    return bytes(batch)


RECORDS = encode_batch(GOOD)[HEADER_BYTES:]
MALFORMED = {
    "garbage": b"\xff" * 64,
    "cut off": RECORDS[:-1],
    "too few": encode_batch(GOOD[:2])[HEADER_BYTES:],
    "too many": encode_batch([*GOOD, *GOOD])[HEADER_BYTES:],
    "length 2^31 - 1": b"\xfe\xff\xff\xff\x0f" + RECORDS[1:],
    "length -5": b"\x09" + RECORDS[1:],
    "header count 2^31 - 1": (
        b"\x18\x00\x00\x00\x01\x01\xfe\xff\xff\xff\x0f" + bytes(2) + RECORDS[RECORDS.index(b"second") - 5 :]
    ),
    "deltas out of order": encode_batch(GOOD[:1])[HEADER_BYTES:] * 3,
}


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return create(shared_broker, {})


def create(broker: Broker, config: dict[str, str]) -> str:
    name = f"validated-{uuid.uuid4()}"
    configs = [CreateTopicsRequest.Config(name=key, value=value) for key, value in config.items()]
    expected = CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1, configs=configs)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        assert (
            kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[expected], timeout_ms=30_000)).topics[0].error_code
            == 0
        )
    return name


def produce(broker: Broker, topic: str, batch: bytes) -> ProduceRequest:
    data = [ProduceRequest.PartitionData(index=0, records=batch)]
    request = ProduceRequest(
        acks=-1, timeout_ms=60_000, topic_data=[ProduceRequest.TopicData(name=topic, partition_data=data)]
    )
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        return kafka.call(PRODUCE, 9, request).responses[0].partition_responses[0]


def read(broker: Broker, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, timeout=60)
    consumer.close()
    return [message.value() for message in messages]


def test_malformed_records_are_refused_and_consumers_continue(shared_broker: Broker, topic: str) -> None:
    assert produce(shared_broker, topic, encode_batch(GOOD)).error_code == 0
    for name, records in MALFORMED.items():
        response = produce(shared_broker, topic, with_records(records))
        assert response.error_code == ErrorCode.INVALID_RECORD and response.base_offset == -1, name
        assert len(response.record_errors) == 1 and 0 <= response.record_errors[0].batch_index <= 3, name
        assert "cannot be parsed" in response.error_message, name
    assert produce(shared_broker, topic, encode_batch([Record(b"last")])).base_offset == 3
    assert read(shared_broker, topic, 4) == [b"first", b"second", None, b"last"]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])  # on the reactor, and on a thread
@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_malformed_compressed_batches_are_refused(shared_broker: Broker, topic: str, codec: str, large: bool) -> None:
    noise = random.Random(7).randbytes(20_000) if large else b"third"
    good = [*GOOD, Record(noise)]
    assert produce(shared_broker, topic, encode_batch(good, compression=codec)).error_code == 0
    for records in (
        b"\xff" * 64,
        b"\xff" * 20_000,
        encode_batch(good[1:], compression=codec)[HEADER_BYTES:],
        encode_batch([*good, *good], compression=codec)[HEADER_BYTES:],
        encode_batch(good, compression=codec)[HEADER_BYTES:-5],
    ):
        response = produce(shared_broker, topic, with_records(records, len(good), codec))
        assert response.error_code == ErrorCode.INVALID_RECORD and response.base_offset == -1
    assert produce(shared_broker, topic, encode_batch([Record(b"last")], compression=codec)).base_offset == len(good)
    assert read(shared_broker, topic, len(good) + 1) == [b"first", b"second", None, noise, b"last"]


def test_validation_can_be_disabled_for_compressed_batches(shared_broker: Broker) -> None:
    topic = create(shared_broker, {"record.validation": "uncompressed"})
    assert produce(shared_broker, topic, with_records(b"\xff" * 64, compression="zstd")).error_code == 0
    assert produce(shared_broker, topic, with_records(b"\xff" * 64)).error_code == ErrorCode.INVALID_RECORD


def test_validation_can_be_disabled(shared_broker: Broker) -> None:
    topic = create(shared_broker, {"record.validation": "none"})
    assert produce(shared_broker, topic, with_records(b"\xff" * 64)).error_code == 0
