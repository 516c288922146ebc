"""Ctrl-C and SIGTERM while `mqd up` starts, and a process that is killed, with a simulated keeper: no
broker is needed.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervisor import loggers
from supervisor.options import ServerOptions

from mqd.base.paths import Layout, create, layout
from mqd.keeper import supervise
from mqd.keeper.supervise import BrokerSupervisor

IMPORTING = "import time; print('began', flush=True); time.sleep(60)"
"""A keeper that has no handler for SIGTERM yet."""

READY = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
about = {"host": "", "port": 0, "node_id": 0, "ready": True, "ending": None}
about["processes"] = [{"role": "keeper", "pid": os.getpid()}]
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(about, file)
os.replace(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""
"""A keeper of a broker that serves."""
WORKER = "mqd-worker-0"


@pytest.fixture
def places(tmp_path: Path) -> Layout:
    found = layout(tmp_path / "data")
    create(found)
    return found


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the signal handlers, which supervisord replaces permanently, and the methods that
    survive_full_disks() changes.
    """
    monkeypatch.setattr(loggers.Handler, "handleError", loggers.Handler.handleError)
    monkeypatch.setattr(loggers.RotatingFileHandler, "doRollover", loggers.RotatingFileHandler.doRollover)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def configuration(places: Layout, program: str) -> Path:
    script = places.data_dir / "keeper.py"
    script.write_text(program)
    file = places.data_dir / "supervisord.conf"
    file.write_text(
        textwrap.dedent(f"""
        [supervisord]
        nodaemon=true
        silent=true
        logfile={places.data_dir}/supervisord.log
        pidfile={places.data_dir}/supervisord.pid
        [program:mqd-keeper]
        command={sys.executable} {script}
        stdout_logfile={places.logs_dir}/mqd-keeper.log
        redirect_stderr=true
        startsecs=0
        autorestart=false
        """)
    )
    return file


def when(condition: Callable[[], bool], number: int) -> None:
    """Sends this process the signal when the condition holds."""

    def look() -> None:
        while not condition():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=look, daemon=True).start()


def began(places: Layout) -> Callable[[], bool]:
    log = places.logs_dir / "mqd-keeper.log"
    return lambda: log.exists() and "began" in log.read_text()


def children() -> set[str]:
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_ctrl_c_before_it_is_ready_is_an_interruption_and_nothing_is_left(places: Layout) -> None:
    before = children()
    when(began(places), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        supervise.run(configuration(places, IMPORTING), places, lambda about: None)
    assert children() == before


def test_sigterm_before_it_is_ready_is_not_a_failure_of_the_keeper(places: Layout) -> None:
    when(began(places), signal.SIGTERM)
    assert supervise.run(configuration(places, IMPORTING), places, lambda about: None) is None


def test_a_keeper_that_is_killed_is_reported(places: Layout) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    failure = supervise.run(configuration(places, program), places, lambda about: None)
    assert failure is not None and "killed by a signal" in failure


def test_sigterm_between_fork_and_exec_ends_the_child(places: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """With supervisord's handler the child would ignore it, and live until supervisord kills it."""
    # the first thing that the child does
    monkeypatch.setattr(ServerOptions, "setpgrp", lambda options: os.kill(os.getpid(), signal.SIGTERM))
    failure = supervise.run(configuration(places, IMPORTING), places, lambda about: None)
    assert failure is not None and "killed by a signal" in failure


def test_a_killed_process_has_a_successor_before_the_next_long_poll(
    places: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """supervisord waits for up to a second between reaping a process and looking at what became of it."""
    file = configuration(places, READY)
    text = file.read_text().replace("keeper.py", f"keeper.py {places.broker_json}")
    file.write_text(
        f"{text}[program:{WORKER}]\ncommand=/bin/sleep 60\nstdout_logfile=NONE\nstartsecs=0\nautorestart=unexpected\n"
    )
    polls: list[float] = []  # their timeouts, since the worker was reaped
    found: list[float] = []
    fork, reap, timeout = supervise._fork, BrokerSupervisor._reap_and_count, BrokerSupervisor._poll_timeout_s

    def poll_timeout_s(supervisor: BrokerSupervisor, wanted: float) -> float:
        if supervisor._is_ready and not killed and (worker := supervisor._process(WORKER).pid):
            killed.append(worker)
            os.kill(worker, signal.SIGKILL)
        polls.append(timeout(supervisor, wanted))
        return polls[-1]

    def reap_and_note(supervisor: BrokerSupervisor) -> tuple[int | None, int | None]:
        pid, status = reap(supervisor)
        if pid in killed:
            polls.clear()
        return pid, status

    def fork_and_note() -> int:
        if killed:
            found.extend(polls)
            os.kill(os.getpid(), signal.SIGTERM)
        return fork()

    killed: list[int] = []
    monkeypatch.setattr(BrokerSupervisor, "_poll_timeout_s", poll_timeout_s)
    monkeypatch.setattr(BrokerSupervisor, "_reap_and_count", reap_and_note)
    monkeypatch.setattr(supervise, "_fork", fork_and_note)
    assert supervise.run(file, places, lambda about: None) is None
    assert found and sum(found) < 0.1
