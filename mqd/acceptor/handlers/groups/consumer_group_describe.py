"""ConsumerGroupDescribe 0-1 (KIP-848, KIP-1099): consumer groups, their epochs, and their members
with current and target assignments.
"""

import contextlib

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.describing import describe, topics_of_members
from mqd.acceptor.handlers.groups.group_requests import group_coordinator, has_consumer_groups, rebalance_of
from mqd.coordinator.group.consumer.events import ConsumerDescribe
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse


async def handle(
    context: Context, header: RequestHeader, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    groups = await describe(
        context,
        request.group_ids,
        ConsumerDescribe,
        ConsumerGroupDescribeResponse.Group,
        topics_of_members,
        is_supported=has_consumer_groups(context.broker),
        includes_operations=request.include_authorized_operations,
    )
    if request.include_rebalance:
        for group in groups:
            if not group.error_code:
                _add_rebalance(context.broker, group)
    return ConsumerGroupDescribeResponse(groups=groups)


def _add_rebalance(broker: Broker, group: ConsumerGroupDescribeResponse.Group) -> None:
    with contextlib.suppress(CoordinatorError):
        group.rebalance = rebalance_of(
            broker, group_coordinator(broker).core(group.group_id), ConsumerGroupDescribeResponse
        )
