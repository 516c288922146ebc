"""A record's bytes in readable form: JSON, text or hex, limited in size."""

from __future__ import annotations

import codecs
import json
import shlex
from typing import Any

import msgspec

from mqd.console.rendering import visible

ROW_BYTES = 4096
PAGE_BYTES = 256 << 10
HEX_BYTES = 1024
JSON_BYTES = 64 << 10
LINE_CHARACTERS = 240
HEADERS_MAX = 50


class View(msgspec.Struct, frozen=True):
    """`kind`: null | empty | json | text | hex. `line`: the beginning of the data, on one line."""

    kind: str
    text: str
    line: str
    size: int
    is_cut: bool


def view(data: bytes | None, max_bytes: int) -> View:
    if data is None:
        return View("null", "", "null", 0, False)
    if not data:
        return View("empty", "", "empty", 0, False)
    size, is_cut = len(data), len(data) > max_bytes
    if size <= JSON_BYTES and data[:1] in b"{[" and (pretty := _pretty(data)) is not None:
        line = visible(data[: 4 * LINE_CHARACTERS].decode("utf-8", "ignore"))[:LINE_CHARACTERS]
        return View("json", visible(pretty[:max_bytes]), line, size, len(pretty) > max_bytes)
    text = _text(data[:max_bytes], is_cut)
    if text is not None:
        shown = visible(text)
        return View("text", shown, " ".join(shown[: 2 * LINE_CHARACTERS].split())[:LINE_CHARACTERS], size, is_cut)
    return View("hex", hex_dump(data[:HEX_BYTES]), data[:48].hex(" "), size, size > HEX_BYTES)


def _pretty(data: bytes) -> str | None:
    try:
        return json.dumps(json.loads(data), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return None


def _text(data: bytes, is_cut: bool) -> str | None:
    """Returns None for invalid UTF-8, and for data with too many control characters."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None
    unusual_count = sum(char < " " and char not in "\n\r\t" for char in text)
    return None if unusual_count * 4 > len(text) else text


def hex_dump(data: bytes) -> str:
    """A hex dump: offset, bytes, and the bytes as text, with dots for those that are not printable."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


class Record(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: View
    value: View
    headers: list[tuple[str, View]]
    omitted_header_count: int  # how many headers are left out of `headers`

    def commands(self, bootstrap: str) -> list[tuple[str, str]]:
        topic, server = shlex.quote(self.topic), shlex.quote(bootstrap)
        position = f"-p {self.partition} -o {self.offset}"
        return [
            ("mqd", f"mqd consume {topic} -b {server} {position} -n 1"),
            ("kcat", f"kcat -b {server} -C -t {topic} {position} -c 1"),
        ]


def record(message: Any, max_bytes: int) -> Record:
    headers = message.headers() or []
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        view(message.key(), max_bytes),
        view(message.value(), max_bytes),
        [(name, view(value, min(max_bytes, 1024))) for name, value in headers[:HEADERS_MAX]],
        max(0, len(headers) - HEADERS_MAX),
    )
