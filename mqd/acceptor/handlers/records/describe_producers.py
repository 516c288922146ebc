"""DescribeProducers version 0 (KIP-664): the producers that partitions know. A hanging transaction
is one that has an old start offset and that no coordinator knows.

The request goes to the owner of the partition: only the owner knows transactions that have begun
but not ended.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.topics.topic_names import missing_topic_error
from mqd.base.tasks import timeout
from mqd.native import ProducerView
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeProducersRequest, DescribeProducersResponse

TIMEOUT_S = 10.0


async def handle(
    context: Context, header: RequestHeader, request: DescribeProducersRequest
) -> DescribeProducersResponse:
    await context.broker.await_flushed(
        (topic.name, index) for topic in request.topics for index in topic.partition_indexes
    )
    topics = []
    for topic in request.topics:
        partitions = [await _partition(context.broker, topic.name, index) for index in topic.partition_indexes]
        topics.append(DescribeProducersResponse.TopicResponse(name=topic.name, partitions=partitions))
    return DescribeProducersResponse(topics=topics)


async def _partition(broker: Broker, name: str, index: int) -> DescribeProducersResponse.PartitionResponse:
    error, producers = await _request_producers(broker, name, index)
    return DescribeProducersResponse.PartitionResponse(
        partition_index=index,
        error_code=error,
        error_message=error_message(error) if error else None,
        active_producers=[
            _state(producer) for producer in sorted(producers, key=lambda producer: producer.producer_id)
        ],
    )


async def _request_producers(broker: Broker, name: str, index: int) -> tuple[int, list[ProducerView]]:
    partition = broker.partition_of(name, index)
    if partition is None:
        return missing_topic_error(name), []
    view = broker.view(partition)
    if view is None or broker.transactions is None:
        return broker.unserved_error(partition), []
    try:
        async with timeout(TIMEOUT_S):
            return await broker.transactions.owners.producers(view.owner, partition.slot)
    except TimeoutError:
        return int(ErrorCode.REQUEST_TIMED_OUT), []


def _state(producer: ProducerView) -> DescribeProducersResponse.ProducerState:
    return DescribeProducersResponse.ProducerState(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        last_sequence=producer.last_sequence,
        last_timestamp=producer.last_timestamp_ms,
        coordinator_epoch=producer.coordinator_epoch,
        current_txn_start_offset=producer.transaction_first_offset,
    )
