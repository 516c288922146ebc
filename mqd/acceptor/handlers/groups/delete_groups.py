"""DeleteGroups 0-2 (KIP-229): deletes groups without members, with their offsets."""

import asyncio

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import NAME_BYTES_MAX, group_coordinator
from mqd.coordinator.group.group import DeleteGroup
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse


async def handle(context: Context, header: RequestHeader, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    results = await asyncio.gather(*(_delete(context.broker, group_id) for group_id in request.groups_names))
    return DeleteGroupsResponse(results=list(results))


async def _delete(broker: Broker, group_id: str) -> DeleteGroupsResponse.Result:
    error = int(ErrorCode.INVALID_GROUP_ID)
    if len(group_id) <= NAME_BYTES_MAX:
        try:
            error = await group_coordinator(broker).request(group_id, DeleteGroup)
        except CoordinatorError as failed:
            error = failed.error_code
    return DeleteGroupsResponse.Result(group_id=group_id, error_code=error)
