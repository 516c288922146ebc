"""The settings passed to a keeper, and those that it derives."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqd.base import config as configuration
from mqd.base.paths import layout
from mqd.keeper import settings
from mqd.shm import segments


@pytest.mark.parametrize(
    "free_mebibytes, arena_mebibytes, expected",
    [(None, 16, 4), (1024, 16, 4), (64, 16, 2), (64, 4, 4), (40, 16, 1), (1, 16, 1)],
)
def test_the_default_number_of_workers_fits_the_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mebibytes: int | None, arena_mebibytes: int, expected: int
) -> None:
    """A container has 64 MiB of /dev/shm, however many CPUs."""
    free = None if free_mebibytes is None else free_mebibytes << 20
    monkeypatch.setattr(segments, "free_bytes", lambda data_dir: free)
    monkeypatch.setattr(configuration, "usable_cpu_count", lambda: 4)
    config = {"receive.arena.bytes": str(arena_mebibytes << 20)}
    assert settings.resolve(config, layout(tmp_path)).worker_count == expected
    reported = settings.resolve({**config, "worker.count": "3"}, layout(tmp_path))
    assert reported.worker_count == 3  # and the keeper reports what to do if that is too many
