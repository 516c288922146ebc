"""The subscriptions of a group's members, resolved to existing topics. Members with equal
subscriptions share one entry, so the cost depends on the number of different subscriptions, not of
members.

Invariants (check())
    N1  an entry's `member_count` is the number of members with this subscription; an entry without
        members is removed
    N2  entries are resolved against the same version of the topics
    N3  `partition_counts` has exactly the topics that some entry resolves to
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from mqd.coordinator.group.consumer.cluster import ClientIdentity, Cluster
from mqd.coordinator.group.regex import BadExpression

# (topic names, sorted; expression; the client whose rights limit its matches)
SubscriptionKey = tuple[tuple[str, ...], str | None, ClientIdentity | None]


def _sort_key(item: tuple[SubscriptionKey, ResolvedSubscription]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    names, regex, authorized_as = item[0]
    return names, regex or "", authorized_as or ()


class ResolvedSubscription:
    __slots__ = ("member_count", "names", "topic_ids")

    def __init__(self) -> None:
        self.member_count = 0  # members with this subscription
        self.names: frozenset[str] = frozenset()  # existing topics that the subscription selects
        self.topic_ids: frozenset[bytes] = frozenset()


class Subscriptions:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._entries: dict[SubscriptionKey, ResolvedSubscription] = {}
        self._version: Hashable = None
        self._counts: dict[bytes, int] | None = None
        self._hash: int | None = None

    def add(self, key: SubscriptionKey) -> ResolvedSubscription:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ResolvedSubscription()
            if self._version is not None:
                self._resolve(key, entry)
            self._drop_cached()
        entry.member_count += 1
        return entry

    def remove(self, key: SubscriptionKey) -> None:
        entry = self._entries[key]
        entry.member_count -= 1
        if not entry.member_count:
            del self._entries[key]
            self._drop_cached()

    def find(self, key: SubscriptionKey) -> ResolvedSubscription:
        return self._entries[key]

    def is_current(self) -> bool:
        return self._version == self._cluster.version

    def refresh(self) -> None:
        """Resolves all entries against the current topics."""
        self._version = self._cluster.version
        for key, entry in self._entries.items():
            self._resolve(key, entry)
        self._drop_cached()

    def _drop_cached(self) -> None:
        self._counts = self._hash = None

    def _resolve(self, key: SubscriptionKey, entry: ResolvedSubscription) -> None:
        names, regex, authorized_as = key
        selected = {name for name in names if self._cluster.topic(name) is not None}
        if regex is not None:
            try:
                matching = self._cluster.matcher.matching(regex, self._cluster.names())
                selected |= matching if authorized_as is None else self._cluster.describable(authorized_as, matching)
            except BadExpression:
                # the expression was loaded from the log of another broker and is invalid here: it
                # matches nothing
                pass
        topics = {name: topic for name in selected if (topic := self._cluster.topic(name)) is not None}
        entry.names = frozenset(topics)
        entry.topic_ids = frozenset(topic.topic_id for topic in topics.values())

    def _topics(self) -> dict[str, tuple[bytes, int]]:
        topics: dict[str, tuple[bytes, int]] = {}
        for entry in self._entries.values():
            for name in entry.names:
                if name not in topics:
                    topic = self._cluster.topic(name)
                    assert topic is not None, "the topics changed during an event"
                    topics[name] = topic
        return topics

    @property
    def partition_counts(self) -> dict[bytes, int]:
        """Topic id -> partition count, for every subscribed topic."""
        if self._counts is None:
            self._counts = dict(self._topics().values())
        return self._counts

    @property
    def hash(self) -> int:
        """Hash of all inputs of an assignment: the topics, their partitions, and the matches of
        each expression. 64 bits, signed, never 0.
        """
        if self._hash is None:
            digest = hashlib.blake2b(digest_size=8)
            for name, (topic_id, count) in sorted(self._topics().items()):
                digest.update(b"%b\0%b%d\n" % (name.encode(), topic_id, count))
            for (names, regex, _), entry in sorted(self._entries.items(), key=_sort_key):
                if regex is not None:
                    digest.update(
                        b"%b\0%b\n"
                        % (",".join(names).encode() + b"/" + regex.encode(), ",".join(sorted(entry.names)).encode())
                    )
            self._hash = int.from_bytes(digest.digest(), "big", signed=True) or 1
        return self._hash

    def all_names(self) -> frozenset[str]:
        """Topics subscribed to by name or by expression. Topics that do not exist are included if a
        member names them.
        """
        return frozenset().union(*(entry.names | frozenset(key[0]) for key, entry in self._entries.items()))

    def check(self, keys: list[SubscriptionKey]) -> None:
        counts: dict[SubscriptionKey, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        assert counts == {key: entry.member_count for key, entry in self._entries.items()}, "N1"
        if self._counts is not None and self.is_current():
            assert self._counts.keys() == {
                topic_id for entry in self._entries.values() for topic_id in entry.topic_ids
            }, "N3"
