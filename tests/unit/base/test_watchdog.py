"""A process whose event loop hangs ends and reports where; one that is slow, has been stopped or is
shutting down is left alone.
"""

import os
import signal
import subprocess
import sys
import time

from mqd.base.restarts import HUNG_STATUS

PROGRAM = """
import asyncio, sys, time
from mqd.base import logging, watchdog

def busy_loop():
    while True:
        pass

async def run_process(what, seconds):
    watchdog.start(asyncio.get_running_loop(), "acceptor", 0.1, 10)
    print("began", flush=True)
    if what == "hang":
        busy_loop()
    elif what == "block":
        time.sleep(60)
    elif what == "log":
        for _ in range(100):
            logging.get("acceptor").syslog(4, "x" * 10_000 + str(_))
    elif what == "slow":
        for _ in range(8):
            time.sleep(0.3)
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(seconds)
    print("ended", flush=True)

logging.setup("acceptor")
asyncio.run(run_process(sys.argv[1], float(sys.argv[2])))
"""


def start(what: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what, str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    return process


def test_a_process_that_hangs_ends_and_reports_where() -> None:
    for what, where in (("hang", "in busy_loop"), ("block", "in run_process")):
        process = start(what)
        rest, output = process.communicate(timeout=30)
        assert process.returncode == HUNG_STATUS and rest == ""
        assert "the event loop hangs" in output and "seconds=1" in output and where in output, output


def test_a_busy_process_is_not_ended() -> None:
    process = start("slow")
    assert process.communicate(timeout=30) == ("ended\n", "") and process.returncode == 0


def test_a_process_that_waits_for_its_log_reader_is_not_ended() -> None:
    """Its reader, supervisord, writes the log to a disk, which may hang."""
    process = start("log")
    assert process.stdout is not None
    time.sleep(3.0)  # to observe that nothing happens: three times as long as a loop may hang
    rest, output = process.communicate(timeout=30)
    assert rest == "ended\n" and process.returncode == 0 and "hangs" not in output and output.count("\n") == 100


def test_a_stopped_process_continues() -> None:
    process = start("live", 4.0)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.0)  # to observe that nothing happens: three times as long as a loop may hang
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=30) == ("ended\n", "") and process.returncode == 0


def test_a_process_ends_without_waiting_for_the_watchdog() -> None:
    """The thread sleeps for seconds when the loop ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("0.1, 10", "60, 10"), "live", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.communicate(timeout=20) == ("began\nended\n", "") and process.returncode == 0
