"""Finds offline replicas of partitions without a leader: replicas that an active host has but does
not serve, usually because a log directory failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from mqd.base.cluster_config import format_address
from mqd.cli import client_security
from mqd.cli.common import CliError
from mqd.cli.kafka_request import Broker

_METADATA, _DESCRIBE_LOG_DIRS = 3, 35
SHOWN_MAX = 20
RESPONSE_TIMEOUT_S = 3.0  # timeout of a broker's response
# timeout of a response about log directories: longer than the broker's own timeout for a
# directory that hangs, so that the broker can report it
DIRECTORIES_TIMEOUT_S = 8.0


class OfflineReplica(NamedTuple):
    """`directories`: the directory that holds the replica. If the host reports none, all directories
    that the host cannot use; `are_unusable` is then True. () if the host cannot be reached.
    """

    partition: str
    node: int
    directories: tuple[str, ...]
    are_unusable: bool = False

    def text(self) -> str:
        location = (
            f"log directory {' or '.join(self.directories)}{', which cannot be used' if self.are_unusable else ''}"
            if self.directories
            else "its log directories are not known"
        )
        return f"{self.partition} is not served by node {self.node}, which is in service: {location}"


def offline_replicas(
    leaderless: Iterable[tuple[str, int, Iterable[int]]], addresses: Mapping[int, str]
) -> list[OfflineReplica]:
    """Returns at most SHOWN_MAX offline replicas. `leaderless`: (topic, index, replicas) of each
    partition without a leader. `addresses`: node -> address, of the active hosts. Queries each host
    once, all hosts in parallel.
    """
    candidates = ((name, index, node) for name, index, replicas in leaderless for node in replicas if node in addresses)
    replicas = list(islice(candidates, SHOWN_MAX))
    missing_by_node: dict[int, dict[str, list[int]]] = {}
    for name, index, node in replicas:
        missing_by_node.setdefault(node, {}).setdefault(name, []).append(index)
    if not missing_by_node:
        return []

    def query(node: int) -> list[Any]:
        return log_directories(addresses[node], missing_by_node[node])

    with ThreadPoolExecutor(len(missing_by_node)) as threads:
        results = dict(zip(missing_by_node, threads.map(client_security.with_credentials(query), missing_by_node)))
    return [_offline_replica(name, index, node, results[node]) for name, index, node in replicas]


def offline_replicas_of(host: str, port: int) -> list[OfflineReplica]:
    """The offline replicas of the broker at this address; [] if the broker does not respond."""
    from mqd.protocol.messages import MetadataRequest

    address = format_address("127.0.0.1" if host in ("", "0.0.0.0", "::") else host, port)
    try:
        with Broker(address, RESPONSE_TIMEOUT_S) as broker:
            response = broker.request(_METADATA, MetadataRequest(topics=None, allow_auto_topic_creation=False))
    except CliError:
        return []
    leaderless = [
        (topic.name, partition.partition_index, partition.replica_nodes)
        for topic in response.topics
        for partition in topic.partitions
        if partition.leader_id < 0
    ]
    return offline_replicas(leaderless, {response.controller_id: address})  # each broker names itself as the controller


def log_directories(address: str, requested: Mapping[str, list[int]]) -> list[Any]:
    """The host's log directories, each with those of the `requested` partitions (topic ->
    indexes) that it holds; [] if the host does not respond.
    """
    from mqd.protocol.messages import DescribeLogDirsRequest

    try:
        with Broker(address, DIRECTORIES_TIMEOUT_S) as broker:
            topics = [
                DescribeLogDirsRequest.Topic(topic=name, partitions=indices) for name, indices in requested.items()
            ]
            return list(broker.request(_DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=topics)).results)
    except CliError:
        return []


def _offline_replica(name: str, index: int, node: int, results: list[Any]) -> OfflineReplica:
    holding_dirs = tuple(
        log_dir.log_dir
        for log_dir in results
        if any(
            topic.name == name and any(partition.partition_index == index for partition in topic.partitions)
            for topic in log_dir.topics
        )
    )
    failed_dirs = tuple(log_dir.log_dir for log_dir in results if log_dir.error_code)
    return OfflineReplica(
        f"{name}-{index}", node, holding_dirs or failed_dirs, are_unusable=not holding_dirs and bool(failed_dirs)
    )
