"""RemoveRaftVoter version 0 (KIP-853): the host remains a broker, but is no longer a voter."""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.cluster.add_raft_voter import NO_ID
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import RemoveRaftVoterRequest, RemoveRaftVoterResponse

TIMEOUT_MS = 30_000  # the request has no field for it


async def handle(context: Context, header: RequestHeader, request: RemoveRaftVoterRequest) -> RemoveRaftVoterResponse:
    broker = context.broker
    if request.cluster_id is not None and request.cluster_id != broker.metadata.cluster_id:
        return RemoveRaftVoterResponse(
            error_code=int(ErrorCode.INCONSISTENT_CLUSTER_ID),
            error_message=f"This is cluster {broker.metadata.cluster_id}.",
        )
    directory_id = b"" if request.voter_directory_id == NO_ID else request.voter_directory_id
    response = await broker.controller.request(messages.RemoveVoter(request.voter_id, directory_id), TIMEOUT_MS)
    return RemoveRaftVoterResponse(error_code=response.error, error_message=response.message)
