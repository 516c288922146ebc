"""Stage entries of any shape become columns with the same records in the same order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqd.client.shm.staging import FullEntry, Stage, chunk_of

NOW_MS = 1_700_000_000_000

_bytes = st.binary(max_size=6)
_plain = st.one_of(_bytes, st.tuples(_bytes, _bytes), st.tuples(_bytes, st.none() | _bytes, st.integers(0, 5)))
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
    if isinstance(entry, tuple):
        return (*entry, -1)[:3]
    return entry, None, -1


def _check(entries):
    stage = Stage("topic")
    stage.mark(NOW_MS)
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


@given(st.lists(st.tuples(_bytes, st.none() | _bytes, st.integers(0, 5)), min_size=1, max_size=20))
def test_only_triples(entries):
    _check(entries)


@given(st.lists(_plain | _full, min_size=1, max_size=20))
def test_all_shapes_mixed(entries):
    _check(entries)


def test_records_with_explicit_timestamps_precede_the_first_mark() -> None:
    stage = Stage("topic")
    stage.entries += [FullEntry(b"own", None, -1, 5, None, None, 0.0, None)] * 2
    for now_ms in (1000, 1001):
        stage.mark(now_ms)
        stage.entries += [b"value"]
    chunk = chunk_of(stage, 4)
    assert chunk.timestamps is not None and chunk.timestamps.tolist() == [5, 5, 1000, 1001]
