"""The faults of a cluster, and when they occur: each run draws kinds of faults and their rates from
its seed (swarm testing), then everything is repaired.

Bounds that keep a run meaningful: a majority of the voters keeps its disks; a wiped host returns as
a new one; only one host is wiped at a time until everything is replicated again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.raft import events
from tests.sim.kernel import MILLISECOND

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost
    from tests.sim.cluster.cluster_world import ClusterWorld

# kind -> weight before the swarm's own factor
KINDS = {
    "link": 20,
    "isolate": 8,
    "split": 4,
    "mend": 22,
    "pause": 8,
    "pause_part": 5,
    "restart": 10,
    "power": 6,
    "many_down": 2,
    "clean": 5,
    "wipe": 1.5,
    "worker": 7,
    "acceptor": 3,
    "controller": 7,
    "data_plane": 3,
    "leaders": 9,
    "reassign": 4,
    "min_in_sync": 2,
    "voters": 3,
    "transfer": 3,
    "topics": 2,
    "slow_disk": 3,
    "drift": 1,
    "drain": 1,
    "full_disk": 3,
    "bad_disk": 1.5,
    "bits": 3,
    "processes": 6,
    "freeze": 4,
}


class Faults:
    def __init__(self, world: ClusterWorld, quiet: bool) -> None:
        self.world, self.kernel = world, world.kernel
        random = world.kernel.random
        self.weights = (
            {}
            if quiet
            else {kind: random.random() ** 2 * weight for kind, weight in KINDS.items() if random.random() < 0.7}
        )
        self.gap = random.choice((100, 300, 800, 2_000)) * MILLISECOND
        if world.plan.drift_is_bounded:
            self.weights.pop("freeze", None)  # a clock that stands still exceeds every bound
        if world.plan.faults:
            self.weights = {kind: KINDS[kind] for kind in world.plan.faults}
        self.slow: dict[int, int] = {}  # node -> microseconds at most
        self.wiped = 0
        self.voter_requests = -(1 << 60)  # when a voter change was last requested: it may still take effect
        self.over = False
        self.counts: dict[str, int] = {}

    def begin(self) -> None:
        self.kernel.after(self.kernel.random.randrange(200) * MILLISECOND, None, self._next)

    def _next(self) -> None:
        if self.over or not self.weights:
            return
        random = self.kernel.random
        kind = random.choices(list(self.weights), list(self.weights.values()))[0]
        self.kernel.report("fault", kind)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        getattr(self, "_" + kind)(random)
        self.kernel.after(int(random.expovariate(1 / self.gap)) + 1, None, self._next)

    def flush_delay(self, host: ClusterHost) -> int:
        slow = self.slow.get(host.node)
        random = self.kernel.random
        return random.randrange(200, 3_000) if slow is None or random.random() < 0.5 else random.randrange(3_000, slow)

    def end(self) -> None:
        """Everything is repaired."""
        self.over = True
        self.slow = {}
        world = self.world
        world.network.heal()
        for host in world.hosts:
            host.full, host.failing = False, 0.0
            for log in host.logs.values():
                log.repair()
            if any(worker is not None and worker.failed for worker in host.workers):
                host.stop("kill")  # as the log advises: another disk, or the same once it is repaired
            self._start(host)
            for process in host.processes():
                self.kernel.go_on(process)
            if not host.clock.rate or abs(host.clock.rate - 1) > 0.05:
                host.clock.set_drift(0.0)
        state = world.state
        for node, broker in state.brokers.items():
            if broker.draining:
                world.admin.requested.append(messages.DrainBroker(node, cancel=True))
        self.kernel.report("healed")

    def _any(self, random: Any) -> ClusterHost:
        """Often one that matters: the active controller's, or a leader's."""
        world = self.world
        if random.random() < 0.25:
            active = world.active()
            if active is not None:
                return active.host
        if random.random() < 0.3:
            partitions = world.partitions()
            leader = world.view(random.choice(partitions)).leader if partitions else -1
            if leader >= 0:
                return world.hosts[leader]
        return world.hosts[random.randrange(world.host_count)]

    def _start(self, host: ClusterHost) -> None:
        self.world.start_host(host)
        host.restart_controller()

    def _later(self, random: Any, host: ClusterHost, longest: int = 4_000) -> None:
        self.kernel.after(random.randrange(20, longest) * MILLISECOND, None, self._start, host)

    # -- the network -------------------------------------------------------------------------------

    def _link(self, random: Any) -> None:
        network = self.world.network
        link = network.links[random.randrange(network.count)][random.randrange(network.count)]
        link.cut = random.random() < 0.4
        link.loss = random.choice((0, 0.05, 0.3))
        link.double = random.choice((0, 0.1, 0.4))
        link.late = random.choice((0, 0.05, 0.3))
        link.late_max = random.choice((200, 1_000, 5_000)) * MILLISECOND
        link.delay_max = random.choice((500, 2_000, 20_000, 80_000))

    def _isolate(self, random: Any) -> None:
        node = self._any(random).node
        one_way, clients_too = random.random() < 0.3, random.random() < 0.5
        network = self.world.network
        for other in range(network.count):
            if other != node and (other != self.world.client_node or clients_too):
                network.links[node][other].cut = True
                if not one_way:
                    network.links[other][node].cut = True

    def _split(self, random: Any) -> None:
        count = self.world.host_count
        side = set(random.sample(range(count), random.randrange(1, count)))
        for a in range(count):
            for b in range(count):
                if (a in side) != (b in side):
                    self.world.network.links[a][b].cut = True

    def _mend(self, random: Any) -> None:
        self.world.network.heal()

    # -- processes ---------------------------------------------------------------------------------

    def _pause(self, random: Any) -> None:
        self._any(random).pause(random.randrange(50, 4_000) * MILLISECOND, "host")

    def _pause_part(self, random: Any) -> None:
        self._any(random).pause(random.randrange(50, 4_000) * MILLISECOND, random.choice(("worker", "controller")))

    def _restart(self, random: Any) -> None:
        host = self._any(random)
        host.stop("kill")
        self._later(random, host)

    def _power(self, random: Any) -> None:
        host = self._any(random)
        host.stop("power")
        self._later(random, host)

    def _many_down(self, random: Any) -> None:
        how = random.choice(("kill", "power"))
        for host in self.world.hosts:
            if random.random() < 0.8:
                host.stop(how)
                self._later(random, host)

    def _clean(self, random: Any) -> None:
        self._any(random).request_shutdown()

    def _wipe(self, random: Any) -> None:
        """A voter is only wiped if there are at least three and all others are up."""
        world = self.world
        host = self._any(random)
        active = world.active()
        if active is None or self.wiped or any(not world.whole(partition) for partition in world.partitions()):
            return
        voters = active.quorum.voters
        late = self.kernel.now - self.voter_requests < 10_000 * MILLISECOND
        if any(voter.key == host.key for voter in voters) and (
            late or len(voters) < 3 or not all(other.up for other in world.hosts)
        ):
            return
        self.wiped += 1
        host.stop("wipe")
        self._later(random, host)

    def _worker(self, random: Any) -> None:
        host = self._any(random)
        host.kill_worker(random.randrange(len(host.workers)))

    def _acceptor(self, random: Any) -> None:
        self._any(random).kill_acceptor()

    def _controller(self, random: Any) -> None:
        host = self._any(random)
        host.kill_controller()
        self.kernel.after(random.randrange(20, random.choice((60, 3_000))) * MILLISECOND, None, host.restart_controller)

    def _data_plane(self, random: Any) -> None:
        self._any(random).kill_data_plane()

    def _processes(self, random: Any) -> None:
        self._any(random).kill_processes()

    # -- machines ----------------------------------------------------------------------------------

    def _slow_disk(self, random: Any) -> None:
        node = self._any(random).node
        if node in self.slow:
            del self.slow[node]
        else:
            self.slow[node] = random.choice((20_000, 200_000, 1_500_000))

    def _full_disk(self, random: Any) -> None:
        host = self._any(random)
        host.full = not host.full
        if host.full:
            self.kernel.after(random.randrange(20, 4_000) * MILLISECOND, None, setattr, host, "full", False)

    def _bad_disk(self, random: Any) -> None:
        """One of the next few flushes fails; the host is restarted a while later, by an operator
        who has read its log. One host at a time.
        """
        host = self._any(random)
        if any(other.failing for other in self.world.hosts):
            return
        host.failing = random.choice((0.1, 0.5, 1.0))
        self.kernel.after(
            random.randrange(100, 6_000) * MILLISECOND,
            None,
            self._another_disk,
            host,
            random.choice(("kill", "kill", "power")),
        )

    def _another_disk(self, host: ClusterHost, how: str) -> None:
        host.failing = 0.0
        if any(worker is not None and worker.failed for worker in host.workers):
            host.stop(how)
            self._later(self.kernel.random, host)

    def _bits(self, random: Any) -> None:
        """Flips a bit of one durable batch that is intact on two other hosts."""
        world, partition = self.world, random.choice(self.world.partitions())
        log = random.choice(world.hosts).logs.get(partition)
        if log is None or log.on_disk < 2:
            return
        offset = log.whole(
            random.randrange(log.on_disk - 1)
            if random.random() < 0.5
            else max(0, log.on_disk - 1 - random.randrange(1, 6))
        )
        others = [
            other
            for other in world.logs(partition)
            if other is not log and other.on_disk > offset and other.entries[offset] == log.entries[offset]
        ]
        if len(others) >= 2 and not any(other.damaged or other.shortened for other in world.logs(partition)):
            log.flip(offset)
            self.kernel.report("bit", partition[1], offset)

    def _freeze(self, random: Any) -> None:
        host = self._any(random)
        duration = random.randrange(50, 8_000) * MILLISECOND
        if host.clock.rate:
            host.clock.stand_still(duration)
            host.pause(duration, "host")

    def _drift(self, random: Any) -> None:
        host = self._any(random)
        if not host.clock.rate:
            return
        host.clock.set_drift(self.world.new_drift())
        host.clock.wall_offset_ms += random.randrange(-(10**7), 10**7)

    # -- operators ---------------------------------------------------------------------------------

    def _leaders(self, random: Any) -> None:
        """Bursts of moves within milliseconds: ElectLeaders after the preferred leader was changed
        by a reassignment of the same replicas in another order.
        """
        world = self.world
        partition = random.choice(world.partitions())
        for _ in range(random.randrange(1, 4)):
            self.kernel.after(random.randrange(6_000), None, self._move, partition, random.getrandbits(30))
            if random.random() < 0.3:
                partition = random.choice(world.partitions())

    def _move(self, partition: tuple[bytes, int], number: int) -> None:
        """Sent directly to the active controller."""
        world, active = self.world, self.world.active()
        view = world.view(partition)
        if (
            active is None
            or not active.metadata.active
            or view is None
            or world.moving(partition)
            or active.process.stopped
        ):
            return
        name = world.state.topics_by_id[partition[0]]
        order = list(view.replicas)
        first = order.pop(number % len(order))
        for change in (
            messages.AlterReassignments([messages.PartitionReassignment(name, partition[1], [first, *order])]),
            messages.ElectLeaders(0, [(name, partition[1])]),
        ):
            active.on_metadata(metadata_core.ChangeRequested(-1, messages.Request(number, change)))

    def _reassign(self, random: Any) -> None:
        world = self.world
        partition = random.choice(world.partitions())
        name = world.state.topics_by_id[partition[0]]
        nodes = [node for node in world.state.brokers]
        target = random.sample(nodes, min(len(nodes), random.choice((2, 3, 3))))
        world.admin.requested.append(
            messages.AlterReassignments([messages.PartitionReassignment(name, partition[1], target)])
        )
        if random.random() < 0.4:
            self.kernel.after(random.randrange(1_000) * MILLISECOND, None, self._cancel, name, partition[1])

    def _cancel(self, name: str, index: int) -> None:
        self.world.admin.requested.append(
            messages.AlterReassignments([messages.PartitionReassignment(name, index, None)])
        )

    def _min_in_sync(self, random: Any) -> None:
        name = random.choice(("flushed", "cached"))
        value = random.choice(("1", "2", "2"))
        self.world.admin.requested.append(
            messages.AlterConfig(2, name, [messages.ConfigOperation("min.insync.replicas", "set", value)], False)
        )

    def _topics(self, random: Any) -> None:
        world = self.world
        name = f"extra{random.randrange(3)}"
        if name in world.state.topics:
            world.admin.requested.append(messages.DeleteTopic(name, None))
        else:
            world.admin.requested.append(messages.CreateTopic(name, 1, min(2, world.host_count), {}, {}))

    def _drain(self, random: Any) -> None:
        self.world.admin.requested.append(messages.DrainBroker(self._any(random).node, cancel=random.random() < 0.5))

    def _voters(self, random: Any) -> None:
        active = self.world.active()
        if active is None:
            return
        voters = active.quorum.voters
        self.voter_requests = self.kernel.now
        others = [host for host in self.world.hosts if all(voter.node_id != host.node for voter in voters)]
        if others and (len(voters) < 3 or random.random() < 0.5):
            host = random.choice(others)
            active.on_quorum(events.AddVoter("add", self.world.voter(host.node)))
        elif len(voters) > 1:
            gone = [voter for voter in voters if self.world.hosts[voter.node_id].key != voter.key]
            active.on_quorum(events.RemoveVoter("remove", random.choice(gone or voters).key))

    def _transfer(self, random: Any) -> None:
        active = self.world.active()
        if active is not None:
            active.on_quorum(events.TransferLeadership(None))
