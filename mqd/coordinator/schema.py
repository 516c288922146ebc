"""Records of the internal topics, described in the notation of mqd/protocol/schema/language.py.
Generated code encodes and decodes them, as for messages on the wire.

A key is an int16 (the record's type; Kafka calls it the key's version) and its fields. A value is
an int16 version and its fields, flexible from a certain version on (KIP-482). Any record may be
damaged or written by another broker: invalid bytes raise ValueError and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from mqd.protocol.codec_decoder import DecoderWriter, Malformed
from mqd.protocol.codec_encoder import EncoderWriter, Unencodable
from mqd.protocol.schema.language import NEWEST, Message, Struct, Versions, parse

_VERSION = struct.Struct(">h")
NOT_FLEXIBLE = NEWEST + 1


def _make_class(name: str, struct_schema: Struct, namespace: dict[str, object]) -> type:
    fields = []
    for field in struct_schema.fields:
        default = msgspec.field(default_factory=list) if field.has_mutable_default else field.default
        fields.append((field.name, list | None if field.is_array else object, default))
    return msgspec.defstruct(name, fields, namespace=namespace, module=__name__, gc=False)


class RecordSchema:
    """The schema of one kind of key or value. `cls` is its Struct class; nested Structs are its
    attributes, as in messages: `schema.cls.Topic(...)`.
    """

    def __init__(self, name: str, versions: str, flexible_from: int, text: str) -> None:
        self.name = name
        self._message: Message = parse(name, -1, Versions.parse(versions), flexible_from, text)
        nested = {
            struct_schema.name: _make_class(f"{name}.{struct_schema.name}", struct_schema, {})
            for struct_schema in self._message.structs.values()
        }
        self.cls: Any = _make_class(name, self._message.root, dict(nested))
        self._decoders: dict[int, Callable] = {}
        self._encoders: dict[int, Callable] = {}

    def encode(self, value: object, version: int) -> bytes:
        """The version, then the value. Raises ValueError when a value does not fit its field."""
        encode_fields = self._encoders.get(version)
        if encode_fields is None:
            encode_fields = self._encoders[version] = EncoderWriter(self._message, version).compile(self._message.root)
        encoded = bytearray(_VERSION.pack(version))
        try:
            encode_fields(value, encoded)
        except (Unencodable, struct.error, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.name} version {version}: {error}") from error
        return bytes(encoded)

    def decode(self, data: bytes, prefix: int = 2, version: int | None = None):
        """`data` begins with its version, unless `version` is given. `prefix`: bytes to skip."""
        if version is None:
            if len(data) < 2:
                raise ValueError(f"{self.name} is cut off before its version")
            (version,) = _VERSION.unpack_from(data)
        if version not in self._message.versions:
            raise ValueError(
                f"{self.name} of version {version}; {self._message.versions.first} to {self._message.versions.last} can"
                " be read"
            )
        decode_fields = self._decoders.get(version)
        if decode_fields is None:
            decode_fields = self._decoders[version] = DecoderWriter(
                self._message, version, lambda key, kind: self.cls
            ).compile(self._message.root)
        try:
            return decode_fields(data, prefix)
        except (Malformed, struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.name} version {version} is malformed: {error}") from error


class RecordType:
    """Key type, key and value of one kind of record. `value_version` is the version that is
    written.
    """

    def __init__(
        self,
        key_type: int,
        name: str,
        key: str,
        value: str,
        value_versions: str = "0",
        value_version: int = 0,
        flexible_from: int = 0,
    ) -> None:
        self.key_type, self.name, self.value_version = key_type, name, value_version
        self.key = RecordSchema(f"{name}Key", "0", NOT_FLEXIBLE, key)
        self.value = RecordSchema(f"{name}Value", value_versions, flexible_from, value)

    def encode_key(self, *fields: object) -> bytes:
        """Fields in the order of the schema."""
        return _VERSION.pack(self.key_type) + self.key.encode(self.key.cls(*fields), 0)[2:]

    def decode_key(self, data: bytes):
        return self.key.decode(data, version=0)

    def encode_value(self, value: object) -> bytes:
        return self.value.encode(value, self.value_version)

    def decode_value(self, data: bytes):
        return self.value.decode(data)


def key_type_of(key: bytes) -> int:
    """Raises ValueError for bytes that are not a key."""
    if len(key) < 2:
        raise ValueError(f"a key of {len(key)} bytes is too short")
    return _VERSION.unpack_from(key)[0]
