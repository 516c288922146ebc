"""The embedded protocol of Kafka's clients: the JoinGroup metadata and the SyncGroup assignment of
members with the protocol type "consumer".

    subscription   version int16 = 0..3, topics: count int32, strings; user_data nullable bytes;
                   owned_partitions (1+): count int32, (topic string, count int32, int32...);
                   generation_id int32 (2+); rack_id nullable string (3+)
    assignment     version int16 = 0..3, partitions: count int32, (topic string, count int32,
                   int32...); user_data nullable bytes
    string         int16 length (-1: null), UTF-8; bytes: int32 length (-1: null)

Clients write these bytes, so they are untrusted: lengths are checked, and invalid data raises
ValueError. Newer versions only append fields: bytes after the known fields are ignored. Source:
Kafka's schemas ConsumerProtocolSubscription and ConsumerProtocolAssignment (KIP-429, KIP-792,
KIP-881).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

VERSION_MAX = 3
_I16, _I32 = struct.Struct(">h"), struct.Struct(">i")


class Subscription(msgspec.Struct, frozen=True):
    version: int
    topics: tuple[str, ...]
    owned: dict[str, tuple[int, ...]]
    rack_id: str | None = None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def integer(self, layout: struct.Struct) -> int:
        if self.position + layout.size > len(self.data):
            raise ValueError(f"consumer protocol: cut off at byte {self.position}")
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self.data) - self.position:
            raise ValueError(f"consumer protocol: a length of {size} at byte {self.position}")
        self.position += size
        return self.data[self.position - size : self.position]

    def string(self) -> str:
        return self.take(self.integer(_I16)).decode()

    def count(self, element_bytes_min: int) -> int:
        count = self.integer(_I32)
        if count < 0 or count * element_bytes_min > len(self.data) - self.position:
            raise ValueError(f"consumer protocol: {count} elements at byte {self.position}")
        return count

    def partitions(self) -> dict[str, tuple[int, ...]]:
        by_topic: dict[str, set[int]] = {}
        for _ in range(self.count(6)):
            topic = self.string()
            count = self.count(4)
            by_topic.setdefault(topic, set()).update(struct.unpack(f">{count}i", self.take(4 * count)))
        return {topic: tuple(sorted(indexes)) for topic, indexes in by_topic.items()}

    def skip_bytes(self) -> None:
        size = self.integer(_I32)
        if size != -1:
            self.take(size)


def decode_subscription(data: bytes) -> Subscription:
    """Raises ValueError if the bytes are malformed."""
    reader = _Reader(data)
    version = reader.integer(_I16)
    if version < 0:
        raise ValueError(f"consumer protocol: version {version}")
    topics = tuple(sorted({reader.string() for _ in range(reader.count(2))}))
    reader.skip_bytes()
    owned = reader.partitions() if version >= 1 else {}
    if version >= 2:
        reader.integer(_I32)
    rack_id = None
    if version >= 3:
        size = reader.integer(_I16)
        rack_id = None if size == -1 else reader.take(size).decode()
    return Subscription(min(version, VERSION_MAX), topics, owned, rack_id)


def decode_assignment(data: bytes) -> dict[str, tuple[int, ...]]:
    """Topic name -> partitions, ascending. `data` is empty for a member that has never received an
    assignment. Raises ValueError.
    """
    if not data:
        return {}
    reader = _Reader(data)
    if reader.integer(_I16) < 0:
        raise ValueError("consumer protocol: a version below 0")
    return {topic: indexes for topic, indexes in reader.partitions().items() if indexes}


def encode_assignment(version: int, partitions: Mapping[str, tuple[int, ...]]) -> bytes:
    parts = [_I16.pack(version), _I32.pack(len(partitions))]
    for topic, indexes in partitions.items():
        name = topic.encode()
        parts += (_I16.pack(len(name)), name, _I32.pack(len(indexes)), struct.pack(f">{len(indexes)}i", *indexes))
    parts.append(_I32.pack(-1))
    return b"".join(parts)
