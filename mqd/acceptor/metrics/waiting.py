"""How long the first record that a group has not read, or a share group has not finished, has waited,
by its timestamp.

Timestamps are read from the files of this host's replicas, for each log directory in the thread that
measures the directory (see directories.py): if a directory hangs, only the ages of its own groups are missing.
Bound: LOOKUPS_MAX reads a measurement, the oldest results first; a group's earlier age, which is
too high if it has moved, is shown until its turn comes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mqd.acceptor.broker import Broker
from mqd.acceptor.metrics.positions import positions
from mqd.cluster.host.messages import PartitionImage
from mqd.log import lookup
from mqd.log.batches import CorruptBatch
from mqd.native import SlotView

LOOKUPS_MAX = 200

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
        for one in positions(self._broker):
            about = self._broker.metadata.topics.get(one.topic)
            image = self._broker.partition_of(one.topic, one.partition)
            if about is None or image is None or image.log_dir != self._log_dir:
                continue
            view = self._broker.replica_view(image)
            if view is not None and one.offset < view.high_watermark:
                yield (one.group, one.topic, one.partition), _Unread(image, about.topic_id, one.offset, view)
