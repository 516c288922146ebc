"""ShareGroupDescribe 1 (KIP-932): share groups, their epochs, and their members with assignments."""

import asyncio

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import HIDDEN_TOPICS, has_share_groups, may_see_topics, request_group
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.group.share.events import ShareDescribe
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import ShareGroupDescribeRequest, ShareGroupDescribeResponse
from mqd.security.acl import ResourceType


async def handle(
    context: Context, header: RequestHeader, request: ShareGroupDescribeRequest
) -> ShareGroupDescribeResponse:
    found = await asyncio.gather(*(_describe(context.broker, group_id) for group_id in request.group_ids))
    groups = [
        group
        if may_see_topics(context, group.members)
        else _failed(group.group_id, ErrorCode.TOPIC_AUTHORIZATION_FAILED, HIDDEN_TOPICS)
        for group in found
    ]
    if request.include_authorized_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = context.operations(ResourceType.GROUP, group.group_id, GROUP_OPERATIONS)
    return ShareGroupDescribeResponse(groups=groups)


async def _describe(broker: Broker, group_id: str) -> ShareGroupDescribeResponse.Group:
    if not has_share_groups(broker):
        return _failed(group_id, ErrorCode.UNSUPPORTED_VERSION)
    try:
        return await request_group(broker, group_id, ShareDescribe)
    except CoordinatorError as error:
        return _failed(group_id, error.error_code, error_message(error.error_code))


def _failed(group_id: str, error: int, message: str | None = None) -> ShareGroupDescribeResponse.Group:
    return ShareGroupDescribeResponse.Group(group_id=group_id, error_code=int(error), error_message=message)
