"""This host in its cluster: its identity, the hosts that it admits, how it joins a cluster, and the
destinations of its messages. A host that does not listen for others uses standalone.py instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mqd.base import cluster_config, logging
from mqd.cluster.membership import credentials, formation, handshake
from mqd.cluster.membership.formation import FormationCore, FormationQuery, Member
from mqd.cluster.membership.handshake import Hello, Identity, Refusal
from mqd.cluster.metadata import features
from mqd.cluster.raft.identity import directory_text
from mqd.cluster.raft.messages import ReplicaKey
from mqd.controller.forming import ClusterFormation
from mqd.controller.host_gossip import HostGossip, disk_bytes
from mqd.controller.peers import Connection, Peers

if TYPE_CHECKING:
    from mqd.controller.peer_streams import Reader, Writer
    from mqd.controller.shell import Shell
    from mqd.shm.attach import KeeperClient

log = logging.get("controller.membership")


class Membership:
    def __init__(self, config: Mapping[str, str], client: KeeperClient, key: ReplicaKey) -> None:
        """Raises ConfigError if the cluster key or the host's certificate cannot be used."""
        self.seeds = cluster_config.seeds(config)
        self.address = client.welcome.controller_listener or ("", 0)  # as other hosts see it
        self._key = key
        self._report_waiting = client.report_waiting
        self._cluster_id = ""
        self._forming: ClusterFormation | None = None
        self._shell: Shell | None = None
        self._sockets = client.cluster_sockets
        self._credentials = credentials.load(config)
        self._watch_task: asyncio.Task[None] | None = None
        self._peers = (
            Peers(
                self._credentials,
                self.identity,
                self._decide,
                self._on_message,
                self._on_stream,
                self._node_id_conflict,
                self._is_known_voter,
            )
            if self._sockets
            else None
        )
        self._config, self._worker_count = config, client.welcome.worker_count
        self.gossip: HostGossip | None = None

    def identity(self) -> Identity:
        metadata = features.FEATURES["metadata.version"]
        return Identity(
            self._key.node_id,
            directory_text(self._key.directory_id),
            self._cluster_id,
            self._shell.quorum.core.generation if self._shell is not None else 0,
            not self._cluster_id,
            metadata.first,
            metadata.last,
            *self.address,
            features.supported(),
        )

    def _member(self) -> Member:
        return Member(self._key.node_id, directory_text(self._key.directory_id), *self.address)

    async def listen(self) -> None:
        if self._peers is not None:
            await self._peers.listen(self._sockets[0])
            self._watch_task = asyncio.get_running_loop().create_task(
                self._credentials.watch(self._on_credentials_changed)
            )

    def _on_credentials_changed(self) -> None:
        if self.gossip is not None:
            self.gossip.on_credentials_changed()

    # -- joining a cluster ------------------------------------------------------------------------

    async def form(self, lost_cluster_id: str) -> formation.CreateCluster | formation.Join:
        """Waits until the seeds' responses allow a decision. Called only if there are seeds.
        `lost_cluster_id`: the cluster whose metadata this host has lost, or "".
        """
        assert self._peers is not None
        self._forming = ClusterFormation(
            FormationCore(self._member(), self.seeds, lost_cluster_id), self._peers, self._report_waiting
        )
        decision = await self._forming.run()
        for member in (*decision.voters, *self._forming.core.members()):
            self._peers.add_address(member.node_id, member.host, member.port)
        return decision

    def members(self) -> tuple[int, ...]:
        """Node ids of the hosts that responded while this host queried the seeds."""
        assert self._forming is not None and self._forming.core.decision is not None
        responders = {member.node_id for member in (*self._forming.core.members(), *self._forming.core.decision.voters)}
        return tuple(sorted(responders - {self._key.node_id}))

    def on_joined(self, cluster_id: str, shell: Shell) -> None:
        """Called when the cluster is known: from here on messages are accepted. Connections on
        which this host stated that it belongs to no cluster are reopened.
        """
        self._cluster_id, self._shell = cluster_id, shell
        if self._peers is not None:
            self._peers.drop(lambda identity: False)

    async def start_gossip(self, directory: Path, run_dir: Path, incarnation: int) -> None:
        """Called after on_joined(). `directory` has the file that counts this host's starts.
        `incarnation`: the keeper's. Raises OSError.
        """
        if self._peers is None:
            return
        assert self._shell is not None
        size_bytes = await disk_bytes(self._config)
        self.gossip = HostGossip(
            self._config,
            self._credentials,
            self._key,
            self.address,
            self._worker_count,
            self._cluster_id,
            self._sockets[1],
            self._peers,
            self._shell,
            self.add_address,
            directory,
            run_dir,
            incarnation,
            size_bytes,
        )
        await self.gossip.start()

    async def _on_stream(self, hello: Hello, reader: Reader, writer: Writer) -> None:
        if self.gossip is not None and hello.identity.cluster_id == self._cluster_id:
            await self.gossip.serve(hello, reader, writer)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, node_id: int, message: msgspec.Struct) -> None:
        if self._peers is not None:
            self._peers.send(node_id, message)

    def add_address(self, node_id: int, host: str, port: int) -> None:
        if self._peers is not None:
            self._peers.add_address(node_id, host, port)

    def _decide(self, hello: Hello) -> Identity | Refusal:
        own, theirs = self.identity(), hello.identity
        if hello.purpose == "gossip" and self.gossip is None:
            return Refusal(handshake.REFUSED_BUSY, "the refusing host has not started gossip yet")
        if hello.purpose not in ("controller", "gossip"):
            return Refusal(
                handshake.REFUSED_PURPOSE, f"purpose {hello.purpose!r} is not served on the controller's listener"
            )
        if theirs.node_id == own.node_id and theirs.directory_id != own.directory_id:
            return Refusal(
                handshake.REFUSED_IDENTITY,
                f"both hosts have node.id {own.node_id}: give each host a node.id of its own",
            )
        if own.cluster_id and theirs.cluster_id and own.cluster_id != theirs.cluster_id:
            return Refusal(
                handshake.REFUSED_CLUSTER,
                f"the refusing host belongs to cluster {own.cluster_id}, the connecting host to {theirs.cluster_id}",
            )
        if theirs.feature_first > own.feature_last or theirs.feature_last < own.feature_first:
            return Refusal(
                handshake.REFUSED_FEATURES,
                f"the refusing host reads metadata of levels {own.feature_first} to {own.feature_last}, the connecting"
                f" host reads levels {theirs.feature_first} to {theirs.feature_last}",
            )
        if conflict := self._node_id_conflict(theirs):
            return Refusal(handshake.REFUSED_IDENTITY, conflict)
        unsupported = (
            features.describe_unsupported(
                self._shell.metadata.committed.features, features.supported_levels(theirs.features)
            )
            if self._shell is not None and own.cluster_id
            else ""
        )
        if unsupported:
            return Refusal(
                handshake.REFUSED_FEATURES,
                f"the connecting host runs a version of mqd that this cluster no longer supports: {unsupported}."
                " Install the version that the other hosts run",
            )
        return own

    def _node_id_conflict(self, theirs: Identity) -> str:
        """Returns why a host with this identity is ignored: its node id belongs to another active host.
        Returns "" if the host is accepted.

        Messages to a node id go over one connection, so the active host would no longer receive its
        messages, and would lose its lease to the newcomer. If this host knows no leader, or has
        applied no record of the current leader's epoch, its metadata may be older than the
        replacement of one host by the other: it cannot tell which of the two the cluster means, and
        accepts both.
        """
        if self._shell is None:
            return ""
        core = self._shell.quorum.core
        if core.leader < 0 or core.log.epoch_before(core.applied_offset) != core.epoch:
            return ""
        holder = self._shell.metadata.committed.brokers.get(theirs.node_id)
        if holder is None or holder.fenced or holder.directory_id in ("", theirs.directory_id):
            return ""
        return (
            f"node.id {theirs.node_id} is that of another host,"
            f" {holder.controller_host or holder.host}:{holder.controller_port or holder.port}, which is in service:"
            " give the newcomer a node.id of its own; or, if it replaces that host, wait until that host's session"
            " has ended"
        )

    def _is_known_voter(self, identity: Identity) -> bool:
        """Whether this host's log has a voter with this identity."""
        return self._shell is not None and any(
            voter.node_id == identity.node_id and directory_text(voter.key.directory_id) == identity.directory_id
            for voter in self._shell.quorum.core.voters
        )

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        if self._node_id_conflict(connection.identity):
            # admitted before the conflict was known; the host gets the reason when it reconnects
            connection.writer.transport.abort()
        elif isinstance(message, FormationQuery):
            self._on_query(connection, message)
        elif self._shell is not None and self._cluster_id and connection.identity.cluster_id == self._cluster_id:
            self._shell.on_peer(connection.identity.node_id, message)
        # Otherwise the message is ignored: its sender belongs to no cluster yet, or did not know
        # that it belongs to this one; then it sends its new identity over a new connection.

    def _on_query(self, connection: Connection, query: FormationQuery) -> None:
        if self._shell is None:
            if self._forming is not None:
                self._forming.on_query(connection, query)
            return
        voters = [
            Member(voter.node_id, directory_text(voter.key.directory_id), voter.host, voter.port)
            for voter in self._shell.quorum.voters
        ]
        ClusterFormation.respond(
            connection,
            formation.response_of_member(
                query, self._member(), self._cluster_id, self._shell.quorum.core.generation, self.seeds, voters
            ),
        )

    async def stop(self) -> None:
        if self.gossip is not None:
            await self.gossip.stop()
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._peers is not None:
            await self._peers.flush()
            await self._peers.stop()
