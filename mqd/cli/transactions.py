"""Describes transactions, as coordinators and partitions see them, and aborts them. For `mqd txn`."""

from collections.abc import Iterable
from typing import Any

import msgspec

from mqd.base.clock import now_ms
from mqd.cli.broker_lookup import COORDINATOR_UNAVAILABLE, TRANSACTION, Cluster, Partition
from mqd.cli.common import CliError
from mqd.cli.kafka_request import Broker, check, error_text
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    WriteTxnMarkersRequest,
)
from mqd.protocol.redirected import origin_of

INIT_PRODUCER_ID, END_TXN, WRITE_TXN_MARKERS = 22, 26, 27
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
DECIDED_STATES = ("PrepareCommit", "PrepareAbort")
OPEN_STATES = ("Ongoing", *DECIDED_STATES)
_NOT_FOUND_ERRORS = (ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, ErrorCode.INVALID_PRODUCER_ID_MAPPING)
_IDS_PER_REQUEST = 500


class Transaction(msgspec.Struct):
    """A transaction as its coordinator describes it. `open_ms`: how long it has been open; None if
    it is not open.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    open_ms: int | None
    partitions: dict[str, list[int]]


class OpenProducer(msgspec.Struct):
    """A producer with an open transaction in a partition, as the partition describes it. `idle_ms`:
    time since its last batch there.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    idle_ms: int


def _transaction(description: Any, current_ms: int) -> Transaction:
    is_open = description.transaction_state in OPEN_STATES and description.transaction_start_time_ms >= 0
    return Transaction(
        description.transactional_id,
        description.transaction_state,
        description.producer_id,
        description.producer_epoch,
        description.transaction_timeout_ms,
        description.transaction_start_time_ms,
        max(0, current_ms - description.transaction_start_time_ms) if is_open else None,
        {topic.topic: sorted(topic.partitions) for topic in description.topics},
    )


def describe(cluster: Cluster, name: str) -> Transaction:
    request = DescribeTransactionsRequest(transactional_ids=[name])
    response = cluster.request_coordinator(
        TRANSACTION, name, DESCRIBE_TRANSACTIONS, request, lambda response: response.transaction_states[0].error_code
    ).transaction_states[0]
    if response.error_code in _NOT_FOUND_ERRORS:
        raise CliError(f"there is no transactional id {name}; mqd txn list shows all of them")
    check(f"transactional id {name}", response.error_code, None)
    return _transaction(response, now_ms())


def _list(broker: Broker, request: ListTransactionsRequest) -> list[Any]:
    response = broker.request(LIST_TRANSACTIONS, request)
    check("transactions", response.error_code, None)
    return list(response.transaction_states)


def _describe_all(broker: Broker, names: list[str], unavailable: dict[str, int]) -> list[Any]:
    """Describes the transactions that exist. Ids whose coordinator has just changed are added to
    `unavailable`, with the error.
    """
    descriptions = []
    for start in range(0, len(names), _IDS_PER_REQUEST):
        response = broker.request(
            DESCRIBE_TRANSACTIONS,
            DescribeTransactionsRequest(transactional_ids=names[start : start + _IDS_PER_REQUEST]),
        )
        for description in response.transaction_states:
            if description.error_code in COORDINATOR_UNAVAILABLE:
                unavailable[description.transactional_id] = description.error_code
            elif description.error_code not in _NOT_FOUND_ERRORS:
                check(f"transactional id {description.transactional_id}", description.error_code, None)
                descriptions.append(description)
    return descriptions


def all_transactions(
    cluster: Cluster, states: Iterable[str], longer_than_ms: int
) -> tuple[list[Transaction], list[str]]:
    """Returns the transactions that have been open for longer than `longer_than_ms`, or all if it
    is -1, sorted by how long they have been open (longest first), then by name. Also returns the
    ids that no coordinator described, because their coordinators were changing.
    """
    transactions, unavailable, now = [], dict[str, int](), now_ms()
    for broker in cluster.nodes():
        names = [
            listed.transactional_id
            for listed in _list(
                broker, ListTransactionsRequest(state_filters=list(states), duration_filter=longer_than_ms)
            )
        ]
        transactions += [_transaction(description, now) for description in _describe_all(broker, names, unavailable)]
    described = {transaction.transactional_id for transaction in transactions}
    if longer_than_ms >= 0:  # brokers also list transactions that have ended
        transactions = [transaction for transaction in transactions if transaction.open_ms is not None]
    return sorted(
        transactions,
        key=lambda transaction: (
            -(transaction.open_ms if transaction.open_ms is not None else -1),
            transaction.transactional_id,
        ),
    ), sorted(unavailable.keys() - described)


def transactional_ids(bootstrap: str) -> list[str]:
    with Cluster(bootstrap) as cluster:
        return sorted(
            listed.transactional_id for broker in cluster.nodes() for listed in _list(broker, ListTransactionsRequest())
        )


def open_producers(cluster: Cluster, partitions: Iterable[Partition]) -> list[OpenProducer]:
    """The open transactions of the partitions. Call this after Cluster.topics()."""
    producers, now = [], now_ms()
    for node_id, topics in cluster.by_leader(partitions).items():
        requested = [
            DescribeProducersRequest.Topic(name=name, partition_indexes=indexes) for name, indexes in topics.items()
        ]
        response = cluster.node(node_id).request(DESCRIBE_PRODUCERS, DescribeProducersRequest(topics=requested))
        for topic in response.topics:
            for partition in topic.partitions:
                check(f"{topic.name}-{partition.partition_index}", partition.error_code, partition.error_message)
                producers += [
                    OpenProducer(
                        topic.name,
                        partition.partition_index,
                        producer.producer_id,
                        producer.producer_epoch,
                        producer.coordinator_epoch,
                        producer.current_txn_start_offset,
                        max(0, now - producer.last_timestamp),
                    )
                    for producer in partition.active_producers
                    if producer.current_txn_start_offset >= 0
                ]
    return sorted(producers, key=lambda producer: (producer.topic, producer.partition, producer.start_offset))


def _transactions_by_producer(cluster: Cluster, producer_ids: Iterable[int]) -> dict[int, Transaction]:
    """Producer id -> its transaction, if a coordinator knows one. A producer id in records that
    were redirected from a retired partition (mqd.protocol.redirected) is mapped back to the id of
    the producer that sent them. Raises CliError when a coordinator cannot be reached: it may know a
    transaction that the others do not, and may have decided to commit it.
    """
    origins = {producer_id: origin_of(producer_id)[0] for producer_id in producer_ids}
    origin_ids = sorted(set(origins.values()))
    if not origin_ids:
        return {}
    transactions: dict[int, Transaction] = {}
    unavailable: dict[str, int] = {}
    with cluster.every_coordinator(TRANSACTION):
        for broker in cluster.nodes():
            states = _list(broker, ListTransactionsRequest(producer_id_filters=origin_ids))
            described = {
                description.transactional_id: description
                for description in _describe_all(
                    broker, sorted({state.transactional_id for state in states}), unavailable
                )
            }
            for name, error in unavailable.items():
                check(f"transactional id {name}", error, None)
            for state in states:  # a joint transaction has many producers
                if state.transactional_id in described:
                    transactions[state.producer_id] = _transaction(described[state.transactional_id], now_ms())
    return {producer_id: transactions[origin] for producer_id, origin in origins.items() if origin in transactions}


def hanging_transactions(cluster: Cluster, idle_ms: int) -> list[OpenProducer]:
    """Returns transactions that are open in a partition, have been idle for at least `idle_ms`, and
    that no coordinator will end, because none knows a transaction of this producer with this partition
    (KIP-664). Consumers with isolation.level=read_committed cannot read past such a transaction.
    Raises CliError if there are candidates, but a coordinator cannot be queried.
    """
    topics = cluster.topics()
    suspects = [
        producer
        for producer in open_producers(
            cluster, [(topic, index) for topic, indexes in topics.items() for index in indexes]
        )
        if producer.idle_ms >= idle_ms
    ]
    transactions = _transactions_by_producer(cluster, (producer.producer_id for producer in suspects))
    return [producer for producer in suspects if not _will_be_ended(transactions.get(producer.producer_id), producer)]


def _will_be_ended(transaction: Transaction | None, producer: OpenProducer) -> bool:
    """Whether the coordinator will end the producer's transaction in the partition. `transaction`:
    the one that a coordinator knows of this producer.
    """
    sent_to = origin_of(producer.producer_id)[1]
    partition = sent_to if sent_to >= 0 else producer.partition
    return (
        transaction is not None
        and transaction.state in OPEN_STATES
        and partition in transaction.partitions.get(producer.topic, ())
    )


def check_open(transaction: Transaction) -> None:
    """Raises CliError if there is nothing to abort."""
    name = transaction.transactional_id
    if transaction.state in DECIDED_STATES:
        raise CliError(
            f"the transaction of {name} is decided ({transaction.state}): its coordinator is writing the markers, and"
            " nothing can change that"
        )
    if transaction.state != "Ongoing":
        raise CliError(f"transactional id {name} has no transaction open; its state is {transaction.state}")


def find_open_transaction(
    cluster: Cluster, topic: str, index: int, start_offset: int | None, producer_id: int | None
) -> tuple[OpenProducer, Transaction | None]:
    """Returns the open transaction that begins at this offset or, if `start_offset` is None, belongs
    to this producer; and the coordinator's view of the same producer. Raises CliError if there is no
    such transaction, or if its outcome is decided.
    """
    if index not in cluster.topics([topic]).get(topic, {}):
        raise CliError(f"there is no partition {index} of a topic {topic}; mqd topic list shows the topics")
    open_in_partition = open_producers(cluster, [(topic, index)])
    matching = [
        producer
        for producer in open_in_partition
        if (producer.producer_id == producer_id if start_offset is None else producer.start_offset == start_offset)
    ]
    if not matching:
        others = ", ".join(
            f"{producer.start_offset} (producer id {producer.producer_id})" for producer in open_in_partition[:5]
        )
        criterion = f"begins at {start_offset}" if start_offset is not None else f"belongs to producer id {producer_id}"
        raise CliError(
            f"no open transaction of {topic}-{index} {criterion}; "
            + (f"the open ones begin at {others}" if others else "none is open there")
        )
    coordinator_view = _transactions_by_producer(cluster, [matching[0].producer_id]).get(matching[0].producer_id)
    if (
        coordinator_view is not None
        and coordinator_view.state in DECIDED_STATES
        and index in coordinator_view.partitions.get(topic, ())
    ):
        check_open(coordinator_view)
    return matching[0], coordinator_view


def maybe_committed(coordinator_view: Transaction | None, producer: OpenProducer) -> bool:
    """Whether the coordinator remembers a commit that may have been this transaction's. With
    transactions v2 (KIP-890), the producer epoch increases after each transaction.
    """
    return (
        coordinator_view is not None
        and coordinator_view.state == "CompleteCommit"
        and 0 <= coordinator_view.producer_epoch - producer.producer_epoch <= 1
    )


def open_by_partition(cluster: Cluster, transaction: Transaction) -> dict[Partition, OpenProducer]:
    """Partition -> its view of the transaction's producer, for each partition where the transaction
    is open.
    """
    cluster.topics(transaction.partitions)
    partitions = [(topic, index) for topic, indexes in transaction.partitions.items() for index in indexes]
    return {
        (producer.topic, producer.partition): producer
        for producer in open_producers(cluster, partitions)
        if producer.producer_id == transaction.producer_id
    }


def abort_by_id(cluster: Cluster, transaction: Transaction) -> None:
    """Acts like a new instance of the producer: aborts its transaction and fences the old instance.
    Returns when the transaction has ended.
    """
    from mqd.coordinator.transaction.joint import JOINT_PREFIX

    name = transaction.transactional_id
    if name.startswith(JOINT_PREFIX):
        end = EndTxnRequest(
            transactional_id=name, producer_id=-1, producer_epoch=-1, joint=EndTxnRequest.Joint(batch_id=-1)
        )
        check(
            f"transactional id {name}",
            cluster.request_coordinator(
                TRANSACTION, name, END_TXN, end, lambda response: response.error_code
            ).error_code,
            None,
        )
        return
    request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=transaction.timeout_ms)
    response = cluster.request_coordinator(
        TRANSACTION, name, INIT_PRODUCER_ID, request, lambda response: response.error_code
    )
    check(f"transactional id {name}", response.error_code, None)


def abort_in_partition(cluster: Cluster, producer: OpenProducer) -> None:
    """Writes an abort marker with the coordinator's epoch, as the coordinator would."""
    marker = WriteTxnMarkersRequest.Marker(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        transaction_result=False,
        coordinator_epoch=max(producer.coordinator_epoch, 0),
        topics=[WriteTxnMarkersRequest.Topic(name=producer.topic, partition_indexes=[producer.partition])],
    )
    ((node_id, _),) = cluster.by_leader([(producer.topic, producer.partition)]).items()
    response = cluster.node(node_id).request(WRITE_TXN_MARKERS, WriteTxnMarkersRequest(markers=[marker]))
    error = response.markers[0].topics[0].partitions[0].error_code
    if error:
        raise CliError(
            f"{producer.topic}-{producer.partition}: {error_text(error)}; mqd txn list --hanging shows what is open now"
        )
