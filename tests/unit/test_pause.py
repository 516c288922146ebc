"""A process that a test pauses does nothing once it is paused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.broker import pause

BUSY = """
import threading
def turn():
    while True:
        pass
for _ in range(8):
    threading.Thread(target=turn, daemon=True).start()
print("all run", flush=True)
turn()
"""


def test_all_its_threads_have_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "all run\n"
        pause(process.pid)
        states = [
            path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process.pid}/task").glob("*/stat")
        ]
        assert states == ["T"] * 9
    finally:
        process.kill()
        process.communicate()
