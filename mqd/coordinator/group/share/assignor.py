"""The `simple` assignor for share groups (KIP-932): partitions are shared, not owned.

Guarantees (asserted by the property tests)
    A1  with members that subscribe alike, each partition has the same number of members: as many as
        are needed for each member to have a partition. Members' partition counts differ by at most
        one
    A2  with different subscriptions the same holds for each topic and its subscribers
    A3  nothing is assigned to a member that does not subscribe to it
    A4  members keep their partitions as far as A1 and A2 allow: with unchanged input none move
    A5  the same input gives the same output
Cost: O(n log members) for n assigned pairs of member and partition.
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
        for member_id, taken in _distribute(pool, users, held).items():
            found[member_id] += taken
    return {member_id: _as_partitions(taken, members[member_id].current) for member_id, taken in found.items()}


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
    return [(topic_ids, subscribers) for topic_ids, subscribers in by_topic if subscribers]


def _distribute(
    pool: list[Partition], users: list[str], current: Mapping[str, Mapping[bytes, tuple[int, ...]]]
) -> dict[str, list[Partition]]:
    members_per_partition = -(-len(users) // len(pool))
    low, extra = divmod(len(pool) * members_per_partition, len(users))
    missing_members = dict.fromkeys(pool, members_per_partition)
    held = {
        user: [
            (topic_id, index)
            for topic_id, indexes in current[user].items()
            for index in indexes
            if (topic_id, index) in missing_members
        ]
        for user in users
    }
    order = sorted(users, key=lambda user: -len(held[user]))  # members with the most may have one more
    wanted = {user: low + (number < extra) for number, user in enumerate(order)}
    taken: dict[str, dict[Partition, None]] = {}
    for user in order:
        kept = taken[user] = {}
        for partition in held[user]:
            if len(kept) < wanted[user] and missing_members[partition]:
                kept[partition] = None
                missing_members[partition] -= 1
    # (minus the number of partitions that the member lacks, the member)
    heap = [(len(taken[user]) - wanted[user], user) for user in users if len(taken[user]) < wanted[user]]
    heapq.heapify(heap)
    for partition in pool:
        to_push: list[tuple[int, str]] = []
        while missing_members[partition] and heap:
            balance, user = heapq.heappop(heap)
            if partition not in taken[user]:
                taken[user][partition] = None
                missing_members[partition] -= 1
                balance += 1
            if balance:
                to_push.append((balance, user))
        for entry in to_push:
            heapq.heappush(heap, entry)
    # Rare: the members that lack partitions already have all the remaining ones. All partitions are
    # distributed again.
    if heap:
        deal = cycle(users)
        taken = {user: {} for user in users}
        for partition in pool:
            for user in islice(deal, members_per_partition):
                taken[user][partition] = None
    return {user: list(kept) for user, kept in taken.items()}


def _as_partitions(taken: list[Partition], current: Mapping[bytes, tuple[int, ...]]) -> Partitions:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, index in taken:
        by_topic.setdefault(topic_id, []).append(index)
    found = {topic_id: tuple(sorted(indexes)) for topic_id, indexes in sorted(by_topic.items())}
    return current if isinstance(current, dict) and current == found else found
