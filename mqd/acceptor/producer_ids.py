"""Producer ids for idempotent and transactional producers, in blocks from the controller. The
controller writes a block to disk before it returns it, so an id is never assigned twice, even after a
restart; the rest of a block is lost with the acceptor. All requests that find no id left wait for
the same block, and share its error.
"""

import asyncio

from mqd.acceptor.broker_state import BrokerState
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode

BLOCK_SIZE = 1000
TIMEOUT_MS = 10_000


async def allocate(broker: BrokerState) -> tuple[int, int]:
    """Returns (producer id, 0) or (-1, error code)."""
    block = broker.producer_ids
    while block.next == block.end:
        if block.request is None:
            block.request = asyncio.get_running_loop().create_task(_request(broker))
        if await asyncio.shield(block.request):
            # Whatever the error, the producer may retry: it then simply gets another id.
            return -1, int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    block.next += 1
    return block.next - 1, 0


async def _request(broker: BrokerState) -> int:
    """Requests a block. Returns the controller's error."""
    block = broker.producer_ids
    try:
        response = await broker.controller.request(messages.AllocateProducerIds(BLOCK_SIZE), TIMEOUT_MS)
    finally:
        block.request = None
    if not response.error:
        block.next, block.end = response.offset, response.offset + response.count
    return response.error
