"""OffsetForLeaderEpoch 2-4 (KIP-101, KIP-320): the end offset of a leader epoch, by which a
consumer detects that records it has read were truncated.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import log
from mqd.log import lookup
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse


async def handle(
    context: Context, header: RequestHeader, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    silent_dirs: set[int] = set()
    topics = []
    for topic in request.topics:
        partitions = [
            await _partition(context.broker, topic.topic, requested, silent_dirs) for requested in topic.partitions
        ]
        topics.append(OffsetForLeaderEpochResponse.TopicResult(topic=topic.topic, partitions=partitions))
    return OffsetForLeaderEpochResponse(topics=topics)


def epoch_error(requested: int, current: int) -> int:
    """KIP-320: compares the client's leader epoch with this broker's. -1: the client sent none."""
    if requested == -1 or requested == current:
        return 0
    return int(ErrorCode.FENCED_LEADER_EPOCH if requested < current else ErrorCode.UNKNOWN_LEADER_EPOCH)


async def _partition(
    broker: Broker, name: str, requested: OffsetForLeaderEpochRequest.Partition, silent_dirs: set[int]
) -> OffsetForLeaderEpochResponse.EpochEndOffset:
    """`silent_dirs`: log directories that have already timed out in this request. A request waits for
    each directory at most once.
    """

    def result(error: int, leader_epoch: int = -1, end_offset: int = -1) -> OffsetForLeaderEpochResponse.EpochEndOffset:
        return OffsetForLeaderEpochResponse.EpochEndOffset(
            partition=requested.partition, error_code=int(error), leader_epoch=leader_epoch, end_offset=end_offset
        )

    partition = broker.partition_of(name, requested.partition)
    if partition is None:
        return result(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    view = broker.view(partition)
    if view is None:
        return result(broker.unserved_error(partition))
    error = epoch_error(requested.current_leader_epoch, partition.leader_epoch)
    if error:
        return result(error)
    if partition.log_dir in silent_dirs:
        return result(ErrorCode.KAFKA_STORAGE_ERROR)
    try:
        epoch_end = await broker.disks.read(
            partition.log_dir,
            lookup.leader_epoch_end_offset,
            broker.path_of(name, partition),
            requested.leader_epoch,
            view.log_end_offset,
            view.leader_epoch,
        )
    except (OSError, ValueError) as failure:
        if isinstance(failure, TimeoutError):
            silent_dirs.add(partition.log_dir)
        log.error("leader epochs cannot be read", partition=f"{name}-{requested.partition}", reason=str(failure))
        return result(ErrorCode.KAFKA_STORAGE_ERROR)
    return result(0, epoch_end.leader_epoch, epoch_end.end_offset)
