"""Simulated quorums: real cores, a network that loses, repeats and delays, disks that lose
unflushed data, clocks that drift, hosts that stop, die, return or lose everything.

Checked over all replicas after every event, besides each core's own check()
    I1  one leader in an epoch
    I2  all replicas apply the same record at an offset, snapshots included; no voter truncates it
    I3  an elected leader has every record that was committed in an older epoch
    I4  no voter announces an epoch below one it has announced, or votes twice in one, even after
        restarts
    I5  records that a leader considers committed are durable on a majority of the voters of its log
    I6  an epoch never decreases while a process lives
    L1  one valid lease at a time, even with paused and isolated leaders (while clocks are within
        the bound)
    L2  when a controller fences a host, the lease that the host has from any controller has expired
        (likewise)
    A1  an active leader's next offset is the one its state machine expects; a proposal is refused
        only when the leadership moves or the log is full
    H1  after healing: one leader, active, with a lease; all replicas have everything; proposals are
        committed
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import msgspec

from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import NO_DEADLINE, QuorumSettings
from mqd.cluster.raft.lease import majority
from mqd.cluster.raft.messages import Batch, ReplicaKey, SnapshotMeta, Voter, VoteRequest, VoteResponse
from tests.sim.kernel import MILLISECOND, SECOND, Clock, Kernel, Network, Process, Violation
from tests.sim.raft.quorum_disk import QuorumDisk
from tests.sim.raft.quorum_host import Host, chain


class Plan(NamedTuple):
    """Possible faults in one run; rates are per mille of the opportunities (every 20 ms of true
    time).
    """

    voters: int = 3
    hosts: int = 5
    drift_max: float = 0.1  # within the bound: 1.1 / 0.9 < P / L
    is_within_bound: bool = True
    restart: int = 8
    wipe: int = 1
    pause: int = 6
    cut: int = 10
    isolate: int = 5
    heal: int = 14
    noise: int = 6  # loss, repetition, lateness
    disk_slow: int = 4
    disk_full: int = 2
    transfer: int = 4
    change: int = 6
    pauses_ms: tuple[int, ...] = (2, 10, 40, 150)  # between proposals


LEASE_PLAN = Plan(
    hosts=3,
    cut=15,
    isolate=3,
    heal=15,
    noise=2,
    restart=12,
    wipe=0,
    disk_full=0,
    change=0,
    pause=2,
    pauses_ms=(1_000, 10_000),
)
"""Stresses leases: three voters that lose contact all the time."""


CHANGE_PLAN = Plan(cut=15, isolate=8, heal=10, change=80, restart=4, wipe=0, disk_full=0, transfer=10)
"""Stresses voter sets."""


def draw_plan(random: Random) -> Plan:
    """Swarm testing: each run has some kinds of faults, with its own rates."""

    def rate(highest: int) -> int:
        return random.choice((0, 0, highest // 2, highest, 2 * highest))

    within = random.random() < 0.7
    return Plan(
        voters=random.choice((1, 2, 3, 3, 3, 3, 5)),
        hosts=5,
        drift_max=random.choice((0.0, 0.001, 0.1)) if within else 0.4,
        is_within_bound=within,
        restart=rate(10),
        wipe=rate(2),
        pause=rate(8),
        cut=rate(16),
        isolate=rate(8),
        heal=random.choice((6, 14, 25)),
        noise=rate(8),
        disk_slow=rate(6),
        disk_full=rate(3),
        transfer=rate(6),
        change=rate(12),
    )


class World:
    def __init__(
        self,
        seed: int,
        plan: Plan | None = None,
        core_class: Callable[..., QuorumCore] = QuorumCore,
        settings: QuorumSettings | None = None,
        found: bool = True,
        host_class: type[Host] = Host,
    ) -> None:
        self.seed = seed
        self.kernel = Kernel(f"quorum {seed}")
        self.plan = plan if plan is not None else draw_plan(self.kernel.random)
        self.core_class = core_class
        self.settings = settings or QuorumSettings(
            log_bytes_max=900, retained_bytes=300, fetch_bytes_max=200, uncommitted_bytes_max=4_000
        )
        self.network = Network(self.kernel, self.plan.hosts)
        self.committed: list[Batch] = []
        self._commits: list[tuple[int, Batch]] = []  # by committing epoch, the last batch
        self._digests: dict[int, bytes] = {0: b""}
        self._committed_offset = 0
        self.leaders: dict[int, ReplicaKey] = {}
        self._sent: dict[bytes, int] = {}  # directory -> highest epoch
        self._votes: dict[tuple[bytes, int], ReplicaKey] = {}
        self._directories = 0
        self.graves: dict[ReplicaKey, QuorumDisk] = {}
        self.proposed = 0
        self.counts: dict[str, int] = {}
        self.hosts: dict[int, Host] = {}
        for node_id in range(1, self.plan.hosts + 1):
            self.hosts[node_id] = host_class(self, node_id)
        self.clients_work = True
        if found:
            self.found(tuple(range(1, self.plan.voters + 1)))

    # -- making ------------------------------------------------------------------------------------

    def found(self, nodes: tuple[int, ...]) -> None:
        voters = tuple(self.voter(node) for node in nodes)
        meta = SnapshotMeta(0, 0, voters, 1)
        for node in nodes:
            self.hosts[node].disk.snapshot = (meta, msgspec.msgpack.encode((0, b"", b"." * 100)))
        for host in self.hosts.values():
            host.start()
        self.kernel.after(0, None, self._client)

    def seconds(self, seconds: float) -> None:
        self.kernel.run(until=self.kernel.now + int(seconds * SECOND))

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Continues event by event until the condition holds; False when it does not in time."""
        end = self.kernel.now + int(seconds * SECOND)
        while not condition() and self.kernel.now < end:
            self.kernel.run(steps=1, until=end)
        return condition()

    def cut(self, one: int, other: int, both: bool = True) -> None:
        self.network.links[one - 1][other - 1].cut = True
        if both:
            self.network.links[other - 1][one - 1].cut = True

    def cut_off(self, *nodes: int) -> None:
        """Cuts the host off from all others."""
        for one in nodes:
            for other in self.hosts:
                if other not in nodes:
                    self.cut(one, other)

    @property
    def active(self) -> Host | None:
        """The controller with a lease, or the only one that considers itself active."""
        active = [host for host in self.hosts.values() if host.is_active]
        held = [host for host in active if host.core.has_lease(host.clock.now())]
        return (held or active or [None])[0]

    def voter(self, node: int) -> Voter:
        return Voter(self.hosts[node].key, f"10.0.0.{node}", 9_093)

    def new_directory(self) -> bytes:
        self._directories += 1
        return self._directories.to_bytes(16, "big")

    def new_clock(self) -> Clock:
        drift = self.plan.drift_max
        return Clock(self.kernel, self.kernel.random.uniform(-drift, drift))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -- what is checked ---------------------------------------------------------------------------

    def digest_at(self, offset: int) -> bytes | None:
        return self._digests.get(offset)

    def after_event(self, host: Host) -> None:
        core = host.core
        if core.leading is not None:
            self._check_leader(host)
        # usually a leader; or one that has just resigned because of it
        if core.high_watermark > self._committed_offset:
            self._on_new_commit(host)
        self._check_leases()

    def _check_leader(self, host: Host) -> None:
        core = host.core
        known = self.leaders.get(core.epoch)
        if known is None:
            self.leaders[core.epoch] = host.key
            self.kernel.report("elected", host.node_id, core.epoch)
            self.count("elected")
            self._check_complete(host)
        elif known != host.key:
            raise Violation("I1", f"epoch {core.epoch} is led by node {host.node_id} and by node {known.node_id}")

    def _check_complete(self, host: Host) -> None:
        """Records committed in an older epoch. A leader elected late, when others are already in
        the next epoch, need not have what they commit: it can commit nothing.
        """
        log = host.core.log
        older = [batch for epoch, batch in self._commits if epoch < host.core.epoch]
        if not older:
            return
        last = older[-1]
        if log.end_offset < last.next_offset or (
            log.start_offset < last.next_offset and log.epoch_before(last.next_offset) != last.epoch
        ):
            raise Violation(
                "I3",
                f"node {host.node_id} leads epoch {host.core.epoch} with a log to {log.end_offset}; {last.next_offset}"
                f" (epoch {last.epoch}) is committed",
            )

    def _on_new_commit(self, host: Host) -> None:
        core = host.core
        new = core.log.read(self._committed_offset, core.high_watermark, NO_DEADLINE)
        if not new or new[0].base_offset != self._committed_offset or new[-1].next_offset != core.high_watermark:
            raise Violation(
                "I2",
                f"node {host.node_id} commits up to {core.high_watermark}, which is no end of a batch after"
                f" {self._committed_offset}",
            )
        last = new[-1]
        holders = [voter.node_id for voter in core.voters if self._holds(voter.key, last)]
        if len(holders) < majority(len(core.voters)):
            raise Violation(
                "I5",
                f"node {host.node_id} commits offset {last.next_offset}, durable on nodes {holders} of"
                f" {len(core.voters)} voters",
            )
        for batch in new:
            self._digests[batch.next_offset] = chain(self._digests[batch.base_offset], batch)
        self.committed.extend(new)
        self._commits = [(epoch, batch) for epoch, batch in self._commits if epoch != core.epoch] + [(core.epoch, last)]
        self._committed_offset = last.next_offset
        self.count("committed")

    def _holds(self, key: ReplicaKey, batch: Batch) -> bool:
        """A wiped voter had acknowledged it before, and counts: the others tolerate one lost disk."""
        host = self.hosts[key.node_id]
        disk = host.disk if host.key == key else self.graves[key]
        return disk.has(batch.next_offset, batch.epoch)

    def _check_leases(self) -> None:
        holders = [
            host.node_id
            for host in self.hosts.values()
            if host.core is not None and host.core.leading is not None and host.core.has_lease(host.clock.now())
        ]
        if len(holders) > 1:
            self.count("two leases")
            if self.plan.is_within_bound:
                raise Violation("L1", f"nodes {holders} hold a lease at the same time")

    def on_fenced(self, controller: Host, host: Host) -> None:
        self.count("fenced")
        if host.process is not None and host.lease_until_ns > host.clock.now():
            self.count("fenced early")
            if self.plan.is_within_bound:
                raise Violation(
                    "L2", f"node {controller.node_id} fences node {host.node_id}, whose lease is still valid"
                )

    def on_sent(self, host: Host, message: events.QuorumMessage) -> None:
        directory = host.key.directory_id
        if message.epoch < self._sent.get(directory, 0):
            raise Violation("I4", f"node {host.node_id} says epoch {message.epoch} after {self._sent[directory]}")
        if host.disk.vote.epoch < message.epoch:
            raise Violation(
                "I4", f"node {host.node_id} says epoch {message.epoch}, its disk has {host.disk.vote.epoch}"
            )
        self._sent[directory] = max(message.epoch, self._sent.get(directory, 0))
        if isinstance(message, VoteRequest) and not message.pre_vote:
            self._on_vote(host, message.epoch, message.candidate)
        elif (
            isinstance(message, VoteResponse)
            and message.granted
            and not message.pre_vote
            and host.disk.vote.epoch == message.epoch
        ):
            self._on_vote(host, message.epoch, host.disk.vote.voted_for)

    def _on_vote(self, host: Host, epoch: int, candidate: ReplicaKey) -> None:
        first = self._votes.setdefault((host.key.directory_id, epoch), candidate)
        if first != candidate:
            raise Violation(
                "I4", f"node {host.node_id} votes for nodes {first.node_id} and {candidate.node_id} in epoch {epoch}"
            )

    # -- what happens ------------------------------------------------------------------------------

    def _client(self) -> None:
        """Each host that considers itself active gets changes to make."""
        random = self.kernel.random
        for host in self.hosts.values():
            if self.clients_work and host.is_active and host.process is not None and not host.process.stopped:
                self.proposed += 1
                host.propose(tuple(b"%d.%d" % (self.proposed, index) for index in range(random.choice((1, 1, 1, 3)))))
        self.kernel.after(random.choice(self.plan.pauses_ms) * MILLISECOND, None, self._client)

    def chaos(self, seconds: float) -> None:
        end = self.kernel.now + int(seconds * SECOND)
        while self.kernel.now < end:
            self.kernel.run(until=min(end, self.kernel.now + 20 * MILLISECOND))
            self._misfortune()

    def _misfortune(self) -> None:
        random, plan = self.kernel.random, self.plan
        for name in (
            "restart",
            "wipe",
            "pause",
            "cut",
            "isolate",
            "heal",
            "noise",
            "disk_slow",
            "disk_full",
            "transfer",
            "change",
        ):
            if random.randrange(1_000) < getattr(plan, name):
                self.count(name)
                getattr(self, f"_{name}")(self.hosts[random.choice(sorted(self.hosts))])

    def _restart(self, host: Host) -> None:
        random = self.kernel.random
        kind = random.choice(("clean", "kill", "kill", "power"))
        if host.process is None:
            return
        self.kernel.report(kind, host.node_id)
        if kind == "clean" and not host.process.stopped:
            host.handle(events.TransferLeadership())
            self.kernel.after(50 * MILLISECOND, host.process, self._crash, host, kind)
        else:
            self._crash(host, kind)

    def _crash(self, host: Host, kind: str) -> None:
        random = self.kernel.random
        led_epoch = host.led_epoch
        host.stop(0.9 if kind == "kill" else 0.3)
        if kind == "kill":  # of the process; the keeper lives
            host.prove(led_epoch)
        if kind == "power":
            host.clock = self.new_clock()
        self.kernel.after(random.choice((5, 50, 400, 4_000)) * MILLISECOND, None, self._back, host)

    def _back(self, host: Host) -> None:
        if host.process is None:
            self.kernel.report("started", host.node_id)
            host.start()

    def _wipe(self, host: Host) -> None:
        """Never so that the remaining voters are no majority."""
        sets = [other.core.voters for other in self.hosts.values() if other.core is not None and other.core.voters]
        sets += [other.disk.snapshot[0].voters for other in self.hosts.values() if other.disk.snapshot is not None]
        for voters in sets:
            left = sum(self.hosts[voter.node_id].key == voter.key and voter.key != host.key for voter in voters)
            if left < majority(len(voters)):
                return
        self.kernel.report("wiped", host.node_id)
        host.stop(0)
        host.wipe()
        self.kernel.after(300 * MILLISECOND, None, self._back, host)

    def _pause(self, host: Host) -> None:
        process = host.process
        if process is not None and not process.stopped:
            process.stopped = True
            self.kernel.report("paused", host.node_id)
            self.kernel.after(
                self.kernel.random.choice((100, 1_000, 2_500, 6_000)) * MILLISECOND, None, self._go_on, process
            )

    def _go_on(self, process: Process) -> None:
        if process.alive and process.stopped:
            self.kernel.go_on(process)

    def _cut(self, host: Host) -> None:
        other = self.kernel.random.choice(sorted(self.hosts))
        self.network.links[host.node_id - 1][other - 1].cut = True
        if self.kernel.random.random() < 0.5:
            self.network.links[other - 1][host.node_id - 1].cut = True

    def _isolate(self, host: Host) -> None:
        out, back = self.kernel.random.choice(((True, True), (True, True), (True, False), (False, True)))
        for other in range(self.plan.hosts):
            self.network.links[host.node_id - 1][other].cut |= out
            self.network.links[other][host.node_id - 1].cut |= back

    def _heal(self, host: Host) -> None:
        self.network.heal()

    def _noise(self, host: Host) -> None:
        random = self.kernel.random
        for row in self.network.links:
            for link in row:
                link.loss = random.choice((0, 0.05, 0.3))
                link.double = random.choice((0, 0.1))
                link.late = random.choice((0, 0.02))
                link.delay_max = random.choice((1_500, 30_000, 400_000))

    def _disk_slow(self, host: Host) -> None:
        host.disk_delay = self.kernel.random.choice((MILLISECOND, 20 * MILLISECOND, 300 * MILLISECOND, 3 * SECOND))

    def _disk_full(self, host: Host) -> None:
        host.disk.full = not host.disk.full

    def _transfer(self, host: Host) -> None:
        if host.process is not None and not host.process.stopped:
            host.handle(events.TransferLeadership(self.kernel.random.choice((None, *sorted(self.hosts)))))

    def _change(self, host: Host) -> None:
        """An administrator sends a change to the active controller; lost hosts are removed by their
        old key.
        """
        random = self.kernel.random
        for active in self.hosts.values():
            if active.core is not None and active.core.is_leader and not active.process.stopped:
                voters = active.core.voters
                dead = [voter for voter in voters if self.hosts[voter.node_id].key != voter.key]
                number = self.counts["change"]
                if dead:
                    active.handle(events.RemoveVoter(number, dead[0].key))
                elif host.key in [voter.key for voter in voters]:
                    if random.random() < 0.2:
                        active.handle(
                            events.UpdateVoter(number, Voter(host.key, "10.1.0.1", random.randrange(1, 65_536)))
                        )
                    elif len(voters) > 1:
                        active.handle(events.RemoveVoter(number, host.key))
                else:
                    active.handle(events.AddVoter(number, self.voter(host.node_id)))

    # -- the end -----------------------------------------------------------------------------------

    def heal(self, seconds: float = 30) -> None:
        """All faults end. Raises Violation H1 when the quorum does not recover."""
        self.network.heal()
        self.kernel.report("healed")
        for host in self.hosts.values():
            host.disk_delay, host.disk.full = 3 * MILLISECOND, False
            if host.process is not None and host.process.stopped:
                self.kernel.go_on(host.process)
            if host.process is None:
                self.kernel.after(0, None, self._back, host)
        self.seconds(seconds)
        self.check_healed()

    def check_healed(self) -> None:
        active = [host for host in self.hosts.values() if host.is_active]
        if len(active) != 1 or not active[0].core.has_lease(active[0].clock.now()):
            roles = {
                host.node_id: (host.core.leader, host.core.epoch, host.core.log.end_offset, host.core.is_voter)
                for host in self.hosts.values()
                if host.core
            }
            raise Violation("H1", f"active after healing: {[host.node_id for host in active]}; {roles}")
        before = self._committed_offset
        self.seconds(2)
        if self._committed_offset <= before:
            raise Violation("H1", "nothing is committed any more")
        for host in self.hosts.values():
            if host.version < before:
                raise Violation(
                    "H1", f"node {host.node_id} is at {host.version}, {before} was committed two seconds ago"
                )


def run(
    seed: int,
    seconds: float = 40,
    core_class: Callable[..., QuorumCore] = QuorumCore,
    plan: Plan | None = None,
    settings: QuorumSettings | None = None,
) -> World:
    """One schedule: chaos, then healing. Raises Violation or QuorumBroken."""
    world = World(seed, plan, core_class, settings)
    world.chaos(seconds)
    world.heal()
    return world
