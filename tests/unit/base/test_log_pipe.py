"""Log lines into a pipe with a slow reader, from a process that is stopped and continued."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.polling import eventually

LINES = 30
PROGRAM = f"""
from mqd.base import logging
logger = logging.setup("acceptor")
for number in range({LINES}):
    logger.syslog(4, "x" * 10_000 + f" line {{number}}")
"""


def _held(fd: int) -> int:
    """How many bytes are in the pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _is(state: str, pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith(state)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_no_line_is_cut(unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stderr is not None
    fd = process.stderr.fileno()
    eventually(lambda: _held(fd) > 50_000 and _is("S", process.pid), "the pipe is full")
    for number, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
        process.send_signal(number)
        eventually(lambda state=state: _is(state, process.pid), f"the process is in state {state}")
    lines = process.stderr.read().splitlines()
    assert process.wait() == 0
    assert [line.rpartition(" line ")[2] for line in lines] == [str(number) for number in range(LINES)]
