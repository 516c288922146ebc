"""Consumer groups of the classic protocol and their offsets.

KIP-62, 98, 211, 229, 320, 345, 430, 447, 496, 518, 559, 709, 800, 814, 848, 1043 and 1251 changed
these messages. OffsetFetch 8+ requests several groups at once.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
OffsetCommit 8: versions 2-10, flexible from 8
group_id: string 0+
generation_id_or_member_epoch: int32 1+ = -1
member_id: string 1+
group_instance_id: string 7+ null=7+
retention_time_ms: int64 2-4 = -1
topics: [Topic] 0+
    name: string 0-9
    topic_id: uuid 10+
    partitions: [Partition] 0+
        partition_index: int32 0+
        committed_offset: int64 0+
        committed_leader_epoch: int32 6+ = -1
        committed_metadata: string 0+ null=0+
response
throttle_time_ms: int32 3+
topics: [TopicResponse] 0+
    name: string 0-9
    topic_id: uuid 10+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+

OffsetFetch 9: versions 1-10, flexible from 6
group_id: string 0-7
topics: [Topic] 0-7 null=2-7
    name: string 0-7
    partition_indexes: [int32] 0-7
groups: [Group] 8+
    group_id: string 8+
    member_id: string 9+ null=9+
    member_epoch: int32 9+ = -1
    topics: [GroupTopic] 8+ null=8+
        name: string 8-9
        topic_id: uuid 10+
        partition_indexes: [int32] 8+
require_stable: bool 7+
response
throttle_time_ms: int32 3+
topics: [Topic] 0-7
    name: string 0-7
    partitions: [Partition] 0-7
        partition_index: int32 0-7
        committed_offset: int64 0-7
        committed_leader_epoch: int32 5-7 = -1
        metadata: string 0-7 null=0-7 = ""
        error_code: int16 0-7
error_code: int16 2-7
groups: [Group] 8+
    group_id: string 8+
    topics: [GroupTopic] 8+
        name: string 8-9
        topic_id: uuid 10+
        partitions: [GroupPartition] 8+
            partition_index: int32 8+
            committed_offset: int64 8+
            committed_leader_epoch: int32 8+ = -1
            metadata: string 8+ null=8+ = ""
            error_code: int16 8+
    error_code: int16 8+

JoinGroup 11: versions 0-9, flexible from 6
group_id: string 0+
session_timeout_ms: int32 0+
rebalance_timeout_ms: int32 1+ = -1
member_id: string 0+
group_instance_id: string 5+ null=5+
protocol_type: string 0+
protocols: [Protocol] 0+
    name: string 0+
    metadata: bytes 0+
reason: string 8+ null=8+
response
throttle_time_ms: int32 2+
error_code: int16 0+
generation_id: int32 0+ = -1
protocol_type: string 7+ null=7+
protocol_name: string 0+ null=7+ = ""
leader: string 0+
skip_assignment: bool 9+
member_id: string 0+
members: [Member] 0+
    member_id: string 0+
    group_instance_id: string 5+ null=5+
    metadata: bytes 0+

Heartbeat 12: versions 0-4, flexible from 4
group_id: string 0+
generation_id: int32 0+
member_id: string 0+
group_instance_id: string 3+ null=3+
response
throttle_time_ms: int32 1+
error_code: int16 0+

LeaveGroup 13: versions 0-5, flexible from 4
group_id: string 0+
member_id: string 0-2
members: [MemberIdentity] 3+
    member_id: string 3+
    group_instance_id: string 3+ null=3+
    reason: string 5+ null=5+
response
throttle_time_ms: int32 1+
error_code: int16 0+
members: [MemberResponse] 3+
    member_id: string 3+
    group_instance_id: string 3+ null=3+
    error_code: int16 3+

SyncGroup 14: versions 0-5, flexible from 4
group_id: string 0+
generation_id: int32 0+
member_id: string 0+
group_instance_id: string 3+ null=3+
protocol_type: string 5+ null=5+
protocol_name: string 5+ null=5+
assignments: [Assignment] 0+
    member_id: string 0+
    assignment: bytes 0+
response
throttle_time_ms: int32 1+
error_code: int16 0+
protocol_type: string 5+ null=5+
protocol_name: string 5+ null=5+
assignment: bytes 0+

DescribeGroups 15: versions 0-6, flexible from 5
groups: [string] 0+
include_authorized_operations: bool 3+
include_rebalance: bool 5+ tag=9100
response
throttle_time_ms: int32 1+
groups: [Group] 0+
    error_code: int16 0+
    error_message: string 6+ null=6+
    group_id: string 0+
    group_state: string 0+
    protocol_type: string 0+
    protocol_data: string 0+
    members: [Member] 0+
        member_id: string 0+
        group_instance_id: string 4+ null=4+
        client_id: string 0+
        client_host: string 0+
        member_metadata: bytes 0+
        member_assignment: bytes 0+
    authorized_operations: int32 3+ = -0x80000000
    rebalance: Rebalance 5+ null=5+ tag=9100
        elapsed_ms: int64 5+ = -1
        reason: string 5+
        held_up_by: [Holder] 5+
            member_id: string 5+
            group_instance_id: string 5+ null=5+
            client_id: string 5+
            client_host: string 5+
            waited_for: string 5+
            waited_ms: int64 5+ = -1
            silent_ms: int64 5+ = -1

ListGroups 16: versions 0-5, flexible from 3
states_filter: [string] 4+
types_filter: [string] 5+
response
throttle_time_ms: int32 1+
error_code: int16 0+
groups: [Group] 0+
    group_id: string 0+
    protocol_type: string 0+
    group_state: string 4+
    group_type: string 5+

DeleteGroups 42: versions 0-2, flexible from 2
groups_names: [string] 0+
response
throttle_time_ms: int32 0+
results: [Result] 0+
    group_id: string 0+
    error_code: int16 0+

OffsetDelete 47: versions 0, flexible from 1
group_id: string 0+
topics: [Topic] 0+
    name: string 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
response
error_code: int16 0+
throttle_time_ms: int32 0+
topics: [TopicResponse] 0+
    name: string 0+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+
""")
