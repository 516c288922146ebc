"""Creating, changing and deleting topics and records; configuration; log directories.

KIP-4, 107, 133, 195, 226, 339, 464, 516, 525, 569, 599, 827 changed these messages.
CreateTopicsResponse.configs defaults to [] and not to null: Java's admin client does not
check it for null.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
CreateTopics 19: versions 2-7, flexible from 5
topics: [Topic] 0+
    name: string 0+
    num_partitions: int32 0+
    replication_factor: int16 0+
    assignments: [Assignment] 0+
        partition_index: int32 0+
        broker_ids: [int32] 0+
    configs: [Config] 0+
        name: string 0+
        value: string 0+ null=0+
timeout_ms: int32 0+ = 60000
validate_only: bool 1+
response
throttle_time_ms: int32 2+
topics: [TopicResult] 0+
    name: string 0+
    topic_id: uuid 7+
    error_code: int16 0+
    error_message: string 1+ null=0+
    topic_config_error_code: int16 5+ tag=0
    num_partitions: int32 5+ = -1
    replication_factor: int16 5+ = -1
    configs: [Config] 5+ null=5+ = []
        name: string 5+
        value: string 5+ null=5+
        read_only: bool 5+
        config_source: int8 5+ = -1
        is_sensitive: bool 5+

DeleteTopics 20: versions 1-6, flexible from 4
topics: [TopicState] 6+
    name: string 6+ null=6+
    topic_id: uuid 6+
topic_names: [string] 0-5
timeout_ms: int32 0+
response
throttle_time_ms: int32 1+
responses: [TopicResult] 0+
    name: string 0+ null=6+
    topic_id: uuid 6+
    error_code: int16 0+
    error_message: string 5+ null=5+

DeleteRecords 21: versions 0-2, flexible from 2
topics: [Topic] 0+
    name: string 0+
    partitions: [Partition] 0+
        partition_index: int32 0+
        offset: int64 0+
timeout_ms: int32 0+
response
throttle_time_ms: int32 0+
topics: [TopicResult] 0+
    name: string 0+
    partitions: [PartitionResult] 0+
        partition_index: int32 0+
        low_watermark: int64 0+
        error_code: int16 0+

DescribeConfigs 32: versions 1-4, flexible from 4
resources: [Resource] 0+
    resource_type: int8 0+
    resource_name: string 0+
    configuration_keys: [string] 0+ null=0+
include_synonyms: bool 1+
include_documentation: bool 3+
response
throttle_time_ms: int32 0+
results: [Result] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    resource_type: int8 0+
    resource_name: string 0+
    configs: [Config] 0+
        name: string 0+
        value: string 0+ null=0+
        read_only: bool 0+
        config_source: int8 1+ = -1
        is_sensitive: bool 0+
        synonyms: [Synonym] 1+
            name: string 1+
            value: string 1+ null=0+
            source: int8 1+
        config_type: int8 3+
        documentation: string 3+ null=0+

AlterConfigs 33: versions 0-2, flexible from 2
resources: [Resource] 0+
    resource_type: int8 0+
    resource_name: string 0+
    configs: [Config] 0+
        name: string 0+
        value: string 0+ null=0+
validate_only: bool 0+
response
throttle_time_ms: int32 0+
responses: [ResourceResponse] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    resource_type: int8 0+
    resource_name: string 0+

DescribeLogDirs 35: versions 1-4, flexible from 2
topics: [Topic] 0+ null=0+
    topic: string 0+
    partitions: [int32] 0+
response
throttle_time_ms: int32 0+
error_code: int16 3+
results: [Result] 0+
    error_code: int16 0+
    log_dir: string 0+
    topics: [Topic] 0+
        name: string 0+
        partitions: [Partition] 0+
            partition_index: int32 0+
            partition_size: int64 0+
            offset_lag: int64 0+
            is_future_key: bool 0+
    total_bytes: int64 4+ = -1
    usable_bytes: int64 4+ = -1

CreatePartitions 37: versions 0-3, flexible from 2
topics: [Topic] 0+
    name: string 0+
    count: int32 0+
    assignments: [Assignment] 0+ null=0+
        broker_ids: [int32] 0+
    retirement_action: int8 2+ tag=9100
timeout_ms: int32 0+
validate_only: bool 0+
response
throttle_time_ms: int32 0+
results: [TopicResult] 0+
    name: string 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    retirement: Retirement 2+ null=2+ tag=9100
        step: int8 2+
        applied: bool 2+
        remaining: int32 2+
        retired: [Retired] 2+
            partition_index: int32 2+
            redirect_index: int32 2+
            leader_id: int32 2+
            leader_epoch: int32 2+

IncrementalAlterConfigs 44: versions 0-1, flexible from 1
resources: [Resource] 0+
    resource_type: int8 0+
    resource_name: string 0+
    configs: [Config] 0+
        name: string 0+
        config_operation: int8 0+
        value: string 0+ null=0+
validate_only: bool 0+
response
throttle_time_ms: int32 0+
responses: [ResourceResponse] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    resource_type: int8 0+
    resource_name: string 0+
""")
