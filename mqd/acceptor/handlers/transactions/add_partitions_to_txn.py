"""AddPartitionsToTxn 0-5 (KIP-98, KIP-890): adds partitions to the ongoing transaction, before
their first record. Clients that use transactions of version 2 do not send this request.

Requests of versions 4 and 5, which brokers send to each other, name several transactions, whose
partitions are added or only verified.
"""

from collections.abc import Collection

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction import checks
from mqd.coordinator.transaction.events import TRANSACTIONS_V2, AddPartitions, Partition
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from mqd.security.acl import Operation, ResourceType

PRODUCER_FENCED_SINCE_VERSION = 2
BATCHED_SINCE_VERSION = 4
TRANSACTIONS_V2_SINCE_VERSION = 5

Errors = dict[Partition, int]


async def handle(
    context: Context, header: RequestHeader, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    version = header.api_version
    if version < BATCHED_SINCE_VERSION:
        requested = _partitions(request.v3_and_below_topics)
        names = dict.fromkeys(topic.name for topic in request.v3_and_below_topics)
        errors = await _add(
            context.broker,
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            requested,
            version,
            denied={name for name in names if not context.authorize(Operation.WRITE, ResourceType.TOPIC, name)},
        )
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=_topics(request.v3_and_below_topics, errors))
    results = []
    for transaction in request.transactions:
        requested = _partitions(transaction.topics)
        add_or_verify = _verify if transaction.verify_only else _add
        errors = await add_or_verify(
            context.broker,
            transaction.transactional_id,
            transaction.producer_id,
            transaction.producer_epoch,
            requested,
            version,
            context.origin.peer_node >= 0,
        )
        results.append(
            AddPartitionsToTxnResponse.Result(
                transactional_id=transaction.transactional_id, topic_results=_topics(transaction.topics, errors)
            )
        )
    return AddPartitionsToTxnResponse(results_by_transaction=results)


def _partitions(topics: list) -> tuple[Partition, ...]:
    return tuple(dict.fromkeys((topic.name, index) for topic in topics for index in topic.partitions))


def _topics(topics: list, errors: Errors) -> list:
    return [
        AddPartitionsToTxnResponse.TopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnResponse.PartitionResult(
                    partition_index=index, partition_error_code=errors[topic.name, index]
                )
                for index in topic.partitions
            ],
        )
        for topic in topics
    ]


def _refusals(
    broker: Broker, transactional_id: str, requested: tuple[Partition, ...], is_peer: bool, denied: Collection[str] = ()
) -> Errors | None:
    """Returns the errors by partition, or None if all partitions may be added. If one partition does
    not exist, or if this client may not write to it, none is added. `denied`: topics to which the
    client may not write.
    """
    errors = {partition: error for partition in requested if (error := _refusal(broker, *partition, is_peer))}
    unauthorized = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    errors.update({partition: unauthorized for partition in requested if partition[0] in denied})
    if errors:
        return {partition: errors.get(partition, int(ErrorCode.OPERATION_NOT_ATTEMPTED)) for partition in requested}
    if not transactional_id or broker.transactions is None:
        return dict.fromkeys(requested, int(ErrorCode.INVALID_REQUEST))
    return None


def _refusal(broker: Broker, topic: str, index: int, is_peer: bool) -> int:
    """Clients must not write to internal topics (as in Kafka): otherwise the transaction's marker
    would be written among the coordinator's own records. The group coordinator of another host may
    add the partition of __consumer_offsets that stores the group's offsets.
    """
    if topic in INTERNAL_TOPICS and not (is_peer and topic == OFFSETS_TOPIC):
        return int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if broker.metadata.log_topic_of(topic) != topic:  # nothing can be written to a view
        return int(ErrorCode.POLICY_VIOLATION)
    return 0 if broker.partition_of(topic, index) is not None else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


async def _add(
    broker: Broker,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    requested: tuple[Partition, ...],
    version: int,
    is_peer: bool = False,
    denied: Collection[str] = (),
) -> Errors:
    refusals = _refusals(broker, transactional_id, requested, is_peer, denied)
    if refusals is not None:
        return refusals
    service = broker.transactions
    assert service is not None  # refused otherwise
    client_version = TRANSACTIONS_V2 if version >= TRANSACTIONS_V2_SINCE_VERSION else 0
    try:
        error = await service.request(
            transactional_id, lambda number: AddPartitions(number, producer_id, epoch, requested, client_version)
        )
    except CoordinatorError as failure:
        error = failure.error_code
    if error == ErrorCode.PRODUCER_FENCED and version < PRODUCER_FENCED_SINCE_VERSION:
        error = int(ErrorCode.INVALID_PRODUCER_EPOCH)
    return dict.fromkeys(requested, error)


async def _verify(
    broker: Broker,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    requested: tuple[Partition, ...],
    _version: int,
    is_peer: bool,
) -> Errors:
    """Another host gets the coordinator's own codes, and translates them for its client."""
    refusals = _refusals(broker, transactional_id, requested, is_peer)
    if refusals is not None:
        return refusals
    service = broker.transactions
    assert service is not None  # refused otherwise
    errors = await checks.verify(service.coordinator, transactional_id, producer_id, epoch, requested)
    if is_peer:
        return dict(zip(requested, errors, strict=True))
    return {
        partition: int(ErrorCode.TRANSACTION_ABORTABLE) if error == ErrorCode.INVALID_TXN_STATE else error
        for partition, error in zip(requested, errors, strict=True)
    }
