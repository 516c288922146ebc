"""The records of a KIP-848 group in `__consumer_offsets` as Python values: the layer between
mqd/coordinator/group/records.py, which encodes the bytes, and the core.

Kafka's types 4 (ConsumerGroupPartitionMetadata) and 16 (ConsumerGroupRegularExpression) are read
but not used: their content is computed again from the cluster's metadata, and the hash in type 3
shows whether it has changed. They are written only as tombstones. A member's `authorized_as` is a
tagged field of mqd's own, which Kafka ignores. It names the client whose rights limit what the
member's regular expression can match.
"""

from __future__ import annotations

import msgspec

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.group import records
from mqd.coordinator.group.consumer.cluster import ClientIdentity

METADATA, PARTITION_METADATA, MEMBER, TARGET_METADATA, TARGET_MEMBER, CURRENT, REGULAR_EXPRESSION = 3, 4, 5, 6, 7, 8, 16
KEY_TYPES = frozenset(records.CONSUMER_GROUP_TYPES)

EPOCH_MIN = -2  # epoch of a static member that has left
# Highest epoch that is accepted from a record: no group reaches it, and later epochs must fit into
# an int32.
EPOCH_MAX = 2**31 - 2**16

Partitions = dict[bytes, tuple[int, ...]]  # topic id (16 bytes) -> partition indexes, ascending, never empty

_GROUP, _MEMBER = records.CONSUMER_GROUP_METADATA, records.CONSUMER_GROUP_MEMBER_METADATA
_TARGET_EPOCH, _TARGET = (
    records.CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA,
    records.CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
)
_CURRENT = records.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT
_Classic, _ClientIdentity = _MEMBER.value.cls.ClassicMemberMetadata, _MEMBER.value.cls.ClientIdentity


class ClassicMetadata(msgspec.Struct, frozen=True):
    """State of a member that speaks the classic protocol. `protocols`: (name, metadata) in order of
    preference.
    """

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class Description(msgspec.Struct, frozen=True):
    """A member's description of itself."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]  # sorted
    topic_regex: str | None
    rebalance_timeout_ms: int
    server_assignor: str | None
    classic: ClassicMetadata | None = None
    # set only if the member subscribes by regular expression and ACLs are enabled: the principal
    # whose rights limit the matching topics
    authorized_as: ClientIdentity | None = None


class CurrentAssignment(msgspec.Struct, frozen=True):
    """The partitions that a member holds."""

    epoch: int
    previous_epoch: int
    state: int
    assigned: Partitions
    revoking: Partitions


def group_record(group_id: str, epoch: int, metadata_hash: int) -> KeyValue:
    return _GROUP.encode_key(group_id), _GROUP.encode_value(_GROUP.value.cls(epoch=epoch, metadata_hash=metadata_hash))


def decode_group(value: bytes) -> tuple[int, int]:
    """(epoch, metadata hash)."""
    record = _GROUP.decode_value(value)
    return valid_epoch(record.epoch), record.metadata_hash


def member_record(group_id: str, member_id: str, member: Description) -> KeyValue:
    classic = member.classic
    value = _MEMBER.value.cls(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topic_names),
        subscribed_topic_regex=member.topic_regex,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.server_assignor,
        classic_member_metadata=(
            None
            if classic is None
            else _Classic(
                session_timeout_ms=classic.session_timeout_ms,
                supported_protocols=[
                    _MEMBER.value.cls.Protocol(name=name, metadata=metadata) for name, metadata in classic.protocols
                ],
            )
        ),
        authorized_as=None
        if member.authorized_as is None
        else _ClientIdentity(member.authorized_as.principal, member.authorized_as.host),
    )
    return _MEMBER.encode_key(group_id, member_id), _MEMBER.encode_value(value)


def decode_member(value: bytes) -> Description:
    record = _MEMBER.decode_value(value)
    classic = record.classic_member_metadata
    return Description(
        record.instance_id,
        record.rack_id,
        record.client_id,
        record.client_host,
        tuple(sorted(set(record.subscribed_topic_names))),
        record.subscribed_topic_regex or None,
        record.rebalance_timeout_ms,
        record.server_assignor,
        (
            None
            if classic is None
            else ClassicMetadata(
                classic.session_timeout_ms,
                tuple((protocol.name, protocol.metadata) for protocol in classic.supported_protocols),
            )
        ),
        None
        if record.authorized_as is None
        else ClientIdentity(record.authorized_as.principal, record.authorized_as.host),
    )


def target_epoch_record(group_id: str, epoch: int) -> KeyValue:
    return _TARGET_EPOCH.encode_key(group_id), _TARGET_EPOCH.encode_value(
        _TARGET_EPOCH.value.cls(assignment_epoch=epoch)
    )


def decode_target_epoch(value: bytes) -> int:
    return valid_epoch(_TARGET_EPOCH.decode_value(value).assignment_epoch)


def valid_epoch(epoch: int, lowest: int = 0) -> int:
    """Returns the epoch. Raises ValueError if it is out of range."""
    if not lowest <= epoch <= EPOCH_MAX:
        raise ValueError(f"epoch {epoch} is outside {lowest} to {EPOCH_MAX}")
    return epoch


def target_record(group_id: str, member_id: str, partitions: Partitions) -> KeyValue:
    value = _TARGET.value.cls(topic_partitions=as_structs(partitions, _TARGET.value.cls.TopicPartition))
    return _TARGET.encode_key(group_id, member_id), _TARGET.encode_value(value)


def decode_target(value: bytes) -> Partitions:
    return partitions_of(_TARGET.decode_value(value).topic_partitions)


def current_record(group_id: str, member_id: str, current: CurrentAssignment) -> KeyValue:
    cls = _CURRENT.value.cls
    value = cls(
        member_epoch=current.epoch,
        previous_member_epoch=current.previous_epoch,
        state=current.state,
        assigned_partitions=as_structs(current.assigned, cls.TopicPartitions),
        partitions_pending_revocation=as_structs(current.revoking, cls.TopicPartitions),
    )
    return _CURRENT.encode_key(group_id, member_id), _CURRENT.encode_value(value)


def decode_current(value: bytes) -> CurrentAssignment:
    record = _CURRENT.decode_value(value)
    epoch, previous = valid_epoch(record.member_epoch, EPOCH_MIN), valid_epoch(record.previous_member_epoch, EPOCH_MIN)
    return CurrentAssignment(
        epoch,
        previous,
        record.state,
        partitions_of(record.assigned_partitions),
        partitions_of(record.partitions_pending_revocation),
    )


def group_tombstones(group_id: str) -> list[KeyValue]:
    """Tombstones for the group itself, without its members."""
    record_types = (_TARGET_EPOCH, records.CONSUMER_GROUP_PARTITION_METADATA, _GROUP)
    return [(record_type.encode_key(group_id), None) for record_type in record_types]


def member_tombstones(group_id: str, member_id: str) -> list[KeyValue]:
    return [(record_type.encode_key(group_id, member_id), None) for record_type in (_CURRENT, _TARGET, _MEMBER)]


def decode_key(key: bytes) -> tuple[int, str]:
    """(type, member id; "" for a record that belongs to no member). The type must be one of
    KEY_TYPES. Raises ValueError.
    """
    kind = records.key_type_of(key)
    decoded = records.CONSUMER_GROUP_TYPES[kind].decode_key(key)
    return kind, getattr(decoded, "member_id", "")


def is_expression_key(key: bytes) -> bool:
    return records.key_type_of(key) == REGULAR_EXPRESSION


def as_structs(partitions: Partitions, cls: type) -> list:
    return [cls(topic_id=topic_id, partitions=list(indexes)) for topic_id, indexes in partitions.items()]


def partitions_of(topics: list) -> Partitions:
    """Raises ValueError if a topic or partition is listed twice, or a partition is below 0."""
    by_topic: Partitions = {}
    for topic in topics:
        indexes = topic.partitions
        if topic.topic_id in by_topic or any(index < 0 for index in indexes) or len(set(indexes)) != len(indexes):
            raise ValueError("an assignment lists a topic or partition twice, or a partition below 0")
        if indexes:
            by_topic[topic.topic_id] = tuple(sorted(indexes))
    return by_topic
