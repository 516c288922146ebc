"""The active controller's periodic work: elects leaders for partitions without one, advances the
retirement of partitions, replaces replicas on lost or drained hosts, adds replicas to internal
topics, and starts the moves of a balancing run.
"""

from collections.abc import Iterable

import msgspec

from mqd.cluster.metadata.options import ControllerOptions
from mqd.cluster.metadata.records import (
    RETIRE_HIDDEN,
    RETIRE_SEALED,
    PartitionChange,
    PartitionsChanged,
    PartitionState,
    Record,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import elections as election_rules
from mqd.cluster.metadata.rules import placement
from mqd.cluster.metadata.rules import reassignments as reassign_rules
from mqd.cluster.metadata.rules import retirement as retire_rules
from mqd.cluster.metadata.rules.in_sync import Proposals
from mqd.cluster.metadata.rules.partitions import default_replication_factor
from mqd.cluster.metadata.rules.placement import Directories, Directory, Move
from mqd.cluster.metadata.sessions import BrokerSessions
from mqd.cluster.metadata.state import INTERNAL_TOPICS, MetadataState
from mqd.cluster.metadata.view import CannotServe, View

# A report that a broker does not serve a replica is valid for this many heartbeat intervals: an
# unclean election must be based on recent reports.
UNSERVED_HEARTBEATS = 3
# For this long after such a report, the replica does not take over from another one that fails, so
# that two such replicas do not pass leadership back and forth.
UNSERVED_MS = 30_000
UPKEEP_MS = 1_000  # interval between calls of _upkeep()
# A leader's report that a hidden partition is unused stays valid for this long; it is repeated
# every second.
UNUSED_MS = 5_000


class Shutdown(msgspec.Struct):
    """A broker that wants to shut down."""

    since_ms: int
    # metadata version at which all leaderships that can move have moved; every broker must apply it
    moved_at_version: int = -1


def group_changes(changes: Iterable[tuple[TopicState, PartitionChange]]) -> list[Record]:
    by_topic: dict[bytes, list[PartitionChange]] = {}
    for topic, change in changes:
        by_topic.setdefault(topic.topic_id, []).append(change)
    return [PartitionsChanged(topic_id, tuple(entries)) for topic_id, entries in by_topic.items()]


class Maintenance:
    """`state` in every call: the metadata core's latest state, including uncommitted changes.
    Times: CLOCK_BOOTTIME, milliseconds.
    """

    def __init__(
        self,
        epoch: int,
        state: MetadataState,
        options: ControllerOptions,
        now_ms: int,
        clustered: bool,
        own_node_id: int = -1,
        previous_epoch: int = -1,
    ) -> None:
        """`previous_epoch`: the last epoch in which another controller may have been active. `clustered` False:
        a single host without a quorum, where brokers have no sessions. `own_node_id`: this host's.
        The session of this host's broker does not time out, because this process itself sends the
        broker's heartbeats; nor does the broker's lease expire while this host is the only voter.
        """
        self.epoch, self._previous_epoch = epoch, previous_epoch
        self._own_node_id = own_node_id
        self._options = options
        self.sessions = BrokerSessions(options.session_ms)
        self.proposals = Proposals()
        self._reported_directories: dict[int, tuple[Directory, ...]] = {}  # node id -> its directories as last reported
        self._applied_versions: dict[int, int] = {}  # node id -> metadata version applied there
        self._shutdowns: dict[int, Shutdown] = {}
        self._last_heartbeat_ms: dict[int, int] = {}  # node id -> time of its last heartbeat, fenced or not
        self._fenced_since_ms: dict[int, int] = {}
        self._unfenced_since_ms: dict[int, int] = {}
        self._moves: dict[tuple[str, int], Move] = {}  # planned by a balancing run, but not started
        self._balancing = False
        self._balanced_topics: frozenset[str] | None = None
        # (node id, partition) -> when it was last reported as not served there
        self._unserved_reports_ms: dict[tuple[int, tuple[bytes, int]], int] = {}
        self._retirement_phases: dict[bytes, tuple[int, int]] = {}  # topic id -> (phase, since when in ms)
        # topic id -> partition -> leader epoch in which it was reported empty
        self._emptied_partitions: dict[bytes, dict[int, int]] = {}
        # topic id -> hidden partition -> (leader epoch, time) of the last report that no client
        # writes to it
        self._unused_partitions: dict[bytes, dict[int, tuple[int, int]]] = {}
        self._next_leader_balance_ms = now_ms + options.leader_balance_check_ms
        self._next_upkeep_ms = now_ms
        self._next_token_check_ms = now_ms + options.token_check_ms
        # partition of an internal topic -> since when its new replica has had no space on its disk
        self._no_space_since_ms: dict[tuple[bytes, int], int] = {}
        # the time by which every broker that cannot serve has reported it
        self._may_elect_from_ms = now_ms + UNSERVED_HEARTBEATS * options.heartbeat_ms
        self._ticked_ms = now_ms
        self._fencing_offsets: dict[int, int] = {}  # node id -> log offset from which it is fenced
        # node id -> send time of its newest heartbeat, by its own clock
        self._newest_sent_ms: dict[int, int] = {}
        if clustered:
            for node, broker in state.brokers.items():
                if broker.fenced:
                    self._fenced_since_ms[node] = now_ms
                else:
                    self._begin_session(node, now_ms)

    def _begin_session(self, node: int, now_ms: int) -> None:
        """L2: starts a full session now for a broker that may have sent heartbeats to an earlier
        controller.
        """
        self.sessions.on_heartbeat(node, now_ms)
        self._unfenced_since_ms[node] = now_ms

    def view(self, state: MetadataState) -> View:
        return View(state, cannot_serve=self._cannot_serve_predicate(state))

    def reported_unserved(self, within_ms: int) -> dict[tuple[bytes, int], set[int]]:
        """Partition -> live brokers that have recently reported that they do not serve their replica.
        A broker repeats its report twice per heartbeat interval while the replica is in sync or
        eligible, or while there is no leader.
        """
        nodes_by_partition: dict[tuple[bytes, int], set[int]] = {}
        for (node, key), reported_ms in self._unserved_reports_ms.items():
            if self._ticked_ms - reported_ms <= within_ms:
                nodes_by_partition.setdefault(key, set()).add(node)
        return nodes_by_partition

    def _cannot_serve_predicate(self, state: MetadataState, within_ms: int = -1) -> CannotServe:
        """Returns a predicate: whether a replica is not served, according to reports about replicas and
        about directories.
        """
        within_ms = within_ms if within_ms >= 0 else UNSERVED_HEARTBEATS * self._options.heartbeat_ms
        reported, directories = self.reported_unserved(within_ms), self.directories(state)

        def cannot_serve(topic: TopicState, partition: PartitionState, node: int) -> bool:
            if node in reported.get((topic.topic_id, partition.index), ()):
                return True
            return node in partition.replicas and directories.has_failed(
                node, partition.directories[partition.replicas.index(node)]
            )

        return cannot_serve

    def directories(self, state: MetadataState) -> Directories:
        return Directories(state, self._reported_directories)

    def _advance_retirements(self, state: MetadataState, now_ms: int) -> list[Record]:
        records: list[Record] = []
        view = self.view(state)
        for topic in state.topics.values():
            if not retire_rules.is_retiring(topic):
                self._retirement_phases.pop(topic.topic_id, None)
                self._unused_partitions.pop(topic.topic_id, None)
                continue
            phase = retire_rules.phase(topic)
            moves = retire_rules.colocate(view, topic, self.directories(state))
            if moves:
                records += group_changes(moves)
                continue
            recorded = self._retirement_phases.get(topic.topic_id)
            if recorded is None or recorded[0] != phase:
                recorded = self._retirement_phases[topic.topic_id] = (phase, now_ms)
            waited_ms = now_ms - recorded[1]
            records += retire_rules.seal(view, topic)
            if phase == RETIRE_SEALED and waited_ms >= self._options.retire_barrier_ms:
                records += retire_rules.release(view, topic)
            elif (
                phase == RETIRE_HIDDEN and waited_ms >= self._options.retire_grace_ms and self._is_unused(topic, now_ms)
            ):
                records += retire_rules.remove(view, topic)
        for topic_id in [topic_id for topic_id in self._retirement_phases if topic_id not in state.topics_by_id]:
            del self._retirement_phases[topic_id]
            self._emptied_partitions.pop(topic_id, None)
            self._unused_partitions.pop(topic_id, None)
        return records

    def _is_unused(self, topic: TopicState, now_ms: int) -> bool:
        """Whether each leader of the topic's hidden partitions has recently reported that no client has
        written there for the grace period. False if a report is missing.
        """
        reported = self._unused_partitions.get(topic.topic_id, {})
        for partition in topic.partitions[retire_rules.first_retiring_index(topic) :]:
            epoch, reported_ms = reported.get(partition.index, (-1, 0))
            if epoch != partition.leader_epoch or now_ms - reported_ms > UNUSED_MS:
                return False
        return True

    # -- maintenance -------------------------------------------------------------------------------

    def start_balancing(self, moves: list[Move], topics: frozenset[str] | None) -> None:
        """Begins these moves, a few at a time; when all are done, plans further moves until all replicas
        are balanced. A new controller does not continue them; the operator must request a balance
        again.
        """
        self._moves = {(move.name, move.index): move for move in moves}
        self._balancing = bool(moves)
        self._balanced_topics = topics

    def _upkeep(self, state: MetadataState, now_ms: int) -> list[Record]:
        """Returns the records of the first step that has any, because later steps depend on its result."""
        return (
            self._elect_leaders(state, now_ms)
            or self._advance_retirements(state, now_ms)
            or self._cancel_replacements(state)
            or self._replace_replicas(state, now_ms)
            or self._grow_internal_topics(state, now_ms)
            or self._begin_moves(state)
        )

    def _elect_leaders(self, state: MetadataState, now_ms: int) -> list[Record]:
        if now_ms < self._may_elect_from_ms:
            return []
        view = self.view(state)
        return group_changes(
            election_rules.restore_leaders(view)
            or election_rules.elect_unclean_leaders(view, self._options.unclean_elections)
        )

    def _leaving_nodes(self, state: MetadataState, now_ms: int) -> list[int]:
        """Hosts that have been lost for replication_recovery_delay_ms, or are drained."""
        delay_ms = self._options.replication_recovery_delay_ms
        lost = [
            node
            for node, since_ms in sorted(self._fenced_since_ms.items())
            if delay_ms >= 0 and now_ms - since_ms >= delay_ms and node in state.brokers and state.brokers[node].fenced
        ]
        return sorted({*lost, *(node for node, broker in state.brokers.items() if broker.draining)})

    def _replace_replicas(self, state: MetadataState, now_ms: int) -> list[Record]:
        nodes = self._leaving_nodes(state, now_ms)
        return (
            group_changes(
                reassign_rules.replace_replicas(
                    self.view(state), nodes, self.directories(state), self._options.replica_moves_max
                )
            )
            if nodes
            else []
        )

    def _cancel_replacements(self, state: MetadataState) -> list[Record]:
        """Cancels the moves of replicas away from hosts that are back or no longer drained."""
        leaving = {node for node, broker in state.brokers.items() if broker.fenced or broker.draining}
        nodes = {
            partition.replacing
            for topic in state.topics.values()
            for partition in topic.partitions
            if partition.replacing >= 0
        } - leaving
        view = self.view(state)
        return group_changes(
            change for node in sorted(nodes) for change in reassign_rules.cancel_replacements(view, node)
        )

    def _grow_internal_topics(self, state: MetadataState, now_ms: int) -> list[Record]:
        if (
            not any(name in state.topics for name in INTERNAL_TOPICS)
            or default_replication_factor(len(self.view(state).placement_nodes())) <= 1
        ):
            return []
        previous, self._no_space_since_ms = self._no_space_since_ms, {}

        def has_waited(topic: TopicState, partition: PartitionState) -> bool:
            key = (topic.topic_id, partition.index)
            since_ms = previous.get(key, now_ms)
            if now_ms - since_ms < reassign_rules.GROW_ELSEWHERE_MS:
                self._no_space_since_ms[key] = since_ms
                return False
            return True

        return group_changes(
            reassign_rules.grow_internal_topics(
                self.view(state), self.directories(state), self._options.replica_moves_max, has_waited
            )
        )

    def _begin_moves(self, state: MetadataState) -> list[Record]:
        if not self._balancing:
            return []
        moving_count = sum(
            1
            for topic in state.topics.values()
            for partition in topic.partitions
            if reassign_rules.in_progress(partition)
        )
        if not self._moves and not moving_count:
            topics = self._balanced_topics
            nodes = self.view(state).placement_nodes()
            self.start_balancing(
                placement.plan_balance(
                    state,
                    nodes,
                    lambda name: topics is None or name in topics,
                    full=self.directories(state).full_hosts(nodes),
                ),
                topics,
            )
        view, directories = self.view(state), self.directories(state)
        room = self._options.replica_moves_max - moving_count
        changes: list[tuple[TopicState, PartitionChange]] = []
        for key, move in list(self._moves.items()):
            if len(changes) >= room:
                break
            del self._moves[key]
            topic = state.topics.get(move.name)
            if (
                topic is None
                or move.index >= len(topic.partitions)
                or reassign_rules.in_progress(topic.partitions[move.index])
            ):
                continue
            try:
                reassign_rules.check_target(view, topic.partitions[move.index], move.replicas, True)
                change = reassign_rules.reassign(view, topic, topic.partitions[move.index], move.replicas, directories)
            except Refusal:
                continue
            if change is not None:
                changes.append((topic, change))
        if not changes and not self._moves and not moving_count:
            self._balancing = False  # all replicas are balanced, or no further move is possible now
        return group_changes(changes)
