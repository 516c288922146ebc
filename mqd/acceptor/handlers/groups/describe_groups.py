"""DescribeGroups 0-6 (KIP-345, 430, 1043): classic groups. Groups of other types and unknown groups
are described as Dead; since version 6 they also have the error GROUP_ID_NOT_FOUND.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import NAME_BYTES_MAX, group_coordinator, rebalance_of
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.group.group import Group
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeGroupsRequest, DescribeGroupsResponse
from mqd.security.acl import ResourceType

_VERSION_NOT_FOUND = 6


async def handle(context: Context, header: RequestHeader, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    groups = [
        _describe(context.broker, group_id, header.api_version, request.include_rebalance)
        for group_id in request.groups
    ]
    if request.include_authorized_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = context.authorized_operations(
                    ResourceType.GROUP, group.group_id, GROUP_OPERATIONS
                )
    return DescribeGroupsResponse(groups=groups)


def _describe(broker: Broker, group_id: str, version: int, includes_rebalance: bool) -> DescribeGroupsResponse.Group:
    if len(group_id) > NAME_BYTES_MAX:
        return DescribeGroupsResponse.Group(group_id=group_id, error_code=int(ErrorCode.INVALID_GROUP_ID))
    try:
        core = group_coordinator(broker).core(group_id)
    except CoordinatorError as error:
        return DescribeGroupsResponse.Group(group_id=group_id, error_code=error.error_code)
    description = core.describe() if isinstance(core, Group) else None
    if description is not None:
        if includes_rebalance:
            description.rebalance = rebalance_of(broker, core, DescribeGroupsResponse)
        return description
    code, message = 0, None
    if version >= _VERSION_NOT_FOUND:
        code = int(ErrorCode.GROUP_ID_NOT_FOUND)
        message = (
            f"Group {group_id} is not a classic group."
            if isinstance(core, Group) and core.exists
            else f"Group {group_id} not found."
        )
    return DescribeGroupsResponse.Group(group_id=group_id, group_state="Dead", error_code=code, error_message=message)
