"""The assignor `simple` of share groups (KIP-932): partitions are shared, not owned.

Guarantees (asserted by the property tests)
    A1  with members that subscribe alike, each partition has the same number of members: as many as
        are needed for each member to have one. Members' counts differ by at most one
    A2  with different subscriptions the same holds for each topic and its subscribers
    A3  nothing is assigned to a member that does not subscribe to it
    A4  members keep their partitions as far as A1 and A2 allow: the same input changes nothing
    A5  the same input gives the same output
Cost: O(n log members) of n = assigned pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import cycle, islice

from mqd.coordinator.group.consumer.assignors import MemberSpec, Partitions

NAME = "simple"
Partition = tuple[bytes, int]


def simple(members: Mapping[str, MemberSpec], partitions: Mapping[bytes, tuple[int, ...]]) -> dict[str, Partitions]:
    """`partitions`: those that may be assigned."""
    found: dict[str, list[Partition]] = {member_id: [] for member_id in members}
    for topics, users in _pools(members, partitions):
        pool = [(topic_id, index) for topic_id in topics for index in partitions[topic_id]]
        held = {member_id: members[member_id].current for member_id in users}
        for member_id, taken in _shared_out(pool, users, held).items():
            found[member_id] += taken
    return {member_id: _listed(taken, members[member_id].current) for member_id, taken in found.items()}


def _pools(
    members: Mapping[str, MemberSpec], partitions: Mapping[bytes, tuple[int, ...]]
) -> Iterable[tuple[list[bytes], list[str]]]:
    """Topics that are distributed together, and the members that share them."""
    topics = sorted(topic_id for topic_id, indexes in partitions.items() if indexes)
    users = sorted(members)
    if len({spec.topics for spec in members.values()}) <= 1:
        subscribed = [topic_id for topic_id in topics if users and topic_id in members[users[0]].topics]
        return [(subscribed, users)] if subscribed else []
    by_topic = [
        ([topic_id], [member_id for member_id in users if topic_id in members[member_id].topics]) for topic_id in topics
    ]
    return [(some, subscribers) for some, subscribers in by_topic if subscribers]


def _shared_out(
    pool: list[Partition], users: list[str], current: Mapping[str, Mapping[bytes, tuple[int, ...]]]
) -> dict[str, list[Partition]]:
    sharing = -(-len(users) // len(pool))
    each, more = divmod(len(pool) * sharing, len(users))
    lacks = dict.fromkeys(pool, sharing)
    held = {
        user: [
            (topic_id, index)
            for topic_id, indexes in current[user].items()
            for index in indexes
            if (topic_id, index) in lacks
        ]
        for user in users
    }
    order = sorted(users, key=lambda user: -len(held[user]))  # members with the most may have one more
    wanted = {user: each + (number < more) for number, user in enumerate(order)}
    taken: dict[str, dict[Partition, None]] = {}
    for user in order:
        kept = taken[user] = {}
        for partition in held[user]:
            if len(kept) < wanted[user] and lacks[partition]:
                kept[partition] = None
                lacks[partition] -= 1
    heap = [(len(taken[user]) - wanted[user], user) for user in users if len(taken[user]) < wanted[user]]
    heapq.heapify(heap)
    for partition in pool:
        passed: list[tuple[int, str]] = []
        while lacks[partition] and heap:
            missing, user = heapq.heappop(heap)
            if partition not in taken[user]:
                taken[user][partition] = None
                lacks[partition] -= 1
                missing += 1
            if missing:
                passed.append((missing, user))
        for one in passed:
            heapq.heappush(heap, one)
    if (
        heap
    ):  # members that lack partitions already have all the remaining ones: rare, so everything is distributed again
        deal = cycle(users)
        taken = {user: {} for user in users}
        for partition in pool:
            for user in islice(deal, sharing):
                taken[user][partition] = None
    return {user: list(kept) for user, kept in taken.items()}


def _listed(taken: list[Partition], current: Mapping[bytes, tuple[int, ...]]) -> Partitions:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, index in taken:
        by_topic.setdefault(topic_id, []).append(index)
    found = {topic_id: tuple(sorted(indexes)) for topic_id, indexes in sorted(by_topic.items())}
    return current if isinstance(current, dict) and current == found else found
