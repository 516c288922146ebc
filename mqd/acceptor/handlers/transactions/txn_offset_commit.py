"""TxnOffsetCommit 0-5 (KIP-98, KIP-447, KIP-890): offsets of a group that take effect when the
transaction commits. A request of version 5 also adds the group to the transaction. Older versions
require that the group was added before (AddOffsetsToTxn). This is verified, because offsets of a
transaction that has ended would stay pending forever.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, OffsetsCommitted
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction import checks
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import TxnOffsetCommitRequest, TxnOffsetCommitResponse

ADDS_GROUP_SINCE_VERSION = 5
ABORTABLE_SINCE_VERSION = 4
LOAD_IN_PROGRESS_SINCE_VERSION = 2
TIMEOUT_S = 5.0


async def handle(context: Context, header: RequestHeader, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    """Partitions that do not exist are refused individually, before all other checks."""
    errors: dict[tuple[str, int], int] = {}
    offsets: list[CommittedOffset] = []
    for topic in request.topics:
        for part in topic.partitions:
            if context.broker.partition_of(topic.name, part.partition_index) is None:
                errors[topic.name, part.partition_index] = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            else:
                offsets.append(
                    CommittedOffset(
                        topic.name,
                        part.partition_index,
                        part.committed_offset,
                        part.committed_leader_epoch,
                        part.committed_metadata or "",
                    )
                )
    if offsets:
        committed = await _commit(context.broker.transactions, header.api_version, request, tuple(offsets))
        error = _translate(committed.error, header.api_version)
        for number, offset in enumerate(offsets):
            errors[offset.topic, offset.partition] = error or committed.errors[number]
    return _response(request, errors)


async def _commit(
    service: TransactionService | None,
    version: int,
    request: TxnOffsetCommitRequest,
    offsets: tuple[CommittedOffset, ...],
) -> OffsetsCommitted:
    if not request.group_id:
        return OffsetsCommitted(int(ErrorCode.INVALID_GROUP_ID))
    if not request.transactional_id or service is None:
        return OffsetsCommitted(int(ErrorCode.INVALID_REQUEST))
    ticket = service.offset_commits.enter(request.producer_id)
    try:
        if error := await _admission_error(service, version, request):
            return OffsetsCommitted(error)
        response = await service.groups.request(
            request.group_id, lambda number: _event(number, version, request, offsets), TIMEOUT_S
        )
        assert isinstance(response, OffsetsCommitted)
        return response
    except CoordinatorError as failure:
        return OffsetsCommitted(failure.error_code)
    finally:
        service.offset_commits.leave(request.producer_id, ticket)


async def _admission_error(service: TransactionService, version: int, request: TxnOffsetCommitRequest) -> int:
    """Returns 0 if these offsets may become part of the ongoing transaction, otherwise an error code."""
    if not await service.groups.ensure_topic():
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    partition = (OFFSETS_TOPIC, service.groups.partition_for(request.group_id))
    identity = (request.transactional_id, request.producer_id, request.producer_epoch)
    if version >= ADDS_GROUP_SINCE_VERSION:
        return await checks.add(service.routed, *identity, (partition,))
    return (await checks.verify(service.routed, *identity, (partition,)))[0]


def _translate(error: int, version: int) -> int:
    if error == ErrorCode.PRODUCER_FENCED:
        return int(ErrorCode.INVALID_PRODUCER_EPOCH)
    if error == ErrorCode.CONCURRENT_TRANSACTIONS and version < ADDS_GROUP_SINCE_VERSION:
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    if error == ErrorCode.INVALID_TXN_STATE and version >= ABORTABLE_SINCE_VERSION:
        return int(ErrorCode.TRANSACTION_ABORTABLE)
    if error == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < LOAD_IN_PROGRESS_SINCE_VERSION:
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return error


def _event(
    number: int, version: int, request: TxnOffsetCommitRequest, offsets: tuple[CommittedOffset, ...]
) -> CommitOffsets:
    return CommitOffsets(
        number,
        version,
        request.member_id,
        request.group_instance_id,
        request.generation_id,
        offsets,
        producer_id=request.producer_id,
        producer_epoch=request.producer_epoch,
    )


def _response(request: TxnOffsetCommitRequest, errors: dict[tuple[str, int], int]) -> TxnOffsetCommitResponse:
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponse.TopicResponse(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponse.PartitionResponse(
                        partition_index=part.partition_index, error_code=errors[topic.name, part.partition_index]
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
