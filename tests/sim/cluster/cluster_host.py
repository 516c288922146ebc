"""A simulated host: clock, disks, control segment, and the processes that come and go on it.

Invariants
    H1  what outlives a process is here (disks, control segment, the keeper's knowledge); what
        outlives the host is on its disks
    H2  every process of the host can die alone: each worker, the acceptor, the controller; with the
        keeper they all do; each is started again, whichever of the others is not there
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
from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import (
    Answer,
    Applied,
    BrokersPut,
    Image,
    InSyncAnswer,
    PartitionsPut,
    ProposeInSync,
    Request,
    Several,
    Subscribe,
    TopicPut,
    TopicRemoved,
)
from mqd.cluster.membership.death_notice import REPEATS_MS, Notice
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.raft.messages import ReplicaKey
from mqd.worker.assignments import Assignment as WorkerAssignment
from mqd.worker.assignments import assignment_of, settings_of
from mqd.worker.catalog import Catalog, Changes, Owned
from mqd.worker.shortened_log import Shortened, is_wanted
from tests.sim.cluster.controller_process import ControllerProcess
from tests.sim.coordinator.coordinators import Coordinator
from tests.sim.disks import PartitionLog
from tests.sim.kernel import MILLISECOND, Clock, Process, Violation
from tests.sim.raft.quorum_disk import QuorumDisk
from tests.sim.replica.batch_worker import BatchWorker
from tests.sim.replica.model_worker import Control, ModelWorker
from tests.sim.replica.native_replica import NativeReplica
from tests.sim.replica.partition_replica import Assignment, Member, Proposal

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld

INT64_MAX = (1 << 63) - 1
Partition = tuple[bytes, int]


class Subscriber:
    """A process that is connected with its host's controller, again when that one is another."""

    role = ""
    index = 0

    def __init__(self, host: ClusterHost) -> None:
        self.controller: ControllerProcess | None = None
        self.client = -1
        self.generation = host.new_generation()

    def join(self, host: ClusterHost, process: Process) -> None:
        controller = host.controller
        if controller is None or not controller.process.alive or not controller.accepts:
            self.controller = None
            host.waiting.append((process, self))
            return
        self.controller = controller
        self.client = controller.connect(process, self.hears, self.role)
        self.say(host, Subscribe(self.role, self.index, self.generation))

    def say(self, host: ClusterHost, message: Any) -> None:
        if self.controller is not None:
            host.kernel.after(20, self.controller.process, self.controller.on_message, self.client, message)

    def hears(self, controller: ControllerProcess, message: Any) -> None:
        if controller is self.controller:
            self.on_message(message)

    def on_message(self, message: Any) -> None:
        raise NotImplementedError


class ClusterWorker(BatchWorker, Subscriber):
    role = "worker"

    def __init__(self, host: ClusterHost, index: int) -> None:
        world = host.world
        Subscriber.__init__(self, host)
        BatchWorker.__init__(self, host, world.history, self._new_core, world.off, world.fetch_max)
        self.index = index
        self.generation = host.take_generation(index)
        self.cluster_host = host
        self.catalog = Catalog(index, world.worker_config, host.incarnation)
        self._told = False
        self._catching_up: dict[Partition, Shortened] = {}
        self._refused: set[Partition] = set()  # is to lead them and does not
        self._version = -1
        self.join(host, self.process)

    def _new_core(self, log: PartitionLog) -> NativeReplica:
        return NativeReplica(log, True, self.cluster_host.world.off)

    def on_message(self, message: Any) -> None:
        match message:
            case Image():
                if message.version < self._version and self.cluster_host.world.off.isdisjoint(("PAST", "R10")):
                    raise Violation(
                        "OLDER",
                        f"node {self.cluster_host.node}: worker {self.index} has version {self._version} in force and"
                        f" is told {message.version}",
                    )
                if not self._told:  # strays are set aside
                    self._told = True
                    self._set_aside({topic.topic_id for topic in message.topics})
                self._carry_out(self.catalog.on_image(message))
                self._applied(message.version)
            case Several():
                self._carry_out(self.catalog.on_several(message.parts))
                self._applied(message.version)
            case InSyncAnswer():
                self.on_answered(
                    (message.topic_id, message.index), message.sequence, message.leader_epoch, message.error
                )
            case _ if hasattr(message, "version"):
                self._carry_out(self.catalog.on_message(message))
                self._applied(message.version)

    def on_failed(self) -> None:
        """A file in the directory says so, and the controller is told."""
        self.cluster_host.flush_failed = True
        self.say(self.cluster_host, Applied(self._version, self._failures()))

    def _failures(self) -> dict[int, str]:
        """What it does not serve."""
        owned = self.catalog.owned.values()
        return {each.slot: "" for each in owned if self.failed or each.key in self._refused}

    def _while_shortened(
        self, log: PartitionLog, partition: Partition, assignment: WorkerAssignment
    ) -> WorkerAssignment:
        """As PartitionSet does it."""
        given, is_whole = self._catching_up.setdefault(partition, Shortened()).take(assignment)
        self._refused.discard(partition)
        if is_whole:
            log.shortened = False
        elif is_wanted(assignment):
            self._refused.add(partition)
        return given

    def _set_aside(self, known: set[bytes]) -> None:
        host = self.cluster_host
        for key in [key for key in host.logs if key[0] not in known and owner_index(host, key) == self.index]:
            del host.logs[key]

    def _applied(self, version: int) -> None:
        delay = 30 if self.kernel.random.random() < 0.8 else self.kernel.random.randrange(5_000)
        self._version = version
        self.kernel.after(delay, self.process, self._say_applied, version)

    def _say_applied(self, version: int) -> None:
        self.say(self.cluster_host, Applied(version, self._failures()))

    def _carry_out(self, changes: Changes) -> None:
        for owned in changes.delete:
            self.remove(owned.key)
        for owned in changes.close:
            place = self.places.pop(owned.key, None)
            if place is not None:
                self._refuse(place, 6)
        for owned in changes.open:
            if not owned.replicated:  # one replica: the fast path; here the same core with nobody else
                self._give(owned, self._alone(owned))
        for owned in changes.set_epoch:
            self._give(owned, self._alone(owned))
        for owned, assignment in changes.assign:
            self._give(owned, assignment)

    def _alone(self, owned: Owned) -> WorkerAssignment:
        catalog = self.catalog
        topic = catalog.topic_of(owned)
        return assignment_of(
            topic,
            topic.partitions[owned.index],
            catalog.cluster,
            settings_of(topic, catalog.cluster, self.cluster_host.world.worker_config),
        )

    def _give(self, owned: Owned, assignment: WorkerAssignment) -> None:
        host = self.cluster_host
        # R10: a core leads and follows only as the registration that its metadata show
        epoch = host.broker_epoch if host.ready or "R10" in self.off else -1
        if "R10" in self.off and epoch < 0:
            epoch = assignment.broker_epoch
        log = host.logs.get(owned.key)
        if log is not None and log.shortened and "shortened" not in self.off:
            assignment = self._while_shortened(log, owned.key, assignment)
        members = tuple(
            [
                Member(member.node_id, member.in_sync, member.eligible, member.broker_epoch)
                for member in assignment.members
            ]
        )
        given = Assignment(
            host.node,
            epoch,
            assignment.leader,
            assignment.leader_epoch,
            assignment.partition_epoch,
            assignment.min_insync,
            members,
        )
        place = self.places.get(owned.key)
        core = place.core if place is not None else None
        if core is not None:
            core.flush_on_ack, core.lag_ms_max, core.lag_records_max = (
                assignment.flush_on_ack,
                assignment.lag_ms_max,
                assignment.lag_records_max,
            )
        if (
            given.leader == host.node
            and given.leader_epoch <= host.controls.setdefault(owned.key, Control()).led
            and (place is None or place.refused_epoch >= given.leader_epoch >= place.core.leader_epoch)
        ):
            raise Violation(
                "W2",
                f"node {host.node}: a new worker is to lead {owned.name} in epoch {given.leader_epoch}, which its"
                " predecessor led",
            )
        self.assign(owned.key, given)
        place = self.places[owned.key]
        if core is None:
            place.core.flush_on_ack, place.core.lag_ms_max, place.core.lag_records_max = (
                assignment.flush_on_ack,
                assignment.lag_ms_max,
                assignment.lag_records_max,
            )
            self.assign(owned.key, given)

    def on_broker_changed(self) -> None:
        """The control segment says something else of this host as a broker."""
        for owned in list(self.catalog.owned.values()):
            assignment = self.catalog.assigned.get(owned.key) or self._alone(owned)
            self._give(owned, assignment)


class Acceptor(Subscriber):
    """Passes changes of clients on, and knows who leads what."""

    role = "acceptor"

    def __init__(self, host: ClusterHost) -> None:
        super().__init__(host)
        self.host = host
        self.process = Process(f"acceptor {host.node}")
        self.leaders: dict[Partition, tuple[int, int]] = {}  # leader, its epoch
        self._asked: dict[int, Any] = {}
        self._number = 0
        transactions = host.world.transactions
        self.transactions = transactions.coordination(self) if transactions is not None else None
        self.coordinator = Coordinator(self) if host.world.plan.has_coordinators else None
        self.join(host, self.process)

    def on_request(self, change: Any, caller: Any) -> None:
        self._number += 1
        self._asked[self._number] = caller
        self.say(self.host, Request(self._number, change))

    def on_message(self, message: Any) -> None:
        self._apply(message)
        if self.transactions is not None:
            self.transactions.on_metadata(message)

    def _apply(self, message: Any) -> None:
        match message:
            case Image():
                self.leaders = {}
                for topic in message.topics:
                    self._learn(topic.topic_id, topic.partitions)
            case TopicPut():
                self._learn(message.topic.topic_id, message.topic.partitions)
            case PartitionsPut():
                self._learn(message.topic_id, message.partitions)
            case TopicRemoved():
                self.leaders = {key: leader for key, leader in self.leaders.items() if key[0] != message.topic_id}
            case Several():
                for part in message.parts:
                    self._apply(part)
            case BrokersPut():
                pass
            case Answer():
                caller = self._asked.pop(message.request_id, None)
                if caller is not None:
                    node, process, do, token = caller
                    self.host.network.send(self.host.node, node, process, do, token, message)

    def _learn(self, topic_id: bytes, partitions: Any) -> None:
        for partition in partitions:
            self.leaders[topic_id, partition.index] = (partition.leader, partition.leader_epoch)
        if self.coordinator is not None:
            self.host.kernel.after(0, self.process, self.coordinator.look)


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
        self._ended_well = False  # each worker has left its marker
        self.excused = False  # its keeper has proven that nobody leads anything here
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
        self._same_boot = False  # clean only because the kernel goes on
        self.flush_failed = False  # a file in the log directory
        self.doubtful = False  # the session of its broker says so

    def _new_control(self) -> None:
        self.keeper: object | None = None  # whose life all of this is
        self._next: dict[int, int] = {}  # worker that does not live -> its generation when it will
        self.orders: Notice | None = None  # what the keeper is to say when the controller has ended
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
        """Of the worker that lives there, or will: as in the control segment, a death ends one."""
        if owner >= len(self.workers):
            return -1
        worker = self.workers[owner]
        if worker is None and owner not in self._next:
            self._next[owner] = self.new_generation()
        return worker.generation if worker is not None else self._next[owner]

    def take_generation(self, owner: int) -> int:
        """A new worker's."""
        return self._next.pop(owner, 0) or self.new_generation()

    def new_generation(self) -> int:
        self._generation += 1
        return self._generation

    # -- what its processes ask --------------------------------------------------------------------

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
        worker.say(
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
                told = log.entries[: log.on_disk]
                log.reopen(self.kernel.random, "CRC" not in self.world.off)
                if log.end < len(told):
                    self.world.history.lost(partition, told)
        self.flush_failed = self._ended_well = False
        self.leaving = self.excused = False
        self._new_control()
        self.keeper = object()
        self._start_controller()
        self.acceptor = Acceptor(self)
        for index in range(len(self.workers)):
            self.workers[index] = ClusterWorker(self, index)
        self.clean_epoch, self._same_boot = -1, False  # the marker is taken away once it was read
        self.doubtful = False

    def accepts(self) -> None:
        """Its controller takes connections from here on."""
        waiting, self.waiting = self.waiting, []
        for process, subscriber in waiting:
            self.kernel.after(self.kernel.random.randrange(100, 20_000), process, subscriber.join, self, process)

    def _start_controller(self) -> None:
        if self.controller is not None:
            return
        self.leaving = False  # nobody has asked this process to end
        self.controller = self.world.controller_class(self)
        self.controller.start()

    def stop(self, how: str) -> None:
        """kill (page cache kept), power, wipe: all processes at once, the keeper among them."""
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
        """supervisord starts another; the keeper tells the controller of the death."""
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
        """Workers and acceptor; the keeper has the proof and tells the controller, and again when
        they are back.
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
        """supervisord's work, whether there is a controller or not; one that has been started
        meanwhile has not heard that they were gone.
        """
        self._start_acceptor()
        for index in range(len(self.workers)):
            self._start_worker(index)  # one that is back already has no twin
        controller = self.controller
        if controller is not None:
            self.kernel.after(100, controller.process, controller.on_broker, broker_core.HostDied(False))
        self.excused = False

    def kill_processes(self) -> None:
        """All but the keeper, who takes the lease back and tells the others; each is started again,
        in its own time.
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
        """As mqd/keeper/proof.py has it."""
        orders = self.orders
        if orders is None or (orders.broker_epoch != self.broker_epoch if all_ended else not orders.led):
            return
        notice = msgspec.structs.replace(
            orders, broker_epoch=orders.broker_epoch if all_ended else -1, sent_ms=self.clock.now() // 1_000_000
        )
        for wait_ms in REPEATS_MS:
            self.kernel.after(
                wait_ms * MILLISECOND, None, self._if_alive, self.keeper, partial(self._tell_others, notice)
            )

    def _tell_others(self, notice: Notice) -> None:
        for other in self.world.hosts:
            if other is not self and other.controller is not None:
                self.network.send(self.node, other.node, other.controller.process, other.controller.on_notice, notice)

    def ask_shutdown(self) -> None:
        if self.controller is not None and not self.leaving:
            self.leaving = True
            self.controller.on_broker(broker_core.ShutdownRequested())

    def shut_down(self, action: broker_core.ShutDown) -> None:
        """Flush, write the marker, end; started again a while later."""
        self.kernel.tell("ends", self.node, action.broker_epoch)
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


def owner_index(host: ClusterHost, partition: Partition) -> int:
    return owner_of(partition[0], partition[1], len(host.workers))
