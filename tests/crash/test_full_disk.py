"""A file system without a single free byte: the broker starts there, serves reads and requests that
free space, and refuses records with a clear error (a tmpfs in its own mount namespace).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import broker
from tests.crash.full_disk import KAFKA_STORAGE_ERROR

ROOT = Path(__file__).resolve().parents[2]
SIZE = "96m"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", ["stopped", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_broker_starts_where_no_byte_is_free(tmp_path: Path, end: str) -> None:
    """Three times in a row, the disk filled by others each time; then space is freed through the
    broker alone.
    """
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no right to mount a file system in a namespace of its own: run as root")
    steps = (
        f"mount -t tmpfs -o size={SIZE} tmpfs '{mount}' && exec '{sys.executable}' -m tests.crash.full_disk '{mount}'"
        f" {'kill' if end == 'killed' else ''} {'forked' if broker.is_forked else ''}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", steps],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    output = [json.loads(line) for line in done.stdout.splitlines()]
    used = [one for one in output if one["step"] == "used"]
    assert [one["free"] for one in output if one["step"] == "full"] == [0, 0, 0]
    assert len(used) == 3 and all(
        one["read"] == one["expected"] and one["left"] == one["expected"] - 50 for one in used
    ), output
    assert [one["error"] for one in used] == [KAFKA_STORAGE_ERROR] * 3, output
    assert output[-1]["step"] == "ended" and output[-2]["step"] == "room"
