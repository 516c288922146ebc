"""OffsetCommit 2-10 (KIP-98, KIP-211, KIP-320, KIP-345, KIP-848): a group's offsets, on disk before
they are acknowledged.

Partitions that do not exist are refused individually; the others go to the group's core in one
event. Version 10 names topics by id.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.topics.topic_names import name_of, partition_error
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, OffsetsCommitted
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import OffsetCommitRequest, OffsetCommitResponse

_VERSION_TOPIC_IDS = 10


async def handle(context: Context, header: RequestHeader, request: OffsetCommitRequest) -> OffsetCommitResponse:
    broker = context.broker
    has_topic_ids = header.api_version >= _VERSION_TOPIC_IDS
    offsets: list[CommittedOffset] = []
    accepted: list[OffsetCommitResponse.PartitionResponse] = []
    topics = []
    for topic in request.topics:
        name, error = name_of(broker, topic.name, topic.topic_id, has_topic_ids)
        partitions = []
        for requested in topic.partitions:
            response = OffsetCommitResponse.PartitionResponse(
                partition_index=requested.partition_index,
                error_code=error or partition_error(broker, name, requested.partition_index),
            )
            partitions.append(response)
            if not response.error_code:
                offsets.append(
                    CommittedOffset(
                        name,
                        requested.partition_index,
                        requested.committed_offset,
                        requested.committed_leader_epoch,
                        requested.committed_metadata or "",
                    )
                )
                accepted.append(response)
        topics.append(
            OffsetCommitResponse.TopicResponse(name=topic.name, topic_id=topic.topic_id, partitions=partitions)
        )
    if offsets:
        committed = await _commit(broker, header.api_version, request, tuple(offsets))
        for number, response in enumerate(accepted):
            response.error_code = committed.error or committed.errors[number]
    return OffsetCommitResponse(topics=topics)


async def _commit(
    broker: Broker, version: int, request: OffsetCommitRequest, offsets: tuple[CommittedOffset, ...]
) -> OffsetsCommitted:
    if broker.coordinators is None:
        return OffsetsCommitted(int(ErrorCode.COORDINATOR_NOT_AVAILABLE))

    def make_event(number: int) -> CommitOffsets:
        return CommitOffsets(
            number,
            version,
            request.member_id,
            request.group_instance_id,
            request.generation_id_or_member_epoch,
            offsets,
            request.retention_time_ms,
        )

    timeout_s = broker.broker_number("offsets.commit.timeout.ms") / 1000
    try:
        return await broker.coordinators.groups.request(request.group_id, make_event, timeout_s)
    except CoordinatorError as error:
        return OffsetsCommitted(error.error_code)
