"""Assembles the transaction coordinator of this broker: cores, markers, the responses to CHECK, and
producer ids for cores that need one.

Handlers use `context.broker.transactions`; it is None if there is no Link to the workers.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from mqd.acceptor.broker_state import BrokerState
from mqd.acceptor.coordinators import Coordinators
from mqd.acceptor.interbroker.client import Peers
from mqd.acceptor.interbroker.transactions import MarkerToWrite, RemoteMarkers, RoutedCoordinator
from mqd.acceptor.producer_ids import allocate
from mqd.base import logging
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import LogAppender, Marker, Sender
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from mqd.coordinator.transaction import checks
from mqd.coordinator.transaction.cores import TransactionCoreFactory
from mqd.coordinator.transaction.events import NEED_PRODUCER_ID, Identity, JointResponse
from mqd.coordinator.transaction.markers import Markers, OffsetCommits
from mqd.coordinator.transaction.state import Settings
from mqd.native import ProducerView
from mqd.protocol.errors import ErrorCode
from mqd.protocol.redirected import redirected_producer_id

REQUEST_TIMEOUT_S = 10.0
CHECK_PARTITION_COUNT_MAX = 1 << 16

# struct mqd_check_transaction and struct mqd_check_partition (native/native.h)
_CHECK = struct.Struct("=qhhhHIi")
_CHECK_PARTITION = struct.Struct("=16siI")

log = logging.get("acceptor.transactions")


def settings(broker: BrokerState) -> Settings:
    return Settings(
        max_timeout_ms=broker.broker_number("transaction.max.timeout.ms"),
        expiration_ms=broker.broker_number("transactional.id.expiration.ms"),
    )


class Owners(Sender, Protocol):
    """The link to the owners of partitions."""

    async def producers(self, owner: int, slot: int) -> tuple[int, list[ProducerView]]: ...


class TransactionService:
    """Created before the Coordinators, which take `cores` and `carry_out`; attach() connects them."""

    def __init__(self, broker: BrokerState, owners: Owners) -> None:
        self._broker = broker
        self.owners = owners
        self.cores = TransactionCoreFactory(settings(broker))
        self.offset_commits = OffsetCommits()
        self.markers = Markers(self.append_marker, broker.metadata.may_exist, self.offset_commits)
        self.carry_out = self.markers.carry_out
        self.peers: Peers | None = None  # set before the first request if there are other hosts
        self._remote_markers: RemoteMarkers | None = None
        self._routed: RoutedCoordinator | None = None
        self._log: LogAppender | None = None
        self._groups: Coordinator | None = None
        self._coordinator: Coordinator | None = None
        self._now_ms: Callable[[], int] = lambda: 0
        self._tasks: set[asyncio.Task[object]] = set()

    def attach(
        self, coordinator: Coordinator, groups: Coordinator, append_log: LogAppender, now_ms: Callable[[], int]
    ) -> None:
        self._coordinator, self._groups, self._log, self._now_ms = coordinator, groups, append_log, now_ms
        self.markers.attach(coordinator)

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator is not None
        return self._coordinator

    def connect(self, peers: Peers) -> None:
        """Connects to the other hosts, which also lead partitions and coordinate transactions."""
        self.peers, self._remote_markers, self._routed = (
            peers,
            RemoteMarkers(peers),
            RoutedCoordinator(self._broker, self.coordinator, peers),
        )

    @property
    def routed(self) -> "Coordinator | RoutedCoordinator":
        """The coordinator that knows whether partitions are in a transaction."""
        return self._routed if self._routed is not None else self.coordinator

    @property
    def groups(self) -> Coordinator:
        assert self._groups is not None
        return self._groups

    def now_ms(self) -> int:
        return self._now_ms()

    # -- requests ----------------------------------------------------------------------------------

    async def request(self, transactional_id: str, make_event: Callable[[int], object]) -> Any:
        """Returns the core's response. Raises CoordinatorError."""
        return await self.coordinator.request(transactional_id, make_event, REQUEST_TIMEOUT_S)

    async def request_returning_identity(
        self, transactional_id: str, make_event: Callable[[int, int], object]
    ) -> Identity:
        """`make_event(request number, spare producer id)` is called with the id -1 first, and again
        with a new id if the core needs one. The coordinator's errors are in the response.
        """
        try:
            response = await self._request_with_spare_id(transactional_id, make_event)
        except CoordinatorError as error:
            return Identity(error.error_code)
        assert isinstance(response, Identity)
        return response

    async def request_joint(self, transactional_id: str, make_event: Callable[[int, int], object]) -> JointResponse:
        """Like request_returning_identity(), for joint transactions."""
        try:
            response = await self._request_with_spare_id(transactional_id, make_event)
        except CoordinatorError as error:
            return JointResponse(error.error_code)
        if isinstance(response, Identity):  # no producer id is available
            return JointResponse(response.error)
        assert isinstance(response, JointResponse)
        return response

    async def _request_with_spare_id(self, transactional_id: str, make_event: Callable[[int, int], object]) -> object:
        """Raises CoordinatorError."""
        response = await self.request(transactional_id, lambda number: make_event(number, -1))
        if getattr(response, "error", 0) != NEED_PRODUCER_ID:
            return response
        spare_producer_id, error = await allocate(self._broker)
        if error:
            return Identity(error)
        return await self.request(transactional_id, lambda number: make_event(number, spare_producer_id))

    def coordinator_epoch_max(self) -> int:
        """The highest leader epoch of the partitions of __transaction_state: an upper bound of
        coordinator epochs.
        """
        topic = self._broker.metadata.topics.get(TRANSACTIONS_TOPIC)
        return max((partition.leader_epoch for partition in topic.partitions), default=-1) if topic is not None else -1

    # -- markers -----------------------------------------------------------------------------------

    def append_marker(
        self,
        topic: str,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        is_bumped: bool = False,
    ) -> "asyncio.Future[object]":
        successor = self._broker.metadata.successor_of(topic, partition)
        if successor >= 0:  # the transaction's records, if it has any, were moved there
            producer_id, partition = redirected_producer_id(producer_id, partition), successor
        image = self._broker.partition_of(topic, partition)
        if self._remote_markers is not None and image is not None and image.leader not in (-1, self._broker.node_id):
            return self._remote_markers.write(
                image.leader,
                MarkerToWrite(
                    (topic, partition),
                    producer_id,
                    producer_epoch,
                    coordinator_epoch,
                    commit,
                    is_bumped,
                    image.leader_epoch,
                ),
            )
        return self.append_marker_here(
            topic, partition, producer_id, producer_epoch, coordinator_epoch, commit, is_bumped
        )

    def append_marker_here(
        self,
        topic: str,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        is_bumped: bool = False,
        leader_epoch: int = -1,
    ) -> "asyncio.Future[Any]":
        """Appends a marker to a partition. Fails unless this host leads it, in `leader_epoch` (-1 =
        any).
        """
        assert self._log is not None
        if topic == OFFSETS_TOPIC:
            writing = self.groups.write_marker(
                partition, producer_id, producer_epoch, coordinator_epoch, commit, is_bumped, leader_epoch
            )
            task = asyncio.get_running_loop().create_task(writing)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task
        marker = Marker(
            topic, partition, producer_id, producer_epoch, coordinator_epoch, commit, self._now_ms(), is_bumped
        )
        return self._log.append_marker_nowait(marker, leader_epoch)

    # -- CHECK -------------------------------------------------------------------------------------

    async def check(self, payload: bytes) -> list[int] | int:
        """Handles the payload of a CHECK (MQD_CHECK_TRANSACTION). Returns an error code for each
        partition, or one code for all. Raises only CancelledError.
        """
        try:
            producer_id, epoch, version, _acks, id_bytes, count, _timeout_ms = _CHECK.unpack_from(payload)
            end = _CHECK.size + count * _CHECK_PARTITION.size
            if count > CHECK_PARTITION_COUNT_MAX or end + id_bytes > len(payload):
                raise ValueError(f"{count} partitions and an id of {id_bytes} bytes in {len(payload)} bytes")
            transactional_id = payload[end : end + id_bytes].decode()
            requested = list(_CHECK_PARTITION.iter_unpack(payload[_CHECK.size : end]))
        except (struct.error, ValueError) as error:
            log.error("a check of a transaction cannot be read", reason=str(error))
            return int(ErrorCode.INVALID_REQUEST)
        names = self._broker.metadata.names
        partitions = [(names[topic_id], index) if topic_id in names else None for topic_id, index, _slot in requested]
        must_verify = bool(self._broker.broker_value("transaction.partition.verification.enable"))
        return await checks.check_produce(
            self.routed, transactional_id, producer_id, epoch, version, partitions, must_verify
        )


def create_coordinators(
    broker: BrokerState, owners: Owners, generation: int
) -> tuple[Coordinators, TransactionService]:
    """Creates the coordinators of this broker and their transaction service; they are not started
    yet.
    """
    service = TransactionService(broker, owners)
    coordinators = Coordinators(broker, owners, generation, service.cores, service.carry_out)
    assert coordinators.transactions is not None
    service.attach(coordinators.transactions, coordinators.groups, coordinators.log, coordinators.clock.now_ms)
    return coordinators, service
