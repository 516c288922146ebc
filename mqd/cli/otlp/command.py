"""`mqd otel`: sends a broker's metrics to an OpenTelemetry collector, from a separate process, so
that the broker imports no OpenTelemetry code and never waits for a collector.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from mqd import __version__
from mqd.base.paths import default_data_dir, layout
from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError
from mqd.cli.inspection import metrics_page
from mqd.cli.verbs.status import broker_status

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

METRICS_PATH = "/v1/metrics"
POINTS_MAX = 10_000  # in one request: a page with many partitions exceeds what collectors accept at once


def metrics_endpoint(endpoint: str) -> str:
    """The endpoint with OTLP's path for metrics. Raises CliError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"--endpoint {endpoint}: it must begin with http:// or https://, as in http://localhost:4318")
    return f"{endpoint.rstrip('/').removesuffix(METRICS_PATH)}{METRICS_PATH}"


class Export:
    """Sends the metrics of a data directory's broker to one collector."""

    def __init__(self, data_dir: Path, exporter: OTLPMetricExporter) -> None:
        from mqd.cli.otlp.conversion import Conversion

        self._data_dir, self._exporter = data_dir, exporter
        self._conversion = Conversion()

    def send(self) -> str:
        """Sends the current metrics. Returns "", or the error."""
        from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        try:
            status = broker_status(self._data_dir)
            if not status.get("metrics_url"):
                return str(status.get("reason") or "the broker has no metrics page")
            page = metrics_page.text(status["metrics_url"], self._data_dir)
            metrics = self._conversion.metrics(page, time.time_ns())
        except (OSError, ValueError, CliError) as error:
            return f"the metrics page cannot be read: {error}"
        attributes = {"service.name": "mqd", "service.instance.id": f"{status['host']}:{status['port']}"}
        # OTEL_RESOURCE_ATTRIBUTES can add to these attributes and override them
        resource = Resource(attributes).merge(OTELResourceDetector().detect())
        scope = ScopeMetrics(InstrumentationScope("mqd", __version__), metrics, "")
        result = self._exporter.export(MetricsData([ResourceMetrics(resource, [scope], "")]))
        return "" if result is MetricExportResult.SUCCESS else "the collector did not accept the metrics"


@click.command(short_help="Send a broker's metrics to an OpenTelemetry collector.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="The broker's data directory.  [env: MQD_DATA_DIR]")
@click.option(
    "--endpoint",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    default="http://localhost:4318",
    show_default=True,
    metavar="URL",
    help="The collector's address, for OTLP over HTTP.",
)
@click.option(
    "--every",
    type=click.FloatRange(1),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two exports.",
)
@click.option("--once", is_flag=True, help="Send the metrics once; fail if the collector does not accept them.")
def command(data_dir: Path | None, endpoint: str, every: float, once: bool) -> None:
    """Send the metrics of a broker on this host to an OpenTelemetry collector (OTLP over HTTP).

    Run it next to the broker, under the same supervisor. It reads the metrics page with the token
    and the CA of the data directory. Headers, certificates, compression and resource
    attributes are set by OpenTelemetry's environment variables: OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_COMPRESSION, OTEL_RESOURCE_ATTRIBUTES.
    """
    url = metrics_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as error:
        raise CliError(f"OpenTelemetry is not installed ({error}): pip install 'mqd[otel]'", EXIT_FAILED) from None
    export = Export(
        layout(data_dir or default_data_dir()).data_dir, OTLPMetricExporter(url, max_export_batch_size=POINTS_MAX)
    )
    last_problem = None
    while True:
        began = time.monotonic()
        problem = export.send()
        if once:
            if problem:
                raise CliError(f"{url}: {problem}", EXIT_UNREACHABLE)
            return
        if problem != last_problem:
            click.echo(f"{url}: {problem}" if problem else f"sending metrics to {url}", err=bool(problem))
            last_problem = problem
        time.sleep(max(0.0, began + every - time.monotonic()))
