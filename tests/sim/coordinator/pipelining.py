"""Clients that pipeline OffsetCommits over one connection, and the worker that keeps them until
there is a response: when the acceptor dies it acts as mqd_control_on_acceptor_died in
native/server/control_request.c.

Checked, besides coordinators.py's checks of a group
    C5  after the responses to a burst of rising commits, the group's offset is at least that of the
        last successful one, whichever acceptors died meanwhile
After a share of the bursts the acceptor is killed while it has them: random faults do this
rarely.
Rule that can be off: `order` (requests are resent in their order of arrival; off: the last is sent
first, as from the free list of a table).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, FetchOffsets, OffsetsCommitted
from tests.sim.clients import TIMEOUT
from tests.sim.coordinator.coordinators import GroupClient, Partition
from tests.sim.kernel import MILLISECOND, Violation

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld
    from tests.sim.cluster.host_processes import Acceptor
    from tests.sim.replica.model_worker import ModelWorker

BURST_MAX = 6
DEATHS = 0.3
DEATH_MAX = 5 * MILLISECOND  # after a burst was sent
LOOK_MAX = 200 * MILLISECOND  # some are resent while the successor loads, some after that
FETCH = -1  # instead of an offset


class Connection:
    """A client's connection, kept by a worker: its requests, oldest first."""

    def __init__(self, client: PipelinedClient, worker: ModelWorker, token: int) -> None:
        self.client, self.worker, self.token = client, worker, token
        self.world = client.world
        self._acceptor: Acceptor | None = None
        self._sent: list[int] = []

    def receive(self, offsets: list[int]) -> None:
        self._acceptor = self.worker.host.acceptor
        for offset in offsets:
            self._send(offset)
        self._look()

    def _is_open(self) -> bool:
        return self.client.token == self.token

    def _send(self, offset: int) -> None:
        self._sent.append(offset)
        acceptor = self._acceptor
        if acceptor is None or acceptor.coordinator is None:
            return
        client = self.client
        caller = (self.worker.host.node, self.worker.process, self._answered, (acceptor, offset))
        self.world.network.send(
            self.worker.host.node,
            self.worker.host.node,
            acceptor.process,
            acceptor.coordinator.on_request,
            client.partition,
            client.group,
            client.event(offset),
            caller,
            self._is_open,
        )

    def _look(self) -> None:
        """Has the acceptor died? Its successor gets all requests without a response."""
        if not self._is_open() or not self._sent:
            return
        acceptor = self.worker.host.acceptor
        if acceptor is not self._acceptor:
            self._acceptor, again, self._sent = acceptor, self._sent, []
            for offset in again[::-1] if "order" in self.world.off else again:
                self._send(offset)
        kernel = self.world.kernel
        kernel.after(kernel.random.randrange(LOOK_MAX), self.worker.process, self._look)

    def _answered(self, key: tuple[Acceptor, int], error: int, response: Any, epoch: int) -> None:
        acceptor, offset = key
        if acceptor is not self._acceptor or offset not in self._sent:
            return  # of a dead acceptor
        self._sent.remove(offset)
        client, world = self.client, self.world
        world.network.send(
            self.worker.host.node,
            world.client_node,
            client.process,
            client.answered,
            self.token,
            offset,
            error,
            response,
            epoch,
        )


class PipelinedClient(GroupClient):
    """Commits rising offsets in bursts, and then fetches the committed one."""

    def __init__(self, world: ClusterWorld, number: int, partition: Partition, pause: int) -> None:
        self.unanswered: set[int] = set()
        self.deaths = 0
        super().__init__(world, number, partition, pause)

    def event(self, offset: int) -> Callable[[int], CommitOffsets | FetchOffsets]:
        if offset == FETCH:
            return lambda number: FetchOffsets(number, (("t", (0,)),))
        return lambda number: CommitOffsets(number, 8, "", None, -1, (CommittedOffset("t", 0, offset),))

    def turn(self) -> None:
        world = self.world
        self.asks = self.asks or self.stopping
        offsets = [FETCH]
        if not self.asks:
            first = self.tried + 1
            self.tried += world.kernel.random.randrange(1, BURST_MAX + 1)
            offsets = list(range(first, self.tried + 1))
        node = self.leader(self.partition)
        self.again(TIMEOUT)
        self.unanswered = set(offsets)
        worker = world.worker_of(node, self.partition) if node >= 0 else None
        if worker is None:
            return
        connection = Connection(self, worker, self.token)
        link = world.network.links[world.client_node][node]
        double, link.double = link.double, 0.0  # one connection: a request arrives once, or never
        world.network.send(world.client_node, node, worker.process, connection.receive, offsets)
        link.double = double
        random = world.kernel.random
        if not self.asks and not self.stopping and random.random() < DEATHS:
            world.kernel.after(random.randrange(DEATH_MAX), None, self._kill, node)

    def _kill(self, node: int) -> None:
        self.deaths += self.world.hosts[node].acceptor is not None
        self.world.hosts[node].kill_acceptor()

    def on_answer(self, offset: int, error: int, response: Any, epoch: int) -> None:
        if offset not in self.unanswered:
            return  # the network has delivered it twice
        self.unanswered.discard(offset)
        failed = error or response.error
        if not failed and isinstance(response, OffsetsCommitted):
            if any(response.errors):
                raise Violation("C5", f"{self.group}: a commit was refused: {response}")
            self.acked.append((epoch, offset))
            self.done += 1
        elif not failed:
            found = response.topics[0][1][0].offset
            self._check(found, epoch)
            self.acked.append((epoch, found))
            self.asks = False
            self.done += 1
            self.again(self.pause)
            return
        if not self.unanswered:
            self.asks = True
            self.again(50 * MILLISECOND if failed else 0)
