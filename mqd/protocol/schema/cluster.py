"""ApiVersions, Metadata, FindCoordinator, DescribeCluster, DescribeTopicPartitions: a client's
first requests.

KIP-4, 35, 511, 516, 584, 700, 966, 1073 and 1102 changed these messages. In version 0
of MetadataRequest an empty `topics` requests all topics; in later versions null does.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
Metadata 3: versions 0-13, flexible from 9
topics: [Topic] 0+ null=1+
    topic_id: uuid 10+
    name: string 0+ null=10+
allow_auto_topic_creation: bool 4+ = true
include_cluster_authorized_operations: bool 8-10
include_topic_authorized_operations: bool 8+
response
throttle_time_ms: int32 3+
brokers: [Broker] 0+
    node_id: int32 0+
    host: string 0+
    port: int32 0+
    rack: string 1+ null=1+
cluster_id: string 2+ null=2+
controller_id: int32 1+ = -1
topics: [Topic] 0+
    error_code: int16 0+
    name: string 0+ null=12+
    topic_id: uuid 10+
    is_internal: bool 1+
    partitions: [Partition] 0+
        error_code: int16 0+
        partition_index: int32 0+
        leader_id: int32 0+
        leader_epoch: int32 7+ = -1
        replica_nodes: [int32] 0+
        isr_nodes: [int32] 0+
        offline_replicas: [int32] 5+
    topic_authorized_operations: int32 8+ = -0x80000000
cluster_authorized_operations: int32 8-10 = -0x80000000
error_code: int16 13+

FindCoordinator 10: versions 0-6, flexible from 3
key: string 0-3
key_type: int8 1+
coordinator_keys: [string] 4+
response
throttle_time_ms: int32 1+
error_code: int16 0-3
error_message: string 1-3 null=1-3
node_id: int32 0-3
host: string 0-3
port: int32 0-3
coordinators: [Coordinator] 4+
    key: string 4+
    node_id: int32 4+
    host: string 4+
    port: int32 4+
    error_code: int16 4+
    error_message: string 4+ null=4+

ApiVersions 18: versions 0-4, flexible from 3
client_software_name: string 3+
client_software_version: string 3+
response
error_code: int16 0+
api_keys: [ApiVersion] 0+
    api_key: int16 0+
    min_version: int16 0+
    max_version: int16 0+
throttle_time_ms: int32 1+
supported_features: [SupportedFeature] 3+ tag=0
    name: string 3+
    min_version: int16 3+
    max_version: int16 3+
finalized_features_epoch: int64 3+ tag=1 = -1
finalized_features: [FinalizedFeature] 3+ tag=2
    name: string 3+
    max_version_level: int16 3+
    min_version_level: int16 3+
zk_migration_ready: bool 3+ tag=3

DescribeCluster 60: versions 0-2, flexible from 0
include_cluster_authorized_operations: bool 0+
endpoint_type: int8 1+ = 1
include_fenced_brokers: bool 2+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
endpoint_type: int8 1+ = 1
cluster_id: string 0+
controller_id: int32 0+ = -1
brokers: [Broker] 0+
    broker_id: int32 0+
    host: string 0+
    port: int32 0+
    rack: string 0+ null=0+
    is_fenced: bool 2+
cluster_authorized_operations: int32 0+ = -0x80000000

DescribeTopicPartitions 75: versions 0, flexible from 0
topics: [Topic] 0+
    name: string 0+
response_partition_limit: int32 0+ = 2000
cursor: Cursor 0+ null=0+
    topic_name: string 0+
    partition_index: int32 0+
response
throttle_time_ms: int32 0+
topics: [Topic] 0+
    error_code: int16 0+
    name: string 0+ null=0+
    topic_id: uuid 0+
    is_internal: bool 0+
    partitions: [Partition] 0+
        error_code: int16 0+
        partition_index: int32 0+
        leader_id: int32 0+
        leader_epoch: int32 0+ = -1
        replica_nodes: [int32] 0+
        isr_nodes: [int32] 0+
        eligible_leader_replicas: [int32] 0+ null=0+ = []
        last_known_elr: [int32] 0+ null=0+ = []
        offline_replicas: [int32] 0+
    topic_authorized_operations: int32 0+ = -0x80000000
next_cursor: Cursor 0+ null=0+
    topic_name: string 0+
    partition_index: int32 0+
""")
