"""Killing one process of a broker, and waiting for the broker to be whole again."""

from __future__ import annotations

import contextlib
import os
import signal

from mqd.shm.attach import KeeperError
from mqd.shm.keeper_messages import Status
from mqd.shm.tools import KeeperConnection
from tests.broker import Broker
from tests.crash.workload import wait_until
from tests.polling import PATIENCE_S

READY_SECONDS = PATIENCE_S


def status(broker: Broker) -> Status:
    with KeeperConnection(broker.data_dir) as tool:
        return tool.status()


def pids(broker: Broker) -> dict[str, int]:
    """Of the processes that run: the keeper reports pid 0 for one that ended, and a signal to 0 would
    go to this process and its group.
    """
    return {process.name: process.pid for process in status(broker).processes if process.pid}


def kill(broker: Broker, name: str) -> int:
    """Raises ProcessLookupError while the process is not running."""
    pid = pids(broker).get(name)
    if pid is None:
        raise ProcessLookupError(f"{name} is not running")
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_and_wait(broker: Broker, name: str, seconds: float = READY_SECONDS) -> None:
    """kill -9; returns when its successor runs and the broker reports that it is ready."""
    before = kill(broker, name)
    wait_until_healthy(broker, {name: before}, seconds)


def wait_until_healthy(broker: Broker, before: dict[str, int], seconds: float = READY_SECONDS) -> None:
    """Waits until the broker is ready with processes other than those of `before`."""

    def whole() -> bool:
        with contextlib.suppress(KeeperError, OSError):
            now = status(broker)
            alive = {process.name: process.pid for process in now.processes}
            return now.ready and all(alive.get(name, 0) not in (0, pid) for name, pid in before.items())
        return False

    wait_until(whole, seconds, lambda: f"whole after kill -9 of {before}: {status(broker)}\n{broker.logs()}")
