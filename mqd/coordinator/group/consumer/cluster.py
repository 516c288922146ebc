"""A consumer group's view of the cluster: topics, expressions over their names, and the group's
configuration. The cores only read it; their owner fills it in.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from mqd.coordinator.group.regex import RegexMatcher
from mqd.coordinator.group.settings import ConsumerSettings, ShareSettings, StreamsSettings


class Topic(NamedTuple):
    topic_id: bytes
    partition_count: int


class ClientIdentity(NamedTuple):
    """The principal and host whose rights to describe topics limit the matches of an expression."""

    principal: str
    host: str


class Cluster(Protocol):
    """Topics and settings can change between two events of a core, but not during one. `version`
    changes whenever topics may have changed.
    """

    matcher: RegexMatcher

    @property
    def version(self) -> Hashable: ...

    def topic(self, name: str) -> Topic | None: ...

    def topic_name(self, topic_id: bytes) -> str | None: ...

    def names(self) -> frozenset[str]:
        """All topics except internal ones. Returns the same object as long as they do not change."""

    def describable(self, client: ClientIdentity, names: frozenset[str]) -> frozenset[str]:
        """Those of `names` that this client may describe."""

    def settings(self, group_id: str) -> ConsumerSettings: ...

    def share_settings(self, group_id: str) -> ShareSettings: ...

    def streams_settings(self, group_id: str) -> StreamsSettings: ...


class FixedCluster:
    """A cluster with the topics given to set(): for tests, tools and simulations."""

    def __init__(self, topics: dict[str, int] | None = None, settings: ConsumerSettings | None = None) -> None:
        self.matcher = RegexMatcher()
        self.version = 0
        self.group_settings = settings or ConsumerSettings()
        self.share_group_settings = ShareSettings()
        self.streams_group_settings = StreamsSettings()
        self.topics: dict[str, Topic] = {}
        self._names_by_id: dict[bytes, str] = {}
        self._names: frozenset[str] = frozenset()
        self._next_id = 1
        self.hidden: dict[str, set[str]] = {}  # principal -> topics that it may not describe
        for name, count in (topics or {}).items():
            self.set(name, count)

    def set(self, name: str, partition_count: int) -> Topic:
        """Creates or changes a topic. With 0 partitions it is deleted; with more than before,
        partitions are added; with fewer, it is deleted and created again.
        """
        old_topic = self.topics.pop(name, None)
        if old_topic is not None and partition_count < old_topic.partition_count:
            del self._names_by_id[old_topic.topic_id]
            old_topic = None
        topic = Topic(
            old_topic.topic_id if old_topic is not None else self._next_id.to_bytes(16, "big"), partition_count
        )
        if old_topic is None:
            self._next_id += 1
        if partition_count:
            self.topics[name] = topic
            self._names_by_id[topic.topic_id] = name
        self._names = frozenset(self.topics)
        self.version += 1
        return topic

    def topic(self, name: str) -> Topic | None:
        return self.topics.get(name)

    def topic_name(self, topic_id: bytes) -> str | None:
        return self._names_by_id.get(topic_id)

    def names(self) -> frozenset[str]:
        return self._names

    def describable(self, client: ClientIdentity, names: frozenset[str]) -> frozenset[str]:
        return names - self.hidden.get(client.principal, set())

    def settings(self, group_id: str) -> ConsumerSettings:
        return self.group_settings

    def share_settings(self, group_id: str) -> ShareSettings:
        return self.share_group_settings

    def streams_settings(self, group_id: str) -> StreamsSettings:
        return self.streams_group_settings
