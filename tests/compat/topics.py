"""Topics and raw requests, for tests whose client is the object of the test."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable

from mqd.protocol.messages import (
    CreateTopicsRequest,
    DeleteTopicsRequest,
    FetchRequest,
    IncrementalAlterConfigsRequest,
    ListOffsetsRequest,
    MetadataRequest,
    ProduceRequest,
)
from mqd.protocol.records import BatchHeader, Record, encode_batch, iterate_batches
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS, INIT_PRODUCER_ID = (
    0,
    1,
    2,
    3,
    18,
    19,
    20,
    22,
)
INCREMENTAL_ALTER_CONFIGS = 44
LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
READY_SECONDS = PATIENCE_S

_numbers = itertools.count(1)


def fresh_name(what: str) -> str:
    """A topic name that no other test uses: brokers are shared."""
    return f"{what}-{os.getpid()}-{next(_numbers)}"


def connect(broker: Broker, **options) -> KafkaConnection:
    return KafkaConnection.connect("127.0.0.1", broker.port, **options)


def create_topic(broker: Broker, what: str, partitions: int = 1, **configs: str) -> str:
    """A new topic, whose partitions are served. In `configs`, _ replaces a dot."""
    name = fresh_name(what)
    create_named(broker, name, partitions, **configs)
    return name


def create_named(broker: Broker, name: str, partitions: int = 1, **configs: str) -> None:
    rows = [CreateTopicsRequest.Config(name=key.replace("_", "."), value=value) for key, value in configs.items()]
    topic = CreateTopicsRequest.Topic(name=name, num_partitions=partitions, replication_factor=1, configs=rows)
    with connect(broker) as kafka:
        (result,) = kafka.call(CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic], timeout_ms=60_000)).topics
        assert result.error_code == 0, (result.error_code, result.error_message)
        wait_served(kafka, name)


def set_config(kafka: KafkaConnection, name: str, **configs: str) -> None:
    """Like create_topic's `configs`. The topic's leader applies them a moment later."""
    rows = [
        IncrementalAlterConfigsRequest.Config(key.replace("_", "."), config_operation=0, value=value)
        for key, value in configs.items()
    ]
    resource = IncrementalAlterConfigsRequest.Resource(resource_type=2, resource_name=name, configs=rows)
    response = kafka.call(INCREMENTAL_ALTER_CONFIGS, 1, IncrementalAlterConfigsRequest([resource]))
    assert not response.responses[0].error_code, response


def delete_topic(broker: Broker, name: str) -> None:
    with connect(broker) as kafka:
        request = DeleteTopicsRequest(topics=[DeleteTopicsRequest.TopicState(name=name)], timeout_ms=60_000)
        assert kafka.call(DELETE_TOPICS, 6, request).responses[0].error_code == 0


def wait_served(kafka: KafkaConnection, name: str) -> None:
    """Metadata shows a moment after creation that every partition has a leader; a client polls
    until then.
    """
    deadline = time.monotonic() + READY_SECONDS
    while True:
        (topic,) = kafka.call(
            METADATA, 12, MetadataRequest(topics=[MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False)
        ).topics
        errors = [topic.error_code, *(partition.error_code for partition in topic.partitions)]
        if not any(errors):
            return
        assert time.monotonic() < deadline, f"{name} not served after {READY_SECONDS} s: errors {errors}"


def topic_id(kafka: KafkaConnection, name: str) -> bytes:
    return kafka.call(METADATA, 12, MetadataRequest(topics=[MetadataRequest.Topic(name=name)])).topics[0].topic_id


def batch_of(*values: bytes | Record, **options) -> bytes:
    return encode_batch(
        [
            value if isinstance(value, Record) else Record(value=value, timestamp_ms=1_700_000_000_000)
            for value in values
        ],
        **options,
    )


def produce_request(name: str, records: bytes | None, partition: int = 0, acks: int = -1, **options) -> ProduceRequest:
    topic = ProduceRequest.TopicData(
        name=name, partition_data=[ProduceRequest.PartitionData(index=partition, records=records)], **options
    )
    return ProduceRequest(acks=acks, timeout_ms=60_000, topic_data=[topic])


def produce(
    kafka: KafkaConnection, name: str, records: bytes | None, partition: int = 0, *, version: int = 9, acks: int = -1
):
    """Writes one batch to one partition; returns its partition response, including errors."""
    return (
        kafka.call(PRODUCE, version, produce_request(name, records, partition, acks))
        .responses[0]
        .partition_responses[0]
    )


def must_produce(kafka: KafkaConnection, name: str, *values: bytes | Record, partition: int = 0, acks: int = -1) -> int:
    """The base offset of a batch that must be accepted."""
    result = produce(kafka, name, batch_of(*values), partition, acks=acks)
    assert result.error_code == 0, result
    return result.base_offset


def fetch_request(partitions: Iterable[tuple[str, int, int]], **options) -> FetchRequest:
    """`partitions`: (topic, partition, fetch offset). `topic_ids` maps names for versions 13 and
    later. Does not wait by default.
    """
    topic_ids = options.pop("topic_ids", {})
    size = options.pop("partition_max_bytes", 1 << 20)
    forgotten = options.pop("forgotten", ())
    topics = {}
    for name, partition, offset in partitions:
        topic = topics.setdefault(name, FetchRequest.Topic(topic=name, topic_id=topic_ids.get(name, bytes(16))))
        topic.partitions.append(
            FetchRequest.Partition(partition=partition, fetch_offset=offset, partition_max_bytes=size)
        )
    left = [
        FetchRequest.ForgottenTopic(topic=name, topic_id=topic_ids.get(name, bytes(16)), partitions=[partition])
        for name, partition in forgotten
    ]
    return FetchRequest(
        topics=list(topics.values()), forgotten_topics_data=left, **{"max_wait_ms": 0, "min_bytes": 1, **options}
    )


def fetch(kafka: KafkaConnection, name: str, offset: int, partition: int = 0, *, version: int = 11, **options):
    """Fetches one partition; returns its partition response, including errors."""
    return kafka.call(FETCH, version, fetch_request([(name, partition, offset)], **options)).responses[0].partitions[0]


def headers_in(records: bytes | None) -> list[BatchHeader]:
    return [header for header, _bytes in iterate_batches(records or b"")]


def list_offset(kafka: KafkaConnection, name: str, timestamp: int, partition: int = 0, *, version: int = 7):
    requested = ListOffsetsRequest.Partition(partition_index=partition, timestamp=timestamp)
    return (
        kafka.call(
            LIST_OFFSETS,
            version,
            ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name=name, partitions=[requested])]),
        )
        .topics[0]
        .partitions[0]
    )
