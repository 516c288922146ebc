"""From the seal on, a retired partition (called a follower here) and the partition that takes its
records (its goal) are led by the same host. These rules keep them together while replicas move
(docs/decisions/cluster/2026-11-21-retired-partitions.md).

    * no reassignment of either ends if that would leave no host in sync with both (held())
    * among the in-sync replicas of a goal the best leader is the host that is also in sync for the
      most followers (better_leader()); a leadership does not return to a preferred replica that is
      in sync for fewer of them
A partition without a leader blocks nothing: no records can be redirected to it or by it.

Pure functions of one topic. The goal of retired partition p of a topic that keeps M partitions is p
mod M.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from mqd.cluster.metadata.records import RETIRE_NOT, PartitionState, TopicState
from mqd.cluster.metadata.rules.partitions import Target, without


def in_progress(partition: PartitionState) -> bool:
    return bool(partition.adding_replicas or partition.removing_replicas)


def staying(partition: PartitionState) -> tuple[int, ...]:
    """Its replicas after the current reassignment."""
    return without(partition.replicas, partition.removing_replicas)


def retiring_from(topic: TopicState) -> int:
    """Index of the first partition to be removed; the number of partitions if there is none. All
    partitions from there on are removed.
    """
    return bisect_left(topic.partitions, True, key=lambda partition: partition.redirect >= 0)


def followers(topic: TopicState, goal: int) -> Sequence[PartitionState]:
    first = retiring_from(topic)
    return topic.partitions[first + goal :: first] if goal < first < len(topic.partitions) else ()


def held(topic: TopicState, target: Target) -> bool:
    """Whether the end of the partition's reassignment would separate it from the partition that it
    must be led with.
    """
    if not (target.adding or target.removing) or topic.partitions[-1].redirect < 0:
        return False
    old = target.old
    others = followers(topic, old.index) if old.redirect < 0 else (topic.partitions[old.redirect],)
    stay = without(target.in_sync, target.removing)
    handed_on = old.retiring if old.redirect >= 0 else topic.partitions[-1].retiring
    return handed_on != RETIRE_NOT and any(
        other.leader >= 0 and set(other.in_sync_replicas).isdisjoint(stay) for other in others
    )


def _count(tied: Sequence[PartitionState], node: int) -> int:
    return sum(node in follower.in_sync_replicas for follower in tied)


def _tied(topic: TopicState, goal: PartitionState) -> list[PartitionState]:
    """The goal's followers, except those that are still being moved to its hosts."""
    return [
        one
        for one in followers(topic, goal.index)
        if one.leader >= 0 and (one.retiring != RETIRE_NOT or not in_progress(one))
    ]


def better_leader(topic: TopicState, goal: PartitionState, may_lead: Callable[[int], bool]) -> int:
    """An in-sync replica of the goal that is in sync for more of its followers than its leader is;
    -1 = none. Among equals one that stays, the preferred one first.
    """
    tied = _tied(topic, goal) if goal.leader >= 0 else []
    best, most = -1, _count(tied, goal.leader)
    if most == len(tied):
        return -1
    for node in (*staying(goal), *goal.removing_replicas):
        count = _count(tied, node) if node in goal.in_sync_replicas and may_lead(node) else 0
        if count > most:
            best, most = node, count
    return best


def separates_redirects(topic: TopicState, partition: PartitionState, leader: int) -> bool:
    """Whether fewer of its followers could be led by this replica than by the current leader."""
    tied = _tied(topic, partition)
    return _count(tied, leader) < _count(tied, partition.leader)
