"""Committed offsets on a running broker: they survive the death of the acceptor, of their
partitions' owners and of the whole broker; damage loses only the damaged records; clients cannot
write to internal topics.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from mqd.coordinator.group.records import decode_offset_key, decode_offset_value
from mqd.coordinator.internal_topic import partition_for
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    CreateTopicsRequest,
    FetchRequest,
    FindCoordinatorRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    ProduceRequest,
)
from mqd.protocol.records import Record, decode_records, encode_batch
from tests.broker import Broker
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S, eventually

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, CREATE_TOPICS = (
    0,
    1,
    2,
    3,
    8,
    9,
    10,
    19,
)
RETRIABLE = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
SECONDS = PATIENCE_S
OFFSETS = "__consumer_offsets"
PARTITIONS = 20


class Groups:
    """A client that commits and fetches offsets, retries on retriable errors, and reconnects when
    necessary.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.kafka = KafkaConnection("127.0.0.1", broker.port)

    def connect_again(self) -> None:
        self.kafka.close()
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.kafka = KafkaConnection("127.0.0.1", self.broker.port)
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def _until(self, request, errors_of):
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                response = request()
            except (ConnectionEnded, OSError):
                self.connect_again()
                continue
            errors = errors_of(response)
            if not errors & RETRIABLE:
                return response
            assert time.monotonic() < deadline, f"{errors}\n{self.broker.logs()}"
            time.sleep(0.02)

    def create(self, name: str, count: int = PARTITIONS) -> None:
        expected = CreateTopicsRequest.Topic(name=name, num_partitions=count, replication_factor=1)
        assert (
            self.kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[expected], timeout_ms=30_000))
            .topics[0]
            .error_code
            == 0
        )
        found = self.kafka.call(FIND_COORDINATOR, 4, FindCoordinatorRequest(coordinator_keys=["g"])).coordinators
        assert found[0].error_code == 0 and found[0].port == self.broker.port

    def commit(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        partitions = [
            OffsetCommitRequest.Partition(partition_index=index, committed_offset=offset, committed_metadata=f"{index}")
            for index, offset in offsets.items()
        ]
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=[OffsetCommitRequest.Topic(name=topic, partitions=partitions)],
        )
        response = self._until(
            lambda: self.kafka.call(OFFSET_COMMIT, 8, request),
            lambda response: {one.error_code for one in response.topics[0].partitions},
        )
        assert {one.error_code for one in response.topics[0].partitions} == {0}

    def committed(self, *groups: str) -> dict[str, dict[tuple[str, int], int]]:
        request = OffsetFetchRequest(
            groups=[OffsetFetchRequest.Group(group_id=group, topics=None) for group in groups], require_stable=True
        )
        response = self._until(
            lambda: self.kafka.call(OFFSET_FETCH, 8, request),
            lambda response: {one.error_code for one in response.groups},
        )
        return {
            one.group_id: {
                (topic.name, partition.partition_index): partition.committed_offset
                for topic in one.topics
                for partition in topic.partitions
            }
            for one in response.groups
        }


def names(count: int) -> list[str]:
    return [f"group-{number}" for number in range(count)]


def test_committed_offsets_survive_every_process(start_broker, io_backend) -> None:
    broker = start_broker(config={"io.backend": io_backend, "offsets.topic.num.partitions": "8"})
    client = Groups(broker)
    client.create("t")
    expected = {
        group: {("t", index): 1000 * number + index for index in range(0, PARTITIONS, 1 + number % 3)}
        for number, group in enumerate(names(30))
    }

    def commit_all(step: int) -> None:
        for group, offsets in expected.items():
            for name in offsets:
                offsets[name] += step
            client.commit(group, "t", {index: offset for (_, index), offset in offsets.items()})

    commit_all(0)
    assert client.committed(*expected, "nobody") == {**expected, "nobody": {}}
    kafka = client.kafka
    os.kill(broker.pid("mqd-acceptor"), signal.SIGKILL)
    assert client.committed(*expected) == expected and client.kafka is kafka, "the connection ended"
    commit_all(1)
    for name in ("mqd-worker-0", "mqd-worker-1"):
        os.kill(broker.pid(name), signal.SIGKILL)
        commit_all(7)
        assert client.committed(*expected) == expected
        broker.wait_until_ready()
    broker.kill_all()
    broker.start()
    client.connect_again()
    assert client.committed(*expected) == expected
    commit_all(5)
    assert broker.stop() == 0
    broker.start()
    client.connect_again()
    assert client.committed(*expected) == expected


def test_damage_loses_only_the_damaged_records(start_broker) -> None:
    broker = start_broker(config={"offsets.topic.num.partitions": "1"})
    client = Groups(broker)
    client.create("t")
    for number, group in enumerate(names(9)):
        client.commit(group, "t", {0: number})
    assert broker.stop() == 0
    (path,) = Path(broker.data_dir).glob(f"**/{OFFSETS}-0/00000000000000000000.log")
    data = bytearray(path.read_bytes())
    at = data.index(b"group-4")
    data[at] ^= 0x20
    path.write_bytes(data)
    broker.start()
    client.connect_again()
    committed = client.committed(*names(9))
    assert {group: offsets.get(("t", 0)) for group, offsets in committed.items()} == {
        group: number if number != 4 else None for number, group in enumerate(names(9))
    }
    eventually(lambda: "a coordinator's partition is damaged" in broker.logs(200))
    client.commit("group-4", "t", {0: 44})
    assert client.committed("group-4") == {"group-4": {("t", 0): 44}}


def test_clients_may_read_but_not_write_the_internal_topic(shared_broker) -> None:
    client = Groups(shared_broker)
    client.create("internal-read")
    client.commit("reader-of-it", "internal-read", {3: 77})
    metadata = client.kafka.call(METADATA, 9, MetadataRequest(topics=[MetadataRequest.Topic(name=OFFSETS)])).topics[0]
    assert metadata.is_internal and len(metadata.partitions) == 50
    partition = partition_for("reader-of-it", 50)
    for acks, version in ((-1, 9), (1, 7)):
        data = [ProduceRequest.PartitionData(index=partition, records=encode_batch([Record(b"v", b"k")]))]
        response = client.kafka.call(
            PRODUCE,
            version,
            ProduceRequest(
                acks=acks, timeout_ms=5000, topic_data=[ProduceRequest.TopicData(name=OFFSETS, partition_data=data)]
            ),
        )
        assert response.responses[0].partition_responses[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    end = client.kafka.call(
        LIST_OFFSETS,
        5,
        ListOffsetsRequest(
            topics=[
                ListOffsetsRequest.Topic(
                    name=OFFSETS, partitions=[ListOffsetsRequest.Partition(partition_index=partition, timestamp=-1)]
                )
            ]
        ),
    )
    assert end.topics[0].partitions[0].offset > 0
    expected = [FetchRequest.Partition(partition=partition, fetch_offset=0, partition_max_bytes=1 << 20)]
    fetched = client.kafka.call(
        FETCH,
        11,
        FetchRequest(
            replica_id=-1,
            max_wait_ms=1000,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[FetchRequest.Topic(topic=OFFSETS, partitions=expected)],
        ),
    )
    # The broker is shared: other groups' deleted offsets may lie in this partition as tombstones.
    records = [
        record
        for record in decode_records(fetched.responses[0].partitions[0].records)
        if record.key[:2] == b"\0\1" and record.value is not None
    ]
    found = {decode_offset_key(record.key): decode_offset_value(record.value) for record in records}
    assert (
        found["reader-of-it", "internal-read", 3].offset == 77
        and found["reader-of-it", "internal-read", 3].metadata == "3"
    )


def test_a_consumer_without_a_group_protocol_keeps_its_offsets(shared_broker) -> None:
    client = Groups(shared_broker)
    client.create("assigned", 3)
    settings = {"bootstrap.servers": shared_broker.bootstrap, "group.id": "assigned-group", "enable.auto.commit": False}
    consumer = Consumer(settings)
    places = [TopicPartition("assigned", index, 10 + index) for index in range(3)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()
    again = Consumer(settings)
    assert [
        place.offset for place in again.committed([TopicPartition("assigned", index) for index in range(3)], timeout=60)
    ] == [10, 11, 12]
    again.close()


@pytest.mark.slow
def test_a_million_committed_offsets_survive_a_restart(start_broker) -> None:
    broker = start_broker()
    client = Groups(broker)
    client.create("t", 1000)
    for group in names(1000):
        client.commit(group, "t", {index: index for index in range(1000)})
    os.kill(broker.pid("mqd-acceptor"), signal.SIGKILL)
    began = time.monotonic()
    for first in range(0, 1000, 100):
        found = client.committed(*names(1000)[first : first + 100])
        assert all(offsets == {("t", index): index for index in range(1000)} for offsets in found.values())
    print(f"a million committed offsets compared {time.monotonic() - began:.1f} s after kill -9 of the acceptor")
