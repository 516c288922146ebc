"""Administrative requests other than those for topics: quotas, features, the quorum, elections,
reassignments, replicas' directories.

KIP-113, 183, 455, 460, 546, 554, 584, 595, 631, 836, 853, 860, 1022 and 1142 changed these
messages.
"""

from mqd.protocol.schema.language import apis

APIS = apis("""
AlterReplicaLogDirs 34: versions 1-2, flexible from 2
dirs: [AlterReplicaLogDir] 0+
    path: string 0+
    topics: [AlterReplicaLogDirTopic] 0+
        name: string 0+
        partitions: [int32] 0+
response
throttle_time_ms: int32 0+
results: [AlterReplicaLogDirTopicResult] 0+
    topic_name: string 0+
    partitions: [AlterReplicaLogDirPartitionResult] 0+
        partition_index: int32 0+
        error_code: int16 0+

ElectLeaders 43: versions 0-2, flexible from 2
election_type: int8 1+
topic_partitions: [TopicPartitions] 0+ null=0+
    topic: string 0+
    partitions: [int32] 0+
timeout_ms: int32 0+ = 60000
response
throttle_time_ms: int32 0+
error_code: int16 1+
replica_election_results: [ReplicaElectionResult] 0+
    topic: string 0+
    partition_result: [PartitionResult] 0+
        partition_id: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+

AlterPartitionReassignments 45: versions 0-1, flexible from 0
timeout_ms: int32 0+ = 60000
allow_replication_factor_change: bool 1+ = true
topics: [ReassignableTopic] 0+
    name: string 0+
    partitions: [ReassignablePartition] 0+
        partition_index: int32 0+
        replicas: [int32] 0+ null=0+
balance: int8 0+ tag=9100
response
throttle_time_ms: int32 0+
allow_replication_factor_change: bool 1+ = true
error_code: int16 0+
error_message: string 0+ null=0+
responses: [ReassignableTopicResponse] 0+
    name: string 0+
    partitions: [ReassignablePartitionResponse] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 0+ null=0+
        target: [int32] 0+ tag=9100

ListPartitionReassignments 46: versions 0, flexible from 0
timeout_ms: int32 0+ = 60000
topics: [ListPartitionReassignmentsTopics] 0+ null=0+
    name: string 0+
    partition_indexes: [int32] 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
topics: [OngoingTopicReassignment] 0+
    name: string 0+
    partitions: [OngoingPartitionReassignment] 0+
        partition_index: int32 0+
        replicas: [int32] 0+
        adding_replicas: [int32] 0+
        removing_replicas: [int32] 0+

DescribeClientQuotas 48: versions 0-1, flexible from 1
components: [ComponentData] 0+
    entity_type: string 0+
    match_type: int8 0+
    match: string 0+ null=0+
strict: bool 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
entries: [EntryData] 0+ null=0+
    entity: [EntityData] 0+
        entity_type: string 0+
        entity_name: string 0+ null=0+
    values: [ValueData] 0+
        key: string 0+
        value: float64 0+

AlterClientQuotas 49: versions 0-1, flexible from 1
entries: [EntryData] 0+
    entity: [EntityData] 0+
        entity_type: string 0+
        entity_name: string 0+ null=0+
    ops: [OpData] 0+
        key: string 0+
        value: float64 0+
        remove: bool 0+
validate_only: bool 0+
response
throttle_time_ms: int32 0+
entries: [EntryData] 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    entity: [EntityData] 0+
        entity_type: string 0+
        entity_name: string 0+ null=0+

DescribeUserScramCredentials 50: versions 0, flexible from 0
users: [UserName] 0+ null=0+
    name: string 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
results: [DescribeUserScramCredentialsResult] 0+
    user: string 0+
    error_code: int16 0+
    error_message: string 0+ null=0+
    credential_infos: [CredentialInfo] 0+
        mechanism: int8 0+
        iterations: int32 0+

AlterUserScramCredentials 51: versions 0, flexible from 0
deletions: [ScramCredentialDeletion] 0+
    name: string 0+
    mechanism: int8 0+
upsertions: [ScramCredentialUpsertion] 0+
    name: string 0+
    mechanism: int8 0+
    iterations: int32 0+
    salt: bytes 0+
    salted_password: bytes 0+
response
throttle_time_ms: int32 0+
results: [AlterUserScramCredentialsResult] 0+
    user: string 0+
    error_code: int16 0+
    error_message: string 0+ null=0+

DescribeQuorum 55: versions 0-2, flexible from 0
topics: [TopicData] 0+
    topic_name: string 0+
    partitions: [PartitionData] 0+
        partition_index: int32 0+
response
error_code: int16 0+
error_message: string 2+ null=2+
topics: [TopicData] 0+
    topic_name: string 0+
    partitions: [PartitionData] 0+
        partition_index: int32 0+
        error_code: int16 0+
        error_message: string 2+ null=2+
        leader_id: int32 0+
        leader_epoch: int32 0+
        high_watermark: int64 0+
        current_voters: [ReplicaState] 0+
            replica_id: int32 0+
            replica_directory_id: uuid 2+
            log_end_offset: int64 0+
            last_fetch_timestamp: int64 1+ = -1
            last_caught_up_timestamp: int64 1+ = -1
        observers: [ReplicaState] 0+
        fetch_timeout_ms: int32 0+ tag=9100
nodes: [Node] 2+
    node_id: int32 2+
    listeners: [Listener] 2+
        name: string 2+
        host: string 2+
        port: uint16 2+

UpdateFeatures 57: versions 0-2, flexible from 0
timeout_ms: int32 0+ = 60000
feature_updates: [FeatureUpdateKey] 0+
    feature: string 0+
    max_version_level: int16 0+
    allow_downgrade: bool 0
    upgrade_type: int8 1+ = 1
validate_only: bool 1+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
results: [UpdatableFeatureResult] 0-1
    feature: string 0+
    error_code: int16 0+
    error_message: string 0+ null=0+

UnregisterBroker 64: versions 0, flexible from 0
broker_id: int32 0+
drain: int8 0+ tag=9100
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+

ListConfigResources 74: versions 0-1, flexible from 0
resource_types: [int8] 1+
response
throttle_time_ms: int32 0+
error_code: int16 0+
config_resources: [ConfigResource] 0+
    resource_name: string 0+
    resource_type: int8 1+ = 16

AddRaftVoter 80: versions 0-1, flexible from 0
cluster_id: string 0+ null=0+
timeout_ms: int32 0+
voter_id: int32 0+
voter_directory_id: uuid 0+
listeners: [Listener] 0+
    name: string 0+
    host: string 0+
    port: uint16 0+
ack_when_committed: bool 1+ = true
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+

RemoveRaftVoter 81: versions 0, flexible from 0
cluster_id: string 0+ null=0+
voter_id: int32 0+
voter_directory_id: uuid 0+
response
throttle_time_ms: int32 0+
error_code: int16 0+
error_message: string 0+ null=0+
""")
