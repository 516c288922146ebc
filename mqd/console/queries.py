"""The pages' queries to the cluster. They use only the Kafka protocol, so that they work with any
Kafka cluster.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition

from mqd.base.clock import now_ms
from mqd.base.cluster_config import format_address
from mqd.base.views import VIEW_FILTER, VIEW_OF
from mqd.cli.broker_lookup import EARLIEST, LATEST, Cluster
from mqd.cli.cluster_view import ClusterState, PartitionHealth
from mqd.cli.common import CliError, Settings
from mqd.cli.group_listing import (
    LIST_GROUPS,
    OFFSET_FETCH,
    SHARE,
    TOPIC_NAMES_VERSION_MAX,
    Group,
    Progress,
    all_groups,
    must_describe,
    positions,
    progress,
)
from mqd.cli.inspection import diagnosis, spares
from mqd.cli.inspection.diagnosis import Finding
from mqd.cli.kafka_request import Broker, check, error_text
from mqd.cli.librdkafka import base_config
from mqd.protocol.messages import (
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    ListGroupsRequest,
    MetadataRequest,
    OffsetFetchRequest,
)
from mqd.spark.offsets import GROUP_OFFSET_METADATA

METADATA, DESCRIBE_LOG_DIRS = 3, 35


class Topic(msgspec.Struct, frozen=True):
    """Totals over a topic's partitions. `replica_count`: the largest number of replicas of a partition."""

    name: str
    partition_count: int
    replica_count: int
    leaderless_count: int
    not_in_sync_count: int
    is_internal: bool


class BrokenPartition(msgspec.Struct, frozen=True):
    """A partition with a problem."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class Node(msgspec.Struct, frozen=True):
    id: int
    address: str
    rack: str | None
    is_fenced: bool
    led_count: int
    replica_count: int
    out_of_sync_count: int  # replicas


class Health(msgspec.Struct, frozen=True):
    """`broken`: at most BROKEN_MAX of the `broken_count` partitions with a problem.
    `unavailable`: what this user may not see or what could not be read, and why.
    """

    cluster_id: str
    nodes: tuple[Node, ...]
    topics: tuple[Topic, ...]
    broken: tuple[BrokenPartition, ...]
    broken_count: int
    leaderless_count: int
    not_in_sync_count: int
    partition_count: int
    voters: tuple[dict[str, Any], ...]
    controller_id: int
    findings: tuple[Finding, ...]
    unavailable: tuple[str, ...]
    is_mqd: bool


BROKEN_MAX = 200


def topics_of(response: Any) -> tuple[Topic, ...]:
    return tuple(
        Topic(
            topic.name,
            len(topic.partitions),
            max((len(partition.replica_nodes) for partition in topic.partitions), default=0),
            sum(partition.leader_id < 0 for partition in topic.partitions),
            sum(partition.leader_id >= 0 and len(partition.isr_nodes) < len(partition.replica_nodes)
                for partition in topic.partitions),
            bool(topic.is_internal) or topic.name.startswith("__"),
        )
        for topic in sorted(response.topics, key=lambda topic: topic.name)
        if not topic.error_code
    )  # fmt: skip


def _all_topics(broker: Broker) -> Any:
    response = broker.request(METADATA, MetadataRequest(topics=None, allow_auto_topic_creation=False))
    spares.count_as_in_sync(broker, response.topics)
    return response


def topics(settings: Settings) -> tuple[Topic, ...]:
    with Broker(settings.bootstrap) as broker:
        return topics_of(_all_topics(broker))


def health(settings: Settings) -> Health:
    """Raises CliError when no broker responds."""
    with Broker(settings.bootstrap) as broker:
        response, is_mqd = _all_topics(broker), broker.is_mqd()
    partitions = PartitionHealth(settings, response)
    unavailable: list[str] = []
    findings: list[Finding] = []
    state = None
    try:
        state = ClusterState(settings)
        findings += diagnosis.cluster_findings(state, partitions, (), now_ms())
    except CliError as error:
        unavailable.append(f"controllers: {error.message}")
    broken = [
        BrokenPartition(
            topic.name,
            partition.partition_index,
            partition.leader_id,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
        )
        for topic in response.topics
        for partition in topic.partitions
        if partition.leader_id < 0 or len(partition.isr_nodes) < len(partition.replica_nodes)
    ]
    if state is None and broken:
        findings += _findings_from_metadata(partitions)
    return Health(
        response.cluster_id or "",
        _nodes(response, state),
        topics_of(response),
        tuple(broken[:BROKEN_MAX]),
        len(broken),
        len(partitions.leaderless),
        len(partitions.not_in_sync),
        partitions.count,
        tuple(state.replicas()) if state is not None else (),
        state.quorum.leader_id if state is not None else response.controller_id,
        tuple(sorted(findings, key=lambda finding: finding.harm)),
        tuple(unavailable),
        is_mqd,
    )


def _findings_from_metadata(partitions: PartitionHealth) -> list[Finding]:
    """The problems that the topics' metadata shows, for a user who may not describe the cluster."""
    findings = []
    for harm, partition_names, problem in (
        (diagnosis.Harm.OUTAGE, partitions.leaderless_names, "without a leader, so they cannot be read or written"),
        (diagnosis.Harm.NO_RESERVE, partitions.not_in_sync, "with a replica that is not in sync"),
    ):
        if partition_names:
            findings.append(
                Finding(
                    harm,
                    f"{problem}: {diagnosis.partitions_text(partition_names)}",
                    "ask an administrator to run mqd doctor",
                )
            )
    return findings


def _nodes(response: Any, state: ClusterState | None) -> tuple[Node, ...]:
    led_counts: dict[int, int] = {}
    replica_counts: dict[int, int] = {}
    out_of_sync_counts: dict[int, int] = {}
    for topic in response.topics:
        for partition in topic.partitions:
            led_counts[partition.leader_id] = led_counts.get(partition.leader_id, 0) + 1
            for node in partition.replica_nodes:
                replica_counts[node] = replica_counts.get(node, 0) + 1
                if node not in partition.isr_nodes:
                    out_of_sync_counts[node] = out_of_sync_counts.get(node, 0) + 1
    brokers = {broker.node_id: (broker.host, broker.port, broker.rack, False) for broker in response.brokers}
    if state is not None:
        brokers |= {
            broker.broker_id: (broker.host, broker.port, broker.rack, broker.is_fenced) for broker in state.brokers
        }
    return tuple(
        Node(
            node,
            format_address(host, port),
            rack,
            is_fenced,
            led_counts.get(node, 0),
            replica_counts.get(node, 0),
            out_of_sync_counts.get(node, 0),
        )
        for node, (host, port, rack, is_fenced) in sorted(brokers.items())
    )


def groups(settings: Settings) -> list[Group]:
    with Cluster(settings.bootstrap) as cluster:
        return all_groups(cluster)


class Directory(msgspec.Struct, frozen=True):
    """A log directory. `total_bytes` and `free_bytes` are -1 if the broker does not report them."""

    node: int
    path: str
    error: str
    replica_count: int
    used_bytes: int
    total_bytes: int
    free_bytes: int


def directories(settings: Settings) -> tuple[list[Directory], list[str]]:
    """The log directories of every broker in service, and the reasons why some are missing."""
    reported: list[Directory] = []
    missing: list[str] = []
    with Cluster(settings.bootstrap) as cluster:
        for node, response in _describe_log_dirs(cluster, None, missing):
            for directory in response.results:
                error = error_text(directory.error_code) if directory.error_code else ""
                replica_sizes = [
                    partition.partition_size for topic in directory.topics for partition in topic.partitions
                ]
                reported.append(
                    Directory(
                        node,
                        directory.log_dir,
                        error,
                        len(replica_sizes),
                        sum(replica_sizes),
                        directory.total_bytes,
                        directory.usable_bytes,
                    )
                )
    return reported, missing


def sizes(cluster: Cluster, names: Iterable[str] | None) -> dict[tuple[str, int], dict[int, int]]:
    """Returns (topic, partition) -> node -> bytes of its replica there, without brokers that report no sizes."""
    sizes_by_partition: dict[tuple[str, int], dict[int, int]] = {}
    requested = None
    if names is not None:
        requested = [
            DescribeLogDirsRequest.Topic(topic=name, partitions=sorted(partitions))
            for name, partitions in cluster.topics(names).items()
        ]
        if not requested:
            return sizes_by_partition
    for node, response in _describe_log_dirs(cluster, requested, []):
        for directory in response.results:
            for topic in directory.topics:
                for partition in topic.partitions:
                    if partition.is_future_key:  # an unfinished copy, made by a move to this directory
                        continue
                    sizes_by_partition.setdefault((topic.name, partition.partition_index), {})[node] = (
                        partition.partition_size
                    )
    return sizes_by_partition


def _describe_log_dirs(cluster: Cluster, requested: Any, missing: list[str]) -> Any:
    """Yields (node, response); adds to `missing` why a broker did not respond."""
    for node in sorted(cluster.addresses()):
        try:
            yield node, cluster.node(node).request(DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=requested))
        except CliError as error:
            missing.append(f"broker {node}: {error.message}")


# -- topics ----------------------------------------------------------------------------------------

DESCRIBE_CONFIGS = 32
TOPIC_RESOURCE = 2
_SOURCES = {1: "this topic", 2: "the broker", 3: "all brokers", 4: "the broker's file", 5: "default"}
_TOPIC_SOURCE = 1


class PartitionDetails(msgspec.Struct, frozen=True):
    """One partition. Fields that no broker reports are None."""

    index: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    start: int | None
    end: int | None
    size: int | None
    is_under_replicated: bool  # a replica that is not a spare is out of sync


class Config(msgspec.Struct, frozen=True):
    """`inherited`: the value if the topic sets none; None if that value is not known."""

    name: str
    value: str | None
    source: str
    is_own: bool
    is_sensitive: bool
    inherited: str | None
    documentation: str


class TopicDetails(msgspec.Struct, frozen=True):
    name: str
    partitions: tuple[PartitionDetails, ...]
    configs: tuple[Config, ...]
    unavailable: tuple[str, ...]

    @property
    def offset_count(self) -> int:
        """How many offsets are in use; some have no record (compaction, transaction markers)."""
        return sum((partition.end or 0) - (partition.start or 0) for partition in self.partitions)

    @property
    def size(self) -> int | None:
        known_sizes = [partition.size for partition in self.partitions if partition.size is not None]
        return sum(known_sizes) if known_sizes else None

    @property
    def base(self) -> str:
        """The base topic of this view; "" if the topic is not a view."""
        return next((config.value or "" for config in self.configs if config.name == VIEW_OF), "")

    @property
    def condition(self) -> str:
        return next((config.value or "" for config in self.configs if config.name == VIEW_FILTER), "")


def _size_of(sizes_by_node: dict[int, int] | None, leader: int) -> int | None:
    return None if not sizes_by_node else sizes_by_node.get(leader, max(sizes_by_node.values()))


def topic(settings: Settings, name: str) -> TopicDetails:
    """Raises CliError."""
    unavailable = []
    with Cluster(settings.bootstrap) as cluster:
        response = cluster.bootstrap_broker.request(
            METADATA, MetadataRequest(topics=[MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False)
        ).topics[0]
        check(f"topic {name}", response.error_code, None)
        partitions = [(name, partition.partition_index) for partition in response.partitions]
        cluster.topics([name])
        starts, ends = cluster.offsets(partitions, EARLIEST), cluster.offsets(partitions, LATEST)
        sizes_by_partition = sizes(cluster, [name])
        try:
            configs = topic_configs(cluster.bootstrap_broker, name)
        except CliError as error:
            configs = ()
            unavailable.append(f"configuration: {error.message}")
        in_sync = {partition.partition_index: tuple(partition.isr_nodes) for partition in response.partitions}
        spares.count_as_in_sync(cluster.bootstrap_broker, [response])  # adds them to isr_nodes
    details = tuple(
        PartitionDetails(
            partition.partition_index,
            partition.leader_id,
            tuple(partition.replica_nodes),
            in_sync[partition.partition_index],
            starts.get((name, partition.partition_index)),
            ends.get((name, partition.partition_index)),
            _size_of(sizes_by_partition.get((name, partition.partition_index)), partition.leader_id),
            len(partition.isr_nodes) < len(partition.replica_nodes),
        )
        for partition in sorted(response.partitions, key=lambda partition: partition.partition_index)
    )
    return TopicDetails(name, details, configs, tuple(unavailable))


def topic_configs(broker: Broker, name: str) -> tuple[Config, ...]:
    """Raises CliError."""
    resource = DescribeConfigsRequest.Resource(resource_type=TOPIC_RESOURCE, resource_name=name)
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    (result,) = broker.request(DESCRIBE_CONFIGS, request).results
    check(f"topic {name}", result.error_code, result.error_message)
    return tuple(
        Config(
            config.name,
            config.value,
            _SOURCES.get(config.config_source, "?"),
            config.config_source == _TOPIC_SOURCE,
            config.is_sensitive,
            _inherited_value(config),
            config.documentation or "",
        )
        for config in sorted(result.configs, key=lambda config: config.name)
    )


def _inherited_value(config: Any) -> str | None:
    """Ignores synonyms in other units, such as log.retention.hours for retention.ms."""
    own_names = (config.name, f"log.{config.name}")
    return next(
        (synonym.value for synonym in config.synonyms if synonym.source != _TOPIC_SOURCE and synonym.name in own_names),
        None,
    )


class TopicTotals(msgspec.Struct, frozen=True):
    """Totals over a topic's partitions, for the list of topics; None if not known."""

    records: int | None
    size: int | None


def topic_totals(settings: Settings, names: list[str]) -> dict[str, TopicTotals]:
    """The totals of the topics on one page of the list."""
    with Cluster(settings.bootstrap) as cluster:
        leaders_by_topic = cluster.topics(names)
        partitions = [(name, index) for name, leaders in leaders_by_topic.items() for index in leaders]
        starts, ends = cluster.offsets(partitions, EARLIEST), cluster.offsets(partitions, LATEST)
        sizes_by_partition = sizes(cluster, names)
    totals = {}
    for name, leaders in leaders_by_topic.items():
        topic_partitions = [(name, index) for index in leaders]
        counts = [ends[key] - starts[key] for key in topic_partitions if key in ends and key in starts]
        topic_sizes = [_size_of(sizes_by_partition.get(key), leaders[key[1]]) for key in topic_partitions]
        known_sizes = [size for size in topic_sizes if size is not None]
        totals[name] = TopicTotals(sum(counts) if counts else None, sum(known_sizes) if known_sizes else None)
    return totals


def all_sizes(settings: Settings) -> dict[str, int]:
    """Bytes of each topic. Counts one replica of each partition."""
    bytes_by_topic: dict[str, int] = {}
    with Cluster(settings.bootstrap) as cluster:
        for (name, _), by_node in sizes(cluster, None).items():
            bytes_by_topic[name] = bytes_by_topic.get(name, 0) + max(by_node.values())
    return bytes_by_topic


# -- groups ----------------------------------------------------------------------------------------

GROUPS_PER_REQUEST = 200


class ConsumingGroup(msgspec.Struct, frozen=True):
    """A group that consumes a topic. `lag` is None if it has no committed offset of the topic."""

    group: str
    state: str
    member_count: int
    lag: int | None


def consuming_groups(
    settings: Settings, groups: list[Group], topic_name: str, ends: dict[int, int]
) -> list[ConsumingGroup]:
    """Groups that have committed offsets of a topic, or have members assigned to it. Sends one request
    for every GROUPS_PER_REQUEST groups.
    """
    requested_topic = OffsetFetchRequest.GroupTopic(name=topic_name, partition_indexes=sorted(ends))
    lags: dict[str, int] = {}
    with Cluster(settings.bootstrap) as cluster:
        for broker in cluster.nodes():
            group_ids = [group.group_id for group in broker.request(LIST_GROUPS, ListGroupsRequest()).groups]
            for start in range(0, len(group_ids), GROUPS_PER_REQUEST):
                requested = [
                    OffsetFetchRequest.Group(group_id=group_id, topics=[requested_topic])
                    for group_id in group_ids[start : start + GROUPS_PER_REQUEST]
                ]
                response = broker.request(OFFSET_FETCH, OffsetFetchRequest(groups=requested), TOPIC_NAMES_VERSION_MAX)
                for group in response.groups:
                    committed = {
                        partition.partition_index: partition.committed_offset
                        for topic in group.topics
                        for partition in topic.partitions
                        if not partition.error_code and partition.committed_offset >= 0
                    }
                    if committed and not group.error_code:
                        lags[group.group_id] = sum(max(0, ends[index] - offset) for index, offset in committed.items())
    assigned_counts = {
        group.group: sum(topic_name in (member.assignment or {}) for member in group.members) for group in groups
    }
    return [
        ConsumingGroup(group.group, group.state, assigned_counts[group.group], lags.get(group.group))
        for group in groups
        if group.group in lags or assigned_counts[group.group]
    ]


class GroupLag(msgspec.Struct, frozen=True):
    """The lag of a group in the list. `lag`: how many records it has not committed yet; None if it
    has no committed offset. `is_spark_query`: whether a Spark streaming query commits its progress
    as this group.
    """

    lag: int | None
    is_spark_query: bool


def group_lags(settings: Settings, groups: list[Group]) -> dict[str, GroupLag]:
    """The lags of the groups on one page of the list."""
    lags: dict[str, GroupLag] = {}
    with Cluster(settings.bootstrap) as cluster:
        positions_by_group = {group.group: positions(cluster, group.group, group.type == SHARE) for group in groups}
        share_groups = {group.group for group in groups if group.type == SHARE}
        partitions = {partition for committed in positions_by_group.values() for partition in committed}
        cluster.topics({topic for topic, _ in partitions})
        ends = cluster.offsets(partitions, LATEST)
    for name, committed in positions_by_group.items():
        lag = None
        if committed and name in share_groups:
            lag = sum(position.lag or 0 for position in committed.values())
        elif committed:
            lag = sum(
                max(0, ends[partition] - position.offset)
                for partition, position in committed.items()
                if partition in ends
            )
        lags[name] = GroupLag(lag, any(position.metadata == GROUP_OFFSET_METADATA for position in committed.values()))
    return lags


class GroupDetails(msgspec.Struct, frozen=True):
    """`ages`: (topic, partition) -> how many seconds ago its first uncommitted record was written."""

    group: Group
    rows: list[Progress]
    ages: dict[tuple[str, int], float]


AGES_MAX = 100  # in how many partitions the oldest uncommitted record is read
AGES_TIMEOUT_S = 2.0


def group(settings: Settings, name: str) -> GroupDetails:
    """Raises CliError."""
    with Cluster(settings.bootstrap) as cluster:
        described = must_describe(cluster, name)
        rows = progress(cluster, described)
    first_uncommitted = {
        (row.topic, row.partition): max(row.committed_offset, row.log_start_offset or 0)
        for row in rows
        if row.lag and row.committed_offset is not None
    }
    offsets_to_read = dict(itertools.islice(first_uncommitted.items(), AGES_MAX))
    try:
        ages = record_ages(settings, offsets_to_read) if offsets_to_read else {}
    except (CliError, KafkaException):
        ages = {}  # this user may not read these topics: only the lag in records is shown
    return GroupDetails(described, rows, ages)


def record_ages(settings: Settings, offsets: dict[tuple[str, int], int]) -> dict[tuple[str, int], float]:
    """How many seconds ago the records at these offsets were written. Leaves out partitions that do
    not respond within AGES_TIMEOUT_S. Reads the records, because Kafka has no request for the time
    of a record.
    """
    consumer = Consumer(
        base_config(settings.bootstrap)
        | {
            "group.id": "mqd-console",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.message.max.bytes": 1,  # a broker sends one batch at least
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": 1024,
        }
    )
    ages: dict[tuple[str, int], float] = {}
    deadline = time.monotonic() + AGES_TIMEOUT_S
    try:
        consumer.assign([TopicPartition(topic, index, offset) for (topic, index), offset in offsets.items()])
        while len(ages) < len(offsets) and (remaining_s := deadline - time.monotonic()) > 0:
            message = consumer.poll(remaining_s)
            if message is None or message.error() is not None:
                continue
            topic, index = message.topic() or "", message.partition() or 0
            if (partition := (topic, index)) not in ages:
                consumer.pause([TopicPartition(topic, index)])
                ages[partition] = max(0.0, (now_ms() - message.timestamp()[1]) / 1000)
    finally:
        consumer.close()
    return ages
