"""The committed offsets of one group: a pure part of the group's core. The group decides which
members may commit; this module holds what is committed.

Offsets are kept as the bytes of their records and decoded on request, because a coordinator can
have a million. An offset of a transaction is pending until the transaction's marker. Then it
becomes the committed offset, unless the current one was written after it: the order of the writes
decides, not that of the markers (as in Kafka, which compares the records' offsets).

Invariants (check())
    O1  no topic without partitions, no transaction without offsets
    O2  every committed or pending value can be decoded
    O3  the expiration timer is armed when something is committed
    O4  write numbers are kept only while something is pending
    O5  `size_bytes` is the sum over all committed and pending offsets
Bounds: one record for each partition that clients name (the handler checks that it exists), and
one pending record for each partition in each open transaction. A record is at most slightly longer
than offset.metadata.max.bytes. A commit is one batch of at most commit_bytes_max;
tombstones may need several batches.

Expiration follows Kafka (KIP-211). An offset expires `retention_ms` after it was committed, or
after the group became empty if it had members. While the group has members, only offsets of topics
it does not subscribe to expire. An offset with its own expiration time (OffsetCommit 2-4) expires
then. A partition with a pending offset keeps its committed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol
from zlib import crc32

import msgspec

from mqd.coordinator.actions import Action, KeyValue, Persist, Reply, Timer, TransactionEnded, as_persists
from mqd.coordinator.group.records import (
    OffsetValue,
    decode_offset_value,
    encode_expiring_offset_value,
    encode_offset_key,
    encode_offset_value,
)
from mqd.log.schedule_headers import GROUP_PREFIX
from mqd.protocol.errors import ErrorCode

EXPIRATION_TIMER = "offsets.expiration"
# The timer is armed at least this far ahead: if it were due immediately, it would fire again and
# again, and keep the coordinator busy.
CHECK_INTERVAL_MS_MIN = 100
TIME_MAX_MS = 2**63 - 1
# Memory of an offset without its value's bytes, and of a topic that has offsets: measured, rounded
# up.
OFFSET_BYTES = 100
TOPIC_BYTES = 400
_VALUE_BYTES = 24  # size of an offset's value without metadata
_RECORD_BYTES = 80  # upper bound on one offset's record without its names and metadata
KEEP = -1  # Membership.empty_since_ms: nothing expires now


class OffsetsSettings(msgspec.Struct, frozen=True):
    retention_ms: int = 7 * 24 * 3600 * 1000
    check_interval_ms: int = 600_000
    metadata_bytes_max: int = 4096
    commit_bytes_max: int = (4 << 20) - 4096  # a commit is one batch, so that it is atomic


# -- events ----------------------------------------------------------------------------------------


class CommittedOffset(msgspec.Struct, frozen=True, gc=False):
    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class CommitOffsets(msgspec.Struct, frozen=True):
    """OffsetCommit, or TxnOffsetCommit if it has a producer id. `generation` is the member epoch in
    KIP-848 groups; -1 with an empty member id means that the sender is not a member. `retention_ms`
    -1: the broker's default. Reply: OffsetsCommitted.
    """

    request: int
    version: int
    member_id: str
    group_instance_id: str | None
    generation: int
    offsets: tuple[CommittedOffset, ...]
    retention_ms: int = -1
    producer_id: int = -1
    producer_epoch: int = -1

    @property
    def is_transactional(self) -> bool:
        return self.producer_id >= 0


class OffsetsCommitted(msgspec.Struct, frozen=True, gc=False):
    """`errors`: one for each offset, in request order. A non-zero `error` applies to all offsets."""

    error: int
    errors: tuple[int, ...] = ()


class FetchOffsets(msgspec.Struct, frozen=True):
    """`topics` None: all committed offsets. Reply: OffsetsFetched."""

    request: int
    topics: tuple[tuple[str, tuple[int, ...]], ...] | None
    require_stable: bool = False
    member_id: str | None = None
    member_epoch: int = -1


class FetchedOffset(msgspec.Struct, frozen=True, gc=False):
    partition: int
    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    error: int = 0


class OffsetsFetched(msgspec.Struct, frozen=True, gc=False):
    error: int
    topics: tuple[tuple[str, tuple[FetchedOffset, ...]], ...] = ()


class DeleteOffsets(msgspec.Struct, frozen=True):
    """OffsetDelete. Reply: OffsetsDeleted."""

    request: int
    topics: tuple[tuple[str, tuple[int, ...]], ...]


class OffsetsDeleted(msgspec.Struct, frozen=True, gc=False):
    error: int
    errors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # by topic and partition, in request order


class PartitionsGone(msgspec.Struct, frozen=True):
    """Partitions were deleted; their offsets must be deleted too. No reply."""

    remaining_counts: dict[str, int]  # topic -> number of partitions that remain; 0: the topic is deleted


OFFSET_EVENTS = (CommitOffsets, FetchOffsets, DeleteOffsets, PartitionsGone, TransactionEnded)


class Membership(Protocol):
    """The part of a group that its offsets need. Error codes are Kafka's; 0 = no error."""

    def commit_error(self, event: CommitOffsets) -> int: ...

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int: ...

    def delete_error(self) -> int:
        """The error for a whole OffsetDelete, for example NON_EMPTY_GROUP."""

    def is_subscribed(self, topic: str) -> bool:
        """Whether a member subscribes to the topic. If the members' topics are unknown
        (empty_since_ms() then returns KEEP): True for the protocol type "consumer", otherwise
        False.
        """

    def empty_since_ms(self) -> int | None:
        """The time from which the group's offsets age. None: from their commit. KEEP: they do not
        expire now (the members' topics are unknown). Otherwise the time at which the group became
        empty.
        """

    def on_committed(self, event: CommitOffsets, now_ms: int) -> list[Action]:
        """Called when a member has committed, which shows that it is alive."""


class Offsets:
    def __init__(self, group_id: str, settings: OffsetsSettings) -> None:
        self.group_id = group_id
        self._settings = settings
        self._committed: dict[str, dict[int, bytes]] = {}
        # producer id -> partition -> (write number, value); None: superseded, will never be
        # committed
        self._pending: dict[int, dict[tuple[str, int], tuple[int, bytes | None]]] = {}
        # The write number of each committed record, or of its deletion. Kept only while something
        # is pending; a record without an entry is older than all pending ones.
        self._write_numbers: dict[tuple[str, int], int] = {}
        self._write_count = 0
        self._is_armed = False
        self.size_bytes = 0  # approximate size in memory

    @property
    def is_empty(self) -> bool:
        return not self._committed and not self._pending

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._committed)

    def partitions(self, topic: str) -> tuple[int, ...]:
        return tuple(self._committed.get(topic, ()))

    def has_offsets_of_any(self, topics: Collection[str]) -> bool:
        """Whether an offset is committed or pending for one of these topics."""
        return any(topic in self._committed for topic in topics) or any(
            topic in topics for pending in self._pending.values() for topic, _ in pending
        )

    def partition_ends(self) -> dict[str, int]:
        """Topic -> the index after its last partition with a committed or pending offset."""
        ends = {topic: max(partitions) + 1 for topic, partitions in self._committed.items()}
        for pending in self._pending.values():
            for topic, partition in pending:
                ends[topic] = max(ends.get(topic, 0), partition + 1)
        return ends

    def __len__(self) -> int:
        return sum(map(len, self._committed.values()))

    def get(self, topic: str, partition: int) -> OffsetValue | None:
        value = self._committed.get(topic, {}).get(partition)
        return decode_offset_value(value) if value is not None else None

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, group: Membership, now_ms: int) -> list[Action]:
        """Handles one of OFFSET_EVENTS."""
        match event:
            case CommitOffsets():
                return self._on_commit(event, group, now_ms)
            case FetchOffsets():
                return [Reply(event.request, self._fetch(event, group))]
            case DeleteOffsets():
                return self._on_delete(event, group)
            case PartitionsGone():
                return self._on_partitions_gone(event)
            case TransactionEnded():
                self._end_transaction(event.producer_id, event.committed)
                return self._arm(now_ms)
        raise TypeError(f"{type(event).__name__} is not an event of committed offsets")

    def _on_commit(self, event: CommitOffsets, group: Membership, now_ms: int) -> list[Action]:
        error = group.commit_error(event) or self._size_error(event)
        if error:
            return [Reply(event.request, OffsetsCommitted(error))]
        errors: list[int] = []
        records: list[KeyValue] = []
        for entry in event.offsets:
            if len(entry.metadata.encode()) > self._settings.metadata_bytes_max:
                errors.append(int(ErrorCode.OFFSET_METADATA_TOO_LARGE))
                continue
            errors.append(0)
            value = self._encode_value(entry, event.retention_ms, now_ms)
            records.append((encode_offset_key(self.group_id, entry.topic, entry.partition), value))
            self._write_count += 1
            if event.is_transactional:
                self._put_pending(event.producer_id, entry.topic, entry.partition, value)
            else:
                self._put(entry.topic, entry.partition, value, self._write_count)
        actions = group.on_committed(event, now_ms)
        if records:
            actions.append(
                Persist(tuple(records), event.producer_id, event.producer_epoch if event.is_transactional else -1)
            )
            actions += self._arm(now_ms)
        actions.append(Reply(event.request, OffsetsCommitted(0, tuple(errors))))
        return actions

    def _size_error(self, event: CommitOffsets) -> int:
        """Returns INVALID_COMMIT_OFFSET_SIZE, as Kafka does, if the commit is too large for one
        batch; otherwise 0. For small commits a rough estimate suffices.
        """
        count, metadata_max = len(event.offsets), self._settings.metadata_bytes_max
        longest = max((len(entry.topic) + min(len(entry.metadata), metadata_max) for entry in event.offsets), default=0)
        if count * (_RECORD_BYTES + 4 * (len(self.group_id) + longest)) <= self._settings.commit_bytes_max:
            return 0
        fixed_bytes = _RECORD_BYTES + len(self.group_id.encode())
        size = sum(
            fixed_bytes + len(entry.topic) + min(len(entry.metadata.encode()), metadata_max) for entry in event.offsets
        )
        return int(ErrorCode.INVALID_COMMIT_OFFSET_SIZE) if size > self._settings.commit_bytes_max else 0

    @staticmethod
    def _encode_value(entry: CommittedOffset, retention_ms: int, now_ms: int) -> bytes:
        if retention_ms >= 0:
            return encode_expiring_offset_value(
                entry.offset, entry.metadata, now_ms, min(now_ms + retention_ms, TIME_MAX_MS)
            )
        return encode_offset_value(entry.offset, entry.leader_epoch, entry.metadata, now_ms)

    def _put(self, topic: str, partition: int, value: bytes, write_number: int) -> None:
        partitions = self._committed.get(topic)
        if partitions is None:
            partitions = self._committed[topic] = {}
            self.size_bytes += TOPIC_BYTES + len(topic)
        old_value = partitions.get(partition)
        self.size_bytes += len(value) - len(old_value) if old_value is not None else OFFSET_BYTES + len(value)
        partitions[partition] = value
        if self._pending:
            self._write_numbers[topic, partition] = write_number

    def _put_pending(self, producer_id: int, topic: str, partition: int, value: bytes | None) -> None:
        pending = self._pending.setdefault(producer_id, {})
        old_entry = pending.get((topic, partition))
        if old_entry is not None:
            self.size_bytes -= _pending_bytes(topic, old_entry[1])
        self.size_bytes += _pending_bytes(topic, value)
        pending[topic, partition] = (self._write_count, value)

    def _remove(self, topic: str, partition: int) -> None:
        partitions = self._committed[topic]
        self.size_bytes -= OFFSET_BYTES + len(partitions.pop(partition))
        if not partitions:
            del self._committed[topic]
            self.size_bytes -= TOPIC_BYTES + len(topic)

    def _end_transaction(self, producer_id: int, committed: bool) -> None:
        pending = self._pending.pop(producer_id, {})
        self.size_bytes -= sum(_pending_bytes(topic, value) for (topic, _), (_, value) in pending.items())
        if committed:
            for (topic, partition), (write_number, value) in pending.items():
                if value is not None and self._write_numbers.get((topic, partition), -1) < write_number:
                    self._put(topic, partition, value, write_number)
        if not self._pending:
            self._write_numbers.clear()

    def _is_pending(self, topic: str, partition: int) -> bool:
        return any((topic, partition) in pending for pending in self._pending.values())

    # -- fetching ----------------------------------------------------------------------------------

    def _fetch(self, event: FetchOffsets, group: Membership) -> OffsetsFetched:
        error = group.fetch_error(event.member_id, event.member_epoch)
        if error:
            return OffsetsFetched(error)
        topics = event.topics
        if topics is None:
            topics = tuple((topic, tuple(sorted(partitions))) for topic, partitions in sorted(self._committed.items()))
        return OffsetsFetched(
            0,
            tuple(
                (
                    topic,
                    tuple(self._fetch_partition(topic, partition, event.require_stable) for partition in partitions),
                )
                for topic, partitions in topics
            ),
        )

    def _fetch_partition(self, topic: str, partition: int, require_stable: bool) -> FetchedOffset:
        if require_stable and self._pending and self._is_pending(topic, partition):
            return FetchedOffset(partition, error=int(ErrorCode.UNSTABLE_OFFSET_COMMIT))
        value = self.get(topic, partition)
        return (
            FetchedOffset(partition, value.offset, value.leader_epoch, value.metadata)
            if value is not None
            else FetchedOffset(partition)
        )

    # -- deletion ----------------------------------------------------------------------------------

    def _on_delete(self, event: DeleteOffsets, group: Membership) -> list[Action]:
        error = group.delete_error()
        if error:
            return [Reply(event.request, OffsetsDeleted(error))]
        records: list[KeyValue] = []
        errors = []
        for topic, partitions in event.topics:
            subscribed = group.is_subscribed(topic)
            errors.append(
                (topic, tuple(int(ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC) if subscribed else 0 for _ in partitions))
            )
            if not subscribed:
                records += self._delete((topic, partition) for partition in dict.fromkeys(partitions))
        return [*as_persists(records), Reply(event.request, OffsetsDeleted(0, tuple(errors)))]

    def _on_partitions_gone(self, event: PartitionsGone) -> list[Action]:
        gone_partitions = [
            (topic, partition)
            for topic, remaining_count in event.remaining_counts.items()
            for partition in self._committed.get(topic, ())
            if partition >= remaining_count
        ]
        gone_partitions += [
            (topic, partition)
            for pending in self._pending.values()
            for topic, partition in pending
            if partition >= event.remaining_counts.get(topic, partition + 1)
        ]
        return list(as_persists(self._delete(dict.fromkeys(gone_partitions))))

    def _delete(self, partitions: Iterable[tuple[str, int]]) -> list[KeyValue]:
        """Deletes these partitions' offsets, committed and pending; returns the tombstones."""
        records: list[KeyValue] = []
        for topic, partition in partitions:
            had_offset = partition in self._committed.get(topic, ())
            if had_offset:
                self._remove(topic, partition)
            if self._pending and self._is_pending(topic, partition):
                self._write_count += 1
                self._write_numbers[topic, partition] = self._write_count
                had_offset = True
            if had_offset:
                records.append((encode_offset_key(self.group_id, topic, partition), None))
        return records

    def delete_all(self) -> list[KeyValue]:
        """Deletes all offsets, because the group is deleted. Returns the tombstones."""
        records = self._delete(
            [(topic, partition) for topic, partitions in self._committed.items() for partition in partitions]
        )
        return records + self._delete(
            dict.fromkeys(partition for pending in self._pending.values() for partition in pending)
        )

    # -- expiration --------------------------------------------------------------------------------

    def _arm(self, now_ms: int) -> list[Action]:
        if self._is_armed or not self._committed:
            return []
        self._is_armed = True
        interval_ms = max(self._settings.check_interval_ms, CHECK_INTERVAL_MS_MIN)
        # Spreads the groups' checks in time: after a restart, ten thousand groups may arm their
        # timers at the same time.
        return [
            Timer(
                EXPIRATION_TIMER, now_ms + interval_ms // 2 + crc32(self.group_id.encode()) % max(interval_ms // 2, 1)
            )
        ]

    def on_loaded(self, now_ms: int) -> list[Action]:
        self.size_bytes = self._measure_bytes()
        return self._arm(now_ms)

    def on_expiration_timer(self, group: Membership, now_ms: int) -> tuple[list[Action], bool]:
        """Handles TimerFired(EXPIRATION_TIMER). Returns the actions, and whether the last offset
        expired; a group without members may then be removed.
        """
        self._is_armed = False
        count_before = len(self)
        records = self._delete(self._expired_offsets(group, now_ms))
        return [*as_persists(records), *self._arm(now_ms)], count_before > 0 and self.is_empty

    def _expired_offsets(self, group: Membership, now_ms: int) -> list[tuple[str, int]]:
        since_ms = group.empty_since_ms()
        # the progress of a schedule is needed as long as its topic exists
        if since_ms == KEEP or self.group_id.startswith(GROUP_PREFIX):
            return []
        expired = []
        for topic, partitions in self._committed.items():
            if group.is_subscribed(topic):
                continue
            for partition, value in partitions.items():
                if self._is_expired(decode_offset_value(value), since_ms, now_ms) and not self._is_pending(
                    topic, partition
                ):
                    expired.append((topic, partition))
        return expired

    def _is_expired(self, value: OffsetValue, since_ms: int | None, now_ms: int) -> bool:
        if value.expire_timestamp_ms >= 0:
            return now_ms >= value.expire_timestamp_ms
        return now_ms - (value.commit_timestamp_ms if since_ms is None else since_ms) >= self._settings.retention_ms

    # -- loading -----------------------------------------------------------------------------------

    def table(self, topic: str) -> dict[int, bytes]:
        """Partition -> the value of its record. Only for bulk loading, before any event."""
        return self._committed.setdefault(topic, {})

    def drop_if_empty(self, topic: str) -> None:
        if topic in self._committed and not self._committed[topic]:
            del self._committed[topic]

    def replay(self, topic: str, partition: int, value: bytes | None) -> None:
        """Applies one record. Raises ValueError for a value that cannot be read."""
        if value is not None:
            decode_offset_value(value)
            self._write_count += 1
            self._put(topic, partition, value, self._write_count)
        elif partition in self._committed.get(topic, ()):
            self._remove(topic, partition)

    def replay_pending(self, topic: str, partition: int, value: bytes | None, producer_id: int) -> None:
        """Applies a record of an open transaction. `value` None: it is already superseded, but the
        partition's offset is still unstable. Records with a value come in the order in which they
        were written, after the committed records.
        """
        if value is not None:
            decode_offset_value(value)
        self._write_count += 1
        self._put_pending(producer_id, topic, partition, value)

    def _measure_bytes(self) -> int:
        committed = sum(
            TOPIC_BYTES + len(topic) + OFFSET_BYTES * len(values) + sum(map(len, values.values()))
            for topic, values in self._committed.items()
        )
        return committed + sum(
            _pending_bytes(topic, value)
            for pending in self._pending.values()
            for (topic, _), (_, value) in pending.items()
        )

    def growth_bytes(self, event: CommitOffsets) -> int:
        """Upper bound on the additional memory after this commit; 0 if it only replaces offsets
        with values of the same size.
        """
        metadata_max, growth, new_topics = self._settings.metadata_bytes_max, 0, set()
        for entry in event.offsets:
            value_bytes = _VALUE_BYTES + min(len(entry.metadata.encode()), metadata_max)
            partitions = self._committed.get(entry.topic)
            old_value = (
                partitions.get(entry.partition) if partitions is not None and not event.is_transactional else None
            )
            growth += 2 * OFFSET_BYTES + value_bytes if old_value is None else max(0, value_bytes - len(old_value))
            if partitions is None:
                new_topics.add(entry.topic)
        return growth + sum(TOPIC_BYTES + len(topic) for topic in new_topics)

    def check(self) -> None:
        assert all(self._committed.values()) and all(self._pending.values()), "O1"
        for partitions in self._committed.values():
            for value in partitions.values():
                decode_offset_value(value)
        assert not self._committed or self._is_armed, "O3"
        assert self._pending or not self._write_numbers, "O4"
        assert self.size_bytes == self._measure_bytes(), f"O5: {self.size_bytes} != {self._measure_bytes()}"


def _pending_bytes(topic: str, value: bytes | None) -> int:
    return 2 * OFFSET_BYTES + len(topic) + len(value or b"")
