"""WriteTxnMarkers 1-2 (KIP-98, KIP-664, KIP-1228). Between brokers this ends transactions; from a client (Admin.abortTransaction) it ends one that hangs: only an abort is
taken, of a transaction that is open in that partition's eyes.

If the producer's transaction is one that its coordinator knows to be ongoing, the coordinator aborts it everywhere, and fences the producer: a marker behind its back
would tear the transaction in two. A marker of transactions v2 (KIP-1228) names an epoch above that of what it ends: it is not of the transaction that has it.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.log import AppendError
from mqd.coordinator.runtime import CoordinatorError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from mqd.transaction.events import VERSION_2, AbortByAdministrator, Partition
from mqd.transaction.transaction import Transaction

Marker = WriteTxnMarkersRequest.Marker
Errors = dict[Partition, int]


async def handle(context: Context, header: RequestHeader, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    answers = []
    for marker in request.markers:
        errors = await _errors(context.broker, marker)
        topics = [
            WriteTxnMarkersResponse.TopicResult(
                name=topic.name,
                partitions=[
                    WriteTxnMarkersResponse.PartitionResult(partition_index=index, error_code=int(errors[topic.name, index])) for index in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        answers.append(WriteTxnMarkersResponse.MarkerResult(producer_id=marker.producer_id, topics=topics))
    return WriteTxnMarkersResponse(markers=answers)


async def _errors(broker: Broker, marker: Marker) -> Errors:
    asked = list(dict.fromkeys((topic.name, index) for topic in marker.topics for index in topic.partition_indexes))
    service = broker.transactions
    refused = _refusal(service, marker)
    if refused:
        return dict.fromkeys(asked, refused)
    assert service is not None
    try:
        service.coordinator.check_loaded()
        known = _ongoing(service, marker.producer_id)
        if known is not None:
            return await _abort_known(service, known, marker, asked)
    except CoordinatorError as error:
        return dict.fromkeys(asked, error.error_code)
    return {partition: await _write(broker, service, marker, partition) for partition in asked}


def _refusal(service: TransactionService | None, marker: Marker) -> int:
    if service is None or marker.transaction_result:
        return int(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if marker.producer_id < 0 or marker.producer_epoch < 0:
        return int(ErrorCode.INVALID_REQUEST)
    # A coordinator of the future would fence the present one for this producer: nobody could end its transactions any more.
    return int(ErrorCode.TRANSACTION_COORDINATOR_FENCED) if marker.coordinator_epoch > service.coordinator_epoch_max() else 0


def _ongoing(service: TransactionService, producer_id: int) -> str | None:
    """The transactional id that has a transaction of this producer id under way."""
    for name, core in service.coordinator.items():
        if isinstance(core, Transaction) and core.producer_id == producer_id and core.partitions:
            return name
    return None


async def _abort_known(service: TransactionService, name: str, marker: Marker, asked: list[Partition]) -> Errors:
    core = service.coordinator.core(name)
    assert isinstance(core, Transaction)
    if core.producer_epoch > marker.producer_epoch + 1 or (_is_bumped(marker) and core.producer_epoch >= marker.producer_epoch):
        return dict.fromkeys(asked, int(ErrorCode.INVALID_PRODUCER_EPOCH))
    error = await service.request(name, lambda number: AbortByAdministrator(number, marker.producer_id))
    assert isinstance(error, int)
    return dict.fromkeys(asked, error)


def _is_bumped(marker: Marker) -> bool:
    return marker.transaction_version >= VERSION_2


async def _write(broker: Broker, service: TransactionService, marker: Marker, partition: Partition) -> int:
    if broker.partition_of(*partition) is None:
        return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    try:
        await service.append_marker(*partition, marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, False, _is_bumped(marker))
    except AppendError as error:
        return error.error
    except CoordinatorError as error:
        return error.error_code
    return 0
