"""How long the first unread record of a consumer group has waited, by its timestamp.

Read from the files of this host's replicas, one log directory at a time, in the thread that
measures it (see directories.py): if a directory hangs, only the ages of its own groups are missing.
Bound: LOOKUPS_MAX reads a measurement, the oldest results first; a group's earlier age, which is
too high if it has moved, is shown until its turn comes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mqd.acceptor.broker import Broker
from mqd.cluster.host.messages import PartitionImage
from mqd.coordinator.group.group import Group
from mqd.log import lookup
from mqd.log.batches import CorruptBatch
from mqd.native import SlotView

LOOKUPS_MAX = 200
TRIES = 5

Place = tuple[str, str, int]  # group, topic, partition


class Waiting(NamedTuple):
    """`turn`: of the look-up, to order them. `since_ms`: the timestamp of the first record at or
    after `offset`; -1 = it cannot be read.
    """

    turn: int
    topic_id: bytes
    offset: int
    since_ms: int


class _Unread(NamedTuple):
    image: PartitionImage
    topic_id: bytes
    offset: int
    view: SlotView


class Measured:
    """The results for one log directory. Used by one thread at a time."""

    def __init__(self, broker: Broker, log_dir: int) -> None:
        self._broker, self._log_dir = broker, log_dir
        self._known: dict[Place, Waiting] = {}
        self._turn = 0

    def measure(self) -> dict[Place, Waiting]:
        """Blocks until the directory responds."""
        self._turn += 1
        unread = dict(self._unread())
        known = {
            place: one
            for place, one in self._known.items()
            if place in unread and one.topic_id == unread[place].topic_id
        }
        moved = [place for place, one in unread.items() if place not in known or known[place].offset != one.offset]
        moved.sort(key=lambda place: known[place].turn if place in known else 0)
        for place in moved[:LOOKUPS_MAX]:
            one = unread[place]
            known[place] = Waiting(self._turn, one.topic_id, one.offset, self._since_ms(place, one))
        self._known = known
        return known

    def _since_ms(self, place: Place, one: _Unread) -> int:
        view = one.view
        try:
            path = self._broker.path_of(place[1], one.image)
            found = lookup.timestamp_from(path, one.offset, view.log_start_offset, view.high_watermark)
        except (OSError, CorruptBatch):
            return -1
        return found.timestamp_ms

    def _unread(self) -> Iterator[tuple[Place, _Unread]]:
        for group in groups(self._broker):
            for topic in sorted(group.offsets.topics):
                about = self._broker.metadata.topics.get(topic)
                for index in sorted(group.offsets.partitions(topic)) if about is not None else ():
                    committed, image = group.offsets.get(topic, index), self._broker.partition_of(topic, index)
                    if committed is None or image is None or image.log_dir != self._log_dir or about is None:
                        continue
                    view = self._broker.replica_view(image)
                    if view is not None and committed.offset < view.high_watermark:
                        yield (group.group_id, topic, index), _Unread(image, about.topic_id, committed.offset, view)


def groups(broker: Broker) -> list[Group]:
    """The groups of this coordinator, for a thread other than its own: it copies what changes in
    one step of the interpreter.
    """
    if broker.coordinators is None:
        return []
    for _ in range(TRIES):
        try:
            return [
                core for _, core in list(broker.coordinators.groups.items()) if isinstance(core, Group) and core.exists
            ]
        except RuntimeError:
            continue  # groups were added or removed during the listing
    return []
