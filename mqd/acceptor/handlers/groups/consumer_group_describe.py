"""ConsumerGroupDescribe 0-1 (KIP-848, KIP-1099): consumer groups, their epochs, and their members
with current and target assignments.
"""

import asyncio
import contextlib

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import ask, coordinator, rebalance_of
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.group.consumer.events import ConsumerDescribe
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse


async def handle(
    context: Context, header: RequestHeader, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    groups = list(await asyncio.gather(*(_describe(context.broker, group_id) for group_id in request.group_ids)))
    if request.include_authorized_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = GROUP_OPERATIONS
    if request.include_rebalance:
        for group in groups:
            if not group.error_code:
                _add_rebalance(context.broker, group)
    return ConsumerGroupDescribeResponse(groups=groups)


def _add_rebalance(broker: Broker, group: ConsumerGroupDescribeResponse.Group) -> None:
    with contextlib.suppress(CoordinatorError):
        group.rebalance = rebalance_of(broker, coordinator(broker).core(group.group_id), ConsumerGroupDescribeResponse)


async def _describe(broker: Broker, group_id: str) -> ConsumerGroupDescribeResponse.Group:
    if broker.coordinators is not None and not broker.coordinators.cluster.is_enabled:
        return ConsumerGroupDescribeResponse.Group(error_code=int(ErrorCode.UNSUPPORTED_VERSION), group_id=group_id)
    try:
        return await ask(broker, group_id, ConsumerDescribe)  # type: ignore[return-value]
    except CoordinatorError as error:
        return ConsumerGroupDescribeResponse.Group(
            error_code=error.error_code, error_message=error_message(error.error_code), group_id=group_id
        )
