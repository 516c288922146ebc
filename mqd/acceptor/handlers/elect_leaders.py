"""ElectLeaders 0-2 (KIP-183, KIP-460). With one replica the leader is the preferred one, or there is none that could be: ELECTION_NOT_NEEDED, as Kafka says.

Asked for all partitions (null), those that need no election are left out, so the answer is empty.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import ElectLeadersRequest, ElectLeadersResponse

PREFERRED, UNCLEAN = 0, 1


async def handle(context: Context, header: RequestHeader, request: ElectLeadersRequest) -> ElectLeadersResponse:
    if request.election_type not in (PREFERRED, UNCLEAN):
        return ElectLeadersResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    if request.topic_partitions is None:
        return ElectLeadersResponse()
    return ElectLeadersResponse(
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(
                topic=topic.topic, partition_result=[_partition(context.broker, topic.topic, index, request.election_type) for index in topic.partitions]
            )
            for topic in request.topic_partitions
        ]
    )


def _partition(broker: Broker, topic: str, index: int, election_type: int) -> ElectLeadersResponse.PartitionResult:
    partition = broker.partition_of(topic, index)
    if partition is None:
        error, text = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such partition as {topic}-{index}"
    elif broker.view(partition) is None and partition.leader != partition.replicas[0]:
        error, text = (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE if election_type == PREFERRED else ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE), "Its only replica is offline"
    else:
        error, text = ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."
    return ElectLeadersResponse.PartitionResult(partition_id=index, error_code=int(error), error_message=text)
