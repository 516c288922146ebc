"""`python -m mqd.controller`: the controller of this host. It is a member of the metadata quorum
and represents this host as a broker. The data directory comes from MQD_DATA_DIR.

Exit status: 0 after a clean shutdown (on request, by SIGTERM, or because the keeper or supervisord
ended), 2 when it refuses to start (corrupt metadata, a directory of another broker), 1 when a flush
failed or a bug occurred; supervisord then restarts it.
"""

from __future__ import annotations

import gc

gc.disable()  # no garbage collection while modules load: it took an eighth of the start-up time

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mqd import native
from mqd.base import clock, listeners, logging, paths, watchdog
from mqd.base import config as configuration
from mqd.base.blocking_queries import in_thread
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.broker.core import BrokerCore
from mqd.cluster.host.core import HostCore
from mqd.cluster.host.images import owner_of
from mqd.cluster.metadata import features
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.rules import placement
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import Stored
from mqd.cluster.raft.identity import MetadataCorrupt, directory_bytes, directory_text, load_or_create_key
from mqd.cluster.raft.messages import ReplicaKey, SnapshotMeta, Voter
from mqd.cluster.raft.store import QuorumStore
from mqd.controller import directories, options, quotas, session
from mqd.controller.directories import DirectoryRefused
from mqd.controller.server import Server
from mqd.controller.shell import Shell, directory_reports, new_topic_id
from mqd.controller.standalone import StandaloneMembership
from mqd.security import confinement
from mqd.security.audit import Audit
from mqd.shm.attach import KeeperClient, KeeperError

# The loaded modules stay: later collections skip them.
gc.freeze()
gc.enable()

if TYPE_CHECKING:
    from mqd.controller.membership import Membership

T = TypeVar("T")

GENERATION_FIRST = 1
WORKERS_END_TIMEOUT_S = 20.0
log = logging.get("controller")


class Refused(RuntimeError):
    """The controller cannot start here; the message names the remedy."""


def _stored_cluster_id(layout: paths.Layout) -> str:
    try:
        return directories.read_properties(layout.meta_properties).get("cluster.id", "")
    except OSError:
        return ""


def _store_cluster_id(layout: paths.Layout, cluster_id: str) -> None:
    """Writes the cluster's id into meta.properties: from here on this data directory belongs to
    that cluster.
    """
    properties = directories.read_properties(layout.meta_properties)
    properties["cluster.id"] = cluster_id
    native.file_replace(
        layout.meta_properties, "".join(f"{name}={value}\n" for name, value in properties.items()).encode()
    )


async def _refuse_lost_metadata(layout: paths.Layout, log_dirs: list[str]) -> None:
    """Raises Refused if a log directory holds partitions, although the metadata is empty: a host
    that holds records must not lose their metadata silently.
    """
    responses = await directories.query_in_time([partial(directories.holds_partitions, path) for path in log_dirs])
    silent = [path for path, response in zip(log_dirs, responses) if not response.done()]
    if silent:
        raise Refused(
            f"{layout.metadata_dir} is empty, and the log directory {silent[0]} does not respond: it may hold"
            " partitions, whose metadata would be lost. Start again when the directory responds, or remove it from"
            " log.dirs"
        )
    occupied = [path for path, response in zip(log_dirs, responses) if response.result()]
    if occupied:
        raise Refused(
            f"{layout.metadata_dir} is empty, but {occupied[0]} holds partitions: the metadata was lost. Restore"
            f" {layout.metadata_dir} from a copy, or move the partitions away"
        )


def _membership(config: dict[str, str], client: KeeperClient, key: ReplicaKey) -> Membership | StandaloneMembership:
    """Raises ConfigError if the cluster key cannot be read."""
    if not client.cluster_sockets:
        return StandaloneMembership()
    from mqd.controller.membership import Membership

    return Membership(config, client, key)


class Process:
    """One run of the controller: start-up, components, and end."""

    def __init__(self, client: KeeperClient, layout: paths.Layout) -> None:
        self.client, self.layout = client, layout
        self.config = client.config
        self.node_id = int(self.config["node.id"])
        self.log_dirs = [path for path in self.config["log.dirs"].split(",") if path]
        self.key = load_or_create_key(layout.metadata_dir, self.node_id, os.urandom(16))
        self.store = QuorumStore(layout.metadata_dir, self.key)
        self.membership = _membership(self.config, client, self.key)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.shutdown_received = False
        self.left_epoch = -1  # the broker epoch that this host had when it left (leave()); -1: it has not left
        self._session_lock = threading.Lock()
        self._doubted_epoch = -1  # protected by the lock
        self.leaving: asyncio.Task[None] | None = None
        self.shell: Shell | None = None
        self.server: Server | None = None

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def watch(self) -> None:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.end, signal.Signals(signal_number).name)

        def on_death(death) -> None:
            if death.role == "worker" and self.shell is not None and self.server is not None:
                self.shell.on_worker_death(death.index, death.generation)

        self.client.watch(loop, on_death, self.on_shutdown, self.end, lambda reason: self.leave())

    def leave(self) -> None:
        """Moves this host's leaderships to other hosts while its processes continue to serve; then sends
        Left, and the keeper shuts them down.
        """

        async def leave_and_report() -> None:
            if self.shell is not None and self.server is not None:
                self.left_epoch = await self.shell.leave()
            self.client.report_left()

        self.leaving = asyncio.get_running_loop().create_task(leave_and_report())

    def on_shutdown(self, reason: str) -> None:
        self.shutdown_received = True
        self.end(reason)

    # -- the cluster -------------------------------------------------------------------------------

    async def determine_cluster(self, stored: Stored, state: MetadataState) -> tuple[str, Stored, tuple[int, ...]]:
        """Returns (cluster id, initial state of the quorum, node ids that may know its leader):
        immediately if there is a log; otherwise creates a cluster of one host, or queries the seeds
        until it is clear which cluster this host belongs to.
        """
        stored_cluster_id = _stored_cluster_id(self.layout)
        if stored.snapshot is not None:
            if state.cluster_id and stored_cluster_id and state.cluster_id != stored_cluster_id:
                raise Refused(
                    f"{self.layout.metadata_dir} belongs to cluster {state.cluster_id}, but"
                    f" {self.layout.meta_properties} names {stored_cluster_id}: the two do not belong together;"
                    " restore one of them"
                )
            return stored_cluster_id or state.cluster_id, stored, ()
        if not self.membership.seeds:
            await _refuse_lost_metadata(self.layout, self.log_dirs)
            cluster_id = stored_cluster_id or directory_text(new_topic_id())
            return cluster_id, self._create_cluster(cluster_id, (Voter(self.key, *self.membership.address),)), ()
        decision = await self.membership.form(stored_cluster_id)
        voters = tuple(
            sorted(
                Voter(ReplicaKey(voter.node_id, directory_bytes(voter.directory_id)), voter.host, voter.port)
                for voter in decision.voters
            )
        )
        if getattr(decision, "voter", True):
            return decision.cluster_id, self._create_cluster(decision.cluster_id, voters), ()
        log.info("this host joins a cluster", cluster_id=decision.cluster_id)
        _store_cluster_id(self.layout, decision.cluster_id)
        return decision.cluster_id, stored, self.membership.members()

    def _create_cluster(self, cluster_id: str, voters: tuple[Voter, ...]) -> Stored:
        """Creates the cluster. Stores its id first: a host with an id but without a log retries, and
        never creates another cluster.
        """
        _store_cluster_id(self.layout, cluster_id)
        if len(voters) > 1:
            log.info(
                "the hosts of the cluster have found each other",
                cluster_id=cluster_id,
                voters=",".join(str(voter.node_id) for voter in voters),
            )
        return self.store.initialize(SnapshotMeta(0, 0, voters, GENERATION_FIRST))

    # -- this host ---------------------------------------------------------------------------------

    async def prepare_directories(self, cluster_id: str, state: MetadataState) -> list:
        broker = state.brokers.get(self.node_id)
        # False if this node id is new, or was that of another host, whose replicas are placed again
        # when this host registers
        is_same_host = broker is not None and broker.directory_id in ("", directory_text(self.key.directory_id))
        known_paths = broker.directories if broker is not None and is_same_host else {}
        used_ids = (
            {directory for node, directory in state.directory_replica_counts if node == self.node_id and directory}
            if is_same_host
            else set()
        )
        entries = await directories.identify_in_time(
            self.log_dirs, cluster_id, self.node_id, known_paths, used_ids, lambda: directory_text(new_topic_id())
        )
        absent_ids = used_ids - {directory.directory_id for directory in entries}
        for directory_id in sorted(absent_ids):
            log.error(
                "a log directory with partitions is not in log.dirs: its partitions are offline",
                directory_id=directory_id,
                last_seen=known_paths.get(directory_id, "?"),
            )
        return entries

    async def devices(self) -> list[int]:
        """The devices of log.dirs; [-1], which equals no recorded value, if one does not respond."""
        (devices,) = await directories.query_in_time([partial(session.devices, self.log_dirs)])
        return devices.result() if devices.done() else [-1]

    def registration(self, entries: list, devices: list[int]) -> broker_messages.RegisterBroker:
        welcome = self.client.welcome
        endpoints = listeners.endpoints(self.config, welcome.listeners)
        host, port = next(iter(endpoints.values()))
        inter_broker, controller = welcome.inter_broker_listener or ("", 0), self.membership.address
        directory_id = directory_text(self.key.directory_id)
        return broker_messages.RegisterBroker(
            node_id=self.node_id,
            directory_id=directory_id,
            incarnation=self.client.control.generation,
            host=host,
            port=port,
            endpoints=endpoints,
            rack=self.config.get("broker.rack"),
            inter_broker_host=inter_broker[0],
            inter_broker_port=inter_broker[1],
            controller_host=controller[0],
            controller_port=controller[1],
            worker_count=welcome.worker_count,
            directories=list(directory_reports(entries)),
            clean_epoch=session.clean_epoch(self.session_path, directory_id, session.boot_id(), devices),
            features=features.supported(),
            flush_on_ack=bool(configuration.broker_value(self.config, "log.flush.on.ack")),
        )

    @property
    def session_path(self) -> Path:
        return self.layout.metadata_dir / "session"

    def record_session(self, broker_epoch: int, clean: bool) -> None:
        # This may hang on one of the directories: then nothing is written, and the lock is not held.
        devices = session.devices(self.log_dirs)
        with self._session_lock:
            # a session in doubt stays in doubt: record_doubt() may have run while this thread hung
            boot = session.boot_id() if broker_epoch > self._doubted_epoch else ""
            session.write(
                self.session_path,
                session.Session(broker_epoch, directory_text(self.key.directory_id), boot, devices, clean),
            )

    def record_doubt(self, broker_epoch: int) -> None:
        """Stores the session without a boot id: after a failed flush the page cache is unreliable, so an
        unchanged boot id proves nothing.
        """
        with self._session_lock:
            self._doubted_epoch = max(self._doubted_epoch, broker_epoch)
            session.write(
                self.session_path, session.Session(broker_epoch, directory_text(self.key.directory_id), "", [], False)
            )

    async def run(self) -> int:
        self.watch()
        recovered = self.store.open()
        if recovered.cut_bytes:
            log.warning(
                "the last write to the metadata log was interrupted; its torn end was cut off",
                bytes=recovered.cut_bytes,
            )
        await self.membership.listen()
        cluster_id, stored, peers = await self._unless_ended(self.determine_cluster(recovered.stored, recovered.state))
        shell = self.shell = self._make_shell(stored, recovered.state)
        self.membership.on_joined(cluster_id, shell)
        shell.start_quorum(cluster_id, peers)
        await self._unless_ended(
            self.membership.start_gossip(self.layout.metadata_dir, self.layout.run_dir, self.client.control.generation)
        )
        control = self.client.control
        # an earlier controller process of this keeper has registered the broker
        has_predecessor = control.broker_incarnation == control.generation
        await self._unless_ended(
            shell.wait_metadata(control.metadata_version, shell.quorum.core.log.end_offset)
            if has_predecessor
            else shell.wait_metadata(0)
        )
        if shell.failed.done():
            return await self._finish()
        state = shell.metadata.committed
        unsupported = features.describe_unsupported(state.features, features.supported())
        if unsupported:
            raise Refused(
                f"the cluster no longer supports this version of mqd: {unsupported}. Install the version that the"
                " other hosts run"
            )
        entries, devices = await self._unless_ended(
            asyncio.gather(self.prepare_directories(cluster_id, state), self.devices())
        )
        state = shell.metadata.committed  # it may have grown in the meantime
        index_of = {
            directory.directory_id: index
            for index, directory in enumerate(entries)
            if directory.directory_id and directory.usable
        }
        host = HostCore(self.node_id, -1, self.client.welcome.worker_count, native.PARTITION_SLOT_COUNT, index_of)
        broker = BrokerCore(self.node_id, state, options.controller_options(self.config))
        server = self.server = shell.server = Server(
            self.layout.controller_socket, shell.on_message, shell.on_end, Audit(self.layout.logs_dir / "audit.log")
        )
        shell.on_registered = lambda epoch: self.record_session(epoch, False)
        shell.on_doubt = self.record_doubt
        shell.start(host, broker, entries, self.registration(entries, devices), clock.boottime_ns())
        ticking = asyncio.get_running_loop().create_task(shell.tick())
        await self._unless_ended(
            asyncio.wait({shell.metadata_ready, shell.failed, ticking}, return_when=asyncio.FIRST_COMPLETED)
        )
        if shell.metadata_ready.done():
            await server.start()
        return await self._serve(cluster_id, ticking)

    def _make_shell(self, stored: Stored, state: MetadataState) -> Shell:
        quorum = QuorumCore(self.key, stored, options.quorum_settings(self.config), random.Random(os.urandom(8)))
        metadata = MetadataCore(
            state,
            self.node_id,
            ConfigRules(self.config),
            new_topic_id,
            placement.PARTITIONS_MAX,
            active=False,
            options=options.controller_options(self.config),
        )
        return Shell(
            quorum,
            metadata,
            self.store,
            self.client.control,
            self.membership.send,
            self.membership.add_address,
            quotas.bursts_ns(self.config),
        )

    async def _unless_ended(self, awaitable):
        """Returns the result of `awaitable`. Raises Ended if this process must end before it is done."""
        task = asyncio.ensure_future(awaitable)
        await asyncio.wait({task, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise Ended(self.ended.result())
        return task.result()

    async def _serve(self, cluster_id: str, ticking: asyncio.Task[None]) -> int:
        shell = self.shell
        assert shell is not None
        state = shell.metadata.committed
        log.info(
            "the controller is ready",
            cluster_id=cluster_id,
            version=state.version,
            topics=len(state.topics),
            partitions=state.partition_count,
        )
        endings: set[asyncio.Future[Any]] = {self.ended, shell.failed, ticking}
        await asyncio.wait({*endings, shell.in_service}, return_when=asyncio.FIRST_COMPLETED)
        if shell.in_service.done():
            self.client.report_ready()
            watchdog.start(asyncio.get_running_loop(), "controller")
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if ticking.done() and not shell.failed.done():
            shell.failed.set_result(str(ticking.exception() if not ticking.cancelled() else "unknown"))
        ticking.cancel()
        return await self._finish()

    async def _finish(self) -> int:
        shell = self.shell
        assert shell is not None
        if self.shutdown_received and not shell.failed.done():
            await self._record_clean_shutdown(shell)
        if self.server is not None:
            await self.server.stop()
        await self.membership.stop()
        if shell.failed.done():
            log.error("controller ends; its successor reads what the disk holds", reason=shell.failed.result())
            return 1
        await shell.stop()
        log.info("controller ended", reason=self.ended.result())
        return self.client.exit_status

    async def _record_clean_shutdown(self, shell: Shell) -> None:
        """Waits until the workers have ended. If all of them have left their markers, records that this
        session lost nothing. Does not wait for directories that do not respond.
        """
        control, loop = self.client.control, asyncio.get_running_loop()
        epoch = self.left_epoch if self.left_epoch >= 0 else shell.broker_epoch
        deadline = loop.time() + WORKERS_END_TIMEOUT_S
        workers = range(self.client.welcome.worker_count)
        while (
            any(
                control.endpoint_state(index) in (native.ProcessState.STARTING, native.ProcessState.RUNNING)
                for index in workers
            )
            and loop.time() < deadline
        ):
            await asyncio.sleep(0.005)
        if epoch < 0:
            return
        workers_of: dict[str, list[int]] = {}
        for path, index in self._marker_locations(shell):
            workers_of.setdefault(path, []).append(index)
        checks = {path: partial(_have_all_markers, Path(path), indices) for path, indices in workers_of.items()}
        check_results = await self._responses(checks)
        if len(check_results) == len(checks) and all(check_results.values()):
            await self._responses({",".join(self.log_dirs): lambda: self.record_session(epoch, True)})

    async def _responses(self, queries: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Runs queries of log directories, and returns the responses of those that respond in time. The keys
        are their paths; one query may be for several paths, joined by commas.
        """
        futures = {path: in_thread(query) for path, query in queries.items()}
        if futures:
            await asyncio.wait(futures.values(), timeout=directories.RESPONSE_S)
        silent = sorted(path for path, response in futures.items() if not response.done())
        if silent:
            log.error(
                "log directory does not respond: this session is not recorded as a clean shutdown; the next start"
                " checks the logs",
                directory=",".join(silent),
                seconds=directories.RESPONSE_S,
            )
        return {path: response.result() for path, response in futures.items() if response.done()}

    def _marker_locations(self, shell: Shell) -> set[tuple[str, int]]:
        """Returns (log directory, worker) for every partition on this host. At a clean shutdown the worker
        leaves a marker in the directory.
        """
        count = self.client.welcome.worker_count
        paths_by_id = {directory.directory_id: directory.path for directory in shell.directories}
        return {
            (paths_by_id.get(directory, ""), owner_of(topic.topic_id, partition.index, count))
            for topic in shell.metadata.committed.topics.values()
            for partition in topic.partitions
            for node, directory in zip(partition.replicas, partition.directories)
            if node == self.node_id
        }


def _have_all_markers(path: Path, workers: list[int]) -> bool:
    return all((path / f"clean-shutdown.{index}").exists() for index in workers)


class Ended(Exception):
    """This process must end before it has served any request."""


async def run(client: KeeperClient, layout: paths.Layout) -> int:
    process = Process(client, layout)
    try:
        return await process.run()
    except Ended as reason:
        await process.membership.stop()
        log.info("controller ended", reason=str(reason))
        return client.exit_status


def main() -> int:
    paths.keep_private()
    log = logging.setup("controller")
    layout = paths.layout(paths.default_data_dir())
    try:
        client = KeeperClient.connect(layout.run_dir, "controller")
    except (KeeperError, OSError) as error:
        log.error("cannot attach to the keeper", reason=str(error))
        return 1
    log = logging.setup("controller", 0, client.config)
    logging.follow(lambda: client.control.log_level)
    client.confinement = confinement.confine(client.config, layout)
    log.info("process confined", in_force=client.confinement)
    try:
        return asyncio.run(run(client, layout))
    except (MetadataCorrupt, DirectoryRefused, Refused, configuration.ConfigError) as error:
        log.error(f"the controller refuses to start: {error}")
        return 2
    except (OSError, KeeperError) as error:
        log.error("the controller cannot start", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
