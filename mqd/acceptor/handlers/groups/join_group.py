"""JoinGroup 0-9 (KIP-62, 134, 345, 394, 559, 800, 814): waits in the group's core until the
join phase ends.
"""

from uuid import uuid4

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.coordinator.group.classic.events import JoinGroup
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import JoinGroupRequest, JoinGroupResponse

INSTANCE_ID_CHARS_MAX = 249  # a constant of Kafka's clients
NAME_CHARS_MAX = 8_000
CLIENT_ID_CHARS_IN_MEMBER_ID = 200
_VERSION_NULL_PROTOCOL = 7


async def handle(context: Context, header: RequestHeader, request: JoinGroupRequest) -> JoinGroupResponse:
    try:
        response = await _join(context, header, request)
    except CoordinatorError as error:
        response = JoinGroupResponse(error_code=error.error_code, member_id=request.member_id, protocol_name=None)
    # "" and null both mean no name: older versions have no null.
    response.protocol_name = response.protocol_name or (None if header.api_version >= _VERSION_NULL_PROTOCOL else "")
    return response


async def _join(context: Context, header: RequestHeader, request: JoinGroupRequest) -> JoinGroupResponse:
    instance_id = request.group_instance_id
    if any(
        len(name) > NAME_CHARS_MAX
        for name in (request.protocol_type, *(protocol.name for protocol in request.protocols))
    ):
        raise CoordinatorError(ErrorCode.INVALID_REQUEST)
    if instance_id is not None and len(instance_id) > INSTANCE_ID_CHARS_MAX:
        raise CoordinatorError(ErrorCode.INVALID_REQUEST)
    coordinators = context.broker.coordinators
    if coordinators is not None and request.group_id:
        settings = coordinators.classic_settings
        if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
            raise CoordinatorError(ErrorCode.INVALID_SESSION_TIMEOUT)
    client_id = header.client_id or ""
    prefix = (client_id[:CLIENT_ID_CHARS_IN_MEMBER_ID] or "consumer") if instance_id is None else instance_id
    new_member_id = f"{prefix}-{uuid4()}"
    host = f"/{context.origin.reported_ip}"
    return await request_group(
        context.broker,
        request.group_id,
        lambda number: JoinGroup(number, header.api_version, client_id, host, request, new_member_id),
    )
