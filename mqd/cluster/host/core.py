"""Applies committed metadata on one host: assigns partition slots and owners, notifies the host's
processes, and tracks when all of them have applied it. Sans-I/O.

The metadata core has the state of the cluster. This core, one per host, derives the host's part: a
slot in the control segment and an owning worker for each partition with a replica here (not logged:
they last as long as the control segment), messages to subscribers, and the version that each
subscriber has applied. Subscribers receive all partitions of the cluster, because a client can
request a partition's leader from any host.

When a replica is added and the metadata has no log directory for it, one is chosen and recorded
first: otherwise a restarted host could choose another one and start an empty log there. Then the
replica gets a slot, and its owner opens it. When a replica is removed its image gets slot -1, its owner
deletes the files, and the slot is free once all workers have applied that.

Invariants (check())
    H1  a slot is free, used by one partition, or retiring; never two of these
    H2  a retiring slot is freed only when each worker that was alive when it began to retire has
        applied the removal or has died
    H3  a worker whose predecessor died receives no metadata until each partition that the predecessor
        led has a new leader epoch (or is deleted). Followed partitions continue in the same epoch:
        the predecessor had reported only records that it had written. If a slot has an epoch that
        this host's state has not reached, the state does not yet show who led in it
    H4  the applied version never falls, and rises only to a version that every live worker has
        applied
    H5  the owner of a partition depends only on topic id, index and worker count
    H6  subscribers know the partitions of each topic, except its last partitions while they wait for
        their first slot; a partition has a slot if and only if this host has a replica of it, in a
        recorded directory, and a slot was free
    H7  all changes of one version reach a subscriber in one message
    H8  before a worker gets the message to serve a partition, the partition's slot has the owner, the
        log directory and the leader epoch (or a newer one), because all workers act on the slot. A
        controller that starts therefore completes slots that its predecessor began to write
Bounds: COMMANDS_MAX commands in flight.
"""

from collections.abc import Callable, Hashable
from typing import Any

from mqd.base.collector import paused
from mqd.cluster.host import messages
from mqd.cluster.host.commands import OWNER_NONE as OWNER_NONE
from mqd.cluster.host.commands import Subscriber
from mqd.cluster.host.events import Action, Partition
from mqd.cluster.host.events import AppliedEverywhere as AppliedEverywhere
from mqd.cluster.host.events import AssignSlot as AssignSlot
from mqd.cluster.host.events import ClearSlot as ClearSlot
from mqd.cluster.host.events import CommandEnded as CommandEnded
from mqd.cluster.host.events import CommandRequested as CommandRequested
from mqd.cluster.host.events import ControllerChanged as ControllerChanged
from mqd.cluster.host.events import DirectoriesMeasured as DirectoriesMeasured
from mqd.cluster.host.events import Event as Event
from mqd.cluster.host.events import MoveEnded as MoveEnded
from mqd.cluster.host.events import RaiseEpochs as RaiseEpochs
from mqd.cluster.host.events import ReportFailures as ReportFailures
from mqd.cluster.host.events import ReportReplicaMoved as ReportReplicaMoved
from mqd.cluster.host.events import Send as Send
from mqd.cluster.host.events import SlotSeen as SlotSeen
from mqd.cluster.host.events import Started as Started
from mqd.cluster.host.events import StateReplaced as StateReplaced
from mqd.cluster.host.events import SubscriberJoined as SubscriberJoined
from mqd.cluster.host.events import SubscriberLeft as SubscriberLeft
from mqd.cluster.host.events import Tick as Tick
from mqd.cluster.host.events import WorkerApplied as WorkerApplied
from mqd.cluster.host.events import WorkerDied as WorkerDied
from mqd.cluster.host.images import LOG_DIR_NONE as LOG_DIR_NONE
from mqd.cluster.host.images import TopicImages
from mqd.cluster.host.images import owner_of as owner_of
from mqd.cluster.metadata.core import Publish
from mqd.cluster.metadata.records import BrokerState
from mqd.protocol.errors import ErrorCode


def broker_image(broker: BrokerState) -> messages.BrokerImage:
    return messages.BrokerImage(
        node_id=broker.node_id,
        host=broker.host,
        port=broker.port,
        rack=broker.rack,
        epoch=broker.epoch,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        draining=broker.draining,
        inter_broker_host=broker.inter_broker_host,
        inter_broker_port=broker.inter_broker_port,
        worker_count=broker.worker_count,
        incarnation=broker.incarnation,
        directory_id=broker.directory_id,
        endpoints=broker.endpoints,
    )


class HostCore(TopicImages):
    """`log_dirs`: id -> index in log.dirs, of the usable log directories. The state in Started is the
    metadata core's committed state and is read-only. `controller_id`: the active controller, if
    known.
    """

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        version = self._version
        actions = _HANDLERS[type(event)](self, event, now_ms)
        return self._publish_withheld(actions, version) if self._slots.unplaced or self._withheld else actions

    # -- start -------------------------------------------------------------------------------------

    def _on_started(self, event: Started, now_ms: int) -> list[Action]:
        self._state, self._version = event.state, event.state.version
        self._live_workers, self._generations = set(event.live_workers), dict(event.live_workers)
        actions: list[Action] = []
        lost_partitions: list[Partition] = []
        used_slots: set[int] = set()
        seen_slots: dict[Partition, SlotSeen] = {}
        lost_epochs: dict[int, dict[Partition, int]] = {}
        for seen in event.slots:
            used_slots.add(seen.slot)
            partition = (seen.topic_id, seen.index)
            state = self._partition_state(partition)
            if state is None or self.node_id not in state.replicas or partition in self._slots.used:
                self._slots.retire(seen.slot, self._version, self._live_workers)
                continue
            self._slots.adopt(partition, seen.slot)
            # the dead worker may have led in an epoch that this host's state has yet to reach
            is_ahead = seen.leader_epoch > state.leader_epoch
            if not seen.stale or state.leader == self.node_id or is_ahead:
                seen_slots[partition] = seen
                if seen.stale:
                    lost_epochs.setdefault(seen.owner, {})[partition] = seen.leader_epoch
            if seen.stale and state.leader == self.node_id:
                lost_partitions.append(partition)
        self._adopt_torn_slots(event, used_slots)
        self._slots.end_adoption(used_slots)
        # A stale slot is unchanged until its new epoch is committed: if this controller dies before
        # that, the slot is the only evidence of the worker's death.
        with paused():
            for topic in event.state.topics.values():
                actions += self._put_topic(topic, seen_slots)
        self._lost_epochs = lost_epochs
        if lost_partitions:
            actions.append(RaiseEpochs(tuple(lost_partitions)))
        return actions + self._free_retired() + self._release_held_workers() + self._maybe_report_applied()

    def _adopt_torn_slots(self, event: Started, used_slots: set[int]) -> None:
        """Assigns the torn slots, which the previous controller was writing, to partitions without a slot:
        first to the partitions with the highest epochs, which workers may already know. Torn slots that
        are left over were being cleared, and are free.
        """
        without_slot = [
            (-partition.leader_epoch, topic.topic_id, partition.index)
            for topic in event.state.topics.values()
            for partition in topic.partitions
            if self.node_id in partition.replicas and (topic.topic_id, partition.index) not in self._slots.used
        ]
        for slot, (_, topic_id, index) in zip(event.torn_slots, sorted(without_slot)):
            self._slots.adopt((topic_id, index), slot)
            used_slots.add(slot)

    # -- metadata ----------------------------------------------------------------------------------

    def _on_publish(self, event: Publish, now_ms: int) -> list[Action]:
        """`self._state` is the metadata core's committed state and has already changed; the event describes
        the change. The version, in all processes of the host, is that of the last change that concerns
        them: a change that concerns no subscriber (a block of producer ids) does not advance it.
        """
        if (
            event.topics
            or event.removed_topics
            or event.broker_config is not None
            or event.brokers_changed
            or event.settings_changed
            or event.acls_put
            or event.acls_removed
        ):
            self._version = event.version
        actions: list[Action] = []
        parts: list[messages.Part] = []
        if event.brokers_changed:
            parts.append(self._brokers())
        for topic in event.removed_topics:
            parts += self._remove(topic)
        changed_indexes = dict(event.changed_partitions)
        for topic in event.topics:
            parts += self._topic_changes(topic, changed_indexes.get(topic.name), actions)
        if event.broker_config is not None:
            parts.append(
                messages.BrokerConfigPut(
                    event.version,
                    event.broker_config,
                    self._state.broker_configs.get("", {}),
                    self._state.broker_configs.get(str(self.node_id), {}),
                )
            )
        if event.settings_changed:
            parts.append(self._settings(event))
        if event.acls_put or event.acls_removed:
            put = [(acl.acl_id, acl.binding) for acl in event.acls_put]
            parts.append(messages.AclsPut(event.version, put, list(event.acls_removed)))
        if parts:  # H7
            actions += self._broadcast(parts[0] if len(parts) == 1 else messages.MessageList(self._version, parts))
        for group_id in event.changed_groups:
            config = self._state.group_configs.get(group_id, {})
            actions += self._broadcast(messages.GroupConfigPut(self._version, group_id, config), role="acceptor")
        for name in event.client_metrics:
            config = self._state.client_metrics.get(name, {})
            actions += self._broadcast(messages.ClientMetricsPut(self._version, name, config), role="acceptor")
        if event.credentials_put or event.credentials_removed:
            credentials = messages.CredentialsPut(
                self._version, list(event.credentials_put), list(event.credentials_removed)
            )
            actions += self._broadcast(credentials, role="acceptor")
        if event.tokens_put or event.tokens_removed:
            tokens = messages.TokensPut(self._version, list(event.tokens_put), list(event.tokens_removed))
            actions += self._broadcast(tokens, role="acceptor")
        return actions + self._free_retired() + self._release_held_workers() + self._maybe_report_applied()

    def _on_state_replaced(self, event: StateReplaced, now_ms: int) -> list[Action]:
        self._version = self._state.version
        actions: list[Action] = []
        for name, image in list(self._images.items()):
            if self._state.topics_by_id.get(image.topic_id) != name:
                self._forget(image)
        with paused():
            for topic in self._state.topics.values():
                actions += self._put_topic(topic, {})
        for subscriber in self._subscribers.values():
            if not subscriber.held:
                actions.append(Send(subscriber.client, self._full_image(subscriber.role)))
        return actions + self._free_retired() + self._release_held_workers() + self._maybe_report_applied()

    def _on_controller_changed(self, event: ControllerChanged, now_ms: int) -> list[Action]:
        """Informs the acceptor; workers do not need the controller's id."""
        if event.controller_id == self._controller_id:
            return []
        self._controller_id = event.controller_id
        return self._broadcast(self._brokers(), role="acceptor")

    def _brokers(self) -> messages.BrokersPut:
        return messages.BrokersPut(
            self._version, [broker_image(broker) for broker in self._state.brokers.values()], self._controller_id
        )

    def _settings(self, event: Publish) -> messages.SettingsPut:
        state = self._state
        return messages.SettingsPut(
            event.version,
            self._client_quotas() if event.client_quotas_changed else None,
            state.features if event.features_changed else None,
        )

    def _client_quotas(self) -> list[messages.ClientQuota]:
        return [messages.ClientQuota(entity, quotas) for entity, quotas in self._state.client_quotas.items()]

    def _on_directories_measured(self, event: DirectoriesMeasured, now_ms: int) -> list[Action]:
        self._free_bytes = event.free_bytes
        return []

    def _publish_withheld(self, actions: list[Action], version: int) -> list[Action]:
        """Adds messages about withheld topics, which the acceptor must not consider deleted. A
        message that a topic is withheld precedes the changes that depend on it; a message that it
        is no longer withheld follows the topic itself.
        """
        before, after = self._withheld, self._withheld_names()
        before_or_after = sorted({*before, *after})
        leading = (
            self._broadcast(messages.SettingsPut(version, withheld=before_or_after), role="acceptor")
            if before_or_after != before
            else []
        )
        trailing = (
            self._broadcast(messages.SettingsPut(self._version, withheld=after), role="acceptor")
            if after != before_or_after
            else []
        )
        self._withheld = after
        return [*leading, *actions, *trailing]

    # -- subscribers -------------------------------------------------------------------------------

    def _on_subscriber_joined(self, event: SubscriberJoined, now_ms: int) -> list[Action]:
        role, index = event.subscribe.role, event.subscribe.index
        actions: list[Action] = []
        if role == "worker":
            known_generation = self._generations.get(index)
            if known_generation is not None and known_generation != event.subscribe.generation:
                actions += self._handle_worker_death(index)
            for client in [
                other.client for other in self._subscribers.values() if other.role == "worker" and other.index == index
            ]:
                actions += self._drop_subscriber(client)
            self._generations[index] = event.subscribe.generation
            self._live_workers.add(index)
        subscriber = self._subscribers[event.client] = Subscriber(event.client, role, index)
        if role == "worker" and index in self._lost_epochs:
            subscriber.held = True
            return actions
        return [*actions, Send(event.client, self._full_image(role))]

    def _full_image(self, role: str) -> messages.Image:
        state = self._state
        brokers = [broker_image(broker) for broker in state.brokers.values()]
        config = state.broker_config(self.node_id)
        return messages.Image(
            self._version,
            state.cluster_id,
            self._controller_id,
            brokers,
            list(self._images.values()),
            config,
            state.broker_configs.get("", {}),
            list(state.removed_topic_ids),
            state.group_configs,
            self._client_quotas(),
            state.features,
            self.node_id,
            self._withheld_names(),
            list(state.acls.items()),
            list(state.scram_credentials.values()) if role == "acceptor" else [],
            state.client_metrics if role == "acceptor" else {},
            list(state.delegation_tokens.values()) if role == "acceptor" else [],
            state.broker_configs.get(str(self.node_id), {}),
        )

    def _on_subscriber_left(self, event: SubscriberLeft, now_ms: int) -> list[Action]:
        return [*self._drop_subscriber(event.client), *self._maybe_report_applied()]

    def _drop_subscriber(self, client: Hashable) -> list[Action]:
        self._subscribers.pop(client, None)
        self._commands = {number: command for number, command in self._commands.items() if command.client != client}
        actions: list[Action] = []
        for number in [number for number, command in self._commands.items() if command.worker == client]:
            command = self._commands.pop(number)
            text = "The worker that owns the partition was restarted; try again."
            actions.append(
                Send(command.client, messages.Response(command.request_id, ErrorCode.NOT_LEADER_OR_FOLLOWER, text))
            )
        return actions

    def _on_worker_died(self, event: WorkerDied, now_ms: int) -> list[Action]:
        if self._generations.get(event.index, event.generation) != event.generation:
            return []  # already handled, when the next worker subscribed
        self._generations.pop(event.index, None)
        return [*self._handle_worker_death(event.index), *self._maybe_report_applied()]

    def _handle_worker_death(self, index: int) -> list[Action]:
        self._live_workers.discard(index)
        actions: list[Action] = []
        for client in [
            other.client for other in self._subscribers.values() if other.role == "worker" and other.index == index
        ]:
            actions += self._drop_subscriber(client)
        self._slots.on_worker_death(index)
        lost_partitions: list[Partition] = []
        lost_epochs = self._lost_epochs.pop(index, {})  # if the worker was still held: those of its predecessor
        for image in self._images.values():
            for partition in image.partitions:
                key = (image.topic_id, partition.index)
                if partition.owner == index and partition.leader == self.node_id:
                    lost_partitions.append(key)
                    lost_epochs[key] = max(partition.leader_epoch, lost_epochs.get(key, -1))
                elif partition.owner == index and key not in lost_epochs:  # the next worker can follow it immediately
                    actions.append(
                        AssignSlot(
                            partition.slot,
                            image.topic_id,
                            partition.index,
                            index,
                            partition.log_dir,
                            partition.leader_epoch,
                        )
                    )
        if lost_epochs:
            self._lost_epochs[index] = lost_epochs
        if lost_partitions:
            actions.append(RaiseEpochs(tuple(lost_partitions)))
        return actions + self._free_retired()

    def _release_held_workers(self) -> list[Action]:
        actions: list[Action] = []
        for index in list(self._lost_epochs):
            lost_epochs = self._lost_epochs[index]
            for partition in list(lost_epochs):
                image = self._published_image(partition)
                if image is None or self._leadership_has_ended(lost_epochs[partition], image):
                    del lost_epochs[partition]
            if not lost_epochs:
                del self._lost_epochs[index]
                for subscriber in self._subscribers.values():
                    if subscriber.held and subscriber.index == index:
                        subscriber.held = False
                        actions.append(Send(subscriber.client, self._full_image(subscriber.role)))
        return actions

    def _on_worker_applied(self, event: WorkerApplied, now_ms: int) -> list[Action]:
        subscriber = self._subscribers.get(event.client)
        if subscriber is None or subscriber.role != "worker":
            return []
        subscriber.applied_version = max(subscriber.applied_version, event.applied.version)
        self._slots.on_applied(subscriber.index, event.applied.version)
        actions = self._free_retired()
        if event.applied.failures or subscriber.has_failures:
            subscriber.has_failures = bool(event.applied.failures)
            names = {
                slot: f"{self._state.topics_by_id.get(topic_id, '?')}-{index}"
                for (topic_id, index), slot in self._slots.used.items()
            }
            reasons = {names.get(slot, f"slot {slot}"): reason for slot, reason in event.applied.failures.items()}
            failed_partitions = tuple(key for key, slot in self._slots.used.items() if slot in event.applied.failures)
            actions.append(ReportFailures(reasons, subscriber.index, failed_partitions))
        return actions + self._maybe_report_applied()

    def _maybe_report_applied(self) -> list[Action]:
        """Returns AppliedEverywhere when all live workers have applied a newer version. A live worker that
        has not (re)subscribed may serve any older version, as all workers do right after a restart of
        the controller.
        """
        applied = {
            subscriber.index: subscriber.applied_version
            for subscriber in self._subscribers.values()
            if subscriber.role == "worker"
        }
        if not self._live_workers <= applied.keys():
            return []
        version = min(applied.values(), default=self._version)
        if version <= self._applied_version:
            return []
        self._applied_version = version
        return [AppliedEverywhere(version)]

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        self._slots.check(self._live_workers)
        for subscriber in self._subscribers.values():
            assert subscriber.held == (subscriber.role == "worker" and subscriber.index in self._lost_epochs), "H3"
            assert subscriber.held or subscriber.role != "worker" or subscriber.index in self._live_workers, "H3"
        placed: set[Partition] = set()
        for name, image in self._images.items():
            assert image.name == name and [partition.index for partition in image.partitions] == list(
                range(len(image.partitions))
            ), "H6"
            for partition in image.partitions:
                key = (image.topic_id, partition.index)
                assert self._slots.get(key) == partition.slot, "H6"
                assert partition.owner in (OWNER_NONE, owner_of(image.topic_id, partition.index, self._worker_count)), (
                    "H5"
                )
                assert partition.owner == OWNER_NONE or partition.slot >= 0, "H6"
                assert partition.slot < 0 or self.node_id in partition.replicas, "H6"
                if partition.slot >= 0:
                    placed.add(key)
        assert placed == self._slots.used.keys(), "H6"
        assert {image.topic_id: name for name, image in self._images.items()} == self._names
        assert self._applied_version <= self._version, "H4"


_HANDLERS: dict[type, Callable[[HostCore, Any, int], list[Action]]] = {
    Started: HostCore._on_started,
    Publish: HostCore._on_publish,
    StateReplaced: HostCore._on_state_replaced,
    ControllerChanged: HostCore._on_controller_changed,
    SubscriberJoined: HostCore._on_subscriber_joined,
    SubscriberLeft: HostCore._on_subscriber_left,
    WorkerDied: HostCore._on_worker_died,
    WorkerApplied: HostCore._on_worker_applied,
    CommandRequested: HostCore._on_command_requested,
    MoveEnded: HostCore._on_move_ended,
    CommandEnded: HostCore._on_command_ended,
    DirectoriesMeasured: HostCore._on_directories_measured,
    Tick: HostCore._on_tick,
}
