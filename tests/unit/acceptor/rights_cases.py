"""A request of each API, the rights that it needs, and Kafka's error code where one is missing, as
in KafkaApis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.security.acl import CLUSTER_NAME, Operation, ResourceType

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTION = ResourceType.TRANSACTIONAL_ID
NAME, OTHER = "hidden-topic", "hidden-other"
Right = tuple[Operation, ResourceType, str]


class Case(NamedTuple):
    make: Callable[[int, bytes], Any]  # version, id of the topic -> request
    rights: tuple[Right, ...]
    denied: E
    versions: range | None = None  # None: all
    code_of: dict[ResourceType, E] = {}  # where a missing right on this type has another code


def topic(operation: Operation) -> Right:
    return (operation, TOPIC, NAME)


def cluster(operation: Operation) -> Right:
    return (operation, CLUSTER, CLUSTER_NAME)


def group(operation: Operation) -> Right:
    return (operation, GROUP, "g")


def transaction(operation: Operation) -> Right:
    return (operation, TRANSACTION, "x")


def of_cluster(operation: Operation, make: Callable[[int, bytes], Any]) -> list[Case]:
    return [Case(make, (cluster(operation),), E.CLUSTER_AUTHORIZATION_FAILED)]


def of_topic(operation: Operation, make: Callable[[int, bytes], Any], **more: Any) -> list[Case]:
    return [Case(make, (topic(operation),), E.TOPIC_AUTHORIZATION_FAILED, **more)]


def of_group(operation: Operation, make: Callable[[int, bytes], Any]) -> list[Case]:
    return [Case(make, (group(operation),), E.GROUP_AUTHORIZATION_FAILED)]


def offset_commit(version: int, topic_id: bytes) -> Any:
    part = m.OffsetCommitRequest.Partition(partition_index=0, committed_offset=1)
    named = {"topic_id": topic_id} if version >= 10 else {"name": NAME}
    return m.OffsetCommitRequest(group_id="g", topics=[m.OffsetCommitRequest.Topic(partitions=[part], **named)])


def offset_fetch(version: int, topic_id: bytes) -> Any:
    if version < 8:
        return m.OffsetFetchRequest(group_id="g", topics=[m.OffsetFetchRequest.Topic(name=NAME, partition_indexes=[0])])
    named = {"topic_id": topic_id} if version >= 10 else {"name": NAME}
    one = m.OffsetFetchRequest.GroupTopic(partition_indexes=[0], **named)
    return m.OffsetFetchRequest(groups=[m.OffsetFetchRequest.Group(group_id="g", topics=[one])])


def streams_heartbeat() -> Any:
    cls = m.StreamsGroupHeartbeatRequest
    topology = cls.Topology(subtopologies=[cls.Subtopology(subtopology_id="0", source_topics=[NAME])])
    return cls(
        group_id="streams",
        member_id="member",
        rebalance_timeout_ms=1000,
        topology=topology,
        active_tasks=[],
        standby_tasks=[],
        warmup_tasks=[],
        process_id="process",
    )


def find(key: str, kind: int) -> Callable[[int, bytes], Any]:
    def make(version: int, _: bytes) -> Any:
        if version >= 4:
            return m.FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
        return m.FindCoordinatorRequest(key_type=kind, key=key)

    return make


def config(kind: int, name: str) -> list[Callable[[int, bytes], Any]]:
    def alter(cls: Any, entry: str) -> Callable[[int, bytes], Any]:
        names = {
            "AlterConfigsRequest": ("Resource", "Config"),
            "IncrementalAlterConfigsRequest": ("Resource", "Config"),
        }
        resource = getattr(cls, names[cls.__name__][0])
        return lambda version, _: cls(
            resources=[resource(resource_type=kind, resource_name=name, configs=[])], validate_only=True
        )

    return [
        lambda version, _: m.DescribeConfigsRequest(
            resources=[m.DescribeConfigsRequest.Resource(resource_type=kind, resource_name=name)]
        ),
        alter(m.AlterConfigsRequest, ""),
        alter(m.IncrementalAlterConfigsRequest, ""),
    ]


def configs(index: int, operation: Operation) -> list[Case]:
    return [
        Case(config(2, NAME)[index], (topic(operation),), E.TOPIC_AUTHORIZATION_FAILED),
        Case(config(4, "1")[index], (cluster(operation),), E.CLUSTER_AUTHORIZATION_FAILED),
        Case(config(32, "g")[index], (group(operation),), E.GROUP_AUTHORIZATION_FAILED),
    ]


def add_partitions(version: int, _: bytes) -> Any:
    topics = [m.AddPartitionsToTxnRequest.Topic(name=NAME, partitions=[0])]
    if version < 4:
        return m.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=1,
            v3_and_below_producer_epoch=0,
            v3_and_below_topics=topics,
        )
    one = m.AddPartitionsToTxnRequest.Transaction(
        transactional_id="x", producer_id=1, producer_epoch=0, verify_only=True, topics=topics
    )
    return m.AddPartitionsToTxnRequest(transactions=[one])


def txn_commit(version: int, _: bytes) -> Any:
    part = m.TxnOffsetCommitRequest.Partition(partition_index=0, committed_offset=1)
    return m.TxnOffsetCommitRequest(
        transactional_id="x",
        group_id="g",
        producer_id=1,
        producer_epoch=0,
        topics=[m.TxnOffsetCommitRequest.Topic(name=NAME, partitions=[part])],
    )


def markers(version: int, _: bytes) -> Any:
    one = m.WriteTxnMarkersRequest.Marker(
        producer_id=1, producer_epoch=0, topics=[m.WriteTxnMarkersRequest.Topic(name=NAME, partition_indexes=[0])]
    )
    return m.WriteTxnMarkersRequest(markers=[one])


def delete_topics(version: int, _: bytes) -> Any:
    if version >= 6:
        return m.DeleteTopicsRequest(topics=[m.DeleteTopicsRequest.TopicState(name=NAME)], timeout_ms=1000)
    return m.DeleteTopicsRequest(topic_names=[NAME], timeout_ms=1000)


CASES: dict[int, list[Case]] = {
    2: of_topic(
        Operation.DESCRIBE,
        lambda v, _: m.ListOffsetsRequest(
            topics=[
                m.ListOffsetsRequest.Topic(
                    name=NAME, partitions=[m.ListOffsetsRequest.Partition(partition_index=0, timestamp=-1)]
                )
            ]
        ),
    ),
    3: of_topic(
        Operation.DESCRIBE,
        lambda v, _: m.MetadataRequest(topics=[m.MetadataRequest.Topic(name=NAME)], allow_auto_topic_creation=False),
    ),
    8: [
        Case(
            offset_commit,
            (group(Operation.READ), topic(Operation.READ)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    9: [
        Case(
            offset_fetch,
            (group(Operation.DESCRIBE), topic(Operation.DESCRIBE)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    10: [
        Case(find("g", 0), (group(Operation.DESCRIBE),), E.GROUP_AUTHORIZATION_FAILED),
        Case(
            find("x", 1),
            (transaction(Operation.DESCRIBE),),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            versions=range(1, 7),
        ),
        Case(
            find(f"g:{'A' * 22}:0", 2),
            (cluster(Operation.CLUSTER_ACTION),),
            E.CLUSTER_AUTHORIZATION_FAILED,
            versions=range(6, 7),
        ),
    ],
    11: of_group(
        Operation.READ,
        lambda v, _: m.JoinGroupRequest(group_id="g", member_id="gone", session_timeout_ms=10_000, protocol_type="c"),
    ),
    12: of_group(Operation.READ, lambda v, _: m.HeartbeatRequest(group_id="g", member_id="gone")),
    13: of_group(Operation.READ, lambda v, _: m.LeaveGroupRequest(group_id="g", member_id="gone")),
    14: of_group(
        Operation.READ,
        lambda v, _: m.SyncGroupRequest(
            group_id="g", member_id="gone", protocol_type="consumer", protocol_name="range"
        ),
    ),
    15: of_group(Operation.DESCRIBE, lambda v, _: m.DescribeGroupsRequest(groups=["g"])),
    19: of_topic(
        Operation.CREATE,
        lambda v, _: m.CreateTopicsRequest(
            topics=[m.CreateTopicsRequest.Topic(name=NAME, num_partitions=1, replication_factor=1)], validate_only=True
        ),
    ),
    20: of_topic(Operation.DELETE, delete_topics),
    21: of_topic(
        Operation.DELETE,
        lambda v, _: m.DeleteRecordsRequest(
            topics=[
                m.DeleteRecordsRequest.Topic(
                    name=NAME, partitions=[m.DeleteRecordsRequest.Partition(partition_index=9, offset=0)]
                )
            ],
            timeout_ms=1000,
        ),
    ),
    22: [
        Case(
            lambda v, _: m.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000),
            (cluster(Operation.IDEMPOTENT_WRITE),),
            E.CLUSTER_AUTHORIZATION_FAILED,
        ),
        Case(
            lambda v, _: m.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000),
            (topic(Operation.WRITE),),
            E.CLUSTER_AUTHORIZATION_FAILED,
        ),
        Case(
            lambda v, _: m.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=1000),
            (transaction(Operation.WRITE),),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
    ],
    23: of_topic(
        Operation.DESCRIBE,
        lambda v, _: m.OffsetForLeaderEpochRequest(
            topics=[
                m.OffsetForLeaderEpochRequest.Topic(
                    topic=NAME, partitions=[m.OffsetForLeaderEpochRequest.Partition(partition=9, leader_epoch=0)]
                )
            ]
        ),
    ),
    24: [
        Case(
            add_partitions,
            (transaction(Operation.WRITE), topic(Operation.WRITE)),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            versions=range(4),
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        ),
        Case(
            add_partitions, (cluster(Operation.CLUSTER_ACTION),), E.CLUSTER_AUTHORIZATION_FAILED, versions=range(4, 6)
        ),
    ],
    25: [
        Case(
            lambda v, _: m.AddOffsetsToTxnRequest(transactional_id="x", producer_id=1, producer_epoch=0, group_id="g"),
            (transaction(Operation.WRITE), group(Operation.READ)),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            code_of={GROUP: E.GROUP_AUTHORIZATION_FAILED},
        )
    ],
    26: [
        Case(
            lambda v, _: m.EndTxnRequest(transactional_id="x", producer_id=1, producer_epoch=0, committed=True),
            (transaction(Operation.WRITE),),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        )
    ],
    27: [
        Case(markers, (cluster(Operation.CLUSTER_ACTION),), E.CLUSTER_AUTHORIZATION_FAILED),
        Case(markers, (cluster(Operation.ALTER),), E.CLUSTER_AUTHORIZATION_FAILED),
    ],
    28: [
        Case(
            txn_commit,
            (transaction(Operation.WRITE), group(Operation.READ), topic(Operation.READ)),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            code_of={GROUP: E.GROUP_AUTHORIZATION_FAILED, TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    29: of_cluster(
        Operation.DESCRIBE,
        lambda v, _: m.DescribeAclsRequest(
            resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
        ),
    ),
    30: of_cluster(
        Operation.ALTER,
        lambda v, _: m.CreateAclsRequest(
            creations=[
                m.CreateAclsRequest.AclCreation(
                    resource_type=2, resource_name="q", principal="User:z", host="*", operation=3, permission_type=3
                )
            ]
        ),
    ),
    31: of_cluster(
        Operation.ALTER,
        lambda v, _: m.DeleteAclsRequest(
            filters=[
                m.DeleteAclsRequest.Filter(
                    resource_type_filter=7, pattern_type_filter=1, operation=1, permission_type=1
                )
            ]
        ),
    ),
    32: configs(0, Operation.DESCRIBE_CONFIGS),
    33: configs(1, Operation.ALTER_CONFIGS),
    34: of_cluster(
        Operation.ALTER,
        lambda v, _: m.AlterReplicaLogDirsRequest(
            dirs=[
                m.AlterReplicaLogDirsRequest.AlterReplicaLogDir(
                    path="/x", topics=[m.AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name=NAME, partitions=[0])]
                )
            ]
        ),
    ),
    35: [
        Case(
            lambda v, _: m.DescribeLogDirsRequest(topics=None),
            (cluster(Operation.DESCRIBE),),
            E.CLUSTER_AUTHORIZATION_FAILED,
            versions=range(3, 5),  # earlier versions have no field for the error
        )
    ],
    37: of_topic(
        Operation.ALTER,
        lambda v, _: m.CreatePartitionsRequest(
            topics=[m.CreatePartitionsRequest.Topic(name=NAME, count=9)], validate_only=True, timeout_ms=1000
        ),
    ),
    42: of_group(Operation.DELETE, lambda v, _: m.DeleteGroupsRequest(groups_names=["g"])),
    43: of_cluster(
        Operation.ALTER,
        lambda v, _: m.ElectLeadersRequest(
            topic_partitions=[m.ElectLeadersRequest.TopicPartitions(topic=NAME, partitions=[0])], timeout_ms=1000
        ),
    ),
    44: configs(2, Operation.ALTER_CONFIGS),
    45: of_cluster(
        Operation.ALTER,
        lambda v, _: m.AlterPartitionReassignmentsRequest(
            topics=[
                m.AlterPartitionReassignmentsRequest.ReassignableTopic(
                    name=NAME,
                    partitions=[
                        m.AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=None)
                    ],
                )
            ]
        ),
    ),
    46: of_cluster(Operation.DESCRIBE, lambda v, _: m.ListPartitionReassignmentsRequest(topics=None)),
    47: [
        Case(
            lambda v, _: m.OffsetDeleteRequest(
                group_id="g",
                topics=[
                    m.OffsetDeleteRequest.Topic(
                        name=NAME, partitions=[m.OffsetDeleteRequest.Partition(partition_index=0)]
                    )
                ],
            ),
            (group(Operation.DELETE), topic(Operation.READ)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    38: [
        Case(
            lambda v, _: m.CreateDelegationTokenRequest(owner_principal_type="User", owner_principal_name="carol"),
            ((Operation.CREATE_TOKENS, ResourceType.USER, "User:carol"),),
            E.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
            range(3, 4),
        )
    ],
    48: of_cluster(Operation.DESCRIBE_CONFIGS, lambda v, _: m.DescribeClientQuotasRequest()),
    49: of_cluster(
        Operation.ALTER_CONFIGS,
        lambda v, _: m.AlterClientQuotasRequest(
            entries=[
                m.AlterClientQuotasRequest.EntryData(
                    entity=[m.AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name="c")],
                    ops=[m.AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=1.0)],
                )
            ],
            validate_only=True,
        ),
    ),
    50: of_cluster(
        Operation.DESCRIBE,
        lambda v, _: m.DescribeUserScramCredentialsRequest(
            users=[m.DescribeUserScramCredentialsRequest.UserName(name="nobody")]
        ),
    ),
    51: of_cluster(
        Operation.ALTER,
        lambda v, _: m.AlterUserScramCredentialsRequest(
            deletions=[m.AlterUserScramCredentialsRequest.ScramCredentialDeletion(name="nobody", mechanism=1)]
        ),
    ),
    55: of_cluster(
        Operation.DESCRIBE,
        lambda v, _: m.DescribeQuorumRequest(
            topics=[
                m.DescribeQuorumRequest.TopicData(
                    topic_name="__cluster_metadata",
                    partitions=[m.DescribeQuorumRequest.PartitionData(partition_index=0)],
                )
            ]
        ),
    ),
    57: of_cluster(
        Operation.ALTER,
        lambda v, _: m.UpdateFeaturesRequest(
            feature_updates=[m.UpdateFeaturesRequest.FeatureUpdateKey(feature="none", max_version_level=1)],
            timeout_ms=1000,
        ),
    ),
    61: of_topic(
        Operation.READ,
        lambda v, _: m.DescribeProducersRequest(
            topics=[m.DescribeProducersRequest.Topic(name=NAME, partition_indexes=[0])]
        ),
    ),
    64: of_cluster(Operation.ALTER, lambda v, _: m.UnregisterBrokerRequest(broker_id=99)),
    65: [
        Case(
            lambda v, _: m.DescribeTransactionsRequest(transactional_ids=["x"]),
            (transaction(Operation.DESCRIBE),),
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        )
    ],
    68: [
        Case(
            lambda v, _: m.ConsumerGroupHeartbeatRequest(
                group_id="k",
                member_id="member",
                member_epoch=0,
                rebalance_timeout_ms=1000,
                subscribed_topic_names=[NAME],
                topic_partitions=[],
            ),
            ((Operation.READ, GROUP, "k"), topic(Operation.DESCRIBE)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    69: of_group(Operation.DESCRIBE, lambda v, _: m.ConsumerGroupDescribeRequest(group_ids=["g"])),
    74: of_cluster(Operation.DESCRIBE_CONFIGS, lambda v, _: m.ListConfigResourcesRequest()),
    75: of_topic(
        Operation.DESCRIBE,
        lambda v, _: m.DescribeTopicPartitionsRequest(topics=[m.DescribeTopicPartitionsRequest.Topic(name=NAME)]),
    ),
    76: [
        Case(
            lambda v, _: m.ShareGroupHeartbeatRequest(
                group_id="s", member_id="member", member_epoch=0, subscribed_topic_names=[NAME]
            ),
            ((Operation.READ, GROUP, "s"), topic(Operation.DESCRIBE)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    77: of_group(Operation.DESCRIBE, lambda v, _: m.ShareGroupDescribeRequest(group_ids=["g"])),
    80: of_cluster(
        Operation.ALTER, lambda v, _: m.AddRaftVoterRequest(cluster_id="other", voter_id=9, timeout_ms=1000)
    ),
    81: of_cluster(Operation.ALTER, lambda v, _: m.RemoveRaftVoterRequest(cluster_id="other", voter_id=9)),
    88: [
        Case(
            lambda v, _: streams_heartbeat(),
            ((Operation.READ, GROUP, "streams"), topic(Operation.DESCRIBE)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    89: of_group(Operation.DESCRIBE, lambda v, _: m.StreamsGroupDescribeRequest(group_ids=["g"])),
    90: [
        Case(
            lambda v, _: m.DescribeShareGroupOffsetsRequest(
                groups=[
                    m.DescribeShareGroupOffsetsRequest.Group(
                        group_id="g", topics=[m.DescribeShareGroupOffsetsRequest.Topic(topic_name=NAME, partitions=[0])]
                    )
                ]
            ),
            (group(Operation.DESCRIBE), topic(Operation.DESCRIBE)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    91: [
        Case(
            lambda v, _: m.AlterShareGroupOffsetsRequest(
                group_id="g",
                topics=[
                    m.AlterShareGroupOffsetsRequest.Topic(
                        topic_name=NAME,
                        partitions=[m.AlterShareGroupOffsetsRequest.Partition(partition_index=0, start_offset=0)],
                    )
                ],
            ),
            (group(Operation.READ), topic(Operation.READ)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.TOPIC_AUTHORIZATION_FAILED},
        )
    ],
    92: [
        Case(
            lambda v, _: m.DeleteShareGroupOffsetsRequest(
                group_id="g", topics=[m.DeleteShareGroupOffsetsRequest.Topic(topic_name=NAME)]
            ),
            (group(Operation.DELETE), topic(Operation.READ)),
            E.GROUP_AUTHORIZATION_FAILED,
            code_of={TOPIC: E.GROUP_ID_NOT_FOUND},  # the group is looked up first, and does not exist
        )
    ],
}
