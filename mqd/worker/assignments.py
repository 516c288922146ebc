"""Computes the roles of a partition's replicas from the controller's metadata: the assignment that
the reactor passes to the replication core (native/replica/rules.h). Pure.

A partition whose only replica is on this host, which leads it, has no assignment: it is not
replicated, and has no replication overhead.
"""

from collections.abc import Mapping

import msgspec

from mqd.base.config import broker_number, topic_effective, topic_list, topic_value
from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import BrokerImage, PartitionImage, TopicImage
from mqd.cluster.metadata.rules.partitions import acks_replicas, configured_min_in_sync, effective_min_in_sync


class Member(msgspec.Struct, frozen=True):
    """A replica of the partition."""

    node_id: int
    in_sync: bool
    eligible: bool  # may join the in-sync replicas: unfenced, not shutting down
    broker_epoch: int  # -1 = not registered
    moving: bool = False  # a reassignment adds or removes it


class Assignment(msgspec.Struct, frozen=True):
    """struct mqd_replica_assignment, plus the worker of the leader's host that owns the partition."""

    node_id: int
    broker_epoch: int  # of this host
    leader: int
    leader_epoch: int
    partition_epoch: int
    min_insync: int
    lag_ms_max: int
    lag_records_max: int
    flush_on_ack: bool
    members: tuple[Member, ...]
    leader_worker: int  # 0 if there is no leader
    recovering: bool = False
    acks_replicas: int = 0
    throttled: bool = False  # fetched at follower.replication.throttled.rate while it is not in sync


class Settings(msgspec.Struct, frozen=True):
    """Replication settings of a topic."""

    configured_min_in_sync: int
    lag_ms_max: int
    lag_records_max: int
    flush_on_ack: bool
    acks_replicas: int = 0
    throttled_replicas: frozenset[str] = frozenset()  # PARTITION:BROKER, or *


class ClusterView(msgspec.Struct):
    """What assignments are computed from: this host and all brokers. `node_id` -1: not received
    yet.
    """

    node_id: int = -1
    brokers: dict[int, BrokerImage] = {}
    default_config: dict[str, str] = {}  # set for all brokers in the metadata log


def needs_assignment(partition: PartitionImage, node_id: int) -> bool:
    return (
        len(partition.replicas) != 1
        or partition.leader != partition.replicas[0]
        or (node_id >= 0 and partition.leader != node_id)
    )


def _member(node: int, partition: PartitionImage, brokers: Mapping[int, BrokerImage]) -> Member:
    broker = brokers.get(node)
    eligible = broker is not None and not broker.fenced and not broker.in_controlled_shutdown
    moving = node in partition.adding or node in partition.removing
    epoch = broker.epoch if broker is not None else -1
    return Member(node, node in partition.in_sync_replicas, eligible, epoch, moving)


def settings_of(topic: TopicImage, cluster: ClusterView, broker_config: Mapping[str, str]) -> Settings:
    """`broker_config`: the effective configuration of this host (static and dynamic)."""
    effective = topic_effective(broker_config, topic.config)
    return Settings(
        configured_min_in_sync=configured_min_in_sync(topic.config, cluster.default_config),
        lag_ms_max=broker_number(broker_config, "replica.lag.time.max.ms"),
        lag_records_max=int(effective["replica.lag.max.messages"]),
        flush_on_ack=topic.internal or bool(topic_value(effective, "flush.on.ack")),
        acks_replicas=acks_replicas(topic.config),
        throttled_replicas=frozenset(topic_list(effective, "follower.replication.throttled.replicas")),
    )


def leader_worker(topic: TopicImage, partition: PartitionImage, cluster: ClusterView) -> int:
    """The worker of the leader's host that owns the partition; 0 if there is no leader, or its host
    is unknown.
    """
    leader = cluster.brokers.get(partition.leader)
    return (
        owner_of(topic.topic_id, partition.index, leader.worker_count)
        if leader is not None and leader.worker_count > 0
        else 0
    )


def assignment_of(topic: TopicImage, partition: PartitionImage, cluster: ClusterView, settings: Settings) -> Assignment:
    own_broker = cluster.brokers.get(cluster.node_id)
    return Assignment(
        node_id=cluster.node_id,
        broker_epoch=own_broker.epoch if own_broker is not None else -1,
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        min_insync=effective_min_in_sync(
            settings.configured_min_in_sync, len(partition.replicas), len(partition.adding)
        ),
        lag_ms_max=settings.lag_ms_max,
        lag_records_max=settings.lag_records_max,
        flush_on_ack=settings.flush_on_ack,
        members=tuple(_member(node, partition, cluster.brokers) for node in partition.replicas),
        leader_worker=leader_worker(topic, partition, cluster),
        recovering=partition.recovering,
        acks_replicas=settings.acks_replicas,
        throttled=not settings.throttled_replicas.isdisjoint(("*", f"{partition.index}:{cluster.node_id}")),
    )
