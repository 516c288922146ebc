"""The KIP-848 server-side assignors, as pure functions.

    uniform   every member gets the same number of partitions (plus or minus one), with as few moves
              as that allows
    range     every subscribed member gets a contiguous run of each topic's partitions; topics with
              the same subscribers and partition count are split in the same way, as joins of streams
              require

Guarantees of both (asserted by check_assignment() and the property tests)
    A1  every partition of a topic with subscribers has exactly one owner, which is a subscriber
    A2  nothing else is assigned
    A3  uniform, all subscriptions alike: counts differ by at most one, and the number of moves is
        minimal
    A4  uniform, subscriptions differ: moving any one partition to another of its subscribers would
        not balance the counts better
    A5  range: for each topic the subscribers' counts differ by at most one, and each has a
        contiguous run
    A6  the same input gives the same output
Racks are ignored.

Cost: uniform O(partitions + members) for equal subscriptions, otherwise O(sum of subscriptions +
partitions log members) for each pass, at most PASSES_MAX passes; range O(sum of subscriptions).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

Partitions = dict[bytes, tuple[int, ...]]  # topic id -> partition indexes, ascending, never empty

PASSES_MAX = 64


class MemberSpec(NamedTuple):
    """`topics`: subscribed ids (unknown ones are ignored). `current`: the member's part of the last
    target.
    """

    topics: frozenset[bytes]
    current: Mapping[bytes, tuple[int, ...]]
    instance_id: str | None = None


Members = Mapping[str, MemberSpec]
Counts = Mapping[bytes, int]  # topic id -> number of partitions


def uniform(members: Members, counts: Counts) -> dict[str, Partitions]:
    if not members:
        return {}
    first = next(iter(members.values())).topics
    if all(spec.topics is first or spec.topics == first for spec in members.values()):
        return _uniform_alike(members, {topic: counts[topic] for topic in sorted(first) if topic in counts})
    return _uniform_mixed(members, counts)


class _Draft:
    """An assignment under construction: every member begins with the partitions that it may keep.
    Members whose partitions do not change keep their original objects, so a large group with few
    moves costs little. `taken`: for each topic, which partitions have an owner. `sizes`: how many
    partitions each member has.
    """

    def __init__(self, members: Members, counts: Counts) -> None:
        self.taken = {topic: bytearray(count) for topic, count in counts.items()}
        self.sizes: dict[str, int] = {}
        self._untouched: dict[str, Mapping[bytes, tuple[int, ...]]] = {}
        self._modified: dict[str, dict[bytes, list[int]]] = {}  # of members that are not in _untouched
        for member_id in sorted(members):
            self._keep_current(member_id, members[member_id])

    def _keep_current(self, member_id: str, spec: MemberSpec) -> None:
        taken, size, keeps_all = self.taken, 0, True
        for topic, indexes in spec.current.items():
            flags = taken.get(topic)
            if (
                flags is None
                or topic not in spec.topics
                or indexes[-1] >= len(flags)
                or any([flags[index] for index in indexes])
            ):
                keeps_all = False
                break
        if keeps_all:
            self._untouched[member_id] = spec.current
        kept_by_topic: dict[bytes, list[int]] = {}
        for topic, indexes in spec.current.items():
            flags = taken.get(topic)
            if flags is None or topic not in spec.topics:
                continue
            kept = indexes if keeps_all else [index for index in indexes if index < len(flags) and not flags[index]]
            for index in kept:
                flags[index] = 1
            size += len(kept)
            if kept and not keeps_all:
                kept_by_topic[topic] = list(kept)
        self.sizes[member_id] = size
        if not keeps_all:
            self._modified[member_id] = kept_by_topic

    def editable(self, member_id: str) -> dict[bytes, list[int]]:
        """The member's partitions, which the caller may modify; it must keep `sizes` up to date."""
        partitions = self._modified.get(member_id)
        if partitions is None:
            partitions = self._modified[member_id] = {
                topic: list(indexes) for topic, indexes in self._untouched.pop(member_id).items()
            }
        return partitions

    def has(self, member_id: str, topic: bytes) -> bool:
        partitions = self._modified.get(member_id)
        return bool(partitions.get(topic) if partitions is not None else self._untouched[member_id].get(topic))

    def free_partitions(self) -> list[tuple[bytes, int]]:
        return [
            (topic, index)
            for topic, flags in self.taken.items()
            if 0 in flags
            for index, flag in enumerate(flags)
            if not flag
        ]

    def build(self) -> dict[str, Partitions]:
        assignment: dict[str, Partitions] = dict(self._untouched)  # type: ignore[arg-type]  # the caller's objects
        for member_id, partitions in self._modified.items():
            assignment[member_id] = {
                topic: tuple(sorted(partitions[topic])) for topic in sorted(partitions) if partitions[topic]
            }
        return assignment


def _uniform_alike(members: Members, counts: Counts) -> dict[str, Partitions]:
    low, extra = divmod(sum(counts.values()), len(members))
    draft = _Draft(members, counts)
    sizes = draft.sizes
    for member_id, size in sizes.items():
        quota = low
        if size > low and extra:
            quota, extra = low + 1, extra - 1
        if size > quota:
            _give_up(draft.editable(member_id), size - quota, draft.taken)
            sizes[member_id] = quota
    below_low = [member_id for member_id, size in sizes.items() if size < low]
    extra_takers = [member_id for member_id, size in sizes.items() if size <= low]
    free = draft.free_partitions()
    next_free = 0
    while below_low:  # round-robin, so that a topic's partitions are spread
        for member_id in below_low:
            topic, index = free[next_free]
            next_free += 1
            draft.editable(member_id).setdefault(topic, []).append(index)
            sizes[member_id] += 1
        below_low = [member_id for member_id in below_low if sizes[member_id] < low]
    for member_id, (topic, index) in zip(extra_takers, free[next_free:], strict=False):
        draft.editable(member_id).setdefault(topic, []).append(index)
    return draft.build()


def _give_up(partitions: dict[bytes, list[int]], count: int, taken: dict[bytes, bytearray]) -> None:
    """Gives up `count` partitions, each from the topic with the most partitions left."""
    heap = [(-len(indexes), topic) for topic, indexes in partitions.items()]
    heapq.heapify(heap)
    for _ in range(count):
        size, topic = heap[0]
        taken[topic][partitions[topic].pop()] = 0
        heapq.heapreplace(heap, (size + 1, topic))


# -- subscriptions that differ ---------------------------------------------------------------------


def _uniform_mixed(members: Members, counts: Counts) -> dict[str, Partitions]:
    subscribers: dict[bytes, list[str]] = {}
    for member_id in sorted(members):
        for topic in members[member_id].topics:
            if topic in counts:
                subscribers.setdefault(topic, []).append(member_id)
    subscribed_counts = {topic: counts[topic] for topic in sorted(subscribers)}
    draft = _Draft(members, subscribed_counts)
    sizes = draft.sizes
    # Topics with few subscribers first: their partitions have the fewest alternatives.
    order = sorted(subscribed_counts, key=lambda topic: (len(subscribers[topic]), topic))
    for topic in order:
        free = [index for index, flag in enumerate(draft.taken[topic]) if not flag]
        if free:
            heap = [(sizes[member_id], member_id) for member_id in subscribers[topic]]
            heapq.heapify(heap)
            for index in free:
                size, member_id = heap[0]
                draft.editable(member_id).setdefault(topic, []).append(index)
                sizes[member_id] = size + 1
                heapq.heapreplace(heap, (size + 1, member_id))
    for _ in range(PASSES_MAX):
        # sum() rather than any(): every pass handles every topic
        if not sum(_even_out(topic, subscribers[topic], draft) for topic in order):
            break
    return draft.build()


def _even_out(topic: bytes, subscribers: list[str], draft: _Draft) -> int:
    """Moves partitions of one topic from the subscriber with the most to the one with the fewest
    while that improves the balance. Returns the number of moves.
    """
    sizes = draft.sizes
    by_most = [(-sizes[member_id], member_id) for member_id in subscribers if draft.has(member_id, topic)]
    by_fewest = [(sizes[member_id], member_id) for member_id in subscribers]
    if not by_most or -min(by_most)[0] - min(by_fewest)[0] < 2:
        return 0
    heapq.heapify(by_most)
    heapq.heapify(by_fewest)
    move_count = 0
    while by_most:
        size, giver = by_most[0]
        if -size != sizes[giver] or not draft.has(giver, topic):
            heapq.heappop(by_most)
            if draft.has(giver, topic):
                heapq.heappush(by_most, (-sizes[giver], giver))
            continue
        taker_size, taker = by_fewest[0]
        if taker_size != sizes[taker]:
            heapq.heapreplace(by_fewest, (sizes[taker], taker))
            continue
        if sizes[giver] - taker_size < 2:
            break
        had_partitions = draft.has(taker, topic)
        draft.editable(taker).setdefault(topic, []).append(draft.editable(giver)[topic].pop())
        sizes[giver] -= 1
        sizes[taker] += 1
        move_count += 1
        if not had_partitions:
            heapq.heappush(by_most, (-sizes[taker], taker))
    return move_count


# -- range -----------------------------------------------------------------------------------------


def range_(members: Members, counts: Counts) -> dict[str, Partitions]:
    """Members are ordered by their current partitions, those without any last, so that contiguous
    runs move as little as possible.
    """

    def sort_key(member_id: str) -> tuple[int, str, str]:
        spec = members[member_id]
        first = min(
            (indexes[0] for topic, indexes in spec.current.items() if topic in spec.topics and indexes), default=1 << 31
        )
        return first, spec.instance_id or "\U0010ffff", member_id

    subscribers: dict[bytes, list[str]] = {}
    for member_id in sorted(members, key=sort_key):
        for topic in members[member_id].topics:
            if topic in counts:
                subscribers.setdefault(topic, []).append(member_id)
    assignment: dict[str, Partitions] = {member_id: {} for member_id in members}
    for topic in sorted(subscribers):
        owners = subscribers[topic]
        low, extra = divmod(counts[topic], len(owners))
        start = 0
        for position, member_id in enumerate(owners):
            end = start + low + (position < extra)
            if end == start:
                break
            assignment[member_id][topic] = tuple(range(start, end))
            start = end
    return assignment


ASSIGNORS: dict[str, Callable[[Members, Counts], dict[str, Partitions]]] = {"uniform": uniform, "range": range_}


def check_assignment(members: Members, counts: Counts, assignment: Mapping[str, Partitions]) -> None:
    """Asserts A1 and A2."""
    owners: set[tuple[bytes, int]] = set()
    for member_id, partitions in assignment.items():
        for topic, indexes in partitions.items():
            assert topic in members[member_id].topics, f"A1: {member_id} does not subscribe to {topic.hex()}"
            assert (
                indexes and list(indexes) == sorted(set(indexes)) and indexes[0] >= 0 and indexes[-1] < counts[topic]
            ), f"A2: {indexes}"
            for index in indexes:
                assert (topic, index) not in owners, f"A1: {topic.hex()}-{index} has two owners"
                owners.add((topic, index))
    subscribed = {topic for spec in members.values() for topic in spec.topics if topic in counts}
    assert len(owners) == sum(counts[topic] for topic in subscribed), "A1: a partition has no owner"
