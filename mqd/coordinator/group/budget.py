"""Enforces group.coordinator.memory.bytes, the limit on the memory of all groups of this host.

Clients choose the sizes of members' metadata, assignments and names, and of offsets' metadata: a
single client can cause 200 members with 1 MB of metadata each, or 50,000 groups.

Requests are refused in stages, so that existing groups continue when others have filled the budget:

    above NEW_GROUP_FRACTION of the limit   no new group
    above MEMBER_FRACTION of the limit      no new member, no larger metadata of an existing member
    above the limit                         no commit that adds offsets, no larger assignment

Requests that add nothing are never refused: heartbeats, a member that joins again with the same
metadata, a commit that replaces earlier ones. For the error codes of refusals and the reasons, see
docs/decisions/coordinators/2026-11-26-memory-of-groups.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from mqd.base import logging
from mqd.coordinator.group.classic.events import JoinGroup, SyncGroup
from mqd.coordinator.group.classic.members import MEMBER_BYTES, protocols_size_bytes
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.group import GROUP_BYTES, Group
from mqd.coordinator.group.offsets import CommitOffsets
from mqd.coordinator.group.share.core import MEMBER_BYTES as SHARE_MEMBER_BYTES
from mqd.coordinator.group.share.events import ShareHeartbeat
from mqd.coordinator.group.streams.core import MEMBER_BYTES as STREAMS_MEMBER_BYTES
from mqd.coordinator.group.streams.core import NAME_BYTES
from mqd.coordinator.group.streams.events import StreamsHeartbeat
from mqd.coordinator.group.streams.requests import topic_names
from mqd.protocol.errors import ErrorCode

NEW_GROUP_FRACTION, MEMBER_FRACTION = 0.75, 0.875
# Up to this fraction of the limit, requests are not checked: no single request can use up the rest.
UNCHECKED_FRACTION = 0.5
_NEW_OFFSET_BYTES = 300  # of one offset of a new group, without its topic's name and its metadata
_STR_BYTES = 50  # of a str, without its characters

log = logging.get("coordinator")


class GroupBudget:
    """The Budget (mqd/coordinator/budget.py) of all groups."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.refused_count = 0

    def refusal(self, name: str, core: Group | None, event: object) -> int:
        if self.used_bytes <= UNCHECKED_FRACTION * self.limit_bytes:
            return 0
        growth = _growth_bytes(core, event)
        if not growth:
            return 0
        fraction = (
            NEW_GROUP_FRACTION
            if core is None
            else MEMBER_FRACTION
            if type(event) in (JoinGroup, ConsumerHeartbeat, ShareHeartbeat, StreamsHeartbeat)
            else 1.0
        )
        if self.used_bytes + growth <= fraction * self.limit_bytes:
            return 0
        self.refused_count += 1
        log.warning(
            "a group's request is refused: all groups together take nearly as much memory as"
            " group.coordinator.memory.bytes allows",
            group=name[:200],
            event=type(event).__name__,
            used_bytes=self.used_bytes,
            limit_bytes=self.limit_bytes,
        )
        # clients treat any other error code of SyncGroup as fatal
        return int(
            ErrorCode.REBALANCE_IN_PROGRESS if type(event) is SyncGroup else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        )


def _growth_bytes(group: Group | None, event: object) -> int:
    """Upper bound on the additional memory of the group after this event."""
    base_bytes = GROUP_BYTES if group is None else 0
    if type(event) is JoinGroup:
        message = event.message
        new_bytes = protocols_size_bytes((protocol.name, protocol.metadata) for protocol in message.protocols)
        return base_bytes + _member_growth_bytes(group, message.member_id, message.group_instance_id, new_bytes)
    if type(event) is ConsumerHeartbeat:
        if event.message.member_epoch < 0:
            return 0
        names = event.message.subscribed_topic_names
        new_bytes = _names_size_bytes(names or ()) + len(event.message.subscribed_topic_regex or "")
        return base_bytes + _member_growth_bytes(group, event.message.member_id, event.message.instance_id, new_bytes)
    if type(event) is ShareHeartbeat:
        return base_bytes + _share_growth_bytes(group, event)
    if type(event) is StreamsHeartbeat:
        return base_bytes + _streams_growth_bytes(group, event)
    if type(event) is SyncGroup and group is not None:
        old_bytes = sum(len(member.assignment) for member in group.classic.members.by_id.values())
        return max(0, sum(len(assignment.assignment) for assignment in event.message.assignments) - old_bytes)
    if type(event) is CommitOffsets:
        if group is None:
            return base_bytes + sum(
                _NEW_OFFSET_BYTES + len(offset.topic) + len(offset.metadata) for offset in event.offsets
            )
        return group.offsets.growth_bytes(event)
    return 0


def _share_growth_bytes(group: Group | None, event: ShareHeartbeat) -> int:
    message = event.message
    member = None
    if group is not None and group.share is not None:
        member = group.share.members.get(message.member_id)
    if message.member_epoch < 0 or (member is not None and message.subscribed_topic_names is None):
        return 0
    new_bytes = _names_size_bytes(message.subscribed_topic_names or ())
    if member is not None:
        return max(0, new_bytes - _names_size_bytes(member.description.topic_names))
    return SHARE_MEMBER_BYTES + new_bytes + len(message.member_id) + len(message.rack_id or "")


def _streams_growth_bytes(group: Group | None, event: StreamsHeartbeat) -> int:
    message = event.message
    streams = group.streams if group is not None else None
    if message.member_epoch or (streams is not None and message.member_id in streams.members):
        return 0
    texts = [message.member_id, message.process_id or "", message.rack_id or ""]
    texts += [text for tag in message.client_tags or () for text in (tag.key, tag.value)]
    topology_bytes = 0
    if streams is None or streams.topology is None:
        topology_bytes = sum(NAME_BYTES + len(name) for name in topic_names(message))
    return STREAMS_MEMBER_BYTES + sum(map(len, texts)) + topology_bytes


def _names_size_bytes(names: Iterable[str]) -> int:
    return sum(_STR_BYTES + len(name) for name in names)


def _member_growth_bytes(group: Group | None, member_id: str, instance_id: str | None, new_bytes: int) -> int:
    """Returns by how much the member's data grows. `new_bytes`: the size of its new data."""
    if group is not None:
        classic_member = group.classic.members.by_id.get(
            group.classic.members.static_member_ids.get(instance_id or "", member_id)
        )
        if classic_member is not None:
            return max(0, new_bytes - protocols_size_bytes(classic_member.protocols.items()))
        consumer = group.consumer
        if consumer is not None:
            member = consumer.members.get(consumer.static_member_ids.get(instance_id or "", member_id))
            if member is not None:
                description = member.description
                protocols = description.classic.protocols if description.classic is not None else ()
                old_bytes = _names_size_bytes(description.topic_names) + len(description.topic_regex or "")
                return max(0, new_bytes - old_bytes - protocols_size_bytes(protocols))
    return MEMBER_BYTES + new_bytes + len(member_id) + len(instance_id or "")
