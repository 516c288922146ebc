"""Reassignments of replicas (KIP-455; rule R14): those that a client requests, and mqd's own: for a
lost host's replicas, a drained host, and internal topics that grow.

During a reassignment `replicas` is the target followed by the leaving replicas; `adding_replicas` and
`removing_replicas` list the added and the leaving ones. compose_change() ends a reassignment. When
the target changes, replicas that were added only for the old target are kept while they are
needed: they are listed in `superseded_replicas` and removed when the reassignment ends. A cancel
also removes them, because it restores the replicas from before the first target. Only a
reassignment away from a lost or drained host has `replacing`, the node whose replica it removes:
mqd reverts it when the node returns, and never reverts others.
"""

from collections.abc import Callable, Sequence
from functools import partial

from mqd.cluster.metadata.limits import check_image, check_replicas
from mqd.cluster.metadata.records import PartitionChange, PartitionState, TopicState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import spares
from mqd.cluster.metadata.rules.partitions import (
    Target,
    default_replication_factor,
    effective_min_in_sync,
    replicas_before,
    without,
)
from mqd.cluster.metadata.rules.placement import Directories, Loads, choose_additional_host
from mqd.cluster.metadata.rules.redirects import in_progress
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode

# How long a new replica of an internal topic waits for space on its disk before it is placed on
# another host.
GROW_ELSEWHERE_MS = 600_000


# -- one partition ---------------------------------------------------------------------------------


def check_target(view: View, partition: PartitionState, replicas: Sequence[int], allow_factor_change: bool) -> None:
    """Raises Refusal(INVALID_REPLICA_ASSIGNMENT) with Kafka's reasons."""
    reason = None
    check_replicas(len(replicas), ErrorCode.INVALID_REPLICA_ASSIGNMENT)
    check_image(view.state, 0, max(0, len(replicas) - len(partition.replicas)))
    if not replicas:
        reason = "The manual partition assignment includes an empty replica list."
    elif len(set(replicas)) != len(replicas):
        reason = "The manual partition assignment includes a broker more than once."
    else:
        unknown = [node for node in replicas if node not in view.state.brokers]
        base = replicas_before(partition)
        if unknown:
            reason = f"The manual partition assignment includes broker {unknown[0]}, but no such broker is registered."
        elif not allow_factor_change and len(replicas) != len(base):
            raise Refusal(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"The replication factor is changed from {len(base)} to {len(replicas)}",
            )
    if reason is not None:
        raise Refusal(ErrorCode.INVALID_REPLICA_ASSIGNMENT, reason)
    if partition.redirect >= 0:
        raise Refusal(ErrorCode.INVALID_REQUEST, "The partition is being retired.")


def reassign(
    view: View,
    topic: TopicState,
    partition: PartitionState,
    replicas: tuple[int, ...],
    directories: Directories,
    replacing: int = -1,
) -> PartitionChange | None:
    """Starts a reassignment to these replicas; it replaces the current one, if any. Raises Refusal if a
    host has no directory for its replica (KAFKA_STORAGE_ERROR), or if there would be more than
    REPLICAS_MAX replicas during the reassignment (INVALID_REPLICA_ASSIGNMENT).
    """
    spares.check_reassigned(f"{topic.name}-{partition.index}", topic.config, len(replicas))
    # Replicas that only the earlier target added are dropped immediately, except those on which the
    # in-sync set depends, and those that hold acknowledged records while fewer than
    # min.insync.replicas are in sync. These leave when the reassignment ends.
    unwanted = [
        node for node in partition.adding_replicas if node not in replicas and node not in _needed_replicas(partition)
    ]
    in_sync = without(partition.in_sync_replicas, unwanted)
    established_count = len(partition.replicas) - len(partition.adding_replicas)
    if len(in_sync) < len(partition.in_sync_replicas) and len(in_sync) < effective_min_in_sync(
        view.configured_min(topic), established_count
    ):
        unwanted = [node for node in unwanted if node not in partition.in_sync_replicas]
        in_sync = without(partition.in_sync_replicas, unwanted)
    current = without(partition.replicas, unwanted)
    base = replicas_before(partition)
    target = Target(partition)
    leaving = without(current, replicas)
    target.replicas = replicas + leaving
    subject = (
        f"Reassign in several steps: during the reassignment from {len(current)} to {len(replicas)} replicas,"
        f" {topic.name}-{partition.index}"
    )
    check_replicas(len(target.replicas), ErrorCode.INVALID_REPLICA_ASSIGNMENT, subject)
    target.directories = _directories(partition, target.replicas, directories)
    target.adding = tuple(node for node in replicas if node not in base)
    target.removing = leaving
    target.superseded = without(leaving, base)
    target.in_sync = in_sync
    target.replacing = replacing
    if not target.adding and not target.removing:
        target.replacing = -1
    return view.change_to(topic, target)


def _needed_replicas(partition: PartitionState) -> tuple[int, ...]:
    """Replicas that are not in sync but have all acknowledged records, while fewer than
    min.insync.replicas are in sync. If no replica is known to have all records: the last known ones.
    """
    return partition.eligible_leader_replicas or (() if partition.in_sync_replicas else partition.last_known_eligible)


def _directories(partition: PartitionState, replicas: Sequence[int], directories: Directories) -> tuple[str, ...]:
    existing = dict(zip(partition.replicas, partition.directories))
    result = []
    for node in replicas:
        directory = existing.get(node)
        if directory is None:
            directory = directories.choose(node)
            if directory is None:
                raise Refusal(ErrorCode.KAFKA_STORAGE_ERROR, f"No log directory of broker {node} can be written to.")
        result.append(directory)
    return tuple(result)


def cancel(view: View, topic: TopicState, partition: PartitionState) -> PartitionChange | None:
    """Restores the replicas from before the reassignment, even if its target has changed since
    (KIP-455). Returns None if it is already being cancelled. Raises Refusal if there is no
    reassignment, or if without the added replicas too few would be in sync, or none would be known
    to have all records.
    """
    if not in_progress(partition):
        raise Refusal(
            ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
            f"No partition reassignment of {topic.name}-{partition.index} is under way.",
        )
    base, superseded = replicas_before(partition), partition.superseded_replicas
    in_sync = without(partition.in_sync_replicas, partition.adding_replicas)
    is_smaller = len(in_sync) < len(partition.in_sync_replicas)
    if is_smaller and (not in_sync or len(in_sync) < effective_min_in_sync(view.configured_min(topic), len(base))):
        raise Refusal(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Without the added replicas {list(partition.adding_replicas)}, {len(in_sync)} replica(s) of"
            f" {topic.name}-{partition.index} would be in sync, fewer than min.insync.replicas; wait until the others"
            " are in sync.",
        )
    if any(node in partition.adding_replicas for node in _needed_replicas(partition)) and not in_sync:
        text = (
            f"Only the added replicas of {topic.name}-{partition.index} are known to have all of its records;"
            " wait until another replica is back, or elect a leader uncleanly."
        )
        raise Refusal(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
    target = Target(partition)
    by_node = dict(zip(partition.replicas, partition.directories))
    # The order from before the reassignment is not stored. In `base`, replicas that the target keeps
    # come before those that it removes.
    target.replicas = base + superseded
    target.directories = tuple(by_node[node] for node in target.replicas)
    target.in_sync, target.adding, target.removing, target.replacing = in_sync, (), superseded, -1
    return view.change_to(topic, target)


# -- mqd's own reassignments -----------------------------------------------------------------------


def _stuck_replicas(partition: PartitionState, directories: Directories) -> tuple[int, ...]:
    """The added replicas that cannot be copied: their directory has failed or is full."""
    replica_directories = zip(partition.replicas, partition.directories)
    return (
        tuple(
            node
            for node, directory_id in replica_directories
            if node in partition.adding_replicas
            and node not in partition.in_sync_replicas
            and directories.is_full(node, directory_id)
        )
        if partition.adding_replicas
        else ()
    )


def _has_failed_directory(partition: PartitionState, directories: Directories) -> bool:
    replica_directories = zip(partition.replicas, partition.directories)
    return any(
        node in partition.adding_replicas
        and node not in partition.in_sync_replicas
        and directories.has_failed(node, directory_id)
        for node, directory_id in replica_directories
    )


def _replica_to_replace(
    topic: TopicState, partition: PartitionState, leaving: set[int], directory_failed: bool
) -> tuple[int, tuple[int, ...]] | None:
    """Returns (node to replace, or -1 if only replicas are added; replicas before). None: no move is
    needed. If mqd itself
    started a move to a leaving host or a failed directory, the move gets another target; a move that
    adds a replica to an internal topic starts again. A move whose target disk is full waits: another
    target could fill up too, and the move would alternate between the two.
    """
    # a retired partition is moved with the partition that takes its records
    if partition.leader < 0 or partition.redirect >= 0:
        return None
    base = replicas_before(partition)
    if in_progress(partition):
        to_leaving_host = not leaving.isdisjoint(partition.adding_replicas)
        if (to_leaving_host or directory_failed) and partition.replacing in base:
            return partition.replacing, base
        if to_leaving_host and topic.name in INTERNAL_TOPICS and not partition.removing_replicas:
            return -1, base
        return None
    node = next((node for node in partition.replicas if node in leaving), -1)
    return None if node < 0 else (node, base)


def replace_replicas(
    view: View, leaving_nodes: Sequence[int], directories: Directories, moves_max: int
) -> list[tuple[TopicState, PartitionChange]]:
    """Starts to move the replicas of these lost or drained hosts to other hosts, at most `moves_max` at a
    time in the whole cluster. Current reassignments are not changed unless they go to one of these
    hosts or to a failed directory. Moves of partitions without a leader are not counted. Moves for
    which only hosts without space remain are counted separately, with the same limit.
    """
    leaving = set(leaving_nodes)
    changes: list[tuple[TopicState, PartitionChange]] = []
    if not leaving or not any(
        view.state.directory_replica_counts.get((node, directory))
        for node, directory in view.state.directory_replica_counts
        if node in leaving
    ):
        return changes
    move_counts = {False: 0, True: 0}  # whether the target lacks space -> number of moves
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if partition.replacing >= 0 and partition.leader >= 0 and leaving.isdisjoint(partition.adding_replicas):
                move_counts[bool(_stuck_replicas(partition, directories))] += 1
    nodes = [node for node in view.placement_nodes() if node not in leaving]
    loads = Loads(view.state, nodes, directories.full_hosts(nodes))
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if move_counts[False] >= moves_max:
                return changes
            is_stuck = bool(_stuck_replicas(partition, directories))
            to_replace = _replica_to_replace(
                topic, partition, leaving, is_stuck and _has_failed_directory(partition, directories)
            )
            if to_replace is None:
                continue
            node, base = to_replace
            new_node = choose_additional_host(loads, (*base, *partition.adding_replicas)) if node >= 0 else -1
            lacks_space = new_node in loads.full
            if (node >= 0 and new_node < 0) or (lacks_space and (is_stuck or move_counts[True] >= moves_max)):
                continue
            replicas = tuple(new_node if replica == node else replica for replica in base)
            change = _attempt(partial(reassign, view, topic, partition, replicas, directories, replacing=node))
            if change is not None:
                loads.add((-1, new_node))  # -1: the new replica is a follower, so no host gets a leader
                move_counts[lacks_space] += 1
                changes.append((topic, change))
    return changes


def cancel_replacements(view: View, node: int) -> list[tuple[TopicState, PartitionChange]]:
    """Cancels the moves of replicas away from a host that is back or no longer drained, except moves
    whose new replicas are already in sync and needed.
    """
    changes = []
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if partition.replacing == node and in_progress(partition):
                change = _attempt(partial(cancel, view, topic, partition))
                if change is not None:
                    changes.append((topic, change))
    return changes


def _never(_topic: TopicState, _partition: PartitionState) -> bool:
    return False


def grow_internal_topics(
    view: View,
    directories: Directories,
    moves_max: int,
    has_waited: Callable[[TopicState, PartitionState], bool] = _never,
) -> list[tuple[TopicState, PartitionChange]]:
    """Raises the replication factor of internal topics to the current default: they may have been
    created before most hosts joined. No replica is added on a full host. A replica that is still
    being copied is moved to another host if its disk has failed, or if `has_waited` returns True
    (the disk has had no space for GROW_ELSEWHERE_MS). Without the wait, a disk that the copy itself
    has filled would be chosen again and again, since deleting the copy frees its space.
    """
    nodes = view.placement_nodes()
    full = directories.full_hosts(nodes)
    factor = default_replication_factor(len(nodes))
    changes: list[tuple[TopicState, PartitionChange]] = []
    loads = None
    for name in sorted(INTERNAL_TOPICS):
        topic = view.state.topics.get(name)
        if topic is None:
            continue
        for partition in topic.partitions:
            replicas = partition.replicas
            if in_progress(partition):
                stuck = _stuck_replicas(partition, directories)
                others = [node for node in nodes if node not in replicas and node not in full]
                if (
                    stuck
                    and others
                    and not partition.removing_replicas
                    and (_has_failed_directory(partition, directories) or has_waited(topic, partition))
                ):
                    replicas = without(replicas, stuck)
            if len(replicas) >= factor or (in_progress(partition) and replicas == partition.replicas):
                continue
            if len(changes) >= moves_max:
                return changes
            loads = loads or Loads(view.state, nodes, full, internal=True)
            while (
                len(replicas) < factor
                and (new_node := choose_additional_host(loads, tuple(dict.fromkeys((*replicas, *partition.replicas)))))
                >= 0
                and new_node not in full
            ):
                loads.add((-1, new_node))  # -1: a follower, as above
                replicas = (*replicas, new_node)
            change = _attempt(partial(reassign, view, topic, partition, replicas, directories))
            if change is not None:
                changes.append((topic, change))
    return changes


def _attempt(make: Callable[[], PartitionChange | None]) -> PartitionChange | None:
    try:
        return make()
    except Refusal:
        return None  # a later tick tries again; the disk or the replica may have recovered by then
