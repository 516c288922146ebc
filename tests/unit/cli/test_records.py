"""Escapes, output formats, envelopes, delimited input, start positions; the demo's digests."""

import io
import json
from datetime import UTC, datetime

import click
import pytest

from mqd.cli import records
from mqd.cli.records import Position
from mqd.cli.verbs import demo

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


class Message:
    def __init__(self, key=b"k", value=b"v", headers=None, timestamp=(1, 1700000000000)):
        self._fields = {
            "key": key,
            "value": value,
            "headers": headers,
            "timestamp": timestamp,
            "topic": "t",
            "partition": 3,
            "offset": 7,
        }

    def __getattr__(self, name):
        return lambda: self._fields[name]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a\\nb", b"a\nb"),
        ("\\t\\r", b"\t\r"),
        ("\\x41\\x4z", b"A\x04z"),
        ("\\q\\\\", b"q\\"),
        ("é", "é".encode()),
        ("\\xff", b"\xff"),
        ("", b""),
        ("a\\", b"a\\"),
    ],
)
def test_unescape(text, data):
    assert records.unescape(text) == data


@pytest.mark.parametrize(
    ("text", "message", "data"),
    [
        ("%t [%p] at %o: %k=%v\\n", Message(), b"t [3] at 7: k=v\n"),
        ("%K,%S,%V|%R", Message(key=None, value=b""), b"-1,0,0|\0\0\0\0"),
        ("%R", Message(value=None), b"\xff\xff\xff\xff"),
        ("%k;%s;", Message(key=None, value=None), b"NULL;NULL;"),
        ("%T %h", Message(headers=[("a", b"1"), ("b", None)]), b"1700000000000 a=1,b=NULL"),
        ("%T", Message(timestamp=(0, 0)), b"-1"),
        ("100%%\\x21", Message(), b"100%!"),
        ("%s", Message(value=b"\xff\0"), b"\xff\0"),
    ],
)
def test_formats(text, message, data):
    assert records.compile_format(text, b"NULL")(message) == data


@pytest.mark.parametrize("text", ["%q", "%", "a%%%", "%\\n"])
def test_unknown_tokens_are_refused(text):
    with pytest.raises(click.UsageError):
        records.compile_format(text)


def test_envelopes():
    message = Message(key=None, value=b"\xff{", headers=[("a", b"\xfe"), ("b", None)])
    assert (
        records.kcat_envelope(message, 1)
        == b'{"topic":"t","partition":3,"offset":7,"tstype":"create","ts":1700000000000,"broker":1,"headers":["a","\xfe","b",null],"key":null,"payload":"\xff{"}\n'
    )
    assert json.loads(records.envelope(message)) == {
        "topic": "t",
        "partition": 3,
        "offset": 7,
        "timestamp_ms": 1700000000000,
        "headers": [{"name": "a", "value_base64": "/g=="}, {"name": "b", "value": None}],
        "key": None,
        "value_base64": "/3s=",
    }
    assert "headers" not in json.loads(records.envelope(Message()))


class Dribble(io.RawIOBase):
    """Returns one byte at a time, like a slow pipe."""

    def __init__(self, data: bytes):
        self._data = io.BytesIO(data)

    def read1(self, _size: int) -> bytes:
        return self._data.read(1)


@pytest.mark.parametrize("make", [io.BytesIO, Dribble])
@pytest.mark.parametrize(
    ("data", "delimiter", "parts"),
    [
        (b"a\nb\n\nc", b"\n", [b"a", b"b", b"c"]),
        (b"", b"\n", []),
        (b"\n\n", b"\n", []),
        (b"a--b-c--", b"--", [b"a", b"b-c"]),
        (b"x" * 200_000, b"\n", [b"x" * 200_000]),
    ],
)
def test_split(make, data, delimiter, parts):
    if make is Dribble and len(data) > 1000:
        data, parts = data[:500], [data[:500]]
    assert list(records.split(make(data), delimiter)) == parts


def test_split_key_and_header():
    assert records.split_key(b"a:b:c", b":", None) == (b"a", b"b:c")
    assert records.split_key(b"abc", b":", b"fixed") == (b"fixed", b"abc")
    assert records.split_key(b"a:b", None, None) == (None, b"a:b")
    assert records.parse_header("a=b=c") == ("a", b"b=c")
    assert records.parse_header("a=") == ("a", b"")
    assert records.parse_header("a") == ("a", None)
    with pytest.raises(click.UsageError):
        records.parse_header("=b")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", Position("beginning")),
        ("earliest", Position("beginning")),
        ("end", Position("end")),
        ("42", Position("offset", 42)),
        ("-5", Position("tail", 5)),
        ("@1700000000000", Position("time", 1700000000000)),
        ("@0", Position("time", 0)),
        ("@2026-01-31T11:00+00:00", Position("time", 1769857200000)),
        ("@-90s", Position("time", 1769860710000)),
        ("@-1d", Position("time", 1769774400000)),
    ],
)
def test_starting_points(text, start):
    assert records.parse_position(text, NOW) == start


@pytest.mark.parametrize("text", ["", "x", "@", "@x", "1.5", "--5", "@-5y", "5-", "٣", "@-999999d", "@-999999999999d"])
def test_no_starting_points(text):
    with pytest.raises(click.UsageError):
        records.parse_position(text, NOW)


# -- the demo's verdict ----------------------------------------------------------------------------

PAIRS = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (None, b"4"), (None, b"5")]


def verdict(received) -> dict[str, bool]:
    return {check.name: check.passed for check in demo.compare(demo.Digest(PAIRS), demo.Digest(received))}


def test_the_demo_detects_errors():
    good = dict.fromkeys(("count", "bytes", "content", "order"), True)
    assert verdict(PAIRS) == good
    # records of different keys, and records without key, are unordered
    assert verdict([PAIRS[1], PAIRS[4], PAIRS[0], PAIRS[2], PAIRS[3]]) == good
    assert verdict([PAIRS[2], PAIRS[1], PAIRS[0], PAIRS[3], PAIRS[4]]) == good | {"order": False}
    assert verdict(PAIRS[:-1]) == good | {"count": False, "bytes": False, "content": False}
    assert verdict([*PAIRS[:-1], PAIRS[0]]) == good | {"bytes": False, "content": False, "order": False}
    assert verdict([(b"a", b"1"), (b"b", b"9"), *PAIRS[2:]]) == good | {"content": False, "order": False}
    assert verdict([*PAIRS, PAIRS[3]]) == good | {"count": False, "bytes": False, "content": False}


def test_the_flights_are_read_without_their_package(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "year,dep_time,tailnum,carrier\n2013,517,N14228,UA\n2013,,,AA\n2013,NA,NA,B6\n")
    rows = list(demo.read_flights(tmp_path / "flights.csv.zip"))
    assert rows == [
        {"year": 2013, "dep_time": 517, "tailnum": "N14228", "carrier": "UA"},
        {"year": 2013, "dep_time": None, "tailnum": None, "carrier": "AA"},
        {"year": 2013, "dep_time": None, "tailnum": None, "carrier": "B6"},
    ]
    assert demo.encode_flights(rows)[:2] == [
        (b"N14228", b'{"year":2013,"dep_time":517,"tailnum":"N14228","carrier":"UA"}'),
        (None, b'{"year":2013,"dep_time":null,"tailnum":null,"carrier":"AA"}'),
    ]
    assert len(list(demo.read_flights(tmp_path / "flights.csv.zip", 1))) == 1
