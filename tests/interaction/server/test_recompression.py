"""compression.type: batches in another codec are stored in the topic's, and their records stay the
same; batches in the topic's codec are stored as they were sent.
"""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from mqd.acceptor.checks import Compression, check_records
from mqd.protocol import messages as m
from mqd.protocol.compression import CODECS, compress
from mqd.protocol.crc32c import crc32c
from mqd.protocol.records import HEADER_BYTES, Record, decode_batch_header, decode_records, encode_batch, has_valid_crc
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection

TYPES = ("uncompressed", "gzip", "snappy", "lz4", "zstd")
VALUES = [b"%d " % number + b"compressible " * 40 for number in range(20)]
LARGE, INVALID = 10, 87


def _topic(broker: Broker, name: str, **configs: str) -> None:
    made = [m.CreateTopicsRequest.Config(key.replace("_", "."), value) for key, value in configs.items()]
    with KafkaConnection(port=broker.port) as kafka:
        found = kafka.call(19, 5, m.CreateTopicsRequest([m.CreateTopicsRequest.Topic(name, 1, 1, configs=made)]))
    assert found.topics[0].error_code == 0, found.topics[0].error_message


def _alter(broker: Broker, name: str, key: str, value: str) -> None:
    config = m.IncrementalAlterConfigsRequest.Config(key, 0, value)
    resource = m.IncrementalAlterConfigsRequest.Resource(2, name, [config])
    with KafkaConnection(port=broker.port) as kafka:
        assert kafka.call(44, 1, m.IncrementalAlterConfigsRequest([resource])).responses[0].error_code == 0


def _produce(broker: Broker, name: str, *batches: bytes) -> list[tuple[int, int]]:
    """Pipelined on one connection: (error, base offset) of each."""
    Data, Partition = m.ProduceRequest.TopicData, m.ProduceRequest.PartitionData
    with KafkaConnection(port=broker.port) as kafka:
        for batch in batches:
            data = Data(name=name, partition_data=[Partition(index=0, records=batch)])
            kafka.send(0, 9, m.ProduceRequest(None, acks=-1, timeout_ms=60_000, topic_data=[data]))
        found = [kafka.receive().body.responses[0].partition_responses[0] for _ in batches]
    return [(one.error_code, one.base_offset) for one in found]


def _stored(broker: Broker, name: str) -> list[bytes]:
    partition = m.FetchRequest.Partition(0, partition_max_bytes=64 << 20)
    requested = m.FetchRequest(max_wait_ms=0, min_bytes=0, topics=[m.FetchRequest.Topic(name, partitions=[partition])])
    with KafkaConnection(port=broker.port) as kafka:
        data = kafka.call(1, 11, requested).responses[0].partitions[0].records or b""
    batches, at = [], 0
    while at < len(data):
        size = decode_batch_header(data, at).size_bytes
        batches.append(bytes(data[at : at + size]))
        at += size
    return batches


def _codec(batch: bytes) -> str:
    return TYPES[decode_batch_header(batch).attributes & 7]


def _values(batch: bytes) -> list[bytes]:
    return [record.value for record in decode_records(batch)]


@pytest.mark.parametrize("expected", TYPES)
def test_every_codec_is_converted_to_the_topics(shared_broker: Broker, expected: str) -> None:
    name = f"recompressed-{expected}"
    _topic(shared_broker, name, compression_type=expected)
    sent = [
        encode_batch([Record(value, b"key", 1_700_000_000_000) for value in VALUES], compression=codec)
        for codec in CODECS
    ]
    assert _produce(shared_broker, name, *sent) == [(0, 20 * number) for number in range(len(sent))]
    stored = _stored(shared_broker, name)
    assert [_codec(batch) for batch in stored] == [expected] * len(sent)
    assert [_values(batch) for batch in stored] == [VALUES] * len(sent)
    same = TYPES.index(expected)
    assert stored[same][HEADER_BYTES:] == sent[same][HEADER_BYTES:], "stored as it was sent"


def test_a_compression_level_applies_to_its_codec(shared_broker: Broker) -> None:
    sizes = []
    for level in ("1", "9"):
        _topic(shared_broker, f"level-{level}", compression_type="gzip", compression_gzip_level=level)
        batch = encode_batch([Record(b"%d" % (number * number)) for number in range(2000)])
        assert _produce(shared_broker, f"level-{level}", batch) == [(0, 0)]
        (stored,) = _stored(shared_broker, f"level-{level}")
        assert stored[HEADER_BYTES:] == compress("gzip", batch[HEADER_BYTES:], int(level))
        sizes.append(len(stored))
    assert sizes[0] > sizes[1]


def test_it_changes_at_run_time(shared_broker: Broker) -> None:
    _topic(shared_broker, "changing")
    batch = encode_batch([Record(value) for value in VALUES])
    found = [_produce(shared_broker, "changing", batch)]
    for expected in ("zstd", "producer"):
        _alter(shared_broker, "changing", "compression.type", expected)
        found.append(_produce(shared_broker, "changing", batch))
    assert found == [[(0, 0)], [(0, 20)], [(0, 40)]]
    assert [_codec(one) for one in _stored(shared_broker, "changing")] == ["uncompressed", "zstd", "uncompressed"]


def test_a_batch_that_becomes_too_large_is_refused(shared_broker: Broker) -> None:
    _topic(shared_broker, "small", compression_type="uncompressed", max_message_bytes="2000")
    batches = [encode_batch([Record(b"z" * size)], compression="gzip") for size in (100_000, 1000)]
    assert _produce(shared_broker, "small", *batches) == [(LARGE, -1), (0, 0)]


def test_a_batch_of_several_pieces_is_stored_complete(shared_broker: Broker) -> None:
    """The acceptor returns a batch in pieces of 1 MiB."""
    _topic(shared_broker, "pieces", compression_type="uncompressed", max_message_bytes="8000000")
    values = [bytes([number]) * 100_000 for number in range(35)]
    batch = encode_batch([Record(value) for value in values], compression="zstd")
    assert len(batch) < 100_000
    assert _produce(shared_broker, "pieces", batch, batch) == [(0, 0), (0, 35)]
    assert [_values(one) for one in _stored(shared_broker, "pieces")] == [values, values]


def test_records_that_cannot_be_parsed_are_refused(shared_broker: Broker) -> None:
    _topic(shared_broker, "garbage", compression_type="lz4")
    batch = encode_batch([Record(b"v")], compression="gzip")[:HEADER_BYTES] + compress("gzip", b"\xff" * 30)
    batch = batch[:8] + (len(batch) - 12).to_bytes(4, "big") + batch[12:]
    batch = batch[:17] + crc32c(batch[21:]).to_bytes(4, "big") + batch[21:]
    assert _produce(shared_broker, "garbage", batch) == [(INVALID, -1)]


def test_a_compacted_topic_still_needs_keys(shared_broker: Broker) -> None:
    _topic(shared_broker, "compacted", compression_type="zstd", cleanup_policy="compact")
    for codec in ("none", "gzip", "zstd"):
        assert _produce(shared_broker, "compacted", encode_batch([Record(b"v")], compression=codec)) == [(INVALID, -1)]
    keyed = [encode_batch([Record(b"v", b"k")], compression=codec) for codec in ("none", "gzip")]
    assert _produce(shared_broker, "compacted", *keyed) == [(0, 0), (0, 1)]


def test_an_idempotent_producer_keeps_its_order(shared_broker: Broker) -> None:
    _topic(shared_broker, "ordered", compression_type="gzip")
    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{shared_broker.port}",
            "enable.idempotence": True,
            "linger.ms": 0,
            "batch.num.messages": 7,
        }
    )
    for number in range(2000):
        producer.produce("ordered", b"%d" % number)
        producer.poll(0)
    assert producer.flush(60) == 0
    stored = _stored(shared_broker, "ordered")
    assert {_codec(batch) for batch in stored} == {"gzip"}
    assert [int(value) for batch in stored for value in _values(batch)] == list(range(2000))


@pytest.mark.parametrize(
    ("codec", "level"),
    [("gzip", -1), ("gzip", 1), ("gzip", 9), ("lz4", 1), ("lz4", 17), ("zstd", -131072), ("zstd", 22), ("snappy", 0)],
)
def test_every_accepted_level_works(codec: str, level: int) -> None:
    batch = encode_batch([Record(value, b"k", 1_700_000_000_000) for value in VALUES], compression="lz4")
    response = check_records(batch, True, Compression(CODECS.index(codec), level, 1 << 20))
    assert response.error == 0 and has_valid_crc(response.payload)
    assert _codec(response.payload) == codec and _values(response.payload) == VALUES
