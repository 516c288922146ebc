"""OffsetDelete version 0 (KIP-496): deletes committed offsets of topics that the group does not
subscribe to.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import is_group_id
from mqd.acceptor.handlers.topics.topic_names import partition_error
from mqd.coordinator.group.offsets import DeleteOffsets, OffsetsDeleted
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import OffsetDeleteRequest, OffsetDeleteResponse

TIMEOUT_S = 5.0


async def handle(context: Context, header: RequestHeader, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    broker = context.broker
    if not is_group_id(request.group_id):
        return OffsetDeleteResponse(error_code=int(ErrorCode.INVALID_GROUP_ID))
    topics, requested, accepted = [], [], []
    for topic in request.topics:
        partitions = [
            OffsetDeleteResponse.PartitionResponse(
                partition_index=part.partition_index,
                error_code=partition_error(broker, topic.name, part.partition_index),
            )
            for part in topic.partitions
        ]
        valid = [response for response in partitions if not response.error_code]
        requested.append((topic.name, tuple(response.partition_index for response in valid)))
        accepted.append(valid)
        topics.append(OffsetDeleteResponse.TopicResponse(name=topic.name, partitions=partitions))
    if broker.coordinators is None:
        return OffsetDeleteResponse(error_code=int(ErrorCode.COORDINATOR_NOT_AVAILABLE))
    try:
        deleted = await broker.coordinators.groups.request(
            request.group_id, lambda number: DeleteOffsets(number, tuple(requested)), TIMEOUT_S
        )
    except CoordinatorError as error:
        deleted = OffsetsDeleted(error.error_code)
    if deleted.error:
        return OffsetDeleteResponse(error_code=deleted.error)
    for valid, (_, errors) in zip(accepted, deleted.errors, strict=True):
        for response, code in zip(valid, errors, strict=True):
            response.error_code = code
    return OffsetDeleteResponse(topics=topics)
