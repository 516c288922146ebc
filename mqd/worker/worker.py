"""A worker process: the native reactor on its own thread, and this event loop, which starts it,
sends it commands and cleans up after it.

    start  attach to the keeper -> log directories (checkpoints read, marker removed) -> reactor
           started -> controller's image applied -> Ready
    run    changes, upkeep
    end    SIGTERM, Shutdown, or the end of keeper or supervisord -> partitions closed,
           checkpoints, marker -> exit status 0 (KeeperClient.exit_status)
           a bug of its own -> exit status 1, and supervisord restarts it

Concurrency: one event loop; messages of the controller are applied one after the other under
`_changes_lock`, except that deletions of records do not delay the messages after them. The shutdown
holds the lock too, so no change is half applied at that time.
"""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from mqd import native
from mqd.base import descriptors as open_files
from mqd.base import logging, watchdog
from mqd.base.config import broker_number, broker_value
from mqd.base.listeners import parse_listeners
from mqd.cluster.host.messages import (
    AclsPut,
    Applied,
    BrokerConfigPut,
    BrokersPut,
    Command,
    FromController,
    FullDirectories,
    Image,
    InSyncResponse,
    MessageList,
    PartitionsPut,
    SettingsPut,
    Subscribe,
    TopicPut,
    TopicRemoved,
)
from mqd.cluster.membership import credentials
from mqd.log.files import NativeFiles
from mqd.security import authorizer, confinement
from mqd.security.audit import Audit
from mqd.shm.attach import KeeperClient
from mqd.shm.credits import Credits
from mqd.shm.keeper_messages import Death
from mqd.worker import slow_requests
from mqd.worker.background import NO_LOG_DIR, Background, run_unless_hung
from mqd.worker.catalog import Catalog, Changes
from mqd.worker.commands import ReactorCommands
from mqd.worker.compaction import Compactor
from mqd.worker.controller_commands import ControllerCommands
from mqd.worker.controller_link import ControllerLink
from mqd.worker.forwarding import Forwarding
from mqd.worker.local import LocalBudget
from mqd.worker.log_directory import LogDirectory
from mqd.worker.maintenance import Upkeep, scan_max_timestamp
from mqd.worker.moving import Mover
from mqd.worker.options import listener_flags, reactor_options
from mqd.worker.orphan_directories import set_aside_left_behind_replicas, set_aside_strays
from mqd.worker.partition_reporter import PartitionReporter
from mqd.worker.partitions import PartitionSet
from mqd.worker.periodic_work import PeriodicWork
from mqd.worker.replication import Replication
from mqd.worker.scrub import Scrubber
from mqd.worker.subjects import Subjects
from mqd.worker.tls import TlsListeners

_SPARE_DESCRIPTORS = 256
CONNECTIONS_AT_RUN_TIME = 65536  # max.connections can be raised up to this number without a restart
RETRY_FAILED_S = 3.0
END_S = 22.0  # the keeper kills the worker after 25 s
PROBE_S = 2.0
REACTOR_S = 5.0  # REACTOR_S + HANG_S is longer than a healthy reactor takes to end (10 s)


class Worker:
    def __init__(self, client: KeeperClient, run_dir: Path, logs_dir: Path):
        self._client = client
        self._index = client.index
        self._run_dir, self._logs_dir = run_dir, logs_dir
        self._control = client.control
        self._config = client.config
        self._log = logging.get("worker")
        self._stopping: asyncio.Event = asyncio.Event()
        self._changes_lock = asyncio.Lock()
        self._ready = False
        self._version = -1  # of the last applied metadata
        self._cluster_id = ""
        # the cluster's access control lists
        self.rules = authorizer.from_config(client.config) or authorizer.Authorizer()
        self._checked_left_behind = False
        self._background_tasks: set[asyncio.Task[Any]] = set()

    # -- start and end -----------------------------------------------------------------------------

    async def run(self) -> int:
        """Returns the process's exit status."""
        loop = asyncio.get_running_loop()
        self._client.watch(loop, self._on_death, self._stop, self._stop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        self._set_up(loop)
        tasks = [
            asyncio.create_task(self._start_and_follow()),
            asyncio.create_task(self._retry_failed()),
            asyncio.create_task(self._tls.run()),
            *(
                asyncio.create_task(work)
                for work in [
                    self._reporter.run(),
                    *self._upkeep.tasks(),
                    *self._scrubber.tasks(),
                    *self._compactor.tasks(),
                ]
            ),
        ]
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        failure = next(
            (
                task.exception()
                for task in tasks
                if task.done() and not task.cancelled() and task.exception() is not None
            ),
            None,
        )
        # a thread, because the loop itself may be blocked
        timer = threading.Timer(END_S, self._give_up)
        timer.daemon = True
        timer.start()
        async with self._changes_lock:
            tasks_ended = await self._run_unless_hung("the running tasks", _cancel([*tasks, stop]))
            if failure is not None:
                raise failure  # a bug: no clean shutdown, supervisord restarts the worker
            await self._end(tasks_ended)
        return self._client.exit_status

    def _set_up(self, loop: asyncio.AbstractEventLoop) -> None:
        client, config = self._client, self._config
        worker_count = client.welcome.worker_count
        files, self._background = NativeFiles(), Background()
        self._catalog = Catalog(self._index, config, client.control.generation)
        descriptors = open_files.raise_limit()
        reserve_bytes = broker_number(config, "log.dirs.free.bytes.min")
        self._log_dirs = [
            LogDirectory(index, Path(path), self._index, worker_count, reserve_bytes, files, scan_max_timestamp)
            for index, path in enumerate(config["log.dirs"].split(","))
        ]
        self._credits = Credits.attach(
            client.welcome.control_name,
            client.welcome.generation,
            self._run_dir / "credits.lock",
            max(broker_number(config, "max.connections"), CONNECTIONS_AT_RUN_TIME),
            worker_count,
        )
        self._credits.adjust(0)
        self._local = LocalBudget.attach(client, self._run_dir / "credits.lock", config, worker_count)
        read_fd_count = broker_number(config, "read.fd.count.max")
        connection_max = min(
            self._credits.budget.connection_capacity, max(16, descriptors - read_fd_count - _SPARE_DESCRIPTORS)
        )
        own_arena_bytes = client.welcome.arena_bytes[client.endpoint_index]
        self._reactor = native.Reactor(
            native.ReactorOptions(
                control=client.control,
                links=client.links,
                index=client.endpoint_index,
                endpoint_count=client.endpoint_count,
                eventfds=client.eventfds,
                arenas=client.arenas,
                handoff_fd=client.handoff_fds[0],
                control_fd=self._local.control_fd,
                listener_flags=listener_flags(parse_listeners(config)),
                # the capacity; credits limit the actual number
                **reactor_options(config, self._index, own_arena_bytes, connection_max),
            )
        )
        self._reactor.set_connection_max(
            min(self._credits.granted_count, connection_max), broker_number(config, "max.connections")
        )
        self._local.apply(self._reactor)
        self._periodic_work = PeriodicWork(self._reactor.is_idle)
        self._commands = ReactorCommands(self._reactor, loop, self._on_event)
        self._partitions = PartitionSet(
            self._index,
            self._log_dirs,
            self._control,
            self._reactor,
            self._commands,
            self._background,
            self._catalog,
            config,
            files,
        )
        host_credentials = credentials.load(config)
        self._tls = TlsListeners(config, self._reactor, self._commands, client.welcome.tls_secret, host_credentials)
        self._upkeep = Upkeep(
            self._index,
            worker_count,
            self._control,
            self._reactor,
            self._commands,
            self._partitions,
            self._background,
            self._credits,
            self._local,
            connection_max,
            files,
            self._periodic_work,
        )
        self._scrubber = Scrubber(
            self._index, self._control, self._partitions, self._background, self._run_dir, config, self._periodic_work
        )
        self._compactor = Compactor(
            self._index,
            worker_count,
            self._control,
            self._reactor,
            self._commands,
            self._partitions,
            self._background,
            files,
            self._run_dir,
            self._scrubber.on_replaced,
        )
        self._link = ControllerLink(
            self._run_dir / "controller.sock", Subscribe("worker", self._index, client.generation), self._on_message
        )
        self._mover = Mover(
            self._log_dirs,
            self._control,
            self._partitions,
            self._catalog,
            self._background,
            files,
            self._link.send,
            self._changes_lock,
        )
        self._controller_commands = ControllerCommands(
            self._control, self._log_dirs, self._partitions, self._upkeep, self._mover, self._link.send
        )
        grace_s = int(config["partition.retire.grace.ms"]) / 1000
        self._reporter = PartitionReporter(
            self._control,
            self._reactor,
            self._commands,
            self._partitions,
            self._catalog,
            self._link.send,
            self._run_in_background,
            grace_s,
            periodic_work=self._periodic_work,
        )
        self._upkeep.on_space = self._report_full_directories
        self._replication = Replication(self._reactor, self._commands, self._catalog.assigned, config, host_credentials)
        self._subjects = Subjects(
            self._reactor,
            self._commands,
            self.rules,
            bool(broker_value(config, "authorizer.log.only")),
            self._catalog.slots_of,
            Audit(self._logs_dir / "audit.log"),
        )
        self._forwarding = Forwarding(self._reactor, self._commands, config, host_credentials)
        self._files = files

    async def _start_and_follow(self) -> None:
        for log_dir in self._log_dirs:  # remove the markers before anything else is written
            for leftover in await self._background.urgent(log_dir.index, log_dir.open):
                self._partitions.delete_later(log_dir, leftover)
        await asyncio.to_thread(self._tls.load)
        self._reactor.start()
        confinement.refuse_more_rings(self._client.config)
        self._commands.watch()
        self._log.info(
            "reactor started", backend=self._reactor.backend.name.lower(), connection_max=self._credits.granted_count
        )
        for log_dir in self._log_dirs:
            await self._commands.run(self._reactor.add_log_dir, log_dir.index, str(log_dir.path))
        await self._link.run()

    def _stop(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._log.info("stopping", reason=reason)
            self._stopping.set()

    async def _end(self, tasks_ended: bool) -> None:
        """The clean shutdown. The reactor sends the responses that it can, and ends. A stopped
        reactor carries out commands in this thread, so the partitions can be taken back. A hanging
        directory is abandoned. `tasks_ended`: all tasks have ended; otherwise compaction, the only
        task that may outlast its cancellation, is in a hanging step and is not awaited again.
        """
        await self._replication.close()
        await self._forwarding.close()
        await self._mover.close()
        await self._controller_commands.close()
        compactor_closed = tasks_ended and await self._run_unless_hung("compaction", self._compactor.close())
        if not await self._run_unless_hung(
            "the reactor", self._background.urgent(NO_LOG_DIR, self._reactor.stop), REACTOR_S
        ):
            await self._log_hung_directories()
            self._exit_without_joining()
        # mark_clean() requires that checkpoints were pruned; a short run may not have done so yet
        pruned = await self._run_unless_hung("pruning of checkpoints", self._upkeep.maybe_prune())
        hung = await self._partitions.close_all(self._client.welcome.generation)
        if hung or not compactor_closed or not pruned:
            self._exit_without_joining()
        self._commands.drain()
        self._commands.unwatch()
        self._reactor.destroy()
        self._background.close()
        self._credits.close()
        self._local.close()
        self._log.info("stopped")

    async def _run_unless_hung(self, work_name: str, work: Coroutine[Any, Any, None], extra_s: float = 0.0) -> bool:
        began_s = asyncio.get_running_loop().time() + extra_s
        ended = await run_unless_hung(work, lambda: began_s)
        if not ended:
            self._log.error("a task does not end: a log directory hangs", what=work_name)
        return ended

    async def _log_hung_directories(self) -> None:
        """Called when the reactor does not stop because a flush hangs. No partition can be taken
        back from it, so none is closed, in any directory.
        """
        probes = {
            str(log_dir.path): asyncio.ensure_future(
                self._background.urgent(log_dir.index, self._files.sync_directory, log_dir.path)
            )
            for log_dir in self._log_dirs
        }
        await asyncio.wait(probes.values(), timeout=PROBE_S)
        silent = ",".join(path for path, probe in probes.items() if not probe.done())
        self._log.error(
            "log directory does not respond: the partitions of this worker are not closed cleanly; the next start"
            " checks their logs",
            directory=silent or "unknown",
        )

    def _give_up(self) -> None:
        """Exits although a log directory blocks the clean shutdown. Logs that are not closed yet
        have no marker, so the next start checks them.
        """
        paths = sorted(
            {str(self._log_dirs[opened.owned.log_dir].path) for opened in list(self._partitions.open.values())}
        )
        self._log.error(
            "the worker did not end in time and exits without a clean close; the next start checks the logs",
            directories=",".join(paths),
            seconds=END_S,
        )
        self._exit_without_joining()

    def _exit_without_joining(self) -> None:
        """Exits without joining threads that a log directory blocks; they use memory that an
        orderly exit would free.
        """
        self._credits.close()
        self._local.close()
        self._log.info("stopped")
        os._exit(self._client.exit_status if self._stopping.is_set() else 1)  # 1, after a bug: it is restarted

    # -- the controller ----------------------------------------------------------------------------

    async def _on_message(self, message: FromController) -> None:
        async with self._changes_lock:
            if self._stopping.is_set():
                return
            if isinstance(message, Command):
                if not self._mover.hold(message):
                    await self._controller_commands.carry_out(message)
            elif isinstance(message, Image):
                await self._on_image(message)
            elif isinstance(message, InSyncResponse):
                self._reporter.on_response(message)
            elif isinstance(message, MessageList):
                for update in message.parts:
                    if isinstance(update, AclsPut):
                        self._subjects.change(dict(update.put), update.removed)
                await self._apply(self._catalog.apply_updates(message.parts), message.version)
            elif isinstance(message, TopicPut | PartitionsPut | TopicRemoved | BrokersPut | BrokerConfigPut):
                await self._apply(self._catalog.on_message(message), message.version)
            elif isinstance(message, AclsPut):
                self._subjects.change(dict(message.put), message.removed)
                await self._apply(Changes(), message.version)
            elif isinstance(message, SettingsPut):
                # quotas are already in the control segment; the rest concerns the acceptor
                await self._apply(Changes(), message.version)

    async def _on_image(self, image: Image) -> None:
        self._cluster_id = image.cluster_id
        self._subjects.replace(dict(image.acls))
        changes = self._catalog.on_image(image)
        if not self._ready:
            to_delete = await self._background.urgent(
                NO_LOG_DIR,
                set_aside_strays,
                self._log_dirs,
                image,
                self._index,
                self._client.welcome.worker_count,
                self._files,
            )
            for log_dir, path in to_delete:
                self._partitions.delete_later(log_dir, path)
        await self._apply(changes, image.version, is_image=True)
        self._report_full_directories()
        self._upkeep.prune_when_applied(image.version)
        if not self._ready:
            await self._mover.unmark_all()
            await self._upkeep.measure_space()
            self._ready = True
            self._client.report_ready(f"partitions={len(self._partitions.open)}")
            watchdog.start(asyncio.get_running_loop(), "worker")
            self._log.info(
                "ready",
                partitions=len(self._partitions.open),
                offline=len(self._partitions.failures),
                scanned_bytes=self._partitions.scanned_bytes,
            )

    async def _apply(self, changes: Changes, version: int, is_image: bool = False) -> None:
        await self._subjects.apply()
        await self._partitions.apply(changes)
        self._replication.update(self._catalog.cluster, self._cluster_id, self._catalog.broker_config)
        self._forwarding.update(self._catalog.cluster, self._cluster_id)
        self._upkeep.on_applied()
        if not self._checked_left_behind and self._catalog.has_caught_up:
            await self._set_aside_left_behind()
        await self._mover.on_applied(is_image)
        self._version = version
        self._link.send(Applied(version, dict(self._partitions.failures)))
        for command in self._mover.release_held():
            await self._controller_commands.carry_out(command)

    def _report_full_directories(self) -> None:
        self._link.send(
            FullDirectories(self._index, [log_dir.index for log_dir in self._log_dirs if log_dir.space_guard.is_full])
        )

    async def _set_aside_left_behind(self) -> None:
        """Sets aside the directories of replicas that left this host before it started (W5 of the
        catalog).
        """
        self._checked_left_behind = True
        if self._catalog.cluster.node_id >= 0:
            to_delete = await self._background.urgent(
                NO_LOG_DIR,
                set_aside_left_behind_replicas,
                self._log_dirs,
                self._catalog.is_left_behind,
                self._index,
                self._client.welcome.worker_count,
                self._files,
            )
            for log_dir, path in to_delete:
                self._partitions.delete_later(log_dir, path)

    async def _retry_failed(self) -> None:
        """Retries partitions that lacked space, memory or a descriptor when they were opened, and
        moves for which the metadata log had no space.
        """
        async for _ in self._periodic_work.ticks(
            RETRY_FAILED_S, lambda: self._catalog.may_retry() or self._mover.is_moving()
        ):
            async with self._changes_lock:
                if self._stopping.is_set():
                    return  # failed partitions remain failed: their directories get no marker
                self._mover.report_again()
                changes = self._catalog.retry()
                if changes.open:
                    await self._apply(changes, self._version)

    # -- notices -----------------------------------------------------------------------------------

    def _on_death(self, death: Death) -> None:
        if death.endpoint != self._client.endpoint_index:
            self._run_in_background(self._commands.run(self._reactor.endpoint_died, death.endpoint))

    def _on_event(self, event: native.Event) -> None:
        kind = event.kind
        if kind == native.EventKind.LOG:
            self._log_line(event)
        elif kind == native.EventKind.ROLLED:
            self._upkeep.on_rolled()
        elif kind == native.EventKind.RESUMED:
            self._upkeep.on_resumed()
        elif kind == native.EventKind.TRUNCATED:
            self._upkeep.on_truncated(event.slot)
            self._log_line(event)
        elif kind == native.EventKind.LOG_START:
            self._run_in_background(self._upkeep.on_leader_log_start(event.slot, event.offset))
        elif kind == native.EventKind.FETCHER_ENDED:
            self._replication.on_ended(event)
        elif kind == native.EventKind.RELAY_REQUESTED:
            self._forwarding.on_requested(event)
        elif kind == native.EventKind.RELAY_ENDED:
            self._forwarding.on_ended(event)
        elif kind == native.EventKind.TLS_NAME:
            self._run_in_background(self._tls.on_certificate_subject(event))
        elif kind == native.EventKind.SUBJECT_REQUESTED:
            self._subjects.on_requested(event)
        elif kind == native.EventKind.SUBJECT_GONE:
            self._subjects.on_gone(event)
        elif event.slow is not None:
            slow_requests.log_slow_request(self._log, event, self._catalog)
        elif kind == native.EventKind.DENIED:
            self._subjects.on_denied(event)
        elif kind == native.EventKind.RETIRED_USED:
            self._reporter.on_used(event)
        elif event.proposal is not None:
            self._reporter.on_proposal(event)
        elif kind == native.EventKind.LOG_DIR_FAILED:
            self._on_log_dir_failed(event)
        elif kind == native.EventKind.LOG_DIR_FULL and event.log_dir < len(self._log_dirs):
            self._run_in_background(self._upkeep.on_log_dir_full(self._log_dirs[event.log_dir]))
        elif event.partition is not None:
            # returned by a command whose caller no longer waits
            self._run_in_background(self._background.urgent(NO_LOG_DIR, event.partition.close, False))

    def _log_line(self, event: native.Event) -> None:
        message, detail = _split_line(event.text)
        fields: dict[str, Any] = {"detail": detail} if detail else {}
        if event.connection:
            fields["connection"] = event.connection
        if event.slot != native.SLOT_NONE:
            fields["partition"] = self._catalog.partition_name(event.slot)
        self._log.syslog(event.level, message, **fields)

    def _on_log_dir_failed(self, event: native.Event) -> None:
        if event.log_dir >= len(self._log_dirs):
            return
        log_dir = self._log_dirs[event.log_dir]
        if not log_dir.fail(event.text or os.strerror(event.error)):
            return
        self._run_in_background(self._background.urgent(log_dir.index, log_dir.mark_doubtful))
        for opened in self._partitions.open.values():
            self._partitions.note_failed_directory(opened.owned)
        self._link.send(Applied(self._version, dict(self._partitions.failures)))

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_background_task_done)

    def _on_background_task_done(self, task: "asyncio.Task[Any]") -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._stopping.is_set():
            self._log.warning("reactor refused a command", reason=str(task.exception()))


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancels the tasks, and returns when they have ended. A caller that is itself cancelled does
    not wait for them (with gather it would).
    """
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks)
    for task in done:
        if not task.cancelled():
            # marks the exception as retrieved; run() raises the first one, the others result from it
            task.exception()


_VARIABLE = re.compile(r"[:0-9]")


def _split_line(text: str) -> tuple[str, str]:
    """Splits a line of the reactor into its constant part, which ends before the first colon or
    digit, and the rest. Lines are counted (and rate-limited) by the constant part.
    """
    variable = _VARIABLE.search(text)
    if variable is None:
        return text, ""
    message = text[: variable.start()].rstrip(" (")
    return (message, text[variable.start() :].lstrip(": ")) if message else ("reactor", text)
