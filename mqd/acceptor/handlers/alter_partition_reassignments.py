"""AlterPartitionReassignments 0-1 (KIP-455) on one broker: a partition's only replica is where it can be. Asking for that changes nothing and succeeds; other brokers
do not exist; and there is nothing under way that could be cancelled.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse


async def handle(context: Context, header: RequestHeader, request: AlterPartitionReassignmentsRequest) -> AlterPartitionReassignmentsResponse:
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                name=topic.name, partitions=[_partition(context.broker, topic.name, partition.partition_index, partition.replicas) for partition in topic.partitions]
            )
            for topic in request.topics
        ],
    )


def _partition(broker: Broker, topic: str, index: int, replicas: list[int] | None) -> AlterPartitionReassignmentsResponse.ReassignablePartitionResponse:
    error, text = _judge(broker, topic, index, replicas)
    return AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(partition_index=index, error_code=int(error), error_message=text)


def _judge(broker: Broker, topic: str, index: int, replicas: list[int] | None) -> tuple[int, str | None]:
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
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"The manual partition assignment includes broker {unknown[0]}, but no such broker is registered."
    if replicas != partition.replicas:
        return ErrorCode.INVALID_REPLICA_ASSIGNMENT, "Replicas cannot be moved between brokers yet."
    return ErrorCode.NONE, None
