"""The worker's view of the metadata. Sans-I/O: messages of the controller in, one list of changes
out.

    catalog.on_image(image) / on_topic_put / on_topic_removed / on_broker_config / on_message /
    apply_updates  -> Changes

Invariants
    W1  every worker knows every topic, because it can read any partition; it owns those partitions
        whose owner is its index.
    W2  an image is complete: items that it does not name are removed, and items that are already
        applied cause no change.
    W3  a topic with the same name but another id is a different topic: the old one is removed
        first.
    W4  a partition whose log could not be opened stays wanted; it is opened again at the next
        image, and by retry() if the cause was transient.
    W5  files are deleted when the metadata shows that this host no longer has a replica of the
        partition (or that there is no such topic or partition); a partition that is merely not
        served here keeps its files. Until this host's current registration appears in the metadata,
        the metadata is outdated, and replicas that it shows as removed may have been added again
        since: files are kept, and checked again once it appears (`is_left_behind`).
    W6  a partition with several replicas gets its assignment after it was opened and before the
        change counts as applied, and again whenever the assignment changes. Once a partition has
        had an assignment, it gets new ones until it is closed.
    W7  a view (view.of) is sent to the reactor again whenever the slots of its base topic change:
        the reactor never reads a view from a slot that its base no longer has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from mqd.base.collector import paused
from mqd.base.views import VIEW_OF
from mqd.cluster.host.messages import (
    BrokerConfigPut,
    BrokerImage,
    BrokersPut,
    FromController,
    Image,
    PartitionImage,
    PartitionsPut,
    TopicImage,
    TopicPut,
    TopicRemoved,
)
from mqd.worker.assignments import Assignment, ClusterView, assignment_of, needs_assignment, settings_of

Key = tuple[bytes, int]  # topic id, partition index


class OwnedPartition(msgspec.Struct, frozen=True):
    """A partition that this worker must serve."""

    topic: str
    topic_id: bytes
    index: int
    slot: int
    log_dir: int
    leader_epoch: int
    # it gets assignments (W6): it has several replicas, or its only replica does not lead yet
    gets_assignments: bool = False
    has_other_replicas: bool = False  # other hosts have replicas of it

    @property
    def key(self) -> Key:
        return self.topic_id, self.index

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"


class Changes(msgspec.Struct, frozen=True):
    """The changes to carry out, in this order, except that `brokers` come first."""

    forget_topics: list[TopicImage] = []  # the reactor must forget these
    close: list[OwnedPartition] = []  # close but keep the files (the partition exists elsewhere)
    delete: list[OwnedPartition] = []  # close and delete the files
    put_topics: list[TopicImage] = []  # new, or with changed fields that the reactor knows
    open: list[OwnedPartition] = []
    set_epoch: list[OwnedPartition] = []
    set_options: list[OwnedPartition] = []
    assign: list[tuple[OwnedPartition, Assignment]] = []
    brokers: list[BrokerImage] | None = None  # None: unchanged


class Catalog:
    """`static_config`: from this host's configuration file; run-time settings override it."""

    def __init__(self, worker: int, static_config: Mapping[str, str] | None = None, incarnation: int | None = None):
        self._worker = worker
        self._incarnation = incarnation
        self._static_config = dict(static_config or {})
        self.cluster = ClusterView()
        self.assigned: dict[Key, Assignment] = {}  # last sent to the reactor, or about to be
        self.retiring: dict[bytes, None] = {}  # topics with retiring partitions
        self._touched: dict[bytes, None] | None = {}  # topics whose assignments may have changed; None = all
        self.topics: dict[bytes, TopicImage] = {}
        self._views: dict[str, dict[bytes, None]] = {}  # topic -> its views
        self.owned: dict[Key, OwnedPartition] = {}
        self.broker_config: dict[str, str] = {}
        self._failed: dict[Key, bool] = {}  # partition -> whether the cause may go away by itself
        # names of all partitions by slot; built when a log line needs one
        self._names: dict[int, str] | None = None

    @property
    def has_caught_up(self) -> bool:
        """Whether the metadata contains this host's current registration (W5)."""
        own_broker = self.cluster.brokers.get(self.cluster.node_id)
        return self._incarnation is None or (own_broker is not None and own_broker.incarnation == self._incarnation)

    def is_left_behind(self, topic_id: bytes, index: int) -> bool:
        """Whether the topic exists and, according to the metadata, this host has no replica of the
        partition, so its files may be deleted (W5).
        """
        topic = self.topics.get(topic_id)
        return (
            topic is not None
            and self.has_caught_up
            and (topic_id, index) not in self.owned
            and self._has_no_replica(topic, (topic_id, index))
        )

    def record_failure(self, key: Key, is_transient: bool = False) -> None:
        """Records that the partition could not be opened (W4). `is_transient`: the cause may go
        away by itself, such as a lack of space, memory or descriptors.
        """
        self._failed[key] = is_transient

    def may_retry(self) -> bool:
        return any(self._failed.values())

    def retry(self) -> Changes:
        """Reopens the partitions whose failures were transient."""
        keys = [key for key, is_transient in self._failed.items() if is_transient and key in self.owned]
        for key in keys:
            del self._failed[key]
        return self.reopen(keys)

    def reopen(self, keys: Iterable[Key]) -> Changes:
        """Opens partitions that are closed, or could not be opened; with their assignments (W6)."""
        return self._add_assignments(Changes(open=[self.owned[key] for key in keys]))

    def failed_partitions(self) -> list[OwnedPartition]:
        return [self.owned[key] for key in self._failed if key in self.owned]

    def topic_of(self, owned: OwnedPartition) -> TopicImage:
        return self.topics[owned.topic_id]

    def base_of(self, view: TopicImage) -> TopicImage | None:
        """The base topic of a view."""
        return next((topic for topic in self.topics.values() if topic.name == view.config[VIEW_OF]), None)

    def slots_of(self, matches: Callable[[str], bool]) -> list[int]:
        """The slots of all replicas on this host of topics whose name matches."""
        return [
            partition.slot
            for topic in self.topics.values()
            if matches(topic.name)
            for partition in topic.partitions
            if partition.slot >= 0
        ]

    def partition_name(self, slot: int) -> str:
        """The name of any partition, even of one that another worker owns: the worker that receives
        a batch checks it, and logs the name if it refuses the batch.
        """
        if self._names is None:
            self._names = {
                partition.slot: f"{topic.name}-{partition.index}"
                for topic in self.topics.values()
                for partition in topic.partitions
            }
        return self._names.get(slot, f"slot {slot}")

    # -- messages ----------------------------------------------------------------------------------

    def on_image(self, image: Image) -> Changes:
        with paused():
            return self._on_image(image)

    def _on_image(self, image: Image) -> Changes:
        published = {topic.topic_id: topic for topic in image.topics}
        self.cluster = ClusterView(
            image.node_id, {broker.node_id: broker for broker in image.brokers}, dict(image.broker_default_config)
        )
        changes = Changes(brokers=self._unfenced_brokers()) if image.node_id >= 0 else Changes()
        for topic in [topic for topic_id, topic in self.topics.items() if topic_id not in published]:
            self._remove(topic, changes)
        config_changed = image.broker_config != self.broker_config
        self.broker_config = dict(image.broker_config)
        retry_keys, self._failed = set(self._failed), {}
        for topic in image.topics:
            self._put(topic, changes, config_changed, retry_keys)
        self._touched = None
        return self._add_assignments(changes)

    def on_message(self, message: FromController) -> Changes:
        """TopicPut, PartitionsPut, TopicRemoved, BrokersPut, BrokerConfigPut; others change
        nothing.
        """
        return self.apply_updates([message])

    def apply_updates(self, updates: Sequence[FromController]) -> Changes:
        """Applies the updates of one version in order; returns their changes together. No update
        undoes an earlier one of the same version.
        """
        changes = Changes()
        for update in updates:
            if isinstance(update, TopicPut):
                self._apply_topic_put(update.topic, changes)
            elif isinstance(update, PartitionsPut):
                self._apply_partitions_put(update, changes)
            elif isinstance(update, TopicRemoved):
                if update.topic_id in self.topics:
                    self._remove(self.topics[update.topic_id], changes)
            elif isinstance(update, BrokersPut):
                self.cluster.brokers = {broker.node_id: broker for broker in update.brokers}
                changes = msgspec.structs.replace(changes, brokers=self._unfenced_brokers())
                self._touched = None
            elif isinstance(update, BrokerConfigPut):
                self._apply_config_put(update.config, update.default_config, changes)
        # each topic once, in its last state
        changes.put_topics[:] = {topic.topic_id: topic for topic in changes.put_topics}.values()
        return self._add_assignments(changes)

    def on_topic_put(self, topic: TopicImage) -> Changes:
        changes = Changes()
        self._apply_topic_put(topic, changes)
        return self._add_assignments(changes)

    def on_topic_removed(self, topic_id: bytes) -> Changes:
        changes = Changes()
        if topic_id in self.topics:
            self._remove(self.topics[topic_id], changes)
        return changes

    def on_broker_config(self, config: dict[str, str], default_config: dict[str, str] | None = None) -> Changes:
        changes = Changes()
        self._apply_config_put(config, default_config, changes)
        return self._add_assignments(changes)

    # -- differences -------------------------------------------------------------------------------

    def _apply_topic_put(self, topic: TopicImage, changes: Changes) -> None:
        for namesake in [
            other for other in self.topics.values() if other.name == topic.name and other.topic_id != topic.topic_id
        ]:
            self._remove(namesake, changes)
        self._put(topic, changes, False, set())

    def _apply_partitions_put(self, put: PartitionsPut, changes: Changes) -> None:
        topic = self.topics.get(put.topic_id)
        if topic is None:
            return
        partitions = list(topic.partitions)
        for partition in put.partitions:
            if partition.index < len(partitions):
                partitions[partition.index] = partition
        self._put(msgspec.structs.replace(topic, partitions=partitions), changes, False, set())

    def _apply_config_put(
        self, config: dict[str, str], default_config: dict[str, str] | None, changes: Changes
    ) -> None:
        if default_config is not None:
            self.cluster.default_config = dict(default_config)
        self._touched = None
        if config == self.broker_config:
            return
        self.broker_config = dict(config)
        changes.set_options.extend(
            owned for owned in self.owned.values() if owned.key not in self._failed and owned not in changes.set_options
        )

    def _unfenced_brokers(self) -> list[BrokerImage]:
        return [broker for broker in self.cluster.brokers.values() if not broker.fenced]

    def _owned_partitions(self, topic: TopicImage) -> dict[Key, OwnedPartition]:
        partitions: Iterable[PartitionImage] = (p for p in topic.partitions if p.owner == self._worker and p.slot >= 0)
        return {(topic.topic_id, p.index): self._make_owned(topic, p) for p in partitions}

    def _make_owned(self, topic: TopicImage, partition: PartitionImage) -> OwnedPartition:
        previous = self.owned.get((topic.topic_id, partition.index))
        had_assignments = previous is not None and previous.gets_assignments
        return OwnedPartition(
            topic.name,
            topic.topic_id,
            partition.index,
            partition.slot,
            partition.log_dir,
            partition.leader_epoch,
            had_assignments or needs_assignment(partition, self.cluster.node_id),
            len(partition.replicas) > 1,
        )

    def _remove(self, topic: TopicImage, changes: Changes) -> None:
        del self.topics[topic.topic_id]
        self.retiring.pop(topic.topic_id, None)
        self._names = None
        self._views.get(topic.config.get(VIEW_OF, ""), {}).pop(topic.topic_id, None)
        changes.forget_topics.append(topic)
        for key in self._owned_partitions(topic):
            if key in self.owned:
                changes.delete.append(self.owned.pop(key))
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self._failed.pop(key, None)
        self.assigned.pop(key, None)

    def _has_no_replica(self, topic: TopicImage, key: Key) -> bool:
        """Whether this host no longer has a replica of the partition (W5). If it still has one,
        this worker lost the partition only because another worker owns it now, or because the log
        directory is offline.
        """
        if self.cluster.node_id < 0 or not self.has_caught_up:
            return False
        if key[1] < len(topic.partitions):
            return self.cluster.node_id not in topic.partitions[key[1]].replicas
        return 0 <= topic.partition_count <= key[1]

    def _put(self, topic: TopicImage, changes: Changes, broker_config_changed: bool, retry_keys: set[Key]) -> None:
        previous = self.topics.get(topic.topic_id)
        self.topics[topic.topic_id] = topic
        self._names = None
        if self._touched is not None:
            self._touched[topic.topic_id] = None
        if any(partition.retiring for partition in topic.partitions):
            self.retiring[topic.topic_id] = None
        else:
            self.retiring.pop(topic.topic_id, None)
        if topic.config.get(VIEW_OF):
            self._views.setdefault(topic.config[VIEW_OF], {})[topic.topic_id] = None
        if previous is None or _reactor_fields(previous) != _reactor_fields(topic):
            changes.put_topics.append(topic)
            changes.put_topics.extend(self.topics[view] for view in self._views.get(topic.name, ()))  # W7
        owned_now = self._owned_partitions(topic)
        previous_keys = (
            [(topic.topic_id, partition.index) for partition in previous.partitions] if previous is not None else []
        )
        for key in [key for key in previous_keys if key in self.owned and key not in owned_now]:
            (changes.delete if self._has_no_replica(topic, key) else changes.close).append(self.owned.pop(key))
            self._forget(key)
        options_changed = broker_config_changed or (previous is not None and previous.config != topic.config)
        for key, owned in owned_now.items():
            self._add_changes(owned, self.owned.get(key), changes, options_changed, key in retry_keys)
            self.owned[key] = owned

    def _add_assignments(self, changes: Changes) -> Changes:
        """Adds new and changed assignments (W6)."""
        for owned in [*changes.open, *changes.close, *changes.delete]:
            self.assigned.pop(owned.key, None)
            if self._touched is not None:
                self._touched[owned.topic_id] = None
        touched, self._touched = self._touched, {}
        config = {**self._static_config, **self.broker_config}
        for topic in (
            list(self.topics.values())
            if touched is None
            else [self.topics[topic_id] for topic_id in touched if topic_id in self.topics]
        ):
            assignable = [
                owned_partition
                for p in topic.partitions
                if (owned_partition := self.owned.get((topic.topic_id, p.index))) is not None
                and owned_partition.gets_assignments
            ]
            settings = settings_of(topic, self.cluster, config) if assignable else None
            for owned in assignable:
                assert settings is not None
                assignment = assignment_of(topic, topic.partitions[owned.index], self.cluster, settings)
                if owned.key not in self._failed and self.assigned.get(owned.key) != assignment:
                    self.assigned[owned.key] = assignment
                    changes.assign.append((owned, assignment))
        return changes

    def _add_changes(
        self,
        owned: OwnedPartition,
        old: OwnedPartition | None,
        changes: Changes,
        options_changed: bool,
        must_reopen: bool,
    ) -> None:
        if old is None or must_reopen:
            changes.open.append(owned)
        elif owned.key in self._failed:
            pass
        elif (old.slot, old.log_dir) != (owned.slot, owned.log_dir):
            changes.close.append(old)
            changes.open.append(owned)
        else:
            if old.leader_epoch != owned.leader_epoch and not owned.gets_assignments:
                changes.set_epoch.append(owned)
            if options_changed:
                changes.set_options.append(owned)


def _reactor_fields(topic: TopicImage) -> list[tuple[int, ...]]:
    """The fields of the topic's partitions that the reactor knows."""
    return [(p.slot, p.log_dir, p.leader, p.leader_epoch, p.retiring, p.redirect) for p in topic.partitions]
