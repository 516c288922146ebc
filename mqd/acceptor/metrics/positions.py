"""The positions of groups, read by the thread that serves a scrape while the event loop changes
them. Each dictionary is copied atomically under the GIL; a listing that fails because of a change
is repeated. A group that changes at the same time appears in its old or its new state.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mqd.acceptor.broker import Broker
from mqd.coordinator.group.group import Group
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.share.core import SharePartition

TRIES = 5


class Position(NamedTuple):
    """`offset`: the committed offset; for a share group, the offset of its first unfinished record.
    `finished_count`: records at or after `offset` that a share group has finished.
    """

    group: str
    topic: str
    partition: int
    offset: int
    finished_count: int


def groups(broker: Broker) -> list[Group]:
    """The groups that this host coordinates."""
    if broker.coordinators is None:
        return []
    return [core for core in _cores(broker.coordinators.groups) if isinstance(core, Group) and core.is_visible]


def positions(broker: Broker) -> list[Position]:
    """Returns the positions in order of group, topic and partition; for share groups, only those in
    share-partitions whose state this host coordinates.
    """
    return sorted([*_committed_positions(broker), *_share_positions(broker)])


def _committed_positions(broker: Broker) -> Iterator[Position]:
    for group in groups(broker):
        for topic in list(group.offsets.topics):
            for index in list(group.offsets.partitions(topic)):
                committed = group.offsets.get(topic, index)
                if committed is not None:
                    yield Position(group.group_id, topic, index, committed.offset, 0)


def _share_positions(broker: Broker) -> Iterator[Position]:
    if broker.coordinators is None:
        return
    for core in _cores(broker.coordinators.share):
        if isinstance(core, SharePartition) and core.exists and core.start_offset >= 0:
            topic = broker.metadata.by_id(core.topic_id)
            if topic is not None:
                finished_count = max(0, core.complete_count)
                yield Position(core.group_id, topic.name, core.partition, core.start_offset, finished_count)


def _cores(coordinator: Coordinator) -> list[object]:
    """The coordinator's state machines: its groups, or its share-partitions."""
    for _ in range(TRIES):
        try:
            return [core for _, core in list(coordinator.items())]
        except RuntimeError:
            continue  # some were added or removed during the listing
    return []
