"""Prometheus' alerting rules for brokers.

Each alert has a section of the same name in docs/monitoring.md, which says what to do.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

JOB_NAME = "mqd"  # in the scrape configuration
CLUSTER_LABEL = "cluster"  # label of the scrape targets; its value names the cluster


class Alert(NamedTuple):
    """`holds_for`: how long the expression must hold, in Prometheus' notation. `is_critical`:
    clients are affected, or records are at risk: page an operator.
    """

    name: str
    expression: str
    holds_for: str
    is_critical: bool
    summary: str


ALERTS = (
    Alert(
        "MqdBrokerDown",
        f'up{{job="{JOB_NAME}"}} == 0',
        "1m",
        True,
        "The broker at {{ $labels.instance }} does not respond to scrapes",
    ),
    Alert(
        "MqdWorkerDown",
        "mqd_worker_running == 0",
        "30s",
        True,
        "Worker {{ $labels.worker }} of {{ $labels.instance }} is not running",
    ),
    Alert(
        "MqdProcessKeepsDying",
        "increase(mqd_process_deaths_total[15m]) > 2",
        "0s",
        False,
        "{{ $labels.process }} of {{ $labels.instance }} died {{ $value | humanize }} times in 15 minutes",
    ),
    Alert(
        "MqdPartitionsWithoutLeader",
        f"max by ({CLUSTER_LABEL}) (mqd_cluster_partitions_without_leader) > 0",
        "30s",
        True,
        "{{ $value }} partitions have no leader: they can be neither written nor read",
    ),
    Alert(
        "MqdPartitionOffline",
        "count by (instance) (mqd_partition_online == 0) > 0",
        "1m",
        True,
        "{{ $value }} partitions of {{ $labels.instance }} are not served",
    ),
    Alert(
        "MqdUnderMinInSync",
        "mqd_partitions_under_min_in_sync > 0",
        "1m",
        True,
        "{{ $value }} partitions of {{ $labels.instance }} refuse acks=all: too few replicas are in sync",
    ),
    Alert(
        "MqdUnderReplicated",
        "mqd_partitions_under_replicated > 0",
        "3m",  # a host's restart and its catch-up usually take less
        False,
        "{{ $value }} partitions of {{ $labels.instance }} have replicas that are not in sync",
    ),
    Alert(
        "MqdInSyncSetsFlap",
        "increase(mqd_in_sync_shrinks_total[15m]) > 20",
        "5m",
        False,
        "Replicas leave the in-sync sets of {{ $labels.instance }} repeatedly",
    ),
    Alert(
        "MqdNoActiveController",
        f"sum by ({CLUSTER_LABEL}) (mqd_cluster_active_controller) != 1",
        "1m",
        True,
        "{{ $value }} active controllers: topics, leaders and members cannot change",
    ),
    Alert(
        "MqdBrokerFenced",
        f'max by ({CLUSTER_LABEL}) (mqd_cluster_brokers{{state="fenced"}}) > 0',
        "5m",
        False,
        "{{ $value }} brokers of the cluster are fenced",
    ),
    Alert(
        "MqdUncleanElection",
        "increase(mqd_unclean_leader_elections_total[10m]) > 0",
        "0s",
        True,
        "A leader was elected from outside the in-sync set: acknowledged records are lost",
    ),
    Alert(
        "MqdFlushFailed",
        "increase(mqd_sync_failures_total[5m]) > 0",
        "0s",
        True,
        "A flush to a disk of {{ $labels.instance }} failed",
    ),
    Alert(
        "MqdFlushHangs",
        "mqd_sync_oldest_seconds > 20",
        "30s",  # mqd_sync_seconds counts a flush at its end, so one that never ends shows only here
        True,
        "A flush of worker {{ $labels.worker }} at {{ $labels.instance }} has lasted {{ $value | humanizeDuration }}",
    ),
    Alert(
        "MqdCorruptSegment",
        "mqd_corrupt_segments > 0",
        "0s",
        True,
        "Stored records of {{ $labels.topic }}-{{ $labels.partition }} at {{ $labels.instance }} are corrupt",
    ),
    Alert(
        "MqdDiskNearlyFull",
        "mqd_log_dir_free_bytes / mqd_log_dir_total_bytes < 0.1",
        "5m",
        False,
        "{{ $labels.directory }} of {{ $labels.instance }} has {{ $value | humanizePercentage }} left",
    ),
    Alert(
        "MqdDiskFullWithinADay",
        "predict_linear(mqd_log_dir_free_bytes[6h], 86400) < 0 and mqd_log_dir_free_bytes /"
        " mqd_log_dir_total_bytes < 0.4",
        "30m",
        False,
        "{{ $labels.directory }} of {{ $labels.instance }} will be full within a day",
    ),
    Alert(
        "MqdFlushesAreSlow",
        "histogram_quantile(0.99, sum by (instance, le) (rate(mqd_sync_seconds_bucket[5m]))) > 0.5",
        "10m",
        False,
        "One flush in a hundred takes {{ $value | humanizeDuration }} at {{ $labels.instance }}",
    ),
    Alert(
        "MqdProduceIsSlow",
        "histogram_quantile(0.99, sum by (instance, le) (rate(mqd_produce_seconds_bucket[5m]))) > 1",
        "10m",
        False,
        "One Produce in a hundred takes {{ $value | humanizeDuration }} at {{ $labels.instance }}",
    ),
    Alert(
        "MqdWorkerStalls",
        "histogram_quantile(0.99, rate(mqd_loop_seconds_bucket[5m])) > 0.1",
        "10m",
        False,
        "Worker {{ $labels.worker }} of {{ $labels.instance }} stalls for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "MqdConsumerBehind",
        f"max by ({CLUSTER_LABEL}, consumergroup, topic) (mqd_consumergroup_lag_seconds) > 600",
        "5m",
        False,
        "Group {{ $labels.consumergroup }} is {{ $value | humanizeDuration }} behind in {{ $labels.topic }}",
    ),
    Alert(
        "MqdConsumerStuck",
        "max without (instance) (kafka_consumergroup_lag) > 0"
        " and max without (instance) (changes(kafka_consumergroup_current_offset[15m])) == 0"
        f" and on ({CLUSTER_LABEL}, consumergroup)"
        f" max by ({CLUSTER_LABEL}, consumergroup) (kafka_consumergroup_members) > 0",
        "15m",
        False,
        "Group {{ $labels.consumergroup }} has members and commits nothing for {{ $labels.topic }}-{{"
        " $labels.partition }}",
    ),
    Alert(
        "MqdDeadLettersWait",
        f"max by ({CLUSTER_LABEL}, group) (mqd_dead_letters_oldest_seconds) > 300",
        "1m",
        False,
        "The oldest dead letter of share group {{ $labels.group }} has been waiting to be written for {{ $value |"
        " humanizeDuration }}",
    ),
    Alert(
        "MqdDeadLettersWritten",
        f"sum by ({CLUSTER_LABEL}, group) (increase(mqd_dead_letters_total[15m])) > 0",
        "0s",
        False,
        "Share group {{ $labels.group }} gave up on {{ $value | humanize }} records in 15 minutes",
    ),
    Alert(
        "MqdPartitionStuck",
        # the group's other partitions move, so this is not a consumer that commits rarely
        "max without (instance) (min_over_time(kafka_consumergroup_lag[3m])) > 0"
        " and max without (instance) (changes(kafka_consumergroup_current_offset[3m])) == 0"
        f" and on ({CLUSTER_LABEL}, consumergroup, topic)"
        f" sum by ({CLUSTER_LABEL}, consumergroup, topic) (changes(kafka_consumergroup_current_offset[3m])) > 3",
        "1m",
        False,
        "Group {{ $labels.consumergroup }} is stuck at a record of {{ $labels.topic }}-{{ $labels.partition }},"
        " but advances in the topic's other partitions",
    ),
    Alert(
        "MqdRebalanceStuck",
        f"max by ({CLUSTER_LABEL}, consumergroup) (mqd_consumergroup_rebalance_seconds) > 120",
        "1m",
        False,
        "Group {{ $labels.consumergroup }} has been rebalancing for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "MqdGroupMemoryNearlyFull",
        "mqd_group_memory_bytes / mqd_group_memory_max_bytes > 0.9",
        "5m",
        False,
        "Groups use {{ $value | humanizePercentage }} of the memory allowed for them at {{ $labels.instance }}",
    ),
    Alert(
        "MqdConnectionsRefused",
        "increase(mqd_connections_refused_total[5m]) > 0",
        "5m",
        False,
        "{{ $labels.instance }} refuses connections",
    ),
    Alert(
        "MqdAuthenticationFails",
        'rate(mqd_authentications_total{result="failed"}[5m]) > 1',
        "5m",
        False,
        "{{ $value | humanize }} logins a second fail at {{ $labels.instance }}",
    ),
    Alert(
        "MqdCertificateExpires",
        "mqd_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        "1h",
        False,
        "The certificate of {{ $labels.listener }} at {{ $labels.instance }} expires in"
        " {{ $value | humanizeDuration }}",
    ),
    Alert(
        "MqdClockSkew",
        "abs(mqd_clock_timestamp_seconds - timestamp(mqd_clock_timestamp_seconds)) > 10",
        "2m",  # a slow scrape distorts one sample, by less than the scrape timeout
        False,
        "The clock of {{ $labels.instance }} differs by {{ $value | humanizeDuration }} from Prometheus'",
    ),
    Alert(
        "MqdCompactionStuck",
        "mqd_compaction_uncleanable > 0",
        "10m",
        False,
        "{{ $labels.topic }}-{{ $labels.partition }} at {{ $labels.instance }} cannot be compacted",
    ),
)


def render_rules(runbook: str, alerts: Sequence[Alert] = ALERTS) -> str:
    """The rules file, in YAML. `runbook`: the address of docs/monitoring.md."""
    lines = ["groups:", "  - name: mqd", "    rules:"]
    for alert in alerts:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.holds_for}",
            "        labels:",
            f"          severity: {'critical' if alert.is_critical else 'warning'}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook_url: {json.dumps(f'{runbook}#{alert.name.lower()}')}",
        ]
    return "\n".join(lines) + "\n"
