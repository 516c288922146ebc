"""The brokers' metrics, if the console knows the addresses of their metrics pages: rates over the
last quarter of an hour, kept in memory, and what `mqd doctor` finds in these metrics.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from mqd.cli.inspection import diagnosis
from mqd.cli.inspection.diagnosis import Finding
from mqd.cli.inspection.metrics_page import Sample
from mqd.console.options import Options

INTERVAL_S = 15.0
HISTORY_S = 15 * 60
POINTS_MAX = int(HISTORY_S / INTERVAL_S)
PAGE_TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 64 << 20
TOTALS = ("mqd_records_appended_total", "mqd_bytes_appended_total", "mqd_fetch_bytes_total")
PRODUCE_TIMES = "mqd_produce_seconds_bucket"
CLOCK = "mqd_clock_timestamp_seconds"
# a page can have lines for 10,000 partitions: labels are parsed only in lines that are kept
_ALWAYS_KEPT = frozenset({"mqd_log_dir_total_bytes", "mqd_log_dir_free_bytes", "mqd_sync_failures_total",
                    "mqd_certificate_expiry_timestamp_seconds"})  # fmt: skip
_KEPT_UNLESS = {  # metric -> its normal value; lines with this value are dropped
    "mqd_corrupt_segments": 0.0,
    "mqd_compaction_uncleanable": 0.0,
    "mqd_partition_online": 1.0,
    "mqd_sync_oldest_seconds": 0.0,
    "kafka_consumergroup_members": 0.0,
}
_LAG = "mqd_consumergroup_lag_seconds"
_COMMITTED = "kafka_consumergroup_current_offset"  # kept for partitions whose lag is kept
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class Scrape(msgspec.Struct):
    """The content of one metrics page. `produce_counts`: upper bound in seconds -> number of Produce
    requests that did not take longer.
    """

    time_s: float
    totals: dict[str, float]
    produce_counts: dict[float, float]
    samples: list[Sample]
    clock_s: float | None = None  # the broker's clock: seconds since 1970


class Point(msgspec.Struct, frozen=True):
    """Rates per second between two scrapes, for all brokers together. `p99_s`: the 99th percentile of
    the duration of Produce requests; None if nothing was produced.
    """

    records: float
    bytes_in: float
    bytes_out: float
    p99_s: float | None


def parse(page: str, time_s: float) -> Scrape:
    totals = dict.fromkeys(TOTALS, 0.0)
    produce_counts: dict[float, float] = {}
    samples, committed = [], []
    clock_s = None
    for line in page.splitlines():
        if not line.startswith(("mqd_", "kafka_consumergroup_")):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, value = match[1], _number(match[3])
        if name in totals:
            totals[name] += value
        elif name == CLOCK:
            clock_s = value
        elif name == PRODUCE_TIMES:
            bound = _number(_labels(match[2]).get("le", "+Inf"))
            produce_counts[bound] = produce_counts.get(bound, 0.0) + value
        elif (
            name in _ALWAYS_KEPT
            or (name in _KEPT_UNLESS and value != _KEPT_UNLESS[name])
            or (name == _LAG and value > diagnosis.STALLED_S_MIN)
        ):
            samples.append(Sample(name, _labels(match[2]), value))
        elif name == _COMMITTED:
            committed.append((match[2], value))
    lagging = {_partition_of(sample.labels) for sample in samples if sample.name == _LAG}
    if lagging:
        all_committed = ((_labels(text), value) for text, value in committed)
        samples += [
            Sample(_COMMITTED, labels, value) for labels, value in all_committed if _partition_of(labels) in lagging
        ]
    return Scrape(time_s, totals, produce_counts, samples, clock_s)


def clock_ahead_s(clock_s: float | None, began_s: float, ended_s: float) -> float:
    """How many seconds a broker's clock is ahead of this host's clock; negative if it is behind. The
    broker's clock was read between `began_s` and `ended_s` of this host's clock, so a time between
    the two counts as 0.
    """
    return 0.0 if clock_s is None else clock_s - min(max(clock_s, began_s), ended_s)


def _partition_of(labels: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(labels.get(name) for name in ("consumergroup", "topic", "partition"))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _labels(text: str | None) -> dict[str, str]:
    return {
        name: re.sub(r"\\[n\"\\]", lambda escape: _ESCAPES[escape[0]], value)
        for name, value in _LABEL.findall(text or "")
    }


def quantile(fraction: float, before: dict[float, float], after: dict[float, float]) -> float | None:
    """The smallest bound such that at least this fraction of the requests between the two scrapes
    took at most that long.
    """
    # (bound, number of requests that did not exceed it)
    increases = sorted((bound, count - before.get(bound, 0.0)) for bound, count in after.items())
    if not increases or increases[-1][1] <= 0:
        return None
    count_wanted = fraction * increases[-1][1]
    finite = [bound for bound, count in increases if count >= count_wanted and bound != float("inf")]
    return finite[0] if finite else max((bound for bound, _ in increases if bound != float("inf")), default=None)


def rates_between(before: Scrape, after: Scrape) -> Point:
    """The rates of one broker. A restarted broker counts from zero, so its rates are lower bounds."""
    seconds = max(after.time_s - before.time_s, 0.001)
    records, bytes_in, bytes_out = (max(0.0, after.totals[name] - before.totals[name]) / seconds for name in TOTALS)
    return Point(records, bytes_in, bytes_out, quantile(0.99, before.produce_counts, after.produce_counts))


class Sampler:
    """Scrapes the metrics pages on a thread while the console runs. Does nothing without addresses."""

    def __init__(self, options: Options) -> None:
        self.urls = options.metrics
        self._token_file, self._ca_file = options.metrics_token_file, options.metrics_ca_file
        self._lock = threading.Lock()
        self._last: dict[str, Scrape] = {}
        self._previous: dict[str, Scrape] = {}
        self._clock_ahead_s: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)
        self._stop = threading.Event()

    def start(self) -> None:
        if self.urls:
            threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stop.wait(INTERVAL_S):
                return

    def sample(self) -> None:
        """Scrapes every page once, and adds a point if at least one page has been scraped twice."""
        points = []
        for url in self.urls:
            began_s = time.time()
            try:
                scrape = parse(self._read(url), time.monotonic())
            except (OSError, ValueError, http.client.HTTPException) as error:
                with self._lock:
                    self._failures[url] = str(error)
                    self._last.pop(url, None)
                    self._previous.pop(url, None)
                    self._clock_ahead_s.pop(url, None)
                continue
            with self._lock:
                self._failures.pop(url, None)
                self._clock_ahead_s[url] = clock_ahead_s(scrape.clock_s, began_s, time.time())
                if url in self._last:
                    points.append(rates_between(self._last[url], scrape))
                    self._previous[url] = self._last[url]
                self._last[url] = scrape
        if points:
            p99s = [point.p99_s for point in points if point.p99_s is not None]
            total = Point(
                sum(point.records for point in points),
                sum(point.bytes_in for point in points),
                sum(point.bytes_out for point in points),
                max(p99s, default=None),
            )
            with self._lock:
                self._points.append(total)

    def _read(self, url: str) -> str:
        request = urllib.request.Request(url)
        if self._token_file is not None:
            request.add_header("Authorization", f"Bearer {self._token_file.read_text().strip()}")
        context = ssl.create_default_context(cafile=str(self._ca_file)) if self._ca_file is not None else None
        with urllib.request.urlopen(request, timeout=PAGE_TIMEOUT_S, context=context) as response:
            page = response.read(PAGE_BYTES_MAX + 1)
        if len(page) > PAGE_BYTES_MAX:
            raise ValueError(f"more than {PAGE_BYTES_MAX} bytes")
        if response.length:  # read() with a limit does not report a page that is cut short
            raise http.client.IncompleteRead(page, response.length)
        return page.decode("utf-8", "replace")

    def points(self) -> list[Point]:
        with self._lock:
            return list(self._points)

    def failures(self) -> dict[str, str]:
        with self._lock:
            return dict(self._failures)

    def findings(self, now_s: float) -> list[Finding]:
        with self._lock:
            last, previous, clock_ahead_by_url = dict(self._last), dict(self._previous), dict(self._clock_ahead_s)
        samples = [sample for scrape in last.values() for sample in scrape.samples]
        all_findings = diagnosis.metric_findings(samples, now_s, "DATA_DIR")
        for url, scrape in previous.items():
            all_findings += diagnosis.consumer_findings(scrape.samples, last[url].samples)
        for url, ahead_s in clock_ahead_by_url.items():
            all_findings += diagnosis.clock_findings(urlsplit(url).netloc, ahead_s)
        return all_findings

    def free_fraction(self) -> float | None:
        """The fraction of the fullest log directory that is free."""
        with self._lock:
            scrapes = list(self._last.values())
        fractions = []
        for scrape in scrapes:
            values = {(sample.name, sample.labels.get("directory")): sample.value for sample in scrape.samples}
            for (name, directory), total in values.items():
                if name == "mqd_log_dir_total_bytes" and total:
                    fractions.append(values.get(("mqd_log_dir_free_bytes", directory), 0.0) / total)
        return min(fractions, default=None)
