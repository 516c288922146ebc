"""GroupMetadata of `__consumer_offsets`: one record holds one generation of a classic group, as
Kafka writes it (key version 2, value version 3).

    key     version int16 = 2, group string
    value   version int16 = 0..3, protocol_type string, generation int32, protocol nullable string,
            leader nullable string, current_state_timestamp int64 (2+), members: count int32, then
            for each
                member_id string, group_instance_id nullable string (3+), client_id string,
                client_host string, rebalance_timeout int32 (1+), session_timeout int32,
                subscription bytes, assignment bytes
    string  int16 length (-1: null), UTF-8;   bytes: int32 length

Value version 4 is the same in flexible encoding; it can be read, too. Values come from disk or from
another broker's log: every length is checked before use, and invalid data raises ValueError.
Source: GroupMetadataKey and GroupMetadataValue of Kafka's message schemas.
"""

from __future__ import annotations

import struct

import msgspec

KEY_VERSION = 2
VALUE_VERSION = 3
VALUE_VERSION_MAX = 4

_KEY = struct.Struct(">hh")
_I16, _I32, _I64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")


class MemberRecord(msgspec.Struct, frozen=True, gc=False):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupRecord(msgspec.Struct, frozen=True):
    """`state_since_ms` is -1 in value versions 0 and 1, which have no such field."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_since_ms: int
    members: tuple[MemberRecord, ...]


def encode_key(group_id: str) -> bytes:
    name = group_id.encode()
    return _KEY.pack(KEY_VERSION, len(name)) + name


def _string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    data = text.encode()
    return _I16.pack(len(data)) + data


def _blob(data: bytes) -> bytes:
    return _I32.pack(len(data)) + data


def encode_member(member: MemberRecord) -> bytes:
    return b"".join(
        (
            _string(member.member_id),
            _string(member.group_instance_id),
            _string(member.client_id),
            _string(member.client_host),
            _I32.pack(member.rebalance_timeout_ms),
            _I32.pack(member.session_timeout_ms),
            _blob(member.subscription),
            _blob(member.assignment),
        )
    )


def encode_value(group: GroupRecord) -> bytes:
    head = (
        _I16.pack(VALUE_VERSION),
        _string(group.protocol_type),
        _I32.pack(group.generation),
        _string(group.protocol),
        _string(group.leader),
        _I64.pack(group.state_since_ms),
        _I32.pack(len(group.members)),
    )
    return b"".join((*head, *map(encode_member, group.members)))


class _Reader:
    """Reads fields from a value. A read past its end raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position, self.flexible = data, 0, False

    def number(self, layout: struct.Struct) -> int:
        if self.position + layout.size > len(self.data):
            raise ValueError(f"GroupMetadata is cut off at byte {self.position}")
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def varint(self) -> int:
        value = shift = 0
        while shift < 35:
            if self.position >= len(self.data):
                raise ValueError(f"GroupMetadata is cut off at byte {self.position}")
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError(f"GroupMetadata has a varint of more than 5 bytes that ends at byte {self.position}")

    def take(self, size: int) -> bytes | None:
        if size == -1:
            return None
        if size < 0 or size > len(self.data) - self.position:
            raise ValueError(
                f"GroupMetadata has a length of {size} at byte {self.position}, where"
                f" {len(self.data) - self.position} bytes remain"
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def optional_string(self) -> str | None:
        data = self.take(self.varint() - 1 if self.flexible else self.number(_I16))
        return None if data is None else data.decode()

    def string(self) -> str:
        return self.optional_string() or ""

    def blob(self) -> bytes:
        return self.take(self.varint() - 1 if self.flexible else self.number(_I32)) or b""

    def count(self, element_bytes_min: int) -> int:
        """An array's length. `element_bytes_min`: the minimum size of an element."""
        count = self.varint() - 1 if self.flexible else self.number(_I32)
        if count < 0 or count * element_bytes_min > len(self.data) - self.position:
            raise ValueError(
                f"GroupMetadata has a count of {count} members at byte {self.position}, where"
                f" {len(self.data) - self.position} bytes remain"
            )
        return count

    def skip_tags(self) -> None:
        if self.flexible:
            for _ in range(self.varint()):
                self.varint()
                self.take(self.varint())


def decode_value(data: bytes) -> GroupRecord:
    """Raises ValueError if the value is malformed, including text that is not UTF-8."""
    reader = _Reader(data)
    version = reader.number(_I16)
    if not 0 <= version <= VALUE_VERSION_MAX:
        raise ValueError(f"GroupMetadata has version {version}; only versions 0 to {VALUE_VERSION_MAX} can be read")
    reader.flexible = version >= 4
    protocol_type, generation = reader.string(), reader.number(_I32)
    protocol, leader = reader.optional_string(), reader.optional_string()
    state_since_ms = reader.number(_I64) if version >= 2 else -1
    members = tuple(_decode_member(reader, version) for _ in range(reader.count(14)))
    reader.skip_tags()
    if reader.position != len(data):
        raise ValueError(f"GroupMetadata has {len(data) - reader.position} bytes too many")
    if len({member.member_id for member in members}) != len(members):
        raise ValueError("GroupMetadata lists a member twice")
    return GroupRecord(protocol_type, generation, protocol, leader, state_since_ms, members)


def _decode_member(reader: _Reader, version: int) -> MemberRecord:
    member_id = reader.string()
    instance_id = reader.optional_string() if version >= 3 else None
    client_id, client_host = reader.string(), reader.string()
    rebalance_timeout_ms = reader.number(_I32) if version >= 1 else -1
    session_timeout_ms = reader.number(_I32)
    if rebalance_timeout_ms == -1:
        rebalance_timeout_ms = session_timeout_ms
    subscription, assignment = reader.blob(), reader.blob()
    reader.skip_tags()
    return MemberRecord(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


def subscribed_topics(subscription: bytes) -> list[str]:
    """The topics of a consumer's subscription. Every version begins with them (version int16,
    topics: count int32, strings). Raises ValueError.
    """
    reader = _Reader(subscription)
    reader.number(_I16)
    return [reader.string() for _ in range(reader.count(2))]
