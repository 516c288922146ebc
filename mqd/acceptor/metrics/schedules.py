"""The metrics of this host's schedules, as its timer reports them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from mqd.base.schedule_files import LATE_BOUNDS_S, PartitionStatus

_LABELS = ["topic", "partition"]
_LATE_BOUNDS = [*map(repr, LATE_BOUNDS_S), "+Inf"]


def collect(statuses: Iterable[PartitionStatus]) -> Iterator[Any]:
    pending = GaugeMetricFamily("mqd_schedule_pending", "Records that are not due yet", labels=_LABELS)
    behind = GaugeMetricFamily(
        "mqd_schedule_overdue_seconds", "How overdue the oldest undelivered record is", labels=_LABELS
    )
    gone = CounterMetricFamily(
        "mqd_schedule_deleted",
        "Records that were deleted before they were due, at the request of an administrator",
        labels=_LABELS,
    )
    unreadable = CounterMetricFamily(
        "mqd_schedule_unreadable",
        "Records with unreadable headers, written before the topic was a schedule: delivered as if they had none",
        labels=_LABELS,
    )
    late = HistogramMetricFamily(
        "mqd_schedule_late_seconds", "Delay between a record's due time and its delivery", labels=_LABELS
    )
    for status in statuses:
        labels = [status.topic, str(status.partition)]
        pending.add_metric(labels, status.pending)
        behind.add_metric(labels, status.behind_s)
        gone.add_metric(labels, status.gone)
        unreadable.add_metric(labels, status.unreadable)
        late.add_metric(
            labels, list(zip(_LATE_BOUNDS, accumulate(status.late_buckets), strict=True)), status.late_total_s
        )
    yield from (pending, behind, gone, unreadable, late)
