"""Marks of truncations are removed with the first checkpoint whose positions were read after them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mqd import native
from mqd.worker.background import Background
from mqd.worker.catalog import OwnedPartition
from mqd.worker.maintenance import Upkeep
from mqd.worker.open_partitions import OpenPartition


def mark(path: Path, number: int) -> Path:
    found = path / f"{native.TRUNCATED_PREFIX}{number}"
    found.write_text("7\n")
    return found


def test_marks_are_removed_once_a_later_checkpoint_is_on_disk(tmp_path: Path) -> None:
    cut, other = (
        OpenPartition(OwnedPartition("t", b"t" * 16, index, index, 0, 0), tmp_path / f"t-{index}", 0, None, None)  # type: ignore[arg-type]
        for index in (0, 1)
    )
    for opened in (cut, other):
        opened.path.mkdir()
    first, foreign = mark(cut.path, 1), mark(other.path, 1)
    late: list[Path] = []
    disk = SimpleNamespace(full=True, written=0)

    def entries(_index: int) -> tuple[list[Any], list[Any]]:
        if not disk.full and not late:
            late.append(mark(cut.path, 2))  # it is truncated again while the checkpoint is written
            cut.truncated = True
        return [], []

    def write(_points: list[Any], _starts: list[Any]) -> bool:
        assert first.exists() or late, "not before the checkpoint is on disk"
        disk.written += not disk.full
        return not disk.full

    log_dir = SimpleNamespace(
        index=0, path=tmp_path, write_checkpoints=write, write_high_watermarks=lambda entries: None
    )
    partitions = SimpleNamespace(
        log_dirs=[log_dir], open={0: cut, 1: other}, checkpoint_entries=entries, high_watermarks=lambda index: []
    )
    subject = Upkeep(0, 1, None, None, None, partitions, Background(), None, None, 100, None)  # type: ignore[arg-type]
    cut.truncated = True

    async def scenario() -> None:
        assert not await subject.checkpoint(log_dir)  # type: ignore[arg-type]
        assert first.exists() and cut.truncated
        disk.full = False
        assert await subject.checkpoint(log_dir)  # type: ignore[arg-type]
        assert not first.exists() and late[0].exists() and cut.truncated
        assert await subject.checkpoint(log_dir)  # type: ignore[arg-type]
        assert not late[0].exists() and not cut.truncated
        assert foreign.exists(), "of a partition that was not truncated"

    asyncio.run(scenario())
