"""Share groups: KIP-932, KIP-1206 (acquire mode), KIP-1222 (renewal), KIP-1226 (lag)."""

from mqd.protocol.schema.language import apis

APIS = apis("""
ShareGroupHeartbeat 76: versions 1, flexible from 0
group_id: string 0+
member_id: string 0+
member_epoch: int32 0+
rack_id: string 0+ null=0+
subscribed_topic_names: [string] 0+ null=0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
member_id: string 0+ null=0+
member_epoch: int32 0+
heartbeat_interval_ms: int32 0+
assignment: Assignment 0+ null=0+
    topic_partitions: [TopicPartitions] 0+
        topic_id: uuid 0+
        partitions: [int32] 0+

ShareGroupDescribe 77: versions 1, flexible from 0
group_ids: [string] 0+
include_authorized_operations: bool 0+
response
throttle_time_ms: int32 0+
groups: [Group] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    group_id: string 0+
    group_state: string 0+
    group_epoch: int32 0+
    assignment_epoch: int32 0+
    assignor_name: string 0+
    members: [Member] 0+
        member_id: string 0+
        rack_id: string 0+ null=0+
        member_epoch: int32 0+
        client_id: string 0+
        client_host: string 0+
        subscribed_topic_names: [string] 0+
        assignment: Assignment 0+
            topic_partitions: [TopicPartitions] 0+
                topic_id: uuid 0+
                topic_name: string 0+
                partitions: [int32] 0+
    authorized_operations: int32 0+ = -0x80000000

ShareFetch 78: versions 1-2, flexible from 0
group_id: string 0+ null=0+
member_id: string 0+ null=0+
share_session_epoch: int32 0+
max_wait_ms: int32 0+
min_bytes: int32 0+
max_bytes: int32 0+ = 0x7fffffff
max_records: int32 1+
batch_size: int32 1+
share_acquire_mode: int8 2+
is_renew_ack: bool 2+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        partition_max_bytes: int32 0
        acknowledgement_batches: [AcknowledgementBatch] 0+
            first_offset: int64 0+
            last_offset: int64 0+
            acknowledge_types: [int8] 0+
forgotten_topics_data: [ForgottenTopic] 0+
    topic_id: uuid 0+
    partitions: [int32] 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
acquisition_lock_timeout_ms: int32 1+
responses: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        acknowledge_error_code: int16 0+
        acknowledge_error_message: string 0+ null=0+
        current_leader: LeaderIdAndEpoch 0+
            leader_id: int32 0+
            leader_epoch: int32 0+
        records: records 0+ null=0
        acquired_records: [AcquiredRecords] 0+
            first_offset: int64 0+
            last_offset: int64 0+
            delivery_count: int16 0+
node_endpoints: [NodeEndpoint] 0+
    node_id: int32 0+
    host: string 0+
    port: int32 0+
    rack: string 0+ null=0+

ShareAcknowledge 79: versions 1-2, flexible from 0
group_id: string 0+ null=0+
member_id: string 0+ null=0+
share_session_epoch: int32 0+
is_renew_ack: bool 2+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        acknowledgement_batches: [AcknowledgementBatch] 0+
            first_offset: int64 0+
            last_offset: int64 0+
            acknowledge_types: [int8] 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
acquisition_lock_timeout_ms: int32 2+
responses: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        current_leader: LeaderIdAndEpoch 0+
            leader_id: int32 0+
            leader_epoch: int32 0+
node_endpoints: [NodeEndpoint] 0+
    node_id: int32 0+
    host: string 0+
    port: int32 0+
    rack: string 0+ null=0+

InitializeShareGroupState 83: versions 0, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        state_epoch: int32 0+
        start_offset: int64 0+
response
results: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+

ReadShareGroupState 84: versions 0, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        leader_epoch: int32 0+
        epochs: [EpochStart] 0+ tag=9100
            leader_epoch: int32 0+
            start_offset: int64 0+
response
results: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        state_epoch: int32 0+
        start_offset: int64 0+
        state_batches: [StateBatch] 0+
            first_offset: int64 0+
            last_offset: int64 0+
            delivery_state: int8 0+
            delivery_count: int16 0+

WriteShareGroupState 85: versions 0-1, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        state_epoch: int32 0+
        leader_epoch: int32 0+
        start_offset: int64 0+
        delivery_complete_count: int32 1+ = -1
        state_batches: [StateBatch] 0+
            first_offset: int64 0+
            last_offset: int64 0+
            delivery_state: int8 0+
            delivery_count: int16 0+
response
results: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+

DeleteShareGroupState 86: versions 0, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
response
results: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+

ReadShareGroupStateSummary 87: versions 0-1, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        leader_epoch: int32 0+
        include_deliveries: bool 0+ tag=9100
response
results: [Topic] 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        state_epoch: int32 0+
        leader_epoch: int32 0+
        start_offset: int64 0+
        delivery_complete_count: int32 1+ = -1
        deliveries: [Delivered] 0+ tag=9100
            delivery_count: int16 0+
            records: int64 0+

DescribeShareGroupOffsets 90: versions 0-1, flexible from 0
groups: [Group] 0+
    group_id: string 0+
    topics: [Topic] 0+ null=0+
        topic_name: string 0+
        partitions: [int32] 0+
include_deliveries: bool 0+ tag=9100
response
throttle_time_ms: int32 0+
groups: [Group] 0+
    group_id: string 0+
    topics: [Topic] 0+
        topic_name: string 0+
        topic_id: uuid 0+
        partitions: [Partition] 0+
            partition_index: int32 0+
            start_offset: int64 0+
            leader_epoch: int32 0+
            lag: int64 1+ = -1
            error_code: int16 0+
            error_message: string 0+ null=0+
            deliveries: [Delivered] 0+ tag=9100
                delivery_count: int16 0+
                records: int64 0+
    error_code: int16 0+
    error_message: string 0+ null=0+

AlterShareGroupOffsets 91: versions 0, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_name: string 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        start_offset: int64 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
responses: [Topic] 0+
    topic_name: string 0+
    topic_id: uuid 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+

DeleteShareGroupOffsets 92: versions 0, flexible from 0
group_id: string 0+
topics: [Topic] 0+
    topic_name: string 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
responses: [Topic] 0+
    topic_name: string 0+
    topic_id: uuid 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
""")
