"""DescribeTopicPartitions version 0 (KIP-966): topics ordered by name, one page at a time."""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.security.authorized import TOPIC_OPERATIONS
from mqd.acceptor.handlers.topics.metadata import is_served, offline_replicas
from mqd.acceptor.handlers.topics.topic_names import missing_topic_error
from mqd.cluster.host.messages import PartitionImage, TopicImage
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse
from mqd.security.acl import Operation, ResourceType

PARTITION_COUNT_MAX = 2000  # per response, whatever limit the client requests
NO_ID = b"\0" * 16


async def handle(
    context: Context, header: RequestHeader, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    broker = context.broker
    cursor = request.cursor
    start_name, start_index = (cursor.topic_name, cursor.partition_index) if cursor is not None else ("", 0)
    named_in_request = bool(request.topics)
    requested = {topic.name for topic in request.topics}
    if start_index < 0 or (cursor is not None and named_in_request and start_name not in requested):
        invalid = int(ErrorCode.INVALID_REQUEST)
        return DescribeTopicPartitionsResponse(
            topics=[
                DescribeTopicPartitionsResponse.Topic(error_code=invalid, name=topic.name, topic_id=NO_ID)
                for topic in request.topics
            ]
        )
    if named_in_request:
        names = sorted(name for name in requested if name >= start_name)
    else:
        names = broker.metadata.sorted_names(start_name)
    denied = [
        name for name in names if not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name, named_in_request)
    ]
    if denied:
        denied_names = set(denied)
        names = [name for name in names if name not in denied_names]
    unauthorized = [
        DescribeTopicPartitionsResponse.Topic(
            error_code=int(ErrorCode.TOPIC_AUTHORIZATION_FAILED), name=name, topic_id=NO_ID
        )
        for name in denied
        if named_in_request
    ]
    remaining_count = max(1, min(request.response_partition_limit, PARTITION_COUNT_MAX))
    topics: list[DescribeTopicPartitionsResponse.Topic] = []
    for name in names:
        first_index = start_index if name == start_name else 0
        if remaining_count == 0:
            return DescribeTopicPartitionsResponse(
                topics=topics + unauthorized,
                next_cursor=DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=first_index),
            )
        topic = broker.metadata.topics.get(name)
        if topic is None:
            topics.append(
                DescribeTopicPartitionsResponse.Topic(
                    error_code=missing_topic_error(name),
                    name=name,
                    topic_id=NO_ID,
                    topic_authorized_operations=context.authorized_operations(
                        ResourceType.TOPIC, name, TOPIC_OPERATIONS
                    ),
                )
            )
            continue
        visible = broker.metadata.visible_partitions(topic)
        page = visible[first_index : first_index + remaining_count]
        remaining_count -= len(page)
        topics.append(_topic(context, topic, page))
        next_index = first_index + len(page)
        if next_index < len(visible):
            next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=next_index)
            return DescribeTopicPartitionsResponse(topics=topics + unauthorized, next_cursor=next_cursor)
    return DescribeTopicPartitionsResponse(topics=topics + unauthorized)


def _topic(context: Context, topic: TopicImage, page: list[PartitionImage]) -> DescribeTopicPartitionsResponse.Topic:
    broker = context.broker
    known_count = broker.metadata.known_count(topic, broker.table.metadata_version)
    return DescribeTopicPartitionsResponse.Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.internal,
        partitions=[_partition(broker, partition, partition.index < known_count) for partition in page],
        topic_authorized_operations=context.authorized_operations(ResourceType.TOPIC, topic.name, TOPIC_OPERATIONS),
    )


def _partition(broker: Broker, partition: PartitionImage, is_known: bool) -> DescribeTopicPartitionsResponse.Partition:
    is_available = is_known and is_served(broker, partition)
    return DescribeTopicPartitionsResponse.Partition(
        error_code=int(ErrorCode.NONE if is_available else ErrorCode.LEADER_NOT_AVAILABLE),
        partition_index=partition.index,
        leader_id=partition.leader if is_available else -1,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.in_sync_replicas,
        eligible_leader_replicas=partition.eligible,  # the Java client does not expect null
        last_known_elr=partition.last_known_eligible,
        offline_replicas=offline_replicas(broker, partition),
    )
