"""Once a retired partition is sealed, it and the partition that takes its records (called its
successor here) are led by the same host. These rules keep them together while replicas move
(docs/decisions/cluster/2026-11-21-retired-partitions.md).

    * a reassignment of either partition completes only once some host would be in sync for both
      (would_break_colocation())
    * the best leader of a successor is the host that is in sync for the largest number of its
      retired partitions (better_leader()); leadership is not moved back to a preferred replica that
      is in sync for fewer of them
A partition without a leader is ignored: no records can be redirected to it or from it.

Pure functions of one topic. In a topic that keeps M partitions, the successor of retired partition p
is p mod M.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from mqd.cluster.metadata.records import RETIRE_UNSEALED, PartitionState, TopicState
from mqd.cluster.metadata.rules.partitions import Target, without


def in_progress(partition: PartitionState) -> bool:
    return bool(partition.adding_replicas or partition.removing_replicas)


def remaining_replicas(partition: PartitionState) -> tuple[int, ...]:
    """The replicas after the current reassignment."""
    return without(partition.replicas, partition.removing_replicas)


def first_retiring_index(topic: TopicState) -> int:
    """The index of the first retired partition; the number of partitions if there is none. All
    partitions from that index on are retired.
    """
    return bisect_left(topic.partitions, True, key=lambda partition: partition.redirect >= 0)


def retired_into(topic: TopicState, successor: int) -> Sequence[PartitionState]:
    """The retired partitions whose records go to partition `successor`."""
    first = first_retiring_index(topic)
    return topic.partitions[first + successor :: first] if successor < first < len(topic.partitions) else ()


def would_break_colocation(topic: TopicState, target: Target) -> bool:
    """Whether the end of the partition's reassignment would separate it from its successor or from a
    partition retired into it.
    """
    if not (target.adding or target.removing) or topic.partitions[-1].redirect < 0:
        return False
    old = target.old
    others = retired_into(topic, old.index) if old.redirect < 0 else (topic.partitions[old.redirect],)
    remaining = without(target.in_sync, target.removing)
    phase = old.retiring if old.redirect >= 0 else topic.partitions[-1].retiring
    return phase != RETIRE_UNSEALED and any(
        other.leader >= 0 and set(other.in_sync_replicas).isdisjoint(remaining) for other in others
    )


def _in_sync_count(retired: Sequence[PartitionState], node: int) -> int:
    return sum(node in partition.in_sync_replicas for partition in retired)


def _placed_with(topic: TopicState, successor: PartitionState) -> list[PartitionState]:
    """The partitions retired into `successor`, without those that are still being moved to its hosts."""
    return [
        partition
        for partition in retired_into(topic, successor.index)
        if partition.leader >= 0 and (partition.retiring != RETIRE_UNSEALED or not in_progress(partition))
    ]


def better_leader(topic: TopicState, successor: PartitionState, may_lead: Callable[[int], bool]) -> int:
    """The in-sync replica of the successor that is in sync for the most partitions retired into it; -1 =
    none is better than the leader. Among equals, the first replica that the current reassignment keeps
    is chosen.
    """
    retired = _placed_with(topic, successor) if successor.leader >= 0 else []
    best, best_count = -1, _in_sync_count(retired, successor.leader)
    if best_count == len(retired):
        return -1
    for node in (*remaining_replicas(successor), *successor.removing_replicas):
        count = _in_sync_count(retired, node) if node in successor.in_sync_replicas and may_lead(node) else 0
        if count > best_count:
            best, best_count = node, count
    return best


def separates_redirects(topic: TopicState, partition: PartitionState, leader: int) -> bool:
    """Whether `leader` could lead fewer of the partitions retired into `partition` than the current leader."""
    retired = _placed_with(topic, partition)
    return _in_sync_count(retired, leader) < _in_sync_count(retired, partition.leader)
