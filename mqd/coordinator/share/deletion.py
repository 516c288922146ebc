"""Deletion on acknowledgement (queue.delete.on.ack): the offset up to which every share group is
done with a partition. Sans-I/O.

A share group is done with the records before its start offset: they were accepted, rejected, or
delivered the maximum number of times. The states of a partition's groups are spread over the
coordinators of `__share_group_state`, so the partition's leader queries all of them.

Invariants
    Q1  no group loses a record that it is not done with: nothing at or above the start offset of
        any of the partition's groups is deleted. A group that begins while the coordinators are
        queried may begin after the deleted records
    Q2  nothing is deleted until each partition of `__share_group_state` has responded
    Q3  a start offset is used only after it has been persisted: a host reports only values that it
        would load again
    Q4  nothing is deleted if no group has begun, or if one has no start offset yet
    Q5  a start offset is used only if it was read in the partition's current leader epoch. An older
        one may lie above the log's end (P6 of core.py), so such a group needs all records
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mqd.coordinator.share.core import UNINITIALIZED

TopicPartition = tuple[bytes, int]  # topic id, partition


class StartOffsets(NamedTuple):
    """The response of one host. `state_partitions`: the partitions of `__share_group_state` that it
    leads. `lowest`: for each topic partition the lowest start offset of the groups whose states are
    in these partitions; UNINITIALIZED if a group has none.
    """

    state_partitions: frozenset[int]
    lowest: Mapping[TopicPartition, int]


def lowest_by_partition(start_offsets: Iterable[tuple[TopicPartition, int]]) -> dict[TopicPartition, int]:
    """The lowest start offset of each partition."""
    starts: dict[TopicPartition, int] = {}
    for key, offset in start_offsets:
        starts[key] = min(offset, starts.get(key, offset))
    return starts


def deletable_ends(responses: Iterable[StartOffsets], state_partition_count: int) -> dict[TopicPartition, int]:
    """For each partition, the offset below which everything may be deleted. `state_partition_count`:
    the number of partitions of `__share_group_state`.
    """
    responses = list(responses)
    partitions = frozenset().union(*(response.state_partitions for response in responses))
    if len(partitions) < state_partition_count:
        return {}
    starts = lowest_by_partition(item for response in responses for item in response.lowest.items())
    return {key: offset for key, offset in starts.items() if offset != UNINITIALIZED}
