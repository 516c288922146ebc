"""EndTxn 0-5 (KIP-98, KIP-890): commits or aborts a transaction. Version 5 is used with version 2 of
the transaction protocol: the response has the epoch, or the producer id, of the next transaction.

Between hosts, EndTxn is sent on behalf of an administrator: it aborts the producer's ongoing
transaction, unless the producer's epoch is above the request's.

With mqd's own tagged field 9100, the request ends a joint transaction and names the child
transactions to commit; a request with an empty run id is an administrator's abort of the current
joint transaction (mqd/coordinator/transaction/joint.py).
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.transactions.write_txn_markers import abort_ongoing
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.transaction import events, joint
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import EndTxnRequest, EndTxnResponse

TRANSACTIONS_V2_SINCE_VERSION = 5
PRODUCER_FENCED_SINCE_VERSION = 2


async def handle(context: Context, header: RequestHeader, request: EndTxnRequest) -> EndTxnResponse:
    service = context.broker.transactions
    if not request.transactional_id or service is None:
        return EndTxnResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    if context.origin.peer_node >= 0:
        return await _abort(service, request)
    if request.joint is not None:
        return await _end_joint(service, request, request.joint)
    client_version = events.TRANSACTIONS_V2 if header.api_version >= TRANSACTIONS_V2_SINCE_VERSION else 0

    def make_event(number: int, spare_producer_id: int) -> events.EndTransaction:
        return events.EndTransaction(
            number, request.producer_id, request.producer_epoch, request.committed, client_version, spare_producer_id
        )

    response = await service.request_returning_identity(request.transactional_id, make_event)
    error = response.error
    if error == ErrorCode.PRODUCER_FENCED and header.api_version < PRODUCER_FENCED_SINCE_VERSION:
        error = int(ErrorCode.INVALID_PRODUCER_EPOCH)
    return EndTxnResponse(error_code=error, producer_id=response.producer_id, producer_epoch=response.producer_epoch)


async def _abort(service: TransactionService, request: EndTxnRequest) -> EndTxnResponse:
    if request.committed:
        return EndTxnResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    try:
        return EndTxnResponse(
            error_code=await abort_ongoing(
                service, request.transactional_id, request.producer_id, request.producer_epoch
            )
        )
    except CoordinatorError as error:
        return EndTxnResponse(error_code=error.error_code)


async def _end_joint(
    service: TransactionService, request: EndTxnRequest, joint_fields: EndTxnRequest.Joint
) -> EndTxnResponse:
    batch_id, run_id = joint_fields.batch_id, joint_fields.run_id
    is_administrator = (
        run_id == "" and not request.committed and request.transactional_id.startswith(joint.JOINT_PREFIX)
    )
    if not is_administrator and not joint.is_valid_request(request.transactional_id, batch_id, run_id):
        return EndTxnResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    winners = tuple((winner.producer_id, winner.producer_epoch) for winner in joint_fields.winners)
    response = await service.request_joint(
        request.transactional_id,
        lambda number, _: events.EndJoint(number, batch_id, run_id, request.committed, winners),
    )
    return EndTxnResponse(
        error_code=response.error, joint=EndTxnResponse.JointResult(committed_batch_id=response.committed_batch_id)
    )
