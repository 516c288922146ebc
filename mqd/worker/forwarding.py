"""Connections that forward the batches of local clients to leaders on other hosts: opened when the
reactor requests one, authenticated, and passed to it; refused when the host cannot be reached.

    MQD_EVENT_RELAY_REQUESTED -> dial, then
        mqd_reactor_relay_put      the reactor has the connection until MQD_EVENT_RELAY_ENDED; it
                                   requests another when there is something to send
        mqd_reactor_relay_refuse   during the back-off, batches are refused immediately; their
                                   clients retry, perhaps when there is another leader

Their traffic and their closing are handled natively (native/server/relay/relay.h). No connection is
opened without data to send.

Bounds: one connection attempt at a time for each (host, worker, lane).
Concurrency: the event loop's thread.
"""

import asyncio
import random
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from mqd import native
from mqd.base import logging
from mqd.base.config import broker_number
from mqd.cluster.membership.credentials import Credentials
from mqd.cluster.membership.handshake import HandshakeFailed, Identity
from mqd.worker.assignments import ClusterView
from mqd.worker.commands import ReactorCommands
from mqd.worker.host_connections import dial

CONNECT_S_MAX = 1.0  # clients wait during this time
BACKOFF_MS_MIN, BACKOFF_MS_MAX = 50, 1000


class Route(msgspec.Struct, frozen=True, order=True):
    leader: int  # node id
    leader_worker: int
    lane: int  # enum mqd_relay_lane


class Forwarding:
    def __init__(
        self, reactor: native.Reactor, commands: ReactorCommands, config: Mapping[str, str], credentials: Credentials
    ) -> None:
        self._reactor = reactor
        self._commands = commands
        self._timeout_ms = broker_number(config, "replica.socket.timeout.ms")
        self._credentials = credentials
        self._identity: Identity | None = None
        self._cluster = ClusterView()
        # node id -> epoch and address of the incarnation that the reactor has connections to
        self._incarnations: dict[int, tuple[int, str, int]] = {}
        self._dialling: dict[Route, asyncio.Task[None]] = {}
        # The subset of _dialling whose result has been passed to the reactor, which may request the
        # next connection before the task has ended.
        self._resolved: set[Route] = set()
        self._requested_again: set[Route] = set()  # those of _resolved that the reactor has requested again
        self._backoff_ms: dict[Route, int] = {}
        self._tokens: dict[Route, int] = {}  # of the connections last passed to the reactor
        self._command_tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._log = logging.get("worker.forwarding")

    def update(self, cluster: ClusterView, cluster_id: str) -> None:
        """Called after every change of metadata. Ends connections to an earlier run of a host."""
        own_broker = cluster.brokers.get(cluster.node_id)
        self._identity = (
            Identity(cluster.node_id, own_broker.directory_id, cluster_id)
            if own_broker is not None and cluster_id
            else None
        )
        self._cluster = cluster
        for node_id, incarnation in list(self._incarnations.items()):
            if self._incarnation(node_id) != incarnation:
                del self._incarnations[node_id]
                self._start_task(self._run(self._reactor.relay_remove, node_id))

    def _incarnation(self, node_id: int) -> tuple[int, str, int] | None:
        broker = self._cluster.brokers.get(node_id)
        return (
            (broker.epoch, broker.inter_broker_host, broker.inter_broker_port)
            if broker is not None and broker.inter_broker_host
            else None
        )

    def on_requested(self, event: native.Event) -> None:
        """Handles MQD_EVENT_RELAY_REQUESTED."""
        route = Route(event.node_id, event.worker, event.lane)
        if route not in self._dialling:
            self._dial(route)
        elif route in self._resolved:
            self._requested_again.add(route)

    def _dial(self, route: Route) -> None:
        task = self._dialling[route] = asyncio.get_running_loop().create_task(self._connect(route))
        task.add_done_callback(lambda _: self._on_done(route))

    def _on_done(self, route: Route) -> None:
        del self._dialling[route]
        self._resolved.discard(route)
        if route in self._requested_again:
            self._requested_again.discard(route)
            if not self._closed:
                self._dial(route)

    def on_ended(self, event: native.Event) -> None:
        """Handles MQD_EVENT_RELAY_ENDED."""
        route = next((route for route, token in self._tokens.items() if token == event.token), None)
        if route is not None:
            self._log.info(
                "connection to a leader ended", leader=route.leader, worker=route.leader_worker, reason=event.text
            )

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._dialling.values(), *self._command_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one connection ----------------------------------------------------------------------------

    async def _connect(self, route: Route) -> None:
        try:
            incarnation = self._incarnation(route.leader)
            if self._identity is None or incarnation is None:
                raise OSError("the leader's host is not registered, or has no listener for other hosts")
            # the host may have fewer workers now than when the partition was placed
            worker_count = max(self._cluster.brokers[route.leader].worker_count, 1)
            connection = await dial(
                self._credentials,
                self._identity,
                incarnation[1],
                incarnation[2],
                route.leader,
                route.leader_worker % worker_count,
                CONNECT_S_MAX,
            )
            if self._incarnation(route.leader) != incarnation:
                connection.socket.close()  # update() has already ended the connections to that incarnation
                raise OSError("the leader's host has registered again meanwhile")
            self._incarnations[route.leader] = incarnation
            self._resolved.add(route)
            event = await self._commands.run(
                self._reactor.relay_put,
                connection.socket.detach(),
                route.leader,
                route.leader_worker,
                route.lane,
                self._timeout_ms,
                connection.tls,
            )
            self._tokens[route] = event.token
            self._backoff_ms.pop(route, None)
        except (OSError, EOFError, HandshakeFailed, native.NativeError) as error:
            backoff_ms = self._backoff_ms[route] = min(
                self._backoff_ms.get(route, BACKOFF_MS_MIN // 2) * 2, BACKOFF_MS_MAX
            )
            self._log.info(
                "leader cannot be reached: clients on this host get a retriable error",
                leader=route.leader,
                worker=route.leader_worker,
                reason=str(error) or type(error).__name__,
            )
            self._resolved.add(route)
            await self._run(
                self._reactor.relay_refuse,
                route.leader,
                route.leader_worker,
                route.lane,
                int(backoff_ms * random.uniform(0.5, 1.0)),
            )

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._command_tasks.add(task)
        task.add_done_callback(self._command_tasks.discard)

    async def _run(self, command: Any, *arguments: Any) -> None:
        try:
            await self._commands.run(command, *arguments)
        except native.NativeError as error:
            self._log.warning("reactor refused a command about a connection to another host", reason=str(error))
