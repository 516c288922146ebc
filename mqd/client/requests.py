"""A client's requests and responses, without I/O: builds requests, and reads the fields of responses
that the caller needs.

Versions are chosen by ApiTable from what the broker advertises and this package supports. Error codes
become KafkaErrors where they are read.
"""

from __future__ import annotations

import msgspec

from mqd.client.messages import KafkaError, failure
from mqd.protocol.headers import KNOWN
from mqd.protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    InitProducerIdRequest,
    MetadataRequest,
    MetadataResponse,
)

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = 0, 1, 2, 3, 8, 9, 10
JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, API_VERSIONS = 11, 12, 13, 14, 18
INIT_PRODUCER_ID, OFFSET_FOR_LEADER_EPOCH, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = (
    22,
    23,
    24,
    25,
    26,
    28,
)
CONSUMER_GROUP_HEARTBEAT = 68

_ADD_PARTITIONS_CLIENT_MAX = 3  # later versions are used between brokers
# newest versions that a producer may use without transactions of version 2
_TXN_V1_MAX = {END_TXN: 4, TXN_OFFSET_COMMIT: 4, PRODUCE: 11}
NO_TOPIC_ID = bytes(16)


class ApiTable(msgspec.Struct, frozen=True):
    """The broker's APIs. `versions`: API key -> (first, last); `features`: name of a finalized feature ->
    level.
    """

    versions: dict[int, tuple[int, int]]
    features: dict[str, int]

    @classmethod
    def read(cls, response: ApiVersionsResponse) -> ApiTable:
        """Reads an ApiVersionsResponse. Raises KafkaException."""
        if response.error_code:
            raise failure(KafkaError._UNSUPPORTED_FEATURE, "the broker does not support ApiVersions: is it mqd?")
        versions = {entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys}
        return cls(versions, {feature.name: feature.max_version_level for feature in response.finalized_features})

    def pick(self, api_key: int, version_max: int = 1 << 14) -> int:
        """Returns the newest version that both sides support. Raises KafkaException
        (_UNSUPPORTED_FEATURE).
        """
        spec, (first, last) = KNOWN[api_key], self.versions.get(api_key, (0, -1))
        version = min(spec.max_version, last, version_max)
        if version < max(spec.min_version, first):
            raise failure(
                KafkaError._UNSUPPORTED_FEATURE, f"the broker and this client have no version of {spec.name} in common"
            )
        return version

    @property
    def supports_transactions_v2(self) -> bool:
        """Whether the broker supports transactions of version 2 (KIP-890): writing to a partition adds it
        to the transaction, and every transaction has a new epoch.
        """
        return self.features.get("transaction.version", 0) >= 2 and self.versions.get(END_TXN, (0, -1))[1] >= 5

    def pick_transactional(self, api_key: int, uses_v2: bool) -> int:
        """`uses_v2`: whether the producer started with transactions of version 2. The broker may have
        begun to support them since.
        """
        if api_key == ADD_PARTITIONS_TO_TXN:
            return self.pick(api_key, _ADD_PARTITIONS_CLIENT_MAX)
        return self.pick(api_key) if uses_v2 else self.pick(api_key, _TXN_V1_MAX.get(api_key, 1 << 14))


def api_versions_request() -> ApiVersionsRequest:
    return ApiVersionsRequest(client_software_name="mqd", client_software_version="0.1.0")


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic as the broker last described it. `leaders` and `leader_epochs` by partition index; -1
    where there is none.
    """

    name: str
    topic_id: bytes
    error: int  # Kafka's; 0 = the topic exists
    is_internal: bool
    leaders: tuple[int, ...]
    leader_epochs: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    in_sync_replicas: tuple[tuple[int, ...], ...]

    @property
    def partition_count(self) -> int:
        return len(self.leaders)


class ClusterInfo(msgspec.Struct, frozen=True):
    cluster_id: str | None
    controller_id: int
    brokers: dict[int, tuple[str, int]]


def metadata_request(topics: list[str] | None, allow_auto_create: bool) -> MetadataRequest:
    """`topics` None: all topics."""
    named = None if topics is None else [MetadataRequest.Topic(name=name, topic_id=NO_TOPIC_ID) for name in topics]
    return MetadataRequest(topics=named, allow_auto_topic_creation=allow_auto_create)


def read_metadata(response: MetadataResponse) -> tuple[ClusterInfo, list[TopicInfo]]:
    cluster = ClusterInfo(
        response.cluster_id,
        response.controller_id,
        {broker.node_id: (broker.host, broker.port) for broker in response.brokers},
    )
    return cluster, [_read_topic(topic) for topic in response.topics]


def _read_topic(topic: MetadataResponse.Topic) -> TopicInfo:
    assert topic.name is not None  # it was requested by name
    partitions = sorted(topic.partitions, key=lambda partition: partition.partition_index)
    if [partition.partition_index for partition in partitions] != list(range(len(partitions))):
        raise failure(KafkaError._BAD_MSG, f"the broker's metadata of topic {topic.name} leaves out partitions")
    return TopicInfo(
        topic.name,
        topic.topic_id,
        topic.error_code,
        topic.is_internal,
        tuple(partition.leader_id for partition in partitions),
        tuple(partition.leader_epoch for partition in partitions),
        tuple(tuple(partition.replica_nodes) for partition in partitions),
        tuple(tuple(partition.isr_nodes) for partition in partitions),
    )


def init_producer_id_request(
    transactional_id: str | None, timeout_ms: int, producer_id: int = -1, producer_epoch: int = -1
) -> InitProducerIdRequest:
    """With a producer id and epoch: requests that producer's next epoch (KIP-360)."""
    return InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
