"""ElectLeaders 0-2 (KIP-183, KIP-460). In a cluster the controller elects leaders.

On a single host there is nothing to elect. If a partition's only replica leads it, the response is
ELECTION_NOT_NEEDED. If the replica is offline, the response is PREFERRED_LEADER_NOT_AVAILABLE or,
for an unclean election, ELIGIBLE_LEADERS_NOT_AVAILABLE. The response to a request for all
partitions (null) omits those that need no election, so on a single host it is empty.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ElectLeadersRequest, ElectLeadersResponse

PREFERRED, UNCLEAN = 0, 1


async def handle(context: Context, header: RequestHeader, request: ElectLeadersRequest) -> ElectLeadersResponse:
    if request.topic_partitions is not None and not request.topic_partitions:
        return ElectLeadersResponse()  # as in Kafka, whatever the election type
    if request.election_type not in (PREFERRED, UNCLEAN):
        return ElectLeadersResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    if not context.broker.metadata.is_single_host:
        return await _request_controller(context.broker, header.api_version, request)
    if request.topic_partitions is None:
        return ElectLeadersResponse()
    return ElectLeadersResponse(
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(
                topic=topic.topic,
                partition_result=[
                    _partition(context.broker, topic.topic, index, request.election_type) for index in topic.partitions
                ],
            )
            for topic in request.topic_partitions
        ]
    )


async def _request_controller(broker: Broker, version: int, request: ElectLeadersRequest) -> ElectLeadersResponse:
    election_type = request.election_type if version >= 1 else PREFERRED
    requested = (
        None
        if request.topic_partitions is None
        else [(topic.topic, index) for topic in request.topic_partitions for index in topic.partitions]
    )
    response = await broker.controller.request(messages.ElectLeaders(election_type, requested), request.timeout_ms)
    results: dict[str, list[ElectLeadersResponse.PartitionResult]] = {}
    for result in response.results:
        results.setdefault(result.name, []).append(
            ElectLeadersResponse.PartitionResult(
                partition_id=result.partition, error_code=result.error, error_message=result.message
            )
        )
    return ElectLeadersResponse(
        error_code=response.error,
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(topic=name, partition_result=partitions)
            for name, partitions in results.items()
        ],
    )


def _partition(broker: Broker, topic: str, index: int, election_type: int) -> ElectLeadersResponse.PartitionResult:
    partition = broker.partition_of(topic, index)
    if partition is None:
        error, text = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no partition {topic}-{index}"
    elif broker.view(partition) is None and partition.leader != partition.replicas[0]:
        error, text = (
            (
                ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
                if election_type == PREFERRED
                else ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
            ),
            "Its only replica is offline",
        )
    else:
        error, text = ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."
    return ElectLeadersResponse.PartitionResult(partition_id=index, error_code=int(error), error_message=text)
