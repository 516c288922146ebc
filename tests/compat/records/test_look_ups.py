"""acks=1 followed by a lookup: a request right after an acknowledgement that did not wait for the
flush sees the acknowledged record, as with Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from mqd.protocol.messages import DeleteRecordsRequest, DescribeProducersRequest, OffsetForLeaderEpochRequest
from mqd.protocol.records import Record
from tests.broker import Broker
from tests.broker_files import faults_file
from tests.compat import topics
from tests.compat.topics import LATEST, MAX_TIMESTAMP

DELETE_RECORDS, OFFSET_FOR_LEADER_EPOCH, DESCRIBE_PRODUCERS = 21, 23, 61
ROUNDS = 60
FLUSH_MS = 30  # longer than any response takes: a lookup that does not wait misses the record every time


@pytest.fixture(scope="module", params=["epoll", "io_uring"])
def slow_disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Broker, Path]]:
    """A broker whose flushes of topics that begin with "seen" are slow, and the faults file that
    causes it.
    """
    data_dir = tmp_path_factory.mktemp("broker")
    faults = faults_file(data_dir)
    faults.write_text(f"sync:DELAY:seen:ms={FLUSH_MS}\n")
    with Broker(
        data_dir, config={"io.backend": request.param}, environment={"MQD_FILE_FAULTS": f"@{faults}"}
    ) as broker:
        yield broker, faults


def test_librdkafka_sees_what_it_wrote(slow_disk: tuple[Broker, Path]) -> None:
    broker, _faults = slow_disk
    name = topics.create_topic(broker, "seen", 3)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": 1, "linger.ms": 0})
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "looker"})
    missed = 0
    for turn in range(ROUNDS):
        producer.produce(name, b"value", partition=turn % 3)
        assert producer.flush(60) == 0
        _low, high = consumer.get_watermark_offsets(TopicPartition(name, turn % 3), timeout=60)
        missed += high != turn // 3 + 1
    consumer.close()
    assert missed == 0


def test_every_lookup_sees_it(slow_disk: tuple[Broker, Path]) -> None:
    broker, _faults = slow_disk
    name = topics.create_topic(broker, "seen")
    with topics.connect(broker) as writer, topics.connect(broker) as looker:
        for turn in range(8):
            topics.must_produce(writer, name, Record(value=b"v", timestamp_ms=1000 + turn), acks=1)
            if turn % 4 == 0:
                assert topics.list_offset(looker, name, LATEST).offset == turn + 1
            elif turn % 4 == 1:
                found = topics.list_offset(looker, name, MAX_TIMESTAMP)
                assert (found.offset, found.timestamp) == (turn, 1000 + turn)
            elif turn % 4 == 2:
                assert topics.list_offset(looker, name, 1000 + turn).offset == turn
            else:
                epoch = OffsetForLeaderEpochRequest.Partition(partition=0, current_leader_epoch=-1, leader_epoch=0)
                requested = OffsetForLeaderEpochRequest(
                    replica_id=-1, topics=[OffsetForLeaderEpochRequest.Topic(topic=name, partitions=[epoch])]
                )
                assert looker.call(OFFSET_FOR_LEADER_EPOCH, 4, requested).topics[0].partitions[0].end_offset == turn + 1


def test_records_are_deleted_right_after_they_came(slow_disk: tuple[Broker, Path]) -> None:
    """Up to the high watermark (-1), and up to an offset."""
    broker, _faults = slow_disk
    name = topics.create_topic(broker, "seen")
    with topics.connect(broker) as writer, topics.connect(broker) as looker:
        for turn, offset in enumerate((-1, 2, -1, 4)):
            topics.must_produce(writer, name, b"value", acks=1)
            row = DeleteRecordsRequest.Partition(partition_index=0, offset=offset)
            requested = DeleteRecordsRequest(
                topics=[DeleteRecordsRequest.Topic(name=name, partitions=[row])], timeout_ms=60_000
            )
            result = looker.call(DELETE_RECORDS, 2, requested).topics[0].partitions[0]
            assert (result.error_code, result.low_watermark) == (0, turn + 1)


def test_producers_are_described_when_their_records_are_safe(slow_disk: tuple[Broker, Path]) -> None:
    broker, _faults = slow_disk
    name = topics.create_topic(broker, "seen")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
    producer.produce(name, b"value")
    assert producer.flush(60) == 0
    with topics.connect(broker) as writer, topics.connect(broker) as looker:
        began = time.monotonic()
        topics.must_produce(writer, name, b"value", acks=1)
        requested = DescribeProducersRequest(topics=[DescribeProducersRequest.Topic(name=name, partition_indexes=[0])])
        (described,) = looker.call(DESCRIBE_PRODUCERS, 0, requested).topics[0].partitions
        assert time.monotonic() - began >= FLUSH_MS / 1000
        assert (described.error_code, len(described.active_producers)) == (0, 1)


def test_a_disk_that_hangs_is_not_waited_for_long(slow_disk: tuple[Broker, Path]) -> None:
    """Two seconds; then the response has the known offsets; requests for another disk's partitions
    have not waited.
    """
    broker, faults = slow_disk
    name, other = topics.create_topic(broker, "seen"), topics.create_topic(broker, "other")
    with topics.connect(broker) as writer, topics.connect(broker) as looker, topics.connect(broker) as bystander:
        topics.must_produce(writer, name, Record(value=b"v", timestamp_ms=1), acks=1)
        assert topics.list_offset(looker, name, LATEST).offset == 1
        faults.with_suffix(".new").write_text("sync:DELAY:seen:ms=12000\n")
        faults.with_suffix(".new").rename(faults)
        topics.must_produce(writer, name, Record(value=b"v", timestamp_ms=2), acks=1)
        for timestamp, offset in ((LATEST, 1), (MAX_TIMESTAMP, 0)):
            began = time.monotonic()
            topics.must_produce(bystander, other, b"value", acks=1)
            topics.list_offset(bystander, other, LATEST)
            began_to_look = time.monotonic()
            assert topics.list_offset(looker, name, timestamp).offset == offset
            waited = time.monotonic() - began_to_look
            assert waited > 1.8 and time.monotonic() - began < 11, "as long as the disk hangs"
        faults.with_suffix(".new").write_text(f"sync:DELAY:seen:ms={FLUSH_MS}\n")
        faults.with_suffix(".new").rename(faults)
