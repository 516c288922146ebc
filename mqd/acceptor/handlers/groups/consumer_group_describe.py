"""ConsumerGroupDescribe 0-1 (KIP-848, KIP-1099): consumer groups, their epochs, and their members
with current and target assignments.
"""

import asyncio
import contextlib

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import (
    HIDDEN_TOPICS,
    coordinator,
    may_see_topics,
    rebalance_of,
    request_group,
)
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.group.consumer.events import ConsumerDescribe
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from mqd.security.acl import ResourceType


async def handle(
    context: Context, header: RequestHeader, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    groups = list(await asyncio.gather(*(_describe(context.broker, group_id) for group_id in request.group_ids)))
    groups = [group if may_see_topics(context, group.members) else _hidden(group.group_id) for group in groups]
    if request.include_authorized_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = context.operations(ResourceType.GROUP, group.group_id, GROUP_OPERATIONS)
    if request.include_rebalance:
        for group in groups:
            if not group.error_code:
                _add_rebalance(context.broker, group)
    return ConsumerGroupDescribeResponse(groups=groups)


def _hidden(group_id: str) -> ConsumerGroupDescribeResponse.Group:
    error = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    return ConsumerGroupDescribeResponse.Group(group_id=group_id, error_code=error, error_message=HIDDEN_TOPICS)


def _add_rebalance(broker: Broker, group: ConsumerGroupDescribeResponse.Group) -> None:
    with contextlib.suppress(CoordinatorError):
        group.rebalance = rebalance_of(broker, coordinator(broker).core(group.group_id), ConsumerGroupDescribeResponse)


async def _describe(broker: Broker, group_id: str) -> ConsumerGroupDescribeResponse.Group:
    if broker.coordinators is not None and not broker.coordinators.cluster.is_enabled:
        return ConsumerGroupDescribeResponse.Group(error_code=int(ErrorCode.UNSUPPORTED_VERSION), group_id=group_id)
    try:
        return await request_group(broker, group_id, ConsumerDescribe)
    except CoordinatorError as error:
        return ConsumerGroupDescribeResponse.Group(
            error_code=error.error_code, error_message=error_message(error.error_code), group_id=group_id
        )
