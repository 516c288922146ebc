"""The processes of a simulated host that subscribe to its controller: workers and the acceptor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mqd.cluster.host.images import owner_of
from mqd.cluster.host.messages import (
    Applied,
    BrokersPut,
    Image,
    InSyncResponse,
    MessageList,
    PartitionsPut,
    Request,
    Response,
    Subscribe,
    TopicPut,
    TopicRemoved,
)
from mqd.worker.assignments import Assignment as WorkerAssignment
from mqd.worker.assignments import assignment_of, settings_of
from mqd.worker.catalog import Catalog, Changes, OwnedPartition
from mqd.worker.shortened_log import ShortenedState, is_leader_or_candidate
from tests.sim.cluster.controller_process import ControllerProcess
from tests.sim.cluster.rights import Known
from tests.sim.coordinator.coordinators import Coordinator
from tests.sim.disks import PartitionLog
from tests.sim.kernel import Process, Violation
from tests.sim.replica.batch_worker import BatchWorker
from tests.sim.replica.model_worker import Control
from tests.sim.replica.native_replica import NativeReplica
from tests.sim.replica.partition_replica import Assignment, Member

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost

Partition = tuple[bytes, int]


class Subscriber:
    """A process with a connection to its host's controller; it reconnects to a new controller."""

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
        self.client = controller.connect(process, self.is_subscribed, self.role)
        self.send(host, Subscribe(self.role, self.index, self.generation))

    def send(self, host: ClusterHost, message: Any) -> None:
        if self.controller is not None:
            host.kernel.after(20, self.controller.process, self.controller.on_message, self.client, message)

    def is_subscribed(self, controller: ControllerProcess, message: Any) -> None:
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
        self.known = Known()
        self._reported = False
        self._catching_up: dict[Partition, ShortenedState] = {}
        self._refused: set[Partition] = set()  # partitions that it should lead and does not
        self._version = -1
        self.join(host, self.process)

    def _new_core(self, log: PartitionLog) -> NativeReplica:
        return NativeReplica(log, True, self.cluster_host.world.off)

    def on_message(self, message: Any) -> None:
        self.known.receive(message)
        match message:
            case Image():
                if message.version < self._version and self.cluster_host.world.off.isdisjoint(("PAST", "R10")):
                    raise Violation(
                        "OLDER",
                        f"node {self.cluster_host.node}: worker {self.index} has version {self._version} in force and"
                        f" is told {message.version}",
                    )
                if not self._reported:  # strays are set aside
                    self._reported = True
                    self._set_aside({topic.topic_id for topic in message.topics})
                self._carry_out(self.catalog.on_image(message))
                self._applied(message.version)
            case MessageList():
                self._carry_out(self.catalog.apply_updates(message.parts))
                self._applied(message.version)
            case InSyncResponse():
                self.on_answered(
                    (message.topic_id, message.index), message.sequence, message.leader_epoch, message.error
                )
            case _ if hasattr(message, "version"):
                self._carry_out(self.catalog.on_message(message))
                self._applied(message.version)

    def on_failed(self) -> None:
        """A file in the directory records it, and the controller gets a report."""
        self.cluster_host.flush_failed = True
        self.send(self.cluster_host, Applied(self._version, self._failures()))

    def _failures(self) -> dict[int, str]:
        """Partitions that it does not serve."""
        owned = self.catalog.owned.values()
        return {each.slot: "" for each in owned if self.failed or each.key in self._refused}

    def _while_shortened(
        self, log: PartitionLog, partition: Partition, assignment: WorkerAssignment
    ) -> WorkerAssignment:
        """Like PartitionSet."""
        given, is_whole = self._catching_up.setdefault(partition, ShortenedState()).on_assignment(assignment)
        self._refused.discard(partition)
        if is_whole:
            log.shortened = False
        elif is_leader_or_candidate(assignment):
            self._refused.add(partition)
        return given

    def _set_aside(self, known: set[bytes]) -> None:
        host = self.cluster_host
        for key in [key for key in host.logs if key[0] not in known and owner_index(host, key) == self.index]:
            del host.logs[key]

    def _applied(self, version: int) -> None:
        delay = 30 if self.kernel.random.random() < 0.8 else self.kernel.random.randrange(5_000)
        self._version = version
        self.kernel.after(delay, self.process, self._report_applied, version)

    def _report_applied(self, version: int) -> None:
        self.send(self.cluster_host, Applied(version, self._failures()))

    def _carry_out(self, changes: Changes) -> None:
        for owned in changes.delete:
            self.remove(owned.key)
        for owned in changes.close:
            place = self.places.pop(owned.key, None)
            if place is not None:
                self._refuse(place, 6)
        for owned in changes.open:
            if not owned.gets_assignments:  # one replica: the fast path; here the same core without another host
                self._give(owned, self._alone(owned))
        for owned in changes.set_epoch:
            self._give(owned, self._alone(owned))
        for owned, assignment in changes.assign:
            self._give(owned, assignment)

    def _alone(self, owned: OwnedPartition) -> WorkerAssignment:
        catalog = self.catalog
        topic = catalog.topic_of(owned)
        return assignment_of(
            topic,
            topic.partitions[owned.index],
            catalog.cluster,
            settings_of(topic, catalog.cluster, self.cluster_host.world.worker_config),
        )

    def _give(self, owned: OwnedPartition, assignment: WorkerAssignment) -> None:
        host = self.cluster_host
        # R10: a core leads and follows only under the registration in its metadata
        epoch = host.broker_epoch if host.ready or "R10" in self.off else -1
        if "R10" in self.off and epoch < 0:
            epoch = assignment.broker_epoch
        log = host.logs.get(owned.key)
        if log is not None and log.shortened and "shortened" not in self.off:
            assignment = self._while_shortened(log, owned.key, assignment)
        members = tuple(
            [
                Member(member.node_id, member.in_sync, member.eligible, member.broker_epoch, member.moving)
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
            _set(core, assignment)
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
            _set(place.core, assignment)
            self.assign(owned.key, given)

    def on_broker_changed(self) -> None:
        """The control segment has a new state of this host as a broker."""
        for owned in list(self.catalog.owned.values()):
            assignment = self.catalog.assigned.get(owned.key) or self._alone(owned)
            self._give(owned, assignment)


def _set(core: Any, assignment: WorkerAssignment) -> None:
    core.flush_on_ack, core.acks_replicas = assignment.flush_on_ack, assignment.acks_replicas
    core.lag_ms_max, core.lag_records_max = assignment.lag_ms_max, assignment.lag_records_max


class Acceptor(Subscriber):
    """Forwards changes of clients, and knows the leaders."""

    role = "acceptor"

    def __init__(self, host: ClusterHost) -> None:
        super().__init__(host)
        self.host = host
        self.process = Process(f"acceptor {host.node}")
        self.leaders: dict[Partition, tuple[int, int]] = {}  # leader, its epoch
        self.known = Known()
        self._requested: dict[int, Any] = {}
        self._changes: dict[int, Any] = {}
        self._number = 0
        transactions = host.world.transactions
        self.transactions = transactions.coordination(self) if transactions is not None else None
        self.coordinator = Coordinator(self) if host.world.plan.has_coordinators else None
        self.join(host, self.process)

    def on_request(self, change: Any, caller: Any) -> None:
        self._number += 1
        self._requested[self._number] = caller
        self._changes[self._number] = change
        self.send(self.host, Request(self._number, change))

    def on_message(self, message: Any) -> None:
        self.known.receive(message)
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
            case MessageList():
                for part in message.parts:
                    self._apply(part)
            case BrokersPut():
                pass
            case Response():
                change = self._changes.pop(message.request_id, None)
                if self.host.world.rights is not None:
                    self.host.world.rights.on_answer(self, change, message)
                caller = self._requested.pop(message.request_id, None)
                if caller is not None:
                    node, process, do, token = caller
                    self.host.network.send(self.host.node, node, process, do, token, message)

    def _learn(self, topic_id: bytes, partitions: Any) -> None:
        for partition in partitions:
            self.leaders[topic_id, partition.index] = (partition.leader, partition.leader_epoch)
        if self.coordinator is not None:
            self.host.kernel.after(0, self.process, self.coordinator.look)


def owner_index(host: ClusterHost, partition: Partition) -> int:
    return owner_of(partition[0], partition[1], len(host.workers))
