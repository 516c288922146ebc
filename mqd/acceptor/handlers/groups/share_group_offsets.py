"""DescribeShareGroupOffsets 0-1, AlterShareGroupOffsets 0, DeleteShareGroupOffsets 0 (KIP-932, 1226):
the start offsets of share groups in each partition, and their lag.

Lag counts the records that are neither acknowledged nor archived: end offset - start offset -
completed records above the start offset. The end offset is the high watermark at the partition's
leader, which may be on another host. As in Kafka, a share-partition whose state cannot be read has
start offset -1, and no error.
"""

import asyncio
from typing import Any, NamedTuple

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.coordinators import Coordinators
from mqd.acceptor.handlers.groups.group_requests import group_coordinator, has_share_groups, request_group
from mqd.acceptor.handlers.records import list_offsets
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.interbroker.transactions import remote_leader_id
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.share.events import AlterOffsets, DeleteOffsets
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ReadShareGroupStateSummaryRequest,
)
from mqd.security.acl import Operation, ResourceType

LIST_OFFSETS_HEADER = RequestHeader(2, 10, 0)
TIMEOUT_S = 5.0
UNINITIALIZED = -1  # as a start offset, or as a count of completed deliveries
_DescribeResponse = DescribeShareGroupOffsetsResponse
_SummaryRequest = ReadShareGroupStateSummaryRequest
_AlterResponse = AlterShareGroupOffsetsResponse
_DeleteResponse = DeleteShareGroupOffsetsResponse


class EndOffset(NamedTuple):
    error: int
    offset: int = -1


async def handle(context: Context, header: RequestHeader, request: object) -> object:
    if isinstance(request, DescribeShareGroupOffsetsRequest):
        groups = await asyncio.gather(
            *(_describe(context, group, request.include_deliveries) for group in request.groups)
        )
        return DescribeShareGroupOffsetsResponse(groups=list(groups))
    if isinstance(request, AlterShareGroupOffsetsRequest):
        return await _alter(context.broker, request)
    assert isinstance(request, DeleteShareGroupOffsetsRequest)
    return await _delete(context.broker, request)


# -- DescribeShareGroupOffsets ---------------------------------------------------------------------


async def _describe(
    context: Context, requested: DescribeShareGroupOffsetsRequest.Group, includes_deliveries: bool
) -> _DescribeResponse.Group:
    broker, group_id = context.broker, requested.group_id
    coordinators = broker.coordinators
    if not has_share_groups(broker):
        return _DescribeResponse.Group(group_id=group_id, error_code=int(ErrorCode.UNSUPPORTED_VERSION))
    if coordinators is None:
        return _failed_group(group_id, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    denied: list[_DescribeResponse.Topic] = []
    indexes_by_topic: dict[str, list[int]] = {}
    if requested.topics is None:
        try:
            core = group_coordinator(broker).core(group_id)
        except CoordinatorError as error:
            return _failed_group(group_id, error.error_code)
        if isinstance(core, Group) and core.share is not None:
            for topic_id, indexes in core.share.states.initialized.items():
                name = broker.metadata.names.get(topic_id)
                if name is not None and _may_describe(context, name, named_in_request=False):
                    indexes_by_topic[name] = list(indexes)
    else:
        for topic in requested.topics:
            if _may_describe(context, topic.topic_name):
                indexes_by_topic.setdefault(topic.topic_name, []).extend(topic.partitions)
            else:
                denied.append(_denied(topic.topic_name, topic.partitions))
    topics = await _topics(broker, coordinators, group_id, indexes_by_topic, includes_deliveries)
    return _DescribeResponse.Group(group_id=group_id, topics=topics + denied)


def _may_describe(context: Context, name: str, named_in_request: bool = True) -> bool:
    return context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name, named_in_request=named_in_request)


def _failed_group(group_id: str, error: int) -> _DescribeResponse.Group:
    return _DescribeResponse.Group(group_id=group_id, error_code=int(error), error_message=error_message(error))


def _denied(name: str, indexes: list[int]) -> _DescribeResponse.Topic:
    error = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    partitions = [
        _DescribeResponse.Partition(partition_index=index, error_code=error, error_message=error_message(error))
        for index in indexes
    ]
    return _DescribeResponse.Topic(topic_name=name, partitions=partitions)


async def _topics(
    broker: Broker,
    coordinators: Coordinators,
    group_id: str,
    indexes_by_topic: dict[str, list[int]],
    includes_deliveries: bool,
) -> list[_DescribeResponse.Topic]:
    topic_ids = {
        name: image.topic_id for name in indexes_by_topic if (image := broker.metadata.topics.get(name)) is not None
    }
    unknown_topics = [
        _DescribeResponse.Topic(
            topic_name=name,
            partitions=[
                _DescribeResponse.Partition(partition_index=index, start_offset=UNINITIALIZED) for index in indexes
            ],
        )
        for name, indexes in indexes_by_topic.items()
        if name not in topic_ids
    ]
    if not topic_ids:
        return unknown_topics
    request = _SummaryRequest(
        group_id=group_id,
        topics=[
            _SummaryRequest.Topic(
                topic_id=topic_id,
                partitions=[
                    _SummaryRequest.Partition(partition=index, include_deliveries=includes_deliveries)
                    for index in indexes_by_topic[name]
                ],
            )
            for name, topic_id in topic_ids.items()
        ],
    )
    summary = await coordinators.share_states.respond(request)
    initialized = {
        (name, partition.partition)
        for name, topic in zip(topic_ids, summary.results, strict=True)
        for partition in topic.partitions
        if not partition.error_code and UNINITIALIZED not in (partition.start_offset, partition.delivery_complete_count)
    }
    end_offsets = await _end_offsets(broker, coordinators, list(initialized))
    return [
        _DescribeResponse.Topic(
            topic_name=name,
            topic_id=topic.topic_id,
            partitions=[
                _partition(partition, end_offsets.get((name, partition.partition))) for partition in topic.partitions
            ],
        )
        for name, topic in zip(topic_ids, summary.results, strict=True)
    ] + unknown_topics


def _partition(summary: Any, end: EndOffset | None) -> _DescribeResponse.Partition:
    """`summary`: the share-partition's state. `end` None: the lag is unknown (-1)."""
    if end is not None and end.error:
        return _DescribeResponse.Partition(
            partition_index=summary.partition, error_code=end.error, error_message=error_message(end.error)
        )
    if summary.error_code:
        return _DescribeResponse.Partition(partition_index=summary.partition, start_offset=UNINITIALIZED)
    lag = end.offset - summary.start_offset - summary.delivery_complete_count if end is not None else -1
    return _DescribeResponse.Partition(
        partition_index=summary.partition,
        start_offset=summary.start_offset,
        leader_epoch=summary.leader_epoch,
        lag=lag,
        deliveries=[
            _DescribeResponse.Delivered(deliveries.delivery_count, deliveries.records)
            for deliveries in summary.deliveries
        ],
    )


async def _end_offsets(
    broker: Broker, coordinators: Coordinators, partitions: list[tuple[str, int]]
) -> dict[tuple[str, int], EndOffset]:
    by_leader: dict[int, list[tuple[str, int]]] = {}
    for name, index in partitions:
        by_leader.setdefault(remote_leader_id(broker, name, index), []).append((name, index))
    results = await asyncio.gather(
        *(_end_offsets_at(broker, coordinators, node_id, led) for node_id, led in by_leader.items())
    )
    return {partition: end for result in results for partition, end in result.items()}


async def _end_offsets_at(
    broker: Broker, coordinators: Coordinators, node_id: int, partitions: list[tuple[str, int]]
) -> dict[tuple[str, int], EndOffset]:
    """`node_id` -1: this host."""
    by_topic: dict[str, list[int]] = {}
    for name, index in partitions:
        by_topic.setdefault(name, []).append(index)
    request = ListOffsetsRequest(
        replica_id=-1,
        topics=[
            ListOffsetsRequest.Topic(
                name=name,
                partitions=[
                    ListOffsetsRequest.Partition(partition_index=index, timestamp=list_offsets.LATEST)
                    for index in indexes
                ],
            )
            for name, indexes in by_topic.items()
        ],
    )
    response: ListOffsetsResponse
    if node_id < 0:
        response = await list_offsets.handle(Context(broker, Origin()), LIST_OFFSETS_HEADER, request)
    else:
        peers = coordinators.share_states.peers
        try:
            if peers is None:
                raise PeerError("there are no other hosts")
            response = await peers.request(node_id, request, LIST_OFFSETS_HEADER.api_version, TIMEOUT_S)
        except PeerError:
            return dict.fromkeys(partitions, EndOffset(int(ErrorCode.NETWORK_EXCEPTION)))
    end_offsets = {
        (topic.name, partition.partition_index): EndOffset(partition.error_code, partition.offset)
        for topic in response.topics
        for partition in topic.partitions
    }
    missing = EndOffset(int(ErrorCode.NETWORK_EXCEPTION))
    return {partition: end_offsets.get(partition, missing) for partition in partitions}


# -- AlterShareGroupOffsets, DeleteShareGroupOffsets -----------------------------------------------


async def _alter(broker: Broker, request: AlterShareGroupOffsetsRequest) -> _AlterResponse:
    if not has_share_groups(broker):
        return _failed_alteration(ErrorCode.UNSUPPORTED_VERSION)
    offsets: dict[str, dict[int, int]] = {}
    negative: dict[str, list[int]] = {}
    for topic in request.topics:
        topic_offsets = offsets.setdefault(topic.topic_name, {})
        for part in topic.partitions:
            # the group refuses a partition that does not exist, whatever its offset
            if part.start_offset >= 0 or broker.partition_of(topic.topic_name, part.partition_index) is None:
                topic_offsets[part.partition_index] = part.start_offset
            else:
                negative.setdefault(topic.topic_name, []).append(part.partition_index)
    try:
        response = await request_group(broker, request.group_id, lambda number: AlterOffsets(number, offsets))
    except CoordinatorError as error:
        return _failed_alteration(error.error_code)
    for topic in response.responses:
        topic.partitions.extend(_refuse_negative(index) for index in negative.get(topic.topic_name, ()))
    return response


def _failed_alteration(error: int) -> _AlterResponse:
    return _AlterResponse(error_code=int(error), error_message=error_message(error))


def _refuse_negative(index: int) -> _AlterResponse.Partition:
    return _AlterResponse.Partition(
        partition_index=index,
        error_code=int(ErrorCode.INVALID_REQUEST),
        error_message="A start offset cannot be negative.",
    )


async def _delete(broker: Broker, request: DeleteShareGroupOffsetsRequest) -> _DeleteResponse:
    if not has_share_groups(broker):
        return _failed_deletion(ErrorCode.UNSUPPORTED_VERSION)
    names = tuple(dict.fromkeys(topic.topic_name for topic in request.topics))
    try:
        return await request_group(broker, request.group_id, lambda number: DeleteOffsets(number, names))
    except CoordinatorError as error:
        return _failed_deletion(error.error_code)


def _failed_deletion(error: int) -> _DeleteResponse:
    return _DeleteResponse(error_code=int(error), error_message=error_message(error))
