"""Ends a process whose event loop hangs, after logging the stack of each thread. supervisord then
starts another process within a second, without an operator.

    watchdog.start(asyncio.get_running_loop(), "acceptor")

A thread schedules a callback in the loop and counts ticks of TICK_S until the callback has run. It
counts ticks, not seconds: while a process is stopped (SIGSTOP, a paused virtual machine), its ticks
stop too, so the pause does not count. A hang with the GIL held is not detected. A process is not
ended while its loop is blocked writing a log line: supervisord, which reads the lines, could not
start another process then, and a worker's reactor continues to serve.
"""

import asyncio
import faulthandler
import logging as standard_logging
import os
import sys
import threading
import time

from mqd.base import logging
from mqd.base.restarts import HUNG_STATUS

TICK_S = 10.0
# number of unanswered ticks that count as a hang; a loop that is merely busy answers within seconds
TICK_COUNT = 6
LOG_TIMEOUT_S = 5.0  # the reader of the log may hang, too


def start(loop: asyncio.AbstractEventLoop, role: str, tick_s: float = TICK_S, tick_count: int = TICK_COUNT) -> None:
    """Starts the watchdog, which runs until the loop is closed. Called in the loop's thread."""
    threading.Thread(
        target=_watch, args=(loop, threading.get_ident(), role, tick_s, tick_count), name="watchdog", daemon=True
    ).start()


def _watch(loop: asyncio.AbstractEventLoop, thread_id: int, role: str, tick_s: float, tick_count: int) -> None:
    answered = threading.Event()
    while True:
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return  # the loop is closed
        for _ in range(tick_count):
            time.sleep(tick_s)
            if answered.is_set():
                break
        else:
            if _is_logging(thread_id):
                continue
            _end(role, tick_s * tick_count)
        answered.clear()


def _is_logging(thread_id: int) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code.co_filename == standard_logging.__file__:
            return True
        frame = frame.f_back
    return False


def _end(role: str, hung_s: float) -> None:
    forced_exit = threading.Timer(LOG_TIMEOUT_S, os._exit, [HUNG_STATUS])
    forced_exit.daemon = True
    forced_exit.start()
    logging.get(role).error(
        "the event loop hangs; the process ends and is restarted. The stacks of its threads follow", seconds=hung_s
    )
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(HUNG_STATUS)
