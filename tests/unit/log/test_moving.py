"""Copies of a partition: random histories in which the source grows, rolls, is compacted and
truncated; a finished copy equals the source byte for byte.
"""

import os
import random
from pathlib import Path

import pytest

from mqd.log import directories, moving
from mqd.log.files import NativeFiles
from tests.tiers import quick

TOPIC_ID = b"t" * 16


def make(tmp_path: Path) -> tuple[Path, Path]:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    source, _ = directories.prepare(disks[0], "t", 0, TOPIC_ID, NativeFiles())
    return source, disks[1]


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != moving.MARKER}


class Source:
    """A log as the worker leaves it: segments by base offset, the last one active and published up
    to `position`; bytes after it are not published.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.bases, self.position = [0], 0
        self.log(0).write_bytes(b"")

    def log(self, base: int) -> Path:
        return self.path / f"{base:020d}.log"

    def step(self) -> None:
        dice = self.random.random()
        if dice < 0.5:
            with open(self.log(self.bases[-1]), "r+b") as file:
                file.seek(self.position)
                file.write(self.random.randbytes(self.random.randint(1, 3000)))
                self.position = file.tell()
                # not published: it may be truncated and rewritten
                file.write(self.random.randbytes(self.random.randint(0, 100)))
                file.truncate()
        elif dice < 0.7:
            with open(self.log(self.bases[-1]), "r+b") as file:
                file.truncate(self.position)
            (self.path / f"{self.bases[-1]:020d}.index").write_bytes(self.random.randbytes(40))
            self.bases.append(self.bases[-1] + self.random.randint(1, 9))
            self.log(self.bases[-1]).write_bytes(b"")
            self.position = 0
        elif dice < 0.8 and len(self.bases) > 1:  # retention
            self.log(self.bases.pop(0)).unlink()
        elif dice < 0.9 and len(self.bases) > 1:  # compaction: another file under the same name
            base = self.random.choice(self.bases[:-1])
            cleaned = self.path / f"{base:020d}.log.cleaned"
            cleaned.write_bytes(self.random.randbytes(self.random.randint(0, 2000)))
            os.replace(cleaned, self.log(base))
        else:
            (self.path / "leader-epoch-checkpoint").write_bytes(self.random.randbytes(20))

    def close(self) -> None:
        with open(self.log(self.bases[-1]), "r+b") as file:
            file.truncate(self.position)
        (self.path / f"{self.bases[-1]:020d}.snapshot").write_bytes(b"producers")


@pytest.mark.parametrize("seed", quick(range(40), range(10)))
def test_a_finished_copy_is_the_source(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CHUNK_BYTES", 700)
    path, disk = make(tmp_path)
    source = Source(path, seed)
    copy = moving.PartitionCopy(path, disk, "t", 0, TOPIC_ID, NativeFiles())
    copy.begin()
    for _ in range(source.random.randint(0, 12)):
        for _ in range(source.random.randint(0, 6)):
            source.step()
        active, position = source.bases[-1], source.position
        for _ in copy.advance(active, position):
            if source.random.random() < 0.2:
                source.step()
        assert not directories.partition_path(disk, "t", 0).exists()
    source.close()
    final = copy.finish(17)
    assert moving.marked_log_start(final) == 17 and moving.marked_log_start(path) == 0
    assert final == directories.partition_path(disk, "t", 0) and contents(final) == contents(path)
    assert moving.is_marked(final) and not moving.is_marked(path) and list(moving.future_copies(disk)) == []
    assert directories.exists(disk, "t", 0, TOPIC_ID)


def test_the_missing_bytes_decrease(tmp_path: Path) -> None:
    path, disk = make(tmp_path)
    (path / f"{0:020d}.log").write_bytes(b"x" * 100)
    (path / f"{9:020d}.log").write_bytes(b"y" * 50)
    copy = moving.PartitionCopy(path, disk, "t", 0, TOPIC_ID, NativeFiles())
    copy.begin()
    assert copy.missing_bytes(9, 40) == 140
    assert sum(copy.advance(9, 40)) == 140 == copy.copied_bytes and copy.missing_bytes(9, 40) == 0
    assert copy.missing_bytes(9, 50) == 10


def test_replaced_segments_are_copied_again_and_indexes_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "COARSE_NS", 0)
    path, disk = make(tmp_path)
    names = [f"{base:020d}{suffix}" for base in (0, 9, 20) for suffix in (".log", ".index", ".timeindex", ".snapshot")]
    for name in names:
        (path / name).write_bytes(b"x" * 100)
        os.utime(path / name, (1, 1))
    copy = moving.PartitionCopy(path, disk, "t", 0, TOPIC_ID, NativeFiles())
    copy.begin()
    assert copy.missing_bytes(20, 60) == 860 == sum(copy.advance(20, 60))
    assert copy.missing_bytes(20, 60) == 0 == sum(copy.advance(20, 60))
    (path / "cleaned").write_bytes(b"y" * 50)
    os.replace(path / "cleaned", path / names[0])
    assert copy.missing_bytes(20, 60) == 50
    before = copy.copied_bytes
    assert contents(copy.finish(0)) == contents(path)
    assert copy.copied_bytes - before == 50 + 40 + 300 + len((path / directories.METADATA).read_bytes()), (
        "what was replaced, and the rest of what is active"
    )


def test_a_segment_that_has_just_changed_is_copied_again(tmp_path: Path) -> None:
    """Two changes within one clock tick have the same timestamp."""
    path, disk = make(tmp_path)
    index = path / f"{0:020d}.index"
    index.write_bytes(b"1" * 8)
    copy = moving.PartitionCopy(path, disk, "t", 0, TOPIC_ID, NativeFiles())
    copy.begin()
    assert sum(copy.advance(5, 0)) == 8
    now = index.stat()
    index.write_bytes(b"2" * 8)
    os.utime(index, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert contents(copy.finish(0)) == contents(path)


def test_a_directory_with_the_final_name_is_moved_aside(tmp_path: Path) -> None:
    path, disk = make(tmp_path)
    (path / f"{0:020d}.log").write_bytes(b"x")
    other, _ = directories.prepare(disk, "t", 0, b"o" * 16, NativeFiles())
    (other / "precious").write_bytes(b"1")
    copy = moving.PartitionCopy(path, disk, "t", 0, TOPIC_ID, NativeFiles())
    copy.begin()
    copy.finish(0)
    (stray,) = disk.glob("t-0.*-stray")
    assert (stray / "precious").exists() and directories.exists(disk, "t", 0, TOPIC_ID)


def test_long_names_fit(tmp_path: Path) -> None:
    name = "n" * 249
    path = tmp_path / moving.future_name(name, 16383)
    path.mkdir()
    (path / directories.METADATA).write_bytes(directories.format_metadata(TOPIC_ID))
    assert [index for _, index in moving.future_copies(tmp_path)] == [16383]
    assert (
        moving.find_future(tmp_path, TOPIC_ID, 16383) == path and moving.find_future(tmp_path, b"o" * 16, 16383) is None
    )
