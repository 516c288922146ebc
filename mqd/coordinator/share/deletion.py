"""Deletion on acknowledgement (queue.delete.on.ack): up to where every share group is done with the
records of a partition. Sans-I/O.

A share group is done with what is before its start offset: it was accepted, rejected, or delivered as
often as it may be. The states of a partition's groups are spread over the coordinators of
`__share_group_state`, so its leader asks all of them.

Invariants
    Q1  no group loses a record that it is not done with: nothing is deleted from the start offset
        of any of the partition's groups on. A group that begins while the coordinators are asked may
        begin after what is deleted
    Q2  unless each partition of `__share_group_state` has answered, nothing is deleted
    Q3  a start offset counts when it is written: a host answers what it would find again
    Q4  where no group has begun, nothing is deleted; nor where one has not chosen its start yet
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mqd.coordinator.share.core import UNINITIALIZED

TopicPartition = tuple[bytes, int]  # topic id, partition


class Starts(NamedTuple):
    """What one host answers: the partitions of `__share_group_state` whose states it has, and by
    partition of the topics the lowest start offset of its groups, UNINITIALIZED if one has none.
    """

    places: frozenset[int]
    lowest: Mapping[TopicPartition, int]


def lowest(found: Iterable[tuple[TopicPartition, int]]) -> dict[TopicPartition, int]:
    """The lowest start offset by partition."""
    starts: dict[TopicPartition, int] = {}
    for key, offset in found:
        starts[key] = min(offset, starts.get(key, offset))
    return starts


def deletable(answers: Iterable[Starts], place_count: int) -> dict[TopicPartition, int]:
    """By partition the offset below which everything may be deleted. `place_count`: the number of
    partitions of `__share_group_state`.
    """
    answers = list(answers)
    places = frozenset().union(*(answer.places for answer in answers))
    if len(places) < place_count:
        return {}
    starts = lowest(item for answer in answers for item in answer.lowest.items())
    return {key: offset for key, offset in starts.items() if offset != UNINITIALIZED}
