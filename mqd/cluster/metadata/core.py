"""The controller's decisions: requests in; records, publications and replies out. Sans-I/O: no
clock, socket, disk or randomness of its own.

The path of a change: ChangeRequested -> Persist -> (Persisted) -> Publish -> (AppliedByHost) ->
Reply.

`tail` is the metadata with all records that were passed to Persist. Changes are checked against it,
so two requests for one name cannot both succeed. `committed` is the metadata with only the records
that are certainly in the log; only it is published. When a Persist fails, all records after
`committed` are dropped, and waiting requests get a retriable error.

Invariants (check())
    C1  tail is committed plus the pending batches, in order
    C2  a response, including a refusal, waits for every record in the tail on which it may depend
    C3  a change is answered after it is committed. If it has records other than
        RECORDS_NOT_FOR_WORKERS, the workers must also have applied it. After APPLY_WAIT_MS_MAX it is
        answered with REQUEST_TIMED_OUT
    C4  versions of batches ascend; the published batches are a prefix of the committed ones
    C5  no record is written that needs a higher level of mqd.version than the current one
        (features.RECORD_LEVELS)
Bounds: REQUESTS_WAITING_MAX requests; further ones are refused with a retriable error.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import changes, features
from mqd.cluster.metadata.active_controller import ActiveController
from mqd.cluster.metadata.events import Action as Action
from mqd.cluster.metadata.events import AppliedByHost as AppliedByHost
from mqd.cluster.metadata.events import BecameActive as BecameActive
from mqd.cluster.metadata.events import ChangeRequested as ChangeRequested
from mqd.cluster.metadata.events import ClientGone as ClientGone
from mqd.cluster.metadata.events import ClusterFounded as ClusterFounded
from mqd.cluster.metadata.events import Committed as Committed
from mqd.cluster.metadata.events import DirectoriesSeen as DirectoriesSeen
from mqd.cluster.metadata.events import Event as Event
from mqd.cluster.metadata.events import LeaseChanged as LeaseChanged
from mqd.cluster.metadata.events import OffsetsTaken as OffsetsTaken
from mqd.cluster.metadata.events import PeerReceived as PeerReceived
from mqd.cluster.metadata.events import Persist as Persist
from mqd.cluster.metadata.events import Persisted as Persisted
from mqd.cluster.metadata.events import PersistFailed as PersistFailed
from mqd.cluster.metadata.events import ProcessStarted as ProcessStarted
from mqd.cluster.metadata.events import Publish as Publish
from mqd.cluster.metadata.events import Reply as Reply
from mqd.cluster.metadata.events import Resigned as Resigned
from mqd.cluster.metadata.events import SendPeer as SendPeer
from mqd.cluster.metadata.events import SnapshotInstalled as SnapshotInstalled
from mqd.cluster.metadata.events import Tick as Tick
from mqd.cluster.metadata.log_tail import Batch, LogTail, WaitingPeerResponse, WaitingResponse
from mqd.cluster.metadata.records import (
    AclCreated,
    BrokerRegistered,
    BrokerState,
    ClientMetricsConfigured,
    ClusterCreated,
    DelegationTokenRemoved,
    DelegationTokenSet,
    FeatureLevelSet,
    GroupConfigured,
    LeaderEpochsRaised,
    ProducerIdsAllocated,
    Record,
    ScramCredentialRemoved,
    ScramCredentialSet,
    TopicState,
)
from mqd.cluster.metadata.rules import topics as rules
from mqd.protocol.errors import ErrorCode

APPLY_WAIT_MS_MAX = 30_000
REQUESTS_WAITING_MAX = 10_000
PEER_RESPONSES_WAITING_MAX = 10_000
RECORDS_NOT_FOR_WORKERS = (
    GroupConfigured,
    ClientMetricsConfigured,
    ProducerIdsAllocated,
    ScramCredentialSet,
    ScramCredentialRemoved,
    DelegationTokenSet,
    DelegationTokenRemoved,
)
NOT_ACTIVE = "This host is not the active controller."
TOO_MANY_CHANGES = "The controller has too many changes in progress; try again."


class MetadataCore(LogTail):
    """`active`: True for a single host without a quorum, which decides from the start. With a quorum it
    is False at first, and then set by BecameActive and Resigned.
    """

    @property
    def next_expiry_ms(self) -> int | None:
        """When the next broker's session ends unless a heartbeat arrives: a Tick is due then."""
        return self._active.sessions.next_expiry_ms() if self._active is not None else None

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        return _HANDLERS[type(event)](self, event, now_ms)

    # -- this host ---------------------------------------------------------------------------------

    def _on_process_started(self, event: ProcessStarted, now_ms: int) -> list[Action]:
        records: list[Record] = []
        if not self.proposed.cluster_id:
            records.append(ClusterCreated(cluster_id=event.new_cluster_id, created_ms=now_ms))
        old = self.proposed.brokers.get(self.node_id)
        restarted = old is not None and old.incarnation != event.incarnation
        epoch = self.proposed.version + len(records) if old is None or restarted else old.epoch
        broker = BrokerState(
            self.node_id, event.host, event.port, event.rack, epoch, event.incarnation, self._directory_paths(old)
        )
        if broker != old:
            records.append(BrokerRegistered(broker))
        if restarted:
            records += self._raise_epochs(self._partitions_led_here())
        return self._persist(records)

    def _on_directories_seen(self, event: DirectoriesSeen, now_ms: int) -> list[Action]:
        self._directories = event.directories
        if self._active is None:
            return []
        self._active.set_reported_directories(self.node_id, event.directories)
        broker = self.proposed.brokers.get(self.node_id)
        if broker is None:
            return []
        changed = msgspec.structs.replace(broker, directories=self._directory_paths(broker))
        return self._persist([BrokerRegistered(changed)]) if changed != broker else []

    def _directory_paths(self, broker: BrokerState | None) -> dict[str, str]:
        paths = dict(broker.directories) if broker is not None else {}
        paths.update(
            {directory.directory_id: directory.path for directory in self._directories if directory.directory_id}
        )
        return paths

    def _partitions_led_here(self) -> list[tuple[bytes, int]]:
        return [
            (topic.topic_id, partition.index)
            for topic in self.proposed.topics.values()
            for partition in topic.partitions
            if partition.leader == self.node_id
        ]

    def _raise_epochs(self, partitions: list[tuple[bytes, int]]) -> list[Record]:
        by_topic: dict[bytes, list[int]] = {}
        for topic_id, index in partitions:
            name = self.proposed.topics_by_id.get(topic_id)
            if name is not None and index < len(self.proposed.topics[name].partitions):
                by_topic.setdefault(topic_id, []).append(index)
        return [LeaderEpochsRaised(topic_id, tuple(sorted(indexes))) for topic_id, indexes in sorted(by_topic.items())]

    # -- changes -----------------------------------------------------------------------------------

    def _on_change_requested(self, event: ChangeRequested, now_ms: int) -> list[Action]:
        request = event.request
        if len(self._waiting_responses) >= REQUESTS_WAITING_MAX:
            return [
                Reply(
                    event.client, messages.Response(request.request_id, ErrorCode.REQUEST_TIMED_OUT, TOO_MANY_CHANGES)
                )
            ]
        if self._active is None:
            return [Reply(event.client, messages.Response(request.request_id, ErrorCode.NOT_CONTROLLER, NOT_ACTIVE))]
        response, topic_name, records = self._decide(self._active, request)
        if request.validate_only:
            topic = self._preview(topic_name, records) if response.error == 0 and topic_name is not None else None
            return [Reply(event.client, response, topic)]
        actions = self._persist(records)
        awaited_version = self.proposed.version
        needs_apply = any(not isinstance(record, RECORDS_NOT_FOR_WORKERS) for record in records)
        if not records and not response.error and isinstance(request.change, messages.CreateAcls | messages.DeleteAcls):
            # A repeated request waits like the first one, because its rules may not be applied yet.
            awaited_version, needs_apply = self._acls_version, True
        self._waiting_responses.append(
            WaitingResponse(event.client, response, topic_name, awaited_version, needs_apply, now_ms)
        )
        return actions + self._send_ready_responses()

    def _decide(
        self, active: ActiveController, request: messages.Request
    ) -> tuple[messages.Response, str | None, list[Record]]:
        """Returns the response, the topic to return with it, and the records on which it depends."""
        context = rules.PlacementContext(
            self.node_id, active.view(self.proposed), active.directories(self.proposed), self._partition_count_max
        )
        try:
            decision = changes.decide(self.proposed, active, request, context, self._config_rules, self._new_id)
        except rules.Refusal as refusal:
            return messages.Response(request.request_id, refusal.error, refusal.message), None, []
        required_level = max(map(features.needed_level, decision.records), default=0)
        if required_level > self._mqd_level():
            text = (
                f"This needs {features.MQD_VERSION} {required_level}, but the level is {self._mqd_level()}: hosts of"
                " an older version could not read it. Upgrade all hosts, then run mqd cluster upgrade."
            )
            return messages.Response(request.request_id, ErrorCode.INVALID_UPDATE_VERSION, text), None, []
        return decision.response, decision.topic_name, decision.records

    def _preview(self, name: str, records: list[Record]) -> TopicState | None:
        state = self.proposed.copy()
        for record in records:
            state.apply(record)
        return state.topics.get(name)

    # -- the quorum --------------------------------------------------------------------------------

    def _on_committed(self, event: Committed, now_ms: int) -> list[Action]:
        if self._active is not None and (self._pending or event.version <= self.committed.version):
            return self._on_persisted(Persisted(event.version), now_ms)
        # On the active controller this can be a batch that was dropped because a later proposal
        # failed, but was committed anyway.
        self._pending.append(Batch(event.records, event.version))
        actions = self._on_persisted(Persisted(event.version), now_ms)
        self.proposed = self.committed.copy() if self._active is not None else self.committed
        return actions

    def _on_snapshot_installed(self, event: SnapshotInstalled, now_ms: int) -> list[Action]:
        assert self._active is None, "the active controller has everything that is committed"
        new, old = event.state, self.committed
        removed = tuple(topic for topic in old.topics.values() if topic.topic_id not in new.topics_by_id)
        changed = tuple(topic for name, topic in new.topics.items() if old.topics.get(name) != topic)
        removed_partitions = tuple(
            (before, len(topic.partitions))
            for topic in changed
            if (before := old.topics.get(topic.name)) is not None
            and before.topic_id == topic.topic_id
            and len(before.partitions) > len(topic.partitions)
        )
        groups = [
            name
            for name in {**old.group_configs, **new.group_configs}
            if old.group_configs.get(name) != new.group_configs.get(name)
        ]
        client_metrics = {
            name
            for name in {*old.client_metrics, *new.client_metrics}
            if old.client_metrics.get(name) != new.client_metrics.get(name)
        }
        acls_put = tuple(AclCreated(acl_id, rule) for acl_id, rule in new.acls.items() if acl_id not in old.acls)
        acls_removed = tuple(acl_id for acl_id in old.acls if acl_id not in new.acls)
        old_users, users = old.scram_credentials, new.scram_credentials
        credentials_put = tuple(credential for key, credential in users.items() if old_users.get(key) != credential)
        credentials_removed = tuple(key for key in old_users if key not in users)
        old_tokens, tokens = old.delegation_tokens, new.delegation_tokens
        tokens_put = tuple(token for key, token in tokens.items() if old_tokens.get(key) != token)
        tokens_removed = tuple(key for key in old_tokens if key not in tokens)
        old.replace(new)
        self._acls_version = old.version
        publish = Publish(
            old.version,
            changed,
            removed,
            old.broker_config(self.node_id),
            True,
            tuple(groups),
            client_quotas_changed=True,
            features_changed=True,
            removed_partitions=removed_partitions,
            client_metrics=tuple(sorted(client_metrics)),
            acls_put=acls_put,
            acls_removed=acls_removed,
            credentials_put=credentials_put,
            credentials_removed=credentials_removed,
            tokens_put=tokens_put,
            tokens_removed=tokens_removed,
        )
        return [publish, *self._send_ready_responses()]

    def _on_became_active(self, event: BecameActive, now_ms: int) -> list[Action]:
        assert self._active is None and not self._pending
        self.committed.version = max(self.committed.version, event.version)
        self.proposed = self.committed.copy()
        self._attempt += 1
        self._active = ActiveController(
            event.epoch,
            self.proposed,
            self._options,
            now_ms,
            clustered=True,
            own_node_id=self.node_id,
            previous_epoch=event.previous_epoch,
        )
        self._active.set_reported_directories(self.node_id, self._directories)
        return []

    def _on_cluster_founded(self, event: ClusterFounded, now_ms: int) -> list[Action]:
        if self.proposed.cluster_id:
            return []
        return self._persist(
            [
                ClusterCreated(event.cluster_id, event.created_ms),
                *(FeatureLevelSet(name, level) for name, level in features.founding_levels().items()),
            ]
        )

    def _on_resigned(self, event: Resigned, now_ms: int) -> list[Action]:
        """Answers waiting requests with NOT_CONTROLLER, which is retriable. It is not known whether their
        records will be committed.
        """
        if self._active is None:
            return []
        self._active = None
        self._lease_until_ms = 0
        self._waiting_peer_responses.clear()  # brokers repeat their requests to the next controller
        return self._drop_pending(
            ErrorCode.NOT_CONTROLLER,
            "This host is no longer the active controller; whether the change was made is not known.",
            [],
        )

    def _on_offsets_taken(self, event: OffsetsTaken, now_ms: int) -> list[Action]:
        if self._active is not None and event.version > self.proposed.version:
            self.proposed.version = event.version
            self._pending.append(Batch((), event.version))
        return []

    def _on_lease_changed(self, event: LeaseChanged, now_ms: int) -> list[Action]:
        if self._active is not None:
            self._lease_until_ms = event.until_ms
        return []

    # -- brokers -----------------------------------------------------------------------------------

    def _on_peer_received(self, event: PeerReceived, now_ms: int) -> list[Action]:
        """Drops a message whose node id is not the one that the transport authenticated."""
        message, active = event.message, self._active
        if message.node_id != event.node_id:
            return []
        if active is None:
            return self._respond_not_controller(event.node_id, message)
        match message:
            case broker_messages.Heartbeat():
                records, response = active.heartbeat(
                    self.proposed, self.committed, message, now_ms, now_ms < self._lease_until_ms
                )
                return [*self._persist(records), SendPeer(event.node_id, response)]
            case broker_messages.RegisterBroker():
                return self._respond_to_peer(event.node_id, *active.register(self.proposed, message, now_ms))
            case broker_messages.AlterPartition():
                return self._respond_to_peer(event.node_id, *active.alter_partition(self.proposed, message))
            case broker_messages.ChangeForwarded():
                return self._on_change_forwarded(active, event.node_id, message)
            case broker_messages.ProofOfDeath():
                return self._persist(active.on_proof_of_death(self.proposed, message, now_ms))
            case broker_messages.WorkersDied():
                return self._persist(active.on_workers_died(self.proposed, message))
            case broker_messages.ReplicaPlaced():
                return self._persist(active.on_replica_placed(self.proposed, message))
            case broker_messages.ReplicasFailed():
                return self._persist(active.on_replicas_failed(self.proposed, message, now_ms))
            case broker_messages.PartitionsEmptied():
                return self._persist(active.on_partitions_emptied(self.proposed, message))
        return []

    def _respond_to_peer(
        self, node_id: int, records: list[Record], message: broker_messages.FromActiveController
    ) -> list[Action]:
        """Answers once all records that the response depends on are committed. If more than
        PEER_RESPONSES_WAITING_MAX responses wait, the oldest is dropped, as if it had been lost on its
        way. The response to a change is not dropped, because brokers do not repeat changes.
        """
        actions = self._persist(records)
        self._waiting_peer_responses.append(WaitingPeerResponse(node_id, message, self.proposed.version))
        if len(self._waiting_peer_responses) > PEER_RESPONSES_WAITING_MAX:
            change = broker_messages.ChangeResponse
            del self._waiting_peer_responses[
                next(i for i, entry in enumerate(self._waiting_peer_responses) if not isinstance(entry.message, change))
            ]
        return actions + self._send_ready_responses()

    def _on_change_forwarded(
        self, active: ActiveController, node_id: int, message: broker_messages.ChangeForwarded
    ) -> list[Action]:
        if len(self._waiting_peer_responses) >= PEER_RESPONSES_WAITING_MAX:
            refusal = messages.Response(message.request.request_id, ErrorCode.REQUEST_TIMED_OUT, TOO_MANY_CHANGES)
            return [SendPeer(node_id, self._change_response(message, refusal, None))]
        response, topic_name, records = self._decide(active, message.request)
        if message.request.validate_only:
            topic = self._preview(topic_name, records) if response.error == 0 and topic_name is not None else None
            return [SendPeer(node_id, self._change_response(message, response, None), topic)]
        actions = self._persist(records)
        self._waiting_peer_responses.append(
            WaitingPeerResponse(node_id, self._change_response(message, response, topic_name), self.proposed.version)
        )
        return actions + self._send_ready_responses()

    def _change_response(
        self, message: broker_messages.ChangeForwarded, response: messages.Response, topic_name: str | None
    ) -> broker_messages.ChangeResponse:
        epoch = self._active.epoch if self._active is not None else -1
        return broker_messages.ChangeResponse(
            epoch, message.node_id, message.request_id, message.incarnation, self.proposed.version, response, topic_name
        )

    def _respond_not_controller(self, node_id: int, message: broker_messages.ToActiveController) -> list[Action]:
        error = int(ErrorCode.NOT_CONTROLLER)
        match message:
            case broker_messages.Heartbeat():
                response: broker_messages.FromActiveController = broker_messages.BrokerHeartbeatResponse(
                    -1, node_id, message.broker_epoch, message.sent_ms, 0, True, error=error
                )
            case broker_messages.RegisterBroker():
                response = broker_messages.RegisterBrokerResponse(-1, node_id, message.incarnation, error, NOT_ACTIVE)
            case broker_messages.AlterPartition():
                response = broker_messages.AlterPartitionResponse(-1, node_id, message.broker_epoch, error, [])
            case broker_messages.ChangeForwarded():
                response = self._change_response(
                    message, messages.Response(message.request.request_id, error, NOT_ACTIVE), None
                )
            case _:
                return []  # the broker repeats it until the metadata reflects it
        return [SendPeer(node_id, response)]

    def _on_persist_failed(self, event: PersistFailed, now_ms: int) -> list[Action]:
        """Drops all batches after `kept_version` and answers their requests with KAFKA_STORAGE_ERROR,
        which is retriable. Brokers repeat their own requests, but not the changes that they forward.
        """
        if event.attempt >= 0 and event.attempt != self._attempt:
            return []
        kept = [batch for batch in self._pending if batch.version <= event.kept_version]
        version = kept[-1].version if kept else self.committed.version
        dropped = [entry for entry in self._waiting_peer_responses if entry.version > version]
        self._waiting_peer_responses = [entry for entry in self._waiting_peer_responses if entry.version <= version]
        error = ErrorCode.KAFKA_STORAGE_ERROR
        text = f"The metadata log could not be written; the change was not made: {event.reason}"
        actions = self._drop_pending(error, text, kept)
        for entry in dropped:
            change = entry.message
            if isinstance(change, broker_messages.ChangeResponse):
                refusal = messages.Response(change.response.request_id, error, text)
                refused = msgspec.structs.replace(change, version=version, response=refusal, topic_name=None)
                actions.append(SendPeer(entry.node_id, refused))
        if self._active is not None:
            self._active.on_persist_failed(self.proposed, now_ms)
        return actions

    # -- responses ---------------------------------------------------------------------------------

    def _on_applied_by_host(self, event: AppliedByHost, now_ms: int) -> list[Action]:
        self._applied_version = max(self._applied_version, event.version)
        return self._send_ready_responses()

    def _on_client_gone(self, event: ClientGone, now_ms: int) -> list[Action]:
        self._waiting_responses = [entry for entry in self._waiting_responses if entry.client != event.client]
        return []

    def _on_tick(self, event: Tick, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        timed_out = [entry for entry in self._waiting_responses if now_ms - entry.since_ms >= APPLY_WAIT_MS_MAX]
        if timed_out:
            self._waiting_responses = [
                entry for entry in self._waiting_responses if now_ms - entry.since_ms < APPLY_WAIT_MS_MAX
            ]
            for entry in timed_out:
                progress = (
                    "is stored but a worker has not applied it"
                    if entry.version <= self.committed.version
                    else "is not on disk"
                )
                text = f"The change {progress} after {APPLY_WAIT_MS_MAX // 1000} s; it may still take effect."
                actions.append(
                    Reply(entry.client, messages.Response(entry.response.request_id, ErrorCode.REQUEST_TIMED_OUT, text))
                )
        if self._active is not None:
            actions += self._persist(
                self._active.tick(self.proposed, now_ms, now_ms < self._lease_until_ms, event.wall_ms)
            )
        return actions

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        self.committed.check()
        self.proposed.check()
        state, version = self.committed.copy(), self.committed.version
        for batch in self._pending:
            assert version < batch.version, "C4"
            for record in batch.records:
                state.apply(record)
            version = state.version = batch.version
        assert state == self.proposed and version == self.proposed.version, "C1"
        assert len(self._waiting_responses) <= REQUESTS_WAITING_MAX
        for entry in self._waiting_responses:
            assert entry.version <= self.proposed.version, "C2"
            assert entry.version > self.committed.version or (
                entry.needs_apply and entry.version > self._applied_version
            ), "C3"


_HANDLERS: dict[type, Callable[[MetadataCore, Any, int], list[Action]]] = {
    ProcessStarted: MetadataCore._on_process_started,
    DirectoriesSeen: MetadataCore._on_directories_seen,
    ChangeRequested: MetadataCore._on_change_requested,
    Persisted: MetadataCore._on_persisted,
    PersistFailed: MetadataCore._on_persist_failed,
    AppliedByHost: MetadataCore._on_applied_by_host,
    ClientGone: MetadataCore._on_client_gone,
    Tick: MetadataCore._on_tick,
    Committed: MetadataCore._on_committed,
    SnapshotInstalled: MetadataCore._on_snapshot_installed,
    BecameActive: MetadataCore._on_became_active,
    ClusterFounded: MetadataCore._on_cluster_founded,
    Resigned: MetadataCore._on_resigned,
    OffsetsTaken: MetadataCore._on_offsets_taken,
    LeaseChanged: MetadataCore._on_lease_changed,
    PeerReceived: MetadataCore._on_peer_received,
}
