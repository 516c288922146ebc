"""AlterReplicaLogDirs 1-2 (KIP-113): moves partitions of this host to other log directories.
Answered when the move has started; DescribeLogDirs shows its progress.
"""

import asyncio
from pathlib import Path

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.rights import DENIAL_ERRORS
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse
from mqd.security.acl import Operation, ResourceType

TIMEOUT_MS = 30_000  # the request has no timeout field


async def handle(
    context: Context, header: RequestHeader, request: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    requested = [
        (topic.name, index, directory.path)
        for directory in request.dirs
        for topic in directory.topics
        for index in topic.partitions
    ]
    targets: dict[tuple[str, int], set[str]] = {}
    for name, index, path in requested:
        targets.setdefault((name, index), set()).add(path)
    if context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        errors = await asyncio.gather(
            *(_move(context.broker, name, index, paths) for (name, index), paths in targets.items())
        )
    else:
        errors = [DENIAL_ERRORS[ResourceType.CLUSTER]] * len(targets)
    results: dict[str, list[AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult]] = {}
    for (name, index), error in zip(targets, errors, strict=True):
        results.setdefault(name, []).append(
            AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult(partition_index=index, error_code=error)
        )
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult(topic_name=name, partitions=partitions)
            for name, partitions in results.items()
        ]
    )


async def _move(broker: Broker, name: str, index: int, paths: set[str]) -> int:
    partition = broker.partition_of(name, index)
    if len(paths) > 1:
        return int(ErrorCode.INVALID_REQUEST)
    if partition is None:
        return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    target = Path(next(iter(paths)))
    if not target.is_absolute() or target not in broker.log_dirs:
        return int(ErrorCode.LOG_DIR_NOT_FOUND)
    if broker.node_id not in partition.replicas:
        return int(ErrorCode.REPLICA_NOT_AVAILABLE)
    if broker.replica_view(partition) is None:
        return broker.unserved_error(partition)
    response = await broker.controller.request(
        messages.MoveReplica(name, index, broker.log_dirs.index(target)), TIMEOUT_MS
    )
    return response.error
