"""Heartbeat 0-4 (KIP-345). The acceptor's most frequent request: a core answers it immediately, and
nothing is written.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.coordinator.group.classic.events import Heartbeat
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import HeartbeatRequest, HeartbeatResponse


async def handle(context: Context, header: RequestHeader, request: HeartbeatRequest) -> HeartbeatResponse:
    try:
        return await request_group(context.broker, request.group_id, lambda number: Heartbeat(number, request))
    except CoordinatorError as error:
        # While the group is loading the response is success, as in Kafka: an error would make every
        # member of every group join again after a restart.
        return HeartbeatResponse(
            error_code=0 if error.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS else error.error_code
        )
