"""AddOffsetsToTxn 0-4 (KIP-98): adds the partition of __consumer_offsets that stores the group's
offsets to the transaction, which will commit offsets of the group.
"""

from mqd.acceptor.broker import Context
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction.events import AddPartitions
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse

PRODUCER_FENCED_SINCE_VERSION = 2


async def handle(context: Context, header: RequestHeader, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    service = context.broker.transactions
    if not request.transactional_id or service is None:
        return AddOffsetsToTxnResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    try:
        if not await service.groups.ensure_topic():
            return AddOffsetsToTxnResponse(error_code=int(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        partition = (OFFSETS_TOPIC, service.groups.partition_for(request.group_id))
        error = await service.request(
            request.transactional_id,
            lambda number: AddPartitions(number, request.producer_id, request.producer_epoch, (partition,)),
        )
    except CoordinatorError as failure:
        error = failure.error_code
    if error == ErrorCode.PRODUCER_FENCED and header.api_version < PRODUCER_FENCED_SINCE_VERSION:
        error = int(ErrorCode.INVALID_PRODUCER_EPOCH)
    return AddOffsetsToTxnResponse(error_code=error)
