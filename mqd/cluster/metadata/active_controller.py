"""The active controller: its decisions, and the state that it keeps outside the metadata (brokers'
sessions, in-sync set proposals, planned moves of replicas and leaderships). Sans-I/O.

The object exists from BecameActive to Resigned, so all timers restart with the next controller (L2).
It does not change the metadata: it reads the metadata core's latest state and returns records,
which the core applies and proposes before the next call.

Invariants
    A1  a lease is granted only while the controller's own lease is valid, and only to a broker that
        is unfenced in the committed state, in the tail, and in every state between them
    A2  a broker whose session has not ended is fenced only on a proof of death from its own
        host, when its next incarnation registers, or when it has requested a controlled shutdown
    A3  each proposal is decided once (rules/in_sync.py)
    A4  a proof of death is accepted only if this controller knows of every lease that may have been
        granted after the proof was sent. `_newest_sent_ms` covers the leases that it granted itself.
        No other controller has granted a lease if the proof names this epoch, or if it says that the
        controller of the previous epoch died with the broker
Bounds: one entry per broker, per partition with a decided proposal, per requested move
(placement.BALANCE_MOVES_MAX).
"""

from collections.abc import Iterable, Iterator

import msgspec

from mqd.cluster.broker import messages as peer
from mqd.cluster.metadata.maintenance import UNSERVED_MS, UPKEEP_MS, Maintenance, Shutdown, group_changes
from mqd.cluster.metadata.records import (
    RETIRE_HIDDEN,
    RETIRE_REDIRECTED,
    BrokerChanged,
    BrokerRegistered,
    BrokerState,
    PartitionChange,
    Record,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules import tokens as token_rules
from mqd.cluster.metadata.rules.partitions import Target, without
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.rules.settings import move_completed
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode


class ActiveController(Maintenance):
    """`state` in every call: the metadata core's latest state, including uncommitted changes.
    Times: CLOCK_BOOTTIME, milliseconds.
    """

    def on_persist_failed(self, state: MetadataState, now_ms: int) -> None:
        """Undoes the effects of records proposed after `state`. Those records will never be committed, so
        they have fenced no broker, and decisions based on them are dropped.
        """
        for node, broker in state.brokers.items():
            if not broker.fenced and node not in self.sessions and node in self._fenced_since_ms:
                self.sessions.on_heartbeat(node, now_ms)
                self._unfenced_since_ms[node] = now_ms
                del self._fenced_since_ms[node]
        self._fencing_offsets = {
            node: offset for node, offset in self._fencing_offsets.items() if offset < state.version
        }
        self.proposals.on_persist_failed(state.version)
        self._retirement_phases.clear()

    def set_reported_directories(self, node: int, reports: Iterable[peer.DirectoryReport | Directory]) -> None:
        self._reported_directories[node] = tuple(
            Directory(entry.directory_id, entry.path, entry.free_bytes, entry.usable) for entry in reports
        )

    # -- brokers' sessions -------------------------------------------------------------------------

    def register(
        self, state: MetadataState, message: peer.RegisterBroker, now_ms: int
    ) -> tuple[list[Record], peer.RegisterBrokerResponse]:
        def respond(error: int, text: str = "", broker_epoch: int = -1) -> peer.RegisterBrokerResponse:
            return peer.RegisterBrokerResponse(
                self.epoch, message.node_id, message.incarnation, int(error), text, broker_epoch
            )

        try:
            records = broker_rules.register(state, message, self._cannot_serve_predicate(state))
        except Refusal as refusal:
            return [], respond(refusal.error, refusal.message)
        first_record = records[0] if records else None
        broker = first_record.broker if isinstance(first_record, BrokerRegistered) else state.brokers[message.node_id]
        self.set_reported_directories(message.node_id, message.directories)
        self._last_heartbeat_ms[message.node_id] = now_ms
        old = state.brokers.get(message.node_id)
        if old is None or broker.epoch != old.epoch:  # a new session
            self._end_session(message.node_id, now_ms)
            # its disk may have recovered
            self._unserved_reports_ms = {
                key: reported_ms for key, reported_ms in self._unserved_reports_ms.items() if key[0] != message.node_id
            }
            self._shutdowns.pop(message.node_id, None)
            self._applied_versions.pop(message.node_id, None)
            self._newest_sent_ms.pop(message.node_id, None)
        return records, respond(0, broker_epoch=broker.epoch)

    def _end_session(self, node: int, now_ms: int) -> None:
        self.sessions.forget(node)
        self._unfenced_since_ms.pop(node, None)
        # a registration alone does not end the outage: only unfencing does
        self._fenced_since_ms.setdefault(node, now_ms)

    def fence(self, state: MetadataState, nodes: list[int], now_ms: int) -> list[Record]:
        for node in nodes:
            self._end_session(node, now_ms)
            self._fencing_offsets[node] = state.version
        if self._retirement_phases:
            # a retired partition must be led by the same host as its redirect target: check this now
            self._next_upkeep_ms = now_ms
        return broker_rules.fence(state, nodes, self._cannot_serve_predicate(state))

    def heartbeat(
        self, state: MetadataState, committed: MetadataState, message: peer.Heartbeat, now_ms: int, lease_valid: bool
    ) -> tuple[list[Record], peer.BrokerHeartbeatResponse]:
        """Returns records and the response, which depends only on the committed state, so that it can be
        sent immediately.
        """
        node = message.node_id
        broker = state.brokers.get(node)
        if broker is None or broker.epoch != message.broker_epoch:
            error = ErrorCode.BROKER_ID_NOT_REGISTERED if broker is None else ErrorCode.STALE_BROKER_EPOCH
            return [], self._heartbeat_response(message, 0, True, error=int(error))
        self._last_heartbeat_ms[node] = now_ms
        self._applied_versions[node] = max(message.metadata_version, self._applied_versions.get(node, -1))
        if message.directories:
            self.set_reported_directories(node, message.directories)
        records: list[Record] = []
        is_newest = message.sent_ms >= self._newest_sent_ms.get(node, message.sent_ms)
        if is_newest:
            self._newest_sent_ms[node] = message.sent_ms
        if not broker.fenced:
            self.sessions.on_heartbeat(node, now_ms)
        if message.want_shutdown:
            records = self._advance_shutdown(state, node, now_ms)
        elif broker.in_controlled_shutdown and is_newest:
            records = self._cancel_shutdown(state, node)
        elif (
            broker.fenced
            and lease_valid
            and broker_rules.has_applied_registration(message.metadata_version, message.broker_epoch)
        ):
            records = self._unfence(state, node, now_ms)
        elif message.directories:
            records = self._record_directories(state, message)
        committed_broker = committed.brokers.get(node)
        is_fenced = (
            committed_broker is None or committed_broker.epoch != message.broker_epoch or committed_broker.fenced
        )
        fencing_is_pending = committed.version <= self._fencing_offsets.get(node, -1)
        grants_lease = lease_valid and not is_fenced and not broker.fenced and not fencing_is_pending
        shutdown = self._shutdowns.get(node)
        may_shut_down = message.want_shutdown and is_fenced and shutdown is not None
        return records, self._heartbeat_response(
            message,
            int(self._options.session_ms * self._options.lease_share) if grants_lease else 0,
            is_fenced or fencing_is_pending,
            may_shut_down,
        )

    def _heartbeat_response(
        self, message: peer.Heartbeat, lease_ms: int, fenced: bool, should_shutdown: bool = False, error: int = 0
    ) -> peer.BrokerHeartbeatResponse:
        return peer.BrokerHeartbeatResponse(
            self.epoch, message.node_id, message.broker_epoch, message.sent_ms, lease_ms, fenced, should_shutdown, error
        )

    def _record_directories(self, state: MetadataState, message: peer.Heartbeat) -> list[Record]:
        broker = state.brokers[message.node_id]
        paths = {
            **broker.directories,
            **{entry.directory_id: entry.path for entry in message.directories if entry.directory_id},
        }
        return (
            [BrokerRegistered(msgspec.structs.replace(broker, directories=paths))]
            if paths != broker.directories
            else []
        )

    def _unfence(self, state: MetadataState, node: int, now_ms: int) -> list[Record]:
        self.sessions.on_heartbeat(node, now_ms)
        self._fenced_since_ms.pop(node, None)
        self._unfenced_since_ms[node] = now_ms
        # the entry is left over if the broker was fenced by a controlled shutdown, but its process died
        # before it received the response that lets it end
        self._shutdowns.pop(node, None)
        self._next_upkeep_ms = min(self._next_upkeep_ms, now_ms)
        return broker_rules.unfence(state, node, self._cannot_serve_predicate(state))

    def _advance_shutdown(self, state: MetadataState, node: int, now_ms: int) -> list[Record]:
        """R15, step by step: the broker gets no new leaderships; its leaderships move to other hosts and it
        leaves all in-sync sets; once all brokers have applied these changes, it is fenced; the next
        heartbeat response lets it end.
        """
        broker = state.brokers[node]
        shutdown = self._shutdowns.setdefault(node, Shutdown(now_ms))
        if broker.fenced:
            return []
        if not broker.in_controlled_shutdown:
            return broker_rules.begin_shutdown(state, node)
        timed_out = now_ms - shutdown.since_ms >= self._options.shutdown_wait_ms
        recently_alive = (
            frozenset()
            if timed_out
            else frozenset(
                other
                for other, last_heard_ms in self._last_heartbeat_ms.items()
                if other != node and now_ms - last_heard_ms < self._options.session_ms
            )
        )
        records, all_moved = broker_rules.move_away(
            state, node, self._options.shutdown_moves_max, recently_alive, self._cannot_serve_predicate(state)
        )
        if records or not all_moved:
            shutdown.moved_at_version = -1
            return records
        if shutdown.moved_at_version < 0:
            shutdown.moved_at_version = state.version
        others = [other for other in state.brokers.values() if not other.fenced and other.node_id != node]
        if timed_out or all(
            self._applied_versions.get(other.node_id, -1) >= shutdown.moved_at_version for other in others
        ):
            return self.fence(state, [node], now_ms)
        return []

    def _cancel_shutdown(self, state: MetadataState, node: int) -> list[Record]:
        """Cancels a shutdown that the broker no longer requests: the controller process that requested it
        has died, and the next process does not repeat the request.
        """
        self._shutdowns.pop(node, None)
        return [BrokerChanged(node, state.brokers[node].epoch, in_controlled_shutdown=False)]

    def on_proof_of_death(self, state: MetadataState, message: peer.ProofOfDeath, now_ms: int) -> list[Record]:
        broker = state.brokers.get(message.node_id)
        if broker is None or broker.fenced or not self._matches_session(message, broker):
            return []
        if not self._is_for_this_controller(message):
            return []  # another controller may have granted the broker a lease since
        if message.sent_ms <= self._newest_sent_ms.get(message.node_id, -1):
            return []  # an old proof: the broker has sent a heartbeat since
        return self.fence(state, [message.node_id], now_ms)

    def _matches_session(self, message: peer.ProofOfDeath, broker: BrokerState) -> bool:
        return broker.epoch == message.broker_epoch

    def _is_for_this_controller(self, message: peer.ProofOfDeath) -> bool:
        """Whether the proof names the epoch of this controller, or names the previous epoch and says that
        its controller died with the broker.
        """
        return message.controller_epoch == self.epoch or (
            message.led and message.controller_epoch == self._previous_epoch
        )

    def on_workers_died(self, state: MetadataState, message: peer.WorkersDied) -> list[Record]:
        """Handles the partitions that the dead workers served, except those that have changed since.

        If enough other replicas of a partition are in sync, the replica of the dead process leaves
        the in-sync set: another replica leads, or the leader stops waiting for it. The next process
        has the replica's files and catches up quickly. Otherwise a leader remains the leader, in a
        new epoch: it is better that clients wait for the next process than that their requests are
        refused.
        """
        broker = state.brokers.get(message.node_id)
        if broker is None or broker.epoch != message.broker_epoch:
            return []
        view = self.view(state)
        return view.changes(self._targets_without_dead_process(view, message), leaving=message.node_id)

    def _targets_without_dead_process(
        self, view: View, message: peer.WorkersDied
    ) -> Iterator[tuple[TopicState, Target]]:
        node, seen = message.node_id, set()
        reports = [(topic_id, index, epoch, True) for topic_id, index, epoch in message.partitions]
        reports += [(topic_id, index, epoch, False) for topic_id, index, epoch in message.followed]
        for topic_id, index, epoch, led in reports:
            topic_and_partition = view.partition(topic_id, index)
            if topic_and_partition is None or (topic_id, index) in seen:
                continue
            topic, partition = topic_and_partition
            if (partition.leader == node) != led or epoch != (
                partition.leader_epoch if led else partition.partition_epoch
            ):
                continue
            seen.add((topic_id, index))
            others = without(partition.in_sync_replicas, (node,))
            others_suffice = any(view.may_take_over(topic, partition, other) for other in others) and len(
                others
            ) >= view.state.min_in_sync(topic, partition)
            target = Target(partition)
            if others_suffice and node in partition.in_sync_replicas:
                target.in_sync = others
            elif led:
                target.keeps_leader = target.raises_leader_epoch = True
            else:
                continue
            yield topic, target

    def on_replica_placed(self, state: MetadataState, message: peer.ReplicaPlaced) -> list[Record]:
        broker = state.brokers.get(message.node_id)
        if broker is None or broker.epoch != message.broker_epoch:
            return []
        return move_completed(state, message.topic_id, message.index, message.node_id, message.directory)

    def on_replicas_failed(self, state: MetadataState, message: peer.ReplicasFailed, now_ms: int) -> list[Record]:
        """Moves leaderships away from replicas that cannot serve. `_unserved_reports_ms` prevents two such
        replicas from passing leadership back and forth.
        """
        broker = state.brokers.get(message.node_id)
        if broker is None or broker.epoch != message.broker_epoch:
            return []
        self._unserved_reports_ms = {
            key: reported_ms
            for key, reported_ms in self._unserved_reports_ms.items()
            if now_ms - reported_ms < UNSERVED_MS
        }
        self._unserved_reports_ms.update({(message.node_id, key): now_ms for key in message.partitions})
        failed = broker_rules.on_replicas_failed(
            state, message.node_id, message.partitions, self._cannot_serve_predicate(state, UNSERVED_MS)
        )
        return failed or broker_rules.on_replicas_full(
            state, message.node_id, message.full, self._cannot_serve_predicate(state)
        )

    # -- in-sync sets ------------------------------------------------------------------------------

    def _is_for_this_epoch(self, message: peer.AlterPartition) -> bool:
        """Whether the proposals are for this controller epoch. All others are refused: decided proposals
        are remembered for one epoch only (R6b).
        """
        return message.controller_epoch == self.epoch

    def alter_partition(
        self, state: MetadataState, message: peer.AlterPartition
    ) -> tuple[list[Record], peer.AlterPartitionResponse]:
        """Returns records and the response, which may be sent once all records up to the tail, including
        these, are committed.
        """
        if not self._is_for_this_epoch(message):
            return [], peer.AlterPartitionResponse(
                self.epoch, message.node_id, message.broker_epoch, int(ErrorCode.NOT_CONTROLLER), []
            )
        view = self.view(state)
        results: list[peer.InSyncResult] = []
        changes: list[tuple[TopicState, PartitionChange]] = []
        seen: set[tuple[bytes, int]] = set()
        for proposal in message.proposals:
            if (proposal.topic_id, proposal.index) in seen:
                continue  # a duplicate within one message is ignored
            seen.add((proposal.topic_id, proposal.index))
            result, change = self.proposals.decide(view, message.node_id, message.broker_epoch, proposal)
            results.append(result)
            if change is not None:
                changes.append(change)
        return group_changes(changes), peer.AlterPartitionResponse(
            self.epoch, message.node_id, message.broker_epoch, 0, results
        )

    # -- retirement --------------------------------------------------------------------------------

    def on_partitions_emptied(self, state: MetadataState, message: peer.PartitionsEmptied) -> list[Record]:
        records: list[Record] = []
        view = self.view(state)
        newly_emptied: dict[bytes, None] = {}  # topic ids, in order
        for topic_id, index, epoch in message.partitions:
            topic_and_partition = view.partition(topic_id, index)
            if topic_and_partition is None:
                continue
            partition = topic_and_partition[1]
            if (partition.leader, partition.leader_epoch) != (message.node_id, epoch):
                continue
            if partition.retiring == RETIRE_HIDDEN:
                self._unused_partitions.setdefault(topic_id, {})[index] = (epoch, self._ticked_ms)
            if partition.retiring != RETIRE_REDIRECTED:
                continue
            self._emptied_partitions.setdefault(topic_id, {})[index] = epoch
            newly_emptied[topic_id] = None
        for topic_id in newly_emptied:
            topic = state.topics[state.topics_by_id[topic_id]]
            emptied = self._emptied_partitions[topic_id]
            if all(
                partition.index in emptied for partition in topic.partitions[retire_rules.first_retiring_index(topic) :]
            ):
                records += retire_rules.hide(view, topic)
                del self._emptied_partitions[topic_id]
        return records

    def tick(self, state: MetadataState, now_ms: int, lease_valid: bool, wall_ms: int = 0) -> list[Record]:
        """Returns one batch of records; call again until the batch is empty. `wall_ms`: as in events.Tick."""
        was_paused = (now_ms - self._ticked_ms) * 4 > self._options.session_ms * 3
        self._ticked_ms = now_ms
        # after a pause of this process, heartbeats may be waiting unread: if the sessions were not
        # restarted, every broker would be fenced
        if was_paused:
            self.sessions.restart(now_ms)
        if not lease_valid:
            return []
        expired = [
            node
            for node in self.sessions.expired(now_ms)
            if node in state.brokers and not (node == self._own_node_id and node in self._last_heartbeat_ms)
        ]
        if expired:
            return self.fence(state, expired, now_ms)
        if wall_ms and now_ms >= self._next_token_check_ms:
            removals = token_rules.remove_expired(state, wall_ms)
            self._next_token_check_ms = now_ms if removals else now_ms + self._options.token_check_ms
            if removals:
                return removals
        if now_ms >= self._next_upkeep_ms:
            self._next_upkeep_ms = now_ms + UPKEEP_MS
            self.proposals.prune(state)
            return self._upkeep(state, now_ms)
        if now_ms >= self._next_leader_balance_ms:
            self._next_leader_balance_ms = now_ms + self._options.leader_balance_check_ms
            is_stable = {
                node: now_ms - since >= self._options.leader_balance_stable_ms
                for node, since in self._unfenced_since_ms.items()
            }
            moves_max = self._options.leader_moves_max
            changes = election_rules.elect_preferred_leaders(
                self.view(state), is_stable, self._options.leader_imbalance_percent, moves_max
            )
            if len(changes) >= moves_max:
                self._next_leader_balance_ms = now_ms  # as in Kafka, the rest does not wait for the next check
            return group_changes(changes)
        return []
