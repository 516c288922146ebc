"""DescribeCluster 0-2 (KIP-700, KIP-919, KIP-1073)."""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.security.authorized import authorized_cluster_operations
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeClusterRequest, DescribeClusterResponse

ENDPOINT_BROKERS, ENDPOINT_CONTROLLERS = 1, 2


async def handle(context: Context, header: RequestHeader, request: DescribeClusterRequest) -> DescribeClusterResponse:
    broker = context.broker
    if request.endpoint_type != ENDPOINT_BROKERS:
        known = request.endpoint_type == ENDPOINT_CONTROLLERS
        error = ErrorCode.MISMATCHED_ENDPOINT_TYPE if known else ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
        text = (
            "The request was sent to an endpoint of type BROKER."
            if known
            else f"Unsupported endpoint type {request.endpoint_type}."
        )
        return DescribeClusterResponse(error_code=int(error), error_message=text)
    brokers = [
        DescribeClusterResponse.Broker(broker_id=node_id, host=host, port=port, rack=rack)
        for node_id, host, port, rack in broker.brokers(context.origin)
    ]
    if request.include_fenced_brokers:
        fenced = [
            other for other in broker.metadata.brokers.values() if other.fenced and other.node_id != broker.node_id
        ]
        brokers += [
            DescribeClusterResponse.Broker(
                broker_id=other.node_id, host=other.host, port=other.port, rack=other.rack, is_fenced=True
            )
            for other in fenced
        ]
    response = DescribeClusterResponse(
        cluster_id=broker.metadata.cluster_id, controller_id=broker.node_id, brokers=brokers
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = authorized_cluster_operations(context)
    return response
