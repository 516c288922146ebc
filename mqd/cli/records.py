"""Records as bytes and text: escapes, output formats (kcat's tokens), JSON envelopes, delimited
input, starting points. Uses no client library, and does no I/O except reading the input.
"""

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

import click
import msgspec

_READ_BYTES = 1 << 16
_TIMESTAMP_TYPES = {0: "unknown", 1: "create", 2: "logappend"}
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def unescape(text: str) -> bytes:
    r"""Replaces \n, \r, \t and \xXX; any other escaped character stands for itself."""
    result = bytearray()
    position = 0
    for match in re.finditer(r"\\(x[0-9a-fA-F]{1,2}|.)", text, re.DOTALL):
        result += text[position : match.start()].encode()
        escape = match[1]
        if len(escape) > 1:
            result.append(int(escape[1:], 16))
        else:
            result += {"n": "\n", "r": "\r", "t": "\t"}.get(escape, escape).encode()
        position = match.end()
    return bytes(result + text[position:].encode())


# -- output ----------------------------------------------------------------------------------------


def _headers(message: Any) -> bytes:
    return b",".join(
        name.encode() + b"=" + (b"NULL" if value is None else value) for name, value in message.headers() or ()
    )


def _size(value: bytes | None) -> int:
    return -1 if value is None else len(value)


def _tokens(null_text: bytes) -> dict[str, Callable[[Any], bytes]]:
    def text(value: bytes | None) -> bytes:
        return null_text if value is None else value

    def payload(message: Any) -> bytes:
        return text(message.value())

    return {
        "s": payload,
        "v": payload,
        "k": lambda m: text(m.key()),
        "S": lambda m: b"%d" % _size(m.value()),
        "V": lambda m: b"%d" % _size(m.value()),
        "K": lambda m: b"%d" % _size(m.key()),
        "R": lambda m: struct.pack(">i", _size(m.value())),
        "t": lambda m: m.topic().encode(),
        "p": lambda m: b"%d" % m.partition(),
        "o": lambda m: b"%d" % m.offset(),
        "T": lambda m: b"%d" % (m.timestamp()[1] if m.timestamp()[0] else -1),
        "h": _headers,
    }


def compile_format(text: str, null_text: bytes = b"") -> Callable[[Any], bytes]:
    """Returns a function that formats a message as bytes. Tokens: %k key, %v or %s value, %K and %V
    sizes (-1: null), %t topic, %p partition, %o offset, %T timestamp in ms, %h headers, %R size as
    four big-endian bytes, %% a per cent sign. Raises click.UsageError on other tokens.
    """
    tokens = _tokens(null_text)
    parts: list[Callable[[Any], bytes]] = []
    for literal, token in re.findall(r"((?:[^%\\]|\\.)+|\\$)|%(.?)", text, re.DOTALL):
        if literal or token == "%":
            fixed = unescape(literal) if literal else b"%"
            parts.append(partial(_constant, fixed))
        elif token in tokens:
            parts.append(tokens[token])
        else:
            raise click.UsageError(
                f"the format has %{token}; the known tokens are {' '.join('%' + name for name in tokens)} %%"
            )
    return lambda message: b"".join([part(message) for part in parts])


def _constant(text: bytes, _message: Any) -> bytes:
    return text


def _lossless_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def kcat_envelope(message: Any, broker: int) -> bytes:
    """kcat's -J line. Bytes that are not UTF-8 pass through unchanged, as in kcat."""
    kind, timestamp_ms = message.timestamp()
    envelope: dict[str, Any] = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "tstype": _TIMESTAMP_TYPES[kind],
        "ts": timestamp_ms,
        "broker": broker,
    }
    if message.headers():
        envelope["headers"] = [item for name, value in message.headers() for item in (name, _lossless_text(value))]
    envelope["key"] = _lossless_text(message.key())
    envelope["payload"] = _lossless_text(message.value())
    return json.dumps(envelope, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape") + b"\n"


def json_field(name: str, value: bytes | None) -> dict[str, str | None]:
    """Returns {name: text}, or {name_base64: base64} if the value is not UTF-8."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {name + "_base64": base64.b64encode(value).decode()}


def envelope(message: Any) -> bytes:
    """`mqd consume --format json`: always valid JSON; bytes that are not UTF-8 are in base64 under
    another name.
    """
    fields: dict[str, Any] = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp_ms": message.timestamp()[1],
    }
    if message.headers():
        fields["headers"] = [{"name": name, **json_field("value", value)} for name, value in message.headers()]
    fields.update(json_field("key", message.key()))
    fields.update(json_field("value", message.value()))
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


# -- input -----------------------------------------------------------------------------------------


def split(stream: BinaryIO, delimiter: bytes) -> Iterator[bytes]:
    """Yields the pieces between delimiters as they arrive; the end of the stream ends the last
    piece. Empty pieces are skipped, as in kcat.
    """
    read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(_READ_BYTES):
        *whole, rest = (rest + chunk).split(delimiter)
        yield from filter(None, whole)
    if rest:
        yield rest


def split_key(record: bytes, delimiter: bytes | None, default_key: bytes | None) -> tuple[bytes | None, bytes]:
    """(key, value) of an input record; `default_key` is the key of a record without a delimiter."""
    if delimiter:
        key, separator, value = record.partition(delimiter)
        if separator:
            return key, value
    return default_key, record


def parse_header(text: str) -> tuple[str, bytes | None]:
    """Parses NAME=VALUE; without "=" the header's value is null."""
    name, equals, value = text.partition("=")
    if not name:
        raise click.UsageError(f"a header is NAME=VALUE, not {text!r}")
    return name, value.encode() if equals else None


# -- where to begin --------------------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True):
    """`kind`: beginning | end | offset | tail (`value` offsets before the end) | time (ms since the
    epoch).
    """

    kind: str
    value: int = 0


def parse_time(text: str, now: datetime) -> int:
    """Parses milliseconds since the epoch, a date or date and time (ISO 8601, local time by
    default), or an age: -90s, -15m, -2h, -1d. Returns milliseconds since the epoch. Raises
    click.UsageError.
    """
    if match := re.fullmatch(r"-([0-9]{1,12})(ms|s|m|h|d)", text):
        time_ms = int(now.timestamp() * 1000) - int(match[1]) * _UNITS[match[2]]
        if time_ms < 0:
            raise click.UsageError(f"{text!r} is before 1970")
        return time_ms
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise click.UsageError(
            f"{text!r} is not a time; use 2026-01-31T12:00, milliseconds since 1970, or -15m"
        ) from None


def parse_position(text: str, now: datetime) -> Position:
    """Parses beginning | end | OFFSET | -COUNT | @TIME. Raises click.UsageError."""
    if text in ("beginning", "earliest", "start"):
        return Position("beginning")
    if text in ("end", "latest"):
        return Position("end")
    if text.startswith("@"):
        return Position("time", parse_time(text[1:], now))
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return Position("tail", -int(text)) if text.startswith("-") else Position("offset", int(text))
    raise click.UsageError(f"{text!r} is not a starting point; use beginning, end, an offset, -COUNT or @TIME")
