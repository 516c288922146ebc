"""Sessions, the cache, metrics, and the rendering of hostile text."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mqd.cli.common import Settings
from mqd.cli.inspection import metrics_page
from mqd.cli.inspection.diagnosis import Harm
from mqd.console import changing, rendering
from mqd.console.audit import Audit
from mqd.console.cache import KEEP_FACTOR, Cache
from mqd.console.metrics import Sampler, clock_ahead_s, parse, quantile, rates_between
from mqd.console.options import Options
from mqd.console.pages.moves import Pace
from mqd.console.sessions import IDLE_S, SESSION_S, SESSIONS_MAX, Sessions
from mqd.security.client import ClientSecurity
from tests.ports import free_port


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_console_starts_without_the_core_and_the_coordinators() -> None:
    """They would cost a quarter of its start-up time, and memory."""
    heavy = ("mqd.native", "mqd.coordinator.log")
    code = f"import sys, mqd.console.app; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- sessions --------------------------------------------------------------------------------------


def test_a_session_ends_when_it_is_idle_or_old() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    idle, used = sessions.begin("ada", ClientSecurity()), sessions.begin("bob", ClientSecurity())
    for _ in range(int(SESSION_S / (IDLE_S - 1))):
        clock.now += IDLE_S - 1
        assert sessions.find(used) is not None
    assert sessions.find(idle) is None
    clock.now += IDLE_S - 1
    assert sessions.find(used) is None


def test_sessions_are_bounded() -> None:
    sessions = Sessions()
    first = sessions.begin("ada", ClientSecurity())
    second = sessions.begin("ada", ClientSecurity())
    sessions.find(first)
    for _ in range(SESSIONS_MAX - 1):
        sessions.begin("bob", ClientSecurity())
    assert sessions.find(first) is not None and sessions.find(second) is None
    sessions.end(first)
    assert sessions.find(first) is None


def test_a_token_is_bound_to_one_cookie_and_one_process() -> None:
    sessions = Sessions()
    token = sessions.token("cookie")
    assert sessions.is_valid_token("cookie", token)
    assert not sessions.is_valid_token("other", token) and not sessions.is_valid_token("", sessions.token(""))
    assert not sessions.is_valid_token("cookie", "") and not sessions.is_valid_token("cookie", "é")
    assert not Sessions().is_valid_token("cookie", token)


# -- the cache -------------------------------------------------------------------------------------


def test_refreshing_costs_a_twentieth_of_a_core_at_most() -> None:
    clock, looks = Clock(), []
    cache = Cache(clock)

    def look() -> int:
        clock.now += 2.0
        looks.append(None)
        return len(looks)

    assert cache.get("x", 3.0, look) == 1
    clock.now += KEEP_FACTOR * 2.0 - 0.1
    assert cache.get("x", 3.0, look) == 1
    clock.now += 0.2
    assert cache.get("x", 3.0, look) == 2
    cache.clear()
    assert cache.get("x", 3.0, look) == 3


def test_concurrent_requests_share_one_refresh() -> None:
    cache, looks, begun, go = Cache(), [], threading.Event(), threading.Event()

    def look() -> str:
        looks.append(None)
        begun.set()
        assert go.wait(10)
        return "seen"

    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get("x", 60.0, look))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    assert cache.get("y", 60.0, lambda: "other") == "other"  # another key does not wait
    go.set()
    for thread in threads:
        thread.join(10)
    assert found == ["seen"] * 5 and len(looks) == 1


def test_a_failure_is_not_cached() -> None:
    cache = Cache()
    with pytest.raises(ZeroDivisionError):
        cache.get("x", 60.0, lambda: 1 // 0)
    assert cache.get("x", 60.0, lambda: 1) == 1
    assert not cache._key_locks


def test_what_was_loaded_before_a_change_is_not_kept() -> None:
    cache = Cache()

    def look() -> str:
        cache.clear()  # another request has made a change meanwhile
        return "before the change"

    assert cache.get("x", 60.0, look) == "before the change"
    assert cache.get("x", 60.0, lambda: "after it") == "after it"
    assert cache.get("x", 60.0, lambda: "kept") == "after it"


# -- moves -----------------------------------------------------------------------------------------


def test_the_remaining_time_follows_from_the_rate() -> None:
    pace = Pace()
    assert pace.remaining_s(1000, 10.0) is None and pace.remaining_s(1000, 12.0) is None
    assert pace.remaining_s(600, 14.0) == 6.0  # 400 in 4 s
    assert pace.remaining_s(2000, 16.0) is None, "another plan has begun"
    assert pace.remaining_s(1000, 26.0) == 10.0
    assert pace.remaining_s(0, 27.0) is None and pace.remaining_s(500, 28.0) is None


# -- metrics ---------------------------------------------------------------------------------------

PAGE = """# HELP mqd_records_appended_total x
mqd_records_appended_total{worker="0"} %d
mqd_records_appended_total{worker="1"} 5.0
mqd_produce_seconds_bucket{worker="0",le="0.001"} %d
mqd_produce_seconds_bucket{worker="0",le="0.002"} %d
mqd_produce_seconds_bucket{worker="0",le="+Inf"} %d
mqd_partition_online{topic="a\\"\\\\b",partition="0"} 1.0
mqd_partition_online{topic="a\\"\\\\b",partition="1"} 0.0
mqd_consumergroup_lag_seconds{consumergroup="g",topic="t",partition="0"} 1.0
go_goroutines 8
mqd_nonsense
"""


def test_rates_are_computed_from_metrics_pages() -> None:
    before, after = parse(PAGE % (100, 10, 10, 10), 50.0), parse(PAGE % (400, 108, 109, 110), 60.0)
    assert [(one.name, one.labels["topic"]) for one in after.samples] == [("mqd_partition_online", 'a"\\b')]
    point = rates_between(before, after)
    assert point.records == 30.0 and point.p99_s == 0.002
    restarted = rates_between(after, before)
    assert restarted.records == 0.0 and restarted.p99_s is None


ILL = """mqd_sync_oldest_seconds{worker="0"} %d
mqd_sync_oldest_seconds{worker="1"} 0.0
kafka_consumergroup_members{consumergroup="g"} 1.0
kafka_consumergroup_current_offset{consumergroup="g",topic="t",partition="0"} 7.0
kafka_consumergroup_current_offset{consumergroup="g",topic="t",partition="1"} %d
kafka_consumergroup_current_offset{consumergroup="g",topic="t",partition="2"} 9.0
mqd_consumergroup_lag_seconds{consumergroup="g",topic="t",partition="0"} 90.0
mqd_consumergroup_lag_seconds{consumergroup="g",topic="t",partition="1"} 90.0
mqd_consumergroup_lag_seconds{consumergroup="g",topic="t",partition="2"} 5.0
"""


def test_a_hung_flush_and_a_blocking_record_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(Options("", ClientSecurity(), "", 0, frozenset(), metrics=("url",)))
    pages = iter([ILL % (0, 1), ILL % (30, 2), ILL % (0, 3)])
    monkeypatch.setattr(sampler, "_read", lambda url: next(pages))
    sampler.sample()
    assert sampler.findings(0.0) == [], "one sample does not tell slow from stuck"
    sampler.sample()
    disk, record = sampler.findings(0.0)
    assert disk.harm == Harm.OUTAGE and disk.what.startswith("a flush of worker 0 has lasted 30 s")
    assert "has not passed offset 7 of t-0" in record.what
    sampler.sample()
    assert [one.what for one in sampler.findings(0.0)] == [record.what], "the flush has ended"


def test_a_broker_whose_clock_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(Options("", ClientSecurity(), "", 0, frozenset(), metrics=("http://broker:9644/metrics",)))
    ahead_s = [1.0]
    monkeypatch.setattr(sampler, "_read", lambda url: f"mqd_clock_timestamp_seconds {time.time() + ahead_s[0]}")
    sampler.sample()
    assert sampler.findings(0.0) == [], "a scrape takes as long"
    for ahead_s[0], words in ((40.0, "ahead of"), (-40.0, "behind")):
        sampler.sample()
        (found,) = sampler.findings(0.0)
        assert found.what.startswith("the clock of the broker at broker:9644 is ") and f" s {words} this" in found.what
    assert [clock_ahead_s(at, 10.0, 12.0) for at in (None, 9.0, 10.5, 13.0)] == [0.0, -1.0, 0.0, 1.0]


@pytest.fixture(params=["Content-Length", "Transfer-Encoding"])
def cut_short(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a page that ends too early."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            in_chunks = request.param == "Transfer-Encoding"
            self.send_header(request.param, "chunked" if in_chunks else "100")
            self.end_headers()
            self.wfile.write(b"64\r\nmqd_clock" if in_chunks else b"mqd_clock")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", free_port()), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_that_is_cut_short_is_a_failed_scrape(cut_short: str, tmp_path: Path) -> None:
    """In chunks, it ended the sampler's thread, and the charts no longer moved; else it was counted as whole."""
    sampler = Sampler(Options("", ClientSecurity(), "", 0, frozenset(), metrics=(cut_short,)))
    sampler.sample()
    assert "IncompleteRead" in sampler.failures()[cut_short]
    with pytest.raises(OSError, match="IncompleteRead"):
        metrics_page.text(cut_short, tmp_path)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile(0.99, {}, {0.5: 0.0, float("inf"): 10.0}) == 0.5
    assert quantile(0.99, {}, {}) is None


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("orders", "orders"),
        ("größe 注文", "größe 注文"),
        ("a\u202etxt.exe", "a‹U+202E›txt.exe"),  # would be read backwards
        ("a\x00b\x1b[31m", "a‹U+0000›b‹U+001B›[31m"),
        ("zero\u200bwidth", "zero‹U+200B›width"),
        ("two\nlines\t", "two\nlines\t"),
    ],
)
def test_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert rendering.visible(text) == shown


def test_zero_is_kept_in_a_url() -> None:
    url = rendering.url("/record", partition=0, offset=0, of="", at=None, live=False, page=1)
    assert url == "/record?partition=0&offset=0&page=1"


def test_templates_escape() -> None:
    template = rendering.environment().from_string('<a title="{{ name|visible }}">{{ name }}</a>')
    assert "<script" not in template.render(name='"><script>alert(1)</script>')


def test_invalid_client_timestamps_are_shown_as_numbers() -> None:
    assert rendering.moment(-1) == "–" and rendering.moment(1 << 62) == f"{1 << 62} ms"
    assert rendering.moment(0).startswith(("1970", "1969"))


def test_a_line_of_the_audit_log_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    Audit(file).write("ada\n", "127.0.0.1", "mqd topic delete 'a\nb'", "done")
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["user"] == "ada\n" and file.stat().st_mode & 0o777 == 0o600
    Audit(file).write("ada", "127.0.0.1", "mqd produce t -K " + "k" * 1_000_000, "done")
    assert file.stat().st_size < 5000


# -- forms -----------------------------------------------------------------------------------------


def test_too_many_properties_of_a_new_topic_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "Broker", None)
    lines = "\n".join(f"name{number}=1" for number in range(changing.CONFIGS_MAX + 1))
    with pytest.raises(changing.BadForm, match=f"at most {changing.CONFIGS_MAX} properties"):
        changing.create_topic(Settings("127.0.0.1:1"), {"name": "orders", "configs": lines})
