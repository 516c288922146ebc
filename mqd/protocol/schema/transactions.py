"""Transactions: their partitions, offsets, ends and markers, and what an administrator asks of
them.

KIP-98, 360, 447, 588, 664, 890 and 1228 moved these messages. AddPartitionsToTxn 4+ is a batch that
brokers send to each other.
"""

from mqd.protocol.schema.language import Api

ADD_PARTITIONS_TO_TXN = Api(
    24,
    "AddPartitionsToTxn",
    "0-5",
    3,
    """
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
""",
    """
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
""",
)

ADD_OFFSETS_TO_TXN = Api(
    25,
    "AddOffsetsToTxn",
    "0-4",
    3,
    """
transactional_id: string 0+
producer_id: int64 0+
producer_epoch: int16 0+
group_id: string 0+
""",
    """
throttle_time_ms: int32 0+
error_code: int16 0+
""",
)

END_TXN = Api(
    26,
    "EndTxn",
    "0-5",
    3,
    """
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
""",
    """
throttle_time_ms: int32 0+
error_code: int16 0+
producer_id: int64 5+ = -1
producer_epoch: int16 5+ = -1
joint: JointResult 5+ null=5+ tag=9100
    committed_batch_id: int64 0+
""",
)

WRITE_TXN_MARKERS = Api(
    27,
    "WriteTxnMarkers",
    "1-2",
    1,
    """
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
""",
    """
markers: [MarkerResult] 0+
    producer_id: int64 0+
    topics: [TopicResult] 0+
        name: string 0+
        partitions: [PartitionResult] 0+
            partition_index: int32 0+
            error_code: int16 0+
""",
)

TXN_OFFSET_COMMIT = Api(
    28,
    "TxnOffsetCommit",
    "0-5",
    3,
    """
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
""",
    """
throttle_time_ms: int32 0+
topics: [TopicResponse] 0+
    name: string 0+
    partitions: [PartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+
""",
)

DESCRIBE_PRODUCERS = Api(
    61,
    "DescribeProducers",
    "0",
    0,
    """
topics: [Topic] 0+
    name: string 0+
    partition_indexes: [int32] 0+
""",
    """
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
""",
)

DESCRIBE_TRANSACTIONS = Api(
    65,
    "DescribeTransactions",
    "0",
    0,
    """
transactional_ids: [string] 0+
""",
    """
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
""",
)

LIST_TRANSACTIONS = Api(
    66,
    "ListTransactions",
    "0-2",
    0,
    """
state_filters: [string] 0+
producer_id_filters: [int64] 0+
duration_filter: int64 1+ = -1
transactional_id_pattern: string 2+ null=2+
""",
    """
throttle_time_ms: int32 0+
error_code: int16 0+
unknown_state_filters: [string] 0+
transaction_states: [TransactionState] 0+
    transactional_id: string 0+
    producer_id: int64 0+
    transaction_state: string 0+
""",
)

APIS = (
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    WRITE_TXN_MARKERS,
    TXN_OFFSET_COMMIT,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
)
