"""Whole clusters of the real cores: quorum, metadata, host and broker cores in each host's
controller, the replication core in C in each worker, in simulated time, networks, disks, clocks,
processes and clients from one seed. Chaos, then healing. `python -m tests.sim.replay SEED` repeats
a seed and prints it.

Checked at each step, besides the assertions of each core (names as in the design page)
    I1  one leader in an epoch
    I2  the committed records are the same everywhere
    I4  a vote never regresses (quorum_disk)
    I5  nothing is applied before it is committed
    I6  epochs only rise
    L1  one valid lease at a time
    L2  a fenced host has no lease
    L4  nothing is accepted without a lease
    W2  a worker never leads in an epoch that its predecessor led
    P1..P10, C1..C4, R11, R12: history.py
and at the end, after healing: every partition has a leader, is fully replicated and makes progress,
all hosts have the same metadata, acknowledged records exist (LIVE, C1)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from mqd.cluster.host import messages
from mqd.cluster.host.images import owner_of
from mqd.cluster.membership import peer_messages
from mqd.cluster.metadata.features import ACKS_REPLICAS_LEVEL, MQD_VERSION
from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import BrokerChanged, BrokerRegistered, PartitionState, decode_record
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.elections import UNCLEAN_ENABLE
from mqd.cluster.metadata.rules.partitions import (
    ACKS_REPLICAS,
    acks_replicas,
    configured_min_in_sync,
    effective_min_in_sync,
)
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import QuorumSettings
from mqd.cluster.raft.messages import DATA, Batch, SnapshotMeta, Voter
from tests.planted import plant
from tests.sim.clients import Asker, Client, Consumer, Producer
from tests.sim.cluster import retirement
from tests.sim.cluster.cluster_faults import Faults
from tests.sim.cluster.cluster_host import ClusterHost
from tests.sim.cluster.cluster_plan import Admin, Plan, draw_plan
from tests.sim.cluster.controller_process import ControllerProcess, encode_state
from tests.sim.cluster.host_processes import ClusterWorker
from tests.sim.cluster.retirement import Retirement
from tests.sim.cluster.rights import Rights
from tests.sim.coordinator import coordinators, pipelining
from tests.sim.coordinator.group_members import MemberGroups
from tests.sim.disks import PartitionLog
from tests.sim.history import History, PartitionView
from tests.sim.kernel import MILLISECOND, SECOND, Kernel, Network, Violation
from tests.sim.replica.model_worker import Place

Partition = tuple[bytes, int]
HEAL_MAX = 90 * SECOND


class ClusterWorld:
    transactions: Any = None  # transaction_cluster.py's

    def __init__(
        self,
        seed: int,
        off: frozenset[str] = frozenset(),
        plan: Plan | None = None,
        quorum_class: type[QuorumCore] = QuorumCore,
        quiet: bool = False,
    ) -> None:
        self.seed = seed
        kernel = self.kernel = Kernel(f"cluster {seed}")
        random = kernel.random
        self.plan = plan = plan if plan is not None else draw_plan(random)
        self.off = off
        plant(off)
        self.host_count = plan.hosts
        self.client_node = plan.hosts
        self.network = Network(kernel, plan.hosts + 1)
        self.options = ControllerOptions(
            session_ms=plan.session_ms,
            heartbeat_ms=plan.session_ms // 5,
            replication_recovery_delay_ms=random.choice((-1, 5_000, 60_000)),
            leader_balance_check_ms=random.choice((3_000, 300_000)),
            leader_balance_stable_ms=1_000,
            shutdown_wait_ms=5_000,
            retire_barrier_ms=retirement.BARRIER_MS,
            retire_grace_ms=retirement.GRACE_MS,
            token_check_ms=500,
        )
        self.quorum_settings = QuorumSettings(
            promise_ns=plan.promise_ms * 1_000_000,
            log_bytes_max=random.choice((3_000, 20_000, 1 << 20)),
            retained_bytes=random.choice((500, 5_000, 1 << 20)),
        )
        if plan.rights and seed % 2 == 0:  # with so few records there would seldom be a snapshot
            self.quorum_settings = msgspec.structs.replace(
                self.quorum_settings, log_bytes_max=1_500, retained_bytes=500
            )
        self.quorum_class = quorum_class
        self.controller_class = ControllerProcess
        self.config_rules = ConfigRules(
            {"inter.broker.listener": "127.0.0.1:9093", "controller.listener": "127.0.0.1:9094"}
        )
        self.worker_config = {"replica.lag.time.max.ms": "1500"}
        self.tick_ms = 200
        self.fetch_max = plan.fetch_max
        self.producer_ids = self.values = self._number = 0
        self.history = History(self.view, self.running, self.logs, self.flush_on_ack)
        self._ghost()
        self.members = MemberGroups(self) if plan.members else None
        self.retirement = Retirement(self) if plan.retire else None
        self.rights = Rights(self) if plan.rights else None
        parts = (self.members, self.retirement, self.rights)
        self._more: list[Any] = [part for part in parts if part is not None]
        self.hosts: list[ClusterHost] = []
        for node in range(plan.hosts):
            self.hosts.append(ClusterHost(self, node, random.choice((None, "r1", "r2")), plan.workers))
        self._found(plan.voters)
        self.faults = Faults(self, quiet)
        self.admin = Admin(self, 50 * MILLISECOND)
        self.clients: list[Client] = [self.admin]
        kernel.after_each = self._after_each
        for host in self.hosts:
            host.start()

    # -- making ------------------------------------------------------------------------------------

    def _ghost(self) -> None:
        """The metadata up to the last batch that any host knows to be committed."""
        self.state = MetadataState()
        self.state.cluster_id = "simulated"
        self.committed: dict[int, Batch] = {}  # by base offset
        self.leaders: dict[int, Any] = {}  # quorum epoch -> its leader

    def _found(self, voters: int) -> None:
        keys = tuple([self.voter(node) for node in range(voters)])
        data = encode_state(self.state)
        for node in range(voters):
            self.hosts[node].disk.snapshot = (SnapshotMeta(0, 0, keys, 1), data)

    def voter(self, node: int) -> Voter:
        return Voter(self.hosts[node].key, f"host{node}", 9094)

    def _create_topics(self, plan: Plan) -> None:
        replicas = min(3, plan.hosts)
        spares = {}
        if plan.acks_replicas:
            self.admin.requested.append(
                messages.UpdateFeatures([messages.FeatureUpdate(MQD_VERSION, ACKS_REPLICAS_LEVEL, 1)])
            )
            spares = {ACKS_REPLICAS: str(plan.acks_replicas)}
        for name, flush in (("flushed", "true"), ("cached", "false")):
            self.admin.requested.append(
                messages.CreateTopic(
                    name,
                    plan.partitions,
                    replicas,
                    {},
                    {
                        "flush.on.ack": flush,
                        "min.insync.replicas": "2",
                        **spares,
                        **({UNCLEAN_ENABLE: "true"} if plan.unclean else {}),
                    },
                )
            )

        if plan.retire:
            self.admin.requested.append(
                messages.CreateTopic(retirement.TOPIC, plan.retire, replicas, {}, {"min.insync.replicas": "2"})
            )
        if plan.has_coordinators:
            self.admin.requested.append(
                messages.CreateTopic(coordinators.TOPIC, 2, replicas, {}, {"cleanup.policy": "compact"})
            )

    def coordinated(self) -> list[Partition]:
        topic = self.state.topics.get(coordinators.TOPIC)
        return [(topic.topic_id, partition.index) for partition in topic.partitions] if topic is not None else []

    def new_topic_id(self) -> bytes:
        return self.kernel.random.getrandbits(128).to_bytes(16, "big")

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def new_drift(self) -> float:
        return self.kernel.random.uniform(-self.plan.drift_max, self.plan.drift_max)

    # -- called by others --------------------------------------------------------------------------

    def flush_delay(self, host: ClusterHost) -> int:
        return self.faults.flush_delay(host)

    def start_host(self, host: ClusterHost) -> None:
        if not host.up:
            host.start()

    def worker_of(self, node: int, partition: Partition) -> ClusterWorker | None:
        if not 0 <= node < self.host_count:
            return None
        workers = self.hosts[node].workers
        return workers[owner_of(partition[0], partition[1], len(workers))]

    def send_peer(self, source: int, target: int, message: msgspec.Struct) -> None:
        if not 0 <= target < self.host_count:
            return
        controller = self.hosts[target].controller
        if controller is None:
            return
        if self.plan.wire:
            message = peer_messages.decode(peer_messages.encode(message)[4:])
        self.network.send(source, target, controller.process, controller.on_peer, source, message)

    def view(self, partition: Partition) -> PartitionView | None:
        state = self.state
        name = state.topics_by_id.get(partition[0])
        if name is None or partition[1] >= len(state.topics[name].partitions):
            return None
        topic = state.topics[name]
        found = topic.partitions[partition[1]]
        configured = configured_min_in_sync(topic.config, state.broker_configs.get("", {}))
        minimum = effective_min_in_sync(configured, len(found.replicas), len(found.adding_replicas))
        return PartitionView(
            found.leader,
            found.leader_epoch,
            found.partition_epoch,
            found.replicas,
            found.in_sync_replicas,
            found.eligible_leader_replicas,
            minimum,
        )

    def flush_on_ack(self, partition: Partition) -> bool:
        name = self.state.topics_by_id.get(partition[0])
        return name is not None and self.state.topics[name].config.get("flush.on.ack", "true") == "true"

    def running(self, node: int, partition: Partition) -> Place | None:
        host = self.hosts[node]
        broker = self.state.brokers.get(node)
        if broker is None or host.broker_epoch != broker.epoch or not host.ready:
            return None
        worker = self.worker_of(node, partition)
        return worker.places.get(partition) if worker is not None else None

    def logs(self, partition: Partition) -> Iterable[PartitionLog]:
        return [host.logs[partition] for host in self.hosts if partition in host.logs]

    def partitions(self) -> list[Partition]:
        return [
            (topic.topic_id, partition.index) for topic in self.state.topics.values() for partition in topic.partitions
        ]

    def leader_hint(self, partition: Partition) -> tuple[int, int]:
        acceptor = self.hosts[self.kernel.random.randrange(self.host_count)].acceptor
        return acceptor.leaders.get(partition, (-1, -1)) if acceptor is not None else (-1, -1)

    def replica_hint(self, partition: Partition) -> int:
        view = self.view(partition)
        return self.kernel.random.choice(view.replicas) if view is not None else -1

    def active(self) -> ControllerProcess | None:
        """The active controller with the highest quorum epoch."""
        found = [
            host.controller for host in self.hosts if host.controller is not None and host.controller.quorum.is_active
        ]
        return max(found, key=lambda controller: controller.quorum.epoch, default=None)

    # -- what is checked ---------------------------------------------------------------------------

    def after_quorum(self, controller: ControllerProcess) -> None:
        quorum = controller.quorum
        if quorum.is_leader:
            known = self.leaders.setdefault(quorum.epoch, quorum.key)
            if known != quorum.key:
                raise Violation("I1", f"epoch {quorum.epoch} is led by {quorum.key} and by {known}")
            self._check_leases()

    def _check_leases(self) -> None:
        if not self.plan.drift_is_bounded:
            return
        holders = []
        for host in self.hosts:
            controller = host.controller
            if controller is not None and controller.quorum.is_leader and controller.quorum.has_lease(host.clock.now()):
                holders.append(host.node)
        if len(holders) > 1:
            raise Violation("L1", f"hosts {holders} hold the controller's lease")

    def on_committed(self, node: int, batch: Batch) -> None:
        """A host has received this batch as committed."""
        state = self.state
        if batch.base_offset < state.version:
            known = self.committed.get(batch.base_offset)
            if known is not None and known != batch:
                raise Violation(
                    "I2", f"node {node} is told {batch} at offset {batch.base_offset}; committed is {known}"
                )
            return
        if batch.base_offset != state.version:
            raise Violation(
                "I2",
                f"node {node} is told offset {batch.base_offset} as committed; the last one known is {state.version}",
            )
        self.committed[batch.base_offset] = batch
        if batch.kind == DATA:
            for value in batch.values:
                self._apply(decode_record(value))
        state.version = batch.next_offset
        state.check()

    def _apply(self, record: Any) -> None:
        state, history = self.state, self.history
        before = dict(state.topics)
        if isinstance(record, BrokerChanged) and record.fenced:
            self._check_fencing(record)
        state.apply(record)
        if self.rights is not None:
            self.rights.applied(record)
        for name, topic in state.topics.items():
            old = before.get(name)
            if old is topic:
                continue
            for partition in topic.partitions:
                key = (topic.topic_id, partition.index)
                was = (
                    old.partitions[partition.index]
                    if old is not None and old.topic_id == topic.topic_id and partition.index < len(old.partitions)
                    else None
                )
                if was is None or was.leader_epoch != partition.leader_epoch:
                    history.chosen(key, partition.leader_epoch)
                    if was is not None and partition.recovering and partition.leader >= 0:
                        self._chosen_uncleanly(key, was, partition)
                history.dirty[key] = None
        if self.retirement is not None:
            self.retirement.applied(before)
        if isinstance(record, BrokerRegistered | BrokerChanged):
            history.dirty.update(dict.fromkeys(self.partitions()))

    def _chosen_uncleanly(self, key: Partition, was: PartitionState, now: PartitionState) -> None:
        """UNCLEAN: only where it is configured, and only if no replica that has everything is
        alive.
        """
        if now.leader in was.in_sync_replicas + was.eligible_leader_replicas:
            return  # an earlier unclean leader, which has not begun yet
        if not self.plan.unclean:
            raise Violation("UNCLEAN", f"{key}: {now.leader} leads, which was not in sync: {was}")
        self.history.chosen_uncleanly(key, now.leader_epoch)

    def _check_fencing(self, record: BrokerChanged) -> None:
        """L2. A host that has ended, or whose data plane has died, has no usable lease."""
        host = self.hosts[record.node_id]
        if (
            not self.plan.drift_is_bounded
            or host.broker_epoch != record.epoch
            or host.excused
            or self.state.brokers[record.node_id].in_controlled_shutdown
        ):
            return
        now = host.clock.now()
        if now < host.lease_deadline_ns and any(worker is not None for worker in host.workers):
            raise Violation(
                "L2", f"node {host.node} is fenced with {(host.lease_deadline_ns - now) / 1e9:.3f} s of its lease left"
            )

    def _after_each(self) -> None:
        if self.history.dirty:
            self.history.check()
        for part in self._more:
            part.check()

    # -- the run -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Runs until there are topics."""
        kernel = self.kernel
        last = kernel.now + 30 * SECOND
        while (
            kernel.now < last and sum([not broker.fenced for broker in self.state.brokers.values()]) < self.host_count
        ):
            kernel.run(until=kernel.now + 20 * MILLISECOND)
        self._create_topics(self.plan)
        while kernel.now < last and (self.admin.requested or self.admin.change is not None):
            kernel.run(until=kernel.now + 100 * MILLISECOND)
        if len(self.state.topics) < 2 + self.plan.has_coordinators + bool(self.plan.retire):
            raise Violation("LIVE", "no topics in 30 s")
        random = kernel.random
        coordinated = self.coordinated()
        others = {
            state.topic_id
            for name in (coordinators.TOPIC, retirement.TOPIC)
            if (state := self.state.topics.get(name)) is not None
        }
        partitions = [
            partition for partition in self.partitions() if partition[0] not in others and partition not in coordinated
        ]
        for number in range(self.plan.groups):
            self.clients.append(
                coordinators.GroupClient(
                    self, number, coordinated[number % len(coordinated)], random.choice((20, 60)) * MILLISECOND
                )
            )
        for number in range(self.plan.pipelines):
            self.clients.append(
                pipelining.PipelinedClient(
                    self, self.plan.groups + number, coordinated[number % len(coordinated)], 20 * MILLISECOND
                )
            )
        for part in self._more:
            part.begin()
        for number in range(self.plan.producers):
            all_acks = number == 0 or random.random() < 0.7
            self.clients.append(
                Producer(
                    self,
                    partitions,
                    random.choice((5, 10, 20, 40)) * MILLISECOND,
                    all_acks,
                    number < 2,
                    random.choice((1, 3, 6)),
                )
            )
        self.clients.append(Consumer(self, partitions, 60 * MILLISECOND))
        self.clients.append(Consumer(self, partitions, 80 * MILLISECOND, nearest=True))
        self.clients.append(Asker(self, partitions, 100 * MILLISECOND))

    def run(self, chaos: int = 2_000) -> None:
        self.begin()
        self.faults.begin()
        self.kernel.run(steps=chaos)
        self.heal()
        self.check_end()

    def wall_ms(self) -> int:
        """The wall clock, the same on all hosts."""
        return 1_700_000_000_000 + self.kernel.now // MILLISECOND

    def heal(self) -> None:
        kernel = self.kernel
        self.faults.end()
        last = kernel.now + HEAL_MAX
        while kernel.now < last and not self.healed():
            kernel.run(until=kernel.now + 200 * MILLISECOND)
        for part in self._more:
            part.heal()
        for client in self.clients:
            client.stopping = True
        # leader balancing continues, and so do moves that have begun since (seed 105148)
        for _ in range(60):
            kernel.run(until=kernel.now + 1_500 * MILLISECOND)
            if all(map(self.settled, self.partitions())) and self.healed():
                break

    def settled(self, partition: Partition) -> bool:
        """Its leader has no work left."""
        view = self.view(partition)
        place = self.running(view.leader, partition) if view.leader >= 0 else None
        return self.stuck(partition) or (
            place is not None
            and place.core.leading
            and place.core.high_watermark == place.log.end
            and not place.waiting
        )

    def healed(self) -> bool:
        if self.admin.requested or self.admin.change is not None or self.active() is None:
            return False
        for host in self.hosts:
            broker = self.state.brokers.get(host.node)
            if (
                host.leaving
                or not host.complete
                or broker is None
                or broker.fenced
                or broker.epoch != host.broker_epoch
                or broker.in_controlled_shutdown
            ):
                return False
        versions = {host.controller.metadata.committed.version for host in self.hosts if host.controller is not None}
        return len(versions) == 1 and all(map(self.whole, self.partitions()))

    def stuck(self, partition: Partition) -> bool:
        """No replica may lead: an operator must choose."""
        view = self.view(partition)
        return view.leader < 0 and not view.in_sync and not view.eligible or self.shortened(view, partition)

    def shortened(self, view: PartitionView, partition: Partition) -> bool:
        """The only replica that may lead does not, because its log was truncated (the file
        `shortened`; seed 106608).
        """
        if len(view.in_sync) != 1 or view.leader not in (-1, *view.in_sync) or view.eligible:
            return False
        log = self.hosts[view.in_sync[0]].logs.get(partition)
        return log is not None and log.shortened

    def whole(self, partition: Partition) -> bool:
        view = self.view(partition)
        if self.stuck(partition):
            return True
        topic = self.state.topics[self.state.topics_by_id[partition[0]]]
        count = min(acks_replicas(topic.config) or len(view.replicas), len(view.replicas))
        return view.leader >= 0 and len(view.in_sync) == count and not self.moving(partition)

    def moving(self, partition: Partition) -> bool:
        topic = self.state.topics[self.state.topics_by_id[partition[0]]]
        found = topic.partitions[partition[1]]
        return bool(found.adding_replicas or found.removing_replicas)

    def check_end(self) -> None:
        self.stuck_count = 0
        if self.active() is None:
            raise Violation("LIVE", "no active controller: " + self.history_of_quorum())
        for host in self.hosts:
            if not host.complete:
                raise Violation(
                    "H2",
                    f"node {host.node} has processes that were not restarted: acceptor {host.acceptor},"
                    f" controller {host.controller}, workers {host.workers}",
                )
            broker = self.state.brokers.get(host.node)
            if broker is None or broker.fenced or broker.epoch != host.broker_epoch:
                raise Violation("LIVE", f"node {host.node} is not back: {broker}, its own epoch is {host.broker_epoch}")
        for partition in self.partitions():
            view = self.view(partition)
            if self.stuck(partition):
                if self.flush_on_ack(partition) and not self.faults.wiped and not self.shortened(view, partition):
                    raise Violation(
                        "STUCK",
                        f"{self.name(partition)}: no replica may lead although nothing durable was lost; {view}",
                    )
                self.stuck_count += 1
                continue
            if not self.whole(partition):
                raise Violation("LIVE", f"{self.name(partition)} has not healed: {view}")
            if not self.settled(partition):
                raise Violation("LIVE", f"{self.name(partition)}: its leader {view.leader} does not get on")
            self.history.check_end(partition, self.running(view.leader, partition))
        for host in self.hosts:
            if host.controller is not None:
                host.controller.check()
        for part in self._more:
            part.check_end()

    def name(self, partition: Partition) -> str:
        return f"{self.state.topics_by_id.get(partition[0], '?')}-{partition[1]}"

    def history_of_quorum(self) -> str:
        parts = []
        for host in self.hosts:
            controller = host.controller
            if controller is None:
                parts.append(f"{host.node}: down")
            else:
                quorum = controller.quorum
                parts.append(
                    f"{host.node}: epoch {quorum.epoch} leader {quorum.leader} voter {quorum.is_voter} log"
                    f" {quorum.log.end_offset} applied {quorum.applied_offset}"
                )
        return "; ".join(parts)
