"""Reasons of process ends, by their wait statuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mqd.base import restarts


@pytest.mark.parametrize(
    ("code", "number", "reason"),
    [
        (0, 0, restarts.STOPPED),
        (1, 0, restarts.FAILED),
        (restarts.HUNG_STATUS, 0, restarts.HUNG),
        (0, signal.SIGTERM, restarts.STOPPED),
        (0, signal.SIGKILL, restarts.KILLED),
        (0, signal.SIGABRT, restarts.ABORTED),
        (0, signal.SIGSEGV, restarts.CRASHED),
    ],
)
def test_a_reason(code: int, number: int, reason: str) -> None:
    assert restarts.reason(code << 8 | number) == reason and reason in restarts.REASONS


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert restarts.read(tmp_path) is None
    counted = {"mqd-worker-0": {restarts.KILLED: 2}}
    restarts.write(tmp_path, counted)
    assert restarts.read(tmp_path) == counted
    (tmp_path / restarts.FILE).write_text("[]")
    assert restarts.read(tmp_path) is None
