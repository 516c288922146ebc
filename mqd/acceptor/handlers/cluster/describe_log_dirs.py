"""DescribeLogDirs 1-4 (KIP-113, KIP-827): every log directory, its partitions and their sizes on
disk, total and usable bytes.

A partition that is moving to another directory appears twice: where it is served and, as a future
replica, with the part copied so far. A directory whose file system does not respond is described as
failed.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mqd import native
from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import OWNER_NONE
from mqd.cluster.host.messages import PartitionImage
from mqd.log import moving, segments
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

# names the broker that uses a directory; every directory in use has this file
META_PROPERTIES = "meta.properties"
# A file system that does not respond for this long is treated as failed; the controller does the
# same.
RESPONSE_TIMEOUT_S = 5.0
Requested = dict[str, list[PartitionImage]]
PartitionWithId = tuple[str, bytes, PartitionImage]  # topic, its id, partition


async def handle(context: Context, header: RequestHeader, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    broker = context.broker
    by_directory: list[Requested] = [{} for _ in broker.log_dirs]
    for name, partition in _requested(broker, request):
        if partition.owner != OWNER_NONE and partition.log_dir < len(by_directory):
            by_directory[partition.log_dir].setdefault(name, []).append(partition)
    partitions_with_id = [
        (name, broker.metadata.topics[name].topic_id, partition)
        for requested in by_directory
        for name, partitions in requested.items()
        for partition in partitions
    ]
    end_offsets = {
        (name, partition.index): view.log_end_offset
        for name, _, partition in partitions_with_id
        if (view := broker.replica_view(partition)) is not None
    }
    results = await asyncio.gather(
        *(
            _result(broker, path, requested, partitions_with_id, end_offsets)
            for path, requested in zip(broker.log_dirs, by_directory)
        )
    )
    return DescribeLogDirsResponse(results=results)


async def _result(
    broker: Broker,
    directory: Path,
    requested: Requested,
    partitions_with_id: list[PartitionWithId],
    end_offsets: dict[tuple[str, int], int],
) -> DescribeLogDirsResponse.Result:
    """Measures in a separate thread: a hanging disk would otherwise block the threads that read for
    other requests.
    """
    try:
        return await broker.directory_queries.run(
            directory,
            partial(_measure, broker, directory, requested, partitions_with_id, end_offsets),
            RESPONSE_TIMEOUT_S,
        )
    except TimeoutError:
        return _failed(directory)


def _failed(directory: Path) -> DescribeLogDirsResponse.Result:
    return DescribeLogDirsResponse.Result(error_code=int(ErrorCode.KAFKA_STORAGE_ERROR), log_dir=str(directory))


def _requested(broker: Broker, request: DescribeLogDirsRequest) -> list[tuple[str, PartitionImage]]:
    if request.topics is None:
        return [
            (topic.name, partition) for topic in broker.metadata.topics_with_logs() for partition in topic.partitions
        ]
    requested = {(topic.topic, index): None for topic in request.topics for index in topic.partitions}
    return [
        (name, partition)
        for name, index in requested
        if broker.metadata.log_topic_of(name) == name and (partition := broker.partition_of(name, index)) is not None
    ]


def _measure(
    broker: Broker,
    directory: Path,
    requested: Requested,
    partitions_with_id: list[PartitionWithId],
    end_offsets: dict[tuple[str, int], int],
    on_progress: Callable[[], None],
) -> DescribeLogDirsResponse.Result:
    """Reads directories; runs in a thread. Calls `on_progress` on progress."""

    def measure_partition(index: int, path: Path) -> DescribeLogDirsResponse.Partition:
        size = size_of(path)
        on_progress()
        return DescribeLogDirsResponse.Partition(partition_index=index, partition_size=size)

    try:
        file_system = os.statvfs(directory)
        if file_system.f_flag & os.ST_RDONLY or not (directory / META_PROPERTIES).exists():
            # for example an empty mount point, or another disk
            raise OSError(errno.EROFS, "it was not used at the start, or cannot be written to")
        topics = [
            DescribeLogDirsResponse.Topic(
                name=name,
                partitions=[
                    measure_partition(partition.index, broker.path_of(name, partition)) for partition in partitions
                ],
            )
            for name, partitions in requested.items()
        ]
        topics += [
            DescribeLogDirsResponse.Topic(
                name=name,
                partitions=[_future_replica(path, partition.index, end_offsets.get((name, partition.index), 0))],
            )
            for name, partition, path in _future_replicas(directory, partitions_with_id, on_progress)
        ]
    except OSError:
        return _failed(directory)
    return DescribeLogDirsResponse.Result(
        log_dir=str(directory),
        topics=topics,
        total_bytes=file_system.f_blocks * file_system.f_frsize,
        usable_bytes=file_system.f_bavail * file_system.f_frsize,
    )


def size_of(directory: Path) -> int:
    """The total size of the segment files. 0 for a partition that is being created or deleted."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(".log"):
                    try:
                        total += entry.stat().st_size
                    except FileNotFoundError:
                        pass
    except FileNotFoundError:
        return 0
    return total


def _future_replicas(
    directory: Path, partitions_with_id: list[PartitionWithId], on_progress: Callable[[], None]
) -> Iterator[tuple[str, PartitionImage, Path]]:
    """Copies in progress to this directory."""
    if not any(True for _ in moving.future_copies(directory)):
        return
    for name, topic_id, partition in partitions_with_id:
        path = moving.find_future(directory, topic_id, partition.index)
        on_progress()
        if path is not None:
            yield name, partition, path


def _future_replica(path: Path, index: int, log_end_offset: int) -> DescribeLogDirsResponse.Partition:
    """offset_lag: the number of records after the copy's last whole batch that are still missing."""
    end_offset = 0
    try:
        bases = segments.base_offsets(path)
        if bases:
            end_offset = native.segment_scan(
                segments.segment_path(path, bases[-1]), bases[-1], 0, check_crc=False
            ).next_offset
    except (OSError, ValueError):
        pass  # it is being renamed or deleted
    return DescribeLogDirsResponse.Partition(
        partition_index=index,
        partition_size=size_of(path),
        offset_lag=max(0, log_end_offset - end_offset),
        is_future_key=True,
    )
