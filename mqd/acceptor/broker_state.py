"""State shared by the handlers: configuration, metadata, the connection to the controller, the
partition table, and the addresses at which clients reach this broker.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from mqd import native
from mqd.acceptor.authentication import Authentication, NoUsers
from mqd.acceptor.disks import Disks
from mqd.acceptor.flushes import Flushes
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.tokens import Tokens
from mqd.acceptor.tokens import from_config as tokens_from_config
from mqd.base import config as configuration
from mqd.base import listeners as client_listeners
from mqd.base import logging
from mqd.base.blocking_queries import BlockingQueries
from mqd.base.tasks import Turn
from mqd.cluster.host import messages
from mqd.log.directories import partition_path
from mqd.native import NativeError, SlotRole, SlotState, SlotView
from mqd.protocol.errors import ErrorCode
from mqd.security import authorizer
from mqd.security.audit import Audit
from mqd.security.principal import ANONYMOUS

OWNER_NONE = 65535
LISTENER_LOCAL = 0xFFFF  # MQD_LISTENER_LOCAL
INT64_MAX = (1 << 63) - 1

log = logging.get("acceptor.requests")


class PartitionTable(Protocol):
    """The part of native.Control that handlers need."""

    @property
    def metadata_version(self) -> int: ...

    @property
    def lease_deadline_ns(self) -> int: ...

    log_level: int  # a syslog level, for all processes of the broker

    def slot_view(self, slot: int) -> SlotView: ...

    def endpoint_generation(self, endpoint: int) -> int: ...

    def request_flush_notice(self, slot: int) -> None: ...


class Quotas(Protocol):
    """The part of native.Quotas that requests need."""

    def refresh(self) -> int: ...

    def charge(self, user: bytes, client_id: bytes, kind: int, units: int, now_ns: int) -> int: ...


class NoQuotas:
    """Used without a control segment."""

    def refresh(self) -> int:
        return 0

    def charge(self, user: bytes, client_id: bytes, kind: int, units: int, now_ns: int) -> int:
        return 0


class Controller(Protocol):
    async def request(
        self, change: messages.Change, timeout_ms: int, validate_only: bool = False
    ) -> messages.Response: ...


class Origin:
    """Where a request comes from: the client's connection and identity. The listener decides which
    broker address is returned to the client; a client attached through shared memory gets that of
    the first listener.
    """

    __slots__ = (
        "listener_id",
        "local_ip",
        "local_port",
        "peer_ip",
        "reported_ip",
        "uid",
        "pid",
        "peer_node",
        "principal",
        "principal_kind",
        "connection",
        "is_host",
    )

    def __init__(
        self,
        listener_id: int = 0,
        local_ip: str = "",
        local_port: int = 0,
        peer_ip: str = "",
        reported_ip: str = "",
        uid: int = -1,
        pid: int = 0,
        peer_node: int = -1,
        principal: str = ANONYMOUS,
        principal_kind: int = native.PrincipalKind.ANONYMOUS,
        connection: tuple[int, int] = (0, 0),
        is_host: bool = False,
    ) -> None:
        self.listener_id, self.local_ip, self.local_port = listener_id, local_ip, local_port
        self.peer_ip = peer_ip  # the client's address, used for access checks; "": there is no client
        # the client's address as shown to others: peer_ip, but for a request that another host forwards
        # for one of its local clients, that host's address
        self.reported_ip = reported_ip or peer_ip
        self.uid, self.pid = uid, pid  # a local client's, from the kernel; -1 and 0: not known
        self.peer_node = peer_node  # node id of an authenticated host of the cluster; -1 = a client
        self.principal = principal  # "User:alice"; ANONYMOUS where the listener does not authenticate
        self.principal_kind = principal_kind  # how the principal was authenticated
        # (generation of the worker's process, connection id): identifies the connection as long as
        # it is open; (0, 0): none
        self.connection = connection
        # True: a host of the cluster, which produces like a client to write dead letters of its share
        # groups
        self.is_host = is_host

    @property
    def is_trusted(self) -> bool:
        """Whether the peer has all rights and no quota."""
        return self.peer_node >= 0 or self.is_host

    @property
    def user(self) -> str:
        """The principal's name without its type: the user to which quotas apply (KIP-55)."""
        return self.principal.partition(":")[2]


class ProducerIds:
    """Half-open range of producer ids that this process may assign."""

    def __init__(self) -> None:
        self.next = self.end = 0
        # the request for more ids; its result is an error code
        self.request: asyncio.Task[int] | None = None


class BrokerState:
    """`listeners`: (name, host, port) as bound, by listener id."""

    def __init__(
        self,
        config: Mapping[str, str],
        listeners: list[tuple[str, str, int]],
        metadata: Metadata,
        controller: Controller,
        table: PartitionTable,
    ) -> None:
        self.config = dict(config)
        self.node_id = int(config["node.id"])
        self.metadata = metadata
        self.controller = controller
        self.table = table
        self.log_dirs = [Path(path) for path in config.get("log.dirs", "").split(",") if path]
        self.producer_ids = ProducerIds()
        self.listeners = listeners
        self._advertised = client_listeners.advertised_listeners(config)
        self.disks = Disks(self.log_dirs)
        self.directory_queries = BlockingQueries()
        self.flushes = Flushes(table)
        self.turn = Turn()  # opened by the link while it handles the messages that have arrived
        self.quotas: Quotas = NoQuotas()
        self.tokens: Tokens = tokens_from_config(config, metadata)
        self.authentication = Authentication((), NoUsers(), b"", 0)
        # None: everything is allowed
        self.authorizer = authorizer.from_config(config)
        if self.authorizer is not None:
            metadata.rules = self.authorizer  # updated with the metadata
        self.denials_only_logged = bool(configuration.broker_value(config, "authorizer.log.only"))
        self.audit = Audit()

    @property
    def port(self) -> int:
        """Port of the first listener."""
        return self.listeners[0][2]

    # -- addresses ---------------------------------------------------------------------------------

    def advertised_address(self, origin: Origin) -> tuple[str, int]:
        """The advertised.listeners entry for the client's listener, if any; otherwise the address
        that the client itself reached.
        """
        name, host, port = self._listener(origin)
        advertised = self._advertised.get(name)
        if advertised is not None:
            return advertised.host, advertised.port
        if origin.local_ip:
            return origin.local_ip, origin.local_port or port
        return (host if host not in ("", "0.0.0.0", "::") else "localhost"), origin.local_port or port

    def listener_name(self, origin: Origin) -> str:
        return self._listener(origin)[0]

    def _listener(self, origin: Origin) -> tuple[str, str, int]:
        """Name, host and port of the client's listener; a local client gets those of the first
        one."""
        return self.listeners[origin.listener_id] if origin.listener_id < len(self.listeners) else self.listeners[0]

    def _endpoint_at(self, broker: messages.BrokerImage, origin: Origin) -> tuple[str, int] | None:
        """The address of this client's listener on another host; None: that host has no such listener."""
        if not broker.endpoints:
            return broker.host, broker.port
        return broker.endpoints.get(self._listener(origin)[0])

    def brokers(self, origin: Origin) -> list[tuple[int, str, int, str | None]]:
        """(node id, host, port, rack) of every unfenced broker that this client can reach; always
        includes this broker.
        """
        host, port = self.advertised_address(origin)
        others = [
            (broker.node_id, *endpoint, broker.rack)
            for broker in self.metadata.brokers.values()
            if broker.node_id != self.node_id
            and not broker.fenced
            and (endpoint := self._endpoint_at(broker, origin)) is not None
        ]
        return sorted([*others, (self.node_id, host, port, self.config.get("broker.rack"))])

    def endpoint(self, node_id: int, origin: Origin) -> tuple[str, int] | None:
        """The address at which this client reaches that broker; None: it cannot at the moment."""
        if node_id == self.node_id:
            return self.advertised_address(origin)
        broker = self.metadata.brokers.get(node_id)
        return self._endpoint_at(broker, origin) if broker is not None and not broker.fenced else None

    # -- configuration -----------------------------------------------------------------------------

    def broker_value(self, name: str) -> configuration.Value | None:
        return configuration.broker_value(self.effective_config(), name)

    def broker_number(self, name: str) -> int:
        return configuration.broker_number(self.effective_config(), name)

    def effective_config(self) -> dict[str, str]:
        return configuration.broker_effective(self.config, self.metadata.broker_config)

    # -- partitions --------------------------------------------------------------------------------

    def may_lead(self) -> bool:
        """Whether this host has its lease: without it, another host may already lead its partitions."""
        deadline_ns = self.table.lease_deadline_ns
        return deadline_ns == INT64_MAX or time.clock_gettime_ns(time.CLOCK_BOOTTIME) < deadline_ns

    def view(self, partition: messages.PartitionImage) -> SlotView | None:
        """The owner's published state of a partition that this host leads. None while another host
        leads it, or it is not served (its log is being opened, its directory is offline, its owner
        has not taken over the leadership yet), or this host has lost its lease.
        """
        view = self.replica_view(partition) if partition.leader == self.node_id else None
        return view if view is not None and view.role == SlotRole.LEADS and self.may_lead() else None

    async def await_flushed(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Waits, for at most flushes.WAIT_S, until this host has flushed all records that these
        partitions (topic, index) had at the time of the call. Does not wait for topics without
        flush.on.ack. Offset lookups call this before view(), so that a client finds all records
        acknowledged before its request.
        """
        images = [
            image
            for name, index in partitions
            if (image := self.partition_of(name, index)) is not None and self.view(image) is not None
        ]
        await self.flushes.wait(image.slot for image in images)

    def replica_view(self, partition: messages.PartitionImage) -> SlotView | None:
        """The state of this host's replica in any role. None if there is none, or it is not served."""
        if partition.owner == OWNER_NONE:
            return None
        try:
            view = self.table.slot_view(partition.slot)
        except NativeError:
            return None  # the controller died while writing this slot; its successor repairs it
        if view.state != SlotState.ONLINE or view.partition_index != partition.index:
            return None
        return view

    def partition_of(self, name: str, index: int) -> messages.PartitionImage | None:
        topic = self.metadata.topics.get(name)
        return topic.partitions[index] if topic is not None and 0 <= index < len(topic.partitions) else None

    def unserved_error(self, partition: messages.PartitionImage) -> int:
        """The error code for a partition whose view() is None; always retriable."""
        if partition.leader not in (-1, self.node_id) or not self.may_lead():
            return int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return int(ErrorCode.KAFKA_STORAGE_ERROR if partition.owner == OWNER_NONE else ErrorCode.LEADER_NOT_AVAILABLE)

    def path_of(self, topic: str, partition: messages.PartitionImage) -> Path:
        return partition_path(self.log_dirs[partition.log_dir], self.metadata.log_topic_of(topic), partition.index)
