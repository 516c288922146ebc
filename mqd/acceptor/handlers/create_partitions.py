"""CreatePartitions 0-3 (KIP-195, KIP-599).

With a tagged field of our own (9100, of a topic): the other way. The partitions from `count` on are retired (RETIRE; RETIRE_MOVING_KEYS: also where that moves keys of those that stay), or
their producers need not wait any longer for consumers (RELEASE). docs/decisions/2026-11-21-retired-partitions.md.
"""

import asyncio
from collections import Counter

from mqd.acceptor.broker import Broker, Context
from mqd.cluster import controller_messages as messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import CreatePartitionsRequest, CreatePartitionsResponse

RETIRE, RETIRE_MOVING_KEYS, RELEASE = 1, 2, 3


async def handle(context: Context, header: RequestHeader, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    counts = Counter(topic.name for topic in request.topics)
    by_name = {topic.name: topic for topic in request.topics}
    results = await asyncio.gather(*(_extend(context.broker, by_name[name], count, request) for name, count in counts.items()))
    return CreatePartitionsResponse(results=list(results))


async def _extend(broker: Broker, topic: CreatePartitionsRequest.Topic, count: int, request: CreatePartitionsRequest) -> CreatePartitionsResponse.TopicResult:
    if count > 1:
        return CreatePartitionsResponse.TopicResult(name=topic.name, error_code=int(ErrorCode.INVALID_REQUEST), error_message="Duplicate topic in request.")
    answer = await broker.controller.request(_change(topic), request.timeout_ms, request.validate_only)
    return CreatePartitionsResponse.TopicResult(name=topic.name, error_code=answer.error, error_message=answer.message)


def _change(topic: CreatePartitionsRequest.Topic) -> messages.Change:
    if topic.retire in (RETIRE, RETIRE_MOVING_KEYS):
        return messages.RetirePartitions(topic.name, topic.count, topic.retire == RETIRE_MOVING_KEYS)
    if topic.retire == RELEASE:
        return messages.ReleaseRetired(topic.name)
    return messages.AddPartitions(topic.name, topic.count, None if topic.assignments is None else [assignment.broker_ids for assignment in topic.assignments])
