"""The filters of a search, and the rendering of records."""

from __future__ import annotations

import json

import pytest

from mqd.console import filters, record_view
from mqd.console.filters import BadFilter


class Message:
    def __init__(self, value: bytes | None, key: bytes | None = None, headers: list | None = None) -> None:
        self._parts = key, value, headers

    def key(self) -> bytes | None:
        return self._parts[0]

    def value(self) -> bytes | None:
        return self._parts[1]

    def headers(self) -> list | None:
        return self._parts[2]

    topic = lambda self: "t"
    partition = lambda self: 3
    offset = lambda self: 42
    timestamp = lambda self: (1, 1000)


ORDER = json.dumps(
    {"id": 7, "paid": True, "customer": {"country": "de", "a b": 1}, "items": [{"sku": "x"}, {"sku": "y"}]}
).encode()


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("$.id = 7", True),
        ("$.id == 8", False),
        ("$.id > 6.5", True),
        ('$.customer.country = "de"', True),
        ("$.customer.country = de", True),
        ("$.customer.country != de", False),
        ("$.customer.country ~ d", True),
        ('$.customer["a b"] = 1', True),
        ("$.items[1].sku = y", True),
        ("$.items[*].sku = y", True),
        ("$.items[*].sku = z", False),
        ("$.items[9].sku", False),
        ("$.items", True),
        ("$.nothing", False),
        ("$.id > de", False),  # not comparable
        ("$.paid = true", True),
        ("$.paid = 1", False),
        ("$ ~ country", True),
    ],
)
def test_a_condition_on_json(path: str, kept: bool) -> None:
    assert filters.parse("", "", "", path).matches(Message(ORDER)) is kept


@pytest.mark.parametrize(
    "value", [None, b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"id": ' + b"9" * 5000 + b"}", b"NaN", b'"\\ud800"']
)
def test_a_filter_accepts_any_value(value: bytes | None) -> None:
    assert not filters.parse("", "", "", "$.id = 7").matches(Message(value))
    record_view.record(Message(value, key=value, headers=[("h", value)]), 4096)


def test_a_wild_card_is_bounded() -> None:
    nested = json.dumps([[[[0] * 30] * 30] * 30] * 30).encode()
    assert not filters.parse("", "", "", "$[*][*][*][*] = 1").matches(Message(nested))


@pytest.mark.parametrize("path", ["id = 7", "$.id ? 7", "$.", "$[x]", "$" + ".a" * 33, "$.a = " + "x" * 300])
def test_an_invalid_condition_is_reported_with_an_example(path: str) -> None:
    with pytest.raises(BadFilter):
        filters.parse("", "", "", path)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"key": "cust"}, True),
        ({"key": "Cust"}, False),
        ({"value": '"paid": true'}, True),
        ({"header": "source"}, True),
        ({"header": "source=sh"}, True),
        ({"header": "source=web"}, False),
        ({"header": "empty"}, True),
        ({"header": "other"}, False),
        ({"key": "cust", "header": "other"}, False),
    ],
)
def test_parts_of_key_value_and_headers(given: dict[str, str], kept: bool) -> None:
    words = {"key": "", "value": "", "header": "", "condition": "", **given}
    message = Message(ORDER, b"cust-1", [("source", b"shop"), ("empty", None)])
    assert filters.parse(**words).matches(message) is kept


# -- views -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (None, "null", ""),
        (b"", "empty", ""),
        (b'{"a":1}', "json", '{\n  "a": 1\n}'),
        ("größe".encode(), "text", "größe"),
        (b"\x1b[31mred", "text", "‹U+001B›[31mred"),
        (b"\x00\x01\x02", "hex", "000000  00 01 02" + " " * 41 + "..."),
        (b"\xff<b>", "hex", "000000  ff 3c 62 3e" + " " * 38 + ".<b>"),
    ],
)
def test_bytes_are_rendered_readably(data: bytes | None, kind: str, text: str) -> None:
    found = record_view.view(data, 4096)
    assert (found.kind, found.text) == (kind, text)


def test_a_large_value_is_cut_between_characters() -> None:
    found = record_view.view("ä".encode() * 600_000, 4095)
    assert found.kind == "text" and found.is_cut and found.size == 1_200_000 and len(found.text) == 2047
    found = record_view.view(b"\xff" * 1_000_000, 4096)
    assert found.kind == "hex" and found.is_cut and len(found.text) < 6000
    assert len(found.line) <= record_view.LINE_CHARACTERS


def test_commands_are_quoted() -> None:
    record = record_view.record(Message(b"v"), 100)
    assert dict(record.commands("b:1; rm x"))["kcat"] == "kcat -b 'b:1; rm x' -C -t t -p 3 -o 42 -c 1"
