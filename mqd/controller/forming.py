"""Asks the seeds until this host knows of which cluster it is (mqd/cluster/formation.py), and answers others that ask."""

import asyncio

from mqd.base import clock, logging
from mqd.cluster import formation
from mqd.cluster.formation import FormationAnswer, FormationCore
from mqd.cluster.handshake import HandshakeFailed
from mqd.cluster.peer_messages import PeerProtocolError, encode
from mqd.controller.peers import Connection, Peers

TICK_S = 0.05
log = logging.get("controller.forming")


class Forming:
    """`await run()` gives the decision; `on_ask(connection, ask)` for questions that come over connections."""

    def __init__(self, core: FormationCore, peers: Peers) -> None:
        self.core = core
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self) -> formation.Found | formation.Join:
        self._handle(formation.Start())
        while self.core.decided is None:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                self._handle(formation.Tick())
            self._changed.clear()
        for task in self._tasks:
            task.cancel()
        return self.core.decided

    def on_ask(self, connection: Connection, ask: formation.FormationAsk) -> None:
        for effect in self.core.handle(formation.Asked(connection, ask), clock.monotonic_ms()):
            assert isinstance(effect, formation.AnswerAsk)
            self.answer(connection, effect.answer)

    @staticmethod
    def answer(connection: Connection, answer: FormationAnswer) -> None:
        if connection.lives:
            connection.send(encode(answer))

    def _handle(self, event: formation.Event) -> None:
        for effect in self.core.handle(event, clock.monotonic_ms()):
            match effect:
                case formation.AskSeed():
                    task = asyncio.get_running_loop().create_task(self._ask(effect))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case formation.Wait():
                    log.info("waiting for the hosts of the cluster", reasons="; ".join(effect.reasons))
        self._changed.set()

    async def _ask(self, effect: formation.AskSeed) -> None:
        host, port = formation.split(effect.seed)
        try:
            connection = await self._peers.open(host, port, "controller")
            try:
                connection.send(encode(effect.ask))
                async with asyncio.timeout(formation.ANSWER_MS_MAX / 1000):
                    answer = await connection.receive()
            finally:
                connection.writer.transport.abort()
        except (OSError, EOFError, TimeoutError, HandshakeFailed, PeerProtocolError) as error:
            self._handle(formation.Unreachable(effect.seed, effect.ask.ask_id, f"cannot be asked: {error or type(error).__name__}"))
            return
        if isinstance(answer, FormationAnswer) and answer.member.node_id == connection.identity.node_id and answer.member.directory_id == connection.identity.directory_id:
            self._handle(formation.Answered(effect.seed, answer))
        else:
            self._handle(formation.Unreachable(effect.seed, effect.ask.ask_id, "did not answer the question"))
