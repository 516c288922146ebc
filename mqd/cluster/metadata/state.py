"""The cluster's metadata as a value: the result of applying the records of the metadata log.

Only MetadataState.apply(record) changes the state, deterministically. The core has validated a record
before it is written; apply() raises only for a record that contradicts the state, which is a broken
invariant. Topics and partitions are frozen, so copies share them.

Invariants (check())
    S1  topics_by_id and topics have the same topics
    S2  partition indexes of a topic are 0..n-1; replicas are distinct; in-sync replicas are
        replicas; the leader is in sync or -1
    S3  no two topic names differ only in '.' and '_'
    S4  directory_replica_counts equals the number of replicas per directory
    S5  next_producer_id never falls
    P7  in-sync replicas are not fenced; in-sync and eligible ones are disjoint subsets of the
        replicas; no replica is eligible while min.insync.replicas are in sync
    P8  a replica that came back after an unclean restart is neither in sync nor eligible while it is
        last known eligible
    P10 if no replica is in sync or eligible, at least one is last known eligible
    S6  `removed_topic_ids` has the ids of the topics that were removed last, at most
        REMOVED_TOPIC_IDS_MAX, in order of removal
    S7  acls and acl_ids have the same rules; acl_bytes is the size of their texts
"""

from collections.abc import Callable
from typing import Any

import msgspec

from mqd.base.views import VIEW_OF
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    BrokerChanged,
    BrokerConfigured,
    BrokerRegistered,
    BrokerState,
    BrokerUnregistered,
    ClientMetricsConfigured,
    ClientQuotaSet,
    ClusterCreated,
    DelegationToken,
    DelegationTokenRemoved,
    DelegationTokenSet,
    Entity,
    FeatureLevelSet,
    GroupConfigured,
    LeaderEpochsRaised,
    PartitionChange,
    PartitionsAdded,
    PartitionsChanged,
    PartitionState,
    ProducerIdsAllocated,
    Record,
    ReplicaMoved,
    RetiredPartitionsRemoved,
    ScramCredential,
    ScramCredentialRemoved,
    ScramCredentialSet,
    TopicConfigured,
    TopicCreated,
    TopicRemoved,
    TopicState,
)
from mqd.cluster.metadata.rules.partitions import configured_min_in_sync, effective_min_in_sync
from mqd.security.acl import AclBinding

# Ids of removed topics that are kept. A worker that was down deletes the files of these topics, and sets
# aside the files of other unknown topics.
REMOVED_TOPIC_IDS_MAX = 4096
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot/1"):
    """The complete state, as stored in a checkpoint file."""

    version: int
    cluster_id: str
    created_ms: int
    brokers: list[BrokerState]
    topics: list[TopicState]
    broker_configs: dict[str, dict[str, str]]
    next_producer_id: int
    removed_topic_ids: list[bytes] = []
    group_configs: dict[str, dict[str, str]] = {}
    client_metrics: dict[str, dict[str, str]] = {}
    client_quotas: list[ClientQuotaSet] = []
    features: dict[str, int] = {}
    acls: list[AclCreated] = []
    scram_credentials: list[ScramCredential] = []
    delegation_tokens: list[DelegationToken] = []


def collision_key(name: str) -> str:
    """Equal for names that differ only in '.' and '_', which Kafka's metric names do not distinguish."""
    return name.replace(".", "_")


def acl_bytes(binding: AclBinding) -> int:
    """The size of the rule's texts in bytes."""
    return len(binding.name.encode()) + len(binding.principal.encode()) + len(binding.host.encode())


def _add_to_count(counts: dict, key: object, step: int) -> None:
    count = counts.get(key, 0) + step
    if count:
        counts[key] = count
    else:
        del counts[key]


def apply_change(old: PartitionState, change: PartitionChange) -> PartitionState:
    """Returns the partition after the change. Both the state and the rules use this function."""

    def new_or_old(new, before):
        return before if new is None else new

    removing = new_or_old(change.removing_replicas, old.removing_replicas)
    # a controller of an older version does not clear superseded_replicas when it ends a reassignment
    superseded = tuple(
        node for node in new_or_old(change.superseded_replicas, old.superseded_replicas) if node in removing
    )
    return PartitionState(
        index=old.index,
        replicas=new_or_old(change.replicas, old.replicas),
        directories=new_or_old(change.directories, old.directories),
        in_sync_replicas=new_or_old(change.in_sync_replicas, old.in_sync_replicas),
        leader=new_or_old(change.leader, old.leader),
        leader_epoch=old.leader_epoch + change.raises_leader_epoch,
        partition_epoch=old.partition_epoch + 1,
        adding_replicas=new_or_old(change.adding_replicas, old.adding_replicas),
        removing_replicas=removing,
        eligible_leader_replicas=new_or_old(change.eligible_leader_replicas, old.eligible_leader_replicas),
        last_known_eligible=new_or_old(change.last_known_eligible, old.last_known_eligible),
        recovering=new_or_old(change.recovering, old.recovering),
        retiring=new_or_old(change.retiring, old.retiring),
        redirect=new_or_old(change.redirect, old.redirect),
        replacing=new_or_old(change.replacing, old.replacing),
        superseded_replicas=superseded,
    )


class MetadataState:
    __slots__ = (
        "version",
        "cluster_id",
        "created_ms",
        "brokers",
        "topics",
        "topics_by_id",
        "collisions",
        "broker_configs",
        "next_producer_id",
        "directory_replica_counts",
        "partition_count",
        "removed_topic_ids",
        "preferred_counts",
        "group_configs",
        "client_metrics",
        "client_quotas",
        "features",
        "acls",
        "acl_ids",
        "acl_bytes",
        "scram_credentials",
        "delegation_tokens",
    )

    def __init__(self) -> None:
        self.version = 0  # offset after the last applied record
        self.cluster_id = ""
        self.created_ms = 0
        self.brokers: dict[int, BrokerState] = {}
        self.topics: dict[str, TopicState] = {}
        self.topics_by_id: dict[bytes, str] = {}
        self.collisions: dict[str, str] = {}  # collision_key(name) -> name
        self.broker_configs: dict[str, dict[str, str]] = {}
        self.next_producer_id = 0
        # (node id, directory id) -> number of replicas
        self.directory_replica_counts: dict[tuple[int, str], int] = {}
        self.partition_count = 0
        # node id -> number of partitions whose first replica is on it
        self.preferred_counts: dict[int, int] = {}
        self.removed_topic_ids: dict[bytes, None] = {}
        # by group id
        self.group_configs: dict[str, dict[str, str]] = {}
        self.client_metrics: dict[str, dict[str, str]] = {}  # subscription -> its configuration
        self.client_quotas: dict[Entity, dict[str, float]] = {}
        # explicit levels only; mqd.cluster.metadata.features has the defaults
        self.features: dict[str, int] = {}
        self.acls: dict[bytes, AclBinding] = {}
        self.acl_ids: dict[AclBinding, bytes] = {}
        self.acl_bytes = 0
        # by user and mechanism
        self.scram_credentials: dict[tuple[str, int], ScramCredential] = {}
        self.delegation_tokens: dict[str, DelegationToken] = {}  # by id

    def copy(self) -> "MetadataState":
        other = MetadataState()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, dict) else value)
        return other

    def replace(self, other: "MetadataState") -> None:
        """Copies the contents of `other` into this object, which other objects reference."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetadataState) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def broker_config(self, node_id: int) -> dict[str, str]:
        """Effective dynamic configuration of one broker: its own values override the cluster-wide ones."""
        return {**self.broker_configs.get("", {}), **self.broker_configs.get(str(node_id), {})}

    def min_in_sync(self, topic: TopicState, partition: PartitionState) -> int:
        """Effective min.insync.replicas of one partition (effective_min_in_sync in rules/partitions.py)."""
        configured = configured_min_in_sync(topic.config, self.broker_configs.get("", {}))
        return effective_min_in_sync(configured, len(partition.replicas), len(partition.adding_replicas))

    # -- applying ----------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Applies one record; the version rises by one."""
        _APPLY[type(record)](self, record)
        self.version += 1

    def _on_cluster_created(self, record: ClusterCreated) -> None:
        if self.cluster_id:
            raise ValueError(f"the cluster has an id already: {self.cluster_id}")
        self.cluster_id = record.cluster_id
        self.created_ms = record.created_ms

    def _on_broker_registered(self, record: BrokerRegistered) -> None:
        self.brokers[record.broker.node_id] = record.broker

    def _on_topic_created(self, record: TopicCreated) -> None:
        topic = record.topic
        if topic.name in self.topics or topic.topic_id in self.topics_by_id:
            raise ValueError(f"topic {topic.name} exists already")
        self._put_topic(topic)
        self.topics_by_id[topic.topic_id] = topic.name
        self.collisions[collision_key(topic.name)] = topic.name
        self._count_replicas(topic.partitions, 1)

    def _on_partitions_added(self, record: PartitionsAdded) -> None:
        topic = self._topic(record.topic_id)
        self._put_topic(msgspec.structs.replace(topic, partitions=topic.partitions + tuple(record.partitions)))
        self._count_replicas(record.partitions, 1)

    def _on_leader_epochs_raised(self, record: LeaderEpochsRaised) -> None:
        topic = self._topic(record.topic_id)
        partitions = list(topic.partitions)
        for index in record.partitions:
            old = partitions[index]
            partitions[index] = msgspec.structs.replace(
                old, leader_epoch=old.leader_epoch + 1, partition_epoch=old.partition_epoch + 1
            )
        self._put_topic(msgspec.structs.replace(topic, partitions=tuple(partitions)))

    def _on_topic_removed(self, record: TopicRemoved) -> None:
        topic = self._topic(record.topic_id)
        del self.topics[topic.name], self.topics_by_id[topic.topic_id], self.collisions[collision_key(topic.name)]
        self._count_replicas(topic.partitions, -1)
        self.removed_topic_ids[topic.topic_id] = None
        if len(self.removed_topic_ids) > REMOVED_TOPIC_IDS_MAX:
            del self.removed_topic_ids[next(iter(self.removed_topic_ids))]

    def _on_topic_configured(self, record: TopicConfigured) -> None:
        self._put_topic(msgspec.structs.replace(self._topic(record.topic_id), config=dict(record.config)))

    def _on_broker_configured(self, record: BrokerConfigured) -> None:
        if record.config:
            self.broker_configs[record.resource_name] = dict(record.config)
        else:
            self.broker_configs.pop(record.resource_name, None)

    def _on_group_configured(self, record: GroupConfigured) -> None:
        if record.config:
            self.group_configs[record.group_id] = dict(record.config)
        else:
            self.group_configs.pop(record.group_id, None)

    def _on_client_metrics_configured(self, record: ClientMetricsConfigured) -> None:
        if record.config:
            self.client_metrics[record.name] = dict(record.config)
        else:
            self.client_metrics.pop(record.name, None)

    def _on_producer_ids_allocated(self, record: ProducerIdsAllocated) -> None:
        if record.next_producer_id < self.next_producer_id:
            raise ValueError(
                f"producer ids would be assigned twice: {record.next_producer_id} after {self.next_producer_id}"
            )
        self.next_producer_id = record.next_producer_id

    def _on_client_quota_set(self, record: ClientQuotaSet) -> None:
        if record.quotas:
            self.client_quotas[tuple((kind, name) for kind, name in record.entity)] = dict(record.quotas)
        else:
            self.client_quotas.pop(tuple((kind, name) for kind, name in record.entity), None)

    def _on_feature_level_set(self, record: FeatureLevelSet) -> None:
        self.features[record.name] = record.level

    def _on_acl_created(self, record: AclCreated) -> None:
        if record.acl_id in self.acls or record.binding in self.acl_ids:
            raise ValueError(f"the rule exists already: {record.binding}")
        self.acls[record.acl_id] = record.binding
        self.acl_ids[record.binding] = record.acl_id
        self.acl_bytes += acl_bytes(record.binding)

    def _on_acl_removed(self, record: AclRemoved) -> None:
        binding = self.acls.pop(record.acl_id)
        del self.acl_ids[binding]
        self.acl_bytes -= acl_bytes(binding)

    def _on_scram_credential_set(self, record: ScramCredentialSet) -> None:
        credential = record.credential
        self.scram_credentials[credential.user, credential.mechanism] = credential

    def _on_scram_credential_removed(self, record: ScramCredentialRemoved) -> None:
        del self.scram_credentials[record.user, record.mechanism]

    def _on_delegation_token_set(self, record: DelegationTokenSet) -> None:
        self.delegation_tokens[record.token.token_id] = record.token

    def _on_delegation_token_removed(self, record: DelegationTokenRemoved) -> None:
        del self.delegation_tokens[record.token_id]

    def _on_replica_moved(self, record: ReplicaMoved) -> None:
        topic = self._topic(record.topic_id)
        old = topic.partitions[record.index]
        position = old.replicas.index(record.node_id)
        directories = (*old.directories[:position], record.directory, *old.directories[position + 1 :])
        moved = msgspec.structs.replace(old, directories=directories, partition_epoch=old.partition_epoch + 1)
        self._count_replicas((old,), -1)
        self._count_replicas((moved,), 1)
        self._put_topic(
            msgspec.structs.replace(
                topic, partitions=(*topic.partitions[: record.index], moved, *topic.partitions[record.index + 1 :])
            )
        )

    def _on_partitions_changed(self, record: PartitionsChanged) -> None:
        topic = self._topic(record.topic_id)
        partitions = list(topic.partitions)
        for change in record.changes:
            old = partitions[change.index]
            new = partitions[change.index] = apply_change(old, change)
            if change.replicas is not None or change.directories is not None:
                self._count_replicas((old,), -1)
                self._count_replicas((new,), 1)
        self._put_topic(msgspec.structs.replace(topic, partitions=tuple(partitions)))

    def _on_retired_partitions_removed(self, record: RetiredPartitionsRemoved) -> None:
        topic = self._topic(record.topic_id)
        if not 0 < record.partition_count <= len(topic.partitions):
            raise ValueError(
                f"topic {topic.name} has {len(topic.partitions)} partitions; {record.partition_count} cannot remain"
            )
        gone = topic.partitions[record.partition_count :]
        self._count_replicas(gone, -1)
        next_epoch = max((partition.leader_epoch + 1 for partition in gone), default=0)
        self._put_topic(
            msgspec.structs.replace(
                topic,
                partitions=topic.partitions[: record.partition_count],
                first_leader_epoch=max(topic.first_leader_epoch, next_epoch),
            )
        )

    def _on_broker_changed(self, record: BrokerChanged) -> None:
        broker = self.brokers[record.node_id]
        if broker.epoch != record.epoch:
            raise ValueError(f"broker {record.node_id} is registered with epoch {broker.epoch}, not {record.epoch}")
        fields = {
            name: getattr(record, name)
            for name in ("fenced", "in_controlled_shutdown", "draining")
            if getattr(record, name) is not None
        }
        self.brokers[record.node_id] = msgspec.structs.replace(broker, **fields)

    def _on_broker_unregistered(self, record: BrokerUnregistered) -> None:
        del self.brokers[record.node_id]

    def _topic(self, topic_id: bytes) -> TopicState:
        name = self.topics_by_id.get(topic_id)
        if name is None:
            raise ValueError(f"no topic has the id {topic_id.hex()}")
        return self.topics[name]

    def _put_topic(self, topic: TopicState) -> None:
        self.topics[topic.name] = topic

    def _count_replicas(self, partitions: tuple[PartitionState, ...], step: int) -> None:
        self.partition_count += step * len(partitions)
        for partition in partitions:
            for key in zip(partition.replicas, partition.directories):
                _add_to_count(self.directory_replica_counts, key, step)
            _add_to_count(self.preferred_counts, partition.replicas[0], step)

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            version=self.version,
            cluster_id=self.cluster_id,
            created_ms=self.created_ms,
            brokers=list(self.brokers.values()),
            topics=list(self.topics.values()),
            broker_configs=self.broker_configs,
            next_producer_id=self.next_producer_id,
            removed_topic_ids=list(self.removed_topic_ids),
            group_configs=self.group_configs,
            client_metrics=self.client_metrics,
            client_quotas=[ClientQuotaSet(entity, quotas) for entity, quotas in self.client_quotas.items()],
            features=self.features,
            acls=[AclCreated(acl_id, binding) for acl_id, binding in self.acls.items()],
            scram_credentials=list(self.scram_credentials.values()),
            delegation_tokens=list(self.delegation_tokens.values()),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> "MetadataState":
        state = cls()
        state.cluster_id, state.created_ms = snapshot.cluster_id, snapshot.created_ms
        state.brokers = {broker.node_id: broker for broker in snapshot.brokers}
        for topic in snapshot.topics:
            state._on_topic_created(TopicCreated(topic))
        state.broker_configs = dict(snapshot.broker_configs)
        state.group_configs = dict(snapshot.group_configs)
        state.client_metrics = dict(snapshot.client_metrics)
        state.next_producer_id = snapshot.next_producer_id
        state.removed_topic_ids = dict.fromkeys(snapshot.removed_topic_ids)
        for entry in snapshot.client_quotas:
            state._on_client_quota_set(entry)
        state.features = dict(snapshot.features)
        for acl in snapshot.acls:
            state._on_acl_created(acl)
        for credential in snapshot.scram_credentials:
            state._on_scram_credential_set(ScramCredentialSet(credential))
        state.delegation_tokens = {token.token_id: token for token in snapshot.delegation_tokens}
        state.version = snapshot.version
        return state

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        assert {topic.topic_id: name for name, topic in self.topics.items()} == self.topics_by_id, "S1"
        assert {collision_key(name): name for name in self.topics} == self.collisions, "S3"
        counts: dict[tuple[int, str], int] = {}
        preferred: dict[int, int] = {}
        for name, topic in self.topics.items():
            assert topic.name == name and len(topic.topic_id) == 16, "S1"
            assert bool(topic.partitions) != bool(topic.config.get(VIEW_OF)), "S1"
            assert [partition.index for partition in topic.partitions] == list(range(len(topic.partitions))), "S2"
            for partition in topic.partitions:
                replicas = set(partition.replicas)
                assert replicas and len(replicas) == len(partition.replicas) == len(partition.directories), "S2"
                assert set(partition.in_sync_replicas) <= replicas, "S2"
                assert partition.leader == -1 or partition.leader in partition.in_sync_replicas, "S2"
                for key in zip(partition.replicas, partition.directories):
                    counts[key] = counts.get(key, 0) + 1
                self._check_partition(topic, partition)
                preferred[partition.replicas[0]] = preferred.get(partition.replicas[0], 0) + 1
        for broker in self.brokers.values():
            assert not (broker.fenced and broker.in_controlled_shutdown), "P7"
        assert (
            self.removed_topic_ids.keys().isdisjoint(self.topics_by_id)
            and len(self.removed_topic_ids) <= REMOVED_TOPIC_IDS_MAX
        ), "S6"
        assert {binding: acl_id for acl_id, binding in self.acls.items()} == self.acl_ids, "S7"
        assert self.acl_bytes == sum(map(acl_bytes, self.acl_ids)), "S7"
        assert preferred == self.preferred_counts, "S4"
        assert counts == self.directory_replica_counts and self.partition_count == sum(
            len(topic.partitions) for topic in self.topics.values()
        ), "S4"

    def _check_partition(self, topic: TopicState, partition: PartitionState) -> None:
        in_sync, eligible = set(partition.in_sync_replicas), set(partition.eligible_leader_replicas)
        partition_text = f"{topic.name}-{partition.index}: {partition}"
        assert len(in_sync) == len(partition.in_sync_replicas) and len(eligible) == len(
            partition.eligible_leader_replicas
        ), f"P7 {partition_text}"
        assert not any(node in self.brokers and self.brokers[node].fenced for node in in_sync), (
            f"P7: fenced and in sync: {partition_text}"
        )
        assert not in_sync & eligible and eligible <= set(partition.replicas), f"P7 {partition_text}"
        assert not eligible or len(in_sync) < self.min_in_sync(topic, partition), (
            f"P7: enough in sync, and some eligible: {partition_text}"
        )
        assert not set(partition.last_known_eligible) & (in_sync | eligible), f"P8 {partition_text}"
        assert in_sync or eligible or partition.last_known_eligible, f"P10 {partition_text}"
        assert set(partition.adding_replicas) | set(partition.removing_replicas) <= set(partition.replicas), (
            f"R14 {partition_text}"
        )
        assert not set(partition.adding_replicas) & set(partition.removing_replicas), f"R14 {partition_text}"
        assert set(partition.superseded_replicas) <= set(partition.removing_replicas), f"R14 {partition_text}"


_APPLY: dict[type, Callable[[MetadataState, Any], None]] = {
    ClusterCreated: MetadataState._on_cluster_created,
    BrokerRegistered: MetadataState._on_broker_registered,
    TopicCreated: MetadataState._on_topic_created,
    PartitionsAdded: MetadataState._on_partitions_added,
    LeaderEpochsRaised: MetadataState._on_leader_epochs_raised,
    TopicRemoved: MetadataState._on_topic_removed,
    TopicConfigured: MetadataState._on_topic_configured,
    BrokerConfigured: MetadataState._on_broker_configured,
    GroupConfigured: MetadataState._on_group_configured,
    ClientMetricsConfigured: MetadataState._on_client_metrics_configured,
    ProducerIdsAllocated: MetadataState._on_producer_ids_allocated,
    ClientQuotaSet: MetadataState._on_client_quota_set,
    FeatureLevelSet: MetadataState._on_feature_level_set,
    ReplicaMoved: MetadataState._on_replica_moved,
    PartitionsChanged: MetadataState._on_partitions_changed,
    RetiredPartitionsRemoved: MetadataState._on_retired_partitions_removed,
    BrokerChanged: MetadataState._on_broker_changed,
    BrokerUnregistered: MetadataState._on_broker_unregistered,
    AclCreated: MetadataState._on_acl_created,
    AclRemoved: MetadataState._on_acl_removed,
    ScramCredentialSet: MetadataState._on_scram_credential_set,
    ScramCredentialRemoved: MetadataState._on_scram_credential_removed,
    DelegationTokenSet: MetadataState._on_delegation_token_set,
    DelegationTokenRemoved: MetadataState._on_delegation_token_removed,
}
