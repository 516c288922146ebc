"""A consumer group as ConsumerGroupDescribe 0-1 shows it (KIP-848, KIP-1099). Pure reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.group.consumer_members import NOTHING, Member
from mqd.group.consumer_records import Partitions
from mqd.protocol.messages import ConsumerGroupDescribeResponse

if TYPE_CHECKING:
    from mqd.group.consumer import ConsumerGroup

_Group = ConsumerGroupDescribeResponse.Group
_Member, _Assignment = ConsumerGroupDescribeResponse.Member, ConsumerGroupDescribeResponse.Assignment
_TopicPartitions = ConsumerGroupDescribeResponse.TopicPartitions
TYPE_CLASSIC, TYPE_CONSUMER = 0, 1


def described(group: ConsumerGroup) -> _Group:
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
        subscribed_topic_regex=description.topic_regex,
        assignment=_assignment(group, member.assigned),
        target_assignment=_assignment(group, group.target.get(member.member_id, NOTHING)),
        member_type=TYPE_CLASSIC if member.is_classic else TYPE_CONSUMER,
    )


def _assignment(group: ConsumerGroup, partitions: Partitions) -> _Assignment:
    """Topics that were deleted meanwhile have no name, and are left out."""
    named = ((topic_id, group.cluster.topic_name(topic_id), indexes) for topic_id, indexes in partitions.items())
    return _Assignment(topic_partitions=[_TopicPartitions(topic_id=topic_id, topic_name=name, partitions=list(indexes)) for topic_id, name, indexes in named if name is not None])
