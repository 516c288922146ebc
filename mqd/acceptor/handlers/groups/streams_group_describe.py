"""StreamsGroupDescribe 0 (KIP-1071): streams groups, their topologies, and their members with tasks."""

import asyncio

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import HIDDEN_TOPICS, has_streams_groups, request_group
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.group.streams.events import StreamsDescribe
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import StreamsGroupDescribeRequest, StreamsGroupDescribeResponse
from mqd.security.acl import Operation, ResourceType


async def handle(
    context: Context, header: RequestHeader, request: StreamsGroupDescribeRequest
) -> StreamsGroupDescribeResponse:
    found = await asyncio.gather(*(_describe(context.broker, group_id) for group_id in request.group_ids))
    groups = [
        group
        if _may_see_topics(context, group)
        else _failed(group.group_id, ErrorCode.TOPIC_AUTHORIZATION_FAILED, HIDDEN_TOPICS)
        for group in found
    ]
    if request.include_authorized_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = context.operations(ResourceType.GROUP, group.group_id, GROUP_OPERATIONS)
    return StreamsGroupDescribeResponse(groups=groups)


async def _describe(broker: Broker, group_id: str) -> StreamsGroupDescribeResponse.Group:
    if not has_streams_groups(broker):
        return _failed(group_id, ErrorCode.UNSUPPORTED_VERSION)
    try:
        found: StreamsGroupDescribeResponse.Group = await request_group(broker, group_id, StreamsDescribe)
        return found
    except CoordinatorError as error:
        return _failed(group_id, error.error_code, error_message(error.error_code))


def _may_see_topics(context: Context, group: StreamsGroupDescribeResponse.Group) -> bool:
    """A group that uses a topic which the client may not describe is not described, as in Kafka."""
    names: set[str] = set()
    for one in (group.topology.subtopologies or ()) if group.topology is not None else ():
        names.update(one.source_topics, one.repartition_sink_topics)
        names.update(topic.name for topic in (*one.repartition_source_topics, *one.state_changelog_topics))
    return all(
        context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name, is_named=False) for name in sorted(names)
    )


def _failed(group_id: str, error: int, message: str | None = None) -> StreamsGroupDescribeResponse.Group:
    return StreamsGroupDescribeResponse.Group(group_id=group_id, error_code=int(error), error_message=message)
