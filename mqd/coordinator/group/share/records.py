"""The records of a share group in `__consumer_offsets` as Python values: the layer between
mqd/coordinator/group/records.py, which encodes the bytes, and the core.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.group import records
from mqd.coordinator.group.consumer.records import Partitions, as_structs, partitions_of, valid_epoch
from mqd.coordinator.schema import key_type_of

MEMBER, METADATA, TARGET_METADATA, TARGET_MEMBER, CURRENT, STATES = range(10, 16)
STABLE = 0  # the only MemberState of members of share groups

_MEMBER, _GROUP = records.SHARE_GROUP_MEMBER_METADATA, records.SHARE_GROUP_METADATA
_TARGET_EPOCH, _TARGET = (records.SHARE_GROUP_TARGET_ASSIGNMENT_METADATA, records.SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER)
_CURRENT, _STATES = records.SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT, records.SHARE_GROUP_STATE_PARTITION_METADATA
_Info, _Topic = _STATES.value.cls.TopicPartitionsInfo, _STATES.value.cls.TopicInfo


class Description(msgspec.Struct, frozen=True):
    """A member's description of itself."""

    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]  # sorted


class CurrentAssignment(msgspec.Struct, frozen=True):
    """The assignment last sent to a member."""

    epoch: int
    previous_epoch: int
    assigned: Partitions


class States(msgspec.Struct):
    """The share-partitions of a group, by the stage of their persisted state. `names`: topic id ->
    name.
    """

    initializing: Partitions = {}
    initialized: Partitions = {}
    deleting: frozenset[bytes] = frozenset()
    names: dict[bytes, str] = {}


def member_record(group_id: str, member_id: str, member: Description) -> KeyValue:
    value = _MEMBER.value.cls(
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topic_names),
    )
    return _MEMBER.encode_key(group_id, member_id), _MEMBER.encode_value(value)


def decode_member(value: bytes) -> Description:
    record = _MEMBER.decode_value(value)
    names = tuple(sorted(set(record.subscribed_topic_names)))
    return Description(record.rack_id, record.client_id, record.client_host, names)


def group_record(group_id: str, epoch: int, metadata_hash: int) -> KeyValue:
    return _GROUP.encode_key(group_id), _GROUP.encode_value(_GROUP.value.cls(epoch=epoch, metadata_hash=metadata_hash))


def decode_group(value: bytes) -> tuple[int, int]:
    """(epoch, metadata hash)."""
    record = _GROUP.decode_value(value)
    return valid_epoch(record.epoch), record.metadata_hash


def target_epoch_record(group_id: str, epoch: int) -> KeyValue:
    value = _TARGET_EPOCH.value.cls(assignment_epoch=epoch)
    return _TARGET_EPOCH.encode_key(group_id), _TARGET_EPOCH.encode_value(value)


def decode_target_epoch(value: bytes) -> int:
    return valid_epoch(_TARGET_EPOCH.decode_value(value).assignment_epoch)


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
        state=STABLE,
        assigned_partitions=as_structs(current.assigned, cls.TopicPartitions),
    )
    return _CURRENT.encode_key(group_id, member_id), _CURRENT.encode_value(value)


def decode_current(value: bytes) -> CurrentAssignment:
    record = _CURRENT.decode_value(value)
    return CurrentAssignment(
        valid_epoch(record.member_epoch),
        valid_epoch(record.previous_member_epoch),
        partitions_of(record.assigned_partitions),
    )


def states_record(group_id: str, states: States) -> KeyValue:
    def infos(partitions: Partitions) -> list[Any]:
        return [_Info(topic_id, states.names[topic_id], list(indexes)) for topic_id, indexes in partitions.items()]

    value = _STATES.value.cls(
        initializing_topics=infos(states.initializing),
        initialized_topics=infos(states.initialized),
        deleting_topics=[_Topic(topic_id, states.names[topic_id]) for topic_id in sorted(states.deleting)],
    )
    return _STATES.encode_key(group_id), _STATES.encode_value(value)


def decode_states(value: bytes) -> States:
    record = _STATES.decode_value(value)
    all_topics = (*record.initializing_topics, *record.initialized_topics, *record.deleting_topics)
    return States(
        partitions_of(record.initializing_topics),
        partitions_of(record.initialized_topics),
        frozenset(topic.topic_id for topic in record.deleting_topics),
        {topic.topic_id: topic.topic_name for topic in all_topics},
    )


def member_tombstones(group_id: str, member_id: str) -> list[KeyValue]:
    return [(record_type.encode_key(group_id, member_id), None) for record_type in (_CURRENT, _TARGET, _MEMBER)]


def group_tombstones(group_id: str) -> list[KeyValue]:
    """Tombstones for the group itself, without its members."""
    return [(record_type.encode_key(group_id), None) for record_type in (_TARGET_EPOCH, _STATES, _GROUP)]


def decode_key(key: bytes) -> tuple[int, str]:
    """(type, member id; "" for records of the group itself). Raises ValueError."""
    kind = key_type_of(key)
    return kind, getattr(records.SHARE_GROUP_TYPES[kind].decode_key(key), "member_id", "")
