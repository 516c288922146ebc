"""DeleteRecords on a running broker, with the responses of Kafka's leader."""

from __future__ import annotations

import uuid

from mqd.protocol.messages import CreateTopicsRequest, DeleteRecordsRequest, ProduceRequest
from mqd.protocol.records import Record, encode_batch
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection

PRODUCE, CREATE_TOPICS, DELETE_RECORDS = 0, 19, 21
COUNT = 20


def test_a_timeout_of_zero_does_not_time_out(shared_broker: Broker) -> None:
    """The leader deletes at once; the timeout is for replicas on other hosts."""
    name = f"deleted-{uuid.uuid4()}"
    batch = encode_batch([Record(b"%d" % number) for number in range(COUNT)])
    data = ProduceRequest.TopicData(name=name, partition_data=[ProduceRequest.PartitionData(index=0, records=batch)])
    with KafkaConnection("127.0.0.1", shared_broker.port) as kafka:
        expected = CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1)
        assert (
            kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[expected], timeout_ms=30_000)).topics[0].error_code
            == 0
        )
        assert (
            kafka.call(PRODUCE, 9, ProduceRequest(acks=-1, timeout_ms=60_000, topic_data=[data]))
            .responses[0]
            .partition_responses[0]
            .error_code
            == 0
        )
        for offset in range(1, COUNT + 1):
            partition = DeleteRecordsRequest.Partition(partition_index=0, offset=offset)
            request = DeleteRecordsRequest(
                topics=[DeleteRecordsRequest.Topic(name=name, partitions=[partition])], timeout_ms=0
            )
            response = kafka.call(DELETE_RECORDS, 2, request).topics[0].partitions[0]
            assert (response.error_code, response.low_watermark) == (0, offset)
