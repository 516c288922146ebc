"""Generates the Python code that decodes one (message, version), with the guarantees of
mqd/protocol/codec.py.

In the generated code `d` is the frame, `p` the position, `end` the frame's size, `q` the end of
what is being read; `v…` are values, `n…` counts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import FunctionType

from mqd.protocol.codec_writer import CodeWriter
from mqd.protocol.errors import ProtocolError, TrailingBytes
from mqd.protocol.schema.language import FIXED, Field, Message, Struct

STRING_BYTES_MAX = 32767


class Malformed(Exception):
    """Raised in the generated code; converted to ProtocolError outside."""


def read_uvarint(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned varint of at most 32 bits: (value, position after it)."""
    value = 0
    for shift in (0, 7, 14, 21, 28):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, position
    raise Malformed("a varint of more than 32 bits")


def skip_tagged_fields(data: bytes, position: int, count: int, end: int) -> int:
    """The position after `count` unknown tagged fields."""
    if count > 127:
        count, position = read_uvarint(data, position - 1)
    for _ in range(count):
        _, position = read_uvarint(data, position)
        size, position = read_uvarint(data, position)
        position += size
        if position > end:
            raise Malformed("a tagged field goes beyond the end of the frame")
    return position


class BytesLeftOver(Malformed):
    """There are bytes after the message; outside it becomes TrailingBytes."""


def refuse_trailing_bytes(size: int) -> None:
    raise BytesLeftOver(f"{size} bytes too many")


def refuse(problem: str) -> None:
    raise Malformed(problem)


def refuse_size(size: int, remaining: int) -> None:
    if size < 0:
        raise Malformed(f"a length of {size}" if size < -1 else "null where this version does not allow it")
    raise Malformed(f"a length of {size} where {remaining} bytes remain")


def refuse_count(count: int, remaining: int) -> None:
    if count < 0:
        raise Malformed(f"an array of {count} elements" if count < -1 else "null where this version does not allow it")
    raise Malformed(f"an array of {count} elements where {remaining} bytes remain")


# librdkafka 2.16 writes the null topic array of a flexible MetadataRequest as four bytes instead of
# one, so that three bytes follow the message's end. Kafka ignores them, and so do we.
TRAILING_BYTES_IGNORED = frozenset({"MetadataRequest"})


class DecoderWriter:
    """Writes the decoder of one (message, version)."""

    def __init__(self, message: Message, version: int, message_class: Callable[[int, str], type]) -> None:
        self.message, self.version = message, version
        self.flexible = message.is_flexible(version)
        kind = "Request" if message.name.endswith("Request") else "Response"
        self.root_class = message_class(message.api_key, kind)
        self.code = CodeWriter()
        self.code.names |= {
            "uvarint": read_uvarint,
            "skip_tagged": skip_tagged_fields,
            "unpack_many": struct.unpack_from,
            "refuse": refuse,
            "refuse_size": refuse_size,
            "refuse_count": refuse_count,
            "refuse_trailing_bytes": refuse_trailing_bytes,
        }
        # fixed-size fields not yet read: (struct letter, size, variable, label)
        self.pending: list[tuple[str, int, str, str]] = []

    # -- public ------------------------------------------------------------------------------------

    def compile(self, root: Struct) -> FunctionType:
        add = self.code.add
        add("end = len(d)", "")
        value = self.struct(root, "")
        self.flush()
        if self.message.name not in TRAILING_BYTES_IGNORED:
            add("if p != end: refuse_trailing_bytes(end - p)", "")
        add(f"return {value}", "")
        return self.code.build("def run(d, p):", f"decode {self.message.name} v{self.version}")

    def explain(self, error: Exception, run: FunctionType, title: str, size: int) -> ProtocolError:
        label, variables = self.code.locate(error.__traceback__, run.__code__)
        position = variables.get("p", 0)
        if isinstance(label, tuple):  # a run of fixed-size fields: finds the one that crosses the frame's end
            position, label = _first_beyond(label, position, size)
        if isinstance(error, Malformed):
            problem = str(error)
        elif isinstance(error, UnicodeDecodeError):
            problem = "not UTF-8"
        else:
            problem = f"cut off: the frame ends at byte {size}"
        error_class = TrailingBytes if isinstance(error, BytesLeftOver) else ProtocolError
        return error_class(problem, title, label or "", min(position, size))

    # -- fixed-size runs ---------------------------------------------------------------------------

    def fixed(self, letter: str, size: int, label: str, prefix: str = "v") -> str:
        variable = self.code.fresh(prefix)
        self.pending.append((letter, size, variable, label))
        return variable

    def flush(self) -> None:
        """Reads the pending run with one call."""
        if not self.pending:
            return
        letters, sizes, variables, labels = zip(*self.pending, strict=True)
        self.pending = []
        label = tuple(zip(labels, sizes, strict=True))
        if letters == ("B",):
            self.code.add(f"{variables[0]} = d[p]", label)
        else:
            unpack = self.code.struct_function(">" + "".join(letters), "unpack_from")
            self.code.add(f"{', '.join(variables)}, = {unpack}(d, p)", label)
        self.code.add(f"p += {sum(sizes)}", labels[-1])

    # -- values ------------------------------------------------------------------------------------

    def struct(self, struct_: Struct, path: str) -> str:
        """Reads a struct's fields; returns the expression that builds it. Pending runs may remain."""
        values = {}
        for field in struct_.fields:
            if self.version in field.versions and not field.is_tagged(self.version):
                values[field.name] = self.field(field, path + field.name)
        if self.flexible:
            values |= self.tagged_fields(struct_, path)
        arguments = []
        for field in struct_.fields:
            arguments.append(values.get(field.name) or self.default(field))
        cls = self.root_class if struct_ is self.message.root else getattr(self.root_class, struct_.name)
        return f"{self.code.constant(cls, 'C')}({', '.join(arguments)})"

    def default(self, field: Field) -> str:
        return "[]" if field.has_mutable_default else repr(field.default)

    def field(self, field: Field, path: str) -> str:
        nullable = self.version in field.nullable
        if field.is_array:
            return self.array(field, path, nullable)
        if field.struct is not None:
            return self.nullable_struct(field.struct, path) if nullable else self.plain_struct(field.struct, path)
        return self.scalar(field.type, path, nullable)

    def scalar(self, type_: str, path: str, nullable: bool) -> str:
        if type_ in FIXED:
            return self.fixed(*FIXED[type_], path)
        return self.blob(type_, path, nullable)

    def plain_struct(self, struct_: Struct, path: str) -> str:
        expression = self.struct(struct_, path + ".")
        self.flush()
        variable = self.code.fresh("v")
        self.code.add(f"{variable} = {expression}", path)
        return variable

    def nullable_struct(self, struct_: Struct, path: str) -> str:
        """A nullable struct: one byte, negative for null."""
        marker, variable = self.fixed("b", 1, path, "n"), self.code.fresh("v")
        self.flush()
        self.code.add(f"if {marker} < 0: {variable} = None", path)
        self.code.add("else:", path)
        self.code.indent += 1
        expression = self.struct(struct_, path + ".")
        self.flush()
        self.code.add(f"{variable} = {expression}", path)
        self.code.indent -= 1
        return variable

    def length(self, path: str, letter: str, size: int) -> str:
        """Reads a length (null = -1) together with the pending run before it."""
        if not self.flexible:
            count = self.fixed(letter, size, path, "n")
            self.flush()
            return count
        count = self.fixed("B", 1, path, "n")
        self.flush()
        self.code.add(f"if {count} > 127: {count}, p = uvarint(d, p - 1)", path)
        self.code.add(f"{count} -= 1", path)
        return count

    def blob(self, type_: str, path: str, nullable: bool) -> str:
        add = self.code.add
        count = self.length(path, "h", 2) if type_ == "string" else self.length(path, "i", 4)
        value = self.code.fresh("v")
        if nullable:
            add(f"if {count} == -1: {value} = None", path)
            add("else:", path)
            self.code.indent += 1
        add(f"q = p + {count}", path)
        add(f"if {count} < 0 or q > end: refuse_size({count}, end - p)", path)
        if type_ == "string":
            if self.flexible:
                add(f"if {count} > {STRING_BYTES_MAX}: refuse('a string of more than {STRING_BYTES_MAX} bytes')", path)
            add(f"{value} = d[p:q].decode()", path)
        else:
            add(f"{value} = d[p:q]", path)
        add("p = q", path)
        self.code.indent -= nullable
        return value

    def array(self, field: Field, path: str, nullable: bool) -> str:
        add = self.code.add
        count, value = self.length(path, "i", 4), self.code.fresh("v")
        size_min = self.size_min(field)
        if nullable:
            add(f"if {count} == -1: {value} = None", path)
            add("else:", path)
            self.code.indent += 1
        product = f"{count} * {size_min}" if size_min > 1 else count
        add(f"if {count} < 0 or {product} > end - p: refuse_count({count}, end - p)", path)
        if field.type in FIXED:
            letter, size = FIXED[field.type]
            if letter == "16s":
                add(f"{value} = [d[q:q + 16] for q in range(p, p + {count} * 16, 16)]", path)
            else:
                add(f"{value} = list(unpack_many(f'>{{{count}}}{letter}', d, p)) if {count} else []", path)
            add(f"p += {count} * {size}", path)
        else:
            add(f"{value} = []", path)
            add(f"for _ in range({count}):", path)
            self.code.indent += 1
            path += "[]"
            expression = (
                self.struct(field.struct, path + ".")
                if field.struct is not None
                else self.blob(field.type, path, False)
            )
            self.flush()
            add(f"{value}.append({expression})", path)
            self.code.indent -= 1
        self.code.indent -= nullable
        return value

    # -- tagged fields -----------------------------------------------------------------------------

    def tagged_fields(self, struct_: Struct, path: str) -> dict[str, str]:
        known = [field for field in struct_.fields if self.version in field.versions and field.is_tagged(self.version)]
        label = path + "tagged fields"
        count = self.fixed("B", 1, label, "n")
        self.flush()
        add = self.code.add
        if not known:
            add(f"if {count}: p = skip_tagged(d, p, {count}, end)", label)
            return {}
        values = {field.name: self.code.fresh("v") for field in known}
        for field in known:
            add(f"{values[field.name]} = {self.default(field)}", label)
        add(f"if {count}:", label)
        self.code.indent += 1
        add(f"if {count} > 127: {count}, p = uvarint(d, p - 1)", label)
        tag, limit = self.code.fresh("t"), self.code.fresh("e")
        add(f"for _ in range({count}):", label)
        self.code.indent += 1
        add(f"{tag}, p = uvarint(d, p)", label)
        add("q, p = uvarint(d, p)", label)
        add(f"{limit} = p + q", label)
        add(f"if {limit} > end: refuse_size(q, end - p)", label)
        for number, field in enumerate(known):
            add(f"{'el' if number else ''}if {tag} == {field.tag}:", label)
            self.code.indent += 1
            value = self.field(field, path + field.name)
            self.flush()
            add(f"{values[field.name]} = {value}", path + field.name)
            add(f"if p != {limit}: refuse(f'a tagged field whose size is wrong')", path + field.name)
            self.code.indent -= 1
        add(f"else: p = {limit}", label)
        self.code.indent -= 2
        return values

    # -- sizes -------------------------------------------------------------------------------------

    def size_min(self, field: Field) -> int:
        """The smallest encoded size of an element: it bounds how many elements the array can have."""
        if field.type in FIXED:
            return FIXED[field.type][1]
        if field.struct is None:
            return 1 if self.flexible else 2 if field.type == "string" else 4
        total = 1 if self.flexible else 0
        for inner in field.struct.fields:
            if self.version in inner.versions and not inner.is_tagged(self.version):
                total += self._value_size_min(inner)
        if total == 0:
            raise AssertionError(
                f"{self.message.name} v{self.version}: {field.struct.name} takes no bytes,"
                " so the array's count cannot be bounded"
            )
        return total

    def _value_size_min(self, field: Field) -> int:
        if field.is_array:
            return 1 if self.flexible else 4
        if field.struct is not None and self.version in field.nullable:
            return 1
        return self.size_min(field)


def _first_beyond(run: tuple[tuple[str, int], ...], position: int, size: int) -> tuple[int, str]:
    """The position and label of the first field of the run that extends beyond the frame."""
    for label, width in run:
        if position + width > size:
            return position, label
        position += width
    return position, run[-1][0]
