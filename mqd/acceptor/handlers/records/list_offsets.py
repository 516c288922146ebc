"""ListOffsets 1-11 (KIP-79, KIP-207, KIP-320, KIP-734, KIP-1005, KIP-1023, KIP-1075).

The reactor handles requests that ask only for earliest and latest offsets. All others come here,
for example those with a timestamp or for the highest timestamp. Without tiered storage the earliest
local offset is the log start, and since nothing was ever uploaded, requests for the latest tiered
offset or the earliest pending upload get offset -1 without an error, as in Kafka.
"""

from collections import Counter

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import log
from mqd.acceptor.handlers.records.offset_for_leader_epoch import epoch_error
from mqd.cluster.host.messages import PartitionImage
from mqd.log import lookup
from mqd.log.batches import CorruptBatch
from mqd.native import SlotView
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ListOffsetsRequest, ListOffsetsResponse

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -1, -2, -3, -4, -5, -6
# the first request version that may ask for each of them
_FIRST_VERSIONS = {
    LATEST: 0,
    EARLIEST: 0,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
# lookups that do not depend on the end of the log: they need not wait for a flush
_END_INDEPENDENT = (EARLIEST, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD)
READ_COMMITTED = 1
CONSUMER_REPLICA_ID = -1
OFFSET_NOT_AVAILABLE_VERSION_MIN = 5


async def handle(context: Context, header: RequestHeader, request: ListOffsetsRequest) -> ListOffsetsResponse:
    counts = Counter(
        (topic.name, requested.partition_index) for topic in request.topics for requested in topic.partitions
    )
    await context.broker.await_flushed(
        (topic.name, requested.partition_index)
        for topic in request.topics
        for requested in topic.partitions
        if requested.timestamp not in _END_INDEPENDENT
    )
    # As in Kafka, only a consumer gets the last stable offset; any other replica id gets the high
    # watermark.
    is_read_committed = request.replica_id == CONSUMER_REPLICA_ID and request.isolation_level == READ_COMMITTED
    silent_dirs: set[int] = set()
    topics = []
    for topic in request.topics:
        partitions = []
        for requested in topic.partitions:
            if counts[topic.name, requested.partition_index] > 1:
                partitions.append(_result(requested.partition_index, ErrorCode.INVALID_REQUEST))
            else:
                partitions.append(
                    await _partition(
                        context.broker, header.api_version, is_read_committed, topic.name, requested, silent_dirs
                    )
                )
        topics.append(ListOffsetsResponse.TopicResponse(name=topic.name, partitions=partitions))
    return ListOffsetsResponse(topics=topics)


def _result(
    index: int, error: int, timestamp: int = -1, offset: int = -1, leader_epoch: int = -1
) -> ListOffsetsResponse.PartitionResponse:
    return ListOffsetsResponse.PartitionResponse(
        partition_index=index, error_code=int(error), timestamp=timestamp, offset=offset, leader_epoch=leader_epoch
    )


async def _partition(
    broker: Broker,
    version: int,
    is_read_committed: bool,
    name: str,
    requested: ListOffsetsRequest.Partition,
    silent_dirs: set[int],
) -> ListOffsetsResponse.PartitionResponse:
    """`silent_dirs`: log directories that did not respond earlier in this request. A request waits for
    each directory at most once.
    """
    index, timestamp = requested.partition_index, requested.timestamp
    if timestamp < 0 and version < _FIRST_VERSIONS.get(timestamp, 99):
        return _result(index, ErrorCode.UNSUPPORTED_VERSION)
    partition = broker.partition_of(name, index)
    if partition is None:
        return _result(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    error = epoch_error(requested.current_leader_epoch, partition.leader_epoch)
    if error:
        return _result(index, error)
    view = broker.view(partition)
    if view is None:
        return _result(index, broker.unserved_error(partition))
    if view.latest_pending and timestamp in (LATEST, MAX_TIMESTAMP):  # KIP-207
        return _result(
            index,
            ErrorCode.OFFSET_NOT_AVAILABLE
            if version >= OFFSET_NOT_AVAILABLE_VERSION_MIN
            else ErrorCode.LEADER_NOT_AVAILABLE,
        )
    end_offset = view.last_stable_offset if is_read_committed else view.high_watermark
    if timestamp == LATEST:
        return _result(index, 0, -1, end_offset, view.leader_epoch)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return _result(index, 0)
    if partition.log_dir in silent_dirs:
        return _result(index, ErrorCode.KAFKA_STORAGE_ERROR)
    try:
        match, leader_epoch = await broker.disks.read(
            partition.log_dir, _look_up, broker, name, partition, view, timestamp, end_offset
        )
    except (OSError, CorruptBatch, ValueError) as failure:
        if isinstance(failure, TimeoutError):
            silent_dirs.add(partition.log_dir)
        log.error("offset cannot be looked up", partition=f"{name}-{index}", timestamp=timestamp, reason=str(failure))
        return _result(index, ErrorCode.KAFKA_STORAGE_ERROR)
    return _result(index, 0, match.timestamp_ms, match.offset, leader_epoch)


async def first_offset_since(broker: Broker, topic_id: bytes, index: int, since_ms: int) -> tuple[int, int]:
    """Returns the offset of the first record with a timestamp of at least `since_ms` (-1 if there is
    none), and an error code.
    """
    image = broker.metadata.by_id(topic_id)
    if image is None:
        return -1, int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    requested = ListOffsetsRequest.Partition(partition_index=index, current_leader_epoch=-1, timestamp=max(since_ms, 0))
    result = await _partition(broker, OFFSET_NOT_AVAILABLE_VERSION_MIN, False, image.name, requested, set())
    return result.offset, result.error_code


def _look_up(
    broker: Broker, name: str, partition: PartitionImage, view: SlotView, timestamp: int, end_offset: int
) -> tuple[lookup.OffsetAndTimestamp, int]:
    """Reads files; runs in a thread."""
    path = broker.path_of(name, partition)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        match = lookup.OffsetAndTimestamp(view.log_start_offset, -1)
    elif timestamp == MAX_TIMESTAMP:
        match = lookup.max_timestamp(path, view.log_start_offset, end_offset)
    else:
        match = lookup.offset_for_timestamp(path, timestamp, view.log_start_offset, end_offset)
    if match.offset < 0:
        return match, -1
    epochs = [epoch for epoch, start in lookup.read_leader_epochs(path) if start <= match.offset]
    return match, epochs[-1] if epochs else view.leader_epoch
