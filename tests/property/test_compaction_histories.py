"""Random histories of a compacted log: produced to, compacted, interrupted at every step,
recovered; against a plain model of "the last value of each key".
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqd import native
from mqd.log import segments
from mqd.protocol.records import Record, decode_batch, encode_batch, iterate_batches
from mqd.worker.compaction_steps import Uncleanable, advance
from tests.property.compaction_model import RETENTION_MS, Log
from tests.tiers import quick


def live(log: Log, turns: int) -> None:
    for _ in range(turns):
        chance = log.random.random()
        log.now_ms += log.random.choice((1, 10, RETENTION_MS // 2))
        if chance < 0.70:
            log.produce()
        elif chance < 0.85 and log.transactional:
            log.end_transaction(log.random.choice((10, 11, 12)), log.random.random() < 0.5)
        elif chance < 0.88:
            log.forget()
        elif chance < 0.97:
            crash = log.random.choice((None, None, 0, 1, 2, 3, 4, 5, 7))
            whole = log.compact(segment_bytes=log.random.choice((1, 1500, 4000, 1 << 20)), stop_at=crash)
            if crash is None and whole is not None:
                log.check_compacted()
            elif crash is not None:
                log.recover()
            log.check()
        else:
            log.recover(clean=log.random.random() < 0.5)
            log.check()


@pytest.mark.parametrize("seed", quick(range(9), range(4)))
def test_any_life(tmp_path: Path, seed: int):
    log = Log(tmp_path / "t-0", seed, keys=(3, 12, 60)[seed % 3], transactional=seed % 4 != 3)
    live(log, 120)
    for producer in list(log.ongoing):
        log.end_transaction(producer, True)
    for _ in range(3):  # time passes: tombstones and markers may be removed
        log.now_ms += 2 * RETENTION_MS
        log.produce()
        log.compact()
        log.check()
    log.recover()
    log.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_lives(tmp_path: Path, seed: int):
    test_any_life(tmp_path, seed)


def test_tombstones_and_markers_are_finally_removed(tmp_path: Path):
    log = Log(tmp_path / "t-0", 1, keys=5)
    for _ in range(60):
        log.produce()
    for producer in (10, 11, 12):
        log.end_transaction(producer, producer != 11)
    for key in range(5):
        offset = log.end
        log.appended[offset] = Record(None, b"k%d" % key, log.now_ms, offset=offset)
        log.decided[offset] = True
        log._append(encode_batch([log.appended[offset]], base_offset=offset), 1, -1)
    log.recover(clean=True)  # writes a snapshot of the producers: without one, any batch may be a producer's last
    for _ in range(4):
        log.now_ms += 2 * RETENTION_MS
        offset = log.end
        log.appended[offset] = Record(b"x", b"other", log.now_ms, offset=offset)
        log.decided[offset] = True
        log._append(encode_batch([log.appended[offset]], base_offset=offset), 1, -1)
        log.compact()
        log.check()
    left = [record for header, data in log.batches() if not header.is_control for record in decode_batch(data)]
    assert [record.key for record in left] == [b"other"]
    # the last data batch of each producer's epoch is left, so that its sequence number survives, and
    # one marker of each: of the transaction that this batch belongs to, or for the epoch
    headers = [header for header, _ in log.batches() if header.producer_id >= 0]
    data = {header.producer_id: header.base_offset for header in headers if not header.is_control}
    markers = [header.producer_id for header in headers if header.is_control]
    assert data == log.last_data
    assert sorted(markers) == [10, 11, 12]
    assert len(headers) == len(data) + len(markers)


def test_a_producers_last_batch_stays_when_the_snapshot_is_older(tmp_path: Path):
    """Its sequence number would be lost, and a resent batch would be written twice: also where the
    log was cleaned since.
    """
    log = Log(tmp_path / "t-0", 5, transactional=False)

    def put(producer: int, sequence: int) -> None:
        record = Record(b"%d" % sequence, b"same key", log.now_ms, offset=log.end)
        log.appended[log.end], log.decided[log.end] = record, True
        epoch = 0 if producer >= 0 else -1
        if producer >= 0:
            log.last_data[producer] = log.end
        log._append(
            encode_batch(
                [record],
                base_offset=log.end,
                producer_id=producer,
                producer_epoch=epoch,
                base_sequence=sequence if producer >= 0 else -1,
            ),
            1,
            producer,
        )

    put(1, 0)
    log.recover(clean=True)  # writes a snapshot that knows sequence number 0
    put(1, 1)
    for number in range(3):
        put(-1, number)
        log.compact()
        log.check()
    assert any(header.producer_id == 1 and header.base_sequence == 1 for header, _ in log.batches())


def test_a_batch_that_loses_no_record_is_unchanged(tmp_path: Path):
    log = Log(tmp_path / "t-0", 2, transactional=False)
    log.directory.mkdir(exist_ok=True)
    kept = {}
    for number, codec in enumerate(("gzip", "snappy", "lz4", "zstd", "none")):
        offset = log.end
        data = encode_batch(
            [
                Record(b"v" * 50, b"unique-%d" % number, 5, offset=offset),
                Record(b"w", b"more-%d" % number, 6, offset=offset + 1),
            ],
            base_offset=offset,
            compression=codec,
        )
        kept[offset] = data
        log._append(data, 2, -1)
        offset = log.end
        log._append(encode_batch([Record(b"old", b"again", 7, offset=offset)], base_offset=offset), 1, -1)
    figures = log.compact()
    assert figures is not None and figures.batches_dropped == 4
    found = {header.base_offset: data for header, data in log.batches()}
    assert {offset: found[offset] for offset in kept} == kept


def test_a_small_table_of_keys_takes_several_runs(tmp_path: Path):
    log = Log(tmp_path / "t-0", 3, keys=400, transactional=False)
    for _ in range(400):
        log.produce()
    ends = []
    while log.clean_to is None or log.clean_to < log.bases()[-1]:
        figures = log.compact(map_bytes=24 * 60)
        assert figures is not None and figures.mapped_keys <= 60
        log.check()
        ends.append(figures.mapped_end)
    assert len(ends) > 5 and ends == sorted(set(ends))


@pytest.mark.parametrize("where", ["crc", "length", "record"])
def test_damage_leaves_everything_unchanged(tmp_path: Path, where: str):
    log = Log(tmp_path / "t-0", 4, transactional=False)
    for _ in range(40):
        log.produce()
    log.roll()
    path = segments.segment_path(log.directory, log.bases()[1])
    data = bytearray(path.read_bytes())
    if where == "crc":
        data[70] ^= 1
    elif where == "length":
        data[8:12] = (1 << 30).to_bytes(4, "big")
    else:  # a valid checksum over invalid records
        header, batch = next(iterate_batches(bytes(data)))
        bad = bytearray(
            encode_batch(
                [Record(b"v", b"k", 1, offset=header.base_offset)],
                base_offset=header.base_offset,
                last_offset_delta=header.last_offset_delta,
            )
        )
        bad[61] = 0x7E
        bad[17:21] = native.crc32c(bytes(bad[21:])).to_bytes(4, "big")
        data[: len(batch)] = bad
    path.write_bytes(data)
    before = {file.name: file.read_bytes() for file in log.directory.iterdir()}
    with pytest.raises(Uncleanable, match=path.name.removesuffix(".log")):
        log.compact()
    assert {file.name: file.read_bytes() for file in log.directory.iterdir()} == before


def test_a_decompression_bomb_in_a_batch_is_refused(tmp_path: Path):
    import cramjam

    log = Log(tmp_path / "t-0", 5, transactional=False)
    log.produce()
    offset = log.end
    batch = bytearray(encode_batch([Record(b"v", b"k", 1, offset=offset)], base_offset=offset, compression="zstd")[:61])
    body = bytes(cramjam.zstd.compress(bytes(200 << 20)))
    batch[8:12] = (49 + len(body)).to_bytes(4, "big")
    batch[17:21] = native.crc32c(bytes(batch[21:]) + body).to_bytes(4, "big")
    log._append(bytes(batch) + body, 1, -1)
    with pytest.raises(Uncleanable, match="decompressed"):
        log.compact()


def test_each_step_of_a_swap_may_be_the_last(tmp_path: Path):
    """A crash after any step; the directory is copied there, recovered, and must be either the old
    or the new log.
    """
    log = Log(tmp_path / "t-0", 6)
    for _ in range(60):
        log.produce()
    for producer in (10, 11, 12):
        log.end_transaction(producer, True)
    log.roll()
    for stop_at in range(0, 9):
        copy = Log(tmp_path / f"copy-{stop_at}", 6)
        shutil.rmtree(copy.directory)
        shutil.copytree(log.directory, copy.directory)
        copy.__dict__.update(
            {name: value for name, value in log.__dict__.items() if name not in ("directory", "random")}
        )
        copy.compact(segment_bytes=1500, stop_at=stop_at)
        copy.recover()
        copy.check()
        copy.compact(segment_bytes=1500)
        copy.check_compacted()


def test_advance_reports_how_much_was_moved(tmp_path: Path):
    log = Log(tmp_path / "t-0", 7, transactional=False)
    for _ in range(50):
        log.produce()
    log.roll()
    bases = log.bases()
    compaction = native.Compaction(
        log.directory,
        bases,
        native.CompactOptions(
            first_dirty_offset=0, to_clean_count=len(bases) - 1, now_ms=1, delete_retention_ms=1, map_bytes=1 << 20
        ),
    )
    total, done = 0, False
    while not done:
        done, moved = advance(compaction, 100)
        total += moved
    assert (
        total
        == compaction.figures().read_bytes
        == sum(segments.segment_path(log.directory, base).stat().st_size for base in bases)
    )
    compaction.close()
