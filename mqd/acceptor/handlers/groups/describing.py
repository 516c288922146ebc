"""Code shared by the descriptions of consumer, share and streams groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.groups.group_requests import request_group
from mqd.acceptor.handlers.security.authorized import GROUP_OPERATIONS
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.security.acl import Operation, ResourceType

HIDDEN_TOPICS = "The group has described topic(s) that the client is not authorized to describe."


async def describe(
    context: Context,
    group_ids: Sequence[str],
    make_event: Callable[[int], object],
    make_group: Callable[..., Any],
    topics_of: Callable[[Any], Iterable[str]],
    *,
    is_supported: bool,
    includes_operations: bool,
) -> list[Any]:
    """Returns the groups for the response, in the order of the request. `make_group`: the response's
    class for one group. `topics_of`: returns the names of the topics that a described group uses; as
    in Kafka, a group that uses a topic that the client may not describe is replaced with an error.
    """
    described = await asyncio.gather(
        *(_describe(context.broker, group_id, make_event, make_group, is_supported) for group_id in group_ids)
    )
    groups = [
        group
        if _may_see(context, topics_of(group))
        else _failed(make_group, group.group_id, ErrorCode.TOPIC_AUTHORIZATION_FAILED, HIDDEN_TOPICS)
        for group in described
    ]
    if includes_operations:
        for group in groups:
            if not group.error_code:
                group.authorized_operations = context.authorized_operations(
                    ResourceType.GROUP, group.group_id, GROUP_OPERATIONS
                )
    return groups


def topics_of_members(group: Any) -> set[str]:
    """The topics that the members of a consumer or share group subscribe to or are assigned."""
    names: set[str] = set()
    for member in group.members:
        names.update(member.subscribed_topic_names)
        for assignment in (member.assignment, getattr(member, "target_assignment", None)):
            if assignment is not None:
                names.update(topic.topic_name for topic in assignment.topic_partitions)
    return names


async def _describe(
    broker: Broker,
    group_id: str,
    make_event: Callable[[int], object],
    make_group: Callable[..., Any],
    is_supported: bool,
) -> Any:
    if not is_supported:
        return _failed(make_group, group_id, ErrorCode.UNSUPPORTED_VERSION)
    try:
        return await request_group(broker, group_id, make_event)
    except CoordinatorError as error:
        return _failed(make_group, group_id, error.error_code, error_message(error.error_code))


def _may_see(context: Context, names: Iterable[str]) -> bool:
    return all(
        context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name, named_in_request=False)
        for name in sorted(names)
    )


def _failed(make_group: Callable[..., Any], group_id: str, error: int, message: str | None = None) -> Any:
    return make_group(group_id=group_id, error_code=int(error), error_message=message)
