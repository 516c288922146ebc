"""EndTxn 0-5 (KIP-98, KIP-890): commits or aborts. Version 5 is transactions of version 2: the answer holds the epoch, or the producer id, of the next transaction."""

from mqd.acceptor.broker import Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import EndTxnRequest, EndTxnResponse
from mqd.transaction import events

VERSION_2_SINCE = 5
KNOWS_PRODUCER_FENCED = 2


async def handle(context: Context, header: RequestHeader, request: EndTxnRequest) -> EndTxnResponse:
    service = context.broker.transactions
    if not request.transactional_id or service is None:
        return EndTxnResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    client_version = events.VERSION_2 if header.api_version >= VERSION_2_SINCE else 0

    def make(number: int, spare: int) -> events.EndTransaction:
        return events.EndTransaction(number, request.producer_id, request.producer_epoch, request.committed, client_version, spare)

    answer = await service.identify(request.transactional_id, make)
    error = answer.error
    if error == ErrorCode.PRODUCER_FENCED and header.api_version < KNOWS_PRODUCER_FENCED:
        error = int(ErrorCode.INVALID_PRODUCER_EPOCH)
    return EndTxnResponse(error_code=error, producer_id=answer.producer_id, producer_epoch=answer.producer_epoch)
