"""Files below a log start are deleted only in their own partition: another one may have its name,
and its slot, by the time a thread gets to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.log import segments
from mqd.log.files import NativeFiles
from mqd.worker import maintenance as upkeep
from mqd.worker.catalog import OwnedPartition
from mqd.worker.maintenance import Upkeep
from mqd.worker.open_partitions import OpenPartition

LOG_DIR = SimpleNamespace(index=0, timestamps=segments.TimestampCache(lambda *_: (0, -1)))


def partition(path: Path, *bases: int) -> OpenPartition:
    path.mkdir()
    for base in bases:
        for suffix in (".log", ".index"):
            segments.segment_path(path, base, suffix).write_bytes(b"records")
    return OpenPartition(OwnedPartition("t", b"t" * 16, 0, 0, 0, 0), path, 0, None, None)  # type: ignore[arg-type]


def remove_below(opened: OpenPartition, offset: int) -> bool:
    partitions = SimpleNamespace(log_dirs=[])
    return Upkeep(0, 1, None, None, None, partitions, None, None, None, 100, NativeFiles())._remove_below(
        opened, offset, LOG_DIR
    )  # type: ignore[arg-type]


def recreated(opened: OpenPartition, aside: Path) -> OpenPartition:
    """The topic is deleted and recreated with its name, now with several segments."""
    opened.closing = True
    opened.path.rename(aside)
    return partition(opened.path, 0, 40, 90)


def test_a_pending_log_start_is_not_applied_to_a_reused_slot(tmp_path: Path) -> None:
    """It was applied: all records of the partition that had got the slot were deleted."""

    async def scenario() -> None:
        opened = partition(tmp_path / "t-0", 0)
        moved: list[int] = []
        subject = Upkeep(
            0,
            1,
            None,
            None,
            SimpleNamespace(run=lambda *arguments: moved.append(1)),
            SimpleNamespace(log_dirs=[]),
            None,
            None,
            None,
            100,
            NativeFiles(),
        )  # type: ignore[arg-type]
        async with opened.files_lock:
            waiting = asyncio.create_task(subject.advance_start(opened, LOG_DIR, 50))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            opened.closing = True
        with pytest.raises(OSError, match="no longer served here"):
            await waiting
        assert not moved

    asyncio.run(scenario())


def test_only_segments_entirely_below_the_start_are_deleted(tmp_path: Path) -> None:
    opened = partition(tmp_path / "t-0", 0, 50, 100)
    assert remove_below(opened, 70) and segments.base_offsets(opened.path) == [50, 100]
    assert sorted(path.name for path in opened.path.iterdir()) == [
        f"{base:020}{suffix}" for base in (50, 100) for suffix in (".index", ".log")
    ]
    assert not remove_below(opened, 70)


def test_nothing_of_a_recreated_partition_is_deleted(tmp_path: Path) -> None:
    opened = partition(tmp_path / "t-0", 0, 50, 100)
    recreated(opened, tmp_path / "aside")
    assert not remove_below(opened, 100)
    assert segments.base_offsets(tmp_path / "t-0") == [0, 40, 90] and segments.base_offsets(tmp_path / "aside") == [
        0,
        50,
        100,
    ]


def test_nothing_of_a_concurrently_recreated_partition_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = partition(tmp_path / "t-0", 0, 50, 100)
    listed: Callable[[Path], list[int]] = segments.base_offsets

    def deleted_meanwhile(path: Path) -> list[int]:
        if not opened.closing:
            recreated(opened, tmp_path / "aside")
        return listed(path)

    monkeypatch.setattr(upkeep.segments, "base_offsets", deleted_meanwhile)
    assert remove_below(opened, 100)
    monkeypatch.undo()
    assert segments.base_offsets(tmp_path / "t-0") == [0, 40, 90] and segments.base_offsets(tmp_path / "aside") == [100]
