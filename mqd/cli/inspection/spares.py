"""Counts the spares of topics with acks.replicas as in sync, for the commands that show replicas. A
spare is outside the in-sync set only because enough other replicas are in it; while its host is in
service, it lacks no records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mqd.cli.kafka_request import Broker

_DESCRIBE_CONFIGS = 32


def count_as_in_sync(broker: Broker, topics: Any) -> None:
    """Adds spares to the in-sync replicas of the partitions of `topics`, from a Metadata response.
    If this user may not describe a topic's configuration, the topic's spares are unknown, and are
    not added.
    """
    incomplete_topics = [topic for topic in topics if any(map(_lacks_replicas, topic.partitions))]
    limits = _acks_replicas(broker, [topic.name for topic in incomplete_topics]) if incomplete_topics else {}
    for topic in incomplete_topics:
        limit = limits.get(topic.name, 0)
        for partition in topic.partitions:
            if (
                _lacks_replicas(partition)
                and limit
                and len(partition.isr_nodes) >= limit
                and not partition.offline_replicas
            ):
                partition.isr_nodes = list(partition.replica_nodes)


def _lacks_replicas(partition: Any) -> bool:
    return partition.leader_id >= 0 and len(partition.isr_nodes) < len(partition.replica_nodes)


def _acks_replicas(broker: Broker, names: list[str]) -> dict[str, int]:
    """acks.replicas of the topics that have it; a Kafka broker does not know this setting."""
    from mqd.cluster.metadata.rules.configs import RESOURCE_TOPIC
    from mqd.cluster.metadata.rules.partitions import ACKS_REPLICAS
    from mqd.protocol.messages import DescribeConfigsRequest

    resources = [
        DescribeConfigsRequest.Resource(
            resource_type=RESOURCE_TOPIC, resource_name=name, configuration_keys=[ACKS_REPLICAS]
        )
        for name in names
    ]
    results = broker.request(_DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=resources)).results
    return {
        result.resource_name: int(config.value or 0)
        for result in results
        if not result.error_code
        for config in result.configs
        if config.name == ACKS_REPLICAS
    }
