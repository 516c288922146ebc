"""The `simple` assignor for share groups (KIP-932): partitions are shared, not owned.

Guarantees (asserted by the property tests)
    A1  if all members have the same subscription, each partition has the same number of members: as
        many as are needed for each member to have a partition. Members' partition counts differ by
        at most one
    A2  if subscriptions differ, the same holds for each topic and its subscribers
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
    """`partitions`: the assignable ones."""
    assignment: dict[str, list[Partition]] = {member_id: [] for member_id in members}
    for topics, member_ids in _pools(members, partitions):
        pool = [(topic_id, index) for topic_id in topics for index in partitions[topic_id]]
        held = {member_id: members[member_id].current for member_id in member_ids}
        for member_id, taken in _distribute(pool, member_ids, held).items():
            assignment[member_id] += taken
    return {member_id: _as_partitions(taken, members[member_id].current) for member_id, taken in assignment.items()}


def _pools(
    members: Mapping[str, MemberSpec], partitions: Mapping[bytes, tuple[int, ...]]
) -> Iterable[tuple[list[bytes], list[str]]]:
    """Topics that are distributed together, and the members that share them."""
    topics = sorted(topic_id for topic_id, indexes in partitions.items() if indexes)
    member_ids = sorted(members)
    if len({spec.topics for spec in members.values()}) <= 1:
        subscribed = [topic_id for topic_id in topics if member_ids and topic_id in members[member_ids[0]].topics]
        return [(subscribed, member_ids)] if subscribed else []
    by_topic = [
        ([topic_id], [member_id for member_id in member_ids if topic_id in members[member_id].topics])
        for topic_id in topics
    ]
    return [(topic_ids, subscribers) for topic_ids, subscribers in by_topic if subscribers]


def _distribute(
    pool: list[Partition], member_ids: list[str], current: Mapping[str, Mapping[bytes, tuple[int, ...]]]
) -> dict[str, list[Partition]]:
    members_per_partition = -(-len(member_ids) // len(pool))
    low, extra = divmod(len(pool) * members_per_partition, len(member_ids))
    missing_members = dict.fromkeys(pool, members_per_partition)
    held = {
        member_id: [
            (topic_id, index)
            for topic_id, indexes in current[member_id].items()
            for index in indexes
            if (topic_id, index) in missing_members
        ]
        for member_id in member_ids
    }
    order = sorted(member_ids, key=lambda member_id: -len(held[member_id]))  # members with the most may have one more
    quotas = {member_id: low + (number < extra) for number, member_id in enumerate(order)}
    taken: dict[str, dict[Partition, None]] = {}
    for member_id in order:
        kept = taken[member_id] = {}
        for partition in held[member_id]:
            if len(kept) < quotas[member_id] and missing_members[partition]:
                kept[partition] = None
                missing_members[partition] -= 1
    # (-(number of partitions that the member still lacks), member id): the member that lacks the
    # most comes first
    heap = [
        (len(taken[member_id]) - quotas[member_id], member_id)
        for member_id in member_ids
        if len(taken[member_id]) < quotas[member_id]
    ]
    heapq.heapify(heap)
    for partition in pool:
        to_push: list[tuple[int, str]] = []
        while missing_members[partition] and heap:
            balance, member_id = heapq.heappop(heap)
            if partition not in taken[member_id]:
                taken[member_id][partition] = None
                missing_members[partition] -= 1
                balance += 1
            if balance:
                to_push.append((balance, member_id))
        for entry in to_push:
            heapq.heappush(heap, entry)
    # Rare: the members below their quota already have every partition that is left. All partitions
    # are distributed again.
    if heap:
        rotation = cycle(member_ids)
        taken = {member_id: {} for member_id in member_ids}
        for partition in pool:
            for member_id in islice(rotation, members_per_partition):
                taken[member_id][partition] = None
    return {member_id: list(kept) for member_id, kept in taken.items()}


def _as_partitions(taken: list[Partition], current: Mapping[bytes, tuple[int, ...]]) -> Partitions:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, index in taken:
        by_topic.setdefault(topic_id, []).append(index)
    partitions = {topic_id: tuple(sorted(indexes)) for topic_id, indexes in sorted(by_topic.items())}
    return current if isinstance(current, dict) and current == partitions else partitions
