"""Leader elections: those that a client requests (KIP-460), unclean ones if the configuration allows
them, and the return of leaderships to preferred replicas (rules R13, R16).
"""

from collections.abc import Mapping

from mqd.cluster.metadata.records import PartitionChange, PartitionState, TopicState
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.partitions import PREFERRED, UNCLEAN, Target, without
from mqd.cluster.metadata.rules.redirects import separates_redirects
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode

ELECT_PREFERRED, ELECT_UNCLEAN = 0, 1
UNCLEAN_ENABLE = "unclean.leader.election.enable"


def preferred_replica(partition: PartitionState) -> int:
    """The first replica that the current reassignment keeps; -1 if it removes all of them."""
    return next(iter(without(partition.replicas, partition.removing_replicas)), -1)


def elect_preferred(view: View, topic: TopicState, partition: PartitionState) -> PartitionChange:
    """Raises Refusal: ELECTION_NOT_NEEDED, PREFERRED_LEADER_NOT_AVAILABLE."""
    preferred = preferred_replica(partition)
    if partition.leader == preferred:
        raise Refusal(ErrorCode.ELECTION_NOT_NEEDED, "The preferred replica leads already.")
    if preferred not in partition.in_sync_replicas or not view.may_lead(preferred):
        raise Refusal(
            ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
            f"The preferred replica {preferred} is not in sync, or not available.",
        )
    target = Target(partition)
    target.election = PREFERRED
    change = view.change_to(topic, target)
    if change is None:
        raise Refusal(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, f"The preferred replica {preferred} cannot lead now.")
    return change


def elect_unclean(view: View, topic: TopicState, partition: PartitionState) -> PartitionChange:
    """Elects a leader uncleanly, at an operator's request: records may be lost. The request can be
    repeated if the elected replica cannot serve the partition. Raises Refusal: ELECTION_NOT_NEEDED,
    ELIGIBLE_LEADERS_NOT_AVAILABLE.
    """
    if not _is_unserved(view, topic, partition):
        raise Refusal(ErrorCode.ELECTION_NOT_NEEDED, f"Broker {partition.leader} leads the partition.")
    target = Target(partition)
    target.election = UNCLEAN
    change = view.change_to(topic, target, leaving=partition.leader)
    if change is None or change.leader is None or change.leader < 0:
        raise Refusal(
            ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
            "No replica of the partition is on a broker that is alive and can serve it.",
        )
    return change


def _is_unserved(view: View, topic: TopicState, partition: PartitionState) -> bool:
    return partition.leader < 0 or view.cannot_serve(topic, partition, partition.leader)


def elect(view: View, election_type: int, topic: TopicState, partition: PartitionState) -> PartitionChange:
    if election_type == ELECT_PREFERRED:
        return elect_preferred(view, topic, partition)
    if election_type == ELECT_UNCLEAN:
        return elect_unclean(view, topic, partition)
    raise Refusal(ErrorCode.INVALID_REQUEST, f"Unknown election type {election_type}; 0 is preferred, 1 is unclean.")


def needs_election(view: View, election_type: int, topic: TopicState, partition: PartitionState) -> bool:
    """Whether an election over all partitions includes this one."""
    return (
        _is_unserved(view, topic, partition)
        if election_type == ELECT_UNCLEAN
        else partition.leader != preferred_replica(partition)
    )


def restore_leaders(view: View) -> list[tuple[TopicState, PartitionChange]]:
    """Elects leaders for partitions that had none because no replica with all records could serve them
    until now. Runs every second, so it quickly skips partitions whose hosts are all lost.
    """
    changes = []
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if partition.leader >= 0 or not any(
                map(view.is_unfenced, partition.in_sync_replicas + partition.eligible_leader_replicas)
            ):
                continue
            if (change := view.change_to(topic, Target(partition))) is not None and change.leader is not None:
                changes.append((topic, change))
    return changes


def allows_unclean(view: View, topic: TopicState, static_default: bool) -> bool:
    """Returns the topic's unclean.leader.election.enable, else the all-brokers value in the metadata log, as
    in Kafka, else `static_default` (from the active controller's configuration file).
    """
    value = topic.config.get(UNCLEAN_ENABLE) or view.state.broker_configs.get("", {}).get(UNCLEAN_ENABLE)
    return value == "true" if value else static_default


def elect_unclean_leaders(view: View, static_default: bool) -> list[tuple[TopicState, PartitionChange]]:
    """Elects leaders for partitions without a live replica that has all records, if
    unclean.leader.election.enable allows it. Records that such a leader lacks are lost, including
    acknowledged ones. restore_leaders() must run first.
    """
    changes = []
    for topic in view.state.topics.values():
        if not allows_unclean(view, topic, static_default):
            continue
        for partition in topic.partitions:
            if partition.leader >= 0 or not any(map(view.is_unfenced, partition.replicas)):
                continue
            target = Target(partition)
            target.election = UNCLEAN
            if (change := view.change_to(topic, target)) is not None and change.leader is not None:
                changes.append((topic, change))
    return changes


def elect_preferred_leaders(
    view: View, is_stable: Mapping[int, bool], percent: int, moves_max: int
) -> list[tuple[TopicState, PartitionChange]]:
    """Gives leaderships, at most `moves_max`, back to the preferred replicas on brokers that lack more
    than `percent` of the leaderships that they should have. `is_stable`: whether a broker has been
    unfenced for long enough.
    """
    preferred_counts: dict[int, int] = {}
    misplaced_counts: dict[int, int] = {}
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if partition.redirect >= 0:
                continue  # a retired partition has the leader of its redirect target
            node = preferred_replica(partition)
            preferred_counts[node] = preferred_counts.get(node, 0) + 1
            if partition.leader != node:
                misplaced_counts[node] = misplaced_counts.get(node, 0) + 1
    below_share = {
        node
        for node, count in misplaced_counts.items()
        if count * 100 > preferred_counts[node] * percent and is_stable.get(node, False)
    }
    changes: list[tuple[TopicState, PartitionChange]] = []
    if not below_share:
        return changes
    for topic in view.state.topics.values():
        for partition in topic.partitions:
            if len(changes) >= moves_max:
                return changes
            preferred = preferred_replica(partition)
            if (
                partition.redirect < 0
                and preferred in below_share
                and partition.leader != preferred
                and not separates_redirects(topic, partition, preferred)
            ):
                try:
                    changes.append((topic, elect_preferred(view, topic, partition)))
                except Refusal:
                    continue
    return changes
