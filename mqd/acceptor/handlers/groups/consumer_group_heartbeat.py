"""ConsumerGroupHeartbeat 0-1 (KIP-848): all communication between a member and its consumer group."""

from uuid import uuid4

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.coordinator.group.consumer.cluster import ClientIdentity
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer.requests import problem_of
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse
from mqd.security.acl import Operation, ResourceType

DISABLED = "The feature group.version is 0: raise it to 1 (UpdateFeatures)."


async def handle(
    context: Context, header: RequestHeader, request: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    broker = context.broker
    if broker.coordinators is not None:
        if not broker.coordinators.cluster.has_consumer_groups:
            return ConsumerGroupHeartbeatResponse(error_code=int(ErrorCode.UNSUPPORTED_VERSION), error_message=DISABLED)
        problem = problem_of(
            request, header.api_version, broker.coordinators.cluster.settings(request.group_id).assignors
        )
        if problem is not None:
            return ConsumerGroupHeartbeatResponse(error_code=problem[0], error_message=problem[1])
    # Only names are checked here: a regular expression matches only topics that the member may
    # describe.
    names = request.subscribed_topic_names or ()
    if not all(context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name) for name in names):
        denied = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        return ConsumerGroupHeartbeatResponse(error_code=denied, error_message=error_message(denied))
    client_id, host = header.client_id or "", f"/{context.origin.reported_ip}"
    origin = context.origin
    authorized_as = ClientIdentity(origin.principal, origin.peer_ip) if broker.authorizer is not None else None
    new_member_id = str(uuid4()) if not request.member_id else ""
    try:
        return await request_group(
            broker,
            request.group_id,
            lambda number: ConsumerHeartbeat(number, client_id, host, request, new_member_id, authorized_as),
        )
    except CoordinatorError as error:
        return ConsumerGroupHeartbeatResponse(
            error_code=error.error_code, error_message=error_message(error.error_code)
        )
