"""Common code of the handlers for group requests: checks before a request goes to the state machine
of its group, and errors of a coordinator that does not respond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.acceptor.broker import Broker
from mqd.coordinator.group.group import Group
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.runtime import Coordinator
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupDescribeResponse, DescribeGroupsResponse

NAME_BYTES_MAX = 32767  # limit of a string in a record


def is_group_id(name: str) -> bool:
    """Whether a group with this id can have members. Offsets, descriptions and deletion also accept
    the empty id.
    """
    return 0 < len(name) <= NAME_BYTES_MAX and (
        len(name) <= NAME_BYTES_MAX // 4 or len(name.encode()) <= NAME_BYTES_MAX
    )


def group_coordinator(broker: Broker) -> Coordinator:
    """Raises CoordinatorError."""
    if broker.coordinators is None:
        raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return broker.coordinators.groups


def has_consumer_groups(broker: Broker) -> bool:
    """Also true without coordinators: every request then gets COORDINATOR_NOT_AVAILABLE."""
    return broker.coordinators is None or broker.coordinators.cluster.has_consumer_groups


def has_share_groups(broker: Broker) -> bool:
    return broker.coordinators is None or broker.coordinators.cluster.has_share_groups


def has_streams_groups(broker: Broker) -> bool:
    return broker.coordinators is None or broker.coordinators.cluster.has_streams_groups


async def request_group(broker: Broker, group_id: str, make_event: Callable[[int], object]) -> Any:
    """Returns the group's response once there is one: JoinGroup is answered when its rebalance ends.
    Raises CoordinatorError.
    """
    if not is_group_id(group_id):
        raise CoordinatorError(ErrorCode.INVALID_GROUP_ID)
    return await group_coordinator(broker).request(group_id, make_event)


def rebalance_of(
    broker: Broker, core: object, response_class: type[DescribeGroupsResponse] | type[ConsumerGroupDescribeResponse]
) -> Any:
    """The current rebalance and the members that delay it, for clients that request it with tagged
    field 9100 (an mqd extension). Points in time are sent as ages, because clocks differ.
    Returns None if there is no rebalance.
    """
    rebalance = core.rebalance() if isinstance(core, Group) else None
    if rebalance is None or broker.coordinators is None:
        return None
    now_ms = broker.coordinators.clock.now_ms()

    def age_ms(since_ms: int) -> int:
        return max(0, now_ms - since_ms) if since_ms >= 0 else -1

    delaying_members: list[Any] = [
        response_class.Holder(
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            waited_for=member.waited_for,
            waited_ms=age_ms(member.since_ms),
            silent_ms=age_ms(member.seen_ms),
        )
        for member in rebalance.held_up_by
    ]
    return response_class.Rebalance(
        elapsed_ms=age_ms(rebalance.since_ms), reason=rebalance.reason, held_up_by=delaying_members
    )
