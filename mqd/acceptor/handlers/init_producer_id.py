"""InitProducerId 0-5 (KIP-98, KIP-360): ids for idempotent producers.

Ids come in blocks from the controller, which has a block on disk before it gives it away: an id is never given twice, whatever restarts; the rest of a
block is lost with the acceptor. A transactional id is refused with TRANSACTIONAL_ID_AUTHORIZATION_FAILED: there are no transactions yet, and this is the one
code that every client takes as final at once. COORDINATOR_NOT_AVAILABLE, and with librdkafka UNSUPPORTED_VERSION too, would keep it waiting for a minute to tell it nothing.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.cluster import controller_messages as messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import InitProducerIdRequest, InitProducerIdResponse

BLOCK_COUNT = 1000
TIMEOUT_MS = 10_000


async def handle(context: Context, header: RequestHeader, request: InitProducerIdRequest) -> InitProducerIdResponse:
    if request.transactional_id == "":
        return InitProducerIdResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    if request.transactional_id is not None:
        return InitProducerIdResponse(error_code=int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
    producer_id, error = await _allocate(context.broker)
    return InitProducerIdResponse(error_code=error, producer_id=producer_id, producer_epoch=0 if error == 0 else -1)


async def _allocate(broker: Broker) -> tuple[int, int]:
    block = broker.producer_ids
    async with block.lock:
        if block.next == block.end:
            answer = await broker.controller.request(messages.AllocateProducerIds(BLOCK_COUNT), TIMEOUT_MS)
            if answer.error:
                # Whatever it was, the producer may ask again: an id is not a decision that could be made twice.
                return -1, int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            block.next, block.end = answer.offset, answer.offset + answer.count
        block.next += 1
        return block.next - 1, 0
