"""WriteTxnMarkers 1-2 (KIP-98, KIP-664, KIP-1228). Other hosts send it, over authenticated
connections, to end transactions. Clients send it (Admin.abortTransaction) to end a hanging
transaction. From clients, only aborts are accepted. The partition's owner is queried first: nothing
is written if the partition has no open transaction of the producer. A client's marker raises the
producer's epoch by at most one and never raises the coordinator epoch: otherwise it could lock the
producer or the coordinator out of the partition.

If the transaction is ongoing according to the producer's coordinator, on this or another host, that
coordinator aborts the transaction everywhere and fences the producer: a marker without the
coordinator's knowledge would split the transaction. A marker of transactions v2 (KIP-1228) has a
higher epoch than the transaction that it ends, so it does not end a transaction with the same epoch
as the marker.
"""

import asyncio
from functools import partial

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.interbroker.transactions import RemoteTransaction, abort_remote_transaction, find_remote_transaction
from mqd.acceptor.transactions import TransactionService
from mqd.base.tasks import timeout
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.events import TRANSACTIONS_V2, AbortByAdministrator, Partition
from mqd.coordinator.transaction.joint import JointTransaction
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from mqd.protocol.redirected import origin_of

Marker = WriteTxnMarkersRequest.Marker
Errors = dict[Partition, int]
TIMEOUT_S = 10.0


async def handle(context: Context, header: RequestHeader, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    service = context.broker.transactions
    if context.origin.peer_node >= 0 and service is not None:
        return await _handle_from_host(service, request)
    responses = []
    ongoing = (
        _ongoing(service, {_original_producer_id(marker) for marker in request.markers}) if service is not None else {}
    )
    for marker in request.markers:
        errors = await _handle_from_client(context.broker, marker, ongoing.get(_original_producer_id(marker)))
        topics = [
            WriteTxnMarkersResponse.TopicResult(
                name=topic.name,
                partitions=[
                    WriteTxnMarkersResponse.PartitionResult(
                        partition_index=index, error_code=int(errors[topic.name, index])
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ]
        responses.append(WriteTxnMarkersResponse.MarkerResult(producer_id=marker.producer_id, topics=topics))
    return WriteTxnMarkersResponse(markers=responses)


async def _handle_from_host(service: TransactionService, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    """Handles a request from the host whose coordinator ends these transactions. The markers are
    written concurrently, and the request is answered when they are below the high watermarks.
    """
    requested = [
        (marker, (topic.name, index))
        for marker in request.markers
        for topic in marker.topics
        for index in topic.partition_indexes
    ]
    errors = iter(
        await asyncio.gather(*(_write_from_host(service, marker, partition) for marker, partition in requested))
    )
    return WriteTxnMarkersResponse(
        markers=[
            WriteTxnMarkersResponse.MarkerResult(
                producer_id=marker.producer_id,
                topics=[
                    WriteTxnMarkersResponse.TopicResult(
                        name=topic.name,
                        partitions=[
                            WriteTxnMarkersResponse.PartitionResult(partition_index=index, error_code=next(errors))
                            for index in topic.partition_indexes
                        ],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
    )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _write_from_host(service: TransactionService, marker: Marker, partition: Partition) -> int:
    # M2 of mqd/coordinator/transaction/markers.py: offsets that were verified earlier are written
    # or refused first.
    if partition[0] == OFFSETS_TOPIC:
        verified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        service.offset_commits.when_done(marker.producer_id, partial(_resolve, verified))
        await verified
    try:
        await service.append_marker_here(
            *partition,
            marker.producer_id,
            marker.producer_epoch,
            marker.coordinator_epoch,
            marker.transaction_result,
            _is_bumped(marker),
            marker.leader_epoch,
        )
    except AppendError as failure:
        return failure.error
    except CoordinatorError as failure:
        return failure.error_code
    return 0


async def _handle_from_client(broker: Broker, marker: Marker, transactional_id: str | None) -> Errors:
    """Handles a client's marker; returns each partition's error. `transactional_id`: the id with an
    open transaction of this producer; None: this host's coordinator knows none.
    """
    requested = list(dict.fromkeys((topic.name, index) for topic in marker.topics for index in topic.partition_indexes))
    service = broker.transactions
    refusal = _refusal(service, marker)
    if refusal:
        return dict.fromkeys(requested, refusal)
    assert service is not None
    try:
        service.coordinator.check_loaded()
        if transactional_id is not None:
            epoch_max = _epoch_max(marker)
            error = await abort_ongoing(service, transactional_id, _original_producer_id(marker), epoch_max)
            return dict.fromkeys(requested, error)
        remote_transaction = (
            RemoteTransaction(0)
            if service.peers is None or broker.metadata.is_single_host
            else await find_remote_transaction(broker, service.peers, _original_producer_id(marker))
        )
        if remote_transaction.node_id >= 0 and service.peers is not None:
            return dict.fromkeys(
                requested,
                await abort_remote_transaction(
                    service.peers, remote_transaction, _original_producer_id(marker), _epoch_max(marker)
                ),
            )
        if remote_transaction.error:
            return dict.fromkeys(requested, remote_transaction.error)
    except CoordinatorError as error:
        return dict.fromkeys(requested, error.error_code)
    return {partition: await _write_from_client(broker, service, marker, partition) for partition in requested}


def _refusal(service: TransactionService | None, marker: Marker) -> int:
    if service is None or marker.transaction_result:
        return int(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if marker.producer_id < 0 or marker.producer_epoch < 0:
        return int(ErrorCode.INVALID_REQUEST)
    # A coordinator epoch from the future would fence the present coordinator for this producer, and
    # its transactions could never be ended.
    return (
        int(ErrorCode.TRANSACTION_COORDINATOR_FENCED)
        if marker.coordinator_epoch > service.coordinator_epoch_max()
        else 0
    )


def _ongoing(service: TransactionService, producer_ids: set[int]) -> dict[int, str]:
    """The transactional ids with open transactions of these producers. O(transactional ids)."""
    return {
        producer_id: name
        for name, core in service.coordinator.items()
        if isinstance(core, Transaction | JointTransaction)
        for producer_id in core.open_producers()
        if producer_id in producer_ids
    }


async def abort_ongoing(service: TransactionService, name: str, producer_id: int, epoch_max: int) -> int:
    """Ends the ongoing transaction of this producer everywhere, through the coordinator on this
    host. Raises CoordinatorError.
    """
    core = service.coordinator.core(name)
    epoch = core.open_producers().get(producer_id) if isinstance(core, Transaction | JointTransaction) else None
    if epoch is None:
        return int(ErrorCode.INVALID_TXN_STATE)  # the transaction has ended since the request
    if epoch > epoch_max:
        return int(ErrorCode.INVALID_PRODUCER_EPOCH)
    error = await service.request(name, lambda number: AbortByAdministrator(number, producer_id))
    assert isinstance(error, int)
    return error


def _epoch_max(marker: Marker) -> int:
    """The highest epoch of a transaction that the marker may end: for a marker of transactions v2, one
    below the marker's epoch; otherwise one above it.
    """
    return marker.producer_epoch - 1 if _is_bumped(marker) else marker.producer_epoch + 1


def _original_producer_id(marker: Marker) -> int:
    """The producer id by which coordinators know the producer."""
    return origin_of(marker.producer_id)[0]


def _is_bumped(marker: Marker) -> bool:
    return marker.transaction_version >= TRANSACTIONS_V2


async def _write_from_client(broker: Broker, service: TransactionService, marker: Marker, partition: Partition) -> int:
    image = broker.partition_of(*partition)
    if image is None:
        return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    view = broker.view(image)
    if view is None:
        return broker.unserved_error(image)
    try:
        async with timeout(TIMEOUT_S):
            error, producers = await service.owners.producers(view.owner, image.slot)
    except TimeoutError:
        return int(ErrorCode.REQUEST_TIMED_OUT)
    producer = next((producer for producer in producers if producer.producer_id == marker.producer_id), None)
    if error or producer is None:
        return error
    if marker.producer_epoch < producer.producer_epoch + _is_bumped(marker):
        return int(ErrorCode.INVALID_PRODUCER_EPOCH)
    if producer.transaction_first_offset < 0:
        return 0
    if marker.producer_epoch > producer.producer_epoch + 1:
        return int(ErrorCode.INVALID_PRODUCER_EPOCH)
    if marker.coordinator_epoch < producer.coordinator_epoch:
        return int(ErrorCode.TRANSACTION_COORDINATOR_FENCED)
    if _ongoing(service, {_original_producer_id(marker)}):
        # a transaction has begun since the query to the coordinator
        return int(ErrorCode.CONCURRENT_TRANSACTIONS)
    try:
        await service.append_marker_here(
            *partition,
            marker.producer_id,
            marker.producer_epoch,
            max(producer.coordinator_epoch, 0),
            False,
            _is_bumped(marker),
        )
    except AppendError as failure:
        return failure.error
    except CoordinatorError as failure:
        return failure.error_code
    return 0
