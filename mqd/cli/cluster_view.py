"""The data that `mqd cluster` shows: hosts, the controllers' quorum, partitions and versions."""

from __future__ import annotations

from typing import Any

from mqd.base.cluster_config import format_address
from mqd.cli.common import Settings

_METADATA, _API_VERSIONS, _DESCRIBE_QUORUM, _DESCRIBE_CLUSTER = 3, 18, 55, 60
TOPIC = "__cluster_metadata"


class ClusterState:
    """The state of the cluster as one of its brokers reports it. Raises CliError."""

    def __init__(self, settings: Settings) -> None:
        from mqd.cli import voters
        from mqd.cli.kafka_request import Broker, check
        from mqd.protocol.messages import DescribeClusterRequest, DescribeQuorumRequest

        requested = DescribeQuorumRequest.TopicData(
            topic_name=TOPIC, partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
        )
        with Broker(settings.bootstrap) as broker:
            cluster = broker.request(_DESCRIBE_CLUSTER, DescribeClusterRequest(include_fenced_brokers=True))
            quorum = broker.request(_DESCRIBE_QUORUM, DescribeQuorumRequest(topics=[requested]))
        check("the cluster", cluster.error_code, cluster.error_message)
        check("the quorum of controllers (no leader at the moment?)", quorum.error_code, quorum.error_message)
        self.quorum = quorum.topics[0].partitions[0]
        check("the quorum of controllers", self.quorum.error_code, self.quorum.error_message)
        self.cluster_id = cluster.cluster_id
        self.brokers = sorted(cluster.brokers, key=lambda broker: broker.broker_id)
        self.listeners = {
            node.node_id: format_address(node.listeners[0].host, node.listeners[0].port)
            for node in quorum.nodes
            if node.listeners
        }
        self.voter_status = voters.voter_status(self.quorum)
        self.end_offset = max(
            (voter.log_end_offset for voter in self.quorum.current_voters if voter.replica_id == self.quorum.leader_id),
            default=self.quorum.high_watermark,
        )

    @property
    def voters(self) -> list[int]:
        return sorted(voter.replica_id for voter in self.quorum.current_voters)

    def replicas(self) -> list[dict[str, Any]]:
        """Returns the voters, then the observers. "lag" is in records; -1 if the leader has no data
        about the replica.
        """
        rows = []
        for role, replicas in (("voter", self.quorum.current_voters), ("observer", self.quorum.observers)):
            for replica in sorted(replicas, key=lambda replica: replica.replica_id):
                caught_up_ms = max(replica.last_caught_up_timestamp, -1)
                rows.append(
                    {
                        "node": replica.replica_id,
                        "role": "leader" if replica.replica_id == self.quorum.leader_id else role,
                        "directory": uuid_text(replica.replica_directory_id),
                        "listener": self.listeners.get(replica.replica_id),
                        "log_end_offset": replica.log_end_offset,
                        "lag": max(0, self.end_offset - replica.log_end_offset) if replica.log_end_offset >= 0 else -1,
                        "last_caught_up_ms": caught_up_ms,
                    }
                )
        return rows


def uuid_text(value: Any) -> str:
    from base64 import urlsafe_b64encode

    return urlsafe_b64encode(bytes(value)).rstrip(b"=").decode()


def ago(timestamp_ms: int, now_ms: int) -> str:
    return "never" if timestamp_ms < 0 else f"{max(0, now_ms - timestamp_ms)} ms ago"


class PartitionHealth:
    """Which partitions, named like flights-0, lack a leader or have replicas that are not in sync.
    `response`: a Metadata response about all topics, if already received. Spares count as in sync
    (mqd/cli/inspection/spares.py). Raises CliError.
    """

    def __init__(self, settings: Settings, response: Any = None) -> None:
        from mqd.cli.inspection import spares
        from mqd.cli.kafka_request import Broker
        from mqd.protocol.messages import MetadataRequest

        if response is None:
            with Broker(settings.bootstrap) as broker:
                response = broker.request(_METADATA, MetadataRequest(topics=None, allow_auto_topic_creation=False))
                spares.count_as_in_sync(broker, response.topics)
        named_partitions = [(topic.name, partition) for topic in response.topics for partition in topic.partitions]
        self.count = len(named_partitions)
        self.leaderless = [  # (topic, index, replicas)
            (name, partition.partition_index, partition.replica_nodes)
            for name, partition in named_partitions
            if partition.leader_id < 0
        ]
        self.leaderless_names = [f"{name}-{index}" for name, index, _ in self.leaderless]
        self.not_in_sync = [
            f"{name}-{partition.partition_index}"
            for name, partition in named_partitions
            if partition.leader_id >= 0 and len(partition.isr_nodes) < len(partition.replica_nodes)
        ]
        self.with_one_replica = frozenset(
            f"{name}-{partition.partition_index}"
            for name, partition in named_partitions
            if partition.leader_id >= 0 and len(partition.replica_nodes) == 1
        )
        self.behind: dict[int, list[str]] = {}  # broker -> partitions whose replica there is not in sync
        for name, partition in named_partitions:
            for node in (
                sorted(set(partition.replica_nodes) - set(partition.isr_nodes)) if partition.leader_id >= 0 else ()
            ):
                self.behind.setdefault(node, []).append(f"{name}-{partition.partition_index}")

    def lines(self) -> list[str]:
        lines = []
        if self.leaderless_names:
            lines.append(f"WITHOUT A LEADER, neither read nor written: {partitions_text(self.leaderless_names)}")
        if self.not_in_sync:
            lines.append(f"with a replica that is not in sync: {partitions_text(self.not_in_sync)}")
        return lines or [f"partitions: {self.count}, all replicas in sync"]


def partitions_text(names: list[str]) -> str:
    return (
        f"{len(names)} partition{'s' * (len(names) != 1)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    )


class FeatureLevels:
    """The feature levels that the active hosts support, and the current ones. Raises CliError."""

    def __init__(self, settings: Settings) -> None:
        from mqd.cli.kafka_request import Broker
        from mqd.protocol.messages import ApiVersionsRequest

        requested = ApiVersionsRequest(client_software_name="mqd-cli", client_software_version="1")
        state = ClusterState(settings)
        self.fenced = [broker.broker_id for broker in state.brokers if broker.is_fenced]
        self.supported: dict[int, dict[str, tuple[int, int]]] = {}
        for broker in state.brokers:
            if broker.is_fenced:
                continue
            with Broker(format_address(broker.host, broker.port), advertised_by=broker.broker_id) as connection:
                response = connection.request(_API_VERSIONS, requested)
            self.supported[broker.broker_id] = {
                feature.name: (feature.min_version, feature.max_version) for feature in response.supported_features
            }
        with Broker(settings.bootstrap) as connection:
            self.in_force = {
                feature.name: feature.max_version_level
                for feature in connection.request(_API_VERSIONS, requested).finalized_features
            }
        names = sorted({name for ranges in self.supported.values() for name in ranges})
        self.newest = {name: max(self.supported_range(node, name)[1] for node in self.supported) for name in names}

    def supported_range(self, node: int, name: str) -> tuple[int, int]:
        return self.supported[node].get(name, (0, 0))

    def levels_to_raise(self) -> dict[str, int]:
        """The features that an upgrade would raise, with the new levels."""
        return {name: level for name, level in self.newest.items() if level > self.in_force.get(name, 0)}

    def obstacles(self) -> list[str]:
        """Why the levels cannot be raised yet: a line for each host that does not support a level."""
        reasons = []
        for node in self.supported:
            unsupported = [
                "{} {} (it supports {} to {})".format(name, level, *self.supported_range(node, name))
                for name, level in self.levels_to_raise().items()
                if self.supported_range(node, name)[1] < level
            ]
            if unsupported:
                reasons.append(f"node {node} does not support {', '.join(unsupported)}")
        return reasons

    def table(self) -> list[tuple[str, ...]]:
        ranges = {
            name: [
                f"{self.supported_range(node, name)[0]}-{self.supported_range(node, name)[1]}"
                for node in self.supported
            ]
            for name in self.newest
        }
        return [(name, str(self.in_force.get(name, 0)), *ranges[name]) for name in self.newest]
