"""The broker's notifications to systemd, from start to end; a socket plays systemd."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from tests.broker import Broker
from tests.interaction.traffic import eventually


def test_ready_watched_stopped(tmp_path: Path) -> None:
    """A process that does not respond starves the watchdog; once it responds again, the watchdog is
    fed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        told: list[str] = []

        def received(word: str) -> bool:
            """Messages since the last call."""
            manager.settimeout(0.2)
            try:
                while True:
                    told.extend(manager.recv(4096).decode().split("\n"))
            except TimeoutError:
                pass
            if word not in told:
                return False
            del told[: told.index(word) + 1]
            return True

        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000000"}
        with Broker(tmp_path / "data", workers=1, environment=environment) as broker:
            assert received("READY=1")
            eventually(lambda: received("WATCHDOG=1"), "the first feeding")
            for process in ("mqd-acceptor", "mqd-keeper"):
                pid = broker.pid(process)
                os.kill(pid, signal.SIGSTOP)
                try:
                    silent = f"does not answer: {process}" if process != "mqd-keeper" else "the keeper does not answer"
                    eventually(lambda: received(f"STATUS={silent}"), "the name of the silent one")
                    time.sleep(2.5)  # the watchdog is fed every second: that it is not can only be observed over time
                    received("")
                    assert "WATCHDOG=1" not in told
                finally:
                    os.kill(pid, signal.SIGCONT)
                eventually(lambda: received("WATCHDOG=1"), "another feeding")
            variables = Path(f"/proc/{broker.pid('mqd-worker-0')}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in variables and b"WATCHDOG_USEC" not in variables
        eventually(lambda: received("STOPPING=1"), "the end")
