"""Carries out the decisions of this host's cores (quorum, metadata, host, broker), and connects
them to this host's processes and to other hosts.

One loop, one order: an event goes into a core, its actions are carried out immediately, and a
message from one core to another is an event there. Messages of this host to itself as a peer (from
its broker core to its metadata core, while it is the active controller) arrive in the loop's next
turn, like those from outside. Only the disk has its own thread (disk.py).
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mqd import native
from mqd.base import clock, logging
from mqd.base.blocking_queries import in_thread
from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as peer
from mqd.cluster.broker.core import BrokerCore
from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.host.core import HostCore
from mqd.cluster.host.events import ControllerChanged, StateReplaced
from mqd.cluster.membership.peer_messages import PeerProtocolError
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.records import TopicState
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.store import QuorumStore
from mqd.controller import directories, quotas, slots, voters
from mqd.controller.quorum import Quorum
from mqd.controller.server import Connection, Server

TICK_S = 1.0
CLUSTER_TICK_S = 0.25
QUICK_TICK_S = 0.02  # while this host is not in service, because clients wait
MEASURE_INTERVAL_S = 10.0  # interval at which log.dirs are measured
TRANSFER_MS_MAX = 1_000  # how long leave() waits until another host leads the quorum
WORKERS_BACK_MS_MAX = 10_000  # how long the last workers may take to start again
INT64_MAX = (1 << 63) - 1

log = logging.get("controller")
_FROM_ACTIVE = frozenset(peer.FromActiveController.__args__)
_TO_ACTIVE = frozenset(peer.ToActiveController.__args__)
_QUORUM_REQUESTS = (messages.AddVoter, messages.RemoveVoter, messages.DescribeQuorum)


class Shell:
    """`control`: native.Control. Call start_quorum(), then wait_metadata(), then start(); then
    subscribers may connect. `failed` is set with the reason when the process must end, `in_service`
    when this host is unfenced and its workers know it, `ended` when this process may end after a
    controlled shutdown.
    """

    host: HostCore
    broker: BrokerCore

    def __init__(
        self,
        quorum: QuorumCore,
        metadata: MetadataCore,
        store: QuorumStore,
        control: native.Control,
        send: Callable[[int, msgspec.Struct], None] = lambda node_id, message: None,
        add_address: Callable[[int, str, int], None] = lambda node_id, host, port: None,
        quota_bursts_ns: Sequence[int] = quotas.BURSTS_NS,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.metadata = metadata
        self.node_id = metadata.node_id
        self.server: Server | None = None
        # called in a thread, once for each registration
        self.on_registered: Callable[[int], None] = lambda broker_epoch: None
        # called when the quorum's leader has changed, or this host has become the active controller
        self.on_leader_changed: Callable[[], None] = lambda: None
        # called in a thread when a partition is not served because its disk may have lost writes
        self.on_doubt: Callable[[int], None] = lambda broker_epoch: None
        self.failed: asyncio.Future[str] = loop.create_future()
        self.in_service: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[broker_core.ShutDown] = loop.create_future()
        self.quorum = Quorum(
            quorum,
            metadata,
            store,
            self.on_metadata,
            self._on_leader_changed,
            self._on_state_loaded,
            self._send_peer,
            self._fail,
        )
        self._add_address = add_address
        self._send_remote = send
        self._control = control
        self.directories: list[Directory] = []
        self._quota_bursts_ns = quota_bursts_ns
        self._cluster_id = ""
        self._started = self._leaving = False
        self._death_reported_ms = -1  # when the other hosts were informed that no worker is alive; -1 = they were not
        # done when the metadata may be sent to this host's processes
        self.metadata_ready: asyncio.Future[None] = loop.create_future()
        self._published_broker: broker_core.SetBroker | None = None
        self._voter_changes = voters.VoterChanges(self.quorum, self.metadata)

    # -- start and end -----------------------------------------------------------------------------

    def start_quorum(self, cluster_id: str, peers: tuple[int, ...] = ()) -> None:
        """`peers`: node ids that may know the quorum's leader."""
        self._cluster_id = cluster_id
        self.quorum.handle(events.Start())
        if peers:
            self.quorum.handle(events.PeersKnown(peers))

    async def wait_metadata(self, version: int, log_end: int = 0) -> None:
        """Waits until this host is the active controller; if it is not the only voter, it suffices that
        the committed state has reached `version` and `log_end`. Also returns if the process must end.
        `log_end`: the end of this host's log when the previous controller process ended. That process
        may have sent any committed state to workers, and all of that state is in the log. Records
        that the quorum's leader truncates were not committed.
        """
        waiting_since, log_count = clock.monotonic_ms(), 0
        while not self.failed.done():
            state = self.metadata.committed
            log_end = min(log_end, self.quorum.core.log.end_offset)
            needed = max(version, log_end)
            waited_s = (clock.monotonic_ms() - waiting_since) // 1000
            if waited_s >= 2 and waited_s // 10 >= log_count:
                log_count = waited_s // 10 + 1
                core = self.quorum.core
                log.info(
                    "waiting for the metadata quorum",
                    leader=core.leader,
                    epoch=core.epoch,
                    voters=",".join(str(voter.node_id) for voter in core.voters) or "?",
                    have=state.version,
                    need=needed,
                    seconds=waited_s,
                )
            is_reached = not self.quorum.core.is_alone and state.version >= needed
            if state.cluster_id and (self.metadata.active or is_reached):
                return
            # three cores and a disk must agree first: milliseconds, unless other hosts are involved
            await asyncio.sleep(0.002)

    def start(
        self,
        host: HostCore,
        broker: BrokerCore,
        log_dirs: list[Directory],
        registration: peer.RegisterBroker,
        process_number: int,
    ) -> None:
        """When `metadata_ready` is done the server may accept subscribers; until then call tick().
        `process_number`: a number that no earlier controller process of this host had.
        """
        self.host, self.broker, self.directories = host, broker, log_dirs
        self._directory_monitor = directories.DirectoryMonitor(log_dirs)
        self._registration = registration
        self._started = True
        self.on_metadata(metadata_core.DirectoriesSeen(tuple(log_dirs)))
        self._publish_quotas()
        self._learn_addresses()
        epoch = self._control.broker_epoch if self._control.broker_incarnation == registration.incarnation else -1
        if epoch < 0:
            self._control.set_broker(0, 0, 0)  # a new segment must not show a lease
        lease_ns = self._control.lease_deadline_ns
        lease_ms = 0 if epoch < 0 else INT64_MAX if lease_ns == INT64_MAX else lease_ns // 1_000_000
        # reported now, because the metadata may never change again
        self.on_broker(broker_core.MetadataCommitted(self.metadata.committed.version, self.host.version))
        self.on_broker(broker_core.Started(registration, process_number, epoch, lease_ms))
        self._on_leader_changed()
        self._maybe_set_metadata_ready()

    def _maybe_set_metadata_ready(self) -> None:
        """This host's processes receive only metadata that include the host's current registration.
        With older metadata a worker would serve partitions that it led before the restart (R10),
        and set aside the files of topics that are missing there.
        """
        broker, registration = self.metadata.committed.brokers.get(self.node_id), self._registration
        if (
            self.metadata_ready.done()
            or broker is None
            or (broker.incarnation, broker.directory_id) != (registration.incarnation, registration.directory_id)
        ):
            return
        self.metadata_ready.set_result(None)
        self.on_host(slots.read_slots(self._control, self.metadata.committed))
        self.on_host(self._measurement())
        self.on_host(ControllerChanged(self._active_controller()))
        self.on_broker(broker_core.MetadataCommitted(self.metadata.committed.version, self.host.version))

    def _publish_quotas(self) -> None:
        """Called before this host's processes receive the metadata: quotas apply as soon as they are known."""
        quotas.publish(self._control, self.metadata.committed.client_quotas, self._quota_bursts_ns)

    async def leave(self) -> int:
        """Moves this host's leaderships, and that of the quorum, to other hosts; until then it
        continues to serve (R15). Returns its broker epoch, or -1 if it has none.
        """
        if not self._started or (self.quorum.core.is_alone and len(self.metadata.committed.brokers) <= 1):
            return self.broker_epoch
        self._leaving = True
        self.on_broker(broker_core.ShutdownRequested())
        end_futures: set[asyncio.Future[Any]] = {self.ended, self.failed}
        await asyncio.wait(end_futures, return_when=asyncio.FIRST_COMPLETED)
        log.info("this host has left", reason=self.ended.result().reason if self.ended.done() else self.failed.result())
        if self.quorum.core.is_leader and not self.quorum.core.is_alone:
            self.quorum.handle(events.TransferLeadership())
            deadline = clock.monotonic_ms() + TRANSFER_MS_MAX
            while self.quorum.core.is_leader and clock.monotonic_ms() < deadline:
                await asyncio.sleep(0.005)
        return self.ended.result().broker_epoch if self.ended.done() else -1

    async def stop(self) -> None:
        await self.quorum.stop()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    async def tick(self) -> None:
        """The broker core runs before the metadata core: a process that was paused renews its own
        session before it looks for expired ones. No tick waits for a disk, because this host's
        lease and all brokers' sessions depend on the ticks.
        """
        loop = asyncio.get_running_loop()
        measured_at, measuring = loop.time(), None
        try:
            while True:
                await asyncio.sleep(self._pause_s())
                self.on_broker(broker_core.Tick())
                await asyncio.sleep(0)  # delivers this host's messages to itself
                self.on_metadata(metadata_core.Tick(clock.now_ms()))
                self.on_host(host_core.Tick())
                self._voter_changes.tick()
                self._maybe_report_alive()
                if measuring is not None and measuring.done():
                    measuring.result()  # a failure there also ends the process
                    measuring = None
                if measuring is None and loop.time() - measured_at >= MEASURE_INTERVAL_S:
                    measured_at = loop.time()
                    measuring = loop.create_task(self._measure())
        finally:
            if measuring is not None:
                measuring.cancel()

    def _pause_s(self) -> float:
        """Time until the next tick. A tick is due exactly when a session ends, not up to a tick
        later, because clients' writes wait for it.
        """
        if self._leaving or not self._is_in_service():
            return QUICK_TICK_S
        if self.quorum.core.is_alone and len(self.metadata.committed.brokers) == 1:
            return TICK_S
        expiry_ms = self.metadata.next_expiry_ms
        return (
            CLUSTER_TICK_S
            if expiry_ms is None
            else min(CLUSTER_TICK_S, max(QUICK_TICK_S, (expiry_ms - boottime_ms()) / 1000))
        )

    async def _measure(self) -> None:
        self.directories = await self._directory_monitor.measure_all()
        self.on_metadata(metadata_core.DirectoriesSeen(tuple(self.directories)))
        self.on_host(self._measurement())
        self.on_broker(broker_core.DirectoriesSeen(directory_reports(self.directories)))
        self.quorum.maybe_retry_snapshot()
        await self.quorum.disk.restore_reserve()

    def _measurement(self) -> host_core.DirectoriesMeasured:
        return host_core.DirectoriesMeasured(
            {entry.directory_id: entry.free_bytes for entry in self.directories if entry.directory_id}
        )

    @property
    def broker_epoch(self) -> int:
        return self._published_broker.broker_epoch if self._published_broker is not None else -1

    def _is_in_service(self) -> bool:
        return self._published_broker is not None and self._published_broker.ready and not self._published_broker.fenced

    # -- this host's processes ---------------------------------------------------------------------

    def on_message(self, connection: Connection, message: messages.ToController) -> None:
        match message:
            case messages.Subscribe():
                log.info("subscribed", subscriber=connection.name, generation=message.generation)
                self.on_host(host_core.SubscriberJoined(connection.number, message))
            case messages.Applied():
                self.on_host(host_core.WorkerApplied(connection.number, message))
            case messages.CommandDone():
                self.on_host(host_core.CommandEnded(connection.number, message))
            case messages.MoveCompleted():
                self.on_host(host_core.MoveEnded(connection.number, message))
            case messages.FullDirectories():
                full_directories = frozenset(
                    self.directories[index].directory_id for index in message.log_dirs if index < len(self.directories)
                )
                self.on_broker(broker_core.DirectoriesFull(message.worker, full_directories))
            case messages.PartitionEmptied():
                self.on_broker(broker_core.PartitionEmptied(message.topic_id, message.index, message.leader_epoch))
            case messages.ProposeInSync():
                self.on_broker(broker_core.InSyncProposed(connection.number, message))
            case messages.Request():
                self._on_request(connection.number, message)

    def _on_request(self, client: int, request: messages.Request) -> None:
        if isinstance(request.change, messages.DeleteRecords | messages.MoveReplica):
            self.on_host(host_core.CommandRequested(client, request.request_id, request.change))
        elif not self.metadata.active:
            self.on_broker(broker_core.ChangeRequested(client, request))
        elif isinstance(request.change, _QUORUM_REQUESTS):
            self._voter_changes.request(request, lambda response: self._send(client, response))
        else:
            self.on_metadata(metadata_core.ChangeRequested(client, request))

    def on_end(self, connection: Connection) -> None:
        self.on_metadata(metadata_core.ClientGone(connection.number))
        self.on_broker(broker_core.ClientGone(connection.number))
        self.on_host(host_core.SubscriberLeft(connection.number))

    def on_worker_death(self, index: int, generation: int) -> None:
        log.info("worker died; its partitions get a new leader epoch", worker=index, generation=generation)
        self.on_host(host_core.WorkerDied(index, generation))
        self._maybe_report_dead()

    def _worker_states(self) -> list[int]:
        return [self._control.endpoint_state(index) for index in range(self._control.worker_count)]

    def _maybe_report_dead(self) -> None:
        """Reports HostDied if the keeper has proven that no worker is alive: no process here leads anything,
        so the other hosts need not wait for the end of this host's session or the return of its workers.
        """
        if (
            self._death_reported_ms >= 0
            or self._leaving
            or self.quorum.core.is_alone
            or len(self.metadata.committed.brokers) <= 1
        ):
            return
        if all(state == native.ProcessState.DEAD for state in self._worker_states()):
            log.warning("no worker of this host is alive: its leaderships move to other hosts")
            self._death_reported_ms = clock.monotonic_ms()
            self.on_broker(broker_core.HostDied())

    def _maybe_report_alive(self) -> None:
        """Withdraws HostDied when all workers serve, or some do and the others are overdue."""
        if self._death_reported_ms < 0:
            return
        running = [state == native.ProcessState.RUNNING for state in self._worker_states()]
        if all(running) or (any(running) and clock.monotonic_ms() - self._death_reported_ms >= WORKERS_BACK_MS_MAX):
            self._death_reported_ms = -1
            self.on_broker(broker_core.HostDied(False))

    def _send(self, client: object, message: messages.FromController) -> None:
        if self.server is not None:
            self.server.send(client, message)

    # -- other hosts -------------------------------------------------------------------------------

    def on_peer(self, node_id: int, message: msgspec.Struct) -> None:
        """A message of an authenticated host, or of this host."""
        kind = type(message)
        if kind in _FROM_ACTIVE:
            if self._started:
                self.on_broker(broker_core.PeerReceived(node_id, message))  # type: ignore[arg-type]  # by its kind
        elif kind in _TO_ACTIVE:
            if (
                isinstance(message, peer.ChangeForwarded)
                and isinstance(message.request.change, _QUORUM_REQUESTS)
                and self.metadata.active
            ):
                self._on_forwarded(node_id, message)
            else:
                self.on_metadata(metadata_core.PeerReceived(node_id, message))  # type: ignore[arg-type]  # by its kind
        else:
            self.quorum.handle(events.Received(node_id, message))  # type: ignore[arg-type]  # by its kind

    def _on_forwarded(self, node_id: int, message: peer.ChangeForwarded) -> None:
        epoch, version = self.quorum.core.epoch, self.metadata.committed.version

        def respond(response: messages.Response) -> None:
            self._send_peer(
                node_id,
                peer.ChangeResponse(epoch, message.node_id, message.request_id, message.incarnation, version, response),
            )

        if message.node_id == node_id:
            self._voter_changes.request(message.request, respond)

    def _send_peer(self, node_id: int, message: msgspec.Struct) -> None:
        if node_id == self.node_id:
            asyncio.get_running_loop().call_soon(self.on_peer, node_id, message)
        else:
            try:
                self._send_remote(node_id, message)
            except PeerProtocolError as error:
                log.error("a message to another host was not sent", node=node_id, reason=str(error))

    def _learn_addresses(self) -> None:
        for voter in self.quorum.voters:
            self._add_address(voter.node_id, voter.host, voter.port)
        for broker in self.metadata.committed.brokers.values():
            self._add_address(broker.node_id, broker.controller_host, broker.controller_port)

    def _on_leader_changed(self) -> None:
        """Informs the cores of the leader; also called when voters or this host's role change."""
        core, leader = self.quorum.core, self._active_controller()
        if leader == self.node_id and not self.metadata.proposed.cluster_id:
            self.on_metadata(metadata_core.ClusterFounded(self._cluster_id, clock.now_ms()))
        self._learn_addresses()
        if self._started:
            self.on_broker(broker_core.ControllerKnown(leader, core.epoch, core.is_alone))
            self.on_host(ControllerChanged(leader))
        self.on_leader_changed()

    def _active_controller(self) -> int:
        """Node id of the active controller; -1 = not known, or elected but not active yet."""
        leader = self.quorum.core.leader
        return leader if leader != self.node_id or self.metadata.active else -1

    # -- carrying out ------------------------------------------------------------------------------

    def on_metadata(self, event: metadata_core.Event) -> None:
        for action in self.metadata.handle(event, boottime_ms()):
            match action:
                case metadata_core.Persist():
                    self.quorum.propose(action)
                case metadata_core.Publish():
                    self._publish(action, isinstance(event, metadata_core.SnapshotInstalled))
                case metadata_core.Reply():
                    response = action.response
                    if action.topic is not None:
                        response = msgspec.structs.replace(response, topic=self._topic_image(action.topic))
                    self._send(action.client, response)
                case metadata_core.SendPeer():
                    message = action.message
                    if action.topic is not None and isinstance(message, peer.ChangeResponse):
                        image = self._topic_image(action.topic)
                        message = msgspec.structs.replace(
                            message, response=msgspec.structs.replace(message.response, topic=image)
                        )
                    self._send_peer(action.node_id, message)
        if self._started and isinstance(event, metadata_core.Committed | metadata_core.SnapshotInstalled):
            self._maybe_set_metadata_ready()
            self.on_broker(broker_core.MetadataCommitted(self.metadata.committed.version, self.host.version))
            self._maybe_set_in_service()

    def _topic_image(self, topic: TopicState) -> messages.TopicImage:
        """This controller can be the active one before it has started its host core."""
        return self.host.topic_image(topic) if self._started else HostCore.image_without_slots(topic)

    def _publish(self, action: metadata_core.Publish, is_from_snapshot: bool) -> None:
        self._log_published(action)
        if action.brokers_changed:
            self._learn_addresses()
        if not self._started:
            return
        if action.client_quotas_changed:
            self._publish_quotas()
        self.on_host(StateReplaced() if is_from_snapshot else action)

    def _on_state_loaded(self) -> None:
        log.info("the metadata was replaced by the leader's snapshot", version=self.metadata.committed.version)

    @staticmethod
    def _log_published(action: metadata_core.Publish) -> None:
        for topic in action.removed_topics:
            log.info("topic deleted", topic=topic.name, topic_id=topic.topic_id.hex())
        for topic in action.topics:
            log.debug("topic changed", topic=topic.name, partitions=len(topic.partitions), version=action.version)
        if action.broker_config is not None:
            log.info("broker configuration changed", config=str(action.broker_config))

    def on_host(self, event: host_core.Event) -> None:
        if not self.metadata_ready.done():
            return  # the host core learns everything when it starts; it finds deaths of workers in the slots
        for action in self.host.handle(event, clock.monotonic_ms()):
            match action:
                case host_core.AssignSlot():
                    slots.assign(self._control, action)
                case host_core.ClearSlot():
                    self._control.clear_slot(action.slot)
                case host_core.Send():
                    self._send(action.client, action.message)
                case host_core.AppliedEverywhere():
                    self._control.metadata_version = action.version
                    self.on_metadata(metadata_core.AppliedByHost(action.version))
                    self.on_broker(broker_core.MetadataApplied(action.version))
                    self._maybe_set_in_service()
                case host_core.ReportReplicaMoved():
                    self.on_broker(broker_core.ReplicaMoved(action.topic_id, action.index, action.directory))
                case host_core.RaiseEpochs():
                    self.on_broker(broker_core.LeadershipsLost(action.partitions))
                case host_core.ReportFailures():
                    for partition, reason in action.failures.items():
                        log.error("a worker does not serve a partition", partition=partition, reason=reason)
                    self.on_broker(broker_core.ReplicasFailed(action.worker, action.partitions))
                    if action.failures and self.broker_epoch >= 0:
                        self._record_doubt()

    def _record_doubt(self) -> None:
        """Records immediately, in a thread of its own, that the session is in doubt. If the
        processes were killed first, the session would look clean although its disk has lost writes.
        """
        epoch = self.broker_epoch
        in_thread(lambda: self.on_doubt(epoch)).add_done_callback(self._on_doubt_recorded)

    @staticmethod
    def _on_doubt_recorded(response: "asyncio.Future[None]") -> None:
        if response.exception() is not None:
            log.error(
                "it could not be recorded that a partition is not served: if this host's processes are killed now, its"
                " replicas will count as complete",
                reason=str(response.exception()),
            )

    def on_broker(self, event: broker_core.Event) -> None:
        for action in self.broker.handle(event, boottime_ms()):
            match action:
                case broker_core.SendPeer():
                    self._send_peer(action.node_id, action.message)
                case broker_core.SetBroker():
                    self._set_broker(action)
                case broker_core.ToWorker():
                    self._send(action.client, action.response)
                case broker_core.Reply():
                    self._reply(action)
                case broker_core.ShutDown():
                    if not self.ended.done():
                        self.ended.set_result(action)
                case broker_core.NotYetRegistered():
                    log.warning(
                        "this host is not in service: another host has its node.id. This host waits until that host's"
                        " session ends; if that host is to stay, stop this host, and give it a node.id of its own and"
                        " an empty data directory",
                        node_id=self.node_id,
                        reason=action.message,
                    )
                case broker_core.Refused():
                    self._fail(f"the cluster refuses this broker: {action.message}")

    def _reply(self, action: broker_core.Reply) -> None:
        response = action.response
        topic = self.metadata.committed.topics.get(action.topic_name) if action.topic_name is not None else None
        if topic is not None:
            response = msgspec.structs.replace(response, topic=self.host.topic_image(topic))
        self._send(action.client, response)

    def _set_broker(self, action: broker_core.SetBroker) -> None:
        lease_ms = action.lease_until_ms if action.ready else 0
        lease_ns = INT64_MAX if lease_ms >= INT64_MAX // 1_000_000 else lease_ms * 1_000_000
        self._control.set_broker(action.broker_epoch, action.incarnation, lease_ns)
        previous, self._published_broker = self._published_broker, action
        if previous is None or (previous.fenced, previous.ready, previous.broker_epoch) != (
            action.fenced,
            action.ready,
            action.broker_epoch,
        ):
            log.info("this broker's state", broker_epoch=action.broker_epoch, ready=action.ready, fenced=action.fenced)
        if action.broker_epoch >= 0 and (previous is None or previous.broker_epoch != action.broker_epoch):
            # not awaited, because it queries the log directories, and one may hang
            in_thread(lambda: self.on_registered(action.broker_epoch))
        self._maybe_set_in_service()

    def _maybe_set_in_service(self) -> None:
        """Sets `in_service` once this host is unfenced and its workers know it."""
        if self.in_service.done() or not self._is_in_service():
            return
        registered = self.metadata.committed.brokers.get(self.node_id)
        if (
            registered is not None
            and not registered.fenced
            and self.broker.applied_version >= self.metadata.committed.version
        ):
            self.in_service.set_result(None)


def new_topic_id() -> bytes:
    """A random UUID whose text form (base64url) does not begin with a dash: command lines would
    take it for an option.
    """
    while (topic_id := uuid.uuid4().bytes)[0] >> 2 == 62:
        pass
    return topic_id


def boottime_ms() -> int:
    return clock.boottime_ns() // 1_000_000


def directory_reports(entries: list[Directory]) -> tuple[peer.DirectoryReport, ...]:
    return tuple(
        peer.DirectoryReport(entry.directory_id, entry.path, entry.free_bytes, entry.usable, entry.fresh)
        for entry in entries
    )
