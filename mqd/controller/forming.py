"""Queries the seeds until this host knows its cluster (mqd/cluster/membership/formation.py), and
answers other hosts' queries.
"""

import asyncio
from collections.abc import Callable

from mqd.base import clock, logging
from mqd.cluster.membership import formation
from mqd.cluster.membership.formation import FormationCore, FormationResponse
from mqd.cluster.membership.handshake import HandshakeFailed
from mqd.cluster.membership.peer_messages import PeerProtocolError, encode
from mqd.controller.peers import Connection, Peers, reason_of

TICK_S = 0.05
LOG_INTERVAL_S = 1.0
log = logging.get("controller.forming")


class ClusterFormation:
    """`await run()` returns the decision; `on_query(connection, query)` answers another host's query."""

    def __init__(
        self, core: FormationCore, peers: Peers, on_waiting: Callable[[str], None] = lambda text: None
    ) -> None:
        """`on_waiting` receives the hosts that this one waits for, after LOG_INTERVAL_S and
        whenever they change. After a long wait the text also says, once, what the operator can do.
        """
        self.core = core
        self._on_waiting = on_waiting
        self._waits_for = self._advice = ""
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self) -> formation.CreateCluster | formation.Join:
        self._handle(formation.Start())
        logged, loop = "", asyncio.get_running_loop()
        report_at = loop.time() + LOG_INTERVAL_S
        while self.core.decision is None:
            if (self._waits_for != logged or self._advice) and loop.time() >= report_at:
                logged, report_at = self._waits_for, loop.time() + LOG_INTERVAL_S
                self._on_waiting(f"{logged}. {self._advice}" if self._advice else logged)
                self._advice = ""
            try:
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                self._handle(formation.Tick())
            self._changed.clear()
        for task in self._tasks:
            task.cancel()
        return self.core.decision

    def on_query(self, connection: Connection, query: formation.FormationQuery) -> None:
        for effect in self.core.handle(formation.QueryReceived(connection, query), clock.monotonic_ms()):
            assert isinstance(effect, formation.RespondToQuery)
            self.respond(connection, effect.response)

    @staticmethod
    def respond(connection: Connection, response: FormationResponse) -> None:
        if connection.is_open:
            connection.send(encode(response))

    def _handle(self, event: formation.Event) -> None:
        for effect in self.core.handle(event, clock.monotonic_ms()):
            match effect:
                case formation.QuerySeed():
                    task = asyncio.get_running_loop().create_task(self._request(effect))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case formation.Wait():
                    self._waits_for = "; ".join(effect.reasons)
                    self._advice = effect.advice or self._advice
                    log.info(
                        "waiting for the hosts of the cluster",
                        reasons=self._waits_for,
                        **({"advice": effect.advice} if effect.advice else {}),
                    )
        self._changed.set()

    async def _request(self, effect: formation.QuerySeed) -> None:
        host, port = formation.split(effect.seed)
        try:
            connection = await self._peers.open(host, port, "controller")
            try:
                connection.send(encode(effect.query))
                async with asyncio.timeout(formation.RESPONSE_MS_MAX / 1000):
                    response = await connection.receive()
            finally:
                connection.writer.transport.abort()
        except (OSError, EOFError, TimeoutError, HandshakeFailed, PeerProtocolError) as error:
            self._handle(
                formation.Unreachable(effect.seed, effect.query.query_id, f"cannot be reached: {reason_of(error)}")
            )
            return
        if (
            isinstance(response, FormationResponse)
            and response.member.node_id == connection.identity.node_id
            and response.member.directory_id == connection.identity.directory_id
        ):
            self._handle(formation.ResponseReceived(effect.seed, response))
        else:
            self._handle(formation.Unreachable(effect.seed, effect.query.query_id, "sent no valid response"))
