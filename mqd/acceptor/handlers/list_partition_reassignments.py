"""ListPartitionReassignments 0 (KIP-455): on one broker none is ever under way. Moves between its log directories are shown by DescribeLogDirs."""

from mqd.acceptor.broker import Context
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse


async def handle(context: Context, header: RequestHeader, request: ListPartitionReassignmentsRequest) -> ListPartitionReassignmentsResponse:
    return ListPartitionReassignmentsResponse()
