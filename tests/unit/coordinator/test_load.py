"""A coordinator's partition read from its files: the latest records, transactions, damage."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mqd.coordinator import load as loading
from mqd.coordinator.actions import Action
from mqd.coordinator.load import load
from mqd.coordinator.log import marker_batch, records_batch
from mqd.log.segments import segment_path
from mqd.protocol.records import Record, decode_batch_header, encode_batch


class Book:
    """A core that records its events."""

    def __init__(self) -> None:
        self.lines: list[tuple[bytes, bytes | None]] = []
        self.pending: list[tuple[bytes, bytes | None, int]] = []

    def replay(self, key: bytes, value: bytes | None) -> None:
        if value == b"unreadable":
            raise ValueError("this value makes no sense")
        self.lines.append((key, value))

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        self.pending.append((key, value, producer_id))

    def handle(self, event: object, now_ms: int) -> list[Action]:
        return []

    def on_loaded(self, now_ms: int) -> list[Action]:
        return []

    @property
    def is_empty(self) -> bool:
        return not self.lines and not self.pending


class Books:
    """The first byte of a record's key names its core."""

    def core_name_of(self, key: bytes) -> str | None:
        if not key:
            raise ValueError("no key")
        return None if key.startswith(b"?") else chr(key[0])

    def make(self, name: str) -> Book:
        return Book()


class Files:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.next_offset = 0
        self.base = 0
        self.positions: list[int] = []  # of the batches in the segment
        directory.mkdir(exist_ok=True)
        self.path = segment_path(directory, 0)
        self.path.write_bytes(b"")

    def append(self, batch: bytes) -> int:
        """Sets the base offset as the owner does; returns it."""
        offset = self.next_offset
        with open(self.path, "ab") as file:
            self.positions.append(file.tell())
            file.write(offset.to_bytes(8, "big") + batch[8:])
        self.next_offset += decode_batch_header(batch).last_offset_delta + 1
        return offset

    def put(self, *records: tuple[bytes, bytes | None], producer_id: int = -1) -> int:
        return self.append(records_batch(list(records), 1, producer_id, 0))

    def end(self, producer_id: int, commit: bool) -> int:
        return self.append(marker_batch(producer_id, 0, 0, commit, 1))

    def roll(self) -> None:
        self.base, self.positions = self.next_offset, []
        self.path = segment_path(self.directory, self.base)
        self.path.write_bytes(b"")

    def flip(self, position: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[position] ^= 0x55
        self.path.write_bytes(data)

    def load(self, end_offset: int | None = None):
        return load(self.directory, self.next_offset if end_offset is None else end_offset, Books())


def lines(loaded, name: str = "k") -> list[tuple[bytes, bytes | None]]:
    return loaded.cores[name].lines if name in loaded.cores else []


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "__consumer_offsets-0")


def test_the_last_record_of_each_key_in_the_order_of_the_log(files: Files) -> None:
    files.put((b"k1", b"a"), (b"k2", b"b"))
    files.put((b"k3", b"c"))
    files.roll()
    files.put((b"k1", b"d"), (b"x1", b"e"))
    files.put((b"k2", None), (b"x2", None))
    loaded = files.load()
    assert lines(loaded) == [(b"k3", b"c"), (b"k1", b"d")] and lines(loaded, "x") == [(b"x1", b"e")]
    assert (loaded.end_offset, loaded.record_count, loaded.skipped_count) == (7, 7, 0)


def test_nothing_beyond_the_end_is_read(files: Files) -> None:
    files.put((b"k1", b"a"))
    end = files.put((b"k1", b"b"))
    assert lines(files.load(end)) == [(b"k1", b"a")]
    with open(files.path, "ab") as file:
        file.write(b"half a batch")
    assert lines(files.load()) == [(b"k1", b"b")]
    assert files.load(0).cores == {}


def test_compressed_and_sparse_batches(files: Files) -> None:
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        files.append(encode_batch([Record(b"v", codec.encode().join([b"k", b""]))], compression=codec))
    # as left by compaction
    files.append(encode_batch([Record(b"v", b"k1", offset=0), Record(b"w", b"k2", offset=5)], last_offset_delta=9))
    files.append(encode_batch([], last_offset_delta=3))
    files.put((b"k3", b"v"))
    loaded = files.load()
    assert [key for key, _ in lines(loaded)] == [
        b"kgzip",
        b"ksnappy",
        b"klz4",
        b"kzstd",
        b"k1",
        b"k2",
        b"k3",
    ] and loaded.skipped_count == 0


def test_transactions_take_effect_with_their_commit_marker(files: Files) -> None:
    files.put((b"k1", b"old"), (b"k4", b"old"))
    files.put((b"k1", b"committed"), producer_id=5)
    files.put((b"k2", b"aborted"), producer_id=6)
    files.put((b"k3", b"open"), producer_id=7)
    files.put((b"k4", None), producer_id=5)
    files.end(6, False)
    files.end(5, True)
    loaded = files.load()
    assert lines(loaded) == [(b"k1", b"committed")]
    assert loaded.cores["k"].pending == [(b"k3", b"open", 7)] and loaded.transactions == {7: {"k": None}}


def test_a_plain_record_overtakes_a_pending_one_of_the_same_key(files: Files) -> None:
    files.put((b"k1", b"pending"), (b"k2", b"pending"), producer_id=5)
    files.put((b"k1", b"plain"))
    files.end(5, True)
    assert lines(files.load()) == [(b"k1", b"plain"), (b"k2", b"pending")]
    files.put((b"k3", b"pending"), (b"k4", b"pending"), producer_id=5)
    files.put((b"k3", b"plain"))
    loaded = files.load()
    assert loaded.cores["k"].pending == [(b"k3", None, 5), (b"k4", b"pending", 5)] and (b"k3", b"plain") in lines(
        loaded
    )


def test_read_blocks_may_end_anywhere(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        files.put((b"k%d" % number, bytes(number * 7)), (b"l%d" % number, b"x"))
    files.put((b"k-large", bytes(20_000)))
    files.put((b"k-last", b"z"))
    expected = files.load()
    for block_bytes in (4096, 5000, 61 + 1500):
        monkeypatch.setattr(loading, "BLOCK_BYTES", block_bytes)
        got = files.load()
        assert lines(got) == lines(expected) and lines(got, "l") == lines(expected, "l") and got.skipped_count == 0
    monkeypatch.setattr(loading, "RECORDS_AT_ONCE", 3)
    assert lines(files.load()) == lines(expected)


@pytest.mark.parametrize("at", [61 + 8, 20, 57])
def test_a_damaged_batch_is_skipped(files: Files, at: int, capfd: pytest.CaptureFixture[str]) -> None:
    files.put((b"k1", b"a"))
    files.put((b"k2", b"b"))
    files.put((b"k3", b"c"))
    files.flip(files.positions[1] + at)
    loaded = files.load()
    assert lines(loaded) == [(b"k1", b"a"), (b"k3", b"c")] and loaded.skipped_count == 1


def test_a_damaged_length_loses_batches_up_to_the_next_index_entry(files: Files) -> None:
    for number in range(6):
        files.put((b"k%d" % number, b"v"))
    files.flip(files.positions[2] + 10)
    index = segment_path(files.directory, 0, ".index")
    index.write_bytes(
        b"".join(number.to_bytes(4, "big") + files.positions[number].to_bytes(4, "big") for number in (1, 4))
    )
    assert [key for key, _ in lines(files.load())] == [b"k0", b"k1", b"k4", b"k5"]
    index.unlink()
    files.roll()
    files.put((b"k9", b"v"))
    loaded = files.load()
    assert [key for key, _ in lines(loaded)] == [b"k0", b"k1", b"k9"] and loaded.skipped_count == 1


def test_only_the_record_that_a_core_cannot_read_is_skipped(files: Files) -> None:
    files.put((b"k1", b"a"), (b"k2", b"unreadable"), (b"?3", b"of a newer version"), (b"", b"no key"), (b"k4", b"d"))
    loaded = files.load()
    assert lines(loaded) == [(b"k1", b"a"), (b"k4", b"d")] and loaded.skipped_count == 2


def test_a_file_that_ends_too_early(files: Files) -> None:
    files.put((b"k1", b"a"))
    files.put((b"k2", bytes(100)))
    data = files.path.read_bytes()
    files.path.write_bytes(data[:-10])
    loaded = files.load()
    assert lines(loaded) == [(b"k1", b"a")] and loaded.skipped_count == 1


def test_a_missing_segment_is_an_error(files: Files) -> None:
    files.put((b"k1", b"a"))
    with pytest.raises(OSError):
        load(files.directory / "nowhere", 1, Books())


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_never_raises_and_never_invents(files: Files, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(40):
        files.put(
            *((b"k%d-%d" % (number, at), b"v%d" % at) for at in range(chance.randrange(1, 5))),
            producer_id=chance.choice([-1, -1, 5]),
        )
        if chance.random() < 0.1:
            files.end(5, chance.random() < 0.5)
    files.end(5, True)
    sound = dict(lines(files.load()))
    size = files.path.stat().st_size
    for _ in range(3):
        files.flip(chance.randrange(size))
    for key, value in lines(files.load()):
        assert key not in sound or sound[key] == value
