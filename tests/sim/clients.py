"""Simulated clients of a cluster: producers that retry, consumers, clients that query the latest
offset. They only know hosts and the leaders that hosts report.

Invariants
    C1/C2  an idempotent producer with acks=all and one request in flight never gets an out-of-order
           sequence error
    C4     a consumer's offsets increase by exactly what it read
"""

from __future__ import annotations

from typing import Any, Protocol

from tests.sim.disks import Entry
from tests.sim.history import History
from tests.sim.kernel import MILLISECOND, Kernel, Network, Process, Timer, Violation
from tests.sim.replica.model_worker import ModelWorker
from tests.sim.replica.partition_replica import OUT_OF_ORDER

TIMEOUT = 700 * MILLISECOND


class ClusterView(Protocol):
    kernel: Kernel
    network: Network
    client_node: int
    producer_ids: int
    values: int
    history: History

    def leader_hint(self, partition: Any) -> tuple[int, int]: ...
    def replica_hint(self, partition: Any) -> int: ...
    def worker_of(self, node: int, partition: Any) -> ModelWorker | None: ...


class Client:
    def __init__(self, world: ClusterView, partitions: list[Any], pause: int) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = Process("client")
        self.partitions = partitions
        self.pause = pause
        self.token = 0
        self.stopping = False
        self.done = 0
        self.epochs: dict[Any, int] = {}
        self._timer: Timer | None = None
        self.again(self.kernel.random.randrange(20) * MILLISECOND)

    def again(self, delay: int) -> None:
        self.token += 1
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.kernel.timer(delay, self.process, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self.turn()

    def turn(self) -> None:
        raise NotImplementedError

    def leader(self, partition: Any) -> int:
        """The leader according to some host; never one of an older epoch than it has already used
        (KIP-320).
        """
        leader, epoch = self.world.leader_hint(partition)
        if epoch < self.epochs.get(partition, -1):
            return -1
        self.epochs[partition] = epoch
        return leader

    def send_request(self, node: int, method: str, partition: Any, *arguments: Any) -> None:
        """Sends to a host's worker; a request without a response is retried after TIMEOUT."""
        world = self.world
        self.again(TIMEOUT)
        worker = world.worker_of(node, partition) if node >= 0 else None
        if worker is not None:
            caller = (world.client_node, self.process, self.answered, self.token)
            world.network.send(
                world.client_node, node, worker.process, getattr(worker, method), partition, *arguments, caller
            )

    def answered(self, token: int, *what: Any) -> None:
        if token == self.token:
            self.on_answer(*what)

    def on_answer(self, *what: Any) -> None:
        raise NotImplementedError


class Producer(Client):
    """Sends one batch of up to `batch_max` records at a time, round-robin over its partitions;
    idempotent unless it uses acks=1.
    """

    def __init__(
        self,
        world: ClusterView,
        partitions: list[Any],
        pause: int,
        all_acks: bool = True,
        idempotent: bool = True,
        batch_max: int = 1,
    ) -> None:
        self.batch_max = batch_max
        self.all_acks = all_acks
        self.idempotent = idempotent
        self.next: dict[Any, int] = dict.fromkeys(partitions, 0)
        self.id = -1
        self.sent: tuple[Any, tuple[int, ...]] | None = None  # partition, values
        super().__init__(world, partitions, pause)
        self._renew()

    def _renew(self) -> None:
        self.next = dict.fromkeys(self.partitions, 0)
        if self.idempotent:
            self.id = self.world.producer_ids
            self.world.producer_ids += 1

    def turn(self) -> None:
        world = self.world
        if self.sent is None:
            if self.stopping:
                return
            random = world.kernel.random
            count = random.randrange(1, self.batch_max + 1)
            first, world.values = world.values + 1, world.values + count
            self.sent = (self.partitions[random.randrange(len(self.partitions))], tuple(range(first, first + count)))
        partition, values = self.sent
        self.send_request(
            self.leader(partition), "on_produce", partition, self.id, self.next[partition], values, self.all_acks
        )

    def on_answer(self, error: int, offset: int) -> None:
        partition, values = self.sent
        if error == 0:
            self.sent = None
            self.next[partition] += len(values)
            self.done += 1
            self.again(self.pause)
        elif error == OUT_OF_ORDER:
            if self.all_acks and not self.world.history.unclean:
                raise Violation(
                    "C2", f"{partition}: producer {self.id} is out of order at sequence {self.next[partition]}"
                )
            self.sent = None
            self._renew()  # acks=1, or an unclean election, lost something: a new producer
            self.again(self.pause)
        else:
            self.again(40 * MILLISECOND)


class Consumer(Client):
    def __init__(self, world: ClusterView, partitions: list[Any], pause: int, nearest: bool = False) -> None:
        self.positions: dict[Any, int] = dict.fromkeys(partitions, 0)
        self.nearest = nearest  # KIP-392: fetches from any replica
        self.at = 0
        super().__init__(world, partitions, pause)

    def turn(self) -> None:
        if self.stopping:
            return
        self.at = (self.at + 1) % len(self.partitions)
        partition = self.partitions[self.at]
        node = self.world.replica_hint(partition) if self.nearest else self.leader(partition)
        self.send_request(node, "on_read", partition, self.positions[partition])

    def on_answer(self, error: int, offset: int, entries: list[Entry]) -> None:
        partition = self.partitions[self.at]
        if not error:
            if offset != self.positions[partition]:
                raise Violation("C4", f"{partition}: asked for {self.positions[partition]}, answered {offset}")
            self.positions[partition] += len(entries)
            self.done += len(entries)
        self.again(self.pause if not error else 40 * MILLISECOND)


class Asker(Client):
    """ListOffsets latest."""

    def turn(self) -> None:
        if self.stopping:
            return
        partition = self.partitions[self.kernel.random.randrange(len(self.partitions))]
        self.send_request(self.leader(partition), "on_latest", partition)

    def on_answer(self, error: int, offset: int) -> None:
        self.done += not error
        self.again(self.pause)
