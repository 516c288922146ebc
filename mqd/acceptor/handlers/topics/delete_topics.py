"""DeleteTopics 1-6 (KIP-4, KIP-516, KIP-599). Topics are named, or since version 6 identified by id."""

import asyncio
from collections import Counter

from mqd.acceptor.broker import Context
from mqd.acceptor.throttle import MutationQuota
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DeleteTopicsRequest, DeleteTopicsResponse
from mqd.security.acl import Operation, ResourceType

NO_ID = b"\0" * 16


async def handle(context: Context, header: RequestHeader, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    if header.api_version >= 6:
        requested = [(topic.name, topic.topic_id) for topic in request.topics]
    else:
        requested = [(name, NO_ID) for name in request.topic_names]
    counts = Counter(requested)
    # As in Kafka, an entry with both a name and an id, or with neither, is invalid, and each such
    # entry gets its own result, even if it is repeated.
    valid = [(name, topic_id) for name, topic_id in counts if (name is None) != (topic_id == NO_ID)]
    invalid = [(name, topic_id) for name, topic_id in requested if (name is None) == (topic_id == NO_ID)]
    quota = MutationQuota(context, header, is_strict=header.api_version >= 5)

    async def delete(name: str | None, topic_id: bytes) -> DeleteTopicsResponse.TopicResult:
        async with quota.lock:
            if quota.must_refuse():
                return DeleteTopicsResponse.TopicResult(
                    name=name, topic_id=topic_id, error_code=int(ErrorCode.THROTTLING_QUOTA_EXCEEDED)
                )
            image = context.broker.metadata.topics.get(name) if name is not None else None
            image = image or context.broker.metadata.by_id(topic_id)
            count = counts[name, topic_id]
            result = await _delete(context, header.api_version, name, topic_id, count, request.timeout_ms)
            if not result.error_code and image is not None:
                quota.charge(len(image.partitions))
            return result

    results = await asyncio.gather(*(delete(name, topic_id) for name, topic_id in invalid + valid))
    return DeleteTopicsResponse(throttle_time_ms=quota.throttle_time_ms, responses=list(results))


def _is_authorized(context: Context, operation: Operation, name: str) -> bool:
    may_delete_any = context.authorize(Operation.DELETE, ResourceType.CLUSTER, named_in_request=False)
    return may_delete_any or context.authorize(operation, ResourceType.TOPIC, name)


async def _delete(
    context: Context, version: int, name: str | None, topic_id: bytes, count: int, timeout_ms: int
) -> DeleteTopicsResponse.TopicResult:
    broker = context.broker

    def result(error: int, message: str | None = None) -> DeleteTopicsResponse.TopicResult:
        return DeleteTopicsResponse.TopicResult(
            name=name, topic_id=topic_id, error_code=int(error), error_message=message
        )

    if (name is None) == (topic_id == NO_ID):
        return result(ErrorCode.INVALID_REQUEST, "You must specify either a topic name or a topic id, not both.")
    if count > 1:
        return result(ErrorCode.INVALID_REQUEST, "Duplicate topic.")
    image = broker.metadata.topics.get(name) if name is not None else broker.metadata.by_id(topic_id)
    topic_name = image.name if image is not None else name
    if topic_name is not None and not _is_authorized(context, Operation.DELETE, topic_name):
        if name is None and image is not None and _is_authorized(context, Operation.DESCRIBE, image.name):
            name = image.name  # otherwise the name is not disclosed
        return result(ErrorCode.TOPIC_AUTHORIZATION_FAILED, error_message(int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)))
    response = await broker.controller.request(
        messages.DeleteTopic(name, topic_id if name is None else None), timeout_ms
    )
    error = response.error
    if error == ErrorCode.TOPIC_DELETION_DISABLED and version < 3:
        error = int(ErrorCode.INVALID_REQUEST)
    if image is not None:
        name, topic_id = image.name, image.topic_id
    return result(error, response.message)
