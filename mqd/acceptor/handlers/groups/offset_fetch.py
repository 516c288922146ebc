"""OffsetFetch 1-10 (KIP-98, KIP-320, KIP-447, KIP-709, KIP-848): committed offsets of a
group or, since version 8, of several groups.

A group that does not exist has no committed offsets: offset -1, no error. With require_stable a
partition with a pending transactional offset gets UNSTABLE_OFFSET_COMMIT.

Up to version 7 the group's error is also set on each partition. Versions 2 and later have a field
for the group's error, but aiokafka (0.14, which uses version 3) does not read this field: it would
take the response of a host that is no longer the coordinator for that of a group without commits, and
would read from the beginning.
"""

import asyncio

import msgspec

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.topics.topic_names import name_of
from mqd.coordinator.group.offsets import FetchOffsets, OffsetsFetched
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import OffsetFetchRequest, OffsetFetchResponse
from mqd.security.acl import Operation, ResourceType

_VERSION_GROUPS, _VERSION_TOPIC_IDS = 8, 10
TIMEOUT_S = 5.0
# The second code is sent instead of the first. On the first, aiokafka and older Java consumers give
# up; on the second, they look up the coordinator again (KAFKA-17267).
_REPLACED_ERRORS = {int(ErrorCode.COORDINATOR_NOT_AVAILABLE): int(ErrorCode.NOT_COORDINATOR)}

UNAUTHORIZED = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
Topics = tuple[tuple[str, tuple[int, ...]], ...]


async def handle(context: Context, header: RequestHeader, request: OffsetFetchRequest) -> OffsetFetchResponse:
    if header.api_version >= _VERSION_GROUPS:
        groups = await asyncio.gather(
            *(_group(context, header.api_version, group, request.require_stable) for group in request.groups)
        )
        return OffsetFetchResponse(groups=list(groups))
    requested = (
        None
        if request.topics is None
        else tuple((topic.name, tuple(topic.partition_indexes)) for topic in request.topics)
    )
    may_describe = {name: _may_describe(context, name) for name, _ in requested or ()}
    denied = tuple(topic for topic in requested or () if not may_describe[topic[0]])
    requested = requested and tuple(topic for topic in requested if may_describe[topic[0]])
    fetched = await _fetch(context, request.group_id, requested, request.require_stable, None, -1)
    if fetched.error:
        topics = [
            (name, [_refused(OffsetFetchResponse.Partition, index, fetched.error) for index in indexes])
            for name, indexes in (*(requested or ()), *denied)
        ]
    else:
        topics = [
            (name, [_result(OffsetFetchResponse.Partition, partition) for partition in partitions])
            for name, partitions in fetched.topics
        ]
        topics += [
            (name, [_refused(OffsetFetchResponse.Partition, index, UNAUTHORIZED) for index in indexes])
            for name, indexes in denied
        ]
    return OffsetFetchResponse(
        topics=[OffsetFetchResponse.Topic(name=name, partitions=partitions) for name, partitions in topics],
        error_code=fetched.error,
    )


async def _group(
    context: Context, version: int, group: OffsetFetchRequest.Group, require_stable: bool
) -> OffsetFetchResponse.Group:
    broker = context.broker
    has_topic_ids = version >= _VERSION_TOPIC_IDS
    requested, refused = None, []
    if group.topics is not None:
        permitted: list[tuple[str, tuple[int, ...]]] = []
        for topic in group.topics:
            name, error = name_of(broker, topic.name, topic.topic_id, has_topic_ids)
            if not error and not _may_describe(context, name):
                error = UNAUTHORIZED
            if error:
                failed = [
                    _refused(OffsetFetchResponse.GroupPartition, index, error) for index in topic.partition_indexes
                ]
                refused.append(
                    OffsetFetchResponse.GroupTopic(name=topic.name, topic_id=topic.topic_id, partitions=failed)
                )
            else:
                permitted.append((name, tuple(topic.partition_indexes)))
        requested = tuple(permitted)
    fetched = await _fetch(context, group.group_id, requested, require_stable, group.member_id, group.member_epoch)
    if fetched.error:
        return OffsetFetchResponse.Group(group_id=group.group_id, topics=[], error_code=fetched.error)
    topics = []
    for name, partitions in fetched.topics:
        image = broker.metadata.topics.get(name)
        if has_topic_ids and image is None:
            continue  # the topic was deleted after the commit: there is no id to name it by
        topic_id = image.topic_id if image is not None else bytes(16)
        topics.append(
            OffsetFetchResponse.GroupTopic(
                name=name,
                topic_id=topic_id,
                partitions=[_result(OffsetFetchResponse.GroupPartition, partition) for partition in partitions],
            )
        )
    return OffsetFetchResponse.Group(group_id=group.group_id, topics=topics + refused)


def _may_describe(context: Context, topic: str) -> bool:
    return context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic)


async def _fetch(
    context: Context,
    group_id: str,
    topics: Topics | None,
    require_stable: bool,
    member_id: str | None,
    member_epoch: int,
) -> OffsetsFetched:
    """Fetches offsets. If `topics` is None (all), returns only topics that the client may describe."""
    broker = context.broker
    if not context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        return OffsetsFetched(int(ErrorCode.GROUP_AUTHORIZATION_FAILED))
    if broker.coordinators is None:
        return OffsetsFetched(int(ErrorCode.NOT_COORDINATOR))
    try:
        fetched: OffsetsFetched = await broker.coordinators.groups.request(
            group_id, lambda number: FetchOffsets(number, topics, require_stable, member_id, member_epoch), TIMEOUT_S
        )
        if topics is None:
            shown = tuple(
                topic
                for topic in fetched.topics
                if context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic[0], named_in_request=False)
            )
            fetched = msgspec.structs.replace(fetched, topics=shown)
        return fetched
    except CoordinatorError as error:
        return OffsetsFetched(_REPLACED_ERRORS.get(error.error_code, error.error_code))


def _result(result_class: type, fetched):
    return result_class(
        partition_index=fetched.partition,
        committed_offset=fetched.offset,
        committed_leader_epoch=fetched.leader_epoch,
        metadata=fetched.metadata,
        error_code=fetched.error,
    )


def _refused(result_class: type, index: int, error: int):
    return result_class(
        partition_index=index, committed_offset=-1, committed_leader_epoch=-1, metadata="", error_code=error
    )
