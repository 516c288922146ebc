"""The parts of a case: requests with symbols for names, ids and record batches, because the two
brokers assign different ones, and the world in which a broker's values replace them.
"""

from __future__ import annotations

import dataclasses
import struct

import msgspec

from mqd.protocol.crc32c import crc32c
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch

PREFIX = "¤"  # in a generated name: the case's own prefix
NO_UUID = bytes(16)


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value assigned by a broker: `kind` is topic_id, producer_id, producer_epoch, member_id,
    generation_id or session_id. Before it is assigned, it is the value for none.
    """

    kind: str
    name: str
    plus: int = 0

    def none(self) -> object:
        return {"topic_id": NO_UUID, "member_id": ""}.get(self.kind, -1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Record batches of a Produce request; `damage` is applied to the complete bytes."""

    values: tuple[bytes | None, ...] = (b"v",)
    key: bytes | None = None
    compression: str = "none"
    producer_id: Ref | int = -1
    producer_epoch: Ref | int = -1
    base_sequence: int = -1
    timestamp_ms: int = 1_700_000_000_000
    is_transactional: bool = False
    is_control: bool = False
    copies: int = 1
    damage: str = ""

    def build(self, world: World) -> bytes:
        whole = encode_batch(
            [Record(value, self.key, self.timestamp_ms) for value in self.values],
            compression=self.compression,
            producer_id=world.resolve(self.producer_id),
            producer_epoch=world.resolve(self.producer_epoch),
            base_sequence=self.base_sequence,
            is_transactional=self.is_transactional,
            is_control=self.is_control,
        )
        return DAMAGES[self.damage](whole) * self.copies


def _with(whole: bytes, position: int, format_: str, value: int) -> bytes:
    """The batch with one field changed and its CRC recomputed."""
    changed = bytearray(whole)
    struct.pack_into(format_, changed, position, value)
    struct.pack_into(">I", changed, 17, crc32c(bytes(changed[21:])))
    return bytes(changed)


DAMAGES = {
    "": lambda whole: whole,
    "crc": lambda whole: whole[:17] + bytes([whole[17] ^ 1]) + whole[18:],
    "cut": lambda whole: whole[:-3],
    "header only": lambda whole: whole[: HEADER_BYTES - 4],
    "empty": lambda whole: b"",
    "magic 1": lambda whole: whole[:16] + b"\x01" + whole[17:],
    "magic 3": lambda whole: whole[:16] + b"\x03" + whole[17:],
    "count lies": lambda whole: _with(whole, 57, ">i", 7),
    "count negative": lambda whole: _with(whole, 57, ">i", -1),
    "last offset lies": lambda whole: _with(whole, 23, ">i", 9),
    "codec 6": lambda whole: _with(whole, 21, ">h", 6),
    "base offset": lambda whole: struct.pack(">q", 5) + whole[8:],
    "log append time": lambda whole: _with(whole, 21, ">h", 8),
    "garbage": lambda whole: _with(whole, 61, ">h", -1),
    "length": lambda whole: whole[:8] + struct.pack(">i", 10) + whole[12:],
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One request. `request` may contain Refs and Batches; `saves` names values of its response:
    (Ref, field of the response).
    """

    api_key: int
    version: int
    request: object
    saves: tuple[tuple[Ref, str], ...] = ()
    connection: int = 0
    settles: bool = False  # a query that is repeated until both agree: metadata is propagated with a delay
    awaits: str = ""  # a path in the response: the request is repeated until it has a value
    damage: str = ""  # to the frame: "cut", "extra"

    def __repr__(self) -> str:
        extra = "".join(f" {name}" for name in ("settles", "damage") if getattr(self, name))
        return f"[{self.connection}] v{self.version} {self.request!r}{extra}"


@dataclasses.dataclass(frozen=True)
class TopicSetup:
    name: str
    partitions: int = 1
    configs: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    api_key: int
    version: int
    topics: tuple[TopicSetup, ...]
    steps: tuple[Step, ...]


@dataclasses.dataclass
class World:
    """Values assigned by one broker so far in one case. `shared` is the prepared state's."""

    prefix: str
    shared: World | None = None
    values: dict[Ref, object] = dataclasses.field(default_factory=dict)
    names: dict[object, str] = dataclasses.field(default_factory=dict)  # broker-assigned value -> its symbol

    def save(self, ref: Ref, value: object) -> None:
        self.values[ref] = value
        self.name(value, f"<{ref.kind} {ref.name}>")

    def name(self, value: object, symbol: str) -> None:
        if value not in (NO_UUID, "", None, -1, 0):
            self.names.setdefault(value, symbol)

    def symbol(self, value: object) -> str | None:
        found = self.names.get(value)
        return self.shared.symbol(value) if found is None and self.shared else found

    def resolve(self, value: object) -> object:
        """`value` with the symbols replaced by this broker's values."""
        if isinstance(value, str):
            return value.replace(PREFIX, self.prefix) if PREFIX in value else value
        if isinstance(value, Ref):
            found = self._find(dataclasses.replace(value, plus=0))
            return found + value.plus if isinstance(found, int) and value.plus else found
        if isinstance(value, Batch):
            return value.build(self)
        if isinstance(value, list | tuple):
            return [self.resolve(item) for item in value]
        if isinstance(value, msgspec.Struct):
            cls = type(value)
            return cls(**{name: self.resolve(getattr(value, name)) for name in cls.__struct_fields__})
        return value

    def _find(self, ref: Ref) -> object:
        if ref in self.values:
            return self.values[ref]
        return self.shared._find(ref) if self.shared else ref.none()
