"""A consumer group in the form of ConsumerGroupDescribe 0-1 (KIP-848, KIP-1099), and the members
that delay its rebalance. Read-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.coordinator.group.classic.members import NEVER
from mqd.coordinator.group.classic.state import DelayingMember
from mqd.coordinator.group.consumer.members import LEFT_STATIC_EPOCH, NOTHING, REVOKING, WAITING, Member
from mqd.coordinator.group.consumer.records import Partitions
from mqd.coordinator.group.sets import difference
from mqd.protocol.messages import ConsumerGroupDescribeResponse

if TYPE_CHECKING:
    from mqd.coordinator.group.consumer.core import ConsumerGroup

_Group = ConsumerGroupDescribeResponse.Group
_Member = ConsumerGroupDescribeResponse.Member
_Assignment = ConsumerGroupDescribeResponse.Assignment
_TopicPartitions = ConsumerGroupDescribeResponse.TopicPartitions
TYPE_CLASSIC, TYPE_CONSUMER = 0, 1


def describe_group(group: ConsumerGroup) -> _Group:
    return _Group(
        group_id=group.group_id,
        group_state=group.state_name,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=group.assignor,
        members=[_member(group, member) for member in group.members.values()],
    )


def _member(group: ConsumerGroup, member: Member) -> _Member:
    description = member.description
    return _Member(
        member_id=member.member_id,
        instance_id=description.instance_id,
        rack_id=description.rack_id,
        member_epoch=member.epoch,
        client_id=description.client_id,
        client_host=description.client_host,
        subscribed_topic_names=list(description.topic_names),
        subscribed_topic_regex=description.topic_regex or "",
        assignment=_assignment(group, member.assigned),
        target_assignment=_assignment(group, group.target.get(member.member_id, NOTHING)),
        member_type=TYPE_CLASSIC if member.is_classic else TYPE_CONSUMER,
    )


def _assignment(group: ConsumerGroup, partitions: Partitions) -> _Assignment:
    """Topics that have been deleted have no name and are left out."""
    named = ((topic_id, group.cluster.topic_name(topic_id), indexes) for topic_id, indexes in partitions.items())
    return _Assignment(
        topic_partitions=[
            _TopicPartitions(topic_id=topic_id, topic_name=name, partitions=list(indexes))
            for topic_id, name, indexes in named
            if name is not None
        ]
    )


def delaying_members(group: ConsumerGroup) -> list[DelayingMember]:
    """The members that others wait for, longest silent first. `waited_for`: "revocation" (it must
    release partitions), "return" (an absent static member still owns partitions assigned to
    other members), "join" or "sync" (a classic member must send this request), "heartbeat" (it
    still owns partitions assigned to other members; the response to its next heartbeat will request
    their release).
    """
    delaying_ids: set[str] = set()
    for member_id, member in group.members.items():
        if member.state == WAITING:
            pending = difference(group.target.get(member_id, NOTHING), member.assigned)
            pending_owners = (
                group.owners.get(topic_id, index) for topic_id, indexes in pending.items() for index in indexes
            )
            delaying_ids.update(owner for owner in pending_owners if owner is not None and owner != member_id)
    delaying = [
        _delaying_member(group, member)
        for member in group.members.values()
        if member.member_id in delaying_ids or member.state == REVOKING or member.step_kind
    ]
    return sorted(delaying, key=lambda member: member.seen_ms)


def _delaying_member(group: ConsumerGroup, member: Member) -> DelayingMember:
    description = member.description
    classic = description.classic
    session_ms = (
        classic.session_timeout_ms if classic is not None else group.cluster.settings(group.group_id).session_timeout_ms
    )
    seen_ms = member.deadline_ms - session_ms
    if member.epoch == LEFT_STATIC_EPOCH:
        waited_for = "return"
    elif member.state == REVOKING:
        waited_for = "revocation"
    else:
        waited_for = member.step_kind or "heartbeat"
    since_ms = (
        member.step.deadline_ms - description.rebalance_timeout_ms if member.step.deadline_ms != NEVER else seen_ms
    )
    return DelayingMember(
        member.member_id,
        description.instance_id,
        description.client_id,
        description.client_host,
        waited_for,
        since_ms,
        seen_ms,
    )
