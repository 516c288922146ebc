"""ListPartitionReassignments version 0 (KIP-455): partitions that are moving to other hosts.
DescribeLogDirs shows moves between log directories of one host.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.host.messages import PartitionImage
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse


async def handle(
    context: Context, header: RequestHeader, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    reassignments: dict[str, list[ListPartitionReassignmentsResponse.OngoingPartitionReassignment]] = {}
    for name, partition in _requested(context.broker, request):
        if partition.adding or partition.removing:
            reassignments.setdefault(name, []).append(
                ListPartitionReassignmentsResponse.OngoingPartitionReassignment(
                    partition_index=partition.index,
                    replicas=partition.replicas,
                    adding_replicas=partition.adding,
                    removing_replicas=partition.removing,
                )
            )
    return ListPartitionReassignmentsResponse(
        topics=[
            ListPartitionReassignmentsResponse.OngoingTopicReassignment(name=name, partitions=partitions)
            for name, partitions in reassignments.items()
        ]
    )


def _requested(broker: Broker, request: ListPartitionReassignmentsRequest) -> list[tuple[str, PartitionImage]]:
    """All partitions, if the request names no topics. As in Kafka, partitions that do not exist are
    left out.
    """
    topics = broker.metadata.topics
    if request.topics is None:
        return [(name, partition) for name in broker.metadata.sorted_names() for partition in topics[name].partitions]
    requested = {(topic.name, index): None for topic in request.topics for index in topic.partition_indexes}
    return [
        (name, partition) for name, index in requested if (partition := broker.partition_of(name, index)) is not None
    ]
