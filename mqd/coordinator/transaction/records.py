"""Records of __transaction_state, in Kafka's own schema (TransactionLogKey, TransactionLogValue),
so that Kafka's tools can read them.

    key     version int16 0, transactional_id string
    value   version int16 1 (flexible; 0 can be read too), producer_id int64, producer_epoch int16,
            transaction_timeout_ms int32, transaction_status int8, transaction_partitions nullable
            compact array of (topic compact string, partition_ids compact array of int32, tagged
            fields), last_update_ms int64, start_ms int64, tagged fields: 0 previous_producer_id
            int64, 1 next_producer_id int64, 2 client_transaction_version int16

Sources: the public record schemas of Kafka 4; KIP-98, KIP-890, KIP-915 (unknown tags are skipped).
"""

import enum
import struct

import msgspec

from mqd.coordinator.transaction.events import Partition
from mqd.protocol.codec_encoder import uvarint

KEY_VERSION = 0
VALUE_VERSION = 1


class State(enum.IntEnum):
    """Numbered as in the log. Dead is never written: its record is a tombstone."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6


# the names in responses to DescribeTransactions and ListTransactions
STATE_NAMES = {
    State.EMPTY: "Empty",
    State.ONGOING: "Ongoing",
    State.PREPARE_COMMIT: "PrepareCommit",
    State.PREPARE_ABORT: "PrepareAbort",
    State.COMPLETE_COMMIT: "CompleteCommit",
    State.COMPLETE_ABORT: "CompleteAbort",
    State.DEAD: "Dead",
}
_LOGGED_STATES = frozenset(State) - {State.DEAD}


class TransactionValue(msgspec.Struct):
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: State
    partitions: tuple[Partition, ...]
    last_update_ms: int
    start_ms: int
    previous_producer_id: int = -1
    next_producer_id: int = -1
    client_version: int = 0


_KEY = struct.Struct(">hh")
_HEAD = struct.Struct(">hqhib")
_TIMES = struct.Struct(">qq")
_TAG_LONG = struct.Struct(">BBq")
_TAG_SHORT = struct.Struct(">BBh")
_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
NO_PARTITIONS = b"\x01"
NULL_PARTITIONS = b"\x00"


def encode_key(transactional_id: str) -> bytes:
    name = transactional_id.encode()
    return _KEY.pack(KEY_VERSION, len(name)) + name


def decode_key(key: bytes) -> str | None:
    """The transactional id; None for a key of a newer version. Raises ValueError for bytes that are
    not a key.
    """
    if len(key) >= 2 and _INT16.unpack_from(key)[0] != KEY_VERSION:
        return None
    if len(key) < 4 or _KEY.unpack_from(key)[1] != len(key) - 4:
        raise ValueError(f"a key of {len(key)} bytes with a wrong length field")
    return key[4:].decode()


def encode_partitions(partitions: tuple[Partition, ...]) -> bytes:
    """Encodes the partition array of a value. The core keeps the result, because it writes the same
    partitions twice.
    """
    by_topic: dict[str, list[int]] = {}
    for topic, index in partitions:
        by_topic.setdefault(topic, []).append(index)
    encoded = bytearray(uvarint(len(by_topic) + 1))
    for topic, indexes in by_topic.items():
        name = topic.encode()
        encoded += (
            uvarint(len(name) + 1)
            + name
            + uvarint(len(indexes) + 1)
            + struct.pack(f">{len(indexes)}i", *indexes)
            + b"\x00"
        )
    return bytes(encoded)


def encode_value(value: TransactionValue, partitions: bytes | None = None) -> bytes:
    """Encodes version 1. `partitions`: the result of encode_partitions, which is used instead of
    value.partitions.
    """
    if partitions is None:
        partitions = NULL_PARTITIONS if value.state == State.EMPTY else encode_partitions(value.partitions)
    tags, count = b"", 0
    if value.previous_producer_id != -1:
        tags, count = _TAG_LONG.pack(0, 8, value.previous_producer_id), 1
    if value.next_producer_id != -1:
        tags, count = tags + _TAG_LONG.pack(1, 8, value.next_producer_id), count + 1
    if value.client_version:
        tags, count = tags + _TAG_SHORT.pack(2, 2, value.client_version), count + 1
    head = _HEAD.pack(VALUE_VERSION, value.producer_id, value.producer_epoch, value.timeout_ms, value.state)
    return head + partitions + _TIMES.pack(value.last_update_ms, value.start_ms) + bytes((count,)) + tags


def decode_value(data: bytes) -> TransactionValue:
    """Raises ValueError for bytes that it cannot read, including a newer version's."""
    try:
        return _Reader(data).value()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"a transaction's record cannot be read: {error}") from None


class _Reader:
    """Reads a value. Every length is checked against the remaining bytes before it is used."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def _take(self, layout: struct.Struct) -> tuple:
        fields = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return fields

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self._position]
            self._position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 28:
                raise ValueError("a varint of more than 32 bits")

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"{count} bytes where {len(self._data) - self._position} remain")
        data = self._data[self._position : end]
        self._position = end
        return data

    def _count(self, flexible: bool) -> int:
        """The element count of an array: -1 for null; never more than the remaining bytes."""
        count = self._varint() - 1 if flexible else self._take(_INT32)[0]
        if count > len(self._data) - self._position:
            raise ValueError(f"{count} elements where {len(self._data) - self._position} bytes remain")
        return count

    def value(self) -> TransactionValue:
        version, producer_id, epoch, timeout_ms, status = self._take(_HEAD)
        if version not in (0, 1):
            raise ValueError(f"version {version} of a transaction's record; 0 and 1 are known")
        if status not in _LOGGED_STATES or producer_id < 0:
            raise ValueError(f"a transaction's record with status {status} and producer id {producer_id}")
        flexible = version == 1
        partitions = self._partitions(flexible)
        last_update_ms, start_ms = self._take(_TIMES)
        value = TransactionValue(producer_id, epoch, timeout_ms, State(status), partitions, last_update_ms, start_ms)
        if flexible:
            self._tags(value)
        return value

    def _partitions(self, flexible: bool) -> tuple[Partition, ...]:
        partitions: list[Partition] = []
        for _ in range(self._count(flexible)):
            size = self._varint() - 1 if flexible else self._take(_INT16)[0]
            topic = self._bytes(size).decode()
            partitions.extend((topic, self._take(_INT32)[0]) for _ in range(self._count(flexible)))
            if flexible:
                self._tags(None)
        return tuple(partitions)

    def _tags(self, value: TransactionValue | None) -> None:
        for _ in range(self._varint()):
            tag, size = self._varint(), self._varint()
            body = self._bytes(size)
            if value is None:
                continue
            if tag == 0:
                (value.previous_producer_id,) = _INT64.unpack(body)
            elif tag == 1:
                (value.next_producer_id,) = _INT64.unpack(body)
            elif tag == 2:
                (value.client_version,) = _INT16.unpack(body)
