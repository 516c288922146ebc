"""InitProducerId 0-5 (KIP-98, KIP-360, KIP-890): a producer id and epoch, for idempotent producers
(without a transactional id) and for transactional ones.

With mqd's own tagged field 9100, the request enlists a child of a joint transaction, or is the
heartbeat of such a child (mqd/coordinator/transaction/joint.py).

If transactional ids are not coordinated here (there is no Link to the workers), the error is
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: the only code that every client immediately treats as fatal.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.producer_ids import allocate
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.transaction import events, joint
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import InitProducerIdRequest, InitProducerIdResponse

PRODUCER_FENCED_SINCE_VERSION = 4


async def handle(context: Context, header: RequestHeader, request: InitProducerIdRequest) -> InitProducerIdResponse:
    name = request.transactional_id
    if name == "" or (request.producer_id < 0) != (request.producer_epoch < 0):
        return InitProducerIdResponse(error_code=int(ErrorCode.INVALID_REQUEST), producer_id=-1, producer_epoch=-1)
    if name is None:
        producer_id, error = await allocate(context.broker)
        return InitProducerIdResponse(error_code=error, producer_id=producer_id, producer_epoch=0 if error == 0 else -1)
    service = context.broker.transactions
    if service is None:
        return InitProducerIdResponse(
            error_code=int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), producer_id=-1, producer_epoch=-1
        )

    if request.joint is not None:
        return await _enlist(service, name, request, request.joint)

    def make_event(number: int, spare_producer_id: int) -> events.InitProducerId:
        return events.InitProducerId(
            number, request.transaction_timeout_ms, request.producer_id, request.producer_epoch, spare_producer_id
        )

    response = await service.request_returning_identity(name, make_event)
    error = response.error
    if error == ErrorCode.PRODUCER_FENCED and header.api_version < PRODUCER_FENCED_SINCE_VERSION:
        error = int(ErrorCode.INVALID_PRODUCER_EPOCH)
    return InitProducerIdResponse(
        error_code=error, producer_id=response.producer_id, producer_epoch=response.producer_epoch
    )


async def _enlist(
    service: TransactionService, name: str, request: InitProducerIdRequest, joint_fields: InitProducerIdRequest.Joint
) -> InitProducerIdResponse:
    if not joint.is_valid_request(name, joint_fields.batch_id, joint_fields.run_id):
        return InitProducerIdResponse(error_code=int(ErrorCode.INVALID_REQUEST), producer_id=-1, producer_epoch=-1)

    def make_event(number: int, spare_producer_id: int) -> events.Enlist:
        return events.Enlist(
            number,
            joint_fields.batch_id,
            joint_fields.run_id,
            request.transaction_timeout_ms,
            request.producer_id,
            request.producer_epoch,
            spare_producer_id,
        )

    response = await service.request_joint(name, make_event)
    return InitProducerIdResponse(
        error_code=response.error,
        producer_id=response.producer_id,
        producer_epoch=response.producer_epoch,
        joint=InitProducerIdResponse.JointResult(committed_batch_id=response.committed_batch_id),
    )
