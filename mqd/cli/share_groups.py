"""Requests about share groups (KIP-932), for `mqd group`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from mqd.cli.broker_lookup import GROUP, Cluster, Partition
from mqd.cli.kafka_request import Broker, check
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AlterShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequest,
    ShareGroupDescribeRequest,
)

DESCRIBE, DESCRIBE_OFFSETS, ALTER_OFFSETS, DELETE_OFFSETS = 77, 90, 91, 92
# there is no group of the requested type with this name, or the cluster does not support the type
NO_SUCH_GROUP = (int(ErrorCode.GROUP_ID_NOT_FOUND), int(ErrorCode.UNSUPPORTED_VERSION))


class SharePosition(NamedTuple):
    """The state of a share group in a partition: records below `offset` are finished. `lag`: None
    if not known. `records_by_delivery_count`: unfinished records by their persisted delivery count;
    filled only by an mqd broker, and only on request.
    """

    offset: int
    lag: int | None
    records_by_delivery_count: dict[int, int]


def describe(cluster: Cluster, name: str) -> Any | None:
    """The description of the group. None: there is no such share group."""
    if not cluster.bootstrap_broker.supports(DESCRIBE):
        return None
    request = ShareGroupDescribeRequest(group_ids=[name])
    response = cluster.request_coordinator(
        GROUP, name, DESCRIBE, request, lambda response: response.groups[0].error_code
    ).groups[0]
    if response.error_code in NO_SUCH_GROUP:
        return None
    check(f"group {name}", response.error_code, response.error_message)
    return response


def _positions(group: Any) -> dict[Partition, SharePosition]:
    return {
        (topic.topic_name, partition.partition_index): SharePosition(
            partition.start_offset,
            partition.lag if partition.lag >= 0 else None,
            {entry.delivery_count: entry.records for entry in partition.deliveries},
        )
        for topic in group.topics
        for partition in topic.partitions
        if not partition.error_code and partition.start_offset >= 0
    }


def offsets(cluster: Cluster, name: str, with_deliveries: bool = False) -> dict[Partition, SharePosition]:
    """The group's position in every partition that it has begun to read."""
    request_class = DescribeShareGroupOffsetsRequest
    request = request_class(
        groups=[request_class.Group(group_id=name, topics=None)], include_deliveries=with_deliveries
    )
    response = cluster.request_coordinator(
        GROUP, name, DESCRIBE_OFFSETS, request, lambda response: response.groups[0].error_code
    ).groups[0]
    check(f"group {name}", response.error_code, response.error_message)
    return _positions(response)


def start_offsets_of_groups(coordinator: Broker, names: list[str]) -> dict[str, dict[Partition, int]]:
    """The start offsets of groups. Groups whose coordinator has changed are omitted."""
    request_class = DescribeShareGroupOffsetsRequest
    request = request_class(groups=[request_class.Group(group_id=name, topics=None) for name in names])
    return {
        group.group_id: {partition: position.offset for partition, position in _positions(group).items()}
        for group in coordinator.request(DESCRIBE_OFFSETS, request).groups
        if not group.error_code
    }


def alter(cluster: Cluster, name: str, targets: dict[Partition, int]) -> dict[Partition, int]:
    """Sets start offsets. Returns the error code of each partition that failed."""
    request_class = AlterShareGroupOffsetsRequest
    by_topic: dict[str, list[Any]] = {}
    for (topic, index), offset in targets.items():
        by_topic.setdefault(topic, []).append(request_class.Partition(partition_index=index, start_offset=offset))
    request = request_class(
        group_id=name,
        topics=[request_class.Topic(topic_name=topic, partitions=partitions) for topic, partitions in by_topic.items()],
    )
    response = cluster.request_coordinator(GROUP, name, ALTER_OFFSETS, request, lambda response: response.error_code)
    if response.error_code:
        return dict.fromkeys(targets, response.error_code)
    return {
        (topic.topic_name, partition.partition_index): partition.error_code
        for topic in response.responses
        for partition in topic.partitions
        if partition.error_code
    }


def delete_offsets(cluster: Cluster, name: str, topics: Iterable[str]) -> dict[str, int]:
    """Deletes the start offsets in topics. Returns topic -> error code, 0 if they were deleted.
    Raises CliError.
    """
    request_class = DeleteShareGroupOffsetsRequest
    request = request_class(group_id=name, topics=[request_class.Topic(topic_name=topic) for topic in topics])
    response = cluster.request_coordinator(GROUP, name, DELETE_OFFSETS, request, lambda response: response.error_code)
    check(f"group {name}", response.error_code, response.error_message)
    return {topic.topic_name: topic.error_code for topic in response.responses}
