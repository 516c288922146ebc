"""A simulated host: clock, disks, control segment, and its processes.

Invariants
    H1  state that outlives a process is here (disks, control segment, the keeper's knowledge);
        state that outlives the host is on its disks
    H2  each process of the host can die alone: each worker, the acceptor, the controller; if the
        keeper dies, all do; each is restarted independently of the others
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.broker.messages import RegisterBroker
from mqd.cluster.host.events import SlotSeen
from mqd.cluster.host.messages import ProposeInSync
from mqd.cluster.membership.death_notice import REPEATS_MS, Notice
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.raft.messages import ReplicaKey
from tests.sim.cluster.controller_process import ControllerProcess
from tests.sim.cluster.host_processes import Acceptor, ClusterWorker, Subscriber
from tests.sim.disks import PartitionLog
from tests.sim.kernel import MILLISECOND, Clock, Process
from tests.sim.raft.quorum_disk import QuorumDisk
from tests.sim.replica.model_worker import Control, ModelWorker
from tests.sim.replica.partition_replica import Proposal

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld

INT64_MAX = (1 << 63) - 1
Partition = tuple[bytes, int]


class ClusterHost:
    def __init__(self, world: ClusterWorld, node: int, rack: str | None, worker_count: int) -> None:
        self.world, self.kernel, self.network = world, world.kernel, world.network
        self.node, self.rack = node, rack
        self.clock = Clock(world.kernel, world.new_drift())
        self.incarnation = 0
        self._generation = 0
        self.waiting: list[tuple[Process, Subscriber]] = []
        self.new_disks()
        self.workers: list[ClusterWorker | None] = [None] * worker_count
        self.acceptor: Acceptor | None = None
        self.controller: ControllerProcess | None = None
        self.leaving = False
        self._ended_well = False  # each worker has written its marker
        self.excused = False  # its keeper has proven that this host leads nothing
        self.full = False  # its disk
        self.failing = 0.0  # share of its flushes that fail
        self._new_control()

    # -- what outlives processes -------------------------------------------------------------------

    def new_disks(self) -> None:
        number = self.world.new_number()
        self.disk = QuorumDisk()
        self.key = ReplicaKey(self.node, number.to_bytes(16, "big"))
        self.log_directory = f"dir-{number}"
        self.logs: dict[Partition, PartitionLog] = {}
        self.clean_epoch = -1
        self._same_boot = False  # clean only because the kernel kept running
        self.flush_failed = False  # a file in the log directory
        self.doubtful = False  # the session of its broker says so

    def _new_control(self) -> None:
        self.keeper: object | None = None  # all of this lives as long as the keeper
        self._next: dict[int, int] = {}  # dead worker -> the generation it will have
        self.instructions: Notice | None = None  # the notice that the keeper sends when the controller has ended
        self.controls: dict[Partition, Control] = {}
        self.slots: dict[int, tuple[bytes, int, int, int, int]] = {}
        self.broker_epoch = self.metadata_version = -1
        self.ready = False
        self._lease_until_ns = 0

    @property
    def lease_deadline_ns(self) -> int:
        return self._lease_until_ns if self.ready or "R10" in self.world.off else 0

    @property
    def lease_until_ms(self) -> int:
        return self._lease_until_ns // 1_000_000 if self._lease_until_ns < INT64_MAX else INT64_MAX

    def set_broker(self, action: broker_core.SetBroker) -> None:
        changed = (self.broker_epoch, self.ready) != (action.broker_epoch, action.ready)
        self.broker_epoch, self.ready = action.broker_epoch, action.ready
        until_ms = action.lease_until_ms
        self._lease_until_ns = until_ms * 1_000_000 if until_ms < INT64_MAX else INT64_MAX
        if changed:
            for worker in self.workers:
                if worker is not None:
                    self.kernel.after(10, worker.process, worker.on_broker_changed)

    def slots_seen(self) -> tuple[SlotSeen, ...]:
        return tuple(
            [
                SlotSeen(
                    slot,
                    topic_id,
                    index,
                    epoch,
                    owner,
                    owner < len(self.workers) and generation != self.generation_of(owner),
                    0,
                )
                for slot, (topic_id, index, epoch, owner, generation) in sorted(self.slots.items())
            ]
        )

    def generation_of(self, owner: int) -> int:
        """Of the worker that runs there, or will: as in the control segment, a death ends a
        generation.
        """
        if owner >= len(self.workers):
            return -1
        worker = self.workers[owner]
        if worker is None and owner not in self._next:
            self._next[owner] = self.new_generation()
        return worker.generation if worker is not None else self._next[owner]

    def take_generation(self, owner: int) -> int:
        """The generation of a new worker."""
        return self._next.pop(owner, 0) or self.new_generation()

    def new_generation(self) -> int:
        self._generation += 1
        return self._generation

    # -- called by its processes -------------------------------------------------------------------

    def clock_ns(self) -> int:
        return self.clock.now()

    def flush_delay(self) -> int:
        return self.world.flush_delay(self)

    def flush_fails(self) -> bool:
        return self.failing > 0 and self.kernel.random.random() < self.failing

    def worker_of(self, node: int, partition: Partition) -> ClusterWorker | None:
        return self.world.worker_of(node, partition)

    def propose(self, worker: ModelWorker, partition: Partition, proposal: Proposal) -> None:
        topic_id, index = partition
        members = list(proposal.in_sync)
        worker.send(
            self,
            ProposeInSync(topic_id, index, proposal.leader_epoch, proposal.partition_epoch, members, proposal.sequence),
        )  # type: ignore[attr-defined]

    def directory(self) -> Directory:
        return Directory(self.log_directory, f"/data/{self.log_directory}", 1 << 40, True)

    def registration(self) -> RegisterBroker:
        report = broker_messages.DirectoryReport(self.log_directory, f"/data/{self.log_directory}", 1 << 40, True)
        return RegisterBroker(
            self.node,
            self.key.directory_id.hex(),
            self.incarnation,
            f"host{self.node}",
            9092,
            self.rack,
            f"host{self.node}",
            9093,
            f"host{self.node}",
            9094,
            len(self.workers),
            [report],
            self.clean_epoch,
            {},
            True,
        )

    # -- life --------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return (
            self.acceptor is not None
            or self.controller is not None
            or any(worker is not None for worker in self.workers)
        )

    @property
    def complete(self) -> bool:
        return (
            self.acceptor is not None
            and self.controller is not None
            and all(worker is not None for worker in self.workers)
        )

    def processes(self) -> list[Process]:
        found = [worker.process for worker in self.workers if worker is not None]
        found += [part.process for part in (self.acceptor, self.controller) if part is not None]
        return found

    def start(self) -> None:
        assert not self.up
        self.incarnation += 1
        if not self._ended_well:
            for partition, log in self.logs.items():
                reported = log.entries[: log.on_disk]
                log.reopen(self.kernel.random, "CRC" not in self.world.off)
                if log.end < len(reported):
                    self.world.history.lost(partition, reported)
        self.flush_failed = self._ended_well = False
        self.leaving = self.excused = False
        self._new_control()
        self.keeper = object()
        self._start_controller()
        self.acceptor = Acceptor(self)
        for index in range(len(self.workers)):
            self.workers[index] = ClusterWorker(self, index)
        self.clean_epoch, self._same_boot = -1, False  # the marker is removed once it was read
        self.doubtful = False

    def accepts(self) -> None:
        """Whether its controller accepts connections yet."""
        waiting, self.waiting = self.waiting, []
        for process, subscriber in waiting:
            self.kernel.after(self.kernel.random.randrange(100, 20_000), process, subscriber.join, self, process)

    def _start_controller(self) -> None:
        if self.controller is not None:
            return
        self.leaving = False  # the new process has not been told to end
        self.controller = self.world.controller_class(self)
        self.controller.start()

    def stop(self, how: str) -> None:
        """kill (page cache kept), power, wipe: all processes at once, including the keeper."""
        random = self.kernel.random
        had = self.controller is not None
        self.keeper = None
        if how == "kill" and self.world.plan.boot_id and self.ready and self.up:
            doubt = (self.doubtful or self.flush_failed) and "DOUBT" not in self.world.off
            self.clean_epoch, self._same_boot = (-1, False) if doubt else (self.broker_epoch, True)
        elif how == "power" and self._same_boot and "BOOT" not in self.world.off:
            self.clean_epoch = -1
        for process in self.processes():
            process.die()
        self.workers = [None] * len(self.workers)
        self.acceptor = self.controller = None
        if had:
            self.disk.crash(random, 1.0 if how == "clean" else 0.5)
        if how == "power":
            for log in self.logs.values():
                log.lose_power(random)
        elif how == "wipe":
            for partition, log in self.logs.items():
                self.world.history.lost(partition, log.entries[: log.on_disk])
            self.new_disks()

    def kill_controller(self) -> None:
        if self.controller is not None:
            self.controller.process.die()
            self.controller = None
            self.disk.crash(self.kernel.random, 0.7)
            self._prove(all_ended=False)
            for subscriber in (*self.workers, self.acceptor):
                if subscriber is not None:
                    subscriber.controller = None
                    self.kernel.after(20 * MILLISECOND, subscriber.process, subscriber.join, self, subscriber.process)

    def restart_controller(self) -> None:
        if self.controller is None and self.up:
            self._start_controller()

    def kill_acceptor(self) -> None:
        if self.acceptor is not None:
            self._gone(self.acceptor)
            self.acceptor = Acceptor(self)

    def kill_worker(self, index: int) -> None:
        """supervisord restarts it; the keeper reports the death to the controller."""
        worker = self.workers[index]
        if worker is None:
            return
        self._gone(worker)
        self.workers[index] = ClusterWorker(self, index)
        if self.acceptor is not None and self.acceptor.transactions is not None:
            self.kernel.after(100, self.acceptor.process, self.acceptor.transactions.on_worker_death, index)
        controller = self.controller
        if controller is not None:
            self.kernel.after(
                self.kernel.random.randrange(100, 2_000),
                controller.process,
                controller.on_worker_death,
                index,
                worker.generation,
            )

    def _gone(self, subscriber: Any) -> None:
        subscriber.process.die()
        controller = subscriber.controller
        if controller is not None and controller is self.controller:
            self.kernel.after(50, controller.process, controller.disconnect, subscriber.client)

    def kill_data_plane(self) -> None:
        """Kills workers and acceptor; the keeper has the proof and sends it to the controller, and
        again when they are back.
        """
        if self.acceptor is None or self.controller is None:
            return
        self.excused = True
        for part in (self.acceptor, *self.workers):
            if part is not None:
                self._gone(part)
        deaths = [(worker.index, worker.generation) for worker in self.workers if worker is not None]
        controller = self.controller
        for index, generation in deaths:
            self.kernel.after(90, controller.process, controller.on_worker_death, index, generation)
        self.acceptor = None
        self.workers = [None] * len(self.workers)
        self.kernel.after(100, controller.process, controller.on_broker, broker_core.HostDied(True))
        self.kernel.after(
            self.kernel.random.randrange(5, 1_500) * MILLISECOND,
            None,
            self._if_alive,
            self.keeper,
            self.start_data_plane,
        )

    def start_data_plane(self) -> None:
        """supervisord's work, with or without a controller; a controller started meanwhile does not
        know that they were gone.
        """
        self._start_acceptor()
        for index in range(len(self.workers)):
            self._start_worker(index)  # one that is back already is not started twice
        controller = self.controller
        if controller is not None:
            self.kernel.after(100, controller.process, controller.on_broker, broker_core.HostDied(False))
        self.excused = False

    def kill_processes(self) -> None:
        """Kills all but the keeper, which revokes the lease and notifies the others; each is
        restarted, in its own time.
        """
        if self.controller is None or self.acceptor is None or self.keeper is None:
            return
        random, keeper = self.kernel.random, self.keeper
        for process in self.processes():
            process.die()
        self.controller = self.acceptor = None
        self.workers = [None] * len(self.workers)
        self.disk.crash(random, 0.7)
        self._lease_until_ns = 0
        self._prove(all_ended=True)
        for start in (
            self._start_controller,
            self._start_acceptor,
            *[partial(self._start_worker, index) for index in range(len(self.workers))],
        ):
            self.kernel.after(random.randrange(200, 3_000) * MILLISECOND, None, self._if_alive, keeper, start)

    def _if_alive(self, keeper: object, do: Callable[[], None]) -> None:
        if self.keeper is keeper:
            do()

    def _start_acceptor(self) -> None:
        if self.acceptor is None:
            self.acceptor = Acceptor(self)

    def _start_worker(self, index: int) -> None:
        if self.workers[index] is None:
            self.workers[index] = ClusterWorker(self, index)

    def _prove(self, all_ended: bool) -> None:
        """As in mqd/keeper/proof.py."""
        instructions = self.instructions
        if instructions is None or (
            instructions.broker_epoch != self.broker_epoch if all_ended else not instructions.led
        ):
            return
        notice = msgspec.structs.replace(
            instructions,
            broker_epoch=instructions.broker_epoch if all_ended else -1,
            sent_ms=self.clock.now() // 1_000_000,
        )
        for wait_ms in REPEATS_MS:
            self.kernel.after(
                wait_ms * MILLISECOND, None, self._if_alive, self.keeper, partial(self._notify_others, notice)
            )

    def _notify_others(self, notice: Notice) -> None:
        for other in self.world.hosts:
            if other is not self and other.controller is not None:
                self.network.send(self.node, other.node, other.controller.process, other.controller.on_notice, notice)

    def request_shutdown(self) -> None:
        if self.controller is not None and not self.leaving:
            self.leaving = True
            self.controller.on_broker(broker_core.ShutdownRequested())

    def shut_down(self, action: broker_core.ShutDown) -> None:
        """Flush, write the marker, end; restarted a while later."""
        self.kernel.report("ends", self.node, action.broker_epoch)
        marker = action.broker_epoch
        self.kernel.after(0, None, self._end, self.controller, marker)

    def _end(self, controller: ControllerProcess, marker: int) -> None:
        if self.controller is not controller:
            return
        sound = all(worker is None or not worker.failed for worker in self.workers)
        for log in self.logs.values():
            if log.dropped < 0:
                log.durable, log.undone = log.end, None
        self.stop("clean")
        self._ended_well = sound
        self.clean_epoch = marker if sound else -1
        self.kernel.after(self.kernel.random.randrange(50, 2_000) * MILLISECOND, None, self.world.start_host, self)

    def pause(self, duration: int, which: str) -> None:
        for process in self.processes():
            if which == "host" or process.name.startswith(which):
                process.stopped = True
                self.kernel.after(duration, None, self.kernel.go_on, process)
