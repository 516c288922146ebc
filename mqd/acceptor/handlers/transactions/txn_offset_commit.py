"""TxnOffsetCommit 0-5 (KIP-98, KIP-447, KIP-890): offsets of a group that take effect when the
transaction commits. Version 5 adds the group to the transaction itself. Older versions require that
it was added before (AddOffsetsToTxn), which is verified: offsets of a transaction that is over
would stay pending forever.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, OffsetsCommitted
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.topics import GROUPS
from mqd.coordinator.transaction import checks
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import TxnOffsetCommitRequest, TxnOffsetCommitResponse

ADDS_SINCE = 5
ABORTABLE_SINCE = 4
KNOWS_LOADING_SINCE = 2
TIMEOUT_S = 5.0


async def handle(context: Context, header: RequestHeader, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    service = context.broker.transactions
    if not request.transactional_id or service is None:
        return _response(request, int(ErrorCode.INVALID_REQUEST))
    if not request.group_id:
        return _response(request, int(ErrorCode.INVALID_GROUP_ID))
    ticket = service.offset_commits.enter(request.producer_id)
    try:
        error = _translate(await _admit(service, header.api_version, request), header.api_version)
        return (
            _response(request, error) if error else await _commit(context.broker, service, header.api_version, request)
        )
    except CoordinatorError as failure:
        return _response(request, _translate(failure.error_code, header.api_version))
    finally:
        service.offset_commits.leave(request.producer_id, ticket)


async def _admit(service: TransactionService, version: int, request: TxnOffsetCommitRequest) -> int:
    """Whether these offsets are part of the ongoing transaction."""
    if not await service.groups.ensure_topic():
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    partition = (GROUPS, service.groups.partition_for(request.group_id))
    identity = (request.transactional_id, request.producer_id, request.producer_epoch)
    if version >= ADDS_SINCE:
        return await checks.add(service.routed, *identity, (partition,))
    return (await checks.verify(service.routed, *identity, (partition,)))[0]


def _translate(error: int, version: int) -> int:
    if error == ErrorCode.PRODUCER_FENCED:
        return int(ErrorCode.INVALID_PRODUCER_EPOCH)
    if error == ErrorCode.CONCURRENT_TRANSACTIONS and version < ADDS_SINCE:
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    if error == ErrorCode.INVALID_TXN_STATE and version >= ABORTABLE_SINCE:
        return int(ErrorCode.TRANSACTION_ABORTABLE)
    if error == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < KNOWS_LOADING_SINCE:
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return error


async def _commit(
    broker: Broker, service: TransactionService, version: int, request: TxnOffsetCommitRequest
) -> TxnOffsetCommitResponse:
    errors: dict[tuple[str, int], int] = {}
    offsets: list[CommittedOffset] = []
    for topic in request.topics:
        for one in topic.partitions:
            if broker.partition_of(topic.name, one.partition_index) is None:
                errors[topic.name, one.partition_index] = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            else:
                offsets.append(
                    CommittedOffset(
                        topic.name,
                        one.partition_index,
                        one.committed_offset,
                        one.committed_leader_epoch,
                        one.committed_metadata or "",
                    )
                )
    if offsets:
        answer = await service.groups.request(
            request.group_id, lambda number: _event(number, version, request, tuple(offsets)), TIMEOUT_S
        )
        assert isinstance(answer, OffsetsCommitted)
        for number, offset in enumerate(offsets):
            errors[offset.topic, offset.partition] = (
                _translate(answer.error, version) if answer.error else answer.errors[number]
            )
    return _response(request, errors)


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


def _response(request: TxnOffsetCommitRequest, errors: int | dict[tuple[str, int], int]) -> TxnOffsetCommitResponse:
    def error_of(topic: str, index: int) -> int:
        return errors if isinstance(errors, int) else errors[topic, index]

    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponse.TopicResponse(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponse.PartitionResponse(
                        partition_index=one.partition_index, error_code=error_of(topic.name, one.partition_index)
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
