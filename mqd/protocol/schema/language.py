"""The notation in which the Kafka messages of this package are written, and its parser.

Each line is a field; a struct's fields follow it, indented by four more spaces:

    name: type versions [null=versions] [tag=number[:versions]] [= default]

An API is a line with its name, key, versions and first flexible version, the request's fields, a
line `response` and the response's fields:

    SaslHandshake 17: versions 0-1, flexible from 2

Examples of fields:

    topics: [Topic] 0+ null=1+          an array of structs, null allowed from version 1
        name: string 0-12 null=10+
        epoch: int32 12+ tag=0 = -1     a tagged field (KIP-482); omitted while its value is -1

`versions` is "3", "3-7" or "3+". Types: bool int8 int16 uint16 int32 uint32 int64 float64 string
bytes records uuid, a struct's name, or any of these in brackets. A struct name that is repeated
without fields refers to the first definition.

Python values: uuid is 16 bytes; bytes and records are bytes; null is None. Default values if the
line states none: zero, "", b"", [] and, where null is allowed, None. A tagged struct that is not
nullable is None in Python when all its fields have their defaults; it is then not sent.

Sources: the public protocol guide; KIP-482 (flexible versions, tagged fields).
"""

from __future__ import annotations

import re

import msgspec

NEWEST = 32767
# Tags from this one on belong to mqd's own fields. Most of those in responses are sent only if the
# request has one too.
OWN_TAG_MIN = 9100
INTEGERS = {
    "int8": ("b", 1),
    "int16": ("h", 2),
    "uint16": ("H", 2),
    "int32": ("i", 4),
    "uint32": ("I", 4),
    "int64": ("q", 8),
}
# struct format and size of each fixed-size type
FIXED = INTEGERS | {"bool": ("?", 1), "float64": ("d", 8), "uuid": ("16s", 16)}
BLOBS = ("string", "bytes", "records")


class SchemaError(Exception):
    """An error in a definition: a bug in mqd, found when the message is first used."""


class Versions(msgspec.Struct, frozen=True):
    """A closed range of versions; empty when first > last."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        first, dash, last = text.partition("-")
        if text.endswith("+"):
            return cls(int(text[:-1]), NEWEST)
        return cls(int(first), int(last) if dash else int(first))

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last


NEVER = Versions(1, 0)


class Field(msgspec.Struct, eq=False):
    name: str
    type: str  # the element's type when is_array
    is_array: bool
    versions: Versions
    nullable: Versions = NEVER  # versions in which the field may be null
    tag: int = -1
    tagged: Versions = NEVER  # versions in which the field is tagged
    default: object = None
    struct: Struct | None = None  # set when type is a struct's name

    def is_tagged(self, version: int) -> bool:
        return version in self.tagged

    @property
    def has_mutable_default(self) -> bool:
        return isinstance(self.default, list)


class Struct(msgspec.Struct, eq=False):
    """`fields` in wire order; parse() fills it after creating the struct."""

    name: str
    fields: list[Field]


class Message(msgspec.Struct, eq=False):
    """One request or response: its root struct, and every nested struct by name."""

    name: str
    api_key: int
    versions: Versions
    flexible_from: int
    root: Struct
    structs: dict[str, Struct]

    def is_flexible(self, version: int) -> bool:
        return version >= self.flexible_from


_LINE = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*): (?P<open>\[)?(?P<type>\w+)(?(open)\]) (?P<versions>\d+(?:-\d+|\+)?)"
    r"(?: null=(?P<null>\d+(?:-\d+|\+)?))?(?: tag=(?P<tag>\d+)(?::(?P<tagged>\d+(?:-\d+|\+)?))?)?(?: ="
    r" (?P<default>.+))?$"
)
_CONSTANTS: dict[str, object] = {"null": None, "true": True, "false": False, "[]": []}


def _parse_default(text: str | None, field: Field) -> object:
    if text is not None:
        if text in _CONSTANTS:
            return [] if text == "[]" else _CONSTANTS[text]
        return text.strip('"') if field.type == "string" else int(text, 0)
    if field.nullable is not NEVER:
        return None
    if field.is_array:
        return []
    if field.struct is not None:
        return None
    if field.type == "uuid":
        return bytes(16)
    return {"bool": False, "float64": 0.0, "string": "", "bytes": b"", "records": b""}.get(field.type, 0)


def _parse_field(line: str, structs: dict[str, Struct], location: str) -> Field:
    match = _LINE.match(line)
    if match is None:
        raise SchemaError(f"{location}: cannot read the field {line!r}")
    field = Field(match["name"], match["type"], match["open"] is not None, Versions.parse(match["versions"]))
    if match["null"]:
        field.nullable = Versions.parse(match["null"])
    if match["tag"]:
        field.tag = int(match["tag"])
        field.tagged = Versions.parse(match["tagged"]) if match["tagged"] else field.versions
    if field.type not in FIXED and field.type not in BLOBS:
        if not field.type[0].isupper():
            raise SchemaError(f"{location}: no such type: {field.type}")
        field.struct = structs.setdefault(field.type, Struct(field.type, []))
    field.default = _parse_default(match["default"], field)
    return field


def parse(name: str, api_key: int, versions: Versions, flexible_from: int, text: str) -> Message:
    """Reads one message. Raises SchemaError naming the message and the line."""
    root = Struct(name, [])
    structs: dict[str, Struct] = {}
    open_structs: list[Struct | None] = [root]  # by depth; None: the fields of this struct are defined already
    for number, line in enumerate(text.strip("\n").splitlines(), 1):
        content = line.strip()
        if not content:
            continue
        depth, remainder = divmod(len(line) - len(line.lstrip()), 4)
        if remainder or depth >= len(open_structs):
            raise SchemaError(f"{name}, line {number}: wrong indentation: {line!r}")
        del open_structs[depth + 1 :]
        field, struct = _parse_field(content, structs, f"{name}, line {number}"), open_structs[depth]
        if struct is None:
            raise SchemaError(f"{name}, line {number}: a struct's fields are defined once, at its first occurrence")
        if any(other.name == field.name for other in struct.fields):
            raise SchemaError(f"{name}, line {number}: {field.name} is defined twice")
        struct.fields.append(field)
        if field.struct is not None:
            open_structs.append(None if field.struct.fields else field.struct)
    for struct in structs.values():
        if not struct.fields:
            raise SchemaError(f"{name}: struct {struct.name} has no fields")
    return Message(name, api_key, versions, flexible_from, root, structs)


class Api(msgspec.Struct, frozen=True):
    """The definition of one API, parsed on first use of its request or response."""

    key: int
    name: str
    versions: str
    flexible_from: int
    request: str
    response: str

    def message(self, kind: str) -> Message:
        """`kind` is "Request" or "Response"."""
        text = self.request if kind == "Request" else self.response
        return parse(self.name + kind, self.key, Versions.parse(self.versions), self.flexible_from, text)


_API = re.compile(r"(\w+) (\d+): versions (\S+), flexible from (\d+)\n(.*?)^response$\n(.*)", re.DOTALL | re.MULTILINE)


def apis(text: str) -> tuple[Api, ...]:
    """The APIs of one family. Raises SchemaError naming the first line of an API that it
    cannot read.
    """
    parsed_apis = []
    for block in re.split(r"\n(?=[A-Z])", text.strip("\n")):
        match = _API.fullmatch(block)
        if match is None:
            raise SchemaError(f"cannot read the API {block.partition(chr(10))[0]!r}")
        name, key, versions, flexible_from, request, response = match.groups()
        parsed_apis.append(Api(int(key), name, versions, int(flexible_from), request, response))
    return tuple(parsed_apis)
