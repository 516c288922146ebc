"""The small world: partitions on four hosts, real replication rules, an atomic controller behind
lossy links. Chaos, then healing.

The checkers are proven here: quickly, and without the cores of quorum and metadata in between. See
cluster_world.py for whole clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.sim.clients import Asker, Consumer, Producer
from tests.sim.disks import PartitionLog
from tests.sim.history import History
from tests.sim.kernel import MILLISECOND, SECOND, Clock, Kernel, Network, Violation
from tests.sim.replica.model_controller import Metadata, ModelBroker, ModelController
from tests.sim.replica.model_worker import Control, ModelWorker, Place
from tests.sim.replica.partition_replica import ModelReplica, Proposal
from tests.sim.replica.spare_rules import SpareRules

HOSTS = 4
LAG_MS = 1_500


class Host:
    full = False

    def __init__(self, world: PartitionWorld, node: int) -> None:
        self.world = world
        self.kernel = world.kernel
        self.network = world.network
        self.node = node
        self.clock = Clock(world.kernel, world.kernel.random.uniform(-0.0005, 0.0005))
        self.logs: dict[Any, PartitionLog] = {}
        self.controls: dict[Any, Control] = {}
        self.lease_deadline_ns = 0
        self.incarnation = 0
        self.directory = node * 1000
        self.clean_epoch = -1
        self.broker_epoch = -1
        self.metadata = Metadata(0, world.controller.metadata.parts, {})
        self._old_metadata = self.metadata
        self.worker: ModelWorker | None = None
        self.broker: ModelBroker | None = None
        self.frozen = False
        self.start()

    def clock_ns(self) -> int:
        return self.clock.now()

    def flush_delay(self) -> int:
        return self.world.flush_delay()

    def flush_fails(self) -> bool:
        return False

    def worker_of(self, node: int, partition: Any) -> ModelWorker | None:
        return self.world.worker_of(node, partition)

    def propose(self, worker: ModelWorker, partition: Any, proposal: Proposal) -> None:
        if self.world.spares is not None:
            self.world.spares.on_proposed(self.clock_ns() // 1_000_000, worker.places[partition], proposal)
        if self.broker is not None:
            self.broker.propose(worker, partition, proposal)

    def on_metadata(self, metadata: Metadata) -> None:
        if self.kernel.random.random() < 0.7:  # the metadata on its disk are sometimes older
            self._old_metadata = metadata

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.incarnation += 1
        self.lease_deadline_ns = 0
        self.broker_epoch = -1
        self.dead_epochs: dict[Any, int] = {}
        self.metadata = self._old_metadata
        self.worker = self._new_worker()
        self.broker = ModelBroker(
            self, self.world.controller, self.network, self.world.heartbeat, self.world.session, self.world.off
        )

    def _new_worker(self) -> ModelWorker:
        world = self.world
        return ModelWorker(self, world.history, lambda log: world.make_core(log), world.off, world.fetch_max)

    def stop(self, how: str) -> None:
        """kill (page cache kept), power, wipe, clean."""
        if self.worker is None:
            return
        self.worker.process.die()
        self.broker.process.die()
        clean_epoch = self.broker.epoch
        self.worker = self.broker = None
        self.controls = {}
        self.clean_epoch = -1
        random = self.kernel.random
        if how == "clean":
            for log in self.logs.values():
                log.durable, log.undone = log.end, None
            self.clean_epoch = clean_epoch
        elif how == "power":
            for log in self.logs.values():
                log.lose_power(random)
        elif how == "wipe":
            self.logs = {}
            self.directory += 1
            self._old_metadata = Metadata(0, self.world.controller.metadata.parts, {})

    def restart_worker(self) -> None:
        if self.worker is None:
            return
        self.worker.process.die()
        self.worker = self._new_worker()
        broker = self.broker
        self.dead_epochs = {partition: control.led for partition, control in self.controls.items() if control.led >= 0}
        if broker.metadata.version >= broker.epoch >= 0:
            broker._apply()

    def restart_broker(self) -> None:
        if self.worker is None:
            return
        epoch, metadata = self.broker.epoch, self.broker.metadata
        self.broker.process.die()
        self.metadata = metadata
        self.broker = ModelBroker(
            self, self.world.controller, self.network, self.world.heartbeat, self.world.session, self.world.off
        )
        self.broker.epoch = epoch
        if metadata.version >= epoch >= 0:
            self.broker._apply()

    def pause(self, duration: int) -> None:
        for process in (self.worker.process, self.broker.process) if self.worker is not None else ():
            process.stopped = True
            self.kernel.after(duration, None, self.kernel.go_on, process)


class PartitionWorld:
    def __init__(
        self,
        seed: int,
        off: frozenset[str] = frozenset(),
        flush_on_ack: bool | None = None,
        partitions: int = 1,
        make_core: Callable[[PartitionLog], Any] | None = None,
        spares: SpareRules | None = None,
    ) -> None:
        self.seed = seed
        kernel = self.kernel = Kernel(seed)
        random = kernel.random
        self.off = off
        self.spares = spares
        self.flush_on_ack = random.random() < 0.5 if flush_on_ack is None else flush_on_ack
        self.network = Network(kernel, HOSTS + 2)
        self.client_node, controller_node = HOSTS, HOSTS + 1
        self.session, self.heartbeat = 2 * SECOND, 250 * MILLISECOND
        self.fetch_max = random.choice((1, 2, 8))
        self.make_core = make_core if make_core is not None else self._model_core
        self.producer_ids = self.values = 0
        nodes = list(range(HOSTS))
        min_in_sync, replicas = 2, 3
        if spares is not None:  # acks.replicas is the minimum too
            min_in_sync, replicas = spares.acks_replicas, max(3, spares.acks_replicas + 1)
        parts = {f"t-{index}": tuple(random.sample(nodes, replicas)) for index in range(partitions)}
        self.history = History(
            lambda partition: self.controller.view(partition),
            self.running,
            self.logs,
            lambda partition: self.flush_on_ack,
        )
        self.controller = ModelController(
            kernel, controller_node, parts, min_in_sync, off, self.flush_on_ack, self.session, self.history.chosen
        )
        self.hosts: list[Host] = []
        for node in nodes:
            self.hosts.append(Host(self, node))
        self.partitions = list(parts)
        self.clients = [
            Producer(self, self.partitions, 15 * MILLISECOND, batch_max=3),
            Producer(self, self.partitions, 25 * MILLISECOND, all_acks=random.random() < 0.7),
            Producer(self, self.partitions, 40 * MILLISECOND, all_acks=random.random() < 0.7, idempotent=False),
            Consumer(self, self.partitions, 60 * MILLISECOND),
            Consumer(self, self.partitions, 60 * MILLISECOND, nearest=True),
            Asker(self, self.partitions, 80 * MILLISECOND),
        ]
        kernel.after_each = self.history.check
        self._weights = {
            name: random.random() ** 2 * weight for name, weight in FAULTS.items() if random.random() < 0.75
        }
        self._slow_disk = random.random() < 0.2
        self._gap = random.choice((80, 200, 500, 1500)) * MILLISECOND

    def _model_core(self, log: PartitionLog) -> ModelReplica:
        return ModelReplica(log, self.flush_on_ack, self.off, LAG_MS)

    # -- called by others --------------------------------------------------------------------------

    def flush_delay(self) -> int:
        random = self.kernel.random
        return (
            random.randrange(200, 4_000)
            if not self._slow_disk or random.random() < 0.9
            else random.randrange(4_000, 300_000)
        )

    def worker_of(self, node: int, partition: Any) -> ModelWorker | None:
        return self.hosts[node].worker if 0 <= node < HOSTS else None

    def running(self, node: int, partition: Any) -> Place | None:
        host = self.hosts[node]
        broker = self.controller.metadata.brokers.get(node)
        if host.worker is None or broker is None or host.broker_epoch != broker.epoch:
            return None
        return host.worker.places.get(partition)

    def logs(self, partition: Any) -> Iterable[PartitionLog]:
        return [host.logs[partition] for host in self.hosts if partition in host.logs]

    def leader_hint(self, partition: Any) -> tuple[int, int]:
        host = self.hosts[self.kernel.random.randrange(HOSTS)]
        if host.broker is None:
            return -1, -1
        part = host.broker.metadata.parts[partition]
        return part.leader, part.leader_epoch

    def replica_hint(self, partition: Any) -> int:
        replicas = self.controller.metadata.parts[partition].replicas
        return replicas[self.kernel.random.randrange(len(replicas))]

    # -- the run -----------------------------------------------------------------------------------

    def run(self, chaos: int = 4_000) -> None:
        kernel = self.kernel
        kernel.after(kernel.random.randrange(100, 1_500) * MILLISECOND, None, self._fault)
        kernel.run(steps=chaos)
        self.heal()
        self.check_end()

    def _fault(self) -> None:
        kernel = self.kernel
        random = kernel.random
        if self._weights:
            name = random.choices(list(self._weights), list(self._weights.values()))[0]
            kernel.report(name)
            getattr(self, "_" + name)(random)
        kernel.after(int(random.expovariate(1 / self._gap)) + 1, None, self._fault)

    def _link(self, random: Any) -> None:
        network = self.network
        link = network.links[random.randrange(HOSTS + 2)][random.randrange(HOSTS + 2)]
        link.cut = random.random() < 0.4
        link.loss = random.choice((0, 0.05, 0.3))
        link.double = random.choice((0, 0.1, 0.4))
        link.late = random.choice((0, 0.05, 0.3))
        link.late_max = random.choice((200, 1_000, 5_000)) * MILLISECOND
        link.delay_max = random.choice((500, 2_000, 20_000, 80_000))

    def _isolate(self, random: Any) -> None:
        node = random.randrange(HOSTS)
        one_way = random.random() < 0.3
        clients_too = random.random() < 0.5
        for other in range(self.network.count):
            if other != node and (other != self.client_node or clients_too):
                self.network.links[node][other].cut = True
                if not one_way:
                    self.network.links[other][node].cut = True

    def _mend(self, random: Any) -> None:
        self.network.heal()

    def _pause(self, random: Any) -> None:
        self.hosts[random.randrange(HOSTS)].pause(random.randrange(50, 3_500) * MILLISECOND)

    def _restart(self, random: Any) -> None:
        host = self.hosts[random.randrange(HOSTS)]
        # lost disks: in cluster_world.py
        kinds = ("clean", "kill", "power") if self.flush_on_ack else ("clean", "kill", "power", "wipe")
        host.stop(random.choice(kinds))
        if random.random() < 0.2:  # at once, or later with others
            host.start()
        else:
            self.kernel.after(random.randrange(20, 4_000) * MILLISECOND, None, self._start, host)

    def _start(self, host: Host) -> None:
        if host.worker is None:
            host.start()

    def _all_down(self, random: Any) -> None:
        how = random.choice(("kill", "power"))
        for host in self.hosts:
            if random.random() < 0.7:
                host.stop(how)
                self.kernel.after(random.randrange(20, 4_000) * MILLISECOND, None, self._start, host)

    def _worker(self, random: Any) -> None:
        self.hosts[random.randrange(HOSTS)].restart_worker()

    def _broker(self, random: Any) -> None:
        self.hosts[random.randrange(HOSTS)].restart_broker()

    def _leaders(self, random: Any) -> None:
        for _ in range(random.randrange(1, 4)):
            self.kernel.after(
                random.randrange(6) * MILLISECOND, None, self._move_leader, random.choice(self.partitions)
            )

    def _move_leader(self, partition: Any) -> None:
        part = self.controller.metadata.parts[partition]
        if part.in_sync:
            self.controller.move_leader(partition, self.kernel.random.choice(part.in_sync))

    # -- healing -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everything is repaired, and the partitions have HEAL_MAX to recover."""
        self._weights = {}
        self._slow_disk = False
        self.network.heal()
        for host in self.hosts:
            self._start(host)
            for process in (host.worker.process, host.broker.process):
                self.kernel.go_on(process)
        last = self.kernel.now + HEAL_MAX
        while self.kernel.now < last and not all(map(self._whole, self.partitions)):
            self.kernel.run(until=self.kernel.now + SECOND // 2)
        for client in self.clients:
            client.stopping = True
        self.kernel.run(until=self.kernel.now + 2 * SECOND)

    def _whole(self, partition: Any) -> bool:
        part = self.controller.metadata.parts[partition]
        count = len(part.replicas) if self.spares is None else self.spares.acks_replicas
        return self.stuck(partition) or (part.leader >= 0 and len(part.in_sync) == count)

    def stuck(self, partition: Any) -> bool:
        """No replica may lead: an operator must choose."""
        part = self.controller.metadata.parts[partition]
        return part.leader < 0 and not part.in_sync and not part.eligible

    def check_end(self) -> None:
        self.stuck_count = 0
        for partition in self.partitions:
            part = self.controller.metadata.parts[partition]
            if self.stuck(partition):
                self.stuck_count += 1
                continue
            if not self._whole(partition):
                raise Violation("LIVE", f"{partition} has not healed: {part}")
            place = self.running(part.leader, partition)
            if place is None or place.core.high_watermark != place.log.end or place.waiting:
                raise Violation("LIVE", f"{partition}: its leader {part.leader} does not get on")
            self.history.check_end(partition, place)


HEAL_MAX = 30 * SECOND
FAULTS = {
    "link": 30,
    "isolate": 10,
    "mend": 22,
    "pause": 10,
    "restart": 20,
    "all_down": 1.5,
    "worker": 6,
    "broker": 4,
    "leaders": 5,
}
