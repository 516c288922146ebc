"""Transactions whose coordinator, partitions or groups are on different hosts. Markers go to the
leaders of partitions (WriteTxnMarkers). Checks of partitions go to the coordinator
(AddPartitionsToTxn 5, which only brokers send), and so does an administrator's abort of an ongoing
transaction (EndTxn, which has only this meaning between hosts). All of them use the inter-broker
listener.

Invariants
    T1  a marker is answered with success only when the leader's host reports it below the high
        watermark; an unknown outcome is an error that is retried
        (mqd/coordinator/transaction/markers.py); if the marker was written after all, the retry is
        refused because of its epoch
    T2  the target host is chosen when the request is sent, by the metadata of that moment; a host
        that is not the leader, or no longer is, refuses without effect
    T3  a marker names its intended leader epoch, and is refused in any other epoch. Otherwise a
        marker delayed by the network could arrive when another leader has written the retry and the
        first host leads again. The delayed marker would then end the producer's next transaction,
        because clients older than KIP-890 keep the same epoch
Concurrency: the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.acceptor.broker_state import BrokerState
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.base import logging
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.transaction.events import TRANSACTIONS_V2, AddPartitions, Partition, VerifyPartitions
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

MARKERS_PER_REQUEST = 1000
MARKERS_VERSION, ADD_VERSION, LIST_VERSION, END_VERSION = 2, 5, 1, 4
ONGOING = "Ongoing"
TIMEOUT_S = 10.0
UNFINISHED = frozenset(("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"))

log = logging.get("acceptor.transactions")


class MarkerToWrite(NamedTuple):
    partition: Partition
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool
    is_bumped: bool  # the epoch is one above that of the transaction's records (KIP-890)
    leader_epoch: int = -1  # T3; -1 = any


def remote_leader_id(broker: BrokerState, topic: str, index: int) -> int:
    """The node id of the other host that leads the partition; -1: this host or no host leads it."""
    image = broker.partition_of(topic, index)
    return image.leader if image is not None and image.leader != broker.node_id else -1


class RemoteMarkers:
    """Sends markers to other hosts. Markers for one host that are submitted in the same turn of the
    event loop share requests.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._queued: dict[int, list[tuple[MarkerToWrite, asyncio.Future[object]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def write(self, node_id: int, marker: MarkerToWrite) -> "asyncio.Future[object]":
        """Returns a future that completes when the marker is below the high watermark, or fails with
        AppendError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        if not self._queued:
            loop.call_soon(self._flush)
        self._queued.setdefault(node_id, []).append((marker, future))
        return future

    def _flush(self) -> None:
        queued, self._queued = self._queued, {}
        for node_id, markers in queued.items():
            for first in range(0, len(markers), MARKERS_PER_REQUEST):
                task = asyncio.get_running_loop().create_task(
                    self._send(node_id, markers[first : first + MARKERS_PER_REQUEST])
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, node_id: int, markers: list[tuple[MarkerToWrite, "asyncio.Future[object]"]]) -> None:
        """Completes every marker's future, whatever happens: nothing else does."""
        errors = [int(ErrorCode.COORDINATOR_NOT_AVAILABLE)] * len(markers)
        try:
            request = WriteTxnMarkersRequest(markers=[_requested_marker(marker) for marker, _ in markers])
            response = await self._peers.request(node_id, request, MARKERS_VERSION, TIMEOUT_S)
            assert isinstance(response, WriteTxnMarkersResponse)
            results = [result.topics[0].partitions[0].error_code for result in response.markers]
            if len(results) != len(markers):
                raise PeerError(f"{len(results)} results for {len(markers)} markers")
            errors = results
        except (PeerError, IndexError) as error:
            log.info(
                "transaction markers could not be sent to another host; they are retried",
                node=node_id,
                markers=len(markers),
                reason=str(error),
            )
        except Exception:
            log.exception(
                "transaction markers could not be sent to another host; they are retried",
                node=node_id,
                markers=len(markers),
            )
        for (_, future), code in zip(markers, errors, strict=True):
            if future.done():
                continue
            if code:
                future.set_exception(AppendError(code, is_outcome_unknown=True))
            else:
                future.set_result(None)


def _requested_marker(marker: MarkerToWrite) -> WriteTxnMarkersRequest.Marker:
    return WriteTxnMarkersRequest.Marker(
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        transaction_result=marker.is_commit,
        topics=[WriteTxnMarkersRequest.Topic(name=marker.partition[0], partition_indexes=[marker.partition[1]])],
        coordinator_epoch=marker.coordinator_epoch,
        transaction_version=TRANSACTIONS_V2 if marker.is_bumped else 0,
        leader_epoch=marker.leader_epoch,
    )


class RoutedCoordinator:
    """Implements checks.Requests: requests go to the transactional id's coordinator, on any host."""

    def __init__(self, broker: BrokerState, local: Coordinator, peers: Peers) -> None:
        self._broker = broker
        self._local = local
        self._peers = peers

    async def request(self, name: str, make_event: Callable[[int], object], timeout_s: float | None = None) -> object:
        """Returns the response of the core. Raises CoordinatorError."""
        node_id = remote_leader_id(self._broker, self._local.topic, self._local.partition_for(name))
        if node_id < 0:
            return await self._local.request(name, make_event, timeout_s)
        event = make_event(0)
        if not isinstance(event, AddPartitions | VerifyPartitions):
            raise CoordinatorError(ErrorCode.NOT_COORDINATOR)
        verify_only = isinstance(event, VerifyPartitions)
        transaction = AddPartitionsToTxnRequest.Transaction(
            transactional_id=name,
            producer_id=event.producer_id,
            producer_epoch=event.producer_epoch,
            verify_only=verify_only,
            topics=_topics(event.partitions),
        )
        try:
            response = await self._peers.request(
                node_id, AddPartitionsToTxnRequest(transactions=[transaction]), ADD_VERSION, timeout_s or TIMEOUT_S
            )
        except PeerError as error:
            log.info("a transaction's coordinator on another host cannot be reached", node=node_id, reason=str(error))
            raise CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        assert isinstance(response, AddPartitionsToTxnResponse)
        results = {
            (topic.name, part.partition_index): part.partition_error_code
            for result in response.results_by_transaction
            for topic in result.topic_results
            for part in topic.results_by_partition
        }
        default_error = response.error_code or int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        errors = tuple(results.get(partition, default_error) for partition in event.partitions)
        return errors if verify_only else next((error for error in errors if error), 0)


def _topics(partitions: Iterable[Partition]) -> list[AddPartitionsToTxnRequest.Topic]:
    by_name: dict[str, list[int]] = {}
    for name, index in partitions:
        by_name.setdefault(name, []).append(index)
    return [AddPartitionsToTxnRequest.Topic(name=name, partitions=indexes) for name, indexes in by_name.items()]


class RemoteTransaction(NamedTuple):
    """What coordinators on other hosts know about an unfinished transaction of a producer. `error`:
    0 if no coordinator knows one; COORDINATOR_NOT_AVAILABLE if a coordinator cannot be reached;
    CONCURRENT_TRANSACTIONS if there is one. If the transaction is ongoing, `node_id` is its
    coordinator's host and `transactional_id` its id; both have their defaults if it is already ending.
    """

    error: int
    node_id: int = -1
    transactional_id: str = ""


async def find_remote_transaction(broker: BrokerState, peers: Peers, producer_id: int) -> RemoteTransaction:
    """Asks the coordinators on all other hosts for an unfinished transaction of this producer."""
    others = [node for node in broker.metadata.brokers if node != broker.node_id and broker.metadata.is_alive(node)]
    request = ListTransactionsRequest(state_filters=[], producer_id_filters=[producer_id], duration_filter=-1)
    responses = await asyncio.gather(
        *(peers.request(node, request, LIST_VERSION, TIMEOUT_S) for node in others), return_exceptions=True
    )
    for node, response in zip(others, responses, strict=True):
        if not isinstance(response, ListTransactionsResponse) or response.error_code:
            return RemoteTransaction(int(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        for state in response.transaction_states:
            if state.transaction_state in UNFINISHED:
                return RemoteTransaction(
                    int(ErrorCode.CONCURRENT_TRANSACTIONS),
                    *((node, state.transactional_id) if state.transaction_state == ONGOING else ()),
                )
    return RemoteTransaction(0)


async def abort_remote_transaction(
    peers: Peers, transaction: RemoteTransaction, producer_id: int, epoch_max: int
) -> int:
    """Asks the transaction's coordinator to abort it everywhere and to fence its producer, if the
    producer's epoch is not above `epoch_max`. Returns an error code, once the markers are written.
    """
    request = EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=producer_id,
        producer_epoch=epoch_max,
        committed=False,
    )
    try:
        response = await peers.request(transaction.node_id, request, END_VERSION, TIMEOUT_S)
    except PeerError as error:
        log.info(
            "a transaction's coordinator on another host has not aborted it",
            node=transaction.node_id,
            reason=str(error),
        )
        return int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert isinstance(response, EndTxnResponse)
    return response.error_code
