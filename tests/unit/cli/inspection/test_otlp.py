"""A metrics page as received by an OpenTelemetry collector."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

from mqd.cli.common import CliError
from mqd.cli.inspection import metrics_page
from mqd.cli.otlp import command
from mqd.cli.otlp.command import Export, metrics_endpoint
from mqd.cli.otlp.conversion import Conversion
from tests.collector import Collector, attributes, running

PAGE = """# HELP mqd_connections Open connections
# TYPE mqd_connections gauge
mqd_connections{{worker="0"}} 3.0
# HELP mqd_records_appended_total Records appended
# TYPE mqd_records_appended_total counter
mqd_records_appended_total{{worker="0"}} {records}
# HELP mqd_sync_seconds One flush to disk
# TYPE mqd_sync_seconds histogram
mqd_sync_seconds_bucket{{le="0.001",worker="0"}} 5.0
mqd_sync_seconds_bucket{{le="0.002",worker="0"}} 8.0
mqd_sync_seconds_bucket{{le="+Inf",worker="0"}} 9.0
mqd_sync_seconds_sum{{worker="0"}} 0.5
mqd_sync_seconds_count{{worker="0"}} 9.0
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running() as found:
        yield found


class _Broker:
    """A broker whose metrics page is set by the test."""

    records = 7

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        about = {"metrics_url": "http://h/metrics", "host": "h", "port": 9092}
        monkeypatch.setattr(command, "broker_status", lambda data_dir: about)
        monkeypatch.setattr(metrics_page, "text", lambda url, data_dir: PAGE.format(records=self.records))


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> _Broker:
    return _Broker(monkeypatch)


def export_to(collector: Collector) -> Export:
    return Export(Path("/nowhere"), OTLPMetricExporter(metrics_endpoint(collector.url), timeout=5))


def test_each_kind_of_metric_arrives(collector: Collector, broker: _Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "site=here,service.name=queue")
    assert export_to(collector).send() == ""
    assert collector.paths == ["/v1/metrics"]
    assert collector.resource == {"service.name": "queue", "service.instance.id": "h:9092", "site": "here"}
    found = collector.metrics
    assert list(found) == ["mqd_connections", "mqd_records_appended_total", "mqd_sync_seconds"]
    (gauge,) = found["mqd_connections"].gauge.data_points
    assert (gauge.as_double, attributes(gauge.attributes)) == (3.0, {"worker": "0"})
    counter = found["mqd_records_appended_total"].sum
    assert counter.is_monotonic and counter.aggregation_temporality == 2  # cumulative
    assert counter.data_points[0].as_double == 7
    times = found["mqd_sync_seconds"]
    assert (times.description, times.unit) == ("One flush to disk", "s")
    (point,) = times.histogram.data_points
    assert list(point.explicit_bounds) == [0.001, 0.002] and list(point.bucket_counts) == [5, 3, 1]
    assert (point.count, point.sum, point.HasField("min"), attributes(point.attributes)) == (
        9,
        0.5,
        False,
        {"worker": "0"},
    )


def test_a_counter_that_falls_has_restarted(collector: Collector, broker: _Broker) -> None:
    export = export_to(collector)
    points = []
    for broker.records in (7, 9, 2, 3):
        assert export.send() == ""
        points.append(collector.metrics["mqd_records_appended_total"].sum.data_points[0])
    since, times = [one.start_time_unix_nano for one in points], [one.time_unix_nano for one in points]
    assert since == [times[0], times[0], times[1], times[1]] and times == sorted(times)


def test_series_that_are_gone_are_forgotten() -> None:
    """The process runs as long as the broker, and topics and groups come and go."""
    conversion = Conversion()
    for number in range(100):
        conversion.metrics(PAGE.format(records=7).replace('worker="0"', f'topic="t{number}"'), number)
    assert len(conversion._counts) == 2


def test_a_collector_that_refuses_is_reported_and_retried(collector: Collector, broker: _Broker) -> None:
    export = export_to(collector)
    collector.status = 400
    assert export.send() == "the collector did not accept the metrics"
    collector.status = 200
    assert export.send() == "" and collector.metrics


def test_a_page_that_cannot_be_read_is_reported(
    collector: Collector, broker: _Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str, data_dir: Path) -> str:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(metrics_page, "text", refused)
    assert export_to(collector).send() == "the metrics page cannot be read: refused"
    assert collector.requests == []


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/metrics"),
        ("https://h/otlp/", "https://h/otlp/v1/metrics"),
        ("http://h:4318/v1/metrics", "http://h:4318/v1/metrics"),
    ],
)
def test_the_address_of_a_collector(endpoint: str, url: str) -> None:
    assert metrics_endpoint(endpoint) == url


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(CliError, match="begin with http"):
        metrics_endpoint("localhost:4318")


def test_no_other_module_imports_it() -> None:
    code = (
        "import sys, mqd.cli.main, mqd.acceptor.__main__, mqd.worker.worker, mqd.cli.otlp.command;"
        " print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
