"""AlterPartitionReassignments 0-1 (KIP-455): the controller checks each partition separately, and
the response comes when the reassignments have started.

On a single host a partition's only replica cannot move. Requesting its present placement changes
nothing and succeeds; other brokers do not exist; and there is never a reassignment to cancel.

With mqd's own tagged field 9100, the controller computes assignments that give all hosts the same
load: for the named topics (the request's partition indexes are ignored), or for all topics.
BALANCE starts the moves; PLAN only returns them, in the response's tagged field 9100.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse

FACTOR_CHANGE_SINCE_VERSION = 1
BALANCE, PLAN = 1, 2


async def handle(
    context: Context, header: RequestHeader, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    if request.balance:
        change = messages.BalanceReplicas([topic.name for topic in request.topics] or None)
        return _response(
            await context.broker.controller.request(change, request.timeout_ms, request.balance == PLAN),
            request.allow_replication_factor_change,
        )
    if not request.topics:
        # as in Kafka, without the request's allow_replication_factor_change
        return AlterPartitionReassignmentsResponse()
    if not context.broker.metadata.is_single_host:
        return await _request_controller(context.broker, header.api_version, request)
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                name=topic.name,
                partitions=[
                    _partition(context.broker, topic.name, partition.partition_index, partition.replicas)
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


async def _request_controller(
    broker: Broker, version: int, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    requested = [
        messages.PartitionReassignment(
            topic.name, partition.partition_index, list(partition.replicas) if partition.replicas is not None else None
        )
        for topic in request.topics
        for partition in topic.partitions
    ]
    allow_factor_change = request.allow_replication_factor_change if version >= FACTOR_CHANGE_SINCE_VERSION else True
    change = messages.AlterReassignments(requested, allow_factor_change)
    return _response(await broker.controller.request(change, request.timeout_ms), allow_factor_change)


def _response(response: messages.Response, allow_factor_change: bool) -> AlterPartitionReassignmentsResponse:
    results: dict[str, list[AlterPartitionReassignmentsResponse.ReassignablePartitionResponse]] = {}
    for result in response.results:
        partition_response = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(
            partition_index=result.partition,
            error_code=result.error,
            error_message=result.message,
            target=result.replicas,
        )
        results.setdefault(result.name, []).append(partition_response)
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=allow_factor_change,
        error_code=response.error,
        error_message=response.message,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(name=name, partitions=partitions)
            for name, partitions in results.items()
        ],
    )


def _partition(
    broker: Broker, topic: str, index: int, replicas: list[int] | None
) -> AlterPartitionReassignmentsResponse.ReassignablePartitionResponse:
    error, text = _check_assignment(broker, topic, index, replicas)
    return AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(
        partition_index=index, error_code=int(error), error_message=text
    )


def _check_assignment(broker: Broker, topic: str, index: int, replicas: list[int] | None) -> tuple[int, str | None]:
    partition = broker.partition_of(topic, index)
    if partition is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find the partition {topic}-{index}."
    if replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None
    if not replicas:
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, "The manual partition assignment includes an empty replica list."
    if len(set(replicas)) != len(replicas):
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, "The manual partition assignment includes a broker more than once."
    unknown = [node for node in replicas if node != broker.node_id and node not in broker.metadata.brokers]
    if unknown:
        return (
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"The manual partition assignment includes broker {unknown[0]}, but no such broker is registered.",
        )
    if replicas != partition.replicas:
        return (
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Broker {broker.node_id} is the only broker; no other broker can have a replica.",
        )
    return ErrorCode.NONE, None
