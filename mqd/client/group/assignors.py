"""Assignment of partitions by a group's members (classic protocol): librdkafka's range, roundrobin
and cooperative-sticky, and the encoding of subscriptions and assignments.

    subscription   version int16 = 1, topics: count int32, strings; user_data nullable bytes; owned
                   partitions: count int32, (topic string, count int32, int32...)
    assignment     version int16 = 1, partitions: count int32, (topic string, count int32,
                   int32...); user_data nullable bytes

Both come from other members and are not trusted: lengths are checked, and invalid data raises
ValueError.
Source: Kafka's ConsumerProtocolSubscription, ConsumerProtocolAssignment (KIP-429).

    A1  every partition of a subscribed topic has one owner, which subscribes to the topic (but see A3)
    A2  cooperative-sticky: no move of a single partition would make the members' counts more even,
        and no partition moves unnecessarily
    A3  cooperative-sticky: a partition that moves from one member to another is assigned to no
        member in this round: its previous owner releases it, and joins again
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

import msgspec

TopicPartition = tuple[str, int]
COOPERATIVE = "cooperative-sticky"
_VERSION = 1


class Subscription(msgspec.Struct, frozen=True):
    topics: frozenset[str]
    owned: frozenset[TopicPartition] = frozenset()


Members = Mapping[str, Subscription]
PartitionCounts = Mapping[str, int]
Assignment = dict[str, set[TopicPartition]]


def assign_range(members: Members, counts: PartitionCounts) -> Assignment:
    """Gives each subscriber of a topic adjacent partitions; the first subscribers get one more."""
    assignment: Assignment = {member_id: set() for member_id in members}
    for topic, count in sorted(counts.items()):
        subscribers = sorted(member_id for member_id, subscription in members.items() if topic in subscription.topics)
        begin = 0
        for number, member_id in enumerate(subscribers):
            size = count // len(subscribers) + (number < count % len(subscribers))
            assignment[member_id].update((topic, index) for index in range(begin, begin + size))
            begin += size
    return assignment


def assign_roundrobin(members: Members, counts: PartitionCounts) -> Assignment:
    assignment: Assignment = {member_id: set() for member_id in members}
    order = sorted(members)
    turn = 0
    for topic, count in sorted(counts.items()):
        if not any(topic in subscription.topics for subscription in members.values()):
            continue
        for index in range(count):
            while topic not in members[order[turn % len(order)]].topics:
                turn += 1
            assignment[order[turn % len(order)]].add((topic, index))
            turn += 1
    return assignment


def assign_sticky(members: Members, counts: PartitionCounts) -> Assignment:
    """Returns the target assignment, to which A3 has not been applied yet."""
    claims: dict[TopicPartition, list[str]] = {}
    for member_id, subscription in sorted(members.items()):
        for topic, index in subscription.owned:
            if topic in subscription.topics and index < counts.get(topic, 0):
                claims.setdefault((topic, index), []).append(member_id)
    owners = {partition: claimants[0] for partition, claimants in claims.items() if len(claimants) == 1}
    sizes = dict.fromkeys(sorted(members), 0)
    for member_id in owners.values():
        sizes[member_id] += 1
    subscribers = {topic: [member_id for member_id in sizes if topic in members[member_id].topics] for topic in counts}
    partitions = [
        (topic, index) for topic, count in sorted(counts.items()) if subscribers[topic] for index in range(count)
    ]
    for partition in partitions:
        if partition not in owners:
            receiver = min(subscribers[partition[0]], key=sizes.__getitem__)
            owners[partition] = receiver
            sizes[receiver] += 1
    has_moved = True
    while has_moved:  # terminates: each move makes the sum of the squared sizes smaller
        has_moved = False
        for partition in partitions:
            receiver = min(subscribers[partition[0]], key=sizes.__getitem__)
            if sizes[owners[partition]] > sizes[receiver] + 1:
                sizes[owners[partition]] -= 1
                sizes[receiver] += 1
                owners[partition] = receiver
                has_moved = True
    assignment: Assignment = {member_id: set() for member_id in members}
    for partition, member_id in owners.items():
        assignment[member_id].add(partition)
    return assignment


def assign_cooperative(members: Members, counts: PartitionCounts) -> Assignment:
    """Returns the result of assign_sticky() without the partitions that another member still has (A3)."""
    target = assign_sticky(members, counts)
    claimants: dict[TopicPartition, set[str]] = {}
    for member_id, subscription in members.items():
        for partition in subscription.owned:
            claimants.setdefault(partition, set()).add(member_id)
    return {
        member_id: {partition for partition in partitions if claimants.get(partition, {member_id}) == {member_id}}
        for member_id, partitions in target.items()
    }


ASSIGNORS: dict[str, Callable[[Members, PartitionCounts], Assignment]] = {
    "range": assign_range,
    "roundrobin": assign_roundrobin,
    COOPERATIVE: assign_cooperative,
}


# -- encoding --------------------------------------------------------------------------------------


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">h", len(data)) + data


def _encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        by_topic.setdefault(topic, []).append(index)
    parts = [
        _encode_string(topic) + struct.pack(f">i{len(indexes)}i", len(indexes), *indexes)
        for topic, indexes in by_topic.items()
    ]
    return struct.pack(">i", len(parts)) + b"".join(parts)


def encode_subscription(subscription: Subscription) -> bytes:
    topics = sorted(subscription.topics)
    return (
        struct.pack(">hi", _VERSION, len(topics))
        + b"".join(map(_encode_string, topics))
        + struct.pack(">i", -1)
        + _encode_partitions(subscription.owned)
    )


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    return struct.pack(">h", _VERSION) + _encode_partitions(partitions) + struct.pack(">i", -1)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def number(self, number_format: str) -> int:
        size = struct.calcsize(number_format)
        return int(struct.unpack(number_format, self._take(size))[0])

    def _take(self, size: int) -> bytes:
        if size < 0 or size > len(self._data) - self._position:
            raise ValueError(f"invalid length {size} at byte {self._position} of {len(self._data)}")
        self._position += size
        return self._data[self._position - size : self._position]

    def string(self) -> str:
        return self._take(self.number(">h")).decode()

    def blob(self) -> bytes:
        size = self.number(">i")
        return b"" if size == -1 else self._take(size)

    def count(self, element_bytes_min: int) -> int:
        count = self.number(">i")
        if count < 0 or count * element_bytes_min > len(self._data) - self._position:
            raise ValueError(f"invalid number of elements {count} at byte {self._position} of {len(self._data)}")
        return count

    def partitions(self) -> frozenset[TopicPartition]:
        partitions: set[TopicPartition] = set()
        for _ in range(self.count(6)):
            topic, count = self.string(), self.count(4)
            partitions.update((topic, index) for index in struct.unpack(f">{count}i", self._take(4 * count)))
        return frozenset(partitions)


def decode_subscription(data: bytes) -> Subscription:
    """Raises ValueError if the bytes are malformed."""
    reader = _Reader(data)
    version = reader.number(">h")
    topics = frozenset(reader.string() for _ in range(reader.count(2)))
    reader.blob()
    return Subscription(topics, reader.partitions() if version >= 1 else frozenset())


def decode_assignment(data: bytes) -> frozenset[TopicPartition]:
    """`data` is empty for a member without partitions. Raises ValueError."""
    if not data:
        return frozenset()
    reader = _Reader(data)
    reader.number(">h")
    return reader.partitions()
