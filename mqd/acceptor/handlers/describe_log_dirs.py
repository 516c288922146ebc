"""DescribeLogDirs 1-4 (KIP-113, KIP-827): every log directory, its partitions and their sizes on disk, total and usable bytes."""

import os
from pathlib import Path

from mqd.acceptor.broker import OWNER_NONE, Broker, Context
from mqd.cluster.controller_messages import PartitionImage
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

Wanted = dict[str, list[PartitionImage]]


async def handle(context: Context, header: RequestHeader, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    broker = context.broker
    by_directory: list[Wanted] = [{} for _ in broker.log_dirs]
    for name, partition in _wanted(broker, request):
        if partition.owner != OWNER_NONE and partition.log_dir < len(by_directory):
            by_directory[partition.log_dir].setdefault(name, []).append(partition)
    results = [await broker.on_disk(_measure, broker, path, wanted) for path, wanted in zip(broker.log_dirs, by_directory)]
    return DescribeLogDirsResponse(results=results)


def _wanted(broker: Broker, request: DescribeLogDirsRequest) -> list[tuple[str, PartitionImage]]:
    topics = broker.metadata.topics
    if request.topics is None:
        return [(name, partition) for name in broker.metadata.sorted_names() for partition in topics[name].partitions]
    asked = {(topic.topic, index): None for topic in request.topics for index in topic.partitions}
    return [(name, partition) for name, index in asked if (partition := broker.partition_of(name, index)) is not None]


def _measure(broker: Broker, directory: Path, wanted: Wanted) -> DescribeLogDirsResponse.Result:
    """Reads directories; runs in a thread."""
    try:
        about = os.statvfs(directory)
        topics = [
            DescribeLogDirsResponse.Topic(
                name=name,
                partitions=[
                    DescribeLogDirsResponse.Partition(partition_index=partition.index, partition_size=size_of(broker.path_of(name, partition))) for partition in partitions
                ],
            )
            for name, partitions in wanted.items()
        ]
    except OSError:
        return DescribeLogDirsResponse.Result(error_code=int(ErrorCode.KAFKA_STORAGE_ERROR), log_dir=str(directory))
    return DescribeLogDirsResponse.Result(
        log_dir=str(directory), topics=topics, total_bytes=about.f_blocks * about.f_frsize, usable_bytes=about.f_bavail * about.f_frsize
    )


def size_of(directory: Path) -> int:
    """Bytes of the segments, as a reader sees them. A partition that is just being made or deleted has none."""
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
