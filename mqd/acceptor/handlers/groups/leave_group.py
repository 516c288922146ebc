"""LeaveGroup 0-5 (KIP-345, 800): a member leaves, or several do (version 3 and above). An
administrator removes static members by their instance ids alone.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.coordinator.group.classic.events import LeaveGroup
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import LeaveGroupRequest, LeaveGroupResponse

_VERSION_MEMBERS = 3


async def handle(context: Context, header: RequestHeader, request: LeaveGroupRequest) -> LeaveGroupResponse:
    if header.api_version < _VERSION_MEMBERS:
        request.members = [LeaveGroupRequest.MemberIdentity(member_id=request.member_id)]
    try:
        response = await request_group(context.broker, request.group_id, lambda number: LeaveGroup(number, request))
    except CoordinatorError as error:
        return LeaveGroupResponse(error_code=error.error_code)
    assert isinstance(response, LeaveGroupResponse)
    if header.api_version < _VERSION_MEMBERS:
        return LeaveGroupResponse(error_code=response.error_code or response.members[0].error_code)
    return response
