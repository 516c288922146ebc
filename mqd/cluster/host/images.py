"""The image of each topic that is sent to this host's processes: slot, owner and log directory of its
partitions. Part of the host core (mqd/cluster/host/core.py), which has the invariants.
"""

import zlib
from collections.abc import Hashable, Iterable, Mapping

from mqd.cluster.host import messages
from mqd.cluster.host.commands import OWNER_NONE, HostCommands, PendingCommand, Subscriber
from mqd.cluster.host.events import (
    Action,
    AssignSlot,
    ClearSlot,
    Partition,
    RaiseEpochs,
    ReportReplicaMoved,
    Send,
    SlotSeen,
)
from mqd.cluster.host.slots import Slots
from mqd.cluster.metadata.records import PartitionState, TopicState
from mqd.cluster.metadata.rules.placement import Directory, choose_directory
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState

LOG_DIR_NONE = 255


def owner_of(topic_id: bytes, index: int, worker_count: int) -> int:
    """Returns the worker that owns a partition. The partitions of one topic are assigned to workers
    round-robin; the first worker depends on the topic id.
    """
    return (zlib.crc32(topic_id) + index) % worker_count


def _is_in_place(seen: SlotSeen | None, image: messages.PartitionImage) -> bool:
    """Whether the slot needs no write, for one of three reasons: it matches the image; its epoch is later
    than that of this host's state, which is still catching up; or it is left over from a worker that
    died, and the next epoch will be written.
    """
    if seen is None or seen.leader_epoch != image.leader_epoch:
        return seen is not None and seen.leader_epoch > image.leader_epoch
    return seen.stale or (seen.owner == image.owner and (seen.owner == OWNER_NONE or seen.log_dir == image.log_dir))


class TopicImages(HostCommands):
    """`log_dirs`: id -> index in log.dirs, of the usable log directories."""

    def __init__(
        self, node_id: int, controller_id: int, worker_count: int, slot_count: int, log_dirs: Mapping[str, int]
    ) -> None:
        self.node_id = node_id
        self._controller_id = controller_id
        self._worker_count = worker_count
        self._log_dirs = dict(log_dirs)
        self._free_bytes: dict[str, int] = {}  # by directory id, as last measured
        self._state = MetadataState()
        self._images: dict[str, messages.TopicImage] = {}
        self._names: dict[bytes, str] = {}  # topic id -> name, of all images
        self._slots = Slots(slot_count)
        self._chosen_directories: dict[Partition, str] = {}  # log directories chosen but not recorded yet
        self._live_workers: set[int] = set()
        self._generations: dict[int, int] = {}
        # worker that died -> partition that it led, or may have led -> the leader epoch in which it died
        self._lost_epochs: dict[int, dict[Partition, int]] = {}
        self._subscribers: dict[Hashable, Subscriber] = {}
        self._commands: dict[int, PendingCommand] = {}
        self._command_id = 0
        self._withheld: list[str] = []  # topics without slots yet, as last sent to the acceptor
        self._version = 0
        self._applied_version = -1

    @property
    def version(self) -> int:
        """The version of the newest relevant change: workers that have applied it have applied all changes
        that concern them.
        """
        return self._version

    def _partition_state(self, partition: Partition) -> PartitionState | None:
        name = self._state.topics_by_id.get(partition[0])
        if name is None or not 0 <= partition[1] < len(self._state.topics[name].partitions):
            return None
        return self._state.topics[name].partitions[partition[1]]

    # -- topics ------------------------------------------------------------------------------------

    def _topic_changes(
        self, topic: TopicState, indexes: Iterable[int] | None, actions: list[Action]
    ) -> list[messages.Part]:
        """Returns the messages about the changes to a topic, and adds the other actions to `actions`.
        `indexes`: the changed partitions, None = not known.
        """
        old = self._images.get(topic.name)
        changed = (
            list(indexes)
            if indexes is not None
            and old is not None
            and old.topic_id == topic.topic_id
            and topic.name not in self._withheld
            and all(index < len(old.partitions) for index in indexes)
            else None
        )
        actions += self._put_topic(topic, {}, changed)
        if changed is not None:
            partitions = self._images[topic.name].partitions
            return [messages.PartitionsPut(self._version, topic.topic_id, [partitions[index] for index in changed])]
        if self._waits_for_slots(topic):
            image = self._images.get(topic.name)
            if (
                image is None
                or old is None
                or old.topic_id != topic.topic_id
                or (image.partitions[: len(old.partitions)] == old.partitions and image.config == old.config)
            ):
                # sent once all partitions have slots: the client that created the topic must find them all
                return []
        return [messages.TopicPut(self._version, self._images[topic.name])]

    def _put_topic(
        self, topic: TopicState, seen_slots: Mapping[Partition, SlotSeen], changed: list[int] | None = None
    ) -> list[Action]:
        """Updates the topic's image; returns the actions for the slots of its partitions. `changed`: the
        indexes of the changed partitions, None = all may have changed.
        """
        actions: list[Action] = []
        old = self._images.get(topic.name)
        old_partitions = old.partitions if old is not None and old.topic_id == topic.topic_id else []
        images = list(old_partitions) if changed is not None else []
        for index in changed if changed is not None else range(len(topic.partitions)):
            image = self._make_image(topic.topic_id, topic.partitions[index], actions)
            if changed is not None:
                images[index] = image
            else:
                images.append(image)
            key = (topic.topic_id, index)
            old_image, seen = old_partitions[index] if index < len(old_partitions) else None, seen_slots.get(key)
            is_unchanged = old_image is not None and (
                old_image.slot,
                old_image.owner,
                old_image.leader_epoch,
                old_image.log_dir,
            ) == (image.slot, image.owner, image.leader_epoch, image.log_dir)
            if (
                old_image is not None
                and not is_unchanged
                and not self._leadership_has_ended(self._lost_epoch(key), image)
            ):
                # The slot is the evidence of the worker's death, and stays until the epoch has ended.
                if old_image.leader_epoch < image.leader_epoch == self._lost_epoch(key):
                    actions.append(RaiseEpochs((key,)))  # the state has reached the epoch of the death
            elif image.slot >= 0 and not is_unchanged and not _is_in_place(seen, image):
                previous = old_image if old_image is not None else seen
                moved = (
                    previous is not None
                    and image.leader == self.node_id
                    and (previous.owner, previous.leader_epoch) == (image.owner, image.leader_epoch)
                )
                actions.append(
                    AssignSlot(image.slot, topic.topic_id, index, image.owner, image.log_dir, image.leader_epoch, moved)
                )
        for image in old_partitions[len(topic.partitions) :]:
            self._give_up((topic.topic_id, image.index))
        # H6: partitions that wait for a slot are added later, by _place_waiting_partitions()
        while len(images) > len(old_partitions) and (topic.topic_id, images[-1].index) in self._slots.unplaced:
            images.pop()
        if images or not topic.partitions:  # a view has no partitions
            is_internal = topic.name in INTERNAL_TOPICS
            self._images[topic.name] = messages.TopicImage(
                topic.name,
                topic.topic_id,
                images,
                topic.config,
                is_internal,
                len(topic.partitions),
                topic.first_leader_epoch,
            )
            self._names[topic.topic_id] = topic.name
        return actions

    def _lost_epoch(self, key: Partition) -> int:
        """If a worker that may have led the partition has died, returns the leader epoch in which it
        died; otherwise -1.
        """
        return max((lost_epochs.get(key, -1) for lost_epochs in self._lost_epochs.values()), default=-1)

    def _leadership_has_ended(self, epoch: int, image: messages.PartitionImage) -> bool:
        """Whether the partition, in this image, is no longer led by this host in `epoch`. False for
        an image of an earlier epoch: the state is still catching up.
        """
        return image.leader_epoch > epoch or (image.leader_epoch == epoch and image.leader != self.node_id)

    def _make_image(self, topic_id: bytes, partition: PartitionState, actions: list[Action]) -> messages.PartitionImage:
        key = (topic_id, partition.index)
        slot, owner, log_dir = -1, OWNER_NONE, LOG_DIR_NONE
        if self.node_id not in partition.replicas:
            self._give_up(key)
        elif directory := partition.directories[partition.replicas.index(self.node_id)]:
            self._chosen_directories.pop(key, None)
            slot, log_dir = self._slots.take(key), self._log_dirs.get(directory, LOG_DIR_NONE)
            if slot >= 0 and log_dir != LOG_DIR_NONE:
                owner = owner_of(topic_id, partition.index, self._worker_count)
        else:
            # A new replica without a recorded directory: a slot of this partition belongs to an
            # earlier replica, which was removed.
            self._slots.release(key, self._version, self._live_workers)
            if key not in self._chosen_directories and self._log_dirs:
                actions.append(ReportReplicaMoved(topic_id, partition.index, self._choose_directory(key)))
        return self._partition_image(partition, slot, owner, log_dir)

    @staticmethod
    def _partition_image(partition: PartitionState, slot: int, owner: int, log_dir: int) -> messages.PartitionImage:
        return messages.PartitionImage(
            index=partition.index,
            slot=slot,
            owner=owner,
            log_dir=log_dir,
            leader=partition.leader,
            leader_epoch=partition.leader_epoch,
            replicas=list(partition.replicas),
            in_sync_replicas=list(partition.in_sync_replicas),
            partition_epoch=partition.partition_epoch,
            adding=list(partition.adding_replicas),
            removing=list(partition.removing_replicas),
            eligible=list(partition.eligible_leader_replicas),
            last_known_eligible=list(partition.last_known_eligible),
            recovering=partition.recovering,
            retiring=partition.retiring,
            redirect=partition.redirect,
        )

    def _choose_directory(self, key: Partition) -> str:
        counts = {name: self._state.directory_replica_counts.get((self.node_id, name), 0) for name in self._log_dirs}
        for name in self._chosen_directories.values():
            counts[name] += 1
        chosen = choose_directory(
            [
                Directory(name, f"{index:03}", self._free_bytes.get(name, 0), True)
                for name, index in self._log_dirs.items()
            ],
            counts,
        )
        assert chosen is not None
        self._chosen_directories[key] = chosen
        return chosen

    def _give_up(self, key: Partition) -> int:
        self._chosen_directories.pop(key, None)
        return self._slots.release(key, self._version, self._live_workers)

    def _remove(self, topic: TopicState) -> list[messages.Part]:
        for partition in topic.partitions:
            self._slots.unplaced.pop((topic.topic_id, partition.index), None)
            self._chosen_directories.pop((topic.topic_id, partition.index), None)
        image = self._images.get(topic.name)
        if image is None or image.topic_id != topic.topic_id:
            return []
        return [messages.TopicRemoved(self._version, topic.name, topic.topic_id, self._forget(image))]

    def _forget(self, image: messages.TopicImage) -> list[int]:
        """Forgets a topic. Returns its slots, which are retiring now."""
        del self._images[image.name], self._names[image.topic_id]
        slots = [self._give_up((image.topic_id, partition.index)) for partition in image.partitions]
        return [slot for slot in slots if slot >= 0]

    def _free_retired(self) -> list[Action]:
        ready = self._slots.free_retired()
        actions: list[Action] = [ClearSlot(slot) for slot in ready]
        if ready and self._slots.unplaced:
            actions += self._place_waiting_partitions()
        return actions

    def _place_waiting_partitions(self) -> list[Action]:
        actions: list[Action] = []
        for name in {self._state.topics_by_id.get(topic_id): None for topic_id, _ in self._slots.unplaced}:
            topic = self._state.topics.get(name) if name is not None else None
            if topic is not None:
                actions += self._put_topic(topic, {})
                if not self._waits_for_slots(topic):
                    actions += self._broadcast(messages.TopicPut(self._version, self._images[topic.name]))
        return actions

    def _waits_for_slots(self, topic: TopicState) -> bool:
        """Whether partitions of the topic wait for slots. The request that created the partitions gets
        its response when all workers know the slots.
        """
        unplaced = self._slots.unplaced
        return bool(unplaced) and any((topic.topic_id, partition.index) in unplaced for partition in topic.partitions)

    def _withheld_names(self) -> list[str]:
        names = {self._state.topics_by_id.get(topic_id) for topic_id, _ in self._slots.unplaced}
        return sorted(name for name in names if name is not None)

    def topic_image(self, topic: TopicState) -> messages.TopicImage:
        """Returns the topic's image for a response: with slots if the topic exists, without slots if it
        was only validated.
        """
        image = self._images.get(topic.name)
        if image is not None and image.topic_id == topic.topic_id:
            return image
        return self.image_without_slots(topic)

    @classmethod
    def image_without_slots(cls, topic: TopicState) -> messages.TopicImage:
        """Returns an image of the topic in which no partition has a slot on this host."""
        partitions = [cls._partition_image(partition, -1, OWNER_NONE, LOG_DIR_NONE) for partition in topic.partitions]
        return messages.TopicImage(topic.name, topic.topic_id, partitions, topic.config, topic.name in INTERNAL_TOPICS)

    def _broadcast(self, message: messages.FromController, role: str | None = None) -> list[Action]:
        """Sends to all subscribers, or to those of one role."""
        return [
            Send(subscriber.client, message)
            for subscriber in self._subscribers.values()
            if not subscriber.held and (role is None or subscriber.role == role)
        ]

    def _published_image(self, partition: Partition) -> messages.PartitionImage | None:
        """Returns the partition as subscribers know it. The committed state may be newer: several batches
        are committed together, but published one by one.
        """
        image = self._images.get(self._names.get(partition[0], ""))
        return image.partitions[partition[1]] if image is not None and partition[1] < len(image.partitions) else None
