"""This host's gossip: the information that it sends, and the use of the hints that it receives.

    sent      profile (rack, capacity), load, the active controller as the quorum knows it; the seeds
              are cluster.seeds and every registered broker
    hints     addresses of hosts (connections to them are tried), hosts that may know the quorum's
              leader (queried when this host knows none), suspected hosts (logged, and shown by views())

The same socket carries the notices of keepers (mqd/cluster/membership/death_notice.py), which are
proofs, not hints.

Gossip never fences, elects or changes anything: a wrong hint costs one failed connection or one
useless request.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from mqd.base import clock, cluster_config, logging
from mqd.base.blocking_queries import in_thread
from mqd.cluster.membership import death_notice, death_proofs
from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip_events import MemberView, Profile
from mqd.cluster.raft import events as quorum_events
from mqd.cluster.raft.messages import ReplicaKey
from mqd.controller import directories, gossip

if TYPE_CHECKING:
    from mqd.cluster.membership.credentials import Credentials
    from mqd.cluster.membership.handshake import Hello
    from mqd.controller.peer_streams import Reader, Writer
    from mqd.controller.peers import Peers
    from mqd.controller.shell import Shell

UPDATE_S = 0.25  # interval at which the sent information is updated
SEEDS_EVERY, LOAD_EVERY = 4, 20  # intervals of these updates, in multiples of UPDATE_S
DISK_SIZE_TIMEOUT_S = 1.0  # how long the start waits for the size of the log directories
LOOK_UP_AGAIN_S = 10.0  # after a failed lookup
PEERS_MAX = 8  # at most this many hosts are queried for the quorum's leader

log = logging.get("controller.gossip")


def _version() -> str:
    try:
        return metadata.version("mqd")[:64]
    except metadata.PackageNotFoundError:
        return ""


def _file_system_bytes(log_dirs: Iterable[str], field: Literal["total", "used"]) -> int:
    """Returns the sum of a field of shutil.disk_usage() over the file systems of log.dirs. Each file
    system is counted once.
    """
    bytes_by_device = {}
    for path in log_dirs:
        try:
            bytes_by_device[os.stat(path).st_dev] = getattr(shutil.disk_usage(path), field)
        except OSError:
            continue
    return sum(bytes_by_device.values())


async def disk_bytes(config: Mapping[str, str]) -> int:
    """Size of the file systems of log.dirs; 0 if one of them does not respond."""
    (response,) = await directories.query_in_time(
        [partial(_file_system_bytes, _log_dirs(config), "total")], DISK_SIZE_TIMEOUT_S
    )
    return response.result() if response.done() else 0


def _log_dirs(config: Mapping[str, str]) -> list[str]:
    return [path for path in config["log.dirs"].split(",") if path]


class _Resolved(NamedTuple):
    """The socket addresses of a host and port."""

    addresses: tuple[tuple[str, int], ...]
    until_s: float  # loop time from which the name is looked up again


class HostGossip:
    """Active between start() and stop(). The constructor raises OSError if the life (the number of
    this directory's starts) cannot be written. `incarnation`: the keeper's.
    """

    def __init__(
        self,
        config: Mapping[str, str],
        credentials: Credentials,
        key: ReplicaKey,
        address: tuple[str, int],
        worker_count: int,
        cluster_id: str,
        datagrams: socket.socket,
        peers: Peers,
        shell: Shell,
        add_address: Callable[[int, str, int], None],
        directory: Path,
        run_dir: Path,
        incarnation: int,
        disk_bytes: int,
    ) -> None:
        self._config, self._shell, self._add_address = config, shell, add_address
        self._log_dirs = _log_dirs(config)
        self._cpu_ns, self._measured_ms = 0, clock.monotonic_ms()
        self._used_bytes = 0
        self._disk_check: asyncio.Future[int] | None = None
        self._own_seeds = tuple(cluster_config.parse_address(seed) for seed in cluster_config.seeds(config))
        self._seeds = self._own_seeds
        self._cluster_id, self._run_dir = cluster_id, run_dir
        self._credentials = credentials
        self._recipients: tuple[tuple[str, int], ...] = ()  # of death notices: the other voters and brokers
        self._resolved: dict[tuple[str, int], _Resolved] = {}  # the addresses of recipients
        self._lookups: dict[tuple[str, int], asyncio.Future[list[tuple]]] = {}
        # (node id, whether its broker has ended too) -> the last notice that was logged
        self._logged_notices: dict[tuple[int, bool], death_notice.Notice] = {}
        self._proofs = death_proofs.DeathProofs(key.node_id)
        self._final_notice: death_notice.Notice | None = None
        self._instructions: death_notice.Instructions | None = None
        death_notice.write_instructions(run_dir, None)
        profile = Profile(
            key.node_id,
            key.directory_id,
            *address,
            rack=config.get("broker.rack"),
            version=_version(),
            worker_count=worker_count,
            cpu_count=os.cpu_count() or 0,
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            disk_bytes=disk_bytes,
        )
        self.gossip = gossip.create(profile, credentials.secrets, cluster_id, self._seeds, datagrams, peers, directory)
        self.gossip.on_change = self._on_change
        self.gossip.on_other_datagram = self._on_notice
        self._incarnation = incarnation
        self._update_task: asyncio.Task[None] | None = None
        shell.on_leader_changed = self._on_leader_changed

    async def start(self) -> None:
        await self.gossip.start()
        self._update_task = asyncio.get_running_loop().create_task(self._update_periodically())

    async def stop(self) -> None:
        if self._update_task is not None:
            self._update_task.cancel()
        self._lookups.clear()
        death_notice.write_instructions(self._run_dir, None)
        await self.gossip.stop()

    async def serve(self, hello: Hello, reader: Reader, writer: Writer) -> None:
        await self.gossip.serve(hello, reader, writer)

    def on_credentials_changed(self) -> None:
        self.gossip.core.seal.set_keys(gossip.gossip_keys(self._credentials.secrets))

    def views(self) -> list[MemberView]:
        return self.gossip.core.views()

    # -- sent information -------------------------------------------------------------------------

    async def _update_periodically(self) -> None:
        count = 0
        while True:
            try:
                self._gossip_controller()
                self._update_recipients()
                if count % SEEDS_EVERY == 0:
                    self._gossip_seeds()
                if count % LOAD_EVERY == 0:
                    self._gossip_load()
            except Exception:  # only hints: the controller continues without them
                log.exception("gossip's data was not updated")
            count += 1
            await asyncio.sleep(UPDATE_S)

    def _gossip_controller(self) -> None:
        core = self._shell.quorum.core
        if core.leader >= 0 and core.epoch > self.gossip.core.controller.epoch:
            self.gossip.handle(events.ControllerKnown(core.leader, core.epoch))

    def _gossip_seeds(self) -> None:
        brokers = self._shell.metadata.committed.brokers
        broker_addresses = {
            (broker.controller_host, broker.controller_port)
            for broker in brokers.values()
            if broker.controller_host and broker.controller_port
        }
        seeds = tuple(sorted(broker_addresses | set(self._own_seeds)))
        if seeds != self._seeds:
            self._seeds = seeds
            self.gossip.handle(events.SeedsChanged(seeds))
        for view in self.gossip.core.views():
            if view.state in (events.DEAD, events.LEFT) and brokers and view.node_id not in brokers:
                self.gossip.handle(events.Forget(view.node_id))  # unregistered

    def _gossip_load(self) -> None:
        state, node_id = self._shell.metadata.committed, self._shell.node_id
        broker = state.brokers.get(node_id)
        replicas = sum(count for (node, _), count in state.directory_replica_counts.items() if node == node_id)
        self.gossip.handle(
            events.LoadMeasured(
                broker_epoch=broker.epoch if broker is not None else -1,
                metadata_version=state.version,
                cpu_permille=self._cpu_permille(),
                disk_used_bytes=self._disk_used_bytes(),
                replica_count=replicas,
            )
        )

    def _disk_used_bytes(self) -> int:
        """The last measured number of bytes used on disk. Starts the next measurement in a thread: the
        event loop, on which leases depend, must not wait for a file system.
        """
        if self._disk_check is None or self._disk_check.done():
            if self._disk_check is not None:
                self._used_bytes = self._disk_check.result()
            self._disk_check = in_thread(self._measure_used)
        return self._used_bytes

    def _measure_used(self) -> int:
        return _file_system_bytes(self._log_dirs, "used")

    def _cpu_permille(self) -> int:
        """CPU use of the whole machine, 1000 per core, since the last call; from /proc/stat (user,
        nice, system, irq, softirq).
        """
        try:
            fields = Path("/proc/stat").read_text().split(None, 8)[1:8]
        except OSError:
            return 0
        ticks = [int(word) for word in fields]
        cpu_ns, now_ms = (
            (sum(ticks[:3]) + sum(ticks[5:7])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK"),
            clock.monotonic_ms(),
        )
        spent_ns, passed_ms = cpu_ns - self._cpu_ns, max(1, now_ms - self._measured_ms)
        is_first, self._cpu_ns, self._measured_ms = self._cpu_ns == 0, cpu_ns, now_ms
        return 0 if is_first else max(0, min(1 << 20, spent_ns // passed_ms // 1_000))

    # -- proof of death ----------------------------------------------------------------------------

    def _update_recipients(self) -> None:
        """Writes the list of hosts that the keeper must notify if this process ends unexpectedly. Host
        names are resolved in the background whenever the hosts change; a host whose name is not
        resolved is not notified.
        """
        recipients = death_proofs.recipients(self._shell.quorum.core, self._shell.metadata.committed)
        if recipients != self._recipients:
            self._recipients = recipients
            self._resolved = {
                recipient: resolved._replace(until_s=0.0)
                for recipient, resolved in self._resolved.items()
                if recipient in recipients
            }
        now_s = asyncio.get_running_loop().time()
        for recipient in recipients:
            if recipient not in self._lookups and (
                recipient not in self._resolved or now_s >= self._resolved[recipient].until_s
            ):
                response = self._lookups[recipient] = gossip.look_up(*recipient)
                response.add_done_callback(partial(self._on_looked_up, recipient))
        self._write_instructions()

    def _on_looked_up(self, recipient: tuple[str, int], response: asyncio.Future[list[tuple]]) -> None:
        error = response.exception()
        if self._lookups.pop(recipient, None) is None or recipient not in self._recipients:
            return
        if error is None:
            resolved = _Resolved(tuple((entry[4][0], entry[4][1]) for entry in response.result()), float("inf"))
        else:
            log.debug("a host's name was not found", host=recipient[0], reason=str(error))
            previous = self._resolved.get(recipient, _Resolved((), 0.0))
            resolved = previous._replace(until_s=asyncio.get_running_loop().time() + LOOK_UP_AGAIN_S)
        self._resolved[recipient] = resolved
        self._try_write_instructions()

    def _write_instructions(self) -> None:
        shell = self._shell
        notice = self._final_notice = death_proofs.final_notice(
            shell.quorum.core, shell.metadata.committed, self._incarnation, self._final_notice
        )
        instructions = None
        addresses = tuple(
            dict.fromkeys(
                address
                for recipient in self._recipients
                if recipient in self._resolved
                for address in self._resolved[recipient].addresses
            )
        )
        if notice is not None and addresses:
            instructions = death_notice.Instructions(
                self._incarnation,
                notice.node_id,
                notice.broker_epoch,
                notice.controller_epoch,
                self._cluster_id,
                addresses,
                notice.led,
            )
        if instructions != self._instructions:
            self._instructions = instructions
            death_notice.write_instructions(self._run_dir, instructions)

    def _try_write_instructions(self) -> None:
        try:
            self._write_instructions()
        except OSError as error:
            # retried; without the list, the other hosts must wait until the session expires
            log.warning("the keeper has no list of hosts to notify", error=error.strerror)

    def _on_leader_changed(self) -> None:
        """Writes the instructions immediately: after an election the stored ones are wrong."""
        self._try_write_instructions()
        if self._shell.metadata.active:
            for proof in self._proofs.on_active():
                self._shell.on_peer(proof.node_id, proof)

    def _on_notice(self, data: bytes) -> None:
        unsealed = (death_notice.unseal(secret, self._cluster_id, data) for secret in self._credentials.secrets)
        notice = next((notice for notice in unsealed if notice is not None), None)
        if notice is None:
            return
        subject = (notice.node_id, notice.broker_epoch >= 0)
        if notice != self._logged_notices.get(subject):
            self._logged_notices[subject] = notice
            log.info(
                "a keeper reports that processes of its host have ended",
                node=notice.node_id,
                all=notice.broker_epoch >= 0,
                led=notice.led,
                broker_epoch=notice.broker_epoch,
                controller_epoch=notice.controller_epoch,
            )
        leader_died, proof = self._proofs.on_notice(notice)
        if leader_died is not None:
            self._shell.quorum.handle(leader_died)
        if proof is not None and self._shell.metadata.active:
            self._shell.on_peer(proof.node_id, proof)

    # -- hints -------------------------------------------------------------------------------------

    def _on_change(self, change: gossip.Change) -> None:
        if isinstance(change, events.MemberChanged):
            if change.member.state == events.ALIVE:
                self._add_address(change.member.node_id, change.member.profile.host, change.member.profile.port)
        elif isinstance(change, events.ControllerSeen):
            core = self._shell.quorum.core
            if core.leader < 0 and change.epoch >= core.epoch:
                self._shell.quorum.handle(
                    quorum_events.PeersKnown(
                        (change.node_id, *(node for node in core.peers if node != change.node_id))[:PEERS_MAX]
                    )
                )
