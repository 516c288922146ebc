"""Reports that a host repeats to the active controller until the metadata reflects them: leaderships
that ended with a worker, replicas that failed, moved or were emptied, its proof of death.
"""

from collections.abc import Collection, Hashable

import msgspec

from mqd.cluster.broker import messages as peer
from mqd.cluster.broker.events import (
    Action,
    DirectoriesFull,
    LeadershipsLost,
    PartitionEmptied,
    ReplicaMoved,
    ReplicasFailed,
    SendPeer,
    SetBroker,
)
from mqd.cluster.host import messages
from mqd.cluster.host.core import owner_of
from mqd.cluster.metadata.options import DEFAULTS, ControllerOptions
from mqd.cluster.metadata.records import RETIRE_HIDDEN, PartitionState
from mqd.cluster.metadata.state import MetadataState

NO_WORKER = -1


class Proposal(msgspec.Struct):
    """The newest proposal of the worker (`client`) that leads a partition."""

    client: Hashable
    proposal: messages.ProposeInSync
    sent_epoch: int = -1  # controller epoch of the newest copy; -1 = none was sent
    sent_ms: int = 0
    refused: bool = False  # not sent again: the metadata will have the new state


class Change(msgspec.Struct):
    """A client's change that was forwarded to the active controller."""

    client: Hashable
    request: messages.Request
    since_ms: int
    # a response that waits until this host's workers have applied its version
    waiting_response: peer.ChangeResponse | None = None


class Reports:
    """The part of the broker core that repeats reports, and the attributes of the core. `state`:
    MetadataCore.committed; read-only, and always the same object.
    """

    def __init__(self, node_id: int, state: MetadataState, options: ControllerOptions = DEFAULTS) -> None:
        self.node_id = node_id
        self.broker_epoch = -1
        self.ready = False
        self.fenced = True
        self._state = state
        self._options = options
        self._registration: peer.RegisterBroker | None = None
        # distinguishes this process's requests from those of its predecessor, which had the same numbers
        self._process_number = 0
        self._controller_id, self._controller_epoch, self._is_only_voter = -1, -1, False
        self._lease_until_ms = 0
        self._inherited_lease = (-1, 0)  # (broker epoch, lease) of the previous process, from the control segment
        self._last_set_broker: SetBroker | None = None
        # versions: as in the newest MetadataApplied, and both of the newest MetadataCommitted
        self._applied = self._known_version = self._committed = -1
        self._register_at_ms = self._heartbeat_at_ms = 0
        self._wait_logged = False  # whether NotYetRegistered was logged for the current wait
        # heartbeats sent before this time are not this process's own, and a proof of death may have
        # followed them (A4)
        self._started_ms = -1
        # send times of the newest heartbeat, and of the newest one that has a response
        self._sent_ms = self._answered_ms = -1
        self._heartbeat_count = 0
        self._directories_to_report: tuple[peer.DirectoryReport, ...] | None = None  # to report in the next heartbeat
        self._shutdown_since_ms = -1
        self._dead = self._ended = False
        self._proposals: dict[tuple[bytes, int], Proposal] = {}
        self._proposing = False  # an AlterPartition is in flight
        self._changes: dict[int, Change] = {}
        self._change_number = 0
        # partition -> leader epoch that ended with a worker
        self._lost_leaderships: dict[tuple[bytes, int], int] = {}
        # partition that a dead worker followed in sync -> its partition epoch
        self._followed: dict[tuple[bytes, int], int] = {}
        self._moved_replicas: dict[tuple[bytes, int], str] = {}  # partition -> its new log directory (id)
        # retired partition -> leader epoch in which its worker reported that it is empty
        self._emptied_partitions: dict[tuple[bytes, int], int] = {}
        # worker -> partitions it does not serve
        self._failed_replicas: dict[int, tuple[tuple[bytes, int], ...]] = {}
        # worker -> directories to which it cannot write now
        self._full_directories: dict[int, frozenset[str]] = {}
        self._repeat_at_ms = 0

    @property
    def shutting_down(self) -> bool:
        return self._shutdown_since_ms >= 0

    @property
    def applied_version(self) -> int:
        """The version up to which this host's workers have applied the committed metadata."""
        return self._committed if self._applied >= self._known_version else min(self._applied, self._committed)

    def _to_controller(self, message: peer.ToActiveController) -> list[Action]:
        return [SendPeer(self._controller_id, message)] if self._controller_id >= 0 else []

    # -- reports repeated until the metadata shows them --------------------------------------------

    def _partition(self, key: tuple[bytes, int]) -> PartitionState | None:
        name = self._state.topics_by_id.get(key[0])
        partitions = self._state.topics[name].partitions if name is not None else ()
        return partitions[key[1]] if key[1] < len(partitions) else None

    def _prune(self) -> None:
        """Drops the reports that the metadata reflects."""

        def is_led(key: tuple[bytes, int], epoch: int) -> bool:
            partition = self._partition(key)
            return partition is not None and partition.leader == self.node_id and partition.leader_epoch == epoch

        def is_recorded_elsewhere(key: tuple[bytes, int], directory: str) -> bool:
            partition = self._partition(key)
            return (
                partition is not None
                and self.node_id in partition.replicas
                and partition.directories[partition.replicas.index(self.node_id)] != directory
            )

        self._proposals = {
            key: entry for key, entry in self._proposals.items() if self._is_pending(key, entry.proposal)
        }
        self._lost_leaderships = {key: epoch for key, epoch in self._lost_leaderships.items() if is_led(key, epoch)}
        self._followed = {
            key: epoch
            for key, epoch in self._followed.items()
            if (partition := self._partition(key)) is not None and partition.partition_epoch == epoch
        }
        self._emptied_partitions = {key: epoch for key, epoch in self._emptied_partitions.items() if is_led(key, epoch)}
        self._moved_replicas = {
            key: directory for key, directory in self._moved_replicas.items() if is_recorded_elsewhere(key, directory)
        }

    def _is_pending(self, key: tuple[bytes, int], proposal: messages.ProposeInSync) -> bool:
        """Whether the proposal is still pending. A proposal becomes obsolete when the metadata has a newer
        state of the partition than the one it is based on; the worker receives that state, too.
        """
        partition = self._partition(key)
        return (
            partition is not None
            and partition.partition_epoch <= proposal.partition_epoch
            and partition.leader_epoch <= proposal.leader_epoch
        )

    def _on_leaderships_lost(self, event: LeadershipsLost, now_ms: int) -> list[Action]:
        workers: set[int] = set()
        for key in event.partitions:
            partition = self._partition(key)
            if partition is not None and partition.leader == self.node_id:
                self._lost_leaderships[key] = partition.leader_epoch
                workers.add(self._owner(*key))
        self._followed.update(self._followed_by(workers))
        return self._repeat_reports(now_ms)

    def _owner(self, topic_id: bytes, index: int) -> int:
        return (
            owner_of(topic_id, index, max(1, self._registration.worker_count)) if self._registration is not None else -1
        )

    def _followed_by(self, workers: Collection[int]) -> dict[tuple[bytes, int], int]:
        """Returns partition -> partition epoch of the partitions that these workers followed in sync:
        their leaders need not wait for the dead workers.
        """
        if not workers:
            return {}
        return {
            (topic.topic_id, partition.index): partition.partition_epoch
            for topic in self._state.topics.values()
            for partition in topic.partitions
            if self.node_id in partition.in_sync_replicas
            and partition.leader != self.node_id
            and self._owner(topic.topic_id, partition.index) in workers
        }

    def _on_replica_moved(self, event: ReplicaMoved, now_ms: int) -> list[Action]:
        self._moved_replicas[(event.topic_id, event.index)] = event.directory
        return self._repeat_reports(now_ms)

    def _on_replicas_failed(self, event: ReplicasFailed, now_ms: int) -> list[Action]:
        self._failed_replicas[event.worker] = event.partitions
        return self._repeat_reports(now_ms)

    def _on_directories_full(self, event: DirectoriesFull, now_ms: int) -> list[Action]:
        self._full_directories.pop(event.worker, None)
        if not event.directories:
            return []
        self._full_directories[event.worker] = event.directories
        return self._repeat_reports(now_ms)

    def _full_in_sync(self) -> list[tuple[bytes, int]]:
        """Returns the partitions whose replica on this host is in sync and in a full directory, and that
        have enough other in-sync replicas. The controller checks this, too.
        """
        state, node = self._state, self.node_id
        return [
            (topic.topic_id, partition.index)
            for topic in state.topics.values()
            for partition in topic.partitions
            if node in partition.in_sync_replicas
            and len(partition.in_sync_replicas) > state.min_in_sync(topic, partition)
            and partition.directories[partition.replicas.index(node)]
            in self._full_directories.get(self._owner(topic.topic_id, partition.index), ())
        ]

    def _fail_replicas_in_unusable_directories(self) -> None:
        """Marks as failed the partitions in unusable or missing directories, which no worker serves."""
        self._failed_replicas.pop(NO_WORKER, None)
        if self._registration is None:
            return
        usable = {entry.directory_id for entry in self._registration.directories if entry.usable}
        unusable = {
            name
            for (node, name), count in self._state.directory_replica_counts.items()
            if node == self.node_id and count and name not in usable and (name or not usable)
        }
        if unusable:
            self._failed_replicas[NO_WORKER] = tuple(
                (topic.topic_id, partition.index)
                for topic in self._state.topics.values()
                for partition in topic.partitions
                if (self.node_id, True) in zip(partition.replicas, (name in unusable for name in partition.directories))
            )

    def _failures_to_report(self) -> list[tuple[bytes, int]]:
        """Returns the failed partitions to report: those without a leader, and those whose replica
        on this host is still the leader, in sync, or eligible.
        """
        failed = [key for keys in self._failed_replicas.values() for key in keys]
        partitions = [(key, self._partition(key)) for key in failed]
        return [
            key
            for key, partition in partitions
            if partition is not None
            and (
                partition.leader in (self.node_id, -1)
                or self.node_id in partition.in_sync_replicas
                or self.node_id in partition.eligible_leader_replicas
            )
        ]

    def _on_partition_emptied(self, event: PartitionEmptied, now_ms: int) -> list[Action]:
        self._emptied_partitions[(event.topic_id, event.index)] = event.leader_epoch
        return self._repeat_reports(now_ms)

    def _repeat_reports(self, now_ms: int) -> list[Action]:
        self._prune()
        if self.broker_epoch < 0:
            return []
        self._repeat_at_ms = now_ms + self._options.heartbeat_ms // 2
        actions: list[Action] = []
        if self._lost_leaderships or self._followed:
            lost = [(topic_id, index, epoch) for (topic_id, index), epoch in self._lost_leaderships.items()]
            followed = [(topic_id, index, epoch) for (topic_id, index), epoch in self._followed.items()]
            actions += self._to_controller(peer.WorkersDied(self.node_id, self.broker_epoch, lost, followed))
            if not self._lost_leaderships:
                # `_followed` is repeated only as long as `_lost_leaderships` is: if the last message gets
                # lost, the leaders detect the failure themselves
                self._followed.clear()
        if self._emptied_partitions:
            emptied = [(topic_id, index, epoch) for (topic_id, index), epoch in self._emptied_partitions.items()]
            actions += self._to_controller(peer.PartitionsEmptied(self.node_id, self.broker_epoch, emptied))
            self._emptied_partitions = {
                key: epoch
                for key, epoch in self._emptied_partitions.items()
                if (partition := self._partition(key)) is not None and partition.retiring != RETIRE_HIDDEN
            }
        failed, full = (
            self._failures_to_report() if self._failed_replicas else [],
            self._full_in_sync() if self._full_directories else [],
        )
        if failed or full:
            actions += self._to_controller(peer.ReplicasFailed(self.node_id, self.broker_epoch, failed, full))
        for (topic_id, index), directory in self._moved_replicas.items():
            actions += self._to_controller(
                peer.ReplicaPlaced(self.node_id, self.broker_epoch, topic_id, index, directory)
            )
        if self._dead:
            actions += self._to_controller(
                peer.ProofOfDeath(self.node_id, self.broker_epoch, self._controller_epoch, now_ms)
            )
        return actions
