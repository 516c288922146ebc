"""DescribeProducers 0 (KIP-664): what partitions know of their producers; how a transaction that hangs is found: an old start offset, and no coordinator that knows it."""

from mqd.acceptor.broker import Broker, Context, log
from mqd.log import producers
from mqd.log.batches import CorruptBatch
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import DescribeProducersRequest, DescribeProducersResponse


async def handle(context: Context, header: RequestHeader, request: DescribeProducersRequest) -> DescribeProducersResponse:
    topics = []
    for topic in request.topics:
        partitions = [await _partition(context.broker, topic.name, index) for index in topic.partition_indexes]
        topics.append(DescribeProducersResponse.TopicResponse(name=topic.name, partitions=partitions))
    return DescribeProducersResponse(topics=topics)


def _refused(index: int, error: int) -> DescribeProducersResponse.PartitionResponse:
    return DescribeProducersResponse.PartitionResponse(partition_index=index, error_code=int(error), error_message=error_message(int(error)))


async def _partition(broker: Broker, name: str, index: int) -> DescribeProducersResponse.PartitionResponse:
    partition = broker.partition_of(name, index)
    if partition is None:
        return _refused(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    view = broker.view(partition)
    if view is None:
        return _refused(index, broker.unserved_error(partition))
    try:
        found = await broker.on_disk(producers.describe, broker.path_of(name, partition), view.log_start_offset, view.log_end_offset)
    except (OSError, CorruptBatch) as failure:
        log.error("producers cannot be read", partition=f"{name}-{index}", reason=str(failure))
        return _refused(index, ErrorCode.KAFKA_STORAGE_ERROR)
    return DescribeProducersResponse.PartitionResponse(
        partition_index=index,
        error_code=0,
        active_producers=[
            DescribeProducersResponse.ProducerState(
                producer_id=one.producer_id,
                producer_epoch=one.producer_epoch,
                last_sequence=one.last_sequence,
                last_timestamp=one.last_timestamp_ms,
                coordinator_epoch=one.coordinator_epoch,
                current_txn_start_offset=one.transaction_first_offset,
            )
            for one in found
        ],
    )
