"""Stage entries of any shape become columns with the same records in the same order."""

import time
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqd.client.shm.staging import FullEntry, Stage, chunk_of

NOW_MS = 1_700_000_000_000

_bytes = st.binary(max_size=6)
_partitions = st.integers(0, 5)
_pairs = st.tuples(_bytes, _partitions) | st.tuples(_bytes, _bytes)
_triples = st.tuples(_bytes, _bytes, _partitions)
_plain = st.one_of(_bytes, _pairs, _triples)
_full = st.builds(
    FullEntry,
    st.none() | _bytes,
    st.none() | _bytes,
    st.integers(-1, 5),
    st.integers(0, 2**40),
    st.none() | st.just(b"\x02\x02a\x02b"),
    st.none() | st.just(print),
    st.just(0.0),
    st.none(),
)


def _items(column, count):
    """The column's items, None where one is null."""
    if column is None:
        return [None] * count
    sizes = [int(size) for size in column.all_sizes()]
    ends = np.cumsum([max(size, 0) for size in sizes]).tolist()
    return [None if size < 0 else bytes(column.data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _spread(entry):
    """(value, key, partition) of an entry of any shape."""
    if isinstance(entry, FullEntry):
        return entry.value, entry.key, entry.partition
    if not isinstance(entry, tuple):
        return entry, None, -1
    if len(entry) == 3:
        return entry
    return (entry[0], None, entry[1]) if isinstance(entry[1], int) else (*entry, -1)


def _mark(stage, now_ms):
    with patch("time.time_ns", return_value=now_ms * 1_000_000):
        stage.mark()


def _check(entries):
    stage = Stage("topic")
    _mark(stage, NOW_MS)
    stage.entries.extend(entries)
    count = len(entries)
    chunk = chunk_of(stage, count)
    partitions = [chunk.partition] * count if chunk.partitions is None else chunk.partitions.tolist()
    assert list(zip(_items(chunk.values, count), _items(chunk.keys, count), partitions, strict=True)) == [
        _spread(entry) for entry in entries
    ]
    times = [chunk.timestamp_ms] * count if chunk.timestamps is None else chunk.timestamps.tolist()
    assert times == [entry.timestamp_ms if isinstance(entry, FullEntry) else NOW_MS for entry in entries]


@given(st.lists(_plain, min_size=1, max_size=20))
def test_entries_of_the_quick_shapes(entries):
    _check(entries)


@given(st.lists(_triples, min_size=1, max_size=20))
def test_only_triples(entries):
    _check(entries)


@given(st.lists(_triples | st.tuples(_bytes, _partitions), min_size=1, max_size=20))
def test_only_records_with_partitions_some_without_keys(entries):
    _check(entries)


@given(st.lists(_pairs, min_size=1, max_size=20))
def test_only_pairs(entries):
    _check(entries)


@given(st.lists(st.tuples(_bytes, _partitions), min_size=1, max_size=20))
def test_only_values_with_partitions(entries):
    _check(entries)


@given(st.lists(_plain | _full, min_size=1, max_size=20))
def test_all_shapes_mixed(entries):
    _check(entries)


def test_values_of_few_bytes_are_no_tuples() -> None:
    for value in (b"", b"1", b"12", b"123"):
        for other in ((b"v", 0), (b"v", b"12"), (b"v", b"12", 0)):
            _check([other, value])
            _check([value, other])


def test_records_with_explicit_timestamps_precede_the_first_mark() -> None:
    stage = Stage("topic")
    stage.entries += [FullEntry(b"own", None, -1, 5, None, None, 0.0, None)] * 2
    for now_ms in (1000, 1001):
        _mark(stage, now_ms)
        stage.entries += [b"value"]
    chunk = chunk_of(stage, 4)
    assert chunk.timestamps is not None and chunk.timestamps.tolist() == [5, 5, 1000, 1001]


def test_a_mark_covers_its_millisecond() -> None:
    stage = Stage("topic")
    assert not stage.mark_start_s <= time.time() < stage.mark_end_s, "the first record needs a mark"
    _mark(stage, NOW_MS)
    assert stage.mark_start_s <= NOW_MS / 1000 < stage.mark_end_s
    assert stage.mark_start_s <= (NOW_MS + 0.999) / 1000 < stage.mark_end_s
    for other_ms in (NOW_MS - 1, NOW_MS + 1):
        assert not stage.mark_start_s <= other_ms / 1000 < stage.mark_end_s
