"""Online migration between the classic and the consumer protocol (KIP-848,
group.consumer.migration.policy). Pure; group.py does the rest.

upgrade      the first ConsumerGroupHeartbeat joins a classic group: the group's members become
             classic members of a consumer group with the same generation and the same assignment
downgrade    the last member that speaks the consumer protocol has left: the other members become
             members of a classic group, keep their assignment, and rejoin immediately
"""

from __future__ import annotations

from mqd.coordinator.actions import Action, KeyValue, Reply
from mqd.coordinator.group.classic import records as classic_records
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.members import Member as ClassicMember
from mqd.coordinator.group.classic.state import CONSUMER_PROTOCOL
from mqd.coordinator.group.consumer import records
from mqd.coordinator.group.consumer.classic_members import METADATA_BYTES_MAX
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.consumer.members import STABLE, Member
from mqd.coordinator.group.consumer.records import ClassicMetadata, CurrentAssignment, Description, Partitions
from mqd.coordinator.group.consumer_protocol import decode_assignment, decode_subscription, encode_assignment
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import JoinGroupResponse, SyncGroupResponse


def upgrade(classic: ClassicGroup, cluster: Cluster, now_ms: int) -> ConsumerGroup | None:
    """Returns a consumer group with the members of the classic group; the records that create it
    are in its `pending`. None: the group cannot be converted (another protocol type, or unreadable
    metadata).
    """
    if classic.protocol_type != CONSUMER_PROTOCOL:
        return None
    group = ConsumerGroup(classic.group_id, cluster)
    group.epoch = group.assignment_epoch = classic.generation
    try:
        for member in classic.members.by_id.values():
            _take_over(group, member, classic.protocol, now_ms)
    except ValueError:
        return None
    group.pending = _records(classic, group)
    return group


def _take_over(group: ConsumerGroup, old: ClassicMember, protocol: str | None, now_ms: int) -> None:
    protocols = tuple(old.protocols.items())
    if sum(len(metadata) for _, metadata in protocols) > METADATA_BYTES_MAX:
        raise ValueError("a member's metadata is too large for one member record of a consumer group")
    subscription = decode_subscription(old.protocols[protocol] if protocol in old.protocols else protocols[0][1])
    assigned: Partitions = {}
    # At the start of a generation no member has an assignment yet; cooperative members keep working
    # on the partitions that they reported.
    for name, indexes in (decode_assignment(old.assignment) or subscription.owned).items():
        topic = group.cluster.topic(name)
        if topic is not None and name in subscription.topics:
            # If a client's assignor assigned a partition to two members, the first gets it here,
            # and the next target decides which member keeps it.
            unowned = tuple(
                index
                for index in indexes
                if 0 <= index < topic.partition_count and group.owners.get(topic.topic_id, index) is None
            )
            if unowned:
                assigned[topic.topic_id] = unowned
    description = Description(
        old.instance_id,
        subscription.rack_id,
        old.client_id,
        old.client_host,
        subscription.topics,
        None,
        old.rebalance_timeout_ms,
        None,
        ClassicMetadata(old.session_timeout_ms, protocols),
    )
    group.load_member(old.member_id, description, CurrentAssignment(group.epoch, group.epoch, STABLE, assigned, {}))
    if assigned:
        group.target[old.member_id] = assigned
    group.deadlines.move(group.members[old.member_id], now_ms + old.session_timeout_ms)


def _records(classic: ClassicGroup, group: ConsumerGroup) -> list[KeyValue]:
    group_id = classic.group_id
    key_values: list[KeyValue] = [(classic_records.encode_key(group_id), None)] if classic.is_persisted else []
    key_values.append(records.group_record(group_id, group.epoch, 0))
    for member_id, member in group.members.items():
        key_values.append(records.member_record(group_id, member_id, member.description))
        key_values.append(records.target_record(group_id, member_id, member.assigned))
        key_values.append(records.current_record(group_id, member_id, member.current))
    key_values.append(records.target_epoch_record(group_id, group.assignment_epoch))
    return key_values


def replies_to_retry(classic: ClassicGroup) -> list[Action]:
    """Replies to the requests that wait in the classic group: they make the clients retry, and the
    retries reach the consumer group.
    """
    error = int(ErrorCode.REBALANCE_IN_PROGRESS)
    replies: list[Action] = []
    for member in classic.members.by_id.values():
        if member.join_request is not None:
            replies.append(
                Reply(
                    member.join_request,
                    JoinGroupResponse(error_code=error, member_id=member.member_id, protocol_name=""),
                )
            )
        if member.sync_request is not None:
            replies.append(Reply(member.sync_request, SyncGroupResponse(error_code=error)))
    return replies


def downgrade(group: ConsumerGroup, now_ms: int) -> bytes | None:
    """Returns the GroupMetadata value of the classic group that replaces the consumer group. None:
    the members have no protocol in common.
    """
    members = list(group.members.values())
    votes, first = group.classic.votes, members[0].description.classic
    assert first is not None, "only classic members are left"
    protocol = next((name for name, _ in first.protocols if votes[name] == len(members)), None)
    if protocol is None:
        return None
    member_records = tuple(_member_record(group, member, protocol) for member in members)
    return classic_records.encode_value(
        classic_records.GroupRecord(
            CONSUMER_PROTOCOL, max(group.epoch, 1), protocol, members[0].member_id, now_ms, member_records
        )
    )


def _member_record(group: ConsumerGroup, member: Member, protocol: str) -> classic_records.MemberRecord:
    description, classic = member.description, member.description.classic
    assert classic is not None
    metadata = dict(classic.protocols)[protocol]
    assigned_by_name = {
        name: indexes
        for topic_id, indexes in member.assigned.items()
        if (name := group.cluster.topic_name(topic_id)) is not None
    }
    try:
        version = decode_subscription(metadata).version
    except ValueError:
        version = 0
    return classic_records.MemberRecord(
        member.member_id,
        description.instance_id,
        description.client_id,
        description.client_host,
        description.rebalance_timeout_ms,
        classic.session_timeout_ms,
        metadata,
        encode_assignment(version, assigned_by_name),
    )
