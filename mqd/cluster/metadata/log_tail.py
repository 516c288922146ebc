"""The controller's batches that are not committed yet, the publication of committed ones, and the
responses that wait for them. The invariants are those of core.py.
"""

from collections.abc import Callable, Hashable

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import features
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.events import Action, Persist, Persisted, Publish, Reply, SendPeer
from mqd.cluster.metadata.options import DEFAULTS, ControllerOptions
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    BrokerChanged,
    BrokerConfigured,
    BrokerRegistered,
    BrokerUnregistered,
    ClientMetricsConfigured,
    ClientQuotaSet,
    ClusterCreated,
    DelegationTokenRemoved,
    DelegationTokenSet,
    FeatureLevelSet,
    GroupConfigured,
    LeaderEpochsRaised,
    PartitionsAdded,
    PartitionsChanged,
    Record,
    ReplicaMoved,
    RetiredPartitionsRemoved,
    ScramCredentialRemoved,
    ScramCredentialSet,
    TopicConfigured,
    TopicCreated,
    TopicRemoved,
    TopicState,
)
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.state import MetadataState

INT64_MAX = (1 << 63) - 1


class Batch(msgspec.Struct):
    records: tuple[Record, ...]  # empty if the quorum appended its own control records
    version: int


class WaitingResponse(msgspec.Struct):
    """The response to a client, sent when all records up to `version` are committed and, if
    `needs_apply`, applied by this host's workers.
    """

    client: Hashable
    response: messages.Response
    topic_name: str | None
    version: int
    needs_apply: bool
    since_ms: int


class WaitingPeerResponse(msgspec.Struct):
    """The response to a broker, sent when all records up to `version` are committed."""

    node_id: int
    message: broker_messages.FromActiveController
    version: int


class LogTail:
    """`committed`: the state with only the committed records. `proposed`: the state with all
    proposed records.
    """

    def __init__(
        self,
        state: MetadataState,
        node_id: int,
        config_rules: ConfigRules,
        new_id: Callable[[], bytes],
        partition_count_max: int,
        active: bool = True,
        options: ControllerOptions = DEFAULTS,
    ) -> None:
        self.committed = state
        self.proposed = state.copy() if active else state
        self.node_id = node_id
        self._config_rules = config_rules
        self._new_id = new_id
        self._partition_count_max = partition_count_max
        self._directories: tuple[Directory, ...] = ()
        self._pending: list[Batch] = []
        self._waiting_responses: list[WaitingResponse] = []
        self._waiting_peer_responses: list[WaitingPeerResponse] = []
        self._applied_version = 0
        self._acls_version = state.version  # version of the newest change to access control lists
        self._attempt = 0
        self._options = options
        self._in_quorum = not active
        self._lease_until_ms = INT64_MAX if active else 0
        self._active = ActiveController(0, state, options, 0, clustered=False) if active else None

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._waiting_responses and not self._waiting_peer_responses

    @property
    def active(self) -> bool:
        return self._active is not None

    def _mqd_level(self) -> int:
        return features.in_force(self.proposed.features)[features.MQD_VERSION]

    # -- the log -----------------------------------------------------------------------------------

    def _persist(self, records: list[Record]) -> list[Action]:
        if not records:
            return []
        if self._active is None:
            return []
        base_offset = self.proposed.version
        for record in records:
            assert not features.needed_level(record) or features.needed_level(record) <= self._mqd_level(), (
                f"C5: {record} at {features.MQD_VERSION} {self._mqd_level()}"
            )
            self.proposed.apply(record)
        if any(isinstance(record, AclCreated | AclRemoved) for record in records):
            self._acls_version = self.proposed.version
        self._pending.append(Batch(tuple(records), self.proposed.version))
        return [Persist(tuple(records), base_offset, self.proposed.version, self._attempt)]

    def _on_persisted(self, event: Persisted, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        while self._pending and self._pending[0].version <= event.version:
            batch = self._pending.pop(0)
            committed = self.committed
            removed = tuple(
                committed.topics[committed.topics_by_id[record.topic_id]]
                for record in batch.records
                if isinstance(record, TopicRemoved)
            )
            removed_partitions = self._removed_partitions(batch.records)
            for record in batch.records:
                committed.apply(record)
            committed.version = batch.version
            if batch.records:
                actions.append(self._publication(batch, removed, removed_partitions))
        return actions + self._send_ready_responses()

    def _removed_partitions(self, records: tuple[Record, ...]) -> tuple[tuple[TopicState, int], ...]:
        topics, ids = self.committed.topics, self.committed.topics_by_id
        return tuple(
            (topics[ids[record.topic_id]], record.partition_count)
            for record in records
            if isinstance(record, RetiredPartitionsRemoved)
        )

    def _publication(
        self, batch: Batch, removed: tuple[TopicState, ...], removed_partitions: tuple[tuple[TopicState, int], ...]
    ) -> Publish:
        topic_names: dict[str, None] = {}
        changed_indexes: dict[str, dict[int, None]] = {}  # topic -> its changed partitions
        changed_as_a_whole: set[str] = set()
        broker_config, brokers_changed, groups = None, False, []
        subscriptions: list[str] = []
        quotas_changed = features_changed = False
        # only the state after the batch matters: a batch of several requests can remove what it created
        acl_ids: dict[bytes, None] = {}
        credential_keys: dict[tuple[str, int], None] = {}
        token_ids: dict[str, None] = {}
        acls, credentials = self.committed.acls, self.committed.scram_credentials
        tokens = self.committed.delegation_tokens
        for record in batch.records:
            match record:
                case TopicCreated():
                    topic_names[record.topic.name] = None
                    changed_as_a_whole.add(record.topic.name)
                case ClientQuotaSet():
                    quotas_changed = True
                case FeatureLevelSet():
                    features_changed = True
                case PartitionsAdded() | TopicConfigured() | RetiredPartitionsRemoved():
                    name = self._topic_name(record.topic_id)
                    if name is not None:  # otherwise removed in the same batch
                        topic_names[name] = None
                        changed_as_a_whole.add(name)
                case ReplicaMoved() | LeaderEpochsRaised() | PartitionsChanged():
                    name = self._topic_name(record.topic_id)
                    if name is not None:
                        topic_names[name] = None
                        changed_indexes.setdefault(name, {}).update(dict.fromkeys(self._touched_indexes(record)))
                case BrokerConfigured():
                    broker_config = self.committed.broker_config(self.node_id)
                case BrokerRegistered() | ClusterCreated() | BrokerChanged() | BrokerUnregistered():
                    brokers_changed = True
                case GroupConfigured():
                    groups.append(record.group_id)
                case ClientMetricsConfigured():
                    subscriptions.append(record.name)
                case AclCreated() | AclRemoved():
                    acl_ids[record.acl_id] = None
                case ScramCredentialSet():
                    credential_keys[record.credential.user, record.credential.mechanism] = None
                case ScramCredentialRemoved():
                    credential_keys[record.user, record.mechanism] = None
                case DelegationTokenSet():
                    token_ids[record.token.token_id] = None
                case DelegationTokenRemoved():
                    token_ids[record.token_id] = None
        if acl_ids:
            self._acls_version = max(self._acls_version, batch.version)
        topics = tuple(self.committed.topics[name] for name in topic_names)
        changed_partitions = (
            tuple(
                (name, tuple(sorted(indexes)))
                for name, indexes in changed_indexes.items()
                if name not in changed_as_a_whole
            )
            if self._in_quorum
            else ()
        )
        return Publish(
            batch.version,
            topics,
            removed,
            broker_config,
            brokers_changed,
            tuple(groups),
            quotas_changed,
            features_changed,
            changed_partitions,
            removed_partitions,
            tuple(AclCreated(acl_id, acls[acl_id]) for acl_id in acl_ids if acl_id in acls),
            tuple(acl_id for acl_id in acl_ids if acl_id not in acls),
            tuple(credentials[key] for key in credential_keys if key in credentials),
            tuple(key for key in credential_keys if key not in credentials),
            tuple(subscriptions),
            tuple(tokens[token_id] for token_id in token_ids if token_id in tokens),
            tuple(token_id for token_id in token_ids if token_id not in tokens),
        )

    def _topic_name(self, topic_id: bytes) -> str | None:
        return self.committed.topics_by_id.get(topic_id)

    def _touched_indexes(self, record: ReplicaMoved | LeaderEpochsRaised | PartitionsChanged) -> tuple[int, ...]:
        if isinstance(record, ReplicaMoved):
            return (record.index,)
        if isinstance(record, PartitionsChanged):
            return tuple(change.index for change in record.changes)
        return record.partitions

    def _drop_pending(self, error: int, reason: str, kept: list[Batch]) -> list[Action]:
        self._attempt += 1
        self._pending = kept
        self.proposed = self.committed.copy() if self._active is not None else self.committed
        for batch in kept:
            for record in batch.records:
                self.proposed.apply(record)
            self.proposed.version = batch.version
        version = self.proposed.version
        self._acls_version = min(self._acls_version, version)
        failed = [waiting for waiting in self._waiting_responses if waiting.version > version]
        self._waiting_responses = [waiting for waiting in self._waiting_responses if waiting.version <= version]
        return [
            Reply(waiting.client, messages.Response(waiting.response.request_id, error, reason)) for waiting in failed
        ]

    def _send_ready_responses(self) -> list[Action]:
        ready: list[WaitingResponse] = []
        waiting: list[WaitingResponse] = []
        for entry in self._waiting_responses:
            done = entry.version <= self.committed.version and (
                not entry.needs_apply or entry.version <= self._applied_version
            )
            (ready if done else waiting).append(entry)
        self._waiting_responses = waiting
        return [self._reply(entry) for entry in ready] + self._respond_to_peers()

    def _respond_to_peers(self) -> list[Action]:
        version = self.committed.version
        ready: list[Action] = [
            SendPeer(entry.node_id, entry.message) for entry in self._waiting_peer_responses if entry.version <= version
        ]
        if ready:
            self._waiting_peer_responses = [entry for entry in self._waiting_peer_responses if entry.version > version]
        return ready

    def _reply(self, entry: WaitingResponse) -> Reply:
        topic = self.committed.topics.get(entry.topic_name) if entry.topic_name is not None else None
        return Reply(entry.client, entry.response, topic)
