"""Records between produce() and the C core: a list for each topic, handed over in bulk.

The time budget of a record allows little more than one append to a Python list. An entry is the value
itself if a record has only a value, (value, partition), (value, key) or (value, key, partition) if it
has only these, else a FullEntry. From time to time the whole list is turned into columns: one join,
one pass for the sizes, one call into C.

1. The list is never replaced: appends need no lock, and taken entries are deleted from its front, so
   that a concurrent append is neither lost nor duplicated.
2. Values, pairs and triples have no timestamp of their own; their timestamps are in `marks`: (number
   of earlier records, milliseconds), one mark for each millisecond with records.
3. `armed` is set by the thread that appends and cleared before entries are taken, so that an entry is
   either taken now or another turn has been requested.
Concurrency: append by any thread; everything else with the attachment's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from mqd.client import columns
from mqd.client.columns import Column
from mqd.client.messages import KafkaError, failure
from mqd.native.client import Columns

_first, _second, _third, _last = itemgetter(0), itemgetter(1), itemgetter(2), itemgetter(-1)
STAGE_MAX = 1024  # records passed on in one call: more would not fit the CPU's caches


class FullEntry(NamedTuple):
    """A record with more than a value, key and partition. `headers` are encoded, `original_headers`
    are as passed to produce(); `began` is time.monotonic() at produce(), for the latency in a delivery
    report.
    """

    value: bytes | None
    key: bytes | None
    partition: int
    timestamp_ms: int
    headers: bytes | None
    on_delivery: Any
    began: float
    original_headers: Any


class Refused(Exception):
    """Raised when a batch, or the first of the records to append, can never be accepted. `error` is for
    the delivery report.
    """

    def __init__(self, error: KafkaError) -> None:
        super().__init__(error.str())
        self.error = error


class TakenCount:
    """The number of records of an append() call that the C core or the compressor has accepted. The
    caller owns it and reads it even when append() raises.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Stage:
    """Records produced to one topic that have not been passed on yet. `number`: the topic's number in
    the C core, -1 = not registered there yet.
    """

    __slots__ = (
        "armed",
        "due",
        "entries",
        "limit",
        "mark_end_s",
        "mark_start_s",
        "marks",
        "number",
        "partition_count",
        "released_count",
        "topic",
        "unresolved_since",
        "next_request_at",
    )

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.entries: list[Any] = []
        self.limit = 0  # length of `entries` at which produce() must make room first
        self.armed = False
        self.due = 0.0
        self.mark_start_s = self.mark_end_s = 0.0  # time.time; the millisecond of the last mark
        self.marks: list[tuple[int, int]] = []
        self.released_count = 0  # entries removed so far
        self.number = -1
        self.partition_count = 0
        self.unresolved_since = 0.0  # time.monotonic; the topic's metadata has been unknown since then
        self.next_request_at = 0.0  # time.monotonic; no metadata is requested for the topic before then

    def mark(self) -> None:
        """Sets the timestamp of the following entries to the current time."""
        now_ms = time.time_ns() // 1_000_000
        self.mark_start_s, self.mark_end_s = now_ms / 1000, (now_ms + 1) / 1000
        self.marks.append((self.released_count + len(self.entries), now_ms))

    def release(self, count: int) -> None:
        """Removes the first `count` entries and lowers the limit by `count`."""
        self.limit = max(self.limit - count, 0)
        del self.entries[:count]
        self.released_count += count
        marks = self.marks
        first_kept = 0
        while first_kept + 1 < len(marks) and marks[first_kept + 1][0] <= self.released_count:
            first_kept += 1
        if first_kept:
            del marks[:first_kept]

    def timestamps_of_first(self, count: int) -> tuple[int, np.ndarray | None]:
        """Returns the timestamps of the first `count` entries in milliseconds: (timestamp, None) if all
        are equal, else (first timestamp, array of all). A FullEntry has its own timestamp, which replaces
        the one returned here.
        """
        marks, end = self.marks, self.released_count + count
        if not marks:
            return 0, None
        if len(marks) == 1 or marks[1][0] >= end:
            return marks[0][1], None
        covering = [mark for mark in marks if mark[0] < end]
        # each entry before the first mark is a FullEntry, with its own timestamp
        starts = [self.released_count, *(position for position, _ in covering[1:]), end]
        return marks[0][1], np.repeat(np.array([ms for _, ms in covering], np.int64), np.diff(starts))


class Chunk(NamedTuple):
    """Columns for one call into C. `entries`: the records as FullEntry objects, if any of them has a delivery
    callback.
    """

    values: Column
    keys: Column | None
    headers: Column | None
    partitions: np.ndarray | None
    timestamp_ms: int
    timestamps: np.ndarray | None
    entries: list[Any] | None = None
    partition: int = -1  # the partition of all records, if `partitions` is None

    def part(self, start: int, end: int) -> Chunk:
        """Returns records start .. end - 1, without `entries`, as a chunk that shares the buffers."""
        return Chunk(
            self.values.part(start, end),
            self.keys and self.keys.part(start, end),
            self.headers and self.headers.part(start, end),
            None if self.partitions is None else self.partitions[start:end],
            self.timestamp_ms,
            None if self.timestamps is None else self.timestamps[start:end],
            None,
            self.partition,
        )


def chunk_of_arguments(values: Any, keys: Any, headers: Any, partition: Any, timestamps: Any, bytes_max: int) -> Chunk:
    """Checks the arguments of produce_batch and returns them as columns. Raises TypeError, ValueError,
    KafkaException (MSG_SIZE_TOO_LARGE, _UNKNOWN_PARTITION).
    """
    packed = columns.pack(values, "values")
    count = packed.count
    packed_keys = None if keys is None else columns.pack_keys(keys, count)
    largest = packed.largest_bytes() + (packed_keys.largest_bytes() if packed_keys is not None else 0)
    if largest > bytes_max and columns.largest_record_bytes(packed, packed_keys) > bytes_max:
        raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Unable to produce message: Broker: Message size too large")
    single_partition, partitions = columns.pack_partitions(partition, count)
    timestamp_ms, times = columns.pack_timestamps(timestamps, count, time.time_ns() // 1_000_000)
    return Chunk(
        packed,
        packed_keys,
        columns.pack_headers(headers, count),
        partitions,
        timestamp_ms,
        times,
        None,
        single_partition,
    )


def chunk_of(stage: Stage, count: int) -> Chunk:
    """Returns the first `count` entries as columns. The entries stay in the stage until release()."""
    entries = stage.entries[:count]
    timestamp_ms, timestamps = stage.timestamps_of_first(count)
    try:
        data = b"".join(entries)
    except TypeError:  # entries that are tuples
        first = entries[0]
        if type(first) is tuple:
            likely = _chunk_of_pairs if type(first[1]) is int else _chunk_with_keys
            for make in (likely, _chunk_with_partitions):
                try:
                    return make(entries, timestamp_ms, timestamps)
                except (TypeError, IndexError):  # the entries have other shapes
                    pass
        return _chunk_of_mixed(entries, timestamp_ms, timestamps)
    sizes = np.fromiter(map(len, entries), np.int32, count)
    return Chunk(Column(count, data, sizes), None, None, None, timestamp_ms, timestamps)


# The next three take a ninth to a quarter of the time of _chunk_of_mixed. A value or a key that is not
# bytes raises TypeError when the column is joined. So do the items of an entry that is itself bytes;
# one that is empty raises IndexError.


def _chunk_of_pairs(entries: list[Any], timestamp_ms: int, timestamps: np.ndarray | None) -> Chunk:
    """Raises TypeError if not all entries are (value, partition)."""
    values, partitions = _joined(list(map(_first, entries))), list(map(_second, entries))
    sum(partitions)  # refuses keys, which numpy would convert if they consist of digits
    return Chunk(values, None, None, np.array(partitions, np.int32), timestamp_ms, timestamps)


def _chunk_with_keys(entries: list[Any], timestamp_ms: int, timestamps: np.ndarray | None) -> Chunk:
    """Raises TypeError if not all entries are (value, key), or all (value, key, partition)."""
    if len(lengths := set(map(len, entries))) > 1:
        raise TypeError(f"entries of the lengths {lengths}")
    values, keys = _joined(list(map(_first, entries))), _joined(list(map(_second, entries)))
    partitions = np.fromiter(map(_third, entries), np.int32, len(entries)) if lengths == {3} else None
    return Chunk(values, keys, None, partitions, timestamp_ms, timestamps)


def _chunk_with_partitions(entries: list[Any], timestamp_ms: int, timestamps: np.ndarray | None) -> Chunk:
    """Raises TypeError if not all entries are (value, partition) or (value, key, partition)."""
    if set(map(type, entries)) != {tuple}:
        raise TypeError("entries that are no tuples")
    values, partitions = _joined(list(map(_first, entries))), list(map(_last, entries))
    sum(partitions)
    keys = [entry[1] if len(entry) == 3 else None for entry in entries]
    return Chunk(values, _column(keys), None, np.array(partitions, np.int32), timestamp_ms, timestamps)


def _joined(items: Sequence[Any]) -> Column:
    """Raises TypeError if not all items are bytes."""
    return Column(len(items), b"".join(items), np.fromiter(map(len, items), np.int32, len(items)))


def _chunk_of_mixed(entries: list[Any], timestamp_ms: int, timestamps: np.ndarray | None) -> Chunk:
    count = len(entries)
    times_ms = [timestamp_ms] * count if timestamps is None else timestamps.tolist()
    full_entries = [
        entry if type(entry) is FullEntry else _entry(entry, times_ms[index]) for index, entry in enumerate(entries)
    ]
    values, keys, partitions, times, headers, callbacks, _, _ = zip(*full_entries, strict=True)
    return Chunk(
        _column(values),
        _column_or_none(keys),
        _encoded_headers(headers) if any(headers) else None,
        np.array(partitions, np.int32) if any(partition >= 0 for partition in partitions) else None,
        timestamp_ms,
        np.array(times, np.int64),
        full_entries if any(callbacks) else None,
    )


def _entry(entry: Any, timestamp_ms: int) -> FullEntry:
    value, key, partition = entry, None, -1
    if type(entry) is tuple:
        value, *others = entry
        if type(others[0]) is bytes:
            key = others.pop(0)
        if others:
            (partition,) = others
    return FullEntry(value, key, partition, timestamp_ms, None, None, 0.0, None)


def _column(items: Sequence[Any]) -> Column:
    try:
        return _joined(items)
    except TypeError:
        sizes = np.fromiter((-1 if item is None else len(item) for item in items), np.int32, len(items))
        return Column(len(items), b"".join([item for item in items if item is not None]), sizes)


def _column_or_none(items: Sequence[Any]) -> Column | None:
    return None if items.count(None) == len(items) else _column(items)


def _encoded_headers(items: tuple[bytes | None, ...]) -> Column:
    """Returns the column of encoded headers; a record without headers gets a count of zero."""
    return _column(tuple(b"\0" if item is None else item for item in items))


def native_columns(chunk: Chunk) -> Columns:
    """Returns the columns in the form that the C core takes. They refer to the chunk's buffers."""
    values, keys, headers = chunk.values, chunk.keys, chunk.headers
    native = Columns(
        count=values.count,
        values=values.data,
        value_bytes=values.sizes,
        fixed_value_bytes=values.fixed_bytes,
        partitions=chunk.partitions,
        partition=chunk.partition,
        timestamps_ms=chunk.timestamps,
        timestamp_ms=chunk.timestamp_ms,
    )
    if keys is not None:
        native.keys, native.key_bytes = keys.data, keys.all_sizes()
    if headers is not None:
        native.headers, native.header_bytes = headers.data, headers.all_sizes()
    return native
