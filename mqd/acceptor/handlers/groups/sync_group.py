"""SyncGroup 0-5 (KIP-345, 559): the leader sends the assignment, and every member receives its part
once the assignment is on disk.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.coordinator.group.classic.events import SyncGroup
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import SyncGroupRequest, SyncGroupResponse

_VERSION_NAMES_PROTOCOL = 5


async def handle(context: Context, header: RequestHeader, request: SyncGroupRequest) -> SyncGroupResponse:
    if header.api_version >= _VERSION_NAMES_PROTOCOL and (
        request.protocol_type is None or request.protocol_name is None
    ):
        return SyncGroupResponse(error_code=int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
    try:
        return await request_group(context.broker, request.group_id, lambda number: SyncGroup(number, request))
    except CoordinatorError as error:
        return SyncGroupResponse(error_code=error.error_code)
