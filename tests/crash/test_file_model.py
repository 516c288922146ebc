"""The model of a power cut: what it keeps, what it may lose, and that it matches real files."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import file_model
from tests.crash.file_model import (
    CREATE,
    MKDIR,
    RENAME,
    SYNC_BEGIN,
    SYNC_DONE,
    SYNCFS_BEGIN,
    SYNCFS_DONE,
    TRUNCATE,
    UNLINK,
    WRITE,
    Disk,
    JournalError,
    Operation,
    read_journals,
)

CUTS = 60


class History:
    """Operations with their sequences filled in."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.sequence = 0

    def __call__(self, kind: int, path: str, **fields) -> int:
        self.sequence += 1
        self.disk.apply(Operation(kind, path, self.sequence, 1, self.sequence, **fields))
        return self.sequence

    def create(self, path: str, data: bytes = b"") -> None:
        self(CREATE, path, reference=1)
        if data:
            self(WRITE, path, data=data, length=len(data))

    def sync(self, path: str, result: int = 0) -> None:
        self(SYNC_DONE, path, reference=self(SYNC_BEGIN, path), result=result)

    def cuts(self) -> list[file_model.Tree]:
        return [self.disk.power_cut(random.Random(seed)) for seed in range(CUTS)]


def contents(history: History, path: str) -> set[bytes | None]:
    return {tree.files.get(path) for tree in history.cuts()}


@pytest.fixture
def history() -> History:
    history = History()
    history.create("/d/known")  # makes /d known
    history.sync("/d")
    return history


def test_flushed_bytes_survive(history):
    history.create("/d/a", b"x" * 2000)
    history.sync("/d/a")
    history.sync("/d")
    history(WRITE, "/d/a", offset=2000, data=b"y" * 1000, length=1000)
    for tree in history.cuts():
        assert tree.files["/d/a"][:2000] == b"x" * 2000
    assert history.disk.harshest().files["/d/a"] == b"x" * 2000
    assert history.disk.present().files["/d/a"] == b"x" * 2000 + b"y" * 1000


def test_bytes_that_are_not_flushed_may_be_torn_anywhere(history):
    history.create("/d/a")
    history.sync("/d")
    history(WRITE, "/d/a", offset=0, data=b"y" * 3000, length=3000)
    found = contents(history, "/d/a")
    assert {b"", b"y" * 3000} < found
    torn = [content for content in found if content and set(content) == {0, ord("y")}]
    assert torn, "sectors are missing in the middle of some"
    assert any(len(content) not in (0, 3000) for content in found if content is not None), "some are short"
    for content in torn:
        for position in range(0, len(content), 512):
            assert len(set(content[position : position + 512])) == 1, "a sector is whole or is not there"


def test_a_write_after_the_beginning_of_a_flush_is_not_covered(history):
    history.create("/d/a", b"x")
    history.sync("/d")
    begun = history(SYNC_BEGIN, "/d/a")
    history(WRITE, "/d/a", offset=1, data=b"y", length=1)
    assert None not in contents(history, "/d/a")
    assert b"" in contents(history, "/d/a"), "the flush has not ended"
    history(SYNC_DONE, "/d/a", reference=begun)
    assert contents(history, "/d/a") == {b"x", b"xy", b"x\0"}  # the last: a length without its data


def test_a_failed_flush_covers_nothing(history):
    history.create("/d/a", b"x")
    history.sync("/d")
    history.sync("/d/a", result=-5)
    assert b"" in contents(history, "/d/a")


def test_bytes_dropped_by_a_failed_flush_must_be_written_again(history):
    history.create("/d/a", b"xx")
    history.sync("/d")
    history.sync("/d/a", result=-5)
    history(WRITE, "/d/a", offset=2, data=b"y", length=1)
    history.sync("/d/a")
    assert history.disk.harshest().files["/d/a"] == b"\0\0y"
    assert history.disk.present().files["/d/a"] == b"xxy"
    history(WRITE, "/d/a", offset=0, data=b"xx", length=2)
    history.sync("/d/a")
    assert history.disk.harshest().files["/d/a"] == b"xxy"


def test_a_flush_that_is_ignored_covers_nothing():
    history = History()
    history.disk = Disk(ignore=lambda operation: operation.path == "/d/a")
    history.create("/d/a", b"x")
    history.sync("/d/a")
    history.sync("/d")
    assert history.disk.harshest().files["/d/a"] == b""


def test_a_name_is_only_durable_with_its_directory(history):
    history.create("/d/a", b"x")
    history.sync("/d/a")
    assert contents(history, "/d/a") == {None, b"x"}
    history.sync("/d")
    assert contents(history, "/d/a") == {b"x"}
    history(UNLINK, "/d/a")
    assert contents(history, "/d/a") == {None, b"x"}
    history.sync("/d")
    assert contents(history, "/d/a") == {None}


def test_a_rename_is_atomic(history):
    history.create("/d/a", b"old")
    history.sync("/d/a")
    history.sync("/d")
    history.create("/d/a.tmp", b"new")
    history.sync("/d/a.tmp")
    history(RENAME, "/d/a.tmp", data=b"/d/a")
    states = {(tree.files.get("/d/a"), tree.files.get("/d/a.tmp")) for tree in history.cuts()}
    assert states == {(b"old", None), (b"old", b"new"), (b"new", None)}
    history.sync("/d")
    assert history.disk.harshest().files["/d/a"] == b"new"


def test_a_rename_of_a_directory_takes_its_files_along(history):
    history(MKDIR, "/d/p")
    history.create("/d/p/log", b"x")
    history.sync("/d/p/log")
    history.sync("/d/p")
    assert contents(history, "/d/p/log") == {None, b"x"}, "its directory's own name is not durable"
    history.sync("/d")
    history(RENAME, "/d/p", data=b"/d/q")
    history(WRITE, "/d/q/log", offset=1, data=b"y", length=1)
    history.sync("/d/q/log")
    for tree in history.cuts():
        assert [tree.files[path] for path in ("/d/p/log", "/d/q/log") if path in tree.files] == [b"xy"]


def test_a_flush_of_the_file_system_covers_all_below(history):
    history(MKDIR, "/d/p")
    history.create("/d/p/log", b"x")
    begun = history(SYNCFS_BEGIN, "/d")
    history.create("/d/p/index", b"i")
    history(SYNCFS_DONE, "/d", reference=begun)
    assert contents(history, "/d/p/log") == {b"x"}
    assert None in contents(history, "/d/p/index")


def test_a_truncation_may_be_lost_but_never_reordered(history):
    history.create("/d/a", b"x" * 10)
    history.sync("/d/a")
    history.sync("/d")
    history(TRUNCATE, "/d/a", offset=4)
    assert contents(history, "/d/a") == {b"x" * 10, b"x" * 4}
    history.sync("/d/a")
    assert contents(history, "/d/a") == {b"x" * 4}


def test_writes_to_removed_files_are_allowed_and_to_unknown_ones_an_error(history):
    history.create("/d/a", b"x")
    history(UNLINK, "/d/a")
    history(WRITE, "/d/a", offset=0, data=b"y", length=1)
    with pytest.raises(JournalError, match="nothing is known"):
        history(WRITE, "/d/stranger", offset=0, data=b"y", length=1)


REAL_CHANGES = """
import os, sys
from mqd import native
root = sys.argv[1]
for number in range(3):
    directory = f"{root}/t-{number}"
    native.file_mkdir(directory)
    native.file_replace(f"{directory}/partition.metadata", b"id")
    fd = native.file_open_append(f"{directory}/log", 0)
    for turn in range(5):
        native.file_append(fd, bytes([turn]) * 700, turn * 700)
    native.file_flush(fd)
    native.file_sync_directory(directory)
    native.file_append(fd, b"not flushed", 3500)
    native.file_close(fd)
native.file_sync_directory(root)
native.file_replace(f"{root}/t-1/partition.metadata", b"another")
native.file_unlink(f"{root}/t-0/log")
native.file_rename(f"{root}/t-2", f"{root}/t-2.gone")
"""


def test_the_journal_of_the_real_file_layer_matches_the_files(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    environment = {**os.environ, "MQD_FILE_JOURNAL": str(tmp_path / "journal")}
    subprocess.run([sys.executable, "-c", REAL_CHANGES, str(root)], env=environment, check=True, timeout=60)
    disk = Disk()
    for operation in read_journals(tmp_path, "journal"):
        disk.apply(operation)
    found = {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert disk.present().files == found
    harshest = disk.harshest().files
    assert harshest[f"{root}/t-1/partition.metadata"] == b"another"
    assert harshest[f"{root}/t-1/log"] == b"".join(bytes([turn]) * 700 for turn in range(5))
    assert f"{root}/t-2/log" in harshest, "the new name was not made durable"
    disk.harshest().write_to(tmp_path / "copy", str(root))
    assert (tmp_path / "copy/t-1/partition.metadata").read_bytes() == b"another"
