"""Converts a Prometheus metrics page to OpenTelemetry's metrics. They keep their Prometheus names,
which dashboards and alerts refer to.

Source: OpenTelemetry's "Prometheus and OpenMetrics Compatibility".
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

_UNITS = {"_seconds": "s", "_bytes": "By"}
_SeriesKey = tuple[str, frozenset[tuple[str, str]]]


class Conversion:
    """Converts the successive scrapes of one broker. Keeps the start time of each counter: the time
    of the first scrape, or of the last scrape before the value fell because the broker restarted.
    """

    def __init__(self) -> None:
        self._counts: dict[_SeriesKey, tuple[int, float]] = {}  # series -> start time and last value
        # the counters of the current scrape; it replaces _counts, so missing series are forgotten
        self._new_counts: dict[_SeriesKey, tuple[int, float]] = {}
        self._last_scrape_ns = 0

    def metrics(self, page: str, now_ns: int) -> list[Metric]:
        """Raises ValueError if the page cannot be parsed."""
        self._new_counts = {}
        metrics = [self._metric(family, now_ns) for family in text_string_to_metric_families(page) if family.samples]
        self._counts, self._last_scrape_ns = self._new_counts, now_ns
        return metrics

    def _metric(self, family: Family, now_ns: int) -> Metric:
        data: Any
        if family.type == "histogram":
            data = Histogram(self._histogram_points(family, now_ns), AggregationTemporality.CUMULATIVE)
        elif family.type == "counter":
            data = Sum(self._number_points(family, now_ns, is_counter=True), AggregationTemporality.CUMULATIVE, True)
        else:
            data = Gauge(self._number_points(family, now_ns, is_counter=False))
        unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "")
        # the parser strips _total from the name of a counter
        name = f"{family.name}_total" if family.type == "counter" else family.name
        return Metric(name, family.documentation, unit, data)

    def _start_ns(self, name: str, labels: Mapping[str, str], value: float, now_ns: int) -> int:
        """Returns the start time of a counter, and remembers its value for the next scrape."""
        key = (name, frozenset(labels.items()))
        start_ns, last = self._counts.get(key, (now_ns, value))
        if value < last:
            start_ns = self._last_scrape_ns
        self._new_counts[key] = (start_ns, value)
        return start_ns

    def _number_points(self, family: Family, now_ns: int, is_counter: bool) -> list[NumberDataPoint]:
        return [
            NumberDataPoint(
                sample.labels,
                self._start_ns(sample.name, sample.labels, sample.value, now_ns) if is_counter else 0,
                now_ns,
                float(sample.value),
            )
            for sample in family.samples
        ]

    def _histogram_points(self, family: Family, now_ns: int) -> list[HistogramDataPoint]:
        series: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            histogram = series.setdefault(frozenset(labels.items()), {"labels": labels, "buckets": []})
            kind = sample.name.removeprefix(family.name)
            if kind == "_bucket":
                histogram["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                histogram[kind] = sample.value
        return [
            self._histogram_point(family.name, now_ns, histogram)
            for histogram in series.values()
            if histogram["buckets"]
        ]

    def _histogram_point(self, name: str, now_ns: int, histogram: Mapping[str, Any]) -> HistogramDataPoint:
        """Prometheus' bucket counts are cumulative; OpenTelemetry's are not."""
        buckets = sorted(histogram["buckets"])
        counts = [0.0, *(count for _, count in buckets)]
        total = counts[-1]
        return HistogramDataPoint(
            attributes=histogram["labels"],
            start_time_unix_nano=self._start_ns(name, histogram["labels"], total, now_ns),
            time_unix_nano=now_ns,
            count=int(total),
            sum=histogram.get("_sum", 0.0),
            bucket_counts=[int(after - before) for before, after in pairwise(counts)],
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            min=None,  # type: ignore[arg-type]  # unknown: the exporter omits it
            max=None,  # type: ignore[arg-type]  # unknown, too
        )
