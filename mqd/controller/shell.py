"""What carries out the decisions of the two cores: the metadata log, the control segment, the subscribers.

One loop, one order: an event goes into a core, its actions are carried out before the next event; only writing the log leaves the loop (one thread, one write at a
time, everything that waits goes into the next write together).
"""

import asyncio
import errno
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mqd import native
from mqd.base import clock, logging
from mqd.cluster import controller_messages as messages
from mqd.cluster import host_core, metadata_core
from mqd.cluster.host_core import HostCore
from mqd.cluster.metadata_core import MetadataCore
from mqd.cluster.metadata_log import FlushFailed, MetadataLog
from mqd.cluster.metadata_records import Record
from mqd.cluster.metadata_rules import Directory
from mqd.controller import directories, quotas
from mqd.controller.server import Connection, Server

TICK_S = 1.0
MEASURE_TICKS = 10
INT64_MAX = (1 << 63) - 1

log = logging.get("controller")


def new_topic_id() -> bytes:
    """A random UUID; its text form (base64url) does not begin with a dash, which command lines would take for an option."""
    while (topic_id := uuid.uuid4().bytes)[0] >> 2 == 62:
        pass
    return topic_id


class Shell:
    """`control`: native.Control. After start() the server may accept subscribers; `failed` is set with the reason when the process must end."""

    def __init__(self, core: MetadataCore, host: HostCore, metadata_log: MetadataLog, control: native.Control, log_dirs: list[Directory], quota_burst_ns: int = quotas.BURST_NS) -> None:
        self.core, self.host = core, host
        self.server: Server | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._log = metadata_log
        self._control = control
        self._directories = log_dirs
        self._quota_burst_ns = quota_burst_ns
        self._queue: list[metadata_core.Persist] = []
        self._writing: asyncio.Task[None] | None = None
        self._disk = ThreadPoolExecutor(1, "metadata-log")
        self._started = False

    # -- start and end -----------------------------------------------------------------------------------------------------

    async def start(self, broker: metadata_core.BrokerStarted) -> None:
        self.metadata(metadata_core.DirectoriesSeen(tuple(self._directories)))
        self.metadata(broker)
        while self._writing is not None:
            await self._writing
        registered = self.core.committed.brokers.get(self.core.node_id)
        if registered is None or registered.incarnation != broker.incarnation:
            raise OSError(errno.ENOSPC, "the broker could not register in the metadata log: is the disk full? Free some space and start again")
        self._started = True
        self._control.set_broker(registered.epoch, broker.incarnation, INT64_MAX)
        self._publish_quotas()
        self.on_host(self._seen_slots())

    def _publish_quotas(self) -> None:
        """Before anybody is told: whoever hears that a quota was set is held to it."""
        quotas.publish(self._control, self.core.committed.client_quotas, self._quota_burst_ns)

    def _seen_slots(self) -> host_core.Started:
        control, seen, torn = self._control, [], []
        alive = {
            index: control.endpoint_generation(index)
            for index in range(control.worker_count)
            if control.endpoint_state(index) in (native.ProcessState.STARTING, native.ProcessState.RUNNING)
        }
        for slot in range(native.PARTITION_SLOT_COUNT):
            try:
                view = control.slot_view(slot)
            except native.NativeError:
                torn.append(slot)
                continue
            if view.state == native.SlotState.FREE:
                continue
            stale = view.owner != native.OWNER_NONE and view.owner_generation != control.endpoint_generation(view.owner)
            seen.append(host_core.SlotSeen(slot, view.topic_id, view.partition_index, view.leader_epoch, view.owner, stale))
        return host_core.Started(self.core.committed, tuple(seen), tuple(torn), alive)

    async def stop(self) -> None:
        if self._writing is not None:
            await self._writing
        self._disk.shutdown()
        self._log.close()

    async def tick(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(TICK_S)
            count += 1
            self.metadata(metadata_core.Tick())
            self.on_host(host_core.Tick())
            if count % MEASURE_TICKS == 0:
                measured = await asyncio.get_running_loop().run_in_executor(None, lambda: [directories.measure(entry) for entry in self._directories])
                self._directories = measured
                self.metadata(metadata_core.DirectoriesSeen(tuple(measured)))
                if self._writing is None:
                    await asyncio.get_running_loop().run_in_executor(self._disk, self._log.restore_reserve)

    # -- subscribers -------------------------------------------------------------------------------------------------------

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
            case messages.Request():
                if isinstance(message.change, messages.DeleteRecords | messages.MoveReplica):
                    self.on_host(host_core.CommandRequested(connection.number, message.request_id, message.change))
                else:
                    self.metadata(metadata_core.ChangeRequested(connection.number, message))

    def on_end(self, connection: Connection) -> None:
        self.metadata(metadata_core.ClientGone(connection.number))
        self.on_host(host_core.SubscriberLeft(connection.number))

    def on_worker_death(self, index: int, generation: int) -> None:
        log.info("worker died; its partitions get a new leader epoch", worker=index, generation=generation)
        self.on_host(host_core.WorkerDied(index, generation))

    # -- carrying out ------------------------------------------------------------------------------------------------------

    def metadata(self, event: metadata_core.Event) -> None:
        for action in self.core.handle(event, self._now_ms(event)):
            match action:
                case metadata_core.Persist():
                    self._queue.append(action)
                    if self._writing is None:
                        self._writing = asyncio.get_running_loop().create_task(self._write())
                case metadata_core.Publish():
                    self._log_published(action)
                    if self._started:
                        if action.client_quotas_changed:
                            self._publish_quotas()
                        self.on_host(action)
                case metadata_core.Reply():
                    answer = action.answer
                    if action.topic is not None:
                        answer = msgspec.structs.replace(answer, topic=self.host.topic_image(action.topic))
                    self._send(action.client, answer)

    @staticmethod
    def _now_ms(event: metadata_core.Event) -> int:
        return clock.now_ms() if isinstance(event, metadata_core.BrokerStarted) else clock.monotonic_ms()

    def on_host(self, event: host_core.Event) -> None:
        for action in self.host.handle(event, clock.monotonic_ms()):
            match action:
                case host_core.AssignSlot():
                    log_dir = action.log_dir if action.log_dir != host_core.LOG_DIR_NONE else 0
                    self._control.assign_slot(action.slot, action.topic_id, action.index, action.owner, log_dir, action.leader_epoch)
                    if action.owner == host_core.OWNER_NONE:
                        self._control.set_slot_state(action.slot, native.SlotState.OFFLINE)
                case host_core.ClearSlot():
                    self._control.clear_slot(action.slot)
                case host_core.Send():
                    self._send(action.client, action.message)
                case host_core.AppliedEverywhere():
                    self._control.metadata_version = action.version
                    self.metadata(metadata_core.AppliedByHost(action.version))
                case host_core.RecordMove():
                    self.metadata(metadata_core.MoveCompleted(action.topic_id, action.index, action.directory))
                case host_core.RaiseEpochs():
                    self.metadata(metadata_core.LeadershipsLost(action.partitions))
                case host_core.Report():
                    for partition, reason in action.failures.items():
                        log.error("a worker does not serve a partition", partition=partition, reason=reason)

    def _send(self, client: object, message: messages.FromController) -> None:
        if self.server is not None:
            self.server.send(client, message)

    @staticmethod
    def _log_published(action: metadata_core.Publish) -> None:
        for topic in action.removed:
            log.info("topic deleted", topic=topic.name, topic_id=topic.topic_id.hex())
        for topic in action.topics:
            log.debug("topic changed", topic=topic.name, partitions=len(topic.partitions), version=action.version)
        if action.broker_config is not None:
            log.info("broker configuration changed", config=str(action.broker_config))

    # -- the log -----------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                records: list[Record] = [record for persist in batch for record in persist.records]
                try:
                    await loop.run_in_executor(self._disk, self._log.append, records, batch[0].base_offset, 0, clock.now_ms())
                except FlushFailed as error:
                    self._fail(f"a flush of the metadata log failed, so what is on disk is unknown: {error}")
                    return
                except OSError as error:
                    log.error("metadata log cannot be written; the changes are refused", reason=str(error), changes=len(batch))
                    self._queue = []  # all of it rests on what was refused
                    self.metadata(metadata_core.PersistFailed(str(error)))
                    continue
                self.metadata(metadata_core.Persisted(batch[-1].version))
                if not self._queue:
                    await self._checkpoint(loop)
        except Exception as error:  # our own fault: the story, then the end; supervisord starts a successor over what is on disk
            log.exception("the controller failed")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._writing = None

    async def _checkpoint(self, loop: asyncio.AbstractEventLoop) -> None:
        """The committed state changes only by Persisted, which this very task reports: nothing moves while the thread reads it."""
        began = time.monotonic()
        try:
            if await loop.run_in_executor(self._disk, self._log.maybe_checkpoint, self.core.committed):
                log.info("metadata checkpoint written", offset=self._log.next_offset, seconds=round(time.monotonic() - began, 3))
        except OSError as error:
            log.warning("metadata checkpoint could not be written; the log goes on", reason=str(error))
        except FlushFailed as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)
