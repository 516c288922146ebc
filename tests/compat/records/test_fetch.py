"""Fetch with raw frames: waiting for bytes and for time, limits that never cut the first batch,
offsets outside the log, many requests on one connection.
"""

from __future__ import annotations

import time

import pytest

from mqd.protocol import ErrorCode
from mqd.protocol.messages import ApiVersionsRequest, FetchRequest, MetadataRequest
from mqd.protocol.records import Record, decode_records
from tests.broker import Broker
from tests.compat import topics
from tests.compat.messages import compressible
from tests.compat.topics import API_VERSIONS, FETCH, LIST_OFFSETS, METADATA, PRODUCE
from tests.polling import PATIENCE_S

# A machine busy with other tests may be slow; a fetch that waits for its timeout takes a whole long
# poll, which is far above this.
SOON_SECONDS = 15.0
CLOCK_MS = 20  # the broker uses the kernel's coarse clock
LONG_MS = 30_000


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return topics.create_topic(shared_broker, "fetch", 3)


@pytest.mark.both_backends
def test_a_record_ends_a_long_poll_at_once(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as reader, topics.connect(shared_broker) as writer:
        for number in range(10):
            partition = number % 3  # of every worker, from both connections' workers
            reader.send(
                FETCH,
                11,
                topics.fetch_request(
                    [(topic, p, number // 3 + (p < partition)) for p in range(3)], max_wait_ms=LONG_MS
                ),
            )
            time.sleep(0.05)  # the fetch must be parked when the record arrives
            began = time.monotonic()
            topics.must_produce(writer, topic, b"now", partition=partition)
            body = reader.receive().body
            assert time.monotonic() - began < SOON_SECONDS
            records = {part.partition_index: part.records for part in body.responses[0].partitions if part.records}
            assert [record.value for record in decode_records(records[partition])] == [b"now"]


def test_an_empty_fetch_returns_only_after_max_wait(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        began = time.monotonic()
        part = topics.fetch(kafka, topic, 0, max_wait_ms=400)
        waited = time.monotonic() - began
        assert (part.error_code, part.high_watermark, part.records or b"") == (0, 0, b"")
        assert 0.39 <= waited < SOON_SECONDS


def test_a_max_wait_of_zero_returns_at_once(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        for options in ({"max_wait_ms": 0, "min_bytes": 1}, {"max_wait_ms": LONG_MS, "min_bytes": 0}):
            began = time.monotonic()
            assert topics.fetch(kafka, topic, 0, **options).error_code == 0
            assert time.monotonic() - began < SOON_SECONDS


def test_min_bytes_waits_for_the_sum_over_partitions(shared_broker: Broker, topic: str) -> None:
    value = compressible(4000, "min bytes")
    with topics.connect(shared_broker) as reader, topics.connect(shared_broker) as writer:
        reader.send(
            FETCH, 11, topics.fetch_request([(topic, p, 0) for p in range(3)], max_wait_ms=LONG_MS, min_bytes=10_000)
        )
        began = time.monotonic()
        for partition in range(2):
            topics.must_produce(writer, topic, value, partition=partition)
        reader.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            reader.receive_frame()
        reader.socket.settimeout(PATIENCE_S)
        topics.must_produce(writer, topic, value, partition=2)
        body = reader.receive().body
        assert time.monotonic() - began < SOON_SECONDS
        assert [len(topics.headers_in(part.records)) for part in body.responses[0].partitions] == [1, 1, 1]


def test_too_few_bytes_are_returned_after_max_wait(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, b"little")
        began = time.monotonic()
        part = topics.fetch(kafka, topic, 0, max_wait_ms=400, min_bytes=1 << 20)
        assert time.monotonic() - began >= 0.39
        assert [record.value for record in decode_records(part.records)] == [b"little"]


def test_an_error_does_not_wait(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        began = time.monotonic()
        request = topics.fetch_request(
            [(topic, 0, 0), (topic, 9, 0), (topics.fresh_name("nowhere"), 0, 0)], max_wait_ms=LONG_MS, min_bytes=1 << 20
        )
        body = kafka.call(FETCH, 11, request)
        assert time.monotonic() - began < SOON_SECONDS
        errors = [
            (part.partition_index, part.error_code) for answered in body.responses for part in answered.partitions
        ]
        assert errors == [(0, 0), (9, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), (0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]


@pytest.mark.parametrize("offset", [-1, 3, 1 << 62])
def test_an_offset_outside_the_log_is_refused(shared_broker: Broker, topic: str, offset: int) -> None:
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, b"a", b"b")
        assert topics.fetch(kafka, topic, 2, max_wait_ms=0).error_code == 0, "the end itself is no error"
        part = topics.fetch(kafka, topic, offset, max_wait_ms=LONG_MS)
        assert part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize(("epoch", "error"), [(0, 0), (-1, 0), (7, ErrorCode.UNKNOWN_LEADER_EPOCH)])
def test_leader_epochs_are_compared(shared_broker: Broker, topic: str, epoch: int, error: int) -> None:
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, b"a")
        request = topics.fetch_request([(topic, 0, 0)])
        request.topics[0].partitions[0].current_leader_epoch = epoch
        assert kafka.call(FETCH, 11, request).responses[0].partitions[0].error_code == error


def test_kafkas_replica_verification_tool_reads_as_a_consumer(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, b"a")
        body = kafka.call(FETCH, 11, topics.fetch_request([(topic, 0, 0)], replica_id=-2))
    assert body.error_code == 0 and body.responses[0].partitions[0].records


def test_a_followers_fetch_from_a_client_is_refused(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        body = kafka.call(FETCH, 11, topics.fetch_request([(topic, 0, 0)], replica_id=2))
        parts = [part.error_code for answered in body.responses for part in answered.partitions]
        assert body.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED or set(parts) == {
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        }


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.both_backends
def test_a_batch_larger_than_every_limit_is_returned_whole_and_alone(shared_broker: Broker, topic: str) -> None:
    big = compressible(300_000, "limit")
    with topics.connect(shared_broker) as kafka:
        for _ in range(2):
            topics.must_produce(kafka, topic, big)
        for version in (4, 12):
            part = topics.fetch(kafka, topic, 0, version=version, max_bytes=1000, partition_max_bytes=10)
            assert [record.value for record in decode_records(part.records)] == [big]


def test_the_limit_of_a_partition_cuts_between_batches(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        for number in range(20):
            topics.must_produce(kafka, topic, bytes([number]) * 1000)
        size = len(topics.batch_of(b"x" * 1000))
        part = topics.fetch(kafka, topic, 3, partition_max_bytes=size * 4 + size // 2)
        whole = list(decode_records(part.records, allow_partial=True))
        assert [record.offset for record in whole] == [3, 4, 5, 6], "as many as fit, from the requested offset"
        assert len(part.records) <= size * 4 + size // 2


def test_the_limit_of_a_request_holds_over_partitions(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        for partition in range(3):
            for _ in range(4):
                topics.must_produce(kafka, topic, b"y" * 10_000, partition=partition)
        body = kafka.call(FETCH, 11, topics.fetch_request([(topic, p, 0) for p in range(3)], max_bytes=50_000))
        sizes = [len(part.records or b"") for part in body.responses[0].partitions]
        assert 30_000 <= sum(sizes) <= 50_000 and len(sizes) == 3
        assert sizes[0] > 40_000, "partitions are filled in the requested order"


def test_fetching_from_the_middle_of_a_batch_gives_the_whole_batch(shared_broker: Broker, topic: str) -> None:
    """Brokers do not split batches; the client skips records before its offset."""
    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, topic, *[b"%d" % number for number in range(10)])
        topics.must_produce(kafka, topic, b"next")
        part = topics.fetch(kafka, topic, 7)
        assert [header.base_offset for header in topics.headers_in(part.records)] == [0, 10]


@pytest.mark.both_backends
def test_many_segments_are_read_in_order(shared_broker: Broker) -> None:
    name = topics.create_topic(shared_broker, "segments", segment_bytes="20000")
    with topics.connect(shared_broker) as kafka:
        for number in range(40):
            topics.must_produce(kafka, name, b"%04d" % number * 500)
        values, offset = [], 0
        while offset < 40:
            found = list(decode_records(topics.fetch(kafka, name, offset).records, allow_partial=True))
            assert found and found[0].offset == offset
            values += [record.value[:4] for record in found]
            offset = found[-1].offset + 1
        assert values == [b"%04d" % number for number in range(40)]


# -- many requests on one connection ---------------------------------------------------------------


@pytest.mark.both_backends
def test_responses_are_sent_in_request_order(shared_broker: Broker, topic: str) -> None:
    """Requests served natively, those of the acceptor, of this worker's partitions and the other's,
    and a long poll among them: KafkaConnection.receive checks each id.
    """
    batch = topics.batch_of(b"pipelined")
    with topics.connect(shared_broker) as kafka:
        for number in range(20):
            kafka.send(PRODUCE, 9, topics.produce_request(topic, batch, number % 3))
            kafka.send(METADATA, 12, MetadataRequest(topics=[MetadataRequest.Topic(name=topic)]))
            kafka.send(FETCH, 11, topics.fetch_request([(topic, (number + 1) % 3, 0)], max_wait_ms=20))
            kafka.send(API_VERSIONS, 3, ApiVersionsRequest(client_software_name="tests", client_software_version="1"))
            kafka.send(LIST_OFFSETS, 7, None)
            kafka.send(PRODUCE, 9, topics.produce_request(topic, batch, number % 3), expect_response=True)
        responses = [kafka.receive() for _ in range(120)]
        assert [response.api_key for response in responses[:6]] == [
            PRODUCE,
            METADATA,
            FETCH,
            API_VERSIONS,
            LIST_OFFSETS,
            PRODUCE,
        ]
        offsets: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for response in responses:
            if response.api_key == PRODUCE:
                (part,) = response.body.responses[0].partition_responses
                assert part.error_code == 0
                offsets[part.index].append(part.base_offset)
        assert all(found == list(range(len(found))) for found in offsets.values())


def test_requests_behind_a_long_poll_get_responses_after_it(shared_broker: Broker, topic: str) -> None:
    with topics.connect(shared_broker) as kafka:
        began = time.monotonic()
        kafka.send(FETCH, 11, topics.fetch_request([(topic, 0, 0)], max_wait_ms=500))
        kafka.send(METADATA, 12, MetadataRequest(topics=[]))
        assert kafka.receive().api_key == FETCH
        assert kafka.receive().api_key == METADATA
        assert 0.49 <= time.monotonic() - began < SOON_SECONDS


def test_a_produce_behind_a_long_poll_of_its_own_connection_ends_it(shared_broker: Broker, topic: str) -> None:
    """Accepted while the fetch waits: the record is appended, and the poll returns it."""
    with topics.connect(shared_broker) as kafka:
        began = time.monotonic()
        kafka.send(FETCH, 11, topics.fetch_request([(topic, 0, 0)], max_wait_ms=LONG_MS))
        kafka.send(PRODUCE, 9, topics.produce_request(topic, topics.batch_of(b"behind")))
        part = kafka.receive().body.responses[0].partitions[0]
        assert [record.value for record in decode_records(part.records)] == [b"behind"]
        assert kafka.receive().body.responses[0].partition_responses[0].error_code == 0
        assert time.monotonic() - began < SOON_SECONDS


def test_an_empty_fetch_waits_and_is_answered(shared_broker: Broker) -> None:
    with topics.connect(shared_broker) as kafka:
        body = kafka.call(FETCH, 11, FetchRequest(max_wait_ms=100, min_bytes=1, topics=[]))
        assert (body.error_code, body.responses) == (0, [])


def test_timestamps_of_the_broker_are_reported(shared_broker: Broker) -> None:
    """LogAppendTime: the response to Produce and the stored batch have the broker's time."""
    name = topics.create_topic(shared_broker, "append-time", message_timestamp_type="LogAppendTime")
    with topics.connect(shared_broker) as kafka:
        before = int(time.time() * 1000)
        result = topics.produce(kafka, name, topics.batch_of(Record(value=b"old", timestamp_ms=1)))
        after = int(time.time() * 1000)
        assert result.error_code == 0 and before - CLOCK_MS <= result.log_append_time_ms <= after + CLOCK_MS
        (record,) = decode_records(topics.fetch(kafka, name, 0).records)
        assert record.timestamp_ms == result.log_append_time_ms
