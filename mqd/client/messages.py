"""A Message class with confluent_kafka's method names, and confluent_kafka classes for clients.

1. `Message` is a subclass of confluent_kafka.Message, but every method is ours: its C fields are not
   used.
2. KafkaError, KafkaException and TopicPartition are confluent_kafka's classes, not copies:
   `except KafkaException` catches the errors of both transports.
3. A consumer's group metadata has confluent_kafka's serialized form, so a consumer on one transport
   works with a transactional producer on the other.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sized
from typing import NamedTuple

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING as OFFSET_BEGINNING
from confluent_kafka import OFFSET_END as OFFSET_END
from confluent_kafka import OFFSET_INVALID as OFFSET_INVALID
from confluent_kafka import OFFSET_STORED as OFFSET_STORED
from confluent_kafka import TIMESTAMP_CREATE_TIME as TIMESTAMP_CREATE_TIME
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME as TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE as TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import KafkaError as KafkaError
from confluent_kafka import KafkaException as KafkaException
from confluent_kafka import TopicPartition as TopicPartition

from mqd.protocol.errors import ERRORS

_NO_TIMESTAMP = (TIMESTAMP_NOT_AVAILABLE, 0)


class Message(confluent_kafka.Message):
    """One record, or an error event when error() is not None. The methods are
    confluent_kafka.Message's.

    `headers` may be given as the bytes of a record's header section (count varint first): they are
    decoded on first use.
    """

    __slots__ = (
        "_error",
        "_headers",
        "_key",
        "_latency",
        "_leader_epoch",
        "_offset",
        "_partition",
        "_timestamp",
        "_topic",
        "_value",
    )

    def __init__(
        self,
        topic=None,
        partition=None,
        offset=None,
        key=None,
        value=None,
        headers=None,
        error=None,
        timestamp=_NO_TIMESTAMP,
        latency=None,
        leader_epoch=None,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._key = key
        self._value = value
        self._headers = headers
        self._error = error
        self._timestamp = timestamp
        self._latency = latency
        self._leader_epoch = leader_epoch

    def topic(self) -> str | None:
        """Topic name."""
        return self._topic

    def partition(self) -> int | None:
        """Partition number."""
        return self._partition

    def offset(self) -> int | None:
        """Offset in the partition; None when it is not known (not delivered, or acks=0)."""
        return self._offset

    def key(self) -> bytes | None:
        """The key's bytes, or None."""
        return self._key

    def value(self) -> bytes | None:
        """The value's bytes, or None (a tombstone)."""
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:  # type: ignore[override]  # values never as str
        """[(key, value)...], or None when there are none."""
        if isinstance(self._headers, (bytes, memoryview)):
            self._headers = decode_headers(self._headers)
        return self._headers or None

    def error(self) -> KafkaError | None:
        """None if this object is a record; otherwise the error or event that it represents."""
        return self._error

    def timestamp(self) -> tuple[int, int]:
        """Returns (type, milliseconds since the epoch); the type is TIMESTAMP_CREATE_TIME,
        TIMESTAMP_LOG_APPEND_TIME or TIMESTAMP_NOT_AVAILABLE.
        """
        return self._timestamp

    def latency(self) -> float | None:
        """Seconds from produce() to the delivery report; None for consumed messages."""
        return self._latency

    def leader_epoch(self) -> int | None:
        """The leader epoch of the record's batch, or None."""
        return self._leader_epoch

    def delivery_count(self) -> int | None:
        """How many times the share group has delivered the record; None without a share group."""
        return None

    def set_headers(self, value) -> None:
        self._headers = value

    def set_key(self, value) -> None:
        self._key = value

    def set_value(self, value) -> None:
        self._value = value

    def set_topic(self, value) -> None:
        self._topic = value

    def set_error(self, value) -> None:
        self._error = value

    def _fields(self) -> tuple:
        return (
            self._topic,
            self._partition,
            self._offset,
            self._key,
            self._value,
            self.headers(),
            self._error,
            self._timestamp,
            self._latency,
            self._leader_epoch,
        )

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, Message) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as confluent_kafka's

    def __reduce__(self) -> tuple:
        return type(self), self._fields()

    def __len__(self) -> int:
        return len(self._value) if self._value is not None else 0

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        if self._error is not None:
            return f"<Message {self._error}>"
        return f"<Message {self._topic} [{self._partition}] at offset {self._offset}, {len(self)} bytes>"


class BatchDelivery(NamedTuple):
    """The argument of a produce_batch callback: one record batch of the call. All its records have
    the same outcome.

    `indices` are the positions of its records in the arguments of the call, in the order of their
    offsets: the i-th has offset base_offset + i. base_offset is None when it is not known (acks=0,
    an error).
    """

    topic: str
    partition: int
    base_offset: int | None
    indices: Sized
    latency: float

    @property
    def count(self) -> int:  # type: ignore[override]  # not tuple's method
        return len(self.indices)


def partition_of(message: Message) -> tuple[str, int]:
    """The topic and partition of a consumed record."""
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return topic, partition


def offset_of(message: Message) -> int:
    offset = message.offset()
    if offset is None:
        raise ValueError("the message has no offset: it was not read from a topic")
    return offset


def next_offset(message: Message) -> int:
    """Returns the offset at which reading continues: the record's own offset if its value could not be
    decrypted, otherwise the one after it.
    """
    return offset_of(message) + (message.error() is None)


def is_eof(event: Message) -> bool:
    """Whether the event reports the end of a partition (enable.partition.eof)."""
    error = event.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def will_be_read_again(event: Message, partitions_to_reread: Container[tuple[str, int]]) -> bool:
    """Whether the event may be dropped: its partition will be read again, and the event will then be
    reported again. An error without an offset belongs to the topic and must not be dropped.
    """
    return event.offset() is not None and (event.topic(), event.partition()) in partitions_to_reread


_GROUP_METADATA_MAGIC = b"CGMDv2:"


class GroupMetadata(NamedTuple):
    """A consumer's membership in its group, for committing offsets in a transaction (KIP-447)."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None

    def to_bytes(self) -> bytes:
        """librdkafka's serialized form, as from confluent_kafka's consumer_group_metadata()."""
        instance = b"\1" if self.group_instance_id is None else b"\0" + self.group_instance_id.encode() + b"\0"
        return (
            _GROUP_METADATA_MAGIC
            + struct.pack("=i", self.generation_id)
            + self.group_id.encode()
            + b"\0"
            + self.member_id.encode()
            + b"\0"
            + instance
        )

    @classmethod
    def read(cls, metadata: object) -> GroupMetadata:
        """Reads a GroupMetadata or its serialized form. Raises KafkaException (_INVALID_ARG)."""
        if isinstance(metadata, GroupMetadata):
            return metadata
        data = metadata if isinstance(metadata, bytes) else b""
        try:
            if not data.startswith(_GROUP_METADATA_MAGIC):
                raise ValueError("no group metadata")
            (generation_id,) = struct.unpack_from("=i", data, len(_GROUP_METADATA_MAGIC))
            group_id, member_id, rest = data[len(_GROUP_METADATA_MAGIC) + 4 :].split(b"\0", 2)
            instance = None if rest == b"\1" else rest.removeprefix(b"\0").removesuffix(b"\0").decode()
            return cls(group_id.decode(), generation_id, member_id.decode(), instance)
        except (ValueError, struct.error):
            raise failure(
                KafkaError._INVALID_ARG, "group_metadata must be the result of consumer.consumer_group_metadata()"
            ) from None


# -- errors ----------------------------------------------------------------------------------------


def local_error(
    code: int, reason: str | None = None, *, fatal: bool = False, retriable: bool = False, abort: bool = False
) -> KafkaError:
    """A KafkaError with librdkafka's flags: fatal (the client cannot continue), retriable, abort (the
    client can continue once the transaction is aborted).
    """
    return KafkaError(code, reason, fatal, retriable, abort)


def broker_error(code: int, activity: str = "", **flags: bool) -> KafkaError:
    """A KafkaError for an error code in a response; by default retriable if the protocol's table of
    errors says so.
    """
    entry = ERRORS.get(code)
    flags.setdefault("retriable", entry is not None and entry.retriable)
    text = f"Broker: {entry.message if entry else f'error {code}'}"
    return local_error(code, f"{activity}: {text}" if activity else text, **flags)


def failure(code: int, reason: str | None = None, **flags: bool) -> KafkaException:
    """A KafkaException with its KafkaError as args[0]."""
    return KafkaException(local_error(code, reason, **flags))


# -- headers ---------------------------------------------------------------------------------------


def _read_varint(data, position: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise ValueError("a varint in the headers is too long")


def decode_headers(data: bytes | memoryview) -> list[tuple[str, bytes | None]]:
    """Decodes a record's header section, which begins with the count. The bytes come from an
    arbitrary producer: raises ValueError if they are malformed.
    """
    try:
        count, position = _read_varint(data, 0)
        if not 0 <= count <= len(data):
            raise ValueError(f"{count} headers in {len(data)} bytes")
        headers: list[tuple[str, bytes | None]] = []
        for _ in range(count):
            size, position = _read_varint(data, position)
            if not 0 <= size <= len(data) - position:
                raise ValueError(f"a header's key of {size} bytes")
            key = bytes(data[position : position + size]).decode("utf-8", "surrogateescape")
            size, position = _read_varint(data, position + size)
            if position + max(size, 0) > len(data):
                raise ValueError("a header ends beyond its record")
            headers.append((key, None if size < 0 else bytes(data[position : position + size])))
            position += max(size, 0)
        return headers
    except IndexError:
        raise ValueError("the headers are cut off") from None


def _append_varint(out: bytearray, value: int) -> None:
    value = value << 1 ^ value >> 63
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def encode_headers(headers: object) -> bytes:
    """Encodes a dict or a list of (str, bytes | str | None) as a record's header section. Raises
    TypeError as confluent_kafka does.
    """
    if isinstance(headers, dict):
        headers = list(headers.items())
    if not isinstance(headers, list):
        raise TypeError(f"expected headers to be dict or list of (key, value) tuples, not {type(headers).__name__}")
    out = bytearray()
    _append_varint(out, len(headers))
    for header in headers:
        try:
            key, value = header
        except (TypeError, ValueError):
            raise TypeError("expected headers to be dict or list of (key, value) tuples") from None
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"expected header key to be str, not {type(key).__name__}")
        name = key if isinstance(key, bytes) else key.encode()
        _append_varint(out, len(name))
        out += name
        if value is None:
            out.append(1)
            continue
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"expected header value to be None, binary, or unicode string, not {type(value).__name__}")
        value = bytes(value)  # a memoryview's length counts items, which may be larger than a byte
        _append_varint(out, len(value))
        out += value
    return bytes(out)
