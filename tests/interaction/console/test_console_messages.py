"""Records of a topic in the console: start positions, display limits, hostile bytes, and cancelled
searches.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from html import unescape
from urllib.parse import parse_qsl, urlsplit

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.cli.common import Settings
from mqd.console import streaming
from mqd.console.searching import Query, search
from tests.console_client import Browser
from tests.interaction.console.test_console_overview import log_in
from tests.interaction.security.secured import PASSWORDS, Secured

MIB = b"x" * 1_000_000
HOSTILE = [
    (b"<b>key</b>", b"<script>alert(1)</script>", [("<i>h</i>", b'"><img src=x onerror=alert(1)>')]),
    (b"\xff\xfe", bytes(range(256)), [("binary", b"\xff")]),
    (b"large", MIB, None),
    (None, None, None),
]


@pytest.fixture(scope="module")
def records(secured: Secured) -> Iterator[None]:
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap})
    for future in admin.create_topics(
        [NewTopic("shop", 3, 1), NewTopic("hostile", 1, 1), NewTopic("void", 1, 1)]
    ).values():
        future.result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": secured.broker.bootstrap, "message.max.bytes": 2_000_000})
    for number in range(300):
        value = json.dumps({"order": number, "customer": {"country": ["de", "fr", "us"][number % 3]}})
        producer.produce("shop", value, f"cust-{number}", number % 3, timestamp=1_000_000 + number * 1000)
    for key, value, headers in HOSTILE:
        producer.produce("hostile", value, key, 0, headers=headers)
    assert producer.flush(60) == 0
    yield


def searched(browser: Browser, topic: str, **query: object) -> tuple[str, dict]:
    """The rows, and the final event of the search."""
    response = browser.get("/messages/stream", topic=topic, **query)
    assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
    rows, said = "", {}
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        if name == "event: records":
            rows += json.loads(data.removeprefix("data: "))
        else:
            said = {"event": name, "said": json.loads(data.removeprefix("data: "))}
    return rows, said


def offsets(rows: str) -> list[str]:
    return [f"{partition}:{offset}" for partition, offset in re.findall(r">(\d+) : (\d+)</a>", rows)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"count": 3}, ["2:99", "1:99", "0:99"]),  # the newest by time, newest first
        ({"from": "beginning", "partition": 1, "count": 2}, ["1:0", "1:1"]),
        ({"from": "offset", "at": 97, "partition": 2}, ["2:97", "2:98", "2:99"]),
        ({"from": "offset", "at": 10**15, "partition": 2}, []),
        ({"from": "time", "at": 1_000_000 + 298_000}, ["1:99", "2:99"]),
        ({"from": "time", "at": "2026-01-01T00:00", "partition": 0}, []),
    ],
)
def test_start_positions(records: None, browser: Browser, query: dict, expected: list[str]) -> None:
    rows, said = searched(browser, "shop", **query)
    assert sorted(offsets(rows)) == sorted(expected) and said["said"]["ended"] in ("end", "count")
    if query == {"count": 3}:
        assert offsets(rows) == expected


def test_a_search_reports_its_progress(records: None, browser: Browser) -> None:
    rows, said = searched(browser, "shop", **{"from": "beginning", "path": "$.customer.country = de", "count": 500})
    assert len(offsets(rows)) == 100
    about = said["said"]
    assert (about["scanned"], about["total"], about["matches"], about["ended"]) == (300, 300, 100, "end")
    rows, said = searched(browser, "shop", **{"from": "beginning", "key": "cust-1", "value": '"order": 17'})
    assert len(offsets(rows)) == 11 and said["said"]["matches"] == 11  # 17, 170 to 179


def test_the_page_starts_the_search_of_its_url(records: None, browser: Browser) -> None:
    query = {"from": "beginning", "path": '$.customer.country = "de"', "key": "cust", "count": "5"}
    page = browser.get("/messages", topic="shop", **query)
    assert page.status == 200 and "mqd consume shop -b" in page.words
    (stream,) = re.findall(r'data-stream="([^"]*)"', page.text)
    assert dict(parse_qsl(urlsplit(unescape(stream)).query)) == {"topic": "shop", **query}


def test_hostile_bytes_are_text(records: None, browser: Browser) -> None:
    rows, _ = searched(browser, "hostile")
    assert "<script" not in rows and "<img" not in rows and "<b>key" not in rows
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in rows and "&lt;i&gt;h&lt;/i&gt;" in rows
    assert "00 01 02 03" in rows and "1.0 MB" in rows and len(rows) < 40_000
    pages = [browser.get("/message", topic="hostile", partition=0, offset=at) for at in range(4)]
    assert [page.status for page in pages] == [200] * 4 and all(len(page.body) < 400_000 for page in pages)
    assert "<script>alert" not in pages[0].text and "not UTF-8" in pages[1].words and "null, 0 bytes" in pages[3].words
    assert "mqd consume hostile -b" in pages[0].words and "kcat -b" in pages[0].words


def test_downloads_are_raw_bytes(records: None, browser: Browser) -> None:
    large = browser.get("/message/raw", topic="hostile", partition=0, offset=2)
    assert large.body == MIB and large.headers["content-type"] == "application/octet-stream"
    assert large.headers["content-disposition"] == 'attachment; filename="hostile-0-2-value"'
    key = browser.get("/message/raw", topic="hostile", partition=0, offset=1, part="key")
    assert key.body == b"\xff\xfe"
    lines = browser.get("/messages/download", topic="shop", **{"from": "beginning", "count": 100_000})
    assert len([json.loads(line) for line in lines.body.splitlines()]) == 300
    assert "attachment" in lines.headers["content-disposition"]


@pytest.mark.parametrize(
    ("path", "query", "status", "reason"),
    [
        ("/messages", {"topic": "shop", "path": "nonsense"}, 400, "a JSON condition is"),
        ("/messages", {"topic": "shop", "from": "time", "at": "soon"}, 400, "'soon' is not a time"),
        ("/messages", {"topic": "shop", "from": "offset", "at": "-3"}, 400, "is not an offset"),
        ("/messages", {"topic": "shop", "partition": "x"}, 400, "is not a partition"),
        ("/messages/stream", {"topic": "shop", "from": "nowhere"}, 400, "there is no start"),
        ("/messages/download", {"topic": "shop", "from": "live"}, 400, "has no end"),
        ("/message", {"topic": "shop", "offset": 5000}, 404, "has no record at offset 5000"),
        ("/message", {"topic": "shop", "partition": 9}, 502, "has no partition 9"),
        ("/message", {}, 404, "the URL has no topic"),
    ],
)
def test_invalid_queries_are_reported(
    records: None, browser: Browser, path: str, query: dict, status: int, reason: str
) -> None:
    response = browser.get(path, **query)
    assert response.status == status and reason in response.words


def test_missing_topics_are_reported_in_the_stream(records: None, browser: Browser, login_browser: Browser) -> None:
    for topic, query, reason in (
        ("no-such", {}, "there is no topic no-such"),
        ("shop", {"partition": 7}, "topic shop has no partition 7"),
    ):
        rows, said = searched(browser, topic, **query)
        assert rows == "" and said["event"] == "event: failed" and reason in said["said"]
    rows, said = searched(browser, "void")
    assert rows == "" and said["said"]["total"] == 0 and said["said"]["ended"] == "end"
    log_in(login_browser, "bob", PASSWORDS["bob"])
    rows, said = searched(login_browser, "shop")
    assert rows == "" and "you may not see it" in said["said"]


def test_a_search_whose_reader_has_gone_ends() -> None:
    stopped, freed = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> Iterator[int]:
        number = 0
        while not stop.is_set():
            yield (number := number + 1)
        stopped.set()

    async def read_some() -> None:
        steps = streaming.stream(work, freed.set)
        assert [await anext(steps), await anext(steps)] == [1, 2]
        await steps.aclose()
        await asyncio.to_thread(freed.wait, 10)

    asyncio.run(read_some())
    assert freed.is_set()


def test_concurrent_searches_are_bounded() -> None:
    places = streaming.StreamLimit()
    assert [places.take("ada") for _ in range(7)] == [True] * 6 + [False]
    assert [places.take("bob") for _ in range(6)] == [True] * 6 and not places.take("eve")
    places.free("ada")
    assert places.take("eve")


def test_a_live_search_shows_what_is_written_from_then_on(secured: Secured, records: None, browser: Browser) -> None:
    stop = threading.Event()
    producer = confluent_kafka.Producer({"bootstrap.servers": secured.broker.bootstrap})
    seen: list[bytes] = []
    deadline = time.monotonic() + 60
    query = Query("void", "live")
    for step in search(Settings(secured.broker.bootstrap), query, stop, lambda one: one.value(), True):
        seen += step.records
        if not seen:
            producer.produce("void", b"now")
            producer.flush(60)
        if seen or time.monotonic() > deadline:
            stop.set()
    assert seen and set(seen) == {b"now"} and step.ended == "stopped"
