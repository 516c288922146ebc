"""A fork that becomes a program of the broker is like an executed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest

from mqd.keeper import forking

PARENT = """
    import json, os, signal, sys
    from pathlib import Path
    from mqd.keeper import forking

    def main():
        own = Path("/proc/self")
        print(json.dumps({
            "argv": sys.argv,
            "environment": dict(os.environ),
            "seen": (own / "environ").read_bytes().decode(),
            "title": (own / "cmdline").read_bytes().decode().strip("\\0").split("\\0"),
            "name": (own / "comm").read_text().strip(),
            "handled": [int(number) for number in signal.valid_signals() if callable(signal.getsignal(number))],
            "wakeup": signal.set_wakeup_fd(-1),
        }))
        END

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    pid = os.fork()
    if not pid:
        argv = [sys.executable, "-P", "-m", "mqd.worker", "--index", "7"]
        forking.become(argv, {"SUPERVISOR_PROCESS_NAME": "mqd-worker-7"}, main)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run(end: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(PARENT).replace("END", end)
    command = [sys.executable, "-c", code, "room for the title " * 10]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_arguments_environment_signals_and_process_title() -> None:
    done = run("return 3", {"A_SECRET": "of-the-parent"})
    assert (done.returncode, done.stderr) == (3, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["argv"] == ["mqd.worker", "--index", "7"]
    assert found["environment"] == {"SUPERVISOR_PROCESS_NAME": "mqd-worker-7"}
    assert found["seen"].strip("\0") == ""
    assert found["title"] == [sys.executable, "-P", "-m", "mqd.worker", "--index", "7"]
    assert found["name"] == "mqd-worker-7"
    assert found["handled"] == [2]  # SIGINT, by Python itself
    assert found["wakeup"] == -1


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("sys.exit(4)", 4, ""), ("sys.exit()", 0, ""), ("raise ValueError('why')", 1, "ValueError: why")],
)
def test_exit_status_and_traceback(end: str, status: int, words: str) -> None:
    done = run(end, {})
    assert done.returncode == status and words in done.stderr


def test_only_the_broker_s_programs_run_by_this_python_are_forked() -> None:
    mine = [sys.executable, "-P", "-m", "mqd.worker", "--index", "0"]
    assert forking.main_of(mine) is not None
    assert forking.main_of(["/another/python", *mine[1:]]) is None
    assert forking.main_of([sys.executable, "-P", "-m", "http.server"]) is None
    assert forking.main_of([sys.executable, "-m", "mqd.worker"]) is None
