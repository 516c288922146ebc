"""Producer ids for idempotent and transactional producers, in blocks from the controller, which has
a block on disk before it gives it away: an id is never given twice, whatever restarts; the rest of
a block is lost with the acceptor. All who find none left wait for one request, and hear of its
error together.
"""

import asyncio

from mqd.acceptor.broker import Broker
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode

BLOCK_COUNT = 1000
TIMEOUT_MS = 10_000


async def allocate(broker: Broker) -> tuple[int, int]:
    """(producer id, 0) or (-1, error code)."""
    block = broker.producer_ids
    while block.next == block.end:
        if block.asking is None:
            block.asking = asyncio.get_running_loop().create_task(_ask(broker))
        if await asyncio.shield(block.asking):
            # Whatever it was, the producer may ask again: an id is not a decision that could be
            # made twice.
            return -1, int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    block.next += 1
    return block.next - 1, 0


async def _ask(broker: Broker) -> int:
    """For a block. The controller's error."""
    block = broker.producer_ids
    try:
        answer = await broker.controller.request(messages.AllocateProducerIds(BLOCK_COUNT), TIMEOUT_MS)
    finally:
        block.asking = None
    if not answer.error:
        block.next, block.end = answer.offset, answer.offset + answer.count
    return answer.error
