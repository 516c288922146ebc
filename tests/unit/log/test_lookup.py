"""Offsets by time, newest timestamps and ends of leader epochs, compared with a plain model over
many random logs.
"""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqd.log import lookup
from mqd.log.batches import CorruptBatch
from mqd.log.lookup import (
    UNKNOWN,
    UNKNOWN_EPOCH,
    EpochEnd,
    OffsetAndTimestamp,
    epoch_end_offset,
    max_timestamp,
    offset_for_timestamp,
    records_at,
    timestamp_at_or_after,
)
from tests.tiers import examples
from tests.unit.log.log_files import encode_batch, write_segment


def make_log(
    directory: Path, shape: list[list[list[int]]], codec: int = 0, index_every: int = 2
) -> list[tuple[int, int]]:
    """`shape`: segments of batches of timestamps. Returns (offset, timestamp) of every record."""
    rows, offset = [], 0
    for number, segment in enumerate(shape):
        base, batches = offset, []
        for timestamps in segment:
            batches.append(encode_batch(offset, timestamps, codec))
            rows += [(offset + i, timestamp) for i, timestamp in enumerate(timestamps)]
            offset += len(timestamps)
        write_segment(directory, base, batches, index_every, seal=number + 1 < len(shape))
    return rows


def model_by_time(rows: list[tuple[int, int]], timestamp: int, start: int, high_watermark: int) -> OffsetAndTimestamp:
    return next((OffsetAndTimestamp(o, t) for o, t in rows if start <= o < high_watermark and t >= timestamp), UNKNOWN)


def model_newest(rows: list[tuple[int, int]], start: int, high_watermark: int) -> OffsetAndTimestamp:
    valid = [(o, t) for o, t in rows if start <= o < high_watermark]
    return OffsetAndTimestamp(*max(valid, key=lambda row: (row[1], -row[0]))) if valid else UNKNOWN


@pytest.mark.parametrize("codec", range(5))
def test_inside_a_compressed_batch(tmp_path: Path, codec: int) -> None:
    make_log(tmp_path, [[[100, 105, 110], [120, 115, 130]]], codec)
    assert offset_for_timestamp(tmp_path, 106, 0, 6) == (2, 110)
    assert offset_for_timestamp(tmp_path, 116, 0, 6) == (3, 120)
    assert offset_for_timestamp(tmp_path, 121, 0, 6) == (5, 130)
    assert offset_for_timestamp(tmp_path, 121, 0, 5) == UNKNOWN, "beyond the high watermark there is nothing"
    assert offset_for_timestamp(tmp_path, 131, 0, 6) == UNKNOWN
    assert offset_for_timestamp(tmp_path, 0, 2, 6) == (2, 110), "below the log start there is nothing either"
    assert max_timestamp(tmp_path, 0, 6) == (5, 130)
    assert max_timestamp(tmp_path, 0, 5) == (3, 120)
    assert timestamp_at_or_after(tmp_path, 4, 0, 6) == (4, 115)


def test_the_first_of_equal_timestamps(tmp_path: Path) -> None:
    make_log(tmp_path, [[[7, 7], [7]], [[7], [7, 7]]], index_every=1)
    assert offset_for_timestamp(tmp_path, 7, 0, 6) == (0, 7)
    assert offset_for_timestamp(tmp_path, 7, 3, 6) == (3, 7)
    assert max_timestamp(tmp_path, 0, 6) == (0, 7)
    assert max_timestamp(tmp_path, 4, 6) == (4, 7)


def test_an_empty_log_has_no_offsets(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [])
    assert offset_for_timestamp(tmp_path, 0, 0, 0) == UNKNOWN
    assert max_timestamp(tmp_path, 0, 0) == UNKNOWN


def test_log_append_time_is_the_time_of_every_record(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [encode_batch(0, [10, 20, 30], log_append_time=True), encode_batch(3, [40])])
    assert offset_for_timestamp(tmp_path, 11, 0, 4) == (0, 30)


def test_missing_indexes_only_cost_time(tmp_path: Path) -> None:
    rows = make_log(tmp_path, [[[i * 10, i * 10 + 5] for i in range(20)], [[900]]])
    for path in [*tmp_path.glob("*.index"), *tmp_path.glob("*.timeindex")]:
        path.unlink()
    for timestamp in (0, 95, 195, 200, 901):
        assert offset_for_timestamp(tmp_path, timestamp, 0, len(rows)) == model_by_time(rows, timestamp, 0, len(rows))


def test_preallocated_and_torn_indexes_are_cut_to_valid_entries(tmp_path: Path) -> None:
    rows = make_log(tmp_path, [[[i * 10] for i in range(30)]], index_every=3)
    for suffix, tail in ((".index", b"\0" * 64 + b"\1\2\3"), (".timeindex", b"\0" * 120 + b"\1\2\3\4\5")):
        path = next(tmp_path.glob(f"*{suffix}"))
        path.write_bytes(path.read_bytes() + tail)
    for timestamp in range(0, 300, 7):
        assert offset_for_timestamp(tmp_path, timestamp, 0, 30) == model_by_time(rows, timestamp, 0, 30)
    assert max_timestamp(tmp_path, 0, 30) == (29, 290)


def test_records_above_the_high_watermark_are_never_read(tmp_path: Path) -> None:
    make_log(tmp_path, [[[10], [20]]])
    log = tmp_path / "00000000000000000000.log"
    log.write_bytes(log.read_bytes() + b"\xff" * 500)
    assert offset_for_timestamp(tmp_path, 21, 0, 2) == UNKNOWN
    assert max_timestamp(tmp_path, 0, 2) == (1, 20)


def test_corruption_names_the_segment(tmp_path: Path) -> None:
    make_log(tmp_path, [[[10], [20]]])
    log = tmp_path / "00000000000000000000.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2 + 16] = 9  # the second batch's magic
    log.write_bytes(data)
    with pytest.raises(CorruptBatch, match="00000000000000000000.log: magic 9"):
        offset_for_timestamp(tmp_path, 15, 0, 2)


def test_a_segment_that_vanishes_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_log(tmp_path, [[[10], [20]], [[30]]])
    listed = lookup.segments.base_offsets
    seen = []

    def stale(directory: Path) -> list[int]:
        found = listed(directory)
        if not seen:
            seen.append(found)
            for path in directory.glob("00000000000000000000.*"):
                path.unlink()  # retention, after the listing
        return found

    monkeypatch.setattr(lookup.segments, "base_offsets", stale)
    assert offset_for_timestamp(tmp_path, 5, 2, 3) == (2, 30)


shapes = st.lists(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=4), min_size=1, max_size=8), min_size=1, max_size=4
)


@settings(max_examples=examples(20, 60), deadline=None)
@given(shape=shapes, index_every=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_any_log_gives_the_models_results(
    tmp_path_factory: pytest.TempPathFactory, shape: list[list[list[int]]], index_every: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("log")
    rows = make_log(directory, shape, codec=seed % 5 if seed % 3 == 0 else 0, index_every=index_every)
    chance = random.Random(seed)
    for _ in range(15):
        start, high_watermark = sorted((chance.randint(0, len(rows)), chance.randint(0, len(rows))))
        timestamp = chance.randint(-1, 62)
        assert offset_for_timestamp(directory, timestamp, start, high_watermark) == model_by_time(
            rows, timestamp, start, high_watermark
        )
        assert max_timestamp(directory, start, high_watermark) == model_newest(rows, start, high_watermark)
        offset = chance.randint(0, len(rows))
        following = [row for row in rows if max(start, offset) <= row[0] < high_watermark]
        assert timestamp_at_or_after(directory, offset, start, high_watermark) == (*following, UNKNOWN)[0]


# -- leader epochs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [0, 1])
def test_records_by_their_offsets(tmp_path: Path, codec: int) -> None:
    rows = make_log(tmp_path, [[[1, 2], [3]], [[4, 5, 6], [7]], [[8]]], codec)
    wanted = [1, 3, 5, 6, 7, 30]
    count, found = records_at(tmp_path, wanted, 1 << 20)
    assert count == len(wanted)
    assert [(one.offset, one.timestamp_ms) for one in found] == [row for row in rows if row[0] in wanted]
    parts, at = [], 0
    while at < len(wanted):  # one batch at a time
        count, found = records_at(tmp_path, wanted[at:], 1)
        assert count > 0
        at += count
        parts += [one.offset for one in found]
    assert parts == [1, 3, 5, 6, 7]


def test_ends_of_leader_epochs() -> None:
    epochs = [(1, 0), (3, 20), (7, 50)]
    assert epoch_end_offset(epochs, 7, 90) == EpochEnd(7, 90), "the current one ends where the log ends"
    assert epoch_end_offset(epochs, 3, 90) == EpochEnd(3, 50)
    assert epoch_end_offset(epochs, 5, 90) == EpochEnd(3, 50), "an epoch without records: the one before"
    assert epoch_end_offset(epochs, 0, 90) == EpochEnd(0, 0), "before the first: it had nothing"
    assert epoch_end_offset(epochs, 8, 90) == UNKNOWN_EPOCH
    assert epoch_end_offset(epochs, -1, 90) == UNKNOWN_EPOCH
    assert epoch_end_offset([], 0, 0) == UNKNOWN_EPOCH


def test_leader_epochs_from_the_file(tmp_path: Path) -> None:
    assert lookup.leader_epoch_end_offset(tmp_path, 0, 10) == UNKNOWN_EPOCH
    assert lookup.leader_epoch_end_offset(tmp_path, 4, 10, current_leader_epoch=4) == EpochEnd(4, 10)
    (tmp_path / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n2 15\n")
    assert lookup.leader_epoch_end_offset(tmp_path, 0, 40) == EpochEnd(0, 15)
    assert lookup.leader_epoch_end_offset(tmp_path, 2, 40) == EpochEnd(2, 40)
    assert lookup.leader_epoch_end_offset(tmp_path, 2, 40, current_leader_epoch=3) == EpochEnd(2, 40)


@pytest.mark.parametrize("text", ["", "0\n", "1\n0\n", "0\n2\n0 0\n", "0\n1\nx y\n", "0\n1\n1\n"])
def test_a_damaged_leader_epoch_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_text(text)
    with pytest.raises(ValueError, match="leader-epoch-checkpoint"):
        lookup.read_leader_epochs(tmp_path)
