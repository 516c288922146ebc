"""Lag and members of groups as metrics, under the names of kafka_exporter, which existing dashboards
use.

Bound: only the first SERIES_MAX partitions, in order of group names, are shown; the number of
omitted partitions is a metric, too. Sums by topic cover only the partitions that are shown.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mqd.acceptor.broker import Broker
from mqd.acceptor.metrics.positions import groups, positions
from mqd.acceptor.metrics.waiting import GroupPartition, WaitingRecord
from mqd.base.clock import now_ms

SERIES_MAX = 10_000

_LABELS = ["consumergroup", "topic", "partition"]


def collect(broker: Broker, waiting: Mapping[GroupPartition, WaitingRecord]) -> Iterator[Any]:
    offset = GaugeMetricFamily(
        "kafka_consumergroup_current_offset",
        "Committed offset of a group in a partition; for a share group, the first unfinished record",
        labels=_LABELS,
    )
    lag = GaugeMetricFamily(
        "kafka_consumergroup_lag",
        "Records between the committed offset and the high watermark; for a share group, the unfinished ones",
        labels=_LABELS,
    )
    lag_seconds = GaugeMetricFamily(
        "mqd_consumergroup_lag_seconds",
        "Age, by its timestamp, of the first record that the group has not committed (share groups: not finished)",
        labels=_LABELS,
    )
    lag_sum = GaugeMetricFamily("kafka_consumergroup_lag_sum", "Lag of a group in a topic", labels=_LABELS[:2])
    members = GaugeMetricFamily("kafka_consumergroup_members", "Members of a group", labels=_LABELS[:1])
    rebalance = GaugeMetricFamily(
        "mqd_consumergroup_rebalance_seconds",
        "How long the rebalance under way has lasted, 0 if there is none",
        labels=_LABELS[:1],
    )
    not_shown = GaugeMetricFamily(
        "mqd_consumergroup_partitions_not_exported", f"Partitions of groups beyond the {SERIES_MAX} that are shown"
    )
    coordinators = broker.coordinators
    for group in sorted(groups(broker), key=lambda group: group.group_id):
        members.add_metric([group.group_id], group.member_count)
        since_ms = group.rebalance_since_ms
        elapsed_ms = coordinators.clock.now_ms() - since_ms if coordinators is not None and since_ms >= 0 else 0
        rebalance.add_metric([group.group_id], max(0, elapsed_ms) / 1000)
    all_positions = positions(broker)
    for (name, topic), topic_positions in itertools.groupby(
        all_positions[:SERIES_MAX], lambda position: (position.group, position.topic)
    ):
        topic_lag = 0
        for position in topic_positions:
            labels = [name, topic, str(position.partition)]
            offset.add_metric(labels, position.offset)
            end = _high_watermark(broker, topic, position.partition)
            if end is not None:
                lag_records = max(0, end - position.offset - position.finished_count)
                lag.add_metric(labels, lag_records)
                topic_lag += lag_records
                waiting_record = waiting.get((name, topic, position.partition))
                if lag_records == 0:
                    lag_seconds.add_metric(labels, 0)
                elif waiting_record is not None and waiting_record.since_ms >= 0:
                    lag_seconds.add_metric(labels, max(0, now_ms() - waiting_record.since_ms) / 1000)
        lag_sum.add_metric([name, topic], topic_lag)
    not_shown.add_metric([], max(0, len(all_positions) - SERIES_MAX))
    yield from (offset, lag, lag_seconds, lag_sum, members, rebalance, not_shown)
    if coordinators is not None:
        budget = coordinators.budget
        yield GaugeMetricFamily("mqd_group_memory_bytes", "Approximate memory of all groups", budget.used_bytes)
        yield GaugeMetricFamily("mqd_group_memory_max_bytes", "group.coordinator.memory.bytes", budget.limit_bytes)
        yield CounterMetricFamily(
            "mqd_group_memory_refusals",
            "Requests refused because groups would take too much memory",
            budget.refused_count,
        )
    yield from _dead_letters(broker)


def _dead_letters(broker: Broker) -> Iterator[Any]:
    """Yields the metrics of dead letters of the share-partitions that this host leads."""
    written = CounterMetricFamily(
        "mqd_dead_letters", "Dead letters of a share group, written by this host", labels=["group"]
    )
    waiting = GaugeMetricFamily(
        "mqd_dead_letters_waiting",
        "Rejected or exhausted records whose dead letter is not written yet",
        labels=["group"],
    )
    oldest = GaugeMetricFamily(
        "mqd_dead_letters_oldest_seconds",
        "How long the oldest record without its dead letter has waited, since this process learned of it",
        labels=["group"],
    )
    if broker.dead_letters is not None:
        for group, figures in sorted(broker.dead_letters.figures().items()):
            written.add_metric([group], figures.written_count)
            waiting.add_metric([group], figures.waiting_count)
            oldest.add_metric([group], figures.oldest_age_ms / 1000)
    yield from (written, waiting, oldest)


def _high_watermark(broker: Broker, topic: str, index: int) -> int | None:
    image = broker.partition_of(topic, index)
    view = broker.replica_view(image) if image is not None else None  # a follower's high watermark lags a little
    return None if view is None else view.high_watermark
