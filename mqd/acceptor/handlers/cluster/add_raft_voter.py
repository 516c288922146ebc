"""AddRaftVoter 0-1 (KIP-853): a host that follows the metadata becomes a voter when it has caught
up. The directory id must be the one that the host registered; its listeners are those that it
reported itself. The change is acknowledged when it is committed, in version 1 too: with
ack_when_committed = false the client might rely on a change that never happens.
"""

from mqd.acceptor.broker import Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AddRaftVoterRequest, AddRaftVoterResponse

NO_ID = b"\0" * 16


async def handle(context: Context, header: RequestHeader, request: AddRaftVoterRequest) -> AddRaftVoterResponse:
    broker = context.broker
    if request.cluster_id is not None and request.cluster_id != broker.metadata.cluster_id:
        return AddRaftVoterResponse(
            error_code=int(ErrorCode.INCONSISTENT_CLUSTER_ID),
            error_message=f"This is cluster {broker.metadata.cluster_id}.",
        )
    directory_id = b"" if request.voter_directory_id == NO_ID else request.voter_directory_id
    response = await broker.controller.request(messages.AddVoter(request.voter_id, directory_id), request.timeout_ms)
    return AddRaftVoterResponse(error_code=response.error, error_message=response.message)
