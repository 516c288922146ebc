"""ListOffsets with raw frames: ends, times, the newest time, over batches and segments."""

from __future__ import annotations

import pytest

from mqd.protocol import ErrorCode
from mqd.protocol.messages import DeleteRecordsRequest, ListOffsetsRequest
from mqd.protocol.records import Record
from tests.broker import Broker
from tests.compat import topics
from tests.compat.topics import EARLIEST, LATEST, LIST_OFFSETS, MAX_TIMESTAMP

# Offset -> time: unsorted, as with real clients' clocks, and spread over batches.
TIMES = [[1000, 1010, 1020], [1500], [1200, 2000, 1900], [3000, 3000], [2500]]
FLAT = [time for batch in TIMES for time in batch]


@pytest.fixture(scope="module", params=["one segment", "a segment for each batch"])
def timed(request: pytest.FixtureRequest, shared_broker: Broker) -> str:
    configs = {} if request.param == "one segment" else {"segment_bytes": "4096"}
    name = topics.create_topic(shared_broker, "times", 1, **configs)
    with topics.connect(shared_broker) as kafka:
        for batch in TIMES:
            padding = b"x" * (3000 // len(batch))
            topics.must_produce(kafka, name, *[Record(value=padding, timestamp_ms=time) for time in batch])
    return name


def expected(timestamp: int) -> tuple[int, int]:
    """The first record whose time is at or after it."""
    return next(((offset, time) for offset, time in enumerate(FLAT) if time >= timestamp), (-1, -1))


@pytest.mark.parametrize("version", [1, 2, 5, 6, 7, 9, 11])
def test_times(shared_broker: Broker, timed: str, version: int) -> None:
    with topics.connect(shared_broker) as kafka:
        for timestamp in (
            0,
            1,
            999,
            1000,
            1001,
            1020,
            1021,
            1200,
            1500,
            1501,
            1900,
            2000,
            2001,
            2500,
            3000,
            3001,
            1 << 60,
        ):
            found = topics.list_offset(kafka, timed, timestamp, version=version)
            assert (found.error_code, (found.offset, found.timestamp)) == (0, expected(timestamp)), timestamp


def test_ends(shared_broker: Broker, timed: str) -> None:
    with topics.connect(shared_broker) as kafka:
        for version in range(1, 12):
            assert topics.list_offset(kafka, timed, EARLIEST, version=version).offset == 0
            assert topics.list_offset(kafka, timed, LATEST, version=version).offset == len(FLAT)


def test_the_newest_time(shared_broker: Broker, timed: str) -> None:
    """-3, since version 7 (KIP-734): the first record with the newest time."""
    with topics.connect(shared_broker) as kafka:
        for version in (7, 8, 11):
            found = topics.list_offset(kafka, timed, MAX_TIMESTAMP, version=version)
            assert (found.error_code, found.offset, found.timestamp) == (0, FLAT.index(max(FLAT)), max(FLAT))
        assert topics.list_offset(kafka, timed, MAX_TIMESTAMP, version=6).error_code == ErrorCode.UNSUPPORTED_VERSION


def test_an_empty_partition(shared_broker: Broker) -> None:
    name = topics.create_topic(shared_broker, "empty")
    with topics.connect(shared_broker) as kafka:
        for timestamp, offset in ((EARLIEST, 0), (LATEST, 0), (MAX_TIMESTAMP, -1), (0, -1)):
            found = topics.list_offset(kafka, name, timestamp)
            assert (found.error_code, found.offset, found.timestamp) == (0, offset, -1), timestamp


def test_after_records_were_deleted(shared_broker: Broker) -> None:
    name = topics.create_topic(shared_broker, "deleted")
    with topics.connect(shared_broker) as kafka:
        for time in (100, 200, 300, 400):
            topics.must_produce(kafka, name, Record(value=b"x", timestamp_ms=time))
        requested = DeleteRecordsRequest.Topic(
            name=name, partitions=[DeleteRecordsRequest.Partition(partition_index=0, offset=2)]
        )
        assert (
            kafka.call(21, 2, DeleteRecordsRequest(topics=[requested], timeout_ms=60_000))
            .topics[0]
            .partitions[0]
            .low_watermark
            == 2
        )
        assert topics.list_offset(kafka, name, EARLIEST).offset == 2
        found = topics.list_offset(kafka, name, 50)
        assert (found.offset, found.timestamp) == (2, 300)
        assert topics.fetch(kafka, name, 1).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert topics.fetch(kafka, name, 2).error_code == 0


def test_many_at_once_and_unknown_ones(shared_broker: Broker, timed: str) -> None:
    other = topics.create_topic(shared_broker, "list-other", 3)
    nowhere = topics.fresh_name("nowhere")

    def requested(name: str, *partitions: tuple[int, int]) -> ListOffsetsRequest.Topic:
        return ListOffsetsRequest.Topic(
            name=name,
            partitions=[
                ListOffsetsRequest.Partition(partition_index=index, timestamp=time) for index, time in partitions
            ],
        )

    with topics.connect(shared_broker) as kafka:
        topics.must_produce(kafka, other, b"x", partition=2)
        request = ListOffsetsRequest(
            topics=[
                requested(other, (2, LATEST), (0, LATEST), (5, LATEST)),
                requested(nowhere, (0, EARLIEST)),
                requested(timed, (0, 1500)),
            ]
        )
        response = kafka.call(LIST_OFFSETS, 7, request)
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert [
            (topic.name, [(part.partition_index, part.error_code, part.offset) for part in topic.partitions])
            for topic in response.topics
        ] == [(other, [(2, 0, 1), (0, 0, 0), (5, unknown, -1)]), (nowhere, [(0, unknown, -1)]), (timed, [(0, 0, 3)])]


def test_a_duplicate_partition_is_refused(shared_broker: Broker, timed: str) -> None:
    """As in Kafka: the response could not distinguish them."""
    with topics.connect(shared_broker) as kafka:
        twice = [ListOffsetsRequest.Partition(partition_index=0, timestamp=timestamp) for timestamp in (EARLIEST, 1500)]
        response = kafka.call(
            LIST_OFFSETS, 7, ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name=timed, partitions=twice)])
        )
        assert {part.error_code for part in response.topics[0].partitions} == {ErrorCode.INVALID_REQUEST}


def test_leader_epochs(shared_broker: Broker, timed: str) -> None:
    with topics.connect(shared_broker) as kafka:
        for timestamp in (EARLIEST, LATEST, 1500):
            for epoch, error in ((-1, 0), (0, 0), (5, ErrorCode.UNKNOWN_LEADER_EPOCH)):
                part = ListOffsetsRequest.Partition(partition_index=0, timestamp=timestamp, current_leader_epoch=epoch)
                response = kafka.call(
                    LIST_OFFSETS,
                    7,
                    ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name=timed, partitions=[part])]),
                )
                assert response.topics[0].partitions[0].error_code == error, (timestamp, epoch)
