"""Checks for open transactions: only the leaders of the partitions know them. Before partitions of
a topic are retired, no transaction may be open on them; before partitions are added in their place,
no transaction may be open that wrote to the removed ones.

If a transaction begins after the leaders have answered but before the first step of a retirement,
it ends normally. No transaction writes to a removed partition:
docs/decisions/cluster/2026-11-21-retired-partitions.md.
"""

import asyncio
from typing import NamedTuple

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.records import describe_producers
from mqd.acceptor.handlers.transactions import list_transactions
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.interbroker.transactions import LIST_VERSION
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import RETIRE_UNSEALED
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    CreatePartitionsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from mqd.protocol.redirected import origin_of

TIMEOUT_S = 10.0
DESCRIBE_VERSION = 0
ADVICE = (
    "Bring back a host that has the partition's records (mqd topic describe shows which), and try again. If they are"
    " lost permanently, let the partition begin empty: move it to hosts in service (mqd topic reassign --no-wait), and"
    " elect a leader (kafka-leader-election.sh --election-type unclean)."
)
Retirement = CreatePartitionsResponse.Retirement


class OpenTransaction(NamedTuple):
    """An open transaction, as a partition sees it."""

    partition: int
    producer_id: int


class _Undetermined(Exception):
    """The message names the partition whose leader cannot be reached, and the reason."""


def first_retiring_index(topic: messages.TopicImage) -> int:
    """Index of the first retiring partition; the number of partitions if there is none."""
    return next((partition.index for partition in topic.partitions if partition.redirect >= 0), len(topic.partitions))


def describe(broker: Broker, topic: messages.TopicImage) -> Retirement:
    """Describes how far the retirement of the topic's partitions has come. `step`: 0 no partition
    is retiring (or all are removed), 1 the retiring partitions are moving to the hosts of the
    partitions that take over their records, 2 sealed, 3 redirected, 4 hidden. `applied`: this
    host's workers have applied the step.
    """
    applied = broker.table.metadata_version >= broker.metadata.version
    retiring = topic.partitions[first_retiring_index(topic) :]
    retired = [
        CreatePartitionsResponse.Retired(
            partition_index=partition.index,
            redirect_index=partition.redirect,
            leader_id=partition.leader,
            leader_epoch=partition.leader_epoch,
        )
        for partition in retiring
    ]
    return Retirement(
        step=retiring[-1].retiring - RETIRE_UNSEALED + 1 if retiring else 0,
        applied=applied,
        remaining=len(topic.partitions) - len(retiring),
        retired=retired,
    )


async def refusal_to_retire(
    context: Context, header: RequestHeader, change: messages.RetirePartitions
) -> tuple[int, str] | None:
    """Returns (error code, reason) if a transaction is open on a partition that would be retired,
    or if that cannot be determined. The controller checks everything else.
    """
    topic = context.broker.metadata.topics.get(change.name)
    if (
        topic is None
        or not 0 < change.partition_count < len(topic.partitions)
        or first_retiring_index(topic) < len(topic.partitions)
    ):
        return None
    try:
        transactions = await _open_transactions(context, header, topic, change.partition_count)
    except _Undetermined as error:
        return int(ErrorCode.LEADER_NOT_AVAILABLE), str(error)
    return (
        await _open_transaction_error(context, header, change.name, min(transactions), "retire the partitions")
        if transactions
        else None
    )


async def refusal_to_add(
    context: Context, header: RequestHeader, change: messages.AddPartitions
) -> tuple[int, str] | None:
    """Returns (error code, reason) if a transaction is open that wrote to a removed partition, or
    if that cannot be determined. The transaction's marker follows the records to another partition
    only until the removed index is reused or the partition count changes; after that, readers of
    committed records would wait for the marker forever. The controller refuses the change if
    partitions have been removed that this host does not know of (AddPartitions.first_leader_epoch).
    """
    topic = context.broker.metadata.topics.get(change.name)
    if topic is None or not topic.first_leader_epoch or change.partition_count <= len(topic.partitions):
        return None
    try:
        transactions = [
            transaction
            for transaction in await _open_transactions(context, header, topic, 0)
            if origin_of(transaction.producer_id)[1] >= len(topic.partitions)
        ]
    except _Undetermined as error:
        return int(ErrorCode.LEADER_NOT_AVAILABLE), str(error)
    return (
        await _open_transaction_error(context, header, change.name, min(transactions), "add partitions")
        if transactions
        else None
    )


async def _open_transaction_error(
    context: Context, header: RequestHeader, topic: str, transaction: OpenTransaction, next_step: str
) -> tuple[int, str]:
    producer_id, sent_to = origin_of(transaction.producer_id)
    name = await _transactional_id(context, header, producer_id)
    producer = (
        f"transactional id '{name}', producer id {producer_id}"
        if name is not None
        else f"producer id {producer_id}, whose transactional id no coordinator knows"
    )
    former_partition = f" (sent to the former partition {sent_to})" if sent_to >= 0 else ""
    return (
        int(ErrorCode.CONCURRENT_TRANSACTIONS),
        (
            f"A transaction is open on partition {transaction.partition} of {topic}{former_partition}: {producer}."
            f" Wait until it ends, or abort it (mqd txn abort), then {next_step}."
        ),
    )


async def _open_transactions(
    context: Context, header: RequestHeader, topic: messages.TopicImage, first_index: int
) -> list[OpenTransaction]:
    """Returns the transactions open on the partitions with index `first_index` or higher. Raises
    _Undetermined if a leader cannot say, even for a permanently lost partition: only an operator
    knows that it will not return. A leader that was elected uncleanly reports the transactions
    that are open in the remaining records.
    """
    by_leader: dict[int, list[int]] = {}
    if topic.partition_count > len(topic.partitions):
        subset = f"{len(topic.partitions)} of the {topic.partition_count} partitions of {topic.name}"
        raise _Undetermined(
            f"This broker has room for {subset} only, and cannot tell whether a transaction is open on the others; ask"
            " another broker."
        )
    for partition in topic.partitions[first_index:]:
        if partition.leader < 0:
            raise _Undetermined(
                f"Partition {partition.index} of {topic.name} has no leader, so it is unknown whether a transaction is"
                f" open on it. {ADVICE}"
            )
        by_leader.setdefault(partition.leader, []).append(partition.index)
    responses = await asyncio.gather(
        *(_open_transactions_at(context, header, node, topic.name, indexes) for node, indexes in by_leader.items())
    )
    return [transaction for transactions in responses for transaction in transactions]


async def _open_transactions_at(
    context: Context, header: RequestHeader, node: int, name: str, indexes: list[int]
) -> list[OpenTransaction]:
    service, response = context.broker.transactions, None
    request = DescribeProducersRequest(topics=[DescribeProducersRequest.Topic(name=name, partition_indexes=indexes)])
    if node == context.broker.node_id:
        response = await describe_producers.handle(context, header, request)
    elif service is not None and service.peers is not None:
        try:
            response = await service.peers.request(node, request, DESCRIBE_VERSION, TIMEOUT_S)
        except PeerError as error:
            raise _Undetermined(
                f"Broker {node}, which leads partition {indexes[0]} of {name}, cannot tell whether a transaction is"
                f" open on it ({error}); try again."
            ) from error
    if not isinstance(response, DescribeProducersResponse):
        raise _Undetermined(
            f"Broker {node}, which leads partition {indexes[0]} of {name}, cannot be reached from this one; try again."
        )
    transactions = []
    for partition in response.topics[0].partitions:
        if partition.error_code:
            reason = error_message(partition.error_code)
            raise _Undetermined(
                f"The leader of partition {partition.partition_index} of {name} cannot tell whether a transaction is"
                f" open on it ({reason}); try again. If that persists, the leader's disk has failed. {ADVICE}"
            )
        transactions += [
            OpenTransaction(partition.partition_index, producer.producer_id)
            for producer in partition.active_producers
            if producer.current_txn_start_offset >= 0
        ]
    return transactions


async def _transactional_id(context: Context, header: RequestHeader, producer_id: int) -> str | None:
    """Looks the id up for the error message. Returns None if no coordinator that responds knows the
    producer.
    """
    request = ListTransactionsRequest(state_filters=[], producer_id_filters=[producer_id], duration_filter=-1)
    responses: list[object] = [await list_transactions.handle(context, header, request)]
    broker, service = context.broker, context.broker.transactions
    if service is not None and service.peers is not None:
        others = [node for node in broker.metadata.brokers if node != broker.node_id and broker.metadata.is_alive(node)]
        responses += await asyncio.gather(
            *(service.peers.request(node, request, LIST_VERSION, TIMEOUT_S) for node in others), return_exceptions=True
        )
    return next(
        (
            state.transactional_id
            for response in responses
            if isinstance(response, ListTransactionsResponse)
            for state in response.transaction_states
        ),
        None,
    )
