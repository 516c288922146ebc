"""A consumer's assigned partitions: their positions, and which one is read next.

P1  `fetched` is the next offset to read, `position` the offset after the last record that the
    application received (OFFSET_INVALID: none yet), `stored` the offset of the next commit
P2  a partition is read only when ACTIVE and not paused; partitions take turns, one chunk each, so
    that a busy one does not delay the others
P3  a response for a partition is ignored if `serial` has changed since the request: seek, unassign
    and a new start change it
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from mqd.client.messages import OFFSET_INVALID
from mqd.client.offsets import Key


class Phase(enum.IntEnum):
    TOPIC = 0  # its topic id is not known yet
    COMMITTED = 1  # the next step requests the group's committed offset
    LIST = 2  # the next step requests its start or end offset
    REQUESTING = 3  # a request for it is in flight
    ACTIVE = 4
    FAILED = 5  # retried at retry_at


class AssignedPartition:
    """An assigned partition: its position in the log, and the state of its start."""

    __slots__ = (
        "committed",
        "eof_reported_at",
        "fetched",
        "received_end",
        "index",
        "is_unknown",
        "leader_epoch",
        "paused",
        "phase",
        "position",
        "reader",
        "remote_replicas",
        "retry_at",
        "serial",
        "requested_start",
        "start",
        "stored",
        "stored_epoch",
        "stored_metadata",
        "timestamp",
        "reported_error",
        "topic",
        "topic_id",
        "unknown_since",
    )

    def __init__(self, topic: str, index: int, start: int = OFFSET_INVALID, topic_id: bytes | None = None) -> None:
        self.topic, self.index, self.start, self.topic_id = topic, index, start, topic_id
        self.phase = Phase.TOPIC
        self.paused = False
        self.reader: Any = None
        self.fetched = self.position = self.stored = self.committed = self.eof_reported_at = OFFSET_INVALID
        self.stored_epoch = self.leader_epoch = -1
        self.stored_metadata: str | None = None
        self.timestamp = 0  # for LIST: the timestamp in the ListOffsets request
        self.retry_at = 0.0
        # while the partition is read from another host: its replicas when that began; None: it is read
        # from this host
        self.remote_replicas: object = None
        self.serial = 0  # P3
        # time.monotonic() when the partition was first missing from the metadata; None: it is there
        self.unknown_since: float | None = None
        # the start that the application requested; None: it requested none, or has received a record since
        self.requested_start = None if start == OFFSET_INVALID else start
        # the offset after the last record received since the topic was recreated (0: none yet); None:
        # the topic was not recreated
        self.received_end: int | None = None
        self.is_unknown = False  # the broker did not know the partition at the last read
        self.reported_error = 0  # the error last reported to the application

    @property
    def key(self) -> Key:
        return self.topic, self.index

    def restart(self) -> None:
        """Resets the state because the topic was recreated: only the requested start stays valid."""
        self.serial += 1
        self.start = OFFSET_INVALID if self.requested_start is None else self.requested_start
        self.fetched = self.position = self.stored = self.committed = self.eof_reported_at = OFFSET_INVALID
        self.stored_epoch = self.leader_epoch = -1
        self.stored_metadata = None
        self.received_end = 0
        self.is_unknown = False
        self.reported_error = 0

    def close(self) -> None:
        self.serial += 1
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def __repr__(self) -> str:
        return f"<{self.topic} [{self.index}] {self.phase.name} at {self.fetched}{' paused' if self.paused else ''}>"


class AssignedPartitions:
    """The assignment. One thread at a time."""

    def __init__(self) -> None:
        self._by_key: dict[Key, AssignedPartition] = {}
        self._turns: deque[AssignedPartition] = deque()
        self.version = 0  # changes with the assignment

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[AssignedPartition]:
        return iter(list(self._by_key.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def get(self, key: Key) -> AssignedPartition | None:
        return self._by_key.get(key)

    def add(self, part: AssignedPartition) -> None:
        self._by_key[part.key] = part
        self._turns.append(part)
        self.version += 1

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            part = self._by_key.pop(key, None)
            if part is not None:
                self._turns.remove(part)
                part.close()
        self.version += 1

    def turns(self) -> Iterator[AssignedPartition]:
        """Yields all readable partitions once, the longest waiting first, and moves each to the end of
        the order.
        """
        turns = self._turns
        for _ in range(len(turns)):
            part = turns[0]
            turns.rotate(-1)
            if part.phase is Phase.ACTIVE and not part.paused:
                yield part
