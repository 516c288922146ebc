"""DeleteRecords 0-2 (KIP-107): moves the log start of partitions. The controller forwards the
request to the owner.
"""

import asyncio

from mqd.acceptor.broker import Broker, Context
from mqd.base import config as configuration
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DeleteRecordsRequest, DeleteRecordsResponse

HIGH_WATERMARK = -1
# The shortest timeout that is applied. Kafka's leader deletes immediately and waits only for other
# replicas, so even a timeout of 0 can succeed there.
TIMEOUT_MS_MIN = 5_000


async def handle(context: Context, header: RequestHeader, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    await context.broker.await_flushed(
        (topic.name, requested.partition_index) for topic in request.topics for requested in topic.partitions
    )
    topics = await asyncio.gather(*(_topic(context.broker, topic, request.timeout_ms) for topic in request.topics))
    return DeleteRecordsResponse(topics=list(topics))


async def _topic(
    broker: Broker, topic: DeleteRecordsRequest.Topic, timeout_ms: int
) -> DeleteRecordsResponse.TopicResult:
    partitions = await asyncio.gather(
        *(
            _partition(broker, topic.name, requested.partition_index, requested.offset, timeout_ms)
            for requested in topic.partitions
        )
    )
    return DeleteRecordsResponse.TopicResult(name=topic.name, partitions=list(partitions))


async def _partition(
    broker: Broker, name: str, index: int, offset: int, timeout_ms: int
) -> DeleteRecordsResponse.PartitionResult:
    def result(error: int, low_watermark: int = -1) -> DeleteRecordsResponse.PartitionResult:
        return DeleteRecordsResponse.PartitionResult(
            partition_index=index, error_code=int(error), low_watermark=low_watermark
        )

    partition = broker.partition_of(name, index)
    if partition is None:
        return result(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if broker.metadata.topics[name].internal:
        return result(ErrorCode.INVALID_TOPIC_EXCEPTION)
    if broker.metadata.log_topic_of(name) != name:  # a view cannot delete the records of its base topic
        return result(ErrorCode.POLICY_VIOLATION)
    slot_view = broker.view(partition)
    if slot_view is None:
        return result(broker.unserved_error(partition))
    if _is_compact_only(broker, name):
        return result(ErrorCode.POLICY_VIOLATION)
    if offset < HIGH_WATERMARK or offset > slot_view.high_watermark:
        return result(ErrorCode.OFFSET_OUT_OF_RANGE)
    response = await broker.controller.request(
        messages.DeleteRecords(name, index, offset), max(timeout_ms, TIMEOUT_MS_MIN)
    )
    return result(response.error, response.offset if response.error == 0 else -1)


def _is_compact_only(broker: Broker, name: str) -> bool:
    """Whether the topic is compacted but records never expire: Kafka refuses to delete records of
    such a topic.
    """
    effective = configuration.topic_effective(broker.effective_config(), broker.metadata.topics[name].config)
    return configuration.topic_value(effective, "cleanup.policy") == ["compact"]
