"""Reduces the number of partitions of a topic. The procedure is explained in
docs/decisions/cluster/2026-11-21-retired-partitions.md.

    RETIRE_UNSEALED -> (co-locating) -> RETIRE_SEALED -> RETIRE_REDIRECTED -> RETIRE_HIDDEN -> gone
    (RetiredPartitionsRemoved)

    co-locating  has a `redirect` and is not sealed yet: its replicas and its leader move to the
                 hosts of the partition that will take its records
    sealed       refuses new records with a retriable error, to give consumers time to read the
                 existing ones (at most retire_barrier_ms)
    redirected   records that producers send to partition p are appended to p mod M; p is readable
                 until retention has emptied it
    hidden       empty; Metadata has M partitions; for retire_grace_ms, producers with older
                 metadata (N partitions) are served as before
The number of partitions falls from N to M. All retired partitions take each step together: no client
sees a number between N and M, so a key has at most two partitions. Each step raises the leader epoch,
which fences the leader of the previous step.

Once it is sealed, a retired partition has the same replicas and leader as the partition that takes its
records, so its leader can redirect records within the host. When one of the two leaders changes,
clients briefly get a retriable error. Moving replicas takes longer; meanwhile redirects.py keeps the
two partitions on the same hosts.

M must divide N: then a producer with M partitions sends the keys of p to p mod M, and no key of a
remaining partition moves.
"""

from collections.abc import Iterator

import msgspec

from mqd.cluster.metadata.records import (
    RETIRE_HIDDEN,
    RETIRE_REDIRECTED,
    RETIRE_SEALED,
    RETIRE_UNSEALED,
    PartitionChange,
    PartitionState,
    Record,
    RetiredPartitionsRemoved,
    TopicState,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.partitions import Target
from mqd.cluster.metadata.rules.placement import Directories
from mqd.cluster.metadata.rules.reassignments import reassign
from mqd.cluster.metadata.rules.redirects import (
    better_leader,
    first_retiring_index,
    in_progress,
    remaining_replicas,
    retired_into,
)
from mqd.cluster.metadata.state import INTERNAL_TOPICS, apply_change
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode


def is_retiring(topic: TopicState) -> bool:
    return bool(topic.partitions) and topic.partitions[-1].redirect >= 0


def phase(topic: TopicState) -> int:
    """RETIRE_*: the phase of the partitions to be removed (the same for all)."""
    return topic.partitions[-1].retiring


def retire(
    view: View, name: str, partition_count: int, allow_moved_keys: bool, policy_default: str = "delete"
) -> list[Record]:
    """Sets which partitions are removed and which take their records. The active controller takes
    the next steps (colocate, seal). The caller must already have asked the partitions' leaders whether
    transactions are open, because only the leaders know. `policy_default`: the default
    cleanup.policy. Raises Refusal.
    """
    topic = view.state.topics.get(name)
    if topic is None:
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    if name in INTERNAL_TOPICS:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"The internal topic {name} cannot have fewer partitions: it holds the state of all groups and"
            " transactions.",
        )
    current = len(topic.partitions)
    if not 0 < partition_count < current:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {name} has {current} partition(s); the new number must be lower, and at least 1, not"
            f" {partition_count}.",
        )
    if is_retiring(topic):
        if first_retiring_index(topic) == partition_count:
            return []
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"Partitions {first_retiring_index(topic)} to {current - 1} of {name} are being retired; wait until they"
            " are removed.",
        )
    if current % partition_count and not allow_moved_keys:
        raise Refusal(
            ErrorCode.INVALID_PARTITIONS,
            f"{partition_count} does not divide {current}: keys of the partitions that remain would move to others, and"
            f" their order would be lost. Choose a divisor of {current}, or, if the topic's records have no"
            " keys, allow keys to move (--allow-moved-keys).",
        )
    if "delete" not in topic.config.get("cleanup.policy", policy_default):
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"Records of topic {name} are never deleted: its retired partitions would not become empty. Add delete to"
            " cleanup.policy.",
        )
    return _enter_phase(view, topic, partition_count, RETIRE_UNSEALED)


def _enter_phase(view: View, topic: TopicState, first: int, new_phase: int) -> list[Record]:
    def targets() -> Iterator[tuple[TopicState, Target]]:
        for partition in topic.partitions[first:]:
            target = Target(partition)
            target.retiring, target.redirect = new_phase, partition.index % first
            target.raises_leader_epoch = new_phase != RETIRE_UNSEALED
            yield topic, target

    return view.changes(targets())


def colocate(view: View, topic: TopicState, directories: Directories) -> list[tuple[TopicState, PartitionChange]]:
    """Returns changes that move retired partitions to the hosts, current or future, of the partitions
    that take their records. Leaders move as soon as they can, without waiting for all replicas to
    have moved. Each change to a partition is based on the previous one in the list.
    """
    changes: list[tuple[TopicState, PartitionChange]] = []
    first = first_retiring_index(topic)

    def add_change(partition: PartitionState, change: PartitionChange | None) -> PartitionState:
        if change is None:
            return partition
        changes.append((topic, change))
        return apply_change(partition, change)

    for index in range(first if first < len(topic.partitions) else 0):
        successor = add_change(topic.partitions[index], _end_reassignment(view, topic, topic.partitions[index]))
        successor = add_change(successor, _move_leadership(view, topic, successor))
        if successor is not topic.partitions[index]:
            topic = msgspec.structs.replace(
                topic, partitions=(*topic.partitions[:index], successor, *topic.partitions[index + 1 :])
            )
        for partition in retired_into(topic, index):
            moved = add_change(partition, _move_replicas(view, topic, partition, directories))
            add_change(moved, _follow_leader(view, topic, moved))
    return changes


def _end_reassignment(view: View, topic: TopicState, successor: PartitionState) -> PartitionChange | None:
    """Ends a reassignment that waited for the retired partitions (redirects.would_break_colocation)."""
    return view.change_to(topic, Target(successor)) if in_progress(successor) else None


def _move_leadership(view: View, topic: TopicState, successor: PartitionState) -> PartitionChange | None:
    """Moves the successor's leadership to a host that can lead more of its retired partitions."""
    return _move_leadership_to(view, topic, successor, better_leader(topic, successor, view.may_lead))


def _move_replicas(
    view: View, topic: TopicState, partition: PartitionState, directories: Directories
) -> PartitionChange | None:
    target = remaining_replicas(topic.partitions[partition.redirect])
    if set(remaining_replicas(partition)) == set(target):
        return None
    try:
        return reassign(view, topic, partition, target, directories)
    except Refusal:
        return None  # a later tick tries again, when the disk may have recovered


def _follow_leader(view: View, topic: TopicState, partition: PartitionState) -> PartitionChange | None:
    """Gives the retired partition the leader of its successor, or ends a reassignment that waited for the
    successor.
    """
    leader = topic.partitions[partition.redirect].leader
    if leader not in (-1, partition.leader) and leader in partition.in_sync_replicas and view.may_lead(leader):
        return _move_leadership_to(view, topic, partition, leader)
    return view.change_to(topic, Target(partition)) if in_progress(partition) else None


def _move_leadership_to(view: View, topic: TopicState, partition: PartitionState, node: int) -> PartitionChange | None:
    target = Target(partition)
    target.target_leader = node
    return view.change_to(topic, target) if node >= 0 else None


def seal(view: View, topic: TopicState) -> list[Record]:
    """Seals the retired partitions if all of them are on the hosts of their successors."""
    first = first_retiring_index(topic)
    if phase(topic) != RETIRE_UNSEALED or first == len(topic.partitions):
        return []
    for partition in topic.partitions[first:]:
        successor = topic.partitions[partition.redirect]
        if (
            partition.leader < 0
            or partition.leader != successor.leader
            or in_progress(partition)
            or in_progress(successor)
        ):
            return []
    return _enter_phase(view, topic, first, RETIRE_SEALED)


def release(view: View, topic: TopicState) -> list[Record]:
    """Ends the seal: new records are redirected. Returns no metadata records if the topic is not sealed."""
    return (
        _enter_phase(view, topic, first_retiring_index(topic), RETIRE_REDIRECTED)
        if phase(topic) == RETIRE_SEALED
        else []
    )


def hide(view: View, topic: TopicState) -> list[Record]:
    """Hides the retired partitions, which must be empty."""
    return (
        _enter_phase(view, topic, first_retiring_index(topic), RETIRE_HIDDEN)
        if phase(topic) == RETIRE_REDIRECTED
        else []
    )


def remove(view: View, topic: TopicState) -> list[Record]:
    """Removes the retired partitions, and ends reassignments that waited for them."""
    if phase(topic) != RETIRE_HIDDEN:
        return []
    first = first_retiring_index(topic)
    kept = msgspec.structs.replace(topic, partitions=topic.partitions[:first])
    return [
        RetiredPartitionsRemoved(topic.topic_id, first),
        *view.changes((kept, Target(partition)) for partition in kept.partitions if in_progress(partition)),
    ]
