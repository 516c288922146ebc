"""ShareGroupHeartbeat version 1 (KIP-932): all communication between a member and its share group."""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import has_share_groups, request_group
from mqd.coordinator.group.consumer.requests import is_too_long, too_long_message
from mqd.coordinator.group.share.events import ShareHeartbeat
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse
from mqd.security.acl import Operation, ResourceType

LEAVE_EPOCH = -1
MEMBER_ID_CHARS_MAX = 36  # a UUID


async def handle(
    context: Context, header: RequestHeader, request: ShareGroupHeartbeatRequest
) -> ShareGroupHeartbeatResponse:
    if not has_share_groups(context.broker):
        return _refused(ErrorCode.UNSUPPORTED_VERSION)
    if not 0 < len(request.member_id) <= MEMBER_ID_CHARS_MAX:
        return _refused(ErrorCode.INVALID_REQUEST, "Invalid member id in the request.")
    names = request.subscribed_topic_names or ()
    if not all(context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name) for name in names):
        return _refused(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    problem = problem_of(request)
    if problem is not None:
        return _refused(ErrorCode.INVALID_REQUEST, problem)
    view = next((name for name in names if context.broker.metadata.log_topic_of(name) != name), None)
    if view is not None:
        return _refused(ErrorCode.INVALID_REQUEST, f"Share groups cannot read {view}, which is a view.")
    client_id, host = header.client_id or "", f"/{context.origin.reported_ip}"
    try:
        return await request_group(
            context.broker, request.group_id, lambda number: ShareHeartbeat(number, client_id, host, request)
        )
    except CoordinatorError as error:
        return _refused(error.error_code)


def problem_of(request: ShareGroupHeartbeatRequest) -> str | None:
    """Returns why the request is invalid regardless of the group's state, or None if it is valid."""
    if not request.member_id.strip():
        return "MemberId can't be empty."
    if not request.group_id.strip():
        return "GroupId can't be empty."
    if request.rack_id is not None and not request.rack_id.strip():
        return "RackId can't be empty."
    if request.member_epoch == 0 and not request.subscribed_topic_names:
        return "SubscribedTopicNames must be set in first request."
    if request.member_epoch < LEAVE_EPOCH:
        return "MemberEpoch is invalid."
    if is_too_long(request.subscribed_topic_names or (), request.group_id, request.rack_id):
        return too_long_message()
    return None


def _refused(error: int, message: str | None = None) -> ShareGroupHeartbeatResponse:
    return ShareGroupHeartbeatResponse(error_code=int(error), error_message=message or error_message(error))
