"""Health of the cluster as one of its hosts sees it, as Prometheus families. Pure functions of the
acceptor's metadata; called by the thread that serves a scrape.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mqd.acceptor.metadata import Metadata
from mqd.cluster.host.messages import PartitionImage, TopicImage
from mqd.cluster.metadata.rules.partitions import acks_replicas, configured_min_in_sync, effective_min_in_sync


def partition_counts(metadata: Metadata, node_id: int) -> tuple[int, int, int]:
    """Returns three numbers of partitions: without a leader, in the whole cluster; led here with a
    replica out of sync; led here with fewer than min.insync.replicas in sync. Replicas beyond
    acks.replicas (spares) do not count as out of sync while the hosts of all replicas are in
    service.
    """
    without_leader = under_replicated = under_min_in_sync = 0
    if metadata.is_single_host:
        return 0, 0, 0
    for topic in metadata.topics_with_logs():
        configured = configured_min_in_sync(topic.config, metadata.broker_default_config)
        for partition in topic.partitions:
            if partition.leader < 0:
                without_leader += 1
            elif partition.leader == node_id and len(partition.in_sync_replicas) < len(partition.replicas):
                under_replicated += not _lacks_only_spares(metadata, topic, partition) and len(
                    partition.in_sync_replicas
                ) < len(partition.replicas) - len(partition.adding)
                under_min_in_sync += len(partition.in_sync_replicas) < effective_min_in_sync(
                    configured, len(partition.replicas), len(partition.adding)
                )
    return without_leader, under_replicated, under_min_in_sync


def _lacks_only_spares(metadata: Metadata, topic: TopicImage, partition: PartitionImage) -> bool:
    """Whether only spares are out of sync: enough replicas are in sync, and the hosts of all replicas
    are in service.
    """
    count = acks_replicas(topic.config)
    return 0 < count <= len(partition.in_sync_replicas) and all(map(metadata.is_alive, partition.replicas))


def collect(metadata: Metadata, node_id: int) -> Iterator[Any]:
    brokers = GaugeMetricFamily("mqd_cluster_brokers", "Registered brokers, by state", labels=["state"])
    known_brokers = list(metadata.brokers.values())
    for state, count in (
        ("in_service", sum(not broker.fenced for broker in known_brokers)),
        ("fenced", sum(broker.fenced for broker in known_brokers)),
        ("draining", sum(broker.draining for broker in known_brokers)),
    ):
        brokers.add_metric([state], count)
    without_leader, under_replicated, under_min_in_sync = partition_counts(metadata, node_id)
    yield brokers
    yield GaugeMetricFamily(
        "mqd_cluster_active_controller",
        "1 on the host that is the active controller",
        value=metadata.controller_id == node_id,
    )
    yield GaugeMetricFamily(
        "mqd_cluster_partitions_without_leader",
        "Partitions without a leader, in the whole cluster",
        value=without_leader,
    )
    yield CounterMetricFamily(
        "mqd_leader_elections",
        "Times that a partition anywhere in the cluster got a new leader or leader epoch, as seen by this acceptor",
        value=metadata.election_count,
    )
    yield CounterMetricFamily(
        "mqd_unclean_leader_elections",
        "Elections, anywhere in the cluster, of a leader that was not in sync, as seen by this acceptor:"
        " records were lost",
        value=metadata.unclean_election_count,
    )
    yield GaugeMetricFamily(
        "mqd_partitions_under_replicated",
        "Partitions led here with a replica out of sync; spares (acks.replicas) on hosts in service do not count",
        value=under_replicated,
    )
    yield GaugeMetricFamily(
        "mqd_partitions_under_min_in_sync",
        "Partitions led here with fewer replicas in sync than acks=all requires: producers with acks=all are refused",
        value=under_min_in_sync,
    )
