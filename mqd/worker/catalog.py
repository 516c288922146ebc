"""What a worker has been told and what follows from it. Sans-I/O: messages of the controller in, one list of changes out.

    catalog.on_image(image) / on_topic_put / on_topic_removed / on_broker_config  -> Changes

Invariants
    W1  every worker knows every topic (it reads any partition); it owns those partitions whose owner is its index.
    W2  an image is the whole truth: what it does not name is removed, what it names and is in force already causes nothing.
    W3  a topic of the same name and another id is another topic: the old one is removed first.
    W4  a partition whose log could not be opened stays wanted; the next image tries again, and `retry` when the cause may have passed.
"""

from collections.abc import Iterable

import msgspec

from mqd.cluster.controller_messages import Image, PartitionImage, TopicImage

Key = tuple[bytes, int]  # topic id, partition index


class Owned(msgspec.Struct, frozen=True):
    """A partition that this worker is to serve."""

    topic: str
    topic_id: bytes
    index: int
    slot: int
    log_dir: int
    leader_epoch: int

    @property
    def key(self) -> Key:
        return self.topic_id, self.index

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"


class Changes(msgspec.Struct, frozen=True):
    """To carry out in this order."""

    forget_topics: list[TopicImage] = []  # the reactor is to forget these
    close: list[Owned] = []  # give up, keep the files (the partition lives on elsewhere)
    delete: list[Owned] = []  # give up, delete the files
    put_topics: list[TopicImage] = []  # new or with other slots
    open: list[Owned] = []
    set_epoch: list[Owned] = []
    set_options: list[Owned] = []


class Catalog:
    def __init__(self, worker: int):
        self._worker = worker
        self.topics: dict[bytes, TopicImage] = {}
        self.owned: dict[Key, Owned] = {}
        self.broker_config: dict[str, str] = {}
        self._failed: dict[Key, bool] = {}  # -> may it pass by itself
        self._names: dict[int, str] | None = None  # of all partitions, by slot; made when a log line asks

    def failed(self, key: Key, may_pass: bool = False) -> None:
        """It could not be opened: wanted all the same (W4). `may_pass`: for want of space, memory or descriptors."""
        self._failed[key] = may_pass

    def retry(self) -> Changes:
        """Opens again what failed for a cause that may have passed."""
        keys = [key for key, may_pass in self._failed.items() if may_pass and key in self.owned]
        for key in keys:
            del self._failed[key]
        return Changes(open=[self.owned[key] for key in keys])

    def failed_partitions(self) -> list[Owned]:
        return [self.owned[key] for key in self._failed if key in self.owned]

    def topic_of(self, owned: Owned) -> TopicImage:
        return self.topics[owned.topic_id]

    def partition_name(self, slot: int) -> str:
        """Also of a partition that another worker owns: a batch is checked, and refused, where it is received."""
        if self._names is None:
            self._names = {partition.slot: f"{topic.name}-{partition.index}" for topic in self.topics.values() for partition in topic.partitions}
        return self._names.get(slot, f"slot {slot}")

    # -- messages ----------------------------------------------------------------------------------------------------------

    def on_image(self, image: Image) -> Changes:
        told = {topic.topic_id: topic for topic in image.topics}
        changes = Changes()
        for topic in [topic for topic_id, topic in self.topics.items() if topic_id not in told]:
            self._remove(topic, changes)
        config_changed = image.broker_config != self.broker_config
        self.broker_config = dict(image.broker_config)
        retry, self._failed = set(self._failed), {}
        for topic in image.topics:
            self._put(topic, changes, config_changed, retry)
        return changes

    def on_topic_put(self, topic: TopicImage) -> Changes:
        changes = Changes()
        for namesake in [other for other in self.topics.values() if other.name == topic.name and other.topic_id != topic.topic_id]:
            self._remove(namesake, changes)
        self._put(topic, changes, False, set())
        return changes

    def on_topic_removed(self, topic_id: bytes) -> Changes:
        changes = Changes()
        if topic_id in self.topics:
            self._remove(self.topics[topic_id], changes)
        return changes

    def on_broker_config(self, config: dict[str, str]) -> Changes:
        if config == self.broker_config:
            return Changes()
        self.broker_config = dict(config)
        return Changes(set_options=[owned for owned in self.owned.values() if owned.key not in self._failed])

    # -- differences -------------------------------------------------------------------------------------------------------

    def _owned_of(self, topic: TopicImage) -> dict[Key, Owned]:
        partitions: Iterable[PartitionImage] = (p for p in topic.partitions if p.owner == self._worker and p.slot >= 0)
        return {
            (topic.topic_id, p.index): Owned(topic.name, topic.topic_id, p.index, p.slot, p.log_dir, p.leader_epoch) for p in partitions
        }

    def _remove(self, topic: TopicImage, changes: Changes) -> None:
        del self.topics[topic.topic_id]
        self._names = None
        changes.forget_topics.append(topic)
        for key in self._owned_of(topic):
            if key in self.owned:
                changes.delete.append(self.owned.pop(key))
            self._failed.pop(key, None)

    def _put(self, topic: TopicImage, changes: Changes, broker_config_changed: bool, retry: set[Key]) -> None:
        before = self.topics.get(topic.topic_id)
        self.topics[topic.topic_id] = topic
        self._names = None
        if before is None or _slots(before) != _slots(topic):
            changes.put_topics.append(topic)
        wanted = self._owned_of(topic)
        for key in [key for key in self.owned if key[0] == topic.topic_id and key not in wanted]:
            changes.close.append(self.owned.pop(key))
        options_changed = broker_config_changed or (before is not None and before.config != topic.config)
        for key, owned in wanted.items():
            self._place(owned, self.owned.get(key), changes, options_changed, key in retry)
            self.owned[key] = owned

    def _place(self, owned: Owned, old: Owned | None, changes: Changes, options_changed: bool, retry: bool) -> None:
        if old is None or retry:
            changes.open.append(owned)
        elif owned.key in self._failed:
            pass
        elif (old.slot, old.log_dir) != (owned.slot, owned.log_dir):
            changes.close.append(old)
            changes.open.append(owned)
        else:
            if old.leader_epoch != owned.leader_epoch:
                changes.set_epoch.append(owned)
            if options_changed:
                changes.set_options.append(owned)


def _slots(topic: TopicImage) -> list[tuple[int, int]]:
    return [(partition.slot, partition.log_dir) for partition in topic.partitions]
