"""One host of a simulated quorum: disk, clock, and while it runs the controller's process with the
core in it; a model of the shell, a small state machine, and a small broker lease.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

import msgspec

from mqd.cluster.membership.death_notice import REPEATS_MS
from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import NO_DEADLINE
from mqd.cluster.raft.leader import LEADERSHIP_CHANGING, TOO_MANY_UNCOMMITTED
from mqd.cluster.raft.messages import Batch, ReplicaKey, SnapshotMeta
from tests.sim.kernel import MILLISECOND, SECOND, Process, Violation
from tests.sim.raft.quorum_disk import QuorumDisk, StoreSnapshot

if TYPE_CHECKING:
    from tests.sim.raft.quorum_world import World

SESSION_NS = 6 * 10**9  # S: a controller fences after this long a silence
MARGIN = 0.25
HEARTBEAT = SECOND


class Host:
    """One machine: disk, clock, and the controller process while it runs."""

    def __init__(self, world: World, node_id: int) -> None:
        self.world = world
        self.node_id = node_id
        self.disk = QuorumDisk()
        self.key = ReplicaKey(node_id, world.new_directory())
        self.clock = world.new_clock()
        self.process: Process | None = None
        self.core: QuorumCore | None = None
        self.disk_delay = 3 * MILLISECOND
        self.version, self.digest = 0, b""  # of the state machine
        self.lease_until_ns = 0  # of this host as a broker
        self.outdated = False
        self.led_epoch = -1  # the last epoch that this process led: as its keeper knows
        self.deposed()

    def deposed(self) -> None:
        """Resets the state that only an active controller has."""
        self.is_active = False
        self.tail = 0
        self.silent_since: dict[int, int] = {}  # node -> own clock
        self.fenced: set[int] = set()

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        world = self.world
        assert self.process is None
        self.process = Process(f"controller {self.node_id}")
        stored = self.disk.stored()
        self.version, self.digest = 0, b""
        if self.disk.snapshot is not None:
            self.load(*self.disk.snapshot)
        self.core = world.core_class(self.key, stored, world.settings, Random(world.kernel.random.getrandbits(64)))
        self._tick_at = NO_DEADLINE
        self._depth = 0  # of events handled while effects are carried out
        self.led_epoch = -1
        self.deposed()
        self.lease_until_ns = 0
        self.handle(events.Start())
        self.handle(events.PeersKnown(tuple(range(1, world.plan.hosts + 1))))
        world.kernel.after(world.kernel.random.randrange(HEARTBEAT), self.process, self.heartbeat)

    def stop(self, keeps: float) -> None:
        if self.process is not None:
            self.process.die()
            self.process = self.core = None
            self.disk.crash(self.world.kernel.random, keeps)
            self.deposed()

    def prove(self, epoch: int) -> None:
        """The keeper notifies the others that the process which led `epoch` has ended
        (death_notice.py).
        """
        world = self.world
        for wait_ms in REPEATS_MS if epoch >= 0 else ():
            for other in world.hosts.values():
                if other is not self:
                    world.kernel.after(
                        wait_ms * MILLISECOND, None, self._notify, other, events.LeaderDied(self.node_id, epoch)
                    )

    def _notify(self, other: Host, died: events.LeaderDied) -> None:
        self.world.network.send(self.node_id - 1, other.node_id - 1, other.process, other.handle, died)

    def wipe(self) -> None:
        self.world.graves[self.key] = self.disk
        self.disk = QuorumDisk()
        self.key = ReplicaKey(self.node_id, self.world.new_directory())

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        core, world = self.core, self.world
        assert core is not None
        before, log = core.epoch, (core.log.start_offset, core.log.end_offset)
        effects = core.handle(event, self.clock.now())
        if core.epoch < before:
            raise Violation("I6", f"node {self.node_id} falls from epoch {before} to {core.epoch}")
        if core.is_leader:
            self.led_epoch = core.epoch
        grown = core.log.end_offset - log[1]
        core.check(
            check_log=core.log.start_offset != log[0] or grown < 0 or (grown > 0 and core.log.end_offset % 8 == 0)
        )
        world.after_event(self)
        self._depth += 1
        for effect in effects:
            self.carry_out(effect)
        self._depth -= 1
        if (
            self.is_active
            and core is self.core
            and not self._depth
            and (self.tail != core.next_offset or not core.is_active)
        ):
            raise Violation("A1", f"node {self.node_id} expects offset {self.tail}, the log ends at {core.next_offset}")
        self.schedule_tick()

    def schedule_tick(self) -> None:
        assert self.core is not None
        deadline = self.core.next_deadline_ns
        if deadline < self._tick_at:
            self._tick_at = deadline
            delay = self.clock.true_delay(max(0, deadline - self.clock.now()))
            self.world.kernel.after(delay, self.process, self._tick, deadline)

    def _tick(self, deadline: int) -> None:
        if deadline == self._tick_at:
            self._tick_at = NO_DEADLINE
            self.handle(events.Tick())

    def receive(self, sender: int, message: events.QuorumMessage) -> None:
        if self.core is not None:
            self.handle(events.Received(sender, message))

    def carry_out(self, effect: events.Effect) -> None:
        world, core = self.world, self.core
        match effect:
            case events.Send():
                world.on_sent(self, effect.message)
                target = world.hosts.get(effect.to)
                if target is not None:
                    world.network.send(
                        self.node_id - 1, effect.to - 1, target.process, target.receive, self.node_id, effect.message
                    )
            case events.PersistVote() | events.AppendLog() | events.TruncateLog() | events.InstallSnapshot():
                self.disk.queue.append(effect)
                self.maybe_write()
            case events.LoadState():
                self.load(effect.meta, effect.data)
            case events.Committed():
                self.on_committed(effect.batches)
            case events.BecameActive():
                world.kernel.report("active", self.node_id, effect.epoch, effect.next_offset)
                if effect.next_offset != self.version:
                    raise Violation(
                        "A1",
                        f"node {self.node_id} is active at offset {effect.next_offset}, its state is at {self.version}",
                    )
                self.is_active, self.tail = True, effect.next_offset
                self.begin_sessions()
            case events.Deposed():
                world.kernel.report("deposed", self.node_id, effect.epoch, effect.reason)
                self.deposed()
            case events.ControlAppended():
                self.tail = effect.next_offset
            case events.ProposalsDropped():
                self.tail = effect.offset
            case events.ProposalRefused():
                if core.is_leader and effect.reason not in (LEADERSHIP_CHANGING, TOO_MANY_UNCOMMITTED):
                    raise Violation("A1", f"refused: {effect.reason}")
                self.tail -= effect.token
            case events.SnapshotWanted():
                self.disk.queue.append(StoreSnapshot(core.snapshot_meta(self.version), self.state()))
                self.maybe_write()
            case events.ReadSnapshot():
                meta, data = self.disk.snapshot
                here = (meta.offset, meta.epoch) == (effect.snapshot_offset, effect.snapshot_epoch)
                size = world.kernel.random.choice((7, 40, effect.size_bytes))
                chunk = data[effect.position : effect.position + size] if here else b""
                world.kernel.after(200, self.process, self.handle, events.SnapshotRead(effect, chunk))
            case events.Outdated():
                self.outdated = True
            case events.VoterChangeEnded():
                world.kernel.report("voters", self.node_id, effect.token, effect.error)

    # -- its state machine -------------------------------------------------------------------------

    def state(self) -> bytes:
        return msgspec.msgpack.encode((self.version, self.digest, b"." * 100))

    def snapshot_of_all(self) -> tuple[SnapshotMeta, bytes]:
        """Of a host that does not run: everything on its disk, committed or not."""
        meta, data = self.disk.snapshot
        version, digest, _ = msgspec.msgpack.decode(data)
        for batch in self.disk.log:
            version, digest = batch.next_offset, chain(digest, batch)
        return SnapshotMeta(version, self.disk.epoch, meta.voters, meta.generation), msgspec.msgpack.encode(
            (version, digest, b".")
        )

    def load(self, meta: SnapshotMeta, data: bytes) -> None:
        self.version, self.digest, _ = msgspec.msgpack.decode(data)
        if self.version != meta.offset or self.digest != self.world.digest_at(self.version):
            raise Violation(
                "I2", f"node {self.node_id} loads a snapshot at {meta.offset} that differs from what was committed"
            )

    def on_committed(self, batches: tuple[Batch, ...]) -> None:
        for batch in batches:
            if batch.base_offset != self.version:
                raise Violation("I2", f"node {self.node_id} is handed offset {batch.base_offset} at {self.version}")
            self.version, self.digest = batch.next_offset, chain(self.digest, batch)
            if self.digest != self.world.digest_at(self.version):
                raise Violation(
                    "I2",
                    f"node {self.node_id} is handed another record at offset {batch.base_offset}, epoch {batch.epoch}",
                )
        if self.is_active and self.world.clients_work and self.world.kernel.random.random() < 0.2:
            self.propose((b"because",))  # as rules that wait for something to be committed do
        if self.world.kernel.random.random() < 0.1:
            self.disk.committed_offset = max(self.disk.committed_offset, min(self.version, self.disk.end_offset))

    def propose(self, values: tuple[bytes, ...]) -> None:
        if self.is_active:
            self.tail += len(values)
            self.handle(events.Propose(len(values), values, self.tail - len(values)))

    # -- its disk ----------------------------------------------------------------------------------

    def maybe_write(self) -> None:
        disk, random = self.disk, self.world.kernel.random
        if disk.under_way or not disk.queue:
            return
        if disk.full and isinstance(disk.queue[0], events.AppendLog):
            self.world.kernel.after(100, self.process, self._refuse, disk)
            disk.under_way = [StoreSnapshot(SnapshotMeta(0, 0, (), 1), b"")]  # busy
            return
        while disk.queue and not (disk.full and isinstance(disk.queue[0], events.AppendLog)):
            disk.under_way.append(disk.queue.popleft())
            if random.random() < 0.3:
                break
        delay = 1 + random.randrange(self.disk_delay)
        self.world.kernel.after(delay, self.process, self._written, disk)

    def _refuse(self, disk: QuorumDisk) -> None:
        disk.under_way = []
        sequence = disk.queue[0].sequence
        disk.queue.clear()
        self.handle(events.DiskRefused(sequence, "no space left"))
        self.maybe_write()

    def _written(self, disk: QuorumDisk) -> None:
        done, disk.under_way = disk.under_way, []
        for operation in done:
            disk.apply(operation)
        for operation in done:
            if isinstance(operation, StoreSnapshot):
                self.handle(events.SnapshotStored(operation.meta, len(operation.data)))
        sequences = [operation.sequence for operation in done if not isinstance(operation, StoreSnapshot)]
        if sequences:
            self.handle(events.DiskDone(sequences[-1]))
        self.maybe_write()

    # -- as a broker, and as the controller of brokers ---------------------------------------------

    def heartbeat(self) -> None:
        """Requests a lease from the presumed leader; as the active controller fences silent hosts.
        A small version of the rules of docs/design/cluster.md, 3.4.
        """
        world, core = self.world, self.core
        target = world.hosts.get(core.leader)
        if target is not None:
            world.network.send(
                self.node_id - 1,
                core.leader - 1,
                target.process,
                target.on_heartbeat,
                self.node_id,
                self.process,
                self.clock.now(),
            )
        now = self.clock.now()
        if self.may_grant():
            for node, since in sorted(self.silent_since.items()):
                if now - since >= SESSION_NS and node not in self.fenced:
                    self.fenced.add(node)
                    world.on_fenced(self, world.hosts[node])
        world.kernel.after(self.clock.true_delay(HEARTBEAT * 1_000), self.process, self.heartbeat)

    def begin_sessions(self) -> None:
        """A new controller does not know when the others last fetched."""
        self.silent_since = {node: self.clock.now() for node in self.world.hosts}

    def may_grant(self) -> bool:
        return self.is_active and self.core.has_lease(self.clock.now())

    def on_heartbeat(self, sender: int, process: Process | None, stamp_ns: int) -> None:
        """The response is for the boot that requested it: another boot of its machine has another
        clock (late schedule 10057).
        """
        if self.may_grant():
            self.silent_since[sender] = self.clock.now()
            self.fenced.discard(sender)
            target = self.world.hosts[sender]
            self.world.network.send(self.node_id - 1, sender - 1, process, target.on_granted, stamp_ns)

    def on_granted(self, stamp_ns: int) -> None:
        self.lease_until_ns = max(self.lease_until_ns, stamp_ns + int(SESSION_NS * (1 - MARGIN)))


def chain(digest: bytes, batch: Batch) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode((digest, batch)), digest_size=12).digest()
