"""What one host does with committed metadata: partition slots, owners, what its processes are told, and when all of them have it. Sans-I/O.

The metadata core decides what is true for the cluster; this core turns it into the host's own: a slot in the control segment and an owning worker for each
partition (not in the log: they live as long as the control segment), messages to subscribers, and the knowledge of who has applied what.

Invariants (check())
    H1  a slot is free, used by one partition, or retiring; never two of them
    H2  a retiring slot is freed only after every worker that was alive when it retired has applied the removal or has died
    H3  a worker whose predecessor died is told nothing before each partition of that predecessor has a new leader epoch (or is gone)
    H4  the applied version never falls, and rises only to what every worker that lives has applied
    H5  the owner of a partition is a function of topic id, index and worker count alone
    H6  subscribers are told of partitions that have a slot only; those are the first ones of their topic
Bounds: COMMANDS_MAX commands under way.
"""

import heapq
import zlib
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import msgspec

from mqd.cluster import controller_messages as messages
from mqd.cluster.metadata_core import Publish
from mqd.cluster.metadata_records import PartitionState, TopicState
from mqd.cluster.metadata_state import INTERNAL_TOPICS, MetadataState
from mqd.protocol.errors import ErrorCode

OWNER_NONE = 65535
LOG_DIR_NONE = 255
COMMANDS_MAX = 10_000
COMMAND_WAIT_MS_MAX = 30_000

Partition = tuple[bytes, int]  # topic id, index


def owner_of(topic_id: bytes, index: int, worker_count: int) -> int:
    """The partitions of one topic go round the workers; where the round begins depends on the topic."""
    return (zlib.crc32(topic_id) + index) % worker_count


# -- events --------------------------------------------------------------------------------------------------------------------


class SlotSeen(NamedTuple):
    """A used slot found in the control segment when the controller started."""

    slot: int
    topic_id: bytes
    index: int
    leader_epoch: int
    owner: int
    stale: bool  # its owner has died since the slot was assigned


class Started(msgspec.Struct, frozen=True):
    """First event: the committed state and what the control segment held."""

    state: MetadataState
    slots: tuple[SlotSeen, ...]
    torn: tuple[int, ...]  # slots whose identity the predecessor was writing when it died
    alive: dict[int, int]  # workers that live now, subscribed or not -> generation


class SubscriberJoined(msgspec.Struct, frozen=True):
    client: Hashable
    subscribe: messages.Subscribe


class SubscriberLeft(msgspec.Struct, frozen=True):
    client: Hashable


class WorkerDied(msgspec.Struct, frozen=True):
    index: int
    generation: int


class WorkerApplied(msgspec.Struct, frozen=True):
    client: Hashable
    applied: messages.Applied


class CommandRequested(msgspec.Struct, frozen=True):
    """What the owner of one partition is to do, without any record being written."""

    client: Hashable
    request_id: int
    change: messages.DeleteRecords | messages.MoveReplica


class MoveEnded(msgspec.Struct, frozen=True):
    """A worker says that a partition's files lie whole in another log directory."""

    client: Hashable
    moved: messages.MoveCompleted


class CommandEnded(msgspec.Struct, frozen=True):
    client: Hashable
    done: messages.CommandDone


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Started | Publish | SubscriberJoined | SubscriberLeft | WorkerDied | WorkerApplied | CommandRequested | MoveEnded | CommandEnded | Tick

# -- actions -------------------------------------------------------------------------------------------------------------------


class AssignSlot(msgspec.Struct, frozen=True):
    slot: int
    topic_id: bytes
    index: int
    owner: int
    log_dir: int
    leader_epoch: int


class ClearSlot(msgspec.Struct, frozen=True):
    slot: int


class Send(msgspec.Struct, frozen=True):
    client: Hashable
    message: messages.FromController


class AppliedEverywhere(msgspec.Struct, frozen=True):
    """Every worker that lives serves this version: the control segment is told, and the metadata core."""

    version: int


class RaiseEpochs(msgspec.Struct, frozen=True):
    """To the metadata core (LeadershipsLost)."""

    partitions: tuple[Partition, ...]


class RecordMove(msgspec.Struct, frozen=True):
    """To the metadata core (MoveCompleted)."""

    topic_id: bytes
    index: int
    directory: str  # its id


class Report(msgspec.Struct, frozen=True):
    """For the log: partitions that a worker does not serve."""

    failures: dict[str, str]


Action = AssignSlot | ClearSlot | Send | AppliedEverywhere | RaiseEpochs | RecordMove | Report


class _Subscriber(msgspec.Struct):
    client: Hashable
    role: str
    index: int
    applied_version: int = -1
    held: bool = False  # H3: waits for new leader epochs


class _Command(msgspec.Struct):
    client: Hashable
    request_id: int
    worker: Hashable
    since_ms: int


class HostCore:
    """`log_dirs`: directory id -> index in log.dirs, usable ones only. The state given with Started is the metadata core's committed one and is only read."""

    def __init__(self, node_id: int, controller_id: int, worker_count: int, slot_count: int, log_dirs: Mapping[str, int]) -> None:
        self.node_id = node_id
        self._controller_id = controller_id
        self._worker_count = worker_count
        self._slot_count = slot_count
        self._log_dirs = dict(log_dirs)
        self._state = MetadataState()
        self._images: dict[str, messages.TopicImage] = {}
        self._names: dict[bytes, str] = {}  # topic id -> name, of the images
        self._slots: dict[Partition, int] = {}
        self._free: list[int] = list(range(slot_count))  # heap
        self._retiring: dict[int, tuple[int, set[int]]] = {}  # slot -> (version of the removal, workers that may still use it)
        self._unplaced: dict[Partition, None] = {}  # no slot was free
        self._alive: set[int] = set()
        self._generations: dict[int, int] = {}
        self._fenced: dict[int, dict[Partition, int]] = {}  # worker -> partition -> the leader epoch that died with it
        self._subscribers: dict[Hashable, _Subscriber] = {}
        self._commands: dict[int, _Command] = {}
        self._command_id = 0
        self._version = 0
        self._applied_version = -1

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        return _HANDLERS[type(event)](self, event, now_ms)

    # -- metadata ----------------------------------------------------------------------------------------------------------

    def _on_started(self, event: Started, now_ms: int) -> list[Action]:
        self._state, self._version = event.state, event.state.version
        self._alive, self._generations = set(event.alive), dict(event.alive)
        actions: list[Action] = []
        lost: list[SlotSeen] = []
        used: set[int] = set()
        for seen in event.slots:
            used.add(seen.slot)
            partition = (seen.topic_id, seen.index)
            if self._partition_state(partition) is None or partition in self._slots:
                self._retiring[seen.slot] = (self._version, set(self._alive))
                continue
            self._slots[partition] = seen.slot
            if seen.stale:
                lost.append(seen)
        self._adopt_torn(event, used)
        self._free = [slot for slot in range(self._slot_count) if slot not in used]
        # A stale slot stays as it is until its new epoch is committed: it is the only witness of the death, should this controller die before.
        in_place = {(seen.topic_id, seen.index): seen.leader_epoch for seen in event.slots}
        for topic in event.state.topics.values():
            actions += self._put(topic, in_place)
        for seen in lost:
            self._fenced.setdefault(seen.owner, {})[(seen.topic_id, seen.index)] = seen.leader_epoch
        if lost:
            actions.append(RaiseEpochs(tuple((seen.topic_id, seen.index) for seen in lost)))
        return actions + self._free_retired() + self._unfence() + self._maybe_applied()

    def _adopt_torn(self, event: Started, used: set[int]) -> None:
        """A torn slot was being assigned to a partition that has no other: one that workers know already (it had a new epoch) before one that nobody was told of.
        With no such partition it was being cleared, so nobody uses it."""
        homeless = [
            (-partition.leader_epoch, topic.topic_id, partition.index)
            for topic in event.state.topics.values()
            for partition in topic.partitions
            if (topic.topic_id, partition.index) not in self._slots
        ]
        for slot, (_, topic_id, index) in zip(event.torn, sorted(homeless)):
            self._slots[(topic_id, index)] = slot
            used.add(slot)

    def _partition_state(self, partition: Partition) -> PartitionState | None:
        name = self._state.topics_by_id.get(partition[0])
        if name is None or not 0 <= partition[1] < len(self._state.topics[name].partitions):
            return None
        return self._state.topics[name].partitions[partition[1]]

    def _on_publish(self, event: Publish, now_ms: int) -> list[Action]:
        """`self._state` is the metadata core's committed state and has moved already; this is the news of it. What concerns no subscriber (a block of producer ids)
        leaves the version alone: all processes of the host always agree on the version of the last news."""
        if event.topics or event.removed or event.broker_config is not None or event.settings_changed:
            self._version = event.version
        actions: list[Action] = []
        for topic in event.removed:
            actions += self._remove(topic)
        for topic in event.topics:
            actions += self._put(topic, {})
            if not self._waits_for_slots(topic):
                actions += self._broadcast(messages.TopicPut(event.version, self._images[topic.name]))
        if event.broker_config is not None:
            actions += self._broadcast(messages.BrokerConfigPut(event.version, event.broker_config, self._state.broker_configs.get("", {})))
        for group_id in event.groups:
            config = self._state.group_configs.get(group_id, {})
            actions += self._broadcast(messages.GroupConfigPut(self._version, group_id, config), role="acceptor")
        if event.settings_changed:
            actions += self._broadcast(self._settings(event))
        return actions + self._unfence() + self._maybe_applied()

    def _settings(self, event: Publish) -> messages.SettingsPut:
        state = self._state
        return messages.SettingsPut(
            event.version,
            self._client_quotas() if event.client_quotas_changed else None,
            state.features if event.features_changed else None,
        )

    def _client_quotas(self) -> list[messages.ClientQuota]:
        return [messages.ClientQuota(entity, quotas) for entity, quotas in self._state.client_quotas.items()]

    def _put(self, topic: TopicState, in_place: Mapping[Partition, int]) -> list[Action]:
        actions: list[Action] = []
        old = self._images.get(topic.name)
        images = []
        for partition in topic.partitions:
            before = old.partitions[partition.index] if old is not None and old.topic_id == topic.topic_id and partition.index < len(old.partitions) else None
            image = self._image(topic.topic_id, partition)
            if image.slot < 0:  # H6: no slot is free; _place_waiting comes back to it
                continue
            images.append(image)
            unchanged = before is not None and (before.slot, before.leader_epoch, before.log_dir) == (image.slot, image.leader_epoch, image.log_dir)
            if not unchanged and in_place.get((topic.topic_id, partition.index)) != partition.leader_epoch:
                actions.append(AssignSlot(image.slot, topic.topic_id, image.index, image.owner, image.log_dir, image.leader_epoch))
        if images:
            self._images[topic.name] = messages.TopicImage(topic.name, topic.topic_id, images, topic.config, topic.name in INTERNAL_TOPICS)
            self._names[topic.topic_id] = topic.name
        return actions

    def _image(self, topic_id: bytes, partition: PartitionState) -> messages.PartitionImage:
        key = (topic_id, partition.index)
        owner, log_dir = OWNER_NONE, LOG_DIR_NONE
        slot = self._slots.get(key, -1)
        if self.node_id in partition.replicas:
            directory = partition.directories[partition.replicas.index(self.node_id)]
            if slot < 0:
                slot = self._take_slot(key)
            if directory in self._log_dirs:
                owner, log_dir = owner_of(topic_id, partition.index, self._worker_count), self._log_dirs[directory]
        return messages.PartitionImage(
            index=partition.index,
            slot=slot,
            owner=owner,
            log_dir=log_dir,
            leader=partition.leader,
            leader_epoch=partition.leader_epoch,
            replicas=list(partition.replicas),
            in_sync_replicas=list(partition.in_sync_replicas),
        )

    def _take_slot(self, partition: Partition) -> int:
        if not self._free:
            self._unplaced[partition] = None
            return -1
        self._unplaced.pop(partition, None)
        slot = self._slots[partition] = heapq.heappop(self._free)
        return slot

    def _remove(self, topic: TopicState) -> list[Action]:
        for partition in topic.partitions:
            self._unplaced.pop((topic.topic_id, partition.index), None)
        image = self._images.get(topic.name)
        if image is None or image.topic_id != topic.topic_id:
            return []
        del self._images[topic.name], self._names[topic.topic_id]
        slots = []
        for partition in image.partitions:
            slot = self._slots.pop((topic.topic_id, partition.index), -1)
            if slot >= 0:
                self._retiring[slot] = (self._version, set(self._alive))
                slots.append(slot)
        return self._broadcast(messages.TopicRemoved(self._version, topic.name, topic.topic_id, slots)) + self._free_retired()

    def _free_retired(self) -> list[Action]:
        ready = [slot for slot, (_, users) in self._retiring.items() if not users]
        actions: list[Action] = []
        for slot in ready:
            del self._retiring[slot]
            heapq.heappush(self._free, slot)
            actions.append(ClearSlot(slot))
        if ready and self._unplaced:
            actions += self._place_waiting()
        return actions

    def _place_waiting(self) -> list[Action]:
        actions: list[Action] = []
        for name in {self._state.topics_by_id.get(topic_id): None for topic_id, _ in self._unplaced}:
            topic = self._state.topics.get(name) if name is not None else None
            if topic is not None:
                actions += self._put(topic, {})
                if not self._waits_for_slots(topic):
                    actions += self._broadcast(messages.TopicPut(self._version, self._images[topic.name]))
        return actions

    def _waits_for_slots(self, topic: TopicState) -> bool:
        """Its request is answered when the slots are there and every worker has them."""
        return any((topic.topic_id, partition.index) in self._unplaced for partition in topic.partitions)

    def topic_image(self, topic: TopicState) -> messages.TopicImage:
        """For an answer: with slots when the topic exists; a validated topic that does not has none."""
        image = self._images.get(topic.name)
        if image is not None and image.topic_id == topic.topic_id:
            return image
        partitions = [
            messages.PartitionImage(
                partition.index, -1, OWNER_NONE, LOG_DIR_NONE, partition.leader, partition.leader_epoch, list(partition.replicas), list(partition.in_sync_replicas)
            )
            for partition in topic.partitions
        ]
        return messages.TopicImage(topic.name, topic.topic_id, partitions, topic.config, topic.name in INTERNAL_TOPICS)

    # -- subscribers -------------------------------------------------------------------------------------------------------

    def _on_subscriber_joined(self, event: SubscriberJoined, now_ms: int) -> list[Action]:
        role, index = event.subscribe.role, event.subscribe.index
        actions: list[Action] = []
        if role == "worker":
            known = self._generations.get(index)
            if known is not None and known != event.subscribe.generation:
                actions += self._worker_died(index)
            for client in [other.client for other in self._subscribers.values() if other.role == "worker" and other.index == index]:
                actions += self._drop(client)
            self._generations[index] = event.subscribe.generation
            self._alive.add(index)
        subscriber = self._subscribers[event.client] = _Subscriber(event.client, role, index)
        if role == "worker" and index in self._fenced:
            subscriber.held = True
            return actions
        return [*actions, Send(event.client, self._whole())]

    def _whole(self) -> messages.Image:
        state = self._state
        brokers = [messages.BrokerImage(broker.node_id, broker.host, broker.port, broker.rack, broker.epoch) for broker in state.brokers.values()]
        config = state.broker_config(self.node_id)
        return messages.Image(
            self._version, state.cluster_id, self._controller_id, brokers, list(self._images.values()), config, state.broker_configs.get("", {}), list(state.removed),
            state.group_configs, self._client_quotas(), state.features,
        )  # fmt: skip

    def _broadcast(self, message: messages.FromController, role: str | None = None) -> list[Action]:
        """To all; or to those of one role."""
        return [Send(one.client, message) for one in self._subscribers.values() if not one.held and (role is None or one.role == role)]

    def _on_subscriber_left(self, event: SubscriberLeft, now_ms: int) -> list[Action]:
        return [*self._drop(event.client), *self._maybe_applied()]

    def _drop(self, client: Hashable) -> list[Action]:
        self._subscribers.pop(client, None)
        self._commands = {number: command for number, command in self._commands.items() if command.client != client}
        actions: list[Action] = []
        for number in [number for number, command in self._commands.items() if command.worker == client]:
            command = self._commands.pop(number)
            text = "The worker that owns the partition was restarted; try again."
            actions.append(Send(command.client, messages.Answer(command.request_id, ErrorCode.NOT_LEADER_OR_FOLLOWER, text)))
        return actions

    def _on_worker_died(self, event: WorkerDied, now_ms: int) -> list[Action]:
        if self._generations.get(event.index, event.generation) != event.generation:
            return []  # its successor has subscribed: the death was noticed then
        self._generations.pop(event.index, None)
        return [*self._worker_died(event.index), *self._maybe_applied()]

    def _worker_died(self, index: int) -> list[Action]:
        self._alive.discard(index)
        actions: list[Action] = []
        for client in [other.client for other in self._subscribers.values() if other.role == "worker" and other.index == index]:
            actions += self._drop(client)
        for _, users in self._retiring.values():
            users.discard(index)
        lost: dict[Partition, int] = {}
        for image in self._images.values():
            lost.update(((image.topic_id, partition.index), partition.leader_epoch) for partition in image.partitions if partition.owner == index)
        if lost:
            self._fenced[index] = lost
            actions.append(RaiseEpochs(tuple(lost)))
        return actions + self._free_retired()

    def _told(self, partition: Partition) -> messages.PartitionImage | None:
        """As subscribers know it. The committed state may be ahead: several batches are committed at once, their publications come one by one."""
        image = self._images.get(self._names.get(partition[0], ""))
        return image.partitions[partition[1]] if image is not None and partition[1] < len(image.partitions) else None

    def _unfence(self) -> list[Action]:
        actions: list[Action] = []
        for index in list(self._fenced):
            waiting = self._fenced[index]
            for partition in list(waiting):
                image = self._told(partition)
                if image is None or image.leader_epoch > waiting[partition]:
                    del waiting[partition]
            if not waiting:
                del self._fenced[index]
                for subscriber in self._subscribers.values():
                    if subscriber.held and subscriber.index == index:
                        subscriber.held = False
                        actions.append(Send(subscriber.client, self._whole()))
        return actions

    def _on_worker_applied(self, event: WorkerApplied, now_ms: int) -> list[Action]:
        subscriber = self._subscribers.get(event.client)
        if subscriber is None or subscriber.role != "worker":
            return []
        subscriber.applied_version = max(subscriber.applied_version, event.applied.version)
        for version, users in self._retiring.values():
            if event.applied.version >= version:
                users.discard(subscriber.index)
        actions = self._free_retired()
        if event.applied.failures:
            names = {slot: f"{self._state.topics_by_id.get(topic_id, '?')}-{index}" for (topic_id, index), slot in self._slots.items()}
            actions.append(Report({names.get(slot, f"slot {slot}"): reason for slot, reason in event.applied.failures.items()}))
        return actions + self._maybe_applied()

    def _maybe_applied(self) -> list[Action]:
        """A worker that lives and has not subscribed (again), as all of them just after the controller was restarted, serves some older version."""
        applied = {subscriber.index: subscriber.applied_version for subscriber in self._subscribers.values() if subscriber.role == "worker"}
        if not self._alive <= applied.keys():
            return []
        version = min(applied.values(), default=self._version)
        if version <= self._applied_version:
            return []
        self._applied_version = version
        return [AppliedEverywhere(version)]

    # -- commands ----------------------------------------------------------------------------------------------------------

    def _on_command_requested(self, event: CommandRequested, now_ms: int) -> list[Action]:
        def refuse(error: int, text: str) -> list[Action]:
            return [Send(event.client, messages.Answer(event.request_id, error, text))]

        change = event.change
        image = self._images.get(change.name)
        if image is None or not 0 <= change.partition < len(image.partitions):
            return refuse(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no partition {change.name}-{change.partition}.")
        partition = image.partitions[change.partition]
        if partition.owner == OWNER_NONE:
            return refuse(ErrorCode.KAFKA_STORAGE_ERROR, f"The log directory of {change.name}-{change.partition} is offline.")
        worker = next((other for other in self._subscribers.values() if other.role == "worker" and other.index == partition.owner and not other.held), None)
        if worker is None:
            return refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"The worker that owns {change.name}-{change.partition} is being restarted; try again.")
        if isinstance(change, messages.MoveReplica) and change.log_dir not in self._log_dirs.values():  # nobody could record that it lies there
            return refuse(ErrorCode.KAFKA_STORAGE_ERROR, f"Log directory {change.log_dir} was offline when the controller started.")
        if len(self._commands) >= COMMANDS_MAX:
            return refuse(ErrorCode.REQUEST_TIMED_OUT, "Too many commands are under way; try again.")
        self._command_id += 1
        self._commands[self._command_id] = _Command(event.client, event.request_id, worker.client, now_ms)
        if isinstance(change, messages.MoveReplica):
            return [Send(worker.client, messages.Command(self._command_id, "move_replica", partition.slot, change.log_dir))]
        return [Send(worker.client, messages.Command(self._command_id, "delete_records", partition.slot, change.offset))]

    def _on_move_ended(self, event: MoveEnded, now_ms: int) -> list[Action]:
        """Only of the worker that lives (H3: its successor is told of the partition after all that was recorded for it), and of a partition that is its own."""
        worker = self._subscribers.get(event.client)
        image = self._told((event.moved.topic_id, event.moved.index))
        directory = next((name for name, index in self._log_dirs.items() if index == event.moved.log_dir), None)
        if worker is None or worker.role != "worker" or worker.held or image is None or image.owner != worker.index or directory is None:
            return []
        return [RecordMove(event.moved.topic_id, event.moved.index, directory)]

    def _on_command_ended(self, event: CommandEnded, now_ms: int) -> list[Action]:
        command = self._commands.get(event.done.command_id)
        if command is None or command.worker != event.client:
            return []
        del self._commands[event.done.command_id]
        return [Send(command.client, messages.Answer(command.request_id, event.done.error, event.done.message or None, offset=event.done.offset))]

    def _on_tick(self, event: Tick, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        for number in [number for number, command in self._commands.items() if now_ms - command.since_ms >= COMMAND_WAIT_MS_MAX]:
            command = self._commands.pop(number)
            text = f"The worker has not answered within {COMMAND_WAIT_MS_MAX // 1000} s."
            actions.append(Send(command.client, messages.Answer(command.request_id, ErrorCode.REQUEST_TIMED_OUT, text)))
        return actions

    # -- invariants --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        used, retiring, free = set(self._slots.values()), set(self._retiring), set(self._free)
        assert len(used) == len(self._slots) and len(free) == len(self._free), "H1"
        assert not used & retiring and not used & free and not retiring & free and len(used | retiring | free) == self._slot_count, "H1"
        assert all(users and users <= self._alive for _, users in self._retiring.values()), "H2"
        for subscriber in self._subscribers.values():
            assert subscriber.held == (subscriber.role == "worker" and subscriber.index in self._fenced), "H3"
            assert subscriber.held or subscriber.role != "worker" or subscriber.index in self._alive, "H3"
        for name, image in self._images.items():
            for partition in image.partitions:
                assert self._slots[(image.topic_id, partition.index)] == partition.slot, "H1"
                assert partition.owner in (OWNER_NONE, owner_of(image.topic_id, partition.index, self._worker_count)), "H5"
            assert image.name == name and [partition.index for partition in image.partitions] == list(range(len(image.partitions))), "H6"
        assert {image.topic_id: name for name, image in self._images.items()} == self._names
        assert self._applied_version <= self._version, "H4"


_HANDLERS = {
    Started: HostCore._on_started,
    Publish: HostCore._on_publish,
    SubscriberJoined: HostCore._on_subscriber_joined,
    SubscriberLeft: HostCore._on_subscriber_left,
    WorkerDied: HostCore._on_worker_died,
    WorkerApplied: HostCore._on_worker_applied,
    CommandRequested: HostCore._on_command_requested,
    MoveEnded: HostCore._on_move_ended,
    CommandEnded: HostCore._on_command_ended,
    Tick: HostCore._on_tick,
}
