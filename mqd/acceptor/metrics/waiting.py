"""The age, by timestamp, of the first record that a group has not read yet (or that a share group has
not finished yet).

Timestamps are read from the files of this host's replicas, for each log directory in a thread of
its own (see directories.py): if a directory hangs, only the ages in its partitions are out of date.
Bound: each measurement reads at most LOOKUPS_MAX timestamps and replaces the oldest results first.
Until a result is replaced, the previous age is shown, which is too high if the group has advanced.
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

GroupPartition = tuple[str, str, int]  # group, topic, partition


class WaitingRecord(NamedTuple):
    """The first record that a group has not read: the first at or after `offset`. `since_ms`: its
    timestamp; -1 = it cannot be read. `round_number`: the measurement that read the timestamp.
    """

    round_number: int
    topic_id: bytes
    offset: int
    since_ms: int


class _UnreadPosition(NamedTuple):
    image: PartitionImage
    topic_id: bytes
    offset: int
    view: SlotView


class WaitingTimes:
    """The waiting records in one log directory. Used by one thread at a time."""

    def __init__(self, broker: Broker, log_dir: int) -> None:
        self._broker, self._log_dir = broker, log_dir
        self._results: dict[GroupPartition, WaitingRecord] = {}
        self._round_number = 0

    def measure(self) -> dict[GroupPartition, WaitingRecord]:
        """Reads timestamps, and returns all results. Blocks until the directory responds."""
        self._round_number += 1
        unread = dict(self._unread())
        results = {
            key: result
            for key, result in self._results.items()
            if key in unread and result.topic_id == unread[key].topic_id
        }
        changed_keys = [
            key for key, position in unread.items() if key not in results or results[key].offset != position.offset
        ]
        changed_keys.sort(key=lambda key: results[key].round_number if key in results else 0)
        for key in changed_keys[:LOOKUPS_MAX]:
            position = unread[key]
            results[key] = WaitingRecord(
                self._round_number, position.topic_id, position.offset, self._since_ms(key, position)
            )
        self._results = results
        return results

    def _since_ms(self, key: GroupPartition, position: _UnreadPosition) -> int:
        view = position.view
        try:
            path = self._broker.path_of(key[1], position.image)
            record = lookup.timestamp_at_or_after(path, position.offset, view.log_start_offset, view.high_watermark)
        except (OSError, CorruptBatch):
            return -1
        return record.timestamp_ms

    def _unread(self) -> Iterator[tuple[GroupPartition, _UnreadPosition]]:
        for position in positions(self._broker):
            topic = self._broker.metadata.topics.get(position.topic)
            image = self._broker.partition_of(position.topic, position.partition)
            if topic is None or image is None or image.log_dir != self._log_dir:
                continue
            view = self._broker.replica_view(image)
            if view is not None and position.offset < view.high_watermark:
                yield (
                    (position.group, position.topic, position.partition),
                    _UnreadPosition(image, topic.topic_id, position.offset, view),
                )
