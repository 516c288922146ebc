"""Checks before a batch is written: records of compacted topics need keys, first batches of a
transaction need their coordinator, batches in another codec than the topic's are recompressed by
the acceptor. Only their own connection waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from mqd.protocol.crc32c import crc32c
from mqd.protocol.messages import InitProducerIdRequest, ProduceRequest
from mqd.protocol.records import CRC_START, HEADER_BYTES, Record, decode_records, encode_batch
from tests.broker import Broker, pause
from tests.interaction.traffic import (
    INIT_PRODUCER_ID,
    INVALID_RECORD,
    PRODUCE,
    Watch,
    batch,
    create_topic,
    eventually,
    log_end,
    must_produce,
    one_outcome,
    produce,
    read_batches,
    topic_name,
)
from tests.interaction.transactional import RawProducer
from tests.kafka_connection import ConnectionEnded, KafkaConnection

PRODUCE_BY_NAME = 12  # the newest that names topics by name; adds its partitions to the transaction itself (KIP-890)
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def kafka(shared_broker: Broker) -> Iterator[KafkaConnection]:
    with KafkaConnection("127.0.0.1", shared_broker.port) as connection:
        yield connection


def keyed(*keys: bytes | None, compression: str = "none", value: bytes = b"value", **producer) -> bytes:
    now_ms = int(time.time() * 1000)
    return encode_batch([Record(value, key, timestamp_ms=now_ms) for key in keys], compression=compression, **producer)


# -- records of compacted topics -------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_record_of_a_compacted_topic_has_a_key(
    kafka: KafkaConnection, request: pytest.FixtureRequest, compression: str
) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, 2, cleanup_policy="compact")
    for partition in (0, 1):  # one of this worker and one of the other
        assert produce(kafka, topic, partition, keyed(b"a", b"b", b"", compression=compression)).error_code == 0
        for version in (7, 8, 9):
            outcome = produce(
                kafka, topic, partition, keyed(b"a", None, b"c", None, compression=compression), version=version
            )
            assert outcome.error_code == INVALID_RECORD
            if version >= 8:
                assert [error.batch_index for error in outcome.record_errors] == [1, 3]
                expected = f"Compacted topic cannot accept message without key in topic partition {topic}-{partition}."
                assert {error.batch_index_error_message for error in outcome.record_errors} == {expected}
                assert "2 records" in outcome.error_message
        assert log_end(kafka, topic, partition) == 3
        stored = [record.key for data in read_batches(kafka, topic, partition) for record in decode_records(data)]
        assert stored == [b"a", b"b", b""]


def test_the_policy_of_a_topic_decides(kafka: KafkaConnection, request: pytest.FixtureRequest) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic + "-delete")
    create_topic(kafka, topic + "-both", cleanup_policy="compact,delete")
    for compression in COMPRESSIONS:
        assert produce(kafka, topic + "-delete", 0, keyed(None, compression=compression)).error_code == 0
        assert produce(kafka, topic + "-both", 0, keyed(None, compression=compression)).error_code == INVALID_RECORD


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_bytes_that_are_not_records_are_refused(
    kafka: KafkaConnection, request: pytest.FixtureRequest, compression: str
) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, cleanup_policy="compact")
    whole = bytearray(keyed(b"a", b"b", compression=compression))
    for position in range(HEADER_BYTES, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        damaged[CRC_START - 4 : CRC_START] = struct.pack(">I", crc32c(damaged[CRC_START:]))
        outcome = produce(kafka, topic, 0, bytes(damaged), version=8)
        assert outcome.error_code in (0, INVALID_RECORD), outcome  # a changed value is still a valid record
        assert outcome.error_code == 0 or outcome.error_message
    assert produce(kafka, topic, 0, bytes(whole)).error_code == 0


def test_a_decompression_bomb_delays_no_other_client(kafka: KafkaConnection, request: pytest.FixtureRequest) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, cleanup_policy="compact")
    outcome = produce(kafka, topic, 0, keyed(b"key", compression="zstd", value=bytes(200 << 20)), version=8)
    assert (outcome.error_code, outcome.record_errors) == (INVALID_RECORD, [])


@pytest.mark.parametrize("compression", ("none", "zstd"))
def test_batches_of_one_producer_keep_their_order(
    kafka: KafkaConnection, request: pytest.FixtureRequest, compression: str
) -> None:
    """Every second batch is checked by another process; none may overtake it."""
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, cleanup_policy="compact")
    response = kafka.call(INIT_PRODUCER_ID, 4, InitProducerIdRequest(transaction_timeout_ms=60_000))
    count = 60
    for sequence in range(count):
        one = keyed(
            b"%d" % sequence,
            compression=compression if sequence % 2 else "lz4",
            producer_id=response.producer_id,
            base_sequence=sequence,
            producer_epoch=response.producer_epoch,
        )
        data = [
            ProduceRequest.TopicData(name=topic, partition_data=[ProduceRequest.PartitionData(index=0, records=one)])
        ]
        kafka.send(PRODUCE, 9, ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=data))
    outcomes = [one_outcome(kafka.receive().body) for _ in range(count)]
    assert [(one.error_code, one.base_offset) for one in outcomes] == [(0, offset) for offset in range(count)]


def test_batches_with_acks_0_are_checked_and_written(
    kafka: KafkaConnection, shared_broker: Broker, request: pytest.FixtureRequest
) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, cleanup_policy="compact")
    with KafkaConnection("127.0.0.1", shared_broker.port) as silent:
        for number in range(20):
            data = [
                ProduceRequest.TopicData(
                    name=topic,
                    partition_data=[
                        ProduceRequest.PartitionData(index=0, records=keyed(b"%d" % number, compression="gzip"))
                    ],
                )
            ]
            silent.send(PRODUCE, 9, ProduceRequest(acks=0, timeout_ms=30_000, topic_data=data), expect_response=False)
        silent.call(18, 0)
    eventually(lambda: log_end(kafka, topic, 0) == 20, "all of it is flushed")
    with KafkaConnection("127.0.0.1", shared_broker.port) as silent, pytest.raises(ConnectionEnded):
        data = [
            ProduceRequest.TopicData(
                name=topic,
                partition_data=[ProduceRequest.PartitionData(index=0, records=keyed(None, compression="gzip"))],
            )
        ]
        silent.send(PRODUCE, 9, ProduceRequest(acks=0, timeout_ms=30_000, topic_data=data), expect_response=False)
        silent.call(18, 0)


# -- transactions ----------------------------------------------------------------------------------


def begin(kafka: KafkaConnection, transactional_id: str) -> tuple[int, int]:
    """(producer id, epoch)."""
    response = RawProducer(kafka, transactional_id).init()
    assert response.error_code == 0, response
    return response.producer_id, response.producer_epoch


def transactional(producer: tuple[int, int], sequence: int, *values: bytes) -> bytes:
    now_ms = int(time.time() * 1000)
    records = [Record(value, timestamp_ms=now_ms) for value in values or (b"value",)]
    return encode_batch(
        records, producer_id=producer[0], producer_epoch=producer[1], base_sequence=sequence, is_transactional=True
    )


def transactional_request(
    transactional_id: str | None, topic: str, batches: dict[int, bytes], acks: int = -1
) -> ProduceRequest:
    data = [ProduceRequest.PartitionData(index=index, records=records) for index, records in batches.items()]
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=30_000,
        topic_data=[ProduceRequest.TopicData(name=topic, partition_data=data)],
    )


def errors(body: object) -> dict[int, int]:
    (topic,) = body.responses
    return {partition.index: partition.error_code for partition in topic.partition_responses}


def test_a_transaction_begins_with_its_first_batch(kafka: KafkaConnection, request: pytest.FixtureRequest) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, 3)
    producer = begin(kafka, topic)
    first = transactional_request(topic, topic, {0: transactional(producer, 0), 1: transactional(producer, 0)})
    kafka.send(PRODUCE, PRODUCE_BY_NAME, first)
    for sequence in range(1, 20):  # none of them waits for a response
        kafka.send(
            PRODUCE,
            PRODUCE_BY_NAME,
            transactional_request(topic, topic, {partition: transactional(producer, sequence) for partition in (0, 1)}),
        )
    for _ in range(20):
        assert errors(kafka.receive().body) == {0: 0, 1: 0}


def test_older_producers_must_add_the_partition_first(kafka: KafkaConnection, request: pytest.FixtureRequest) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, 2)
    old = RawProducer(kafka, topic, version=0)
    producer = (old.init().producer_id, old.epoch)
    for version, error in ((9, 48), (10, 48), (11, 120)):
        assert errors(
            kafka.call(PRODUCE, version, transactional_request(topic, topic, {0: transactional(producer, 0)}))
        ) == {0: error}
    assert old.add(topic, 0) == 0
    both = transactional_request(topic, topic, {0: transactional(producer, 0), 1: transactional(producer, 0)})
    assert errors(kafka.call(PRODUCE, 9, both)) == {0: 0, 1: 48}


def test_forged_transactions_are_refused(kafka: KafkaConnection, request: pytest.FixtureRequest) -> None:
    topic = topic_name(request.node.name)
    create_topic(kafka, topic, 3)
    producer_id, epoch = begin(kafka, topic)
    for forged, error in (((producer_id + 1000, epoch), 49), ((producer_id, epoch + 1), 47), ((1 << 62, 0), 49)):
        for version in (9, 11, 12):
            assert errors(
                kafka.call(PRODUCE, version, transactional_request(topic, topic, {0: transactional(forged, 0)}))
            ) == {0: error}, (forged, version)
    one = transactional((producer_id, epoch), 0)
    assert errors(kafka.call(PRODUCE, 12, transactional_request(None, topic, {0: one}))) == {0: 53}
    two = {0: one, 1: transactional((producer_id + 1, epoch), 0), 2: transactional((producer_id, epoch + 1), 0)}
    assert errors(kafka.call(PRODUCE, 12, transactional_request(topic, topic, two))) == {0: 0, 1: 49, 2: 49}
    for nobody in ("", "x" * 32767, "nobody-knows-it"):
        outcome = errors(kafka.call(PRODUCE, 12, transactional_request(nobody, topic, {1: one})))
        assert set(outcome.values()) <= {42, 48, 49, 53, 120} and outcome, outcome
    assert log_end(kafka, topic, 1) == 0


# -- waiting ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    pause(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed inside, and reaped by now
            os.kill(pid, signal.SIGCONT)


def latencies(kafka: KafkaConnection, topic: str, seconds: float) -> list[float]:
    found, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end or len(found) < 20:
        must_produce(kafka, topic, 0, b"value")
        found.append(time.monotonic() - began)
    return found


@pytest.mark.parametrize("kind", ["records", "transaction"])
def test_no_other_connection_waits_for_a_stopped_acceptor(
    start_broker: Callable[..., Broker], io_backend: str, kind: str
) -> None:
    broker = start_broker(workers=1, config={"io.backend": io_backend, "log.flush.on.ack": "false"})
    with KafkaConnection("127.0.0.1", broker.port) as waiting, KafkaConnection("127.0.0.1", broker.port) as other:
        create_topic(other, "plain")
        create_topic(other, "asked", compression_type="gzip" if kind == "records" else "producer")
        if kind == "records":
            requested = ProduceRequest(
                acks=1,
                timeout_ms=60_000,
                topic_data=[
                    ProduceRequest.TopicData(
                        name="asked",
                        partition_data=[ProduceRequest.PartitionData(index=0, records=keyed(b"k", compression="lz4"))],
                    )
                ],
            )
            later = requested
        else:
            producer = begin(waiting, "id")
            requested, later = (
                transactional_request("id", "asked", {0: transactional(producer, sequence)}, acks=1)
                for sequence in (0, 1)
            )
        before = latencies(other, "plain", 0.5)
        with stopped(broker.pids("acceptor")[0]):
            waiting.send(PRODUCE, PRODUCE_BY_NAME, requested)
            waiting.send(PRODUCE, PRODUCE_BY_NAME, later)
            during = latencies(other, "plain", 1.0)
            waiting.socket.settimeout(0.01)
            with pytest.raises(TimeoutError):
                waiting.socket.recv(1)
            waiting.socket.settimeout(60)
        assert [one_outcome(waiting.receive().body).error_code for _ in range(2)] == [0, 0]
        print(
            f"{kind}: median {statistics.median(before) * 1e6:.0f} us, {statistics.median(during) * 1e6:.0f} us while"
            f" the acceptor was stopped ({len(during)} batches)"
        )
        assert statistics.median(during) < 3 * statistics.median(before) + 0.005


def test_checks_are_sent_again_to_a_restarted_acceptor(start_broker: Callable[..., Broker], io_backend: str) -> None:
    broker = start_broker(workers=2, config={"io.backend": io_backend})
    with contextlib.ExitStack() as connections:
        waiting = [
            connections.enter_context(KafkaConnection("127.0.0.1", broker.port, timeout_s=30)) for _ in range(20)
        ]
        create_topic(waiting[0], "asked", 2, compression_type="gzip")
        pid = broker.pids("acceptor")[0]
        with stopped(pid):
            for number, kafka in enumerate(waiting):
                records = keyed(b"%d" % number, compression="zstd", value=b"v" * 3000)
                data = [
                    ProduceRequest.TopicData(
                        name="asked", partition_data=[ProduceRequest.PartitionData(index=number % 2, records=records)]
                    )
                ]
                kafka.send(PRODUCE, 9, ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=data))
            os.kill(pid, signal.SIGKILL)
        assert [one_outcome(kafka.receive().body).error_code for kafka in waiting] == [0] * 20
        assert sum(log_end(waiting[0], "asked", partition) for partition in (0, 1)) == 20


def test_checks_that_take_too_long_time_out(start_broker: Callable[..., Broker], io_backend: str) -> None:
    broker = start_broker(workers=1, config={"io.backend": io_backend})
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        create_topic(kafka, "asked", cleanup_policy="compact", compression_type="gzip")
        data = [
            ProduceRequest.TopicData(
                name="asked",
                partition_data=[ProduceRequest.PartitionData(index=0, records=keyed(b"k", compression="zstd"))],
            )
        ]
        with stopped(broker.pids("acceptor")[0]):
            outcome = one_outcome(kafka.call(PRODUCE, 9, ProduceRequest(acks=1, timeout_ms=200, topic_data=data)))
            assert (outcome.error_code, outcome.error_message) == (
                7,
                "the batch's records were not checked in time; nothing was written",
            )
        assert (
            one_outcome(kafka.call(PRODUCE, 9, ProduceRequest(acks=1, timeout_ms=30_000, topic_data=data))).base_offset
            == 0
        )
        assert Watch(broker).total("batches_appended") >= 1
        assert produce(kafka, "asked", 0, batch(b"no key")).error_code == INVALID_RECORD
