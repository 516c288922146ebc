"""Every Kafka message of the schema, in every version, compared with two independent codecs; and
with hostile bytes.

kio is generated from Kafka's own schema files: it must read our encoding to the same values and
write it back to the same bytes, and we must read those back. kafka-python is the second opinion.
Hostile: truncated, mutated and random frames only raise ProtocolError; wrong counts allocate
nothing.
"""

import dataclasses
import datetime
import enum
import functools
import importlib
import io
import pkgutil
import struct
import tracemalloc
import uuid
from typing import Any

import kafka.protocol
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.index import load_payload_module
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from mqd.protocol import KNOWN, SUPPORTED, ProtocolError, codec
from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response
from mqd.protocol.errors import ERRORS
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import message_class, message_of
from mqd.protocol.schema.language import INTEGERS, OWN_TAG_MIN, Field, Struct
from tests.tiers import examples

QUICK = settings(max_examples=examples(4, 8), deadline=None, suppress_health_check=list(HealthCheck), database=None)

EVERY = [
    pytest.param(spec.key, kind, version, id=f"{spec.name}{kind}-v{version}")
    for spec in KNOWN.values()
    for kind in ("Request", "Response")
    for version in range(spec.min_version, spec.max_version + 1)
]
# kio begins where Kafka 4.0 does (KIP-896)
KIO_FIRST = {0: 3}
# delegation tokens, Envelope, UnregisterBroker, KIP-848, share groups, voters, streams groups
UNKNOWN_TO_KAFKA_PYTHON = {38, 39, 40, 41, 58, 64, 68, 69, *range(76, 82), *range(83, 93)}
OUR_KEYS_BEGIN = 20_000  # messages that only mqd has
KNOWN_TO_KIO = [
    param
    for param in EVERY
    if KIO_FIRST.get(param.values[0], 0) <= param.values[2] and param.values[0] < OUR_KEYS_BEGIN
]
FLEXIBLE = [param for param in EVERY if KNOWN[param.values[0]].is_flexible(param.values[2])]

# -- messages made from the schema -----------------------------------------------------------------

# sizes around those where a varint needs one more byte
TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from([126, 127, 128, 16382, 16383]).map(
    "x".__mul__
)


def scalar(field: Field) -> st.SearchStrategy:
    if field.type in INTEGERS:
        letter, size = INTEGERS[field.type]
        if field.name.endswith("error_code"):
            return st.sampled_from(sorted(ERRORS))
        if field.name.endswith("_ms"):  # kio turns them into timedelta and datetime
            return st.integers(0, (1 << 31) - 1)
        low, high = (0, (1 << 8 * size) - 1) if letter.isupper() else (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1)
        return st.integers(low, high) | st.sampled_from((0, 1, -1 if low else 1))
    if field.type == "string":
        return TEXT
    return {
        "bool": st.booleans(),
        "float64": st.floats(allow_nan=False),
        "uuid": st.binary(min_size=16, max_size=16),
        "bytes": st.binary(max_size=40),
        "records": st.binary(max_size=300),
    }[field.type]


def values(field: Field, root: type, version: int) -> st.SearchStrategy:
    if field.struct is not None:
        strategy = structs(field.struct, getattr(root, field.struct.name), root, version)
    else:
        strategy = scalar(field)
    if field.is_array:
        strategy = st.lists(strategy, max_size=3)
    if version in field.nullable:
        strategy = st.none() | strategy
    if field.is_tagged(version):
        strategy = st.just(field.default) | strategy
    return strategy


def structs(struct_: Struct, cls: type, root: type, version: int) -> st.SearchStrategy:
    fields = [field for field in struct_.fields if version in field.versions and field.tag < OWN_TAG_MIN]
    return st.builds(cls, **{field.name: values(field, root, version) for field in fields})


def messages(key: int, kind: str, version: int) -> st.SearchStrategy:
    cls = message_class(key, kind)
    return structs(message_of(cls)[1], cls, cls, version)


def normal(value: object, struct_: Struct | None = None) -> object:
    """A tagged struct with its defaults equals an absent one on the wire."""
    if isinstance(value, list):
        return [normal(item) for item in value]
    if hasattr(value, "__struct_fields__"):
        fields = {field.name: field for field in message_of(type(value))[1].fields}
        result = {}
        for name in value.__struct_fields__:
            item = getattr(value, name)
            if (
                item is not None
                and fields[name].tag >= 0
                and fields[name].struct is not None
                and not fields[name].is_array
                and item == type(item)()
            ):
                item = None
            result[name] = normal(item)
        return result
    return value


# -- kio -------------------------------------------------------------------------------------------


def plain(value: object) -> object:
    """kio's value in our form."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.timedelta):
        return round(value / datetime.timedelta(milliseconds=1))
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def assert_same(ours: object, kios: object, version: int, path: str) -> None:
    if isinstance(ours, list):
        assert len(ours) == len(kios), path
        for mine, other in zip(ours, kios, strict=True):
            assert_same(mine, other, version, path + "[]")
        return
    if not hasattr(ours, "__struct_fields__"):
        expected = plain(kios)
        if isinstance(ours, bytes) and len(ours) == 16 and expected is None:
            expected = bytes(16)  # kio's null uuid
        if ours == -1 and expected is None:
            expected = -1  # kio's null time
        assert ours == expected, f"{path}: {ours!r} {kios!r}"
        return
    fields = [
        field for field in message_of(type(ours))[1].fields if version in field.versions and field.tag < OWN_TAG_MIN
    ]
    theirs = dataclasses.fields(kios)
    assert len(fields) == len(theirs), f"{path}: {[field.name for field in fields]} {[field.name for field in theirs]}"
    for mine, other in zip(fields, theirs, strict=True):
        assert mine.name.removesuffix("_ms") == other.name.removesuffix("_ms"), path
        value = getattr(ours, mine.name)
        if value is None and mine.struct is not None and not mine.is_array and version not in mine.nullable:
            value = getattr(message_class(*_key_and_kind(ours)), mine.struct.name)()
        assert_same(value, getattr(kios, other.name), version, f"{path}.{mine.name}")


def newest_quick(params: list[Any]) -> list[Any]:
    """The newest version of each message in every run, the older ones in the slow tier."""
    newest = {param.values[:2]: param.values for param in params}
    return [
        param
        if newest[param.values[:2]] == param.values
        else pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.slow])
        for param in params
    ]


def _key_and_kind(value: object) -> tuple[int, str]:
    message = message_of(type(value))[0]
    return message.api_key, "Request" if message.name.endswith("Request") else "Response"


@pytest.mark.parametrize(("key", "kind", "version"), newest_quick(KNOWN_TO_KIO))
def test_kio_reads_and_writes_the_same_bytes(key: int, kind: str, version: int) -> None:
    module = load_payload_module(key, version, EntityType.request if kind == "Request" else EntityType.response)
    kio_class = getattr(module, KNOWN[key].name + kind)
    read, write = entity_reader(kio_class), entity_writer(kio_class)

    @QUICK
    @given(messages(key, kind, version))
    def check(message: object) -> None:
        data = codec.encode(message, version)
        theirs, size = read(data, 0)
        assert size == len(data)
        assert_same(message, theirs, version, kio_class.__name__)
        buffer = io.BytesIO()
        write(buffer, theirs)
        assert buffer.getvalue() == data
        assert normal(codec.decode(type(message), version, buffer.getvalue())) == normal(message)

    check()


# -- kafka-python ----------------------------------------------------------------------------------


@functools.cache
def kafka_python_classes() -> dict[str, type]:
    found = {}
    for module in pkgutil.walk_packages(kafka.protocol.__path__, "kafka.protocol."):
        if ".old" not in module.name and "generate" not in module.name:
            found |= {
                name: value
                for name, value in vars(importlib.import_module(module.name)).items()
                if name.endswith(("Request", "Response"))
            }
    return found


@pytest.mark.slow  # the second oracle of the same bytes
@pytest.mark.parametrize(
    ("key", "kind", "version"),
    [param for param in EVERY if param.values[0] not in UNKNOWN_TO_KAFKA_PYTHON and param.values[0] < OUR_KEYS_BEGIN],
)
def test_kafka_python_writes_back_the_same_bytes(key: int, kind: str, version: int) -> None:
    theirs = kafka_python_classes()[KNOWN[key].name + kind]

    @QUICK
    @given(messages(key, kind, version))
    def check(message: object) -> None:
        if (key, kind) == (18, "Response"):
            message.error_code = 0  # after an error kafka-python reads version 0, in any version
        data = codec.encode(message, version)
        decoded = theirs.decode(data, version=version)
        decoded._header = None  # decode omits it, encode requires it
        assert bytes(decoded.encode(version=version)) == data

    check()


# -- hostile bytes ---------------------------------------------------------------------------------


def filled(struct_: Struct, root: type, version: int, name: str | None = None) -> object:
    """A message with one element in every array and nothing null."""
    arguments: dict[str, object] = {}
    for field in struct_.fields:
        if version in field.versions:
            if field.struct is not None:
                value: object = filled(field.struct, root, version, field.struct.name)
            else:
                value = {
                    "string": "name",
                    "bytes": b"bytes",
                    "records": b"records",
                    "uuid": bytes(range(16)),
                    "bool": True,
                }.get(field.type, 1)
            arguments[field.name] = [value] if field.is_array else value
    return (getattr(root, name) if name else root)(**arguments)


def filled_message(key: int, kind: str, version: int) -> object:
    cls = message_class(key, kind)
    return filled(message_of(cls)[1], cls, version)


@pytest.mark.parametrize(("key", "kind", "version"), newest_quick(EVERY))
def test_wrong_lengths_and_truncation_are_refused_and_allocate_nothing(key: int, kind: str, version: int) -> None:
    message = filled_message(key, kind, version)
    cls, data = type(message), codec.encode(message, version)
    assert normal(codec.decode(cls, version, data)) == normal(message)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(cls, version, data[:size])
    if cls.__name__ != "MetadataRequest":  # Kafka ignores bytes after it, and librdkafka relies on that
        with pytest.raises(ProtocolError):
            codec.decode(cls, version, data + b"\0")
    tracemalloc.start()
    try:
        for lie in (
            b"\x7f\xff\xff\xff",
            b"\xff\xff\xff\xff\x07",
            b"\xff\xff\xff\xff\x0f",
            b"\x80\0\0\0",
            b"\xff" * 9,
            b"\xfe\xff\xff\x7f",
        ):
            for position in range(len(data)):
                hostile = data[:position] + lie + data[position + len(lie) :]
                try:
                    codec.decode(cls, version, hostile)
                except ProtocolError as error:
                    assert error.message == f"{KNOWN[key].name}{kind} v{version}"
                    assert error.position is not None and 0 <= error.position <= len(hostile)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000, "a lie about a length was believed"


@settings(max_examples=examples(500, 1500), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.sampled_from([param.values for param in EVERY]), st.data())
def test_mutated_frames_only_raise_protocol_errors(what: tuple[int, str, int], data: st.DataObject) -> None:
    key, kind, version = what
    message = filled_message(key, kind, version)
    header = RequestHeader(key, version, 7, "client")
    frame = bytearray(
        encode_request(message, version, 7, "client") if kind == "Request" else encode_response(header, message)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                frame[position] = data.draw(st.integers(0, 255))
            case 1:
                del frame[position : position + data.draw(st.integers(1, 4))]
            case 2:
                frame[position:position] = data.draw(st.binary(min_size=1, max_size=6))
            case 3:
                frame[position:position] = frame[: data.draw(st.integers(0, 30))]
        if not frame:
            return
    try:
        if kind == "Request" and key in SUPPORTED:
            decode_request(memoryview(frame))
        elif kind == "Request":
            codec.decode(type(message), version, memoryview(frame)[17:])
        else:
            decode_response(frame, key, version)
    except ProtocolError:
        pass


@settings(max_examples=300, deadline=None, database=None)
@given(st.sampled_from(sorted(SUPPORTED)), st.integers(-1, 20), st.binary(max_size=60))
def test_random_bodies_only_raise_protocol_errors(key: int, version: int, body: bytes) -> None:
    try:
        decode_request(struct.pack(">hhih", key, version, 1, -1) + body)
    except ProtocolError:
        pass


def add_unknown_tags(data: bytes) -> bytes:
    """Replaces a message's last byte, its empty tagged fields, by two unknown fields, one with a
    tag of two bytes.
    """
    assert data[-1] == 0
    return data[:-1] + b"\x02\x63\x03abc\xe7\x07\x00"


@pytest.mark.parametrize(("key", "kind", "version"), newest_quick(FLEXIBLE))
def test_unknown_tagged_fields_are_skipped(key: int, kind: str, version: int) -> None:
    message = message_class(key, kind)()
    data = codec.encode(message, version)
    assert normal(codec.decode(type(message), version, add_unknown_tags(data))) == normal(message)


@pytest.mark.parametrize("count", [0, 1, 126, 127, 128, 300])
@pytest.mark.parametrize("version", [1, 12])
def test_counts_around_a_longer_varint(count: int, version: int) -> None:
    cls = message_class(3, "Response")
    partitions = [
        cls.Partition(partition_index=number, replica_nodes=list(range(number % 140))) for number in range(count)
    ]
    message = cls(topics=[cls.Topic(name="t", partitions=partitions)])
    decoded = codec.decode(cls, version, codec.encode(message, version))
    assert [partition.replica_nodes for partition in decoded.topics[0].partitions] == [
        partition.replica_nodes for partition in partitions
    ]
