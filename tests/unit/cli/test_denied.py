"""Tools of a user without access to the broker's directory do not claim that no broker runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STRANGER = 54321

# import the program before dropping privileges: only root may be able to read the tree
_AS_A_STRANGER = """
import os, sys
from mqd.cli import main
from mqd.cli.verbs import down, log_level, status
from mqd.shm import attach, keeper_messages, locks, tools
os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
sys.argv[1:2] = []
sys.exit(main.main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who may not reach a directory")
@pytest.mark.parametrize("verb", [["status"], ["status", "--format", "json"], ["down"], ["log-level"]])
def test_a_user_without_access_gets_an_error(verb: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "data").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", _AS_A_STRANGER, str(STRANGER), *verb, "--data-dir", f"{name}/data"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1, done
    assert "it is not known whether a broker runs there" in done.stderr and "uid 0" in done.stderr
    assert "no broker runs" not in done.stdout + done.stderr
