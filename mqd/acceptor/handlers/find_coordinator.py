"""FindCoordinator 0-6 (KIP-98, KIP-699, KIP-932): on one host every group's and transaction's coordinator is this broker."""

from mqd.acceptor.broker import Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse

GROUP, TRANSACTION = 0, 1


async def handle(context: Context, header: RequestHeader, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    broker = context.broker
    known = request.key_type in (GROUP, TRANSACTION)
    error = int(ErrorCode.NONE if known else ErrorCode.INVALID_REQUEST)
    message = None if known else f"There are no coordinators of type {request.key_type} here."
    node_id, (host, port) = (broker.node_id, broker.advertised(context.address)) if known else (-1, ("", -1))
    if header.api_version < 4:
        return FindCoordinatorResponse(error_code=error, error_message=message, node_id=node_id, host=host, port=port)
    return FindCoordinatorResponse(
        coordinators=[
            FindCoordinatorResponse.Coordinator(key=key, node_id=node_id, host=host, port=port, error_code=error, error_message=message) for key in request.coordinator_keys
        ]
    )
