"""The end of the acceptor's process, whatever state its threads are in."""

import subprocess
import sys

import pytest

PROCESS = """
import asyncio, concurrent.futures, sys, threading
from types import SimpleNamespace
from mqd.acceptor import __main__ as acceptor
from mqd.acceptor.checks import Checks
from mqd.base import logging

forever = threading.Event()

async def run(client, places):
    asyncio.get_running_loop().run_in_executor(None, forever.wait)
    checks = Checks()
    asyncio.get_running_loop().run_in_executor(checks._threads, forever.wait)
    checks.close()
    logging.get("acceptor").info("acceptor ended")
    {outcome}

acceptor.run = run
acceptor.KeeperClient = SimpleNamespace(connect=lambda *_: SimpleNamespace(config={{}}, control=SimpleNamespace(log_level=6)))
sys.exit(acceptor.main())
"""


@pytest.mark.parametrize(
    ("outcome", "status", "line"),
    [
        ("return 0", 0, "acceptor ended"),
        ("return 1", 1, "acceptor ended"),
        ("raise OSError('no socket')", 1, "no socket"),
        ("raise ValueError('our own fault')", 1, "our own fault"),
    ],
)
def test_it_ends_with_its_status_and_its_last_log_line_while_threads_hang(outcome: str, status: int, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS.format(outcome=outcome)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status and line in done.stderr
