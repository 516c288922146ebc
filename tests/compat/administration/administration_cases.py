"""One request of every version of the administration APIs other than topics: (request, its error
codes, whether its content is right), for tests/compat/test_versions.py.
"""

from __future__ import annotations

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AddRaftVoterRequest,
    AlterClientQuotasRequest,
    AlterPartitionReassignmentsRequest,
    AlterReplicaLogDirsRequest,
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    CreateDelegationTokenRequest,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeClientQuotasRequest,
    DescribeDelegationTokenRequest,
    DescribeLogDirsRequest,
    DescribeQuorumRequest,
    DescribeUserScramCredentialsRequest,
    ElectLeadersRequest,
    ExpireDelegationTokenRequest,
    ListConfigResourcesRequest,
    ListPartitionReassignmentsRequest,
    RemoveRaftVoterRequest,
    RenewDelegationTokenRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from tests.interaction.transactional import fresh

DESCRIBE_LOG_DIRS, ALTER_QUOTAS = 35, 49
INVALID_REQUEST, SECURITY_DISABLED, ELECTION_NOT_NEEDED, BROKER_ID_NOT_REGISTERED = 42, 54, 84, 102
TOKEN_REQUEST_NOT_ALLOWED = 64
BROKER, TOPIC, EXACT, UPGRADE = 4, 2, 0, 1
READ, ALLOW = 3, 3  # an operation and a permission of access control lists


def _move(setting, version: int) -> AlterReplicaLogDirsRequest:
    directory = setting.kafka.call(DESCRIBE_LOG_DIRS, 4, DescribeLogDirsRequest(topics=None)).results[0].log_dir
    topics = [AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name=setting.topic, partitions=[0, 1])]
    return AlterReplicaLogDirsRequest(
        dirs=[AlterReplicaLogDirsRequest.AlterReplicaLogDir(path=directory, topics=topics)]
    )


def _elect(setting, version: int) -> ElectLeadersRequest:
    return ElectLeadersRequest(
        topic_partitions=[ElectLeadersRequest.TopicPartitions(topic=setting.topic, partitions=[0, 1])],
        timeout_ms=60_000,
    )


def _reassign(setting, version: int) -> AlterPartitionReassignmentsRequest:
    partitions = [AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=[1])]
    return AlterPartitionReassignmentsRequest(
        topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name=setting.topic, partitions=partitions)],
        timeout_ms=60_000,
    )


def _quota(client_id: str) -> AlterClientQuotasRequest:
    entity = [AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=client_id)]
    ops = [AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=1e9, remove=False)]
    return AlterClientQuotasRequest(entries=[AlterClientQuotasRequest.EntryData(entity=entity, ops=ops)])


def _describe_quotas(setting, version: int) -> DescribeClientQuotasRequest:
    client_id = fresh("versions-client")
    assert setting.kafka.call(ALTER_QUOTAS, 1, _quota(client_id)).entries[0].error_code == 0
    return DescribeClientQuotasRequest(
        components=[
            DescribeClientQuotasRequest.ComponentData(entity_type="client-id", match_type=EXACT, match=client_id)
        ],
        strict=True,
    )


def _quorum(setting, version: int) -> DescribeQuorumRequest:
    return DescribeQuorumRequest(
        topics=[
            DescribeQuorumRequest.TopicData(
                topic_name="__cluster_metadata", partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
            )
        ]
    )


def _quorum_described(setting, version: int, response) -> bool:
    (partition,) = response.topics[0].partitions
    nodes = [listener.port for node in response.nodes for listener in node.listeners]
    return ([voter.replica_id for voter in partition.current_voters], partition.leader_id) == ([1], 1) and (
        version < 2 or len(nodes) > 0
    )


def _create_acls(setting, version: int) -> CreateAclsRequest:
    creation = CreateAclsRequest.AclCreation(
        resource_type=TOPIC,
        resource_name=setting.topic,
        principal="User:alice",
        host="*",
        operation=READ,
        permission_type=ALLOW,
    )
    return CreateAclsRequest(creations=[creation])


def _delete_acls(setting, version: int) -> DeleteAclsRequest:
    return DeleteAclsRequest(
        filters=[DeleteAclsRequest.Filter(resource_type_filter=TOPIC, operation=READ, permission_type=ALLOW)]
    )


def _features(setting, version: int) -> UpdateFeaturesRequest:
    """Sets the current level: changes nothing."""
    update = UpdateFeaturesRequest.FeatureUpdateKey(
        feature="transaction.version", max_version_level=2, allow_downgrade=False, upgrade_type=UPGRADE
    )
    return UpdateFeaturesRequest(feature_updates=[update], timeout_ms=60_000)


def _resources(setting, version: int, response) -> bool:
    names = [(resource.resource_type, resource.resource_name) for resource in response.config_resources]
    return names == [] if version == 0 else (BROKER, "1") in names and (TOPIC, setting.topic) in names


CASES = {
    29: (
        lambda s, v: DescribeAclsRequest(resource_type_filter=TOPIC, operation=READ, permission_type=ALLOW),
        lambda r: [],
        lambda s, v, r: r.error_code == SECURITY_DISABLED and r.resources == [],
    ),
    30: (_create_acls, lambda r: [], lambda s, v, r: [one.error_code for one in r.results] == [SECURITY_DISABLED]),
    31: (
        _delete_acls,
        lambda r: [],
        lambda s, v, r: [one.error_code for one in r.filter_results] == [SECURITY_DISABLED],
    ),
    34: (
        _move,
        lambda r: [p.error_code for t in r.results for p in t.partitions],
        lambda s, v, r: len(r.results[0].partitions) == 2,
    ),
    43: (
        _elect,
        lambda r: [r.error_code],
        lambda s, v, r: (
            [p.error_code for t in r.replica_election_results for p in t.partition_result] == [ELECTION_NOT_NEEDED] * 2
        ),
    ),
    45: (
        _reassign,
        lambda r: [r.error_code, *(p.error_code for t in r.responses for p in t.partitions)],
        lambda s, v, r: len(r.responses) == 1,
    ),
    46: (
        lambda s, v: ListPartitionReassignmentsRequest(topics=None),
        lambda r: [r.error_code],
        lambda s, v, r: r.topics == [],
    ),
    48: (
        _describe_quotas,
        lambda r: [r.error_code],
        lambda s, v, r: [(one.key, one.value) for one in r.entries[0].values] == [("producer_byte_rate", 1e9)],
    ),
    49: (
        lambda s, v: _quota(fresh("versions-client")),
        lambda r: [one.error_code for one in r.entries],
        lambda s, v, r: len(r.entries) == 1,
    ),
    50: (
        lambda s, v: DescribeUserScramCredentialsRequest(users=None),
        lambda r: [r.error_code],
        lambda s, v, r: r.results == [],
    ),
    51: (
        lambda s, v: AlterUserScramCredentialsRequest(),
        lambda r: [one.error_code for one in r.results],
        lambda s, v, r: r.results == [],
    ),
    # a plain listener has no SASL, and issues no tokens
    38: (
        lambda s, v: CreateDelegationTokenRequest(max_lifetime_ms=-1),
        lambda r: [],
        lambda s, v, r: (
            (r.error_code, r.principal_name, r.max_timestamp_ms, r.token_id, r.hmac)
            == (TOKEN_REQUEST_NOT_ALLOWED, "ANONYMOUS", -1, "", b"")
        ),
    ),
    39: (
        lambda s, v: RenewDelegationTokenRequest(hmac=b"h", renew_period_ms=-1),
        lambda r: [],
        lambda s, v, r: (r.error_code, r.expiry_timestamp_ms) == (TOKEN_REQUEST_NOT_ALLOWED, -1),
    ),
    40: (
        lambda s, v: ExpireDelegationTokenRequest(hmac=b"h", expiry_time_period_ms=-1),
        lambda r: [],
        lambda s, v, r: (r.error_code, r.expiry_timestamp_ms) == (TOKEN_REQUEST_NOT_ALLOWED, -1),
    ),
    41: (
        lambda s, v: DescribeDelegationTokenRequest(owners=None),
        lambda r: [],
        lambda s, v, r: (r.error_code, r.tokens) == (TOKEN_REQUEST_NOT_ALLOWED, []),
    ),
    17: (
        lambda s, v: SaslHandshakeRequest(mechanism="PLAIN"),
        lambda r: [],
        lambda s, v, r: r.error_code == ErrorCode.ILLEGAL_SASL_STATE,
    ),
    36: (
        lambda s, v: SaslAuthenticateRequest(auth_bytes=b"\0alice\0s3cret"),
        lambda r: [],
        lambda s, v, r: r.error_code == ErrorCode.ILLEGAL_SASL_STATE,
    ),
    55: (_quorum, lambda r: [r.error_code, *(p.error_code for t in r.topics for p in t.partitions)], _quorum_described),
    57: (
        _features,
        lambda r: [r.error_code, *(one.error_code for one in r.results)],
        lambda s, v, r: len(r.results) == (v < 2),
    ),
    64: (
        lambda s, v: UnregisterBrokerRequest(broker_id=4711),
        lambda r: [],
        lambda s, v, r: r.error_code == BROKER_ID_NOT_REGISTERED,
    ),
    74: (lambda s, v: ListConfigResourcesRequest(), lambda r: [r.error_code], _resources),
    80: (
        lambda s, v: AddRaftVoterRequest(voter_id=4711, timeout_ms=3000),
        lambda r: [],
        lambda s, v, r: r.error_code == INVALID_REQUEST and "4711" in r.error_message,
    ),
    81: (
        lambda s, v: RemoveRaftVoterRequest(voter_id=1),
        lambda r: [],
        lambda s, v, r: r.error_code == INVALID_REQUEST and "only voter" in r.error_message,
    ),
}
