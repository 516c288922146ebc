"""OffsetForLeaderEpoch 2-4 (KIP-101, KIP-320): where a leader epoch ended, so that a consumer can tell whether what it has read was truncated."""

import asyncio

from mqd.acceptor.broker import Broker, Context, log
from mqd.log import lookup
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse


async def handle(context: Context, header: RequestHeader, request: OffsetForLeaderEpochRequest) -> OffsetForLeaderEpochResponse:
    # Side by side: those that a log directory does not answer for are waited for together.
    results = iter(await asyncio.gather(*(_partition(context.broker, topic.topic, asked) for topic in request.topics for asked in topic.partitions)))
    return OffsetForLeaderEpochResponse(
        topics=[OffsetForLeaderEpochResponse.TopicResult(topic=topic.topic, partitions=[next(results) for _ in topic.partitions]) for topic in request.topics]
    )


def epoch_error(asked: int, current: int) -> int:
    """KIP-320: whose knowledge of the leader is older. -1 = the client does not say."""
    if asked == -1 or asked == current:
        return 0
    return int(ErrorCode.FENCED_LEADER_EPOCH if asked < current else ErrorCode.UNKNOWN_LEADER_EPOCH)


async def _partition(broker: Broker, name: str, asked: OffsetForLeaderEpochRequest.Partition) -> OffsetForLeaderEpochResponse.EpochEndOffset:
    def result(error: int, leader_epoch: int = -1, end_offset: int = -1) -> OffsetForLeaderEpochResponse.EpochEndOffset:
        return OffsetForLeaderEpochResponse.EpochEndOffset(partition=asked.partition, error_code=int(error), leader_epoch=leader_epoch, end_offset=end_offset)

    partition = broker.partition_of(name, asked.partition)
    if partition is None:
        return result(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    view = broker.view(partition)
    if view is None:
        return result(broker.unserved_error(partition))
    error = epoch_error(asked.current_leader_epoch, partition.leader_epoch)
    if error:
        return result(error)
    try:
        found = await broker.disks.read(partition.log_dir, lookup.leader_epoch_end_offset, broker.path_of(name, partition), asked.leader_epoch, view.log_end_offset, view.leader_epoch)
    except (OSError, ValueError) as failure:
        log.error("leader epochs cannot be read", partition=f"{name}-{asked.partition}", reason=str(failure))
        return result(ErrorCode.KAFKA_STORAGE_ERROR)
    return result(0, found.leader_epoch, found.end_offset)
