"""Transactions: adding partitions and offsets, commit and abort, markers, and administrators'
requests.

KIP-98, 360, 447, 588, 664, 890 and 1228 changed these messages. AddPartitionsToTxn 4+,
which brokers send to each other, may contain several transactions.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
AddPartitionsToTxn 24: versions 0-5, flexible from 3
transactions: [Transaction] 4+
    transactional_id: string 4+
    producer_id: int64 4+
    producer_epoch: int16 4+
    verify_only: bool 4+
    topics: [Topic] 4+
        name: string 0+
        partitions: [int32] 0+
v3_and_below_transactional_id: string 0-3
v3_and_below_producer_id: int64 0-3
v3_and_below_producer_epoch: int16 0-3
v3_and_below_topics: [Topic] 0-3
response
throttle_time_ms: int32 0+
error_code: int16 4+
results_by_transaction: [Result] 4+
    transactional_id: string 4+
    topic_results: [TopicResult] 4+
        name: string 0+
        results_by_partition: [PartitionResult] 0+
            partition_index: int32 0+
            partition_error_code: int16 0+
results_by_topic_v3_and_below: [TopicResult] 0-3

AddOffsetsToTxn 25: versions 0-4, flexible from 3
transactional_id: string 0+
producer_id: int64 0+
producer_epoch: int16 0+
group_id: string 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+

EndTxn 26: versions 0-5, flexible from 3
transactional_id: string 0+
producer_id: int64 0+
producer_epoch: int16 0+
committed: bool 0+
joint: Joint 5+ null=5+ tag=9100
    batch_id: int64 0+
    run_id: string 0+
    winners: [Winner] 0+
        producer_id: int64 0+
        producer_epoch: int16 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
producer_id: int64 5+ = -1
producer_epoch: int16 5+ = -1
joint: JointResult 5+ null=5+ tag=9100
    committed_batch_id: int64 0+

WriteTxnMarkers 27: versions 1-2, flexible from 1
markers: [Marker] 0+
    producer_id: int64 0+
    producer_epoch: int16 0+
    transaction_result: bool 0+
    topics: [Topic] 0+
        name: string 0+
        partition_indexes: [int32] 0+
    coordinator_epoch: int32 0+
    transaction_version: int8 2+
    leader_epoch: int32 1+ tag=9100 = -1
response
markers: [MarkerResult] 0+
    producer_id: int64 0+
    topics: [TopicResult] 0+
        name: string 0+
        partitions: [PartitionResult] 0+
            partition_index: int32 0+
            error_code: int16 0+

TxnOffsetCommit 28: versions 0-5, flexible from 3
transactional_id: string 0+
group_id: string 0+
producer_id: int64 0+
producer_epoch: int16 0+
generation_id: int32 3+ = -1
member_id: string 3+
group_instance_id: string 3+ null=3+
topics: [Topic] 0+
    name: string 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        committed_offset: int64 0+
        committed_leader_epoch: int32 2+ = -1
        committed_metadata: string 0+ null=0+
response
throttle_time_ms: int32 0+
topics: [TopicResponse] 0+
    name: string 0+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+

DescribeProducers 61: versions 0, flexible from 0
topics: [Topic] 0+
    name: string 0+
    partition_indexes: [int32] 0+
response
throttle_time_ms: int32 0+
topics: [TopicResponse] 0+
    name: string 0+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        active_producers: [ProducerState] 0+
            producer_id: int64 0+
            producer_epoch: int32 0+
            last_sequence: int32 0+ = -1
            last_timestamp: int64 0+ = -1
            coordinator_epoch: int32 0+
            current_txn_start_offset: int64 0+ = -1

DescribeTransactions 65: versions 0, flexible from 0
transactional_ids: [string] 0+
response
throttle_time_ms: int32 0+
transaction_states: [TransactionState] 0+
    error_code: int16 0+
    transactional_id: string 0+
    transaction_state: string 0+
    transaction_timeout_ms: int32 0+
    transaction_start_time_ms: int64 0+
    producer_id: int64 0+
    producer_epoch: int16 0+
    topics: [Topic] 0+
        topic: string 0+
        partitions: [int32] 0+

ListTransactions 66: versions 0-2, flexible from 0
state_filters: [string] 0+
producer_id_filters: [int64] 0+
duration_filter: int64 1+ = -1
transactional_id_pattern: string 2+ null=2+
response
throttle_time_ms: int32 0+
error_code: int16 0+
unknown_state_filters: [string] 0+
transaction_states: [TransactionState] 0+
    transactional_id: string 0+
    producer_id: int64 0+
    transaction_state: string 0+
""")
