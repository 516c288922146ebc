"""Consumer groups of the consumer protocol: KIP-848, KIP-1043, KIP-1099."""

from mqd.protocol.schema.language import apis

APIS = apis("""
ConsumerGroupHeartbeat 68: versions 0-1, flexible from 0
group_id: string 0+
member_id: string 0+
member_epoch: int32 0+
instance_id: string 0+ null=0+
rack_id: string 0+ null=0+
rebalance_timeout_ms: int32 0+ = -1
subscribed_topic_names: [string] 0+ null=0+
subscribed_topic_regex: string 1+ null=1+
server_assignor: string 0+ null=0+
topic_partitions: [TopicPartitions] 0+ null=0+
    topic_id: uuid 0+
    partitions: [int32] 0+
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

ConsumerGroupDescribe 69: versions 0-1, flexible from 0
group_ids: [string] 0+
include_authorized_operations: bool 0+
include_rebalance: bool 0+ tag=9100
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
        instance_id: string 0+ null=0+
        rack_id: string 0+ null=0+
        member_epoch: int32 0+
        client_id: string 0+
        client_host: string 0+
        subscribed_topic_names: [string] 0+
        subscribed_topic_regex: string 0+ null=0+
        assignment: Assignment 0+
            topic_partitions: [TopicPartitions] 0+
                topic_id: uuid 0+
                topic_name: string 0+
                partitions: [int32] 0+
        target_assignment: Assignment 0+
        member_type: int8 1+ = -1
    authorized_operations: int32 0+ = -0x80000000
    rebalance: Rebalance 0+ null=0+ tag=9100
        elapsed_ms: int64 0+ = -1
        reason: string 0+
        held_up_by: [Holder] 0+
            member_id: string 0+
            group_instance_id: string 0+ null=0+
            client_id: string 0+
            client_host: string 0+
            waited_for: string 0+
            waited_ms: int64 0+ = -1
            silent_ms: int64 0+ = -1
""")
