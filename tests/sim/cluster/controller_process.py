"""The controller process of a simulated host: the real cores of quorum, metadata, host and broker,
connected as in the shell: one core's actions become another's events.

Invariants
    S1  an action is carried out before the next event is handled; events that a core raises for
        itself are queued here
    S2  all that is known of this process after its death is on the host's disk or in its control
        segment
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.broker.core import BrokerCore
from mqd.cluster.host import core as host_core
from mqd.cluster.host import events as host_events
from mqd.cluster.host.core import HostCore
from mqd.cluster.host.messages import (
    Applied,
    DeleteRecords,
    MoveReplica,
    PartitionEmptied,
    ProposeInSync,
    Request,
    Subscribe,
)
from mqd.cluster.membership.death_notice import Notice
from mqd.cluster.membership.death_proofs import DeathProofs, final_notice
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.records import decode_record, encode_record
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import NO_DEADLINE
from mqd.cluster.raft.messages import DATA
from tests.sim.kernel import Process, Violation
from tests.sim.raft.quorum_disk import StoreSnapshot

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost

SLOTS = 64
_snapshots = msgspec.msgpack.Decoder(Snapshot)


def encode_state(state: MetadataState) -> bytes:
    return msgspec.msgpack.encode(state.snapshot())


def decode_state(data: bytes) -> MetadataState:
    return MetadataState.from_snapshot(_snapshots.decode(data))


class ControllerProcess:
    def __init__(self, host: ClusterHost) -> None:
        world = host.world
        self.host, self.world, self.kernel = host, world, world.kernel
        self.process = Process(f"controller {host.node}")
        stored = host.disk.stored()
        state = decode_state(host.disk.snapshot[1]) if host.disk.snapshot is not None else MetadataState()
        options = world.options
        self.quorum: QuorumCore = world.quorum_class(
            host.key, stored, world.quorum_settings, Random(self.kernel.random.getrandbits(64))
        )
        self.metadata = MetadataCore(
            state, host.node, world.config_rules, world.new_topic_id, 10_000, active=False, options=options
        )
        self.broker = BrokerCore(host.node, state, options)
        self.host_core = HostCore(host.node, -1, len(host.workers), SLOTS, {host.log_directory: 0})
        self.active_epoch = -1
        self._logged = self.quorum.log.end_offset  # by a predecessor, which may have sent its workers this much
        self._started = False
        self._tick_at = NO_DEADLINE
        self._lease_ms = 0
        self._subscribers: dict[int, tuple[Process, Any, str]] = {}  # client number -> process, receiver, its role
        self._clients = 0
        self._proofs = DeathProofs(host.node)
        self._final_notice: Notice | None = None
        host.instructions = None

    def start(self) -> None:
        host = self.host
        self.on_metadata(metadata_core.DirectoriesSeen((host.directory(),)))
        self.on_broker(
            broker_core.Started(host.registration(), host.clock.now(), host.broker_epoch, host.lease_until_ms)
        )
        self.on_quorum(events.Start())
        self.on_quorum(events.PeersKnown(tuple(other for other in range(self.world.host_count) if other != host.node)))
        self._gossip_controller()
        self._maybe_start_host()
        self._metadata_tick()
        self._broker_tick()

    def _maybe_start_host(self) -> None:
        """Only current state is sent to this host's processes: metadata that include this life of
        the host, and nothing older than what its workers have applied. With older metadata a worker
        would set aside files of topics that are not in it. What only one worker has applied is not
        in the control segment, but in the log (OLDER).
        """
        host, state = self.host, self.metadata.committed
        self._logged = 0 if "OLDER" in self.world.off else min(self._logged, self.quorum.log.end_offset)
        own = state.brokers.get(host.node)
        registered = own is not None and (own.incarnation, own.directory_id) == (
            host.incarnation,
            host.key.directory_id.hex(),
        )
        if self._started or not (
            (registered and state.version >= max(host.metadata_version, self._logged))
            or not self.world.off.isdisjoint(("PAST", "R10"))
        ):
            return
        self._started = True
        alive = {
            worker.index: worker.generation for worker in host.workers if worker is not None and worker.process.alive
        }
        self.on_host(host_events.Started(state, host.slots_seen(), (), alive))
        self.on_host(host_events.ControllerChanged(self.quorum.leader))
        self.on_broker(broker_core.MetadataCommitted(state.version, self.host_core.version))
        host.accepts()

    # -- time --------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self.host.clock.now() // 1_000_000

    def _metadata_tick(self) -> None:
        self.on_metadata(metadata_core.Tick(self.world.wall_ms()))
        if self._started:
            self.on_host(host_events.Tick())
        self.kernel.after(self.host.clock.true_delay(self.world.tick_ms * 1_000_000), self.process, self._metadata_tick)

    def _broker_tick(self) -> None:
        self.on_broker(broker_core.Tick())
        self._leave_instructions()
        self.kernel.after(
            self.host.clock.true_delay(self.world.options.heartbeat_ms * 250_000), self.process, self._broker_tick
        )

    def _schedule(self) -> None:
        deadline = self.quorum.next_deadline_ns
        if deadline < self._tick_at:
            self._tick_at = deadline
            self.kernel.after(
                self.host.clock.true_delay(max(0, deadline - self.host.clock.now())),
                self.process,
                self._quorum_tick,
                deadline,
            )

    def _quorum_tick(self, deadline: int) -> None:
        if deadline == self._tick_at:
            self._tick_at = NO_DEADLINE
            self.on_quorum(events.Tick())

    # -- the quorum --------------------------------------------------------------------------------

    def on_quorum(self, event: events.Event) -> None:
        quorum = self.quorum
        effects = quorum.handle(event, self.host.clock.now())
        self.world.after_quorum(self)
        for effect in effects:
            _QUORUM[type(effect)](self, effect)
        self._publish_lease()
        self._schedule()

    def _publish_lease(self) -> None:
        if self.metadata.active:
            until_ns = self.quorum.lease_deadline_ns(self.host.clock.now())
            until_ms = until_ns // 1_000_000 if until_ns < NO_DEADLINE else NO_DEADLINE
            if until_ms != self._lease_ms:
                self._lease_ms = until_ms
                self.on_metadata(metadata_core.LeaseChanged(until_ms))

    def _send_quorum(self, effect: events.Send) -> None:
        self.world.send_peer(self.host.node, effect.to, effect.message)

    def _to_disk(self, effect: Any) -> None:
        self.host.disk.queue.append(effect)
        self._maybe_write()

    def _maybe_write(self) -> None:
        disk = self.host.disk
        if disk.under_way or not disk.queue:
            return
        random = self.kernel.random
        while disk.queue:
            disk.under_way.append(disk.queue.popleft())
            if random.random() < 0.2:
                break
        self.kernel.after(self.host.flush_delay(), self.process, self._written)

    def _written(self) -> None:
        disk = self.host.disk
        done, disk.under_way = disk.under_way, []
        for operation in done:
            disk.apply(operation)
        for operation in done:
            if isinstance(operation, StoreSnapshot):
                self.on_quorum(events.SnapshotStored(operation.meta, len(operation.data)))
        sequences = [operation.sequence for operation in done if not isinstance(operation, StoreSnapshot)]
        if sequences:
            self.on_quorum(events.DiskDone(sequences[-1]))
        self._maybe_write()

    def _load_state(self, effect: events.LoadState) -> None:
        self.on_metadata(metadata_core.SnapshotInstalled(decode_state(effect.data)))
        if self._started:
            self.on_broker(broker_core.MetadataCommitted(self.metadata.committed.version, self.host_core.version))
        self._maybe_start_host()

    def _committed(self, effect: events.Committed) -> None:
        for batch in effect.batches:
            self.world.on_committed(self.host.node, batch)
            records = tuple([decode_record(value) for value in batch.values]) if batch.kind == DATA else ()
            self.on_metadata(metadata_core.Committed(records, batch.next_offset))
            if self.metadata.committed.version != batch.next_offset:
                raise Violation(
                    "I5",
                    f"node {self.host.node}: state at {self.metadata.committed.version} after the commit up to"
                    f" {batch.next_offset}",
                )
        if self.kernel.random.random() < 0.2:
            self.host.disk.committed_offset = max(
                self.host.disk.committed_offset, min(effect.next_offset, self.host.disk.end_offset)
            )
        if self._started:
            self.on_broker(broker_core.MetadataCommitted(self.metadata.committed.version, self.host_core.version))
        self._maybe_start_host()

    def _became_active(self, effect: events.BecameActive) -> None:
        self.kernel.report("active", self.host.node, effect.epoch, effect.next_offset)
        self.active_epoch = effect.epoch
        self.on_metadata(metadata_core.BecameActive(effect.epoch, effect.next_offset, effect.previous_epoch))
        self._lease_ms = 0
        self._publish_lease()
        self._leave_instructions()
        for proof in self._proofs.on_active():
            self.on_metadata(metadata_core.PeerReceived(proof.node_id, proof))

    def _deposed(self, effect: events.Deposed) -> None:
        self.kernel.report("deposed", self.host.node, effect.epoch)
        self.active_epoch = -1
        self.on_metadata(metadata_core.Resigned())

    def _control_appended(self, effect: events.ControlAppended) -> None:
        self.on_metadata(metadata_core.OffsetsTaken(effect.next_offset))

    def _refused(self, effect: events.ProposalRefused | events.ProposalsDropped) -> None:
        if isinstance(effect, events.ProposalsDropped):
            self.on_metadata(metadata_core.PersistFailed(effect.reason, kept_version=effect.offset))
        else:
            attempt, version = effect.token
            self.on_metadata(metadata_core.PersistFailed(effect.reason, kept_version=version - 1, attempt=attempt))

    def _leader_changed(self, effect: events.LeaderChanged) -> None:
        self._gossip_controller()
        self._leave_instructions()

    def _leave_instructions(self) -> None:
        self._final_notice = self.host.instructions = final_notice(
            self.quorum, self.metadata.committed, self.host.incarnation, self._final_notice
        )

    def on_notice(self, notice: Notice) -> None:
        """From another host's keeper; HostGossip interprets it."""
        died, proof = self._proofs.on_notice(notice)
        if died is not None:
            self.on_quorum(died)
        if proof is not None and self.metadata.active:
            self.kernel.report("proof", proof.node_id, proof.broker_epoch)
            self.on_metadata(metadata_core.PeerReceived(proof.node_id, proof))

    def _gossip_controller(self) -> None:
        quorum = self.quorum
        self.on_broker(broker_core.ControllerKnown(quorum.leader, quorum.epoch, quorum.is_alone))
        if self._started:
            self.on_host(host_events.ControllerChanged(quorum.leader))

    def _snapshot_due(self, effect: events.SnapshotWanted) -> None:
        state = self.metadata.committed
        self._to_disk(StoreSnapshot(self.quorum.snapshot_meta(state.version), encode_state(state)))

    def _read_snapshot(self, effect: events.ReadSnapshot) -> None:
        snapshot = self.host.disk.snapshot
        here = snapshot is not None and (snapshot[0].offset, snapshot[0].epoch) == (
            effect.snapshot_offset,
            effect.snapshot_epoch,
        )
        data = snapshot[1][effect.position : effect.position + effect.size_bytes] if here else b""
        self.kernel.after(300, self.process, self.on_quorum, events.SnapshotRead(effect, data))

    def _voters_ended(self, effect: events.VoterChangeEnded) -> None:
        self.kernel.report("voters", self.host.node, effect.error)

    def _nothing(self, effect: Any) -> None:
        pass

    # -- metadata ----------------------------------------------------------------------------------

    def on_metadata(self, event: metadata_core.Event) -> None:
        for action in self.metadata.handle(event, self.now_ms()):
            match action:
                case metadata_core.Persist():
                    values = tuple([encode_record(record) for record in action.records])
                    self.on_quorum(events.Propose((action.attempt, action.version), values, action.base_offset))
                case metadata_core.Publish():
                    if self._started:
                        self.on_host(action)
                case metadata_core.SendPeer():
                    message = action.message
                    if action.topic is not None:
                        response = msgspec.structs.replace(
                            message.response, topic=self.host_core.topic_image(action.topic)
                        )
                        message = msgspec.structs.replace(message, response=response)
                    self.world.send_peer(self.host.node, action.node_id, message)
                case metadata_core.Reply():
                    self._reply(action.client, action.response)

    # -- this host ---------------------------------------------------------------------------------

    def on_host(self, event: host_events.Event) -> None:
        for action in self.host_core.handle(event, self.now_ms()):
            match action:
                case host_core.AssignSlot():
                    self.host.slots[action.slot] = (
                        action.topic_id,
                        action.index,
                        action.leader_epoch,
                        action.owner,
                        self.host.generation_of(action.owner),
                    )
                case host_core.ClearSlot():
                    self.host.slots.pop(action.slot, None)
                case host_core.Send():
                    self._notify(action.client, action.message)
                case host_core.AppliedEverywhere():
                    self.host.metadata_version = action.version
                    self.on_metadata(metadata_core.AppliedByHost(action.version))
                    self.on_broker(broker_core.MetadataApplied(action.version))
                case host_core.ReportReplicaMoved():
                    self.on_broker(broker_core.ReplicaMoved(action.topic_id, action.index, action.directory))
                case host_core.ReportFailures():
                    self.on_broker(broker_core.ReplicasFailed(action.worker, action.partitions))
                    if action.failures:
                        self.host.doubtful = True
                case host_core.RaiseEpochs():
                    self.on_broker(broker_core.LeadershipsLost(action.partitions))

    def on_broker(self, event: broker_core.Event) -> None:
        for action in self.broker.handle(event, self.now_ms()):
            match action:
                case broker_core.SendPeer():
                    self.world.send_peer(self.host.node, action.node_id, action.message)
                case broker_core.SetBroker():
                    self.host.set_broker(action)
                case broker_core.ToWorker():
                    self._notify(action.client, action.response)
                case broker_core.Reply():
                    self._reply(action.client, action.response)
                case broker_core.ShutDown():
                    self.host.shut_down(action)
                case broker_core.Refused():
                    raise Violation("REFUSED", f"node {self.host.node}: {action.message}")

    # -- messages ----------------------------------------------------------------------------------

    def on_peer(self, sender: int, message: msgspec.Struct) -> None:
        kind = type(message)
        if kind in _FROM_ACTIVE:
            self.on_broker(broker_core.PeerReceived(sender, message))
        elif kind in _TO_ACTIVE:
            self.on_metadata(metadata_core.PeerReceived(sender, message))
        else:
            self.on_quorum(events.Received(sender, message))

    def connect(self, process: Process, hears: Any, role: str) -> int:
        self._clients += 1
        self._subscribers[self._clients] = (process, hears, role)
        return self._clients

    @property
    def accepts(self) -> bool:
        return self._started

    def on_worker_death(self, index: int, generation: int) -> None:
        if self._started:  # otherwise the slots show it
            self.on_host(host_events.WorkerDied(index, generation))

    def disconnect(self, client: int) -> None:
        if self._subscribers.pop(client, None) is not None:
            self.on_metadata(metadata_core.ClientGone(client))
            self.on_broker(broker_core.ClientGone(client))
            self.on_host(host_events.SubscriberLeft(client))

    def _notify(self, client: int, message: Any) -> None:
        subscriber = self._subscribers.get(client)
        if subscriber is not None:
            process, hears, _ = subscriber
            self.kernel.after(20, process, hears, self, message)

    def _reply(self, client: int, response: Any) -> None:
        self._notify(client, response)

    def on_message(self, client: int, message: Any) -> None:
        """From a process of this host."""
        if client not in self._subscribers:
            return
        match message:
            case Subscribe():
                self.on_host(host_events.SubscriberJoined(client, message))
            case Applied():
                self.on_host(host_events.WorkerApplied(client, message))
            case PartitionEmptied():
                self.on_broker(broker_core.PartitionEmptied(message.topic_id, message.index, message.leader_epoch))
            case ProposeInSync():
                self.on_broker(broker_core.InSyncProposed(client, message))
            case Request():
                if isinstance(message.change, DeleteRecords | MoveReplica):
                    self.on_host(host_events.CommandRequested(client, message.request_id, message.change))
                elif self.metadata.active:
                    self.on_metadata(metadata_core.ChangeRequested(client, message))
                else:
                    self.on_broker(broker_core.ChangeRequested(client, message))

    def check(self) -> None:
        self.quorum.check()
        self.metadata.check()
        self.host_core.check()
        self.broker.check()


_FROM_ACTIVE = frozenset(broker_messages.FromActiveController.__args__)
_TO_ACTIVE = frozenset(broker_messages.ToActiveController.__args__)

_QUORUM = {
    events.Send: ControllerProcess._send_quorum,
    events.PersistVote: ControllerProcess._to_disk,
    events.AppendLog: ControllerProcess._to_disk,
    events.TruncateLog: ControllerProcess._to_disk,
    events.InstallSnapshot: ControllerProcess._to_disk,
    events.LoadState: ControllerProcess._load_state,
    events.Committed: ControllerProcess._committed,
    events.BecameActive: ControllerProcess._became_active,
    events.Deposed: ControllerProcess._deposed,
    events.ControlAppended: ControllerProcess._control_appended,
    events.ProposalRefused: ControllerProcess._refused,
    events.ProposalsDropped: ControllerProcess._refused,
    events.LeaderChanged: ControllerProcess._leader_changed,
    events.VotersChanged: ControllerProcess._leader_changed,
    events.VoterChangeEnded: ControllerProcess._voters_ended,
    events.SnapshotWanted: ControllerProcess._snapshot_due,
    events.ReadSnapshot: ControllerProcess._read_snapshot,
    events.Outdated: ControllerProcess._nothing,
    events.Note: ControllerProcess._nothing,
}
