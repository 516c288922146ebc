"""A broker without connections sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from os import getpid
from pathlib import Path

from tests.interaction.traffic import PATIENCE_S

WINDOW_S = 5.0
# the limit for a process with all its threads in one window: the watchdog, and timers of 10 s or
# longer. Anything that wakes once a second exceeds it
WAKES_MAX = 4


def wakes(pids: Sequence[int]) -> dict[tuple[int, str, str], int]:
    """How often each thread has gone to sleep voluntarily. Load on the machine does not change
    that.
    """
    found = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = (task / "status").read_text()
            count = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            found[pid, task.name, status.split()[1]] = count
    return found


def busiest(pids: Sequence[int]) -> tuple[int, dict[tuple[int, str, str], int]]:
    """The most wake-ups of a process in one window, and of which threads."""
    before = wakes(pids)
    time.sleep(WINDOW_S)
    more = {thread: count - before.get(thread, 0) for thread, count in wakes(pids).items()}
    total = max(sum(count for thread, count in more.items() if thread[0] == pid) for pid in pids)
    return total, {thread: count for thread, count in more.items() if count}


def test_the_workers_of_an_idle_broker_sleep(start_broker) -> None:
    broker = start_broker()
    deadline = time.monotonic() + PATIENCE_S
    count, threads = busiest(broker.pids("worker"))  # it may still be starting up
    while count > WAKES_MAX:
        assert time.monotonic() < deadline, threads
        count, threads = busiest(broker.pids("worker"))


def test_a_thread_that_polls_is_noticed() -> None:
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(1.0 - 0.05):
            pass

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert busiest([getpid()])[0] > WAKES_MAX
    finally:
        ended.set()
        thread.join()
