"""A transactional producer of raw requests, so that a test can repeat, delay and forge requests
that a client library would not send.
"""

from __future__ import annotations

import itertools
import time

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AddPartitionsToTxnRequest,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    EndTxnRequest,
    FetchRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    ProduceRequest,
)
from mqd.protocol.records import Record, decode_batch, encode_batch, iterate_batches
from tests.broker import Broker
from tests.interaction.traffic import (
    FETCH,
    INIT_PRODUCER_ID,
    PRODUCE,
    create_topic,
    eventually,
    one_outcome,
    produce_request,
)
from tests.kafka_connection import KafkaConnection

FIND_COORDINATOR, ADD_PARTITIONS, END_TXN, DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS = 10, 24, 26, 61, 65
CONCURRENT_TRANSACTIONS, RETRIABLE_AT_START = 51, (14, 15, 16)
READ_COMMITTED = 1
_numbers = itertools.count(int(time.time() * 1000) % 1_000_000)


def fresh(prefix: str) -> str:
    return f"{prefix}-{next(_numbers)}"


def connect(broker: Broker) -> KafkaConnection:
    return KafkaConnection("127.0.0.1", broker.port)


class RawProducer:
    """`version` 2 or 0: of transactions. Every method returns the response or error code unchanged."""

    def __init__(
        self, kafka: KafkaConnection, name: str | None = None, version: int = 2, timeout_ms: int = 60_000
    ) -> None:
        self.kafka, self.name, self.version, self.timeout_ms = kafka, name or fresh("txn"), version, timeout_ms
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    def init(self, **expected: int):
        """Retries until the coordinator is available."""
        self.kafka.call(FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=1, coordinator_keys=[self.name]))

        def request():
            response = self.kafka.call(
                INIT_PRODUCER_ID,
                5,
                InitProducerIdRequest(transactional_id=self.name, transaction_timeout_ms=self.timeout_ms, **expected),
            )
            return None if response.error_code in RETRIABLE_AT_START else response

        response = eventually(request, "a transaction coordinator")
        if response.error_code == 0:
            self.adopt(response)
        return response

    def adopt(self, response) -> None:
        if (self.producer_id, self.epoch) != (response.producer_id, response.producer_epoch):
            self.producer_id, self.epoch = response.producer_id, response.producer_epoch
            self.sequences.clear()

    def add(self, topic: str, *partitions: int) -> int:
        topics = [AddPartitionsToTxnRequest.Topic(name=topic, partitions=list(partitions))]
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=topics,
        )
        (result,) = self.kafka.call(ADD_PARTITIONS, 3, request).results_by_topic_v3_and_below
        return result.results_by_partition[0].partition_error_code

    def request(self, topic: str, partitions: dict[int, tuple[bytes | Record, ...]]) -> ProduceRequest:
        data = []
        for index, values in partitions.items():
            sequence = self.sequences.get((topic, index), 0)
            self.sequences[topic, index] = sequence + len(values)
            records = [
                value if isinstance(value, Record) else Record(value=value, timestamp_ms=int(time.time() * 1000))
                for value in values
            ]
            encoded = encode_batch(
                records,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sequence,
                is_transactional=True,
            )
            data.append(ProduceRequest.PartitionData(index=index, records=encoded))
        return ProduceRequest(
            transactional_id=self.name,
            acks=-1,
            timeout_ms=30_000,
            topic_data=[ProduceRequest.TopicData(name=topic, partition_data=data)],
        )

    def produce(self, topic: str, partition: int, *values: bytes | Record, version: int | None = None) -> int:
        return one_outcome(
            self.kafka.call(
                PRODUCE, version or (12 if self.version == 2 else 10), self.request(topic, {partition: values})
            )
        ).error_code

    def end_request(self, committed: bool) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=self.name, producer_id=self.producer_id, producer_epoch=self.epoch, committed=committed
        )

    def end(self, committed: bool) -> int:
        response = self.kafka.call(END_TXN, 5 if self.version == 2 else 3, self.end_request(committed))
        if response.error_code == 0 and self.version == 2:
            self.adopt(response)
        return response.error_code

    def state(self):
        (found,) = self.kafka.call(
            DESCRIBE_TRANSACTIONS, 0, DescribeTransactionsRequest(transactional_ids=[self.name])
        ).transaction_states
        return found


def topic_of(kafka: KafkaConnection, partitions: int = 1, **configs: str) -> str:
    name = fresh("t")
    create_topic(kafka, name, partitions, **configs)
    return name


def begun(kafka: KafkaConnection, topic: str, *partitions: int) -> RawProducer:
    producer = RawProducer(kafka)
    assert producer.init().error_code == 0
    for partition in partitions:
        assert producer.produce(topic, partition, b"open") == 0
    return producer


def hang(kafka: KafkaConnection, topic: str, partition: int, producer_id: int) -> None:
    """Writes a transactional batch that no coordinator knows of."""
    record = Record(value=b"hanging", timestamp_ms=int(time.time() * 1000))
    encoded = encode_batch([record], producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True)
    request = produce_request(topic, {partition: encoded})
    request.transactional_id = "of-no-producer"
    assert one_outcome(kafka.call(PRODUCE, 9, request)).error_code == 0


def fetch_committed(
    kafka: KafkaConnection, topic: str, partition: int, offset: int = 0, max_wait_ms: int = 0, bytes_max: int = 1 << 20
):
    partitions = [FetchRequest.Partition(partition=partition, fetch_offset=offset, partition_max_bytes=bytes_max)]
    request = FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=50 << 20,
        isolation_level=READ_COMMITTED,
        topics=[FetchRequest.Topic(topic=topic, partitions=partitions)],
    )
    return one_outcome(kafka.call(FETCH, 12, request))


def read_committed(kafka: KafkaConnection, topic: str, partition: int) -> list[bytes]:
    return [record.value for record in read_committed_records(kafka, topic, partition)]


def read_committed_records(
    kafka: KafkaConnection, topic: str, partition: int, bytes_max: int = 1 << 20
) -> list[Record]:
    """As a consumer does: without the records of aborted transactions, which the response lists."""
    found: list[Record] = []
    offset = 0
    while True:
        outcome = fetch_committed(kafka, topic, partition, offset, bytes_max=bytes_max)
        assert outcome.error_code == 0, outcome
        if offset >= outcome.last_stable_offset:
            return found
        aborted = sorted((one.first_offset, one.producer_id) for one in outcome.aborted_transactions or [])
        active: set[int] = set()
        for header, data in iterate_batches(outcome.records, allow_partial=True):
            while aborted and aborted[0][0] <= header.last_offset:
                active.add(aborted.pop(0)[1])
            if header.is_control:
                active.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in active):
                found += [record for record in decode_batch(data) if record.offset >= offset]
            offset = header.last_offset + 1


def producers(kafka: KafkaConnection, topic: str, partition: int) -> list:
    requests = [DescribeProducersRequest.Topic(name=topic, partition_indexes=[partition])]

    def answer() -> DescribeProducersResponse.PartitionResponse | None:
        """Other workers may already serve reads while the partition's owner is still opening it and
        does not lead yet.
        """
        (found,) = kafka.call(DESCRIBE_PRODUCERS, 0, DescribeProducersRequest(topics=requests)).topics[0].partitions
        return None if found.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER else found

    found = eventually(answer, "the partition's owner serves")
    assert found.error_code == 0, found
    return found.active_producers
