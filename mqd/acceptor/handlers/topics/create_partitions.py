"""CreatePartitions 0-3 (KIP-195, KIP-599).

With mqd's own tagged field 9100 (per topic), the request reduces the number of partitions. RETIRE
retires the partitions whose index is at least `count`; RETIRE_MOVING_KEYS does so even if keys of
the remaining partitions move. RELEASE: producers no longer need to wait until consumers have read
the retired partitions. STATUS changes nothing. The result of each such topic also has a tagged
field 9100: the progress of retiring the topic's partitions, as this broker knows it. See
docs/decisions/cluster/2026-11-21-retired-partitions.md.
"""

import asyncio
from collections import Counter

from mqd.acceptor import retiring
from mqd.acceptor.broker import Context
from mqd.acceptor.throttle import MutationQuota
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import CreatePartitionsRequest, CreatePartitionsResponse

RETIRE, RETIRE_MOVING_KEYS, RELEASE, STATUS = 1, 2, 3, 4
Result = CreatePartitionsResponse.TopicResult


async def handle(context: Context, header: RequestHeader, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    counts = Counter(topic.name for topic in request.topics)
    by_name = {topic.name: topic for topic in request.topics}
    quota = MutationQuota(context, header, is_strict=header.api_version >= 3)

    async def respond(name: str, occurrences: int) -> Result:
        async with quota.lock:
            if quota.must_refuse() and by_name[name].retirement_action != STATUS:
                return Result(name=name, error_code=int(ErrorCode.THROTTLING_QUOTA_EXCEEDED), error_message=None)
            image = context.broker.metadata.topics.get(name)
            count_before = len(image.partitions) if image is not None else 0
            result = await _respond(context, header, by_name[name], occurrences, request)
            if not result.error_code and not request.validate_only and not by_name[name].retirement_action:
                quota.charge(max(by_name[name].count - count_before, 0))
            return result

    results = await asyncio.gather(*(respond(name, occurrences) for name, occurrences in counts.items()))
    return CreatePartitionsResponse(throttle_time_ms=quota.throttle_time_ms, results=list(results))


async def _respond(
    context: Context,
    header: RequestHeader,
    topic: CreatePartitionsRequest.Topic,
    occurrences: int,
    request: CreatePartitionsRequest,
) -> Result:
    broker = context.broker
    if occurrences > 1:
        return Result(
            name=topic.name, error_code=int(ErrorCode.INVALID_REQUEST), error_message="Duplicate topic in request."
        )
    if topic.retirement_action == STATUS:
        image = broker.metadata.topics.get(topic.name)
        return (
            _result(context, topic, 0, None)
            if image is not None
            else Result(name=topic.name, error_code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), error_message=None)
        )
    change = _change(context, topic)
    refusal = None
    if isinstance(change, messages.RetirePartitions):
        refusal = await retiring.refusal_to_retire(context, header, change)
    elif isinstance(change, messages.AddPartitions):
        refusal = await retiring.refusal_to_add(context, header, change)
    if refusal is not None:
        return Result(name=topic.name, error_code=refusal[0], error_message=refusal[1])
    response = await broker.controller.request(change, request.timeout_ms, request.validate_only)
    return _result(context, topic, response.error, response.message)


def _result(context: Context, topic: CreatePartitionsRequest.Topic, error: int, message: str | None) -> Result:
    """Adds the progress of retiring partitions if the request has the tagged field."""
    image = context.broker.metadata.topics.get(topic.name)
    return Result(
        name=topic.name,
        error_code=error,
        error_message=message,
        retirement=retiring.describe(context.broker, image) if topic.retirement_action and image is not None else None,
    )


def _change(context: Context, topic: CreatePartitionsRequest.Topic) -> messages.Change:
    if topic.retirement_action in (RETIRE, RETIRE_MOVING_KEYS):
        return messages.RetirePartitions(topic.name, topic.count, topic.retirement_action == RETIRE_MOVING_KEYS)
    if topic.retirement_action == RELEASE:
        return messages.ReleaseRetired(topic.name)
    image = context.broker.metadata.topics.get(topic.name)
    first_leader_epoch = image.first_leader_epoch if image is not None else 0
    return messages.AddPartitions(
        topic.name,
        topic.count,
        None if topic.assignments is None else [assignment.broker_ids for assignment in topic.assignments],
        first_leader_epoch,
    )
