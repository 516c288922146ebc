"""Generates the Python code that encodes one (message, version), with the guarantees of
mqd/protocol/codec.py.

In the generated code `m` is the message, `o` the bytearray that grows; `e…` are elements, `x…`
values.
"""

from __future__ import annotations

import struct
from types import FunctionType

from mqd.protocol.codec_writer import CodeWriter
from mqd.protocol.errors import ProtocolError
from mqd.protocol.messages import message_class
from mqd.protocol.schema.language import FIXED, Field, Message, Struct

STRING_BYTES_MAX = 32767


class Unencodable(Exception):
    """Raised in the generated code; converted to ProtocolError outside."""


def uvarint(value: int) -> bytes:
    """Encodes an unsigned varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def refuse(problem: str) -> None:
    raise Unencodable(problem)


def check_uuid(value: bytes) -> bytes:
    """Checks the size: struct would silently truncate or pad a value of another size."""
    if len(value) != 16:
        raise Unencodable(f"a uuid of {len(value)} bytes")
    return value


class EncoderWriter:
    """Writes the encoder of one (message, version)."""

    def __init__(self, message: Message, version: int) -> None:
        self.message, self.version = message, version
        self.flexible = message.is_flexible(version)
        self.code = CodeWriter()
        self.code.names |= {"uvarint": uvarint, "refuse": refuse, "check_uuid": check_uuid, "pack_many": struct.pack}
        # fixed-size values not yet written: (struct letter, expression, label)
        self.pending: list[tuple[str, str, str]] = []

    def compile(self, root: Struct) -> FunctionType:
        self.struct(root, "m", "")
        self.flush()
        if not self.code.lines:
            self.code.add("pass", "")
        return self.code.build("def run(m, o):", f"encode {self.message.name} v{self.version}")

    def explain(self, error: Exception, run: FunctionType, title: str) -> ProtocolError:
        label, _ = self.code.locate(error.__traceback__, run.__code__)
        if isinstance(error, Unencodable):
            problem = str(error)
        elif "NoneType" in str(error):
            problem = "None where this version does not allow null"
        else:
            problem = f"a value does not fit: {error}"
        return ProtocolError(problem, title, str(label or ""))

    # -- fixed-size runs ---------------------------------------------------------------------------

    def fixed(self, letter: str, expression: str, label: str) -> None:
        self.pending.append((letter, f"check_uuid({expression})" if letter == "16s" else expression, label))

    def flush(self) -> None:
        if not self.pending:
            return
        letters, expressions, labels = zip(*self.pending, strict=True)
        self.pending = []
        named = [label for label in labels if label]
        label = " to ".join(dict.fromkeys((named[0], named[-1]))) if named else ""
        arguments = [expression for expression in expressions if expression]
        if not arguments:  # the run has only counts of tagged fields, and none is sent: all are zero
            self.code.add(f"o += {bytes(len(letters))!r}", label)
            return
        pack = self.code.struct_function(">" + "".join(letters), "pack")
        self.code.add(f"o += {pack}({', '.join(arguments)})", label)

    # -- values ------------------------------------------------------------------------------------

    def struct(self, struct_: Struct, source: str, path: str) -> None:
        """Writes a struct's fields; a pending run may remain."""
        for field in struct_.fields:
            if self.version in field.versions and not field.is_tagged(self.version):
                self.field(field, f"{source}.{field.name}", path + field.name)
        if self.flexible:
            self.tagged_fields(struct_, source, path)

    def field(self, field: Field, source: str, path: str) -> None:
        nullable = self.version in field.nullable
        if field.is_array:
            self.array(field, source, path, nullable)
        elif field.struct is not None:
            self.nested(field.struct, source, path, nullable)
        elif field.type in FIXED:
            self.fixed(FIXED[field.type][0], source, path)
        else:
            self.blob(field.type, source, path, nullable)

    def assign(self, source: str, path: str) -> str:
        """Flushes, then assigns the value to a new variable."""
        self.flush()
        value = self.code.fresh("x")
        self.code.add(f"{value} = {source}", path)
        return value

    def begin_nullable(self, value: str, null: str, path: str) -> None:
        self.code.add(f"if {value} is None: o += {null}", path)
        self.code.add("else:", path)
        self.code.indent += 1

    def length(self, count: str, letter: str, path: str) -> None:
        if self.flexible:
            self.code.add(f"if {count} < 127: o.append({count} + 1)", path)
            self.code.add(f"else: o += uvarint({count} + 1)", path)
        else:
            self.code.add(f"o += {self.code.struct_function('>' + letter, 'pack')}({count})", path)

    def blob(self, type_: str, source: str, path: str, nullable: bool) -> None:
        add = self.code.add
        value = self.assign(source, path)
        letter, width = ("h", 2) if type_ == "string" else ("i", 4)
        if nullable:
            self.begin_nullable(value, repr(b"\0" if self.flexible else b"\xff" * width), path)
        if type_ == "string":
            add(f"{value} = {value}.encode()", path)
        count = self.code.fresh("n")
        add(f"{count} = len({value})", path)
        if type_ == "string" and self.flexible:
            add(f"if {count} > {STRING_BYTES_MAX}: refuse(f'a string of {{{count}}} bytes')", path)
        self.length(count, letter, path)
        add(f"o += {value}", path)
        self.code.indent -= nullable

    def array(self, field: Field, source: str, path: str, nullable: bool) -> None:
        add = self.code.add
        value = self.assign(source, path)
        if nullable:
            self.begin_nullable(value, repr(b"\0" if self.flexible else b"\xff" * 4), path)
        count = self.code.fresh("n")
        add(f"{count} = len({value})", path)
        self.length(count, "i", path)
        path += "[]"
        if field.type in FIXED and field.type != "uuid":
            add(f"if {count}: o += pack_many(f'>{{{count}}}{FIXED[field.type][0]}', *{value})", path)
        else:
            element = self.code.fresh("e")
            add(f"for {element} in {value}:", path)
            self.code.indent += 1
            if field.struct is not None:
                self.struct(field.struct, element, path + ".")
            elif field.type == "uuid":
                self.fixed("16s", element, path)
            else:
                self.blob(field.type, element, path, False)
            self.flush()
            self.code.indent -= 1
        self.code.indent -= nullable

    def nested(self, struct_: Struct, source: str, path: str, nullable: bool) -> None:
        value = self.assign(source, path)
        if nullable:
            self.begin_nullable(value, repr(b"\xff"), path)
            self.code.add("o.append(1)", path)
        self.struct(struct_, value, path + ".")
        self.flush()
        self.code.indent -= nullable

    # -- tagged fields -----------------------------------------------------------------------------

    def tagged_fields(self, struct_: Struct, source: str, path: str) -> None:
        known = [field for field in struct_.fields if self.version in field.versions and field.is_tagged(self.version)]
        if not known:
            self.fixed("x", "", "")
            return
        add, label = self.code.add, path + "tagged fields"
        self.flush()
        parts, outer = self.code.fresh("t"), self.code.fresh("o")
        add(f"{parts} = None", label)
        for field in sorted(known, key=lambda field: field.tag):
            label = path + field.name
            value = self.code.fresh("x")
            add(f"{value} = {source}.{field.name}", label)
            add(f"if {self.presence_condition(field, value)}:", label)
            self.code.indent += 1
            add(f"{outer} = o; o = bytearray()", label)
            self.field(field, value, label)
            self.flush()
            add(f"{parts} = {parts} or []; {parts}.append(({field.tag}, o)); o = {outer}", label)
            self.code.indent -= 1
        label = path + "tagged fields"
        add(f"if {parts} is None: o.append(0)", label)
        add("else:", label)
        self.code.indent += 1
        add(f"o += uvarint(len({parts}))", label)
        tag, part = self.code.fresh("t"), self.code.fresh("x")
        add(f"for {tag}, {part} in {parts}: o += uvarint({tag}); o += uvarint(len({part})); o += {part}", label)
        self.code.indent -= 1

    def presence_condition(self, field: Field, value: str) -> str:
        """The expression that is true if a tagged field must be sent."""
        if field.struct is not None and not field.is_array and self.version not in field.nullable:
            root = message_class(
                self.message.api_key, "Request" if self.message.name.endswith("Request") else "Response"
            )
            return f"{value} is not None and {value} != {self.code.constant(getattr(root, field.struct.name)(), 'D')}"
        if field.default is None:
            return f"{value} is not None"
        return value if field.has_mutable_default else f"{value} != {field.default!r}"
