"""The plan of one run of a simulated cluster, drawn from the seed, and an administrator that
requests changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mqd.cluster.host import messages
from tests.sim.clients import Client
from tests.sim.cluster.host_processes import Acceptor
from tests.sim.kernel import MILLISECOND, SECOND

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld


class Admin(Client):
    """Requests changes from some host's acceptor; its queue is `wanted`, in FIFO order."""

    def __init__(self, world: ClusterWorld, pause: int) -> None:
        self.requested: list[Any] = []
        self.answers: list[messages.Response] = []
        self.change: Any = None
        super().__init__(world, [], pause)

    def turn(self) -> None:
        world = self.world
        if self.change is None:
            if not self.requested:
                self.again(self.pause)
                return
            self.change = self.requested.pop(0)
        host = world.hosts[self.kernel.random.randrange(world.host_count)]
        self.again(2 * SECOND)
        acceptor: Acceptor | None = host.acceptor
        if acceptor is not None:
            world.network.send(
                world.client_node,
                host.node,
                acceptor.process,
                acceptor.on_request,
                self.change,
                (world.client_node, self.process, self.answered, self.token),
            )

    def on_answer(self, response: messages.Response) -> None:
        self.answers.append(response)
        # NOT_LEADER.., REQUEST_TIMED_OUT, NOT_CONTROLLER, KAFKA_STORAGE_ERROR: retry
        if response.error in (6, 7, 41, 56):
            self.again(100 * MILLISECOND)
            return
        self.kernel.report("change", type(self.change).__name__, response.error)
        self.change = None
        self.done += 1
        self.again(self.pause)


class Plan(msgspec.Struct, frozen=True):
    """The plan of one run, drawn from the seed."""

    hosts: int = 4
    voters: int = 3
    workers: int = 1
    partitions: int = 2
    drift_max: float = 0.001
    drift_is_bounded: bool = True
    session_ms: int = 2_000
    promise_ms: int = 1_000
    fetch_max: int = 8
    wire: bool = False  # messages between hosts are encoded and decoded
    producers: int = 3
    groups: int = 0  # groups that commit offsets
    pipelines: int = 0  # groups that commit offsets in bursts: pipelining.py
    members: int = 0  # groups with members: group_members.py
    unclean: bool = False  # unclean.leader.election.enable of the topics
    retire: int = 0  # partitions to remove from a topic: retirement.py
    rights: bool = False  # rules and passwords are created and deleted: rights.py
    acks_replicas: int = 0  # of the topics: spares
    faults: tuple[str, ...] = ()  # only these, often; () = as drawn
    # share of requests with markers after which their acceptor dies; they arrive seconds later
    last_markers: float = 0.0
    # a host that was killed while its kernel kept running knows that no write was lost, and reports
    # it
    boot_id: bool = False

    @property
    def has_coordinators(self) -> bool:
        return bool(self.groups or self.pipelines or self.members)


def draw_plan(random: Any) -> Plan:
    bounded = random.random() < 0.9
    return Plan(
        hosts=random.choice((3, 4, 4, 5)),
        voters=random.choice((1, 3, 3, 3)),
        workers=random.choice((1, 1, 2)),
        partitions=random.choice((1, 1, 2)),
        drift_max=random.choice((0.0, 0.001, 0.13)) if bounded else 0.4,
        drift_is_bounded=bounded,
        session_ms=random.choice((1_000, 2_000, 6_000)),
        promise_ms=random.choice((400, 1_000, 2_000)),
        fetch_max=random.choice((1, 2, 8)),
        wire=random.random() < 0.05,
        producers=random.choice((2, 3, 4)),
        boot_id=random.random() < 0.6,
        groups=random.choice((0, 0, 0, 1, 3)),
    )
