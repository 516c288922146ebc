"""ShareGroupDescribe version 1 (KIP-932): share groups, their epochs, and their members with
assignments.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.describing import describe, topics_of_members
from mqd.acceptor.handlers.groups.group_requests import has_share_groups
from mqd.coordinator.group.share.events import ShareDescribe
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ShareGroupDescribeRequest, ShareGroupDescribeResponse


async def handle(
    context: Context, header: RequestHeader, request: ShareGroupDescribeRequest
) -> ShareGroupDescribeResponse:
    groups = await describe(
        context,
        request.group_ids,
        ShareDescribe,
        ShareGroupDescribeResponse.Group,
        topics_of_members,
        is_supported=has_share_groups(context.broker),
        includes_operations=request.include_authorized_operations,
    )
    return ShareGroupDescribeResponse(groups=groups)
