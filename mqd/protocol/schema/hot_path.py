"""Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, InitProducerId: the frequent requests of
producers and consumers.

KIP-74, 98, 101, 227, 320, 360, 392, 467, 516, 595, 903, 951, 1076 and 1094 changed these messages.
Produce 0-2 are defined because a broker has to advertise them (KAFKA-18659: older librdkafka
compresses only if version 0 is advertised); their records are of magic 0 and 1.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
Produce 0: versions 0-13, flexible from 9
transactional_id: string 3+ null=3+
acks: int16 0+
timeout_ms: int32 0+
topic_data: [TopicData] 0+
    name: string 0-12
    topic_id: uuid 13+
    partition_data: [PartitionData] 0+
        index: int32 0+
        records: records 0+ null=0+
response
responses: [TopicResponse] 0+
    name: string 0-12
    topic_id: uuid 13+
    partition_responses: [PartitionResponse] 0+
        index: int32 0+
        error_code: int16 0+
        base_offset: int64 0+
        log_append_time_ms: int64 2+ = -1
        log_start_offset: int64 5+ = -1
        record_errors: [RecordError] 8+
            batch_index: int32 8+
            batch_index_error_message: string 8+ null=8+
        error_message: string 8+ null=8+
        current_leader: LeaderIdAndEpoch 10+ tag=0
            leader_id: int32 10+ = -1
            leader_epoch: int32 10+ = -1
throttle_time_ms: int32 1+
node_endpoints: [NodeEndpoint] 10+ tag=0
    node_id: int32 10+
    host: string 10+
    port: int32 10+
    rack: string 10+ null=10+

Fetch 1: versions 4-18, flexible from 12
cluster_id: string 12+ null=12+ tag=0
replica_id: int32 0-14 = -1
replica_state: ReplicaState 15+ tag=1
    replica_id: int32 15+ = -1
    replica_epoch: int64 15+ = -1
max_wait_ms: int32 0+
min_bytes: int32 0+
max_bytes: int32 3+ = 0x7fffffff
isolation_level: int8 4+
session_id: int32 7+
session_epoch: int32 7+ = -1
topics: [Topic] 0+
    topic: string 0-12
    topic_id: uuid 13+
    partitions: [Partition] 0+
        partition: int32 0+
        current_leader_epoch: int32 9+ = -1
        fetch_offset: int64 0+
        last_fetched_epoch: int32 12+ = -1
        log_start_offset: int64 5+ = -1
        partition_max_bytes: int32 0+
        replica_directory_id: uuid 17+ tag=0
        high_watermark: int64 18+ tag=1 = 0x7fffffffffffffff
forgotten_topics_data: [ForgottenTopic] 7+
    topic: string 7-12
    topic_id: uuid 13+
    partitions: [int32] 7+
rack_id: string 11+
response
throttle_time_ms: int32 1+
error_code: int16 7+
session_id: int32 7+
responses: [TopicResponse] 0+
    topic: string 0-12
    topic_id: uuid 13+
    partitions: [PartitionData] 0+
        partition_index: int32 0+
        error_code: int16 0+
        high_watermark: int64 0+
        last_stable_offset: int64 4+ = -1
        log_start_offset: int64 5+ = -1
        diverging_epoch: EpochEndOffset 12+ tag=0
            epoch: int32 12+ = -1
            end_offset: int64 12+ = -1
        current_leader: LeaderIdAndEpoch 12+ tag=1
            leader_id: int32 12+ = -1
            leader_epoch: int32 12+ = -1
        snapshot_id: SnapshotId 12+ tag=2
            end_offset: int64 0+ = -1
            epoch: int32 0+ = -1
        aborted_transactions: [AbortedTransaction] 4+ null=4+
            producer_id: int64 4+
            first_offset: int64 4+
        preferred_read_replica: int32 11+ = -1
        records: records 0+ null=0+
node_endpoints: [NodeEndpoint] 16+ tag=0
    node_id: int32 16+
    host: string 16+
    port: int32 16+
    rack: string 16+ null=16+

ListOffsets 2: versions 1-11, flexible from 6
replica_id: int32 0+ = -1
isolation_level: int8 2+
topics: [Topic] 0+
    name: string 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        current_leader_epoch: int32 4+ = -1
        timestamp: int64 0+
timeout_ms: int32 10+
response
throttle_time_ms: int32 2+
topics: [TopicResponse] 0+
    name: string 0+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+
        timestamp: int64 1+ = -1
        offset: int64 1+ = -1
        leader_epoch: int32 4+ = -1

InitProducerId 22: versions 0-5, flexible from 2
transactional_id: string 0+ null=0+
transaction_timeout_ms: int32 0+
producer_id: int64 3+ = -1
producer_epoch: int16 3+ = -1
joint: Joint 5+ null=5+ tag=9100
    batch_id: int64 0+
    run_id: string 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
producer_id: int64 0+ = -1
producer_epoch: int16 0+
joint: JointResult 5+ null=5+ tag=9100
    committed_batch_id: int64 0+

OffsetForLeaderEpoch 23: versions 2-4, flexible from 4
replica_id: int32 3+ = -2
topics: [Topic] 0+
    topic: string 0+
    partitions: [Partition] 0+
        partition: int32 0+
        current_leader_epoch: int32 2+ = -1
        leader_epoch: int32 0+
response
throttle_time_ms: int32 2+
topics: [TopicResult] 0+
    topic: string 0+
    partitions: [EpochEndOffset] 0+
        error_code: int16 0+
        partition: int32 0+
        leader_epoch: int32 1+ = -1
        end_offset: int64 0+ = -1
""")
