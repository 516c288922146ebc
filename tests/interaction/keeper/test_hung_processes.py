"""A process of the broker whose event loop hangs is replaced, and the broker serves as before."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from mqd.base import watchdog
from tests.interaction.traffic import PATIENCE_S, create_topic, must_produce
from tests.kafka_connection import KafkaConnection

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000  # __WALL


class HeldThread:
    """A process's main thread, stopped while it waits for events (so that it holds no lock),
    without its other threads. Raises OSError where tracing is not permitted.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        for _ in range(100):
            self._trace(PTRACE_SEIZE)
            self._trace(PTRACE_INTERRUPT)
            os.waitpid(pid, WALL)
            if "poll" in Path(f"/proc/{pid}/task/{pid}/wchan").read_text() or self._waits():
                return
            self._trace(PTRACE_DETACH)
            time.sleep(0.05)  # it was working: try again later, when it may wait
        raise AssertionError(f"process {pid} never waits for events")

    def _waits(self) -> bool:
        """Whether it stopped in a restartable system call: epoll_wait, or the call in which its
        event loop waits.
        """
        number = Path(f"/proc/{self.pid}/task/{self.pid}/syscall").read_text().split()[0]
        # epoll_pwait (arm64), epoll_wait and epoll_pwait (x86-64), epoll_pwait2
        return number.lstrip("-").isdigit() and int(number) in (22, 232, 281, 441)

    def _trace(self, request: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(request, self.pid, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")


@pytest.mark.slow
def test_a_process_whose_event_loop_hangs_is_replaced(start_broker) -> None:
    broker = start_broker()
    with KafkaConnection(port=broker.port, timeout_s=PATIENCE_S) as kafka:
        create_topic(kafka, "before")
        must_produce(kafka, "before", 0, b"one")
    before = {role: broker.pids(role) for role in ("acceptor", "controller", "worker")}
    try:
        held = [HeldThread(pids[0]) for pids in before.values()]
    except PermissionError as error:
        pytest.skip(f"tracing is not permitted here: {error}")
    deadline = time.monotonic() + watchdog.TICK_S * (watchdog.TICK_COUNT + 2) + PATIENCE_S
    for thread in held:
        while os.waitpid(thread.pid, WALL | os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline, broker.logs()
            time.sleep(0.1)  # another process ends by its own clock
    with KafkaConnection(port=broker.port, timeout_s=PATIENCE_S) as kafka:
        create_topic(kafka, "after")
        must_produce(kafka, "after", 0, b"two")
        assert must_produce(kafka, "before", 0, b"three") == 1
    after = {role: broker.pids(role) for role in before}
    assert all(before[role][0] not in after[role] for role in before)
    for name in ("mqd-acceptor", "mqd-controller", "mqd-worker-0"):
        output = (broker.data_dir / "logs" / f"{name}.log").read_text()
        assert "the event loop hangs" in output and "most recent call first" in output, output
