"""Connections to the workers of other hosts that lead partitions followed here: determines which
connections are wanted, opens and authenticates them, passes them to the reactor, and reopens them
when they end.

    catalog's assignments -> target_routes(), spare_routes() -> one task for each route:
        connect -> handshake (purpose "data", naming the leader's worker) -> the reactor fetches
        MQD_EVENT_FETCHER_ENDED -> back-off -> connect
        another address or epoch of the leader -> connect immediately

A route is a worker of a leader's host in one lane. In-sync replicas, replicas that catch up, and
throttled ones use different connections, so that no lane delays a more urgent one. Routes to other
hosts that may become leaders of partitions replicated here are opened in advance: after a failover
the new leader's acknowledgements wait for its followers, which would otherwise have to connect
first. There is at most one such spare route for each worker of each other host; it is idle until
needed.

The fetching and the processing of responses are native (native/server/replication/fetcher.h).

Concurrency: the event loop's thread.
"""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from mqd import native
from mqd.base import logging
from mqd.base.config import broker_number
from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import BrokerImage
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import HandshakeFailed, Identity
from mqd.worker.assignments import Assignment, ClusterView
from mqd.worker.catalog import Key
from mqd.worker.commands import ReactorCommands
from mqd.worker.host_connections import DialledConnection, dial

CONNECT_S_MAX = 3.0
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 1.0
STABLE_S = 5.0  # a connection that lasted this long resets the back-off
IN_SYNC, CATCH_UP, THROTTLED = range(3)  # enum mqd_fetcher_lane
_ENDED_MAX = 1024
_NOT_REGISTERED = "this host is not registered"


class Route(msgspec.Struct, frozen=True, order=True):
    leader: int  # node id
    leader_worker: int
    lane: int


class Target(msgspec.Struct, frozen=True):
    """Where a route leads. Another epoch means that the host was restarted: its old connections are
    useless, whether they have ended or not.
    """

    host: str
    port: int
    epoch: int


def lane_of(assignment: Assignment) -> int:
    if any(member.node_id == assignment.node_id and member.in_sync for member in assignment.members):
        return IN_SYNC
    return THROTTLED if assignment.throttled else CATCH_UP


def target_routes(assigned: Mapping[Key, Assignment], brokers: Mapping[int, BrokerImage]) -> dict[Route, Target]:
    """Routes to registered leaders with an inter-broker address."""
    targets: dict[Route, Target] = {}
    for assignment in assigned.values():
        leader = brokers.get(assignment.leader)
        is_replica = any(member.node_id == assignment.node_id for member in assignment.members)
        if assignment.leader == assignment.node_id or not is_replica or leader is None or not leader.inter_broker_host:
            continue
        route = Route(assignment.leader, assignment.leader_worker, lane_of(assignment))
        targets[route] = Target(leader.inter_broker_host, leader.inter_broker_port, leader.epoch)
    return targets


def spare_routes(assigned: Mapping[Key, Assignment], brokers: Mapping[int, BrokerImage]) -> dict[Route, Target]:
    """Routes to the next possible leaders: in-sync replicas on other hosts, with the worker that
    will own the partition there.
    """
    spare: dict[Route, Target] = {}
    for (topic_id, index), assignment in assigned.items():
        in_sync = [member.node_id for member in assignment.members if member.in_sync]
        if len(in_sync) < 2 or assignment.node_id not in in_sync:
            continue
        for node in in_sync:
            broker = brokers.get(node)
            if (
                node not in (assignment.node_id, assignment.leader)
                and broker is not None
                and broker.inter_broker_host
                and broker.worker_count > 0
            ):
                spare[Route(node, owner_of(topic_id, index, broker.worker_count), IN_SYNC)] = Target(
                    broker.inter_broker_host, broker.inter_broker_port, broker.epoch
                )
    return spare


class _Connection:
    """A wanted route: its task, and the means to notify it of changes."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.changed = asyncio.Event()  # a new target, or the reactor's connection has ended
        self.token = 0  # of the reactor's connection; 0 = none
        self.task: asyncio.Task[None] | None = None


class Replication:
    """`assigned`: the catalog's assignments, read at each update()."""

    def __init__(
        self,
        reactor: native.Reactor,
        commands: ReactorCommands,
        assigned: Mapping[Key, Assignment],
        config: Mapping[str, str],
        credentials: Credentials,
    ) -> None:
        self._reactor = reactor
        self._commands = commands
        self._assigned = assigned
        self._config = config
        self._credentials = credentials
        self._identity: Identity | None = None
        self._connections: dict[Route, _Connection] = {}
        self._ended: dict[int, str] = {}  # token -> reason, of connections that ended before their token was known
        self._bytes_per_second = 0
        self._command_tasks: set[asyncio.Task[None]] = set()
        self._log = logging.get("worker.replication")

    # -- wanted routes ------------------------------------------------------------------------------

    def update(self, cluster: ClusterView, cluster_id: str, dynamic_config: Mapping[str, str]) -> None:
        """Called after every change of metadata."""
        own_broker = cluster.brokers.get(cluster.node_id)
        self._identity = (
            Identity(cluster.node_id, own_broker.directory_id, cluster_id)
            if own_broker is not None and cluster_id
            else None
        )
        targets = (
            {**spare_routes(self._assigned, cluster.brokers), **target_routes(self._assigned, cluster.brokers)}
            if self._assigned
            else {}
        )
        for route in [route for route in self._connections if route not in targets]:
            self._drop(route)
        for route, target in targets.items():
            connection = self._connections.get(route)
            if connection is None:
                connection = self._connections[route] = _Connection(target)
                connection.task = asyncio.get_running_loop().create_task(self._maintain_connection(route, connection))
            elif connection.target != target:
                connection.target = target
                connection.changed.set()
        self._throttle(dynamic_config, own_broker.worker_count if own_broker is not None else 1)

    def _throttle(self, dynamic_config: Mapping[str, str], worker_count: int) -> None:
        """Sets this worker's share of the configured rate. All workers have equal shares: they have
        no common budget, and partitions are distributed over them.
        """
        rate = broker_number({**self._config, **dynamic_config}, "follower.replication.throttled.rate")
        rate = 0 if rate >= 1 << 62 else max(1, rate // max(1, worker_count))
        if rate != self._bytes_per_second:
            self._bytes_per_second = rate
            self._start_task(self._run(self._reactor.set_fetcher_rate, rate))

    def _drop(self, route: Route) -> None:
        connection = self._connections.pop(route)
        assert connection.task is not None
        connection.task.cancel()
        self._start_task(self._run(self._reactor.fetcher_remove, route.leader, route.leader_worker, route.lane))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._command_tasks.add(task)
        task.add_done_callback(self._command_tasks.discard)

    async def _run(self, command: Any, *arguments: Any) -> None:
        try:
            await self._commands.run(command, *arguments)
        except native.NativeError as error:
            self._log.warning("reactor refused a command about a connection to another host", reason=str(error))

    def on_ended(self, event: native.Event) -> None:
        """Handles MQD_EVENT_FETCHER_ENDED."""
        for route, connection in self._connections.items():
            if connection.token == event.token:
                connection.token = 0
                connection.changed.set()
                self._log.info(
                    "connection to a leader ended", leader=route.leader, worker=route.leader_worker, reason=event.text
                )
                return
        self._ended[event.token] = event.text
        while len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        tasks = [connection.task for connection in self._connections.values() if connection.task is not None]
        self._connections.clear()
        for task in [*tasks, *self._command_tasks]:
            task.cancel()
        await asyncio.gather(*tasks, *self._command_tasks, return_exceptions=True)

    # -- one route ----------------------------------------------------------------------------------

    async def _maintain_connection(self, route: Route, connection: _Connection) -> None:
        """Keeps the route connected, until cancelled."""
        backoff_s, reason, loop = BACKOFF_S_MIN, "", asyncio.get_running_loop()
        while True:
            connection.changed.clear()
            target, began_s = connection.target, loop.time()
            try:
                await self._pass_to_reactor(route, connection, await self._connect(route, target))
                reason = ""
                await connection.changed.wait()
            except (OSError, EOFError, HandshakeFailed, native.NativeError) as error:
                text = str(error) or type(error).__name__
                if text != reason:
                    self._log.info(
                        "leader cannot be reached; retrying",
                        leader=route.leader,
                        worker=route.leader_worker,
                        reason=text,
                    )
                reason = text
            except Exception as error:  # not even a bug may leave the replica without a connection
                if repr(error) != reason:
                    self._log.exception(
                        "leader cannot be reached; retrying", leader=route.leader, worker=route.leader_worker
                    )
                reason = repr(error)
            if connection.target != target:
                # a new epoch or address: reconnect immediately; the new connection replaces the old
                # one
                continue
            backoff_s = BACKOFF_S_MIN if loop.time() - began_s > STABLE_S else min(backoff_s * 2, BACKOFF_S_MAX)
            connection.changed.clear()
            with contextlib.suppress(TimeoutError):
                # wait_for would lose a cancellation that arrives together with the event
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):
                    await connection.changed.wait()

    async def _connect(self, route: Route, target: Target) -> DialledConnection:
        """Raises OSError (including TimeoutError), EOFError, HandshakeFailed."""
        if self._identity is None:
            raise OSError(_NOT_REGISTERED)
        return await dial(
            self._credentials,
            self._identity,
            target.host,
            target.port,
            route.leader,
            route.leader_worker,
            CONNECT_S_MAX,
        )

    async def _pass_to_reactor(self, route: Route, connection: _Connection, dialled: DialledConnection) -> None:
        connection.token = 0
        if self._identity is None:  # this host's registration has ended since the dial
            dialled.socket.close()
            raise OSError(_NOT_REGISTERED)
        # built before detach(): from then on only the reactor owns the connection
        options = self._options(route, self._identity.node_id, dialled.tls)
        event = await self._commands.run(self._reactor.fetcher_put, dialled.socket.detach(), options)
        if event.token in self._ended:
            raise OSError(self._ended.pop(event.token))
        connection.token = event.token

    def _options(self, route: Route, node_id: int, tls: bool) -> native.FetcherOptions:
        response_bytes = _number(self._config, "replica.fetch.response.max.bytes")
        return native.FetcherOptions(
            leader_node=route.leader,
            leader_worker=route.leader_worker,
            lane=route.lane,
            node_id=node_id,
            wait_ms=_number(self._config, "replica.fetch.wait.max.ms"),
            response_bytes_max=response_bytes,
            response_bytes_limit=min(response_bytes + _number(self._config, "socket.request.max.bytes"), 1 << 30),
            partition_bytes_max=_number(self._config, "replica.fetch.max.bytes"),
            timeout_ms=_number(self._config, "replica.socket.timeout.ms"),
            backoff_ms=_number(self._config, "replica.fetch.backoff.ms"),
            bytes_per_second_max=self._bytes_per_second,
            tls=tls,
        )


def _number(config: Mapping[str, str], name: str) -> int:
    return broker_number(config, name)
