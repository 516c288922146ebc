"""Produce with raw frames: acks, the order of idempotent batches, retries, and refusals."""

from __future__ import annotations

import struct
import time

import pytest

from mqd.protocol import ErrorCode
from mqd.protocol.messages import InitProducerIdRequest, ProduceRequest
from mqd.protocol.records import Record, decode_records
from tests.broker import Broker
from tests.compat import topics
from tests.compat.messages import compressible
from tests.compat.topics import INIT_PRODUCER_ID, PRODUCE
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return topics.create_topic(shared_broker, "produce", 2)


@pytest.fixture
def kafka(shared_broker: Broker):
    with topics.connect(shared_broker) as connection:
        yield connection


def new_producer(kafka: KafkaConnection) -> tuple[int, int]:
    response = kafka.call(
        INIT_PRODUCER_ID, 4, InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0x7FFFFFFF)
    )
    assert response.error_code == 0
    return response.producer_id, response.producer_epoch


def sequenced(producer: tuple[int, int], base_sequence: int, count: int = 1, what: str = "v") -> bytes:
    values = [f"{what}{base_sequence + number}".encode() for number in range(count)]
    return topics.batch_of(*values, producer_id=producer[0], producer_epoch=producer[1], base_sequence=base_sequence)


def values_of(kafka: KafkaConnection, topic: str, partition: int = 0) -> list[bytes | None]:
    return [
        record.value
        for record in decode_records(
            topics.fetch(kafka, topic, 0, partition, max_wait_ms=0).records, allow_partial=True
        )
    ]


# -- acks ------------------------------------------------------------------------------------------


@pytest.mark.both_backends
@pytest.mark.parametrize("acks", [1, -1])
def test_an_acknowledged_record_is_readable(kafka: KafkaConnection, topic: str, acks: int) -> None:
    for number in range(3):
        for partition in range(2):
            result = topics.produce(kafka, topic, topics.batch_of(b"%d" % number), partition, acks=acks)
            assert (result.error_code, result.base_offset, result.log_append_time_ms, result.log_start_offset) == (
                0,
                number,
                -1,
                0,
            )
    for partition in range(2):
        # With flush.on.ack a record is visible when it is on disk, which acks=1 does not wait for.
        size = 3 * len(topics.batch_of(b"0"))
        records = topics.fetch(kafka, topic, 0, partition, min_bytes=size, max_wait_ms=10_000).records
        assert [record.value for record in decode_records(records)] == [b"0", b"1", b"2"]
        assert topics.list_offset(kafka, topic, topics.LATEST, partition).offset == 3


def test_acks_0_gets_no_response(kafka: KafkaConnection, topic: str) -> None:
    for number in range(5):
        kafka.send(
            PRODUCE,
            9,
            topics.produce_request(topic, topics.batch_of(b"%d" % number), number % 2, acks=0),
            expect_response=False,
        )
    assert topics.produce(kafka, topic, topics.batch_of(b"last"), 0).base_offset == 3, (
        "the next answer is the next request's, and order was kept"
    )


def test_other_acks_are_refused(kafka: KafkaConnection, topic: str) -> None:
    assert topics.produce(kafka, topic, topics.batch_of(b"x"), acks=2).error_code == ErrorCode.INVALID_REQUIRED_ACKS
    assert topics.list_offset(kafka, topic, topics.LATEST).offset == 0


@pytest.mark.both_backends
def test_many_partitions_in_one_request_each_have_their_own_result(
    shared_broker: Broker, kafka: KafkaConnection, topic: str
) -> None:
    other = topics.create_topic(shared_broker, "produce-other", 3)
    parts = [ProduceRequest.PartitionData(index=index, records=topics.batch_of(b"x")) for index in (0, 1, 7)]
    broken = bytearray(topics.batch_of(b"will be broken"))
    broken[-1] ^= 1
    others = [
        ProduceRequest.PartitionData(index=index, records=records)
        for index, records in ((2, topics.batch_of(b"y")), (0, bytes(broken)), (1, topics.batch_of(b"z")))
    ]
    request = ProduceRequest(
        acks=-1,
        timeout_ms=5000,
        topic_data=[
            ProduceRequest.TopicData(name=topic, partition_data=parts),
            ProduceRequest.TopicData(name=other, partition_data=others),
        ],
    )
    response = kafka.call(PRODUCE, 9, request)
    responses = [
        (answered.name, part.index, part.error_code)
        for answered in response.responses
        for part in answered.partition_responses
    ]
    assert responses == [
        (topic, 0, 0),
        (topic, 1, 0),
        (topic, 7, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (other, 2, 0),
        (other, 0, ErrorCode.CORRUPT_MESSAGE),
        (other, 1, 0),
    ]


# -- idempotence -----------------------------------------------------------------------------------


def test_producer_ids_differ(shared_broker: Broker) -> None:
    with topics.connect(shared_broker) as one, topics.connect(shared_broker) as two:
        ids = [new_producer(kafka)[0] for kafka in (one, two) * 20]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("partition", [0, 1])
def test_a_retry_gets_the_original_offset(kafka: KafkaConnection, topic: str, partition: int) -> None:
    """Of any of the last five batches, any number of times, over this connection or another."""
    producer = new_producer(kafka)
    batches = [sequenced(producer, 3 * number, 3) for number in range(5)]
    assert [topics.produce(kafka, topic, batch, partition).base_offset for batch in batches] == [0, 3, 6, 9, 12]
    for number in (4, 0, 2, 2, 1, 3):
        result = topics.produce(kafka, topic, batches[number], partition)
        assert (result.error_code, result.base_offset) == (0, 3 * number)
    assert topics.list_offset(kafka, topic, topics.LATEST, partition).offset == 15


@pytest.mark.both_backends
def test_five_in_flight_and_all_of_them_again(shared_broker: Broker, kafka: KafkaConnection, topic: str) -> None:
    """Like a client whose connection broke: sends all five again, on a new one."""
    producer = new_producer(kafka)
    batches = [sequenced(producer, number) for number in range(5)]
    for batch in batches:
        kafka.send(PRODUCE, 9, topics.produce_request(topic, batch))
    with topics.connect(shared_broker) as again:
        first = [kafka.receive().body.responses[0].partition_responses[0] for _ in batches]
        for batch in batches:
            again.send(PRODUCE, 9, topics.produce_request(topic, batch))
        second = [again.receive().body.responses[0].partition_responses[0] for _ in batches]
    assert (
        [(part.error_code, part.base_offset) for part in first]
        == [(part.error_code, part.base_offset) for part in second]
        == [(0, n) for n in range(5)]
    )
    assert len(values_of(kafka, topic)) == 5


def test_a_retry_while_the_first_attempt_is_in_flight(
    shared_broker: Broker, kafka: KafkaConnection, topic: str
) -> None:
    """Both get the same offset, whichever was first, and the record exists once."""
    producer = new_producer(kafka)
    batch = sequenced(producer, 0)
    with topics.connect(shared_broker) as other:
        for _ in range(3):
            kafka.send(PRODUCE, 9, topics.produce_request(topic, batch))
            other.send(PRODUCE, 9, topics.produce_request(topic, batch))
        responses = [
            connection.receive().body.responses[0].partition_responses[0]
            for connection in (kafka, other)
            for _ in range(3)
        ]
    assert {(response.error_code, response.base_offset) for response in responses} == {(0, 0)}
    assert values_of(kafka, topic) == [b"v0"]


def test_a_gap_is_out_of_order(kafka: KafkaConnection, topic: str) -> None:
    producer = new_producer(kafka)
    assert topics.produce(kafka, topic, sequenced(producer, 0, 2)).error_code == 0
    for wrong in (3, 100, 1 << 29):
        assert (
            topics.produce(kafka, topic, sequenced(producer, wrong)).error_code
            == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        )
    result = topics.produce(kafka, topic, sequenced(producer, 2))
    assert (result.error_code, result.base_offset) == (0, 2), "the right one is taken after wrong ones"


def test_an_old_sequence_of_another_length_is_not_a_retry(kafka: KafkaConnection, topic: str) -> None:
    producer = new_producer(kafka)
    for number in range(7):
        assert topics.produce(kafka, topic, sequenced(producer, number)).error_code == 0
    overlapping = topics.produce(kafka, topic, sequenced(producer, 6, 3)).error_code
    assert overlapping == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    forgotten = topics.produce(kafka, topic, sequenced(producer, 0)).error_code
    assert forgotten in (ErrorCode.DUPLICATE_SEQUENCE_NUMBER, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER), (
        "older than the five that are remembered"
    )
    assert len(values_of(kafka, topic)) == 7


def test_sequences_are_of_a_partition(kafka: KafkaConnection, topic: str) -> None:
    producer = new_producer(kafka)
    for partition in (0, 1):
        for number in range(3):
            assert topics.produce(kafka, topic, sequenced(producer, number), partition).base_offset == number


def test_sequences_wrap_to_zero(kafka: KafkaConnection, topic: str) -> None:
    producer = new_producer(kafka)
    last = 0x7FFFFFFF
    first = topics.produce(kafka, topic, sequenced(producer, last - 1, 2))
    # A producer that this partition does not know may begin anywhere, as in Kafka, since its state
    # may have expired.
    assert (first.error_code, first.base_offset) == (0, 0)
    result = topics.produce(kafka, topic, sequenced(producer, 0, 2))
    assert (result.error_code, result.base_offset) == (0, 2)


def test_a_batch_whose_sequences_wrap_inside(kafka: KafkaConnection, topic: str) -> None:
    producer = new_producer(kafka)
    last = 0x7FFFFFFF
    assert topics.produce(kafka, topic, sequenced(producer, last, 3)).error_code == 0  # last, 0, 1
    assert topics.produce(kafka, topic, sequenced(producer, 2, 1)).base_offset == 3
    assert topics.produce(kafka, topic, sequenced(producer, last, 3)).base_offset == 0, "and is known again"


def test_an_older_epoch_is_fenced(kafka: KafkaConnection, topic: str) -> None:
    producer_id, epoch = new_producer(kafka)
    assert topics.produce(kafka, topic, sequenced((producer_id, epoch + 1), 0)).error_code == 0
    assert (
        topics.produce(kafka, topic, sequenced((producer_id, epoch), 0)).error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    )
    assert (
        topics.produce(kafka, topic, sequenced((producer_id, epoch + 2), 5)).error_code
        == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    ), "a new epoch begins at 0"
    assert topics.produce(kafka, topic, sequenced((producer_id, epoch + 2), 0)).error_code == 0


def test_idempotent_batches_survive_a_restart(start_broker) -> None:
    broker = start_broker(workers=1)
    name = topics.create_topic(broker, "restart")
    with topics.connect(broker) as kafka:
        producer = new_producer(kafka)
        for number in range(3):
            assert topics.produce(kafka, name, sequenced(producer, number)).error_code == 0
    broker.stop()
    broker.start()
    with topics.connect(broker) as kafka:
        topics.wait_served(kafka, name)
        assert topics.produce(kafka, name, sequenced(producer, 2)).base_offset == 2
        assert topics.produce(kafka, name, sequenced(producer, 4)).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert topics.produce(kafka, name, sequenced(producer, 3)).base_offset == 3
        assert new_producer(kafka)[0] > producer[0]


# -- what is refused -------------------------------------------------------------------------------


def test_a_batch_above_the_limit_is_too_large(shared_broker: Broker, kafka: KafkaConnection) -> None:
    name = topics.create_topic(shared_broker, "small", max_message_bytes="10000")
    assert topics.produce(kafka, name, topics.batch_of(compressible(9_000, "fits"))).error_code == 0
    assert (
        topics.produce(kafka, name, topics.batch_of(compressible(10_000, "not"))).error_code
        == ErrorCode.MESSAGE_TOO_LARGE
    )
    assert (
        topics.produce(kafka, name, topics.batch_of(compressible(2 << 20, "no way"))).error_code
        == ErrorCode.MESSAGE_TOO_LARGE
    )
    assert topics.list_offset(kafka, name, topics.LATEST).offset == 1


def _patched(batch: bytes, position: int, form: str, value: int) -> bytes:
    changed = bytearray(batch)
    struct.pack_into(form, changed, position, value)
    return bytes(changed)


_GOOD = topics.batch_of(b"one", b"two")


@pytest.mark.parametrize(
    ("records", "errors"),
    [
        pytest.param(_patched(_GOOD, 17, ">I", 12345), (ErrorCode.CORRUPT_MESSAGE,), id="wrong checksum"),
        pytest.param(_GOOD[:-3], (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD), id="cut off"),
        pytest.param(
            _patched(_GOOD, 8, ">i", 1 << 30),
            (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD),
            id="a length that lies",
        ),
        pytest.param(
            _patched(_GOOD, 16, ">b", 1),
            (ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD),
            id="magic 1",
        ),
        pytest.param(_GOOD + _GOOD, (ErrorCode.INVALID_RECORD,), id="two batches"),
        pytest.param(topics.batch_of(b"control", is_control=True), (ErrorCode.INVALID_RECORD,), id="a control batch"),
        pytest.param(b"", (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD), id="nothing"),
        pytest.param(None, (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD), id="null"),
        pytest.param(
            topics.batch_of(), (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD), id="a batch of no records"
        ),
    ],
)
def test_bad_records_are_refused_and_nothing_is_appended(
    kafka: KafkaConnection, topic: str, records: bytes | None, errors: tuple[ErrorCode, ...]
) -> None:
    result = topics.produce(kafka, topic, records)
    assert result.error_code in errors, (ErrorCode(result.error_code), result)
    assert result.base_offset == -1
    assert topics.produce(kafka, topic, topics.batch_of(b"good")).base_offset == 0, (
        "the connection and the partition go on"
    )


def test_compression_the_version_does_not_have(kafka: KafkaConnection, topic: str) -> None:
    """zstd came with Produce 7 (KIP-110)."""
    batch = topics.batch_of(b"zstd", compression="zstd")
    assert topics.produce(kafka, topic, batch, version=6).error_code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert topics.produce(kafka, topic, batch, version=7).error_code == 0


def test_times_far_in_the_future_are_refused(shared_broker: Broker, kafka: KafkaConnection) -> None:
    name = topics.create_topic(shared_broker, "future", message_timestamp_after_max_ms="60000")
    far = Record(value=b"x", timestamp_ms=4_000_000_000_000)
    assert topics.produce(kafka, name, topics.batch_of(far)).error_code == ErrorCode.INVALID_TIMESTAMP
    assert topics.list_offset(kafka, name, topics.LATEST).offset == 0


def test_a_leader_whose_clock_is_behind_refuses_records_until_they_are_valid(
    shared_broker: Broker, kafka: KafkaConnection
) -> None:
    """From the leader's point of view, the producer's clock is ahead: by 30 minutes, by two hours."""
    now_ms = time.time_ns() // 1_000_000
    near, far = (topics.batch_of(Record(value=b"x", timestamp_ms=now_ms + minutes * 60_000)) for minutes in (30, 120))
    name = topics.create_topic(shared_broker, "clock")

    def is_taken(batch: bytes) -> bool:
        error = topics.produce(kafka, name, batch).error_code
        assert error in (0, ErrorCode.INVALID_TIMESTAMP)
        return error == 0

    assert is_taken(near) and not is_taken(far)
    topics.set_config(kafka, name, message_timestamp_after_max_ms="86400000")
    eventually(lambda: is_taken(far), "a wider range")
    topics.set_config(kafka, name, message_timestamp_after_max_ms="60000")
    eventually(lambda: not is_taken(near), "a narrower range")
    topics.set_config(kafka, name, message_timestamp_type="LogAppendTime")
    eventually(lambda: is_taken(far), "the leader's own times")
