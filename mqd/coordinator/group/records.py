"""Keys and values of `__consumer_offsets` in Kafka's format, so that Kafka's tools can read them.

    key type   record                                      one per: content
    0, 1       OffsetCommit                                group, topic and partition: a committed offset
    2          GroupMetadata (classic/records.py)          classic group: its generation and members
    3          ConsumerGroupMetadata                       KIP-848 group: its epoch
    4          ConsumerGroupPartitionMetadata              KIP-848 group: its topics (older brokers)
    5          ConsumerGroupMemberMetadata                 member: its subscription
    6          ConsumerGroupTargetAssignmentMetadata       KIP-848 group: the epoch of the target assignment
    7          ConsumerGroupTargetAssignmentMember         member: its target assignment
    8          ConsumerGroupCurrentMemberAssignment        member: its partitions
    10         ShareGroupMemberMetadata                    member of a share group: what it subscribes to
    11         ShareGroupMetadata                          share group (KIP-932): its epoch
    12         ShareGroupTargetAssignmentMetadata          share group: the epoch of the target assignment
    13         ShareGroupTargetAssignmentMember            member of a share group: its target assignment
    14         ShareGroupCurrentMemberAssignment           member of a share group: what it was assigned
    15         ShareGroupStatePartitionMetadata            share group: which share-partitions have a state
    16         ConsumerGroupRegularExpression              group and expression: what it matches
    17         StreamsGroupMetadata                        streams group (KIP-1071): its epoch
    19         StreamsGroupMemberMetadata                  member of a streams group: its process, its endpoint
    20         StreamsGroupTargetAssignmentMetadata        streams group: the epoch of the target assignment
    21         StreamsGroupTargetAssignmentMember          member of a streams group: its target assignment
    22         StreamsGroupCurrentMemberAssignment         member of a streams group: its tasks
    23         StreamsGroupTopology                        streams group: its topology

Types 9 and 18 are not used by Kafka 4.2. Type 4 is read, but written only as tombstones: newer
brokers keep a hash of the topics in type 3. OffsetCommit has its own encoder and decoder, for
speed: there can be a million of these records. Source: the message schemas of Kafka's group
coordinator (KIP-848, KIP-932, KIP-1071).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from mqd.coordinator.schema import RecordSchema, RecordType, key_type_of

OFFSET_COMMIT_OLD, OFFSET_COMMIT, GROUP_METADATA = 0, 1, 2
NO_TOPIC_ID = bytes(16)

# -- ConsumerGroup* --------------------------------------------------------------------------------

_GROUP = "group_id: string 0+\n"
_MEMBER = "group_id: string 0+\nmember_id: string 0+\n"
_PARTITIONS = """
    topic_id: uuid 0+
    partitions: [int32] 0+
"""

CONSUMER_GROUP_METADATA = RecordType(
    3,
    "ConsumerGroupMetadata",
    _GROUP,
    """
epoch: int32 0+
metadata_hash: int64 0+ tag=0 = 0
""",
)
CONSUMER_GROUP_PARTITION_METADATA = RecordType(
    4,
    "ConsumerGroupPartitionMetadata",
    _GROUP,
    """
topics: [Topic] 0+
    topic_id: uuid 0+
    topic_name: string 0+
    num_partitions: int32 0+
    partition_metadata: [Partition] 0+
        partition: int32 0+
        racks: [string] 0+
""",
)
# authorized_as is mqd's own tagged field: the client whose rights limit the matches of the regular
# expression
CONSUMER_GROUP_MEMBER_METADATA = RecordType(
    5,
    "ConsumerGroupMemberMetadata",
    _MEMBER,
    """
instance_id: string 0+ null=0+
rack_id: string 0+ null=0+
client_id: string 0+
client_host: string 0+
subscribed_topic_names: [string] 0+
subscribed_topic_regex: string 0+ null=0+
rebalance_timeout_ms: int32 0+ = -1
server_assignor: string 0+ null=0+
classic_member_metadata: ClassicMemberMetadata 0+ null=0+ tag=0 = null
    session_timeout_ms: int32 0+
    supported_protocols: [Protocol] 0+
        name: string 0+
        metadata: bytes 0+
authorized_as: ClientIdentity 0+ null=0+ tag=5000 = null
    principal: string 0+
    host: string 0+
""",
)
CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA = RecordType(
    6, "ConsumerGroupTargetAssignmentMetadata", _GROUP, "assignment_epoch: int32 0+\n"
)
CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER = RecordType(
    7, "ConsumerGroupTargetAssignmentMember", _MEMBER, "topic_partitions: [TopicPartition] 0+" + _PARTITIONS
)
CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT = RecordType(
    8,
    "ConsumerGroupCurrentMemberAssignment",
    _MEMBER,
    "member_epoch: int32 0+\nprevious_member_epoch: int32 0+\nstate: int8 0+\nassigned_partitions: [TopicPartitions] 0+"
    + _PARTITIONS
    + "partitions_pending_revocation: [TopicPartitions] 0+\n",
)
CONSUMER_GROUP_REGULAR_EXPRESSION = RecordType(
    16,
    "ConsumerGroupRegularExpression",
    "group_id: string 0+\nregular_expression: string 0+\n",
    """
topics: [string] 0+
version: int64 0+
timestamp: int64 0+
""",
)

CONSUMER_GROUP_TYPES: dict[int, RecordType] = {
    record_type.key_type: record_type
    for record_type in (
        CONSUMER_GROUP_METADATA,
        CONSUMER_GROUP_PARTITION_METADATA,
        CONSUMER_GROUP_MEMBER_METADATA,
        CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA,
        CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
        CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        CONSUMER_GROUP_REGULAR_EXPRESSION,
    )
}

# -- ShareGroup* -----------------------------------------------------------------------------------

SHARE_GROUP_MEMBER_METADATA = RecordType(
    10,
    "ShareGroupMemberMetadata",
    _MEMBER,
    """
rack_id: string 0+ null=0+
client_id: string 0+
client_host: string 0+
subscribed_topic_names: [string] 0+
""",
)
SHARE_GROUP_METADATA = RecordType(11, "ShareGroupMetadata", _GROUP, "epoch: int32 0+\nmetadata_hash: int64 0+\n")
SHARE_GROUP_TARGET_ASSIGNMENT_METADATA = RecordType(
    12, "ShareGroupTargetAssignmentMetadata", _GROUP, "assignment_epoch: int32 0+\n"
)
SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER = RecordType(
    13, "ShareGroupTargetAssignmentMember", _MEMBER, "topic_partitions: [TopicPartition] 0+" + _PARTITIONS
)
SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT = RecordType(
    14,
    "ShareGroupCurrentMemberAssignment",
    _MEMBER,
    "member_epoch: int32 0+\nprevious_member_epoch: int32 0+\nstate: int8 0+\nassigned_partitions: [TopicPartitions] 0+"
    + _PARTITIONS,
)
SHARE_GROUP_STATE_PARTITION_METADATA = RecordType(
    15,
    "ShareGroupStatePartitionMetadata",
    _GROUP,
    """
initializing_topics: [TopicPartitionsInfo] 0+
    topic_id: uuid 0+
    topic_name: string 0+
    partitions: [int32] 0+
initialized_topics: [TopicPartitionsInfo] 0+
deleting_topics: [TopicInfo] 0+
    topic_id: uuid 0+
    topic_name: string 0+
""",
)

SHARE_GROUP_TYPES: dict[int, RecordType] = {
    record_type.key_type: record_type
    for record_type in (
        SHARE_GROUP_MEMBER_METADATA,
        SHARE_GROUP_METADATA,
        SHARE_GROUP_TARGET_ASSIGNMENT_METADATA,
        SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
        SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        SHARE_GROUP_STATE_PARTITION_METADATA,
    )
}

# -- StreamsGroup* ---------------------------------------------------------------------------------

STREAMS_GROUP_METADATA = RecordType(
    17,
    "StreamsGroupMetadata",
    _GROUP,
    """
epoch: int32 0+
metadata_hash: int64 0+
validated_topology_epoch: int32 0+ tag=0 = -1
last_assignment_configs: [LastAssignmentConfig] 0+ null=0+ tag=1 = null
    key: string 0+
    value: string 0+
""",
)
STREAMS_GROUP_MEMBER_METADATA = RecordType(
    19,
    "StreamsGroupMemberMetadata",
    _MEMBER,
    """
instance_id: string 0+ null=0+
rack_id: string 0+ null=0+
client_id: string 0+
client_host: string 0+
rebalance_timeout_ms: int32 0+ = -1
topology_epoch: int32 0+
process_id: string 0+
user_endpoint: Endpoint 0+ null=0+
    host: string 0+
    port: uint16 0+
client_tags: [KeyValue] 0+
    key: string 0+
    value: string 0+
""",
)
STREAMS_GROUP_TARGET_ASSIGNMENT_METADATA = RecordType(
    20, "StreamsGroupTargetAssignmentMetadata", _GROUP, "assignment_epoch: int32 0+\n"
)
STREAMS_GROUP_TARGET_ASSIGNMENT_MEMBER = RecordType(
    21,
    "StreamsGroupTargetAssignmentMember",
    _MEMBER,
    """
active_tasks: [TaskIds] 0+
    subtopology_id: string 0+
    partitions: [int32] 0+
standby_tasks: [TaskIds] 0+
warmup_tasks: [TaskIds] 0+
""",
)
STREAMS_GROUP_CURRENT_MEMBER_ASSIGNMENT = RecordType(
    22,
    "StreamsGroupCurrentMemberAssignment",
    _MEMBER,
    """
member_epoch: int32 0+
previous_member_epoch: int32 0+
state: int8 0+
active_tasks: [TaskIds] 0+
    subtopology_id: string 0+
    partitions: [int32] 0+
    assignment_epochs: [int32] 0+ null=0+ tag=0 = null
standby_tasks: [TaskIds] 0+
warmup_tasks: [TaskIds] 0+
active_tasks_pending_revocation: [TaskIds] 0+
standby_tasks_pending_revocation: [TaskIds] 0+
warmup_tasks_pending_revocation: [TaskIds] 0+
""",
)
STREAMS_GROUP_TOPOLOGY = RecordType(
    23,
    "StreamsGroupTopology",
    _GROUP,
    """
epoch: int32 0+
subtopologies: [Subtopology] 0+
    subtopology_id: string 0+
    source_topics: [string] 0+
    source_topic_regex: [string] 0+
    state_changelog_topics: [TopicInfo] 0+
        name: string 0+
        partitions: int32 0+
        replication_factor: int16 0+
        topic_configs: [TopicConfig] 0+
            key: string 0+
            value: string 0+
    repartition_sink_topics: [string] 0+
    repartition_source_topics: [TopicInfo] 0+
    copartition_groups: [CopartitionGroup] 0+
        source_topics: [int16] 0+
        source_topic_regex: [int16] 0+
        repartition_source_topics: [int16] 0+
""",
)

STREAMS_GROUP_TYPES: dict[int, RecordType] = {
    record_type.key_type: record_type
    for record_type in (
        STREAMS_GROUP_METADATA,
        STREAMS_GROUP_MEMBER_METADATA,
        STREAMS_GROUP_TARGET_ASSIGNMENT_METADATA,
        STREAMS_GROUP_TARGET_ASSIGNMENT_MEMBER,
        STREAMS_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        STREAMS_GROUP_TOPOLOGY,
    )
}

# -- OffsetCommit ----------------------------------------------------------------------------------

_I16, _I32 = struct.Struct(">h"), struct.Struct(">i")
# the fields before the metadata, by value version; versions 0 to 2 share entry 2
_HEADS = {2: struct.Struct(">hqh"), 3: struct.Struct(">hqih")}
_OFFSET_VALUE_VERSION = 3
# the fields after the metadata, by value version
_TAILS = {0: struct.Struct(">q"), 1: struct.Struct(">qq"), 2: struct.Struct(">q"), 3: struct.Struct(">q")}
_VALUE_4 = RecordSchema(
    "OffsetCommitValue",
    "4",
    4,
    """
offset: int64 4+
leader_epoch: int32 4+ = -1
metadata: string 4+
commit_timestamp: int64 4+
topic_id: uuid 4+ tag=0
""",
)


class OffsetValue(NamedTuple):
    """`expire_timestamp_ms` -1: offsets.retention.minutes applies. The topic id is zero if the
    writer supplied none (versions below 4).
    """

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp_ms: int = -1
    expire_timestamp_ms: int = -1
    topic_id: bytes = NO_TOPIC_ID


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return _I16.pack(len(data)) + data


CACHED_GROUP_ID_CHARS_MAX = 256  # longer ids are not cached: the cache could grow to a gigabyte


def offset_key_prefix(group_id: str, topic: str) -> bytes:
    """The key without its last four bytes, the partition."""
    return b"\x00\x01" + _encode_string(group_id) + _encode_string(topic)


_cached_prefix = lru_cache(maxsize=1 << 14)(offset_key_prefix)


def encode_offset_key(group_id: str, topic: str, partition: int) -> bytes:
    prefix = _cached_prefix if len(group_id) <= CACHED_GROUP_ID_CHARS_MAX else offset_key_prefix
    return prefix(group_id, topic) + _I32.pack(partition)


def group_of_key(key: bytes) -> str:
    """Keys of all types begin with the group's id, after the type. Raises ValueError."""
    if len(key) < 4:
        raise ValueError(f"a key of {len(key)} bytes is too short")
    end = 4 + _I16.unpack_from(key, 2)[0]
    if not 4 <= end <= len(key):
        raise ValueError(f"a group id of {end - 4} bytes does not fit into a key of {len(key)} bytes")
    return key[4:end].decode()


def split_offset_prefix(prefix: bytes) -> tuple[str, str]:
    """Splits an OffsetCommit's key without its partition into (group, topic). Raises ValueError."""
    group = group_of_key(prefix)
    start = 4 + _I16.unpack_from(prefix, 2)[0]
    if start + 2 > len(prefix) or _I16.unpack_from(prefix, start)[0] != len(prefix) - start - 2:
        raise ValueError("OffsetCommit key: the topic's name is not as long as its length field says")
    return group, prefix[start + 2 :].decode()


def decode_offset_key(key: bytes) -> tuple[str, str, int]:
    """(group, topic, partition). Raises ValueError."""
    if key_type_of(key) > OFFSET_COMMIT:
        raise ValueError(f"a key of type {key_type_of(key)} is not an OffsetCommit's")
    return *split_offset_prefix(key[:-4]), _I32.unpack_from(key, len(key) - 4)[0]


def encode_offset_value(offset: int, leader_epoch: int, metadata: str, commit_timestamp_ms: int) -> bytes:
    data = metadata.encode()
    return (
        _HEADS[3].pack(_OFFSET_VALUE_VERSION, offset, leader_epoch, len(data))
        + data
        + _TAILS[3].pack(commit_timestamp_ms)
    )


def encode_expiring_offset_value(
    offset: int, metadata: str, commit_timestamp_ms: int, expire_timestamp_ms: int
) -> bytes:
    """Encodes a value of version 1, the only version that stores an expiration time. Clients set
    one in OffsetCommit requests of versions 2 to 4.
    """
    data = metadata.encode()
    return _HEADS[2].pack(1, offset, len(data)) + data + _TAILS[1].pack(commit_timestamp_ms, expire_timestamp_ms)


def decode_offset_value(data: bytes) -> OffsetValue:
    """Versions 0 to 4. Raises ValueError."""
    try:
        (version,) = _I16.unpack_from(data)
        if version == 4:
            value = _VALUE_4.decode(data)
            return OffsetValue(
                value.offset, value.leader_epoch, value.metadata, value.commit_timestamp, -1, value.topic_id
            )
        if not 0 <= version <= 3:
            raise ValueError(f"OffsetCommit value has version {version}; only versions 0 to 4 can be read")
        head = _HEADS[3 if version == 3 else 2]
        _, offset, *epoch, size = head.unpack_from(data)
        end, tail = head.size + size, _TAILS[version]
        if size < 0 or end + tail.size != len(data):
            raise ValueError(f"OffsetCommit value: metadata of {size} bytes does not fit a value of {len(data)} bytes")
        commit_ms, *expire_ms = tail.unpack_from(data, end)
    except struct.error:
        raise ValueError(f"OffsetCommit value is cut off after {len(data)} bytes") from None
    return OffsetValue(
        offset, epoch[0] if epoch else -1, data[head.size : end].decode(), commit_ms, expire_ms[0] if expire_ms else -1
    )
