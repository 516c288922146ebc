"""A real broker as a child process, the way a user starts one: `mqd up`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from mqd.cli.verbs import status
from tests import preloaded
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_port

is_forked = False  # by tests/preloaded.py; set for the quick tier
START_SECONDS = STOP_SECONDS = PATIENCE_S


# tests read descriptors and memory of its processes in /proc, which only root may otherwise
LOOKED_INTO = {} if os.geteuid() == 0 else {"core.files.allow": "true"}


class BrokerFailed(AssertionError):
    """The broker failed to start or stop; the message holds its logs."""


class Broker:
    """One broker. `data_dir` survives stop() and kill_all(), so start() again is a restart on the
    same data and port.
    """

    start_seconds = START_SECONDS

    def __init__(
        self,
        data_dir: Path,
        workers: int = 2,
        config: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.data_dir = Path(data_dir)
        self.workers = workers
        self.config = {**LOOKED_INTO, **(config or {})}
        self.environment = dict(environment or {})
        self.port = free_port()
        self.process: subprocess.Popen[str] | preloaded.Forked | None = None
        self.ready_line = ""
        self.ready_seconds = 0.0

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        settings = [word for name, value in self.config.items() for word in ("--set", f"{name}={value}")]
        return [
            sys.executable,
            "-m",
            "mqd.cli.main",
            "up",
            "--data-dir",
            str(self.data_dir),
            "--port",
            str(self.port),
            "--workers",
            str(self.workers),
            *settings,
        ]

    def start(self) -> Broker:
        began = time.monotonic()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        # Errors go to a file: the broker would block on a full pipe that is not read.
        with open(self.data_dir / "up.stderr", "w") as errors:
            self.process = self.run(self.command(), errors)
        assert self.process.stdout is not None
        while not self.ready_line.startswith("mqd ready"):
            left = began + self.start_seconds - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(left, 0))
            line = self.process.stdout.readline() if readable else ""
            if not line:
                code, logs = self.process.poll(), self.logs()
                self.kill_all()
                raise BrokerFailed(f"no `mqd ready` within {self.start_seconds:.0f} s (exit {code})\n{logs}")
            self.ready_line = line
        self.ready_seconds = time.monotonic() - began
        return self

    def run(self, command: list[str], errors: IO[str]) -> subprocess.Popen[str] | preloaded.Forked:
        if (
            is_forked
            and self.environment.keys() <= preloaded.FORKED_VARIABLES
            and command[: len(preloaded.COMMAND)] == preloaded.COMMAND
        ):
            environment = {**os.environ, **self.environment}
            return preloaded.PRELOADED.start_piped(command[len(preloaded.COMMAND) :], errors, environment=environment)
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )

    def status(self) -> dict:
        """The output of `mqd status --format json`, without starting a process: tests poll this
        hundreds of times.
        """
        return status.broker_status(self.data_dir)

    def running(self) -> list[dict]:
        """The status of each running process. A process that died and has not been restarted has no
        pid.
        """
        return [process for process in self.status()["processes"] if process["pid"] is not None]

    def pids(self, role: str) -> list[int]:
        return [process["pid"] for process in self.running() if process["role"] == role]

    def pid(self, name: str) -> int | None:
        """None: it died and has not been restarted yet."""
        return next((process["pid"] for process in self.running() if process["name"] == name), None)

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        eventually(lambda: self.status()["ready"], lambda: f"the broker is ready again\n{self.logs()}", seconds)

    def stop(self) -> int | None:
        """SIGTERM, as a user of supervisord would send it. Returns the exit code."""
        if self.process is None:
            return None
        children = self._children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logs = self.logs()
                self.kill_all()
                raise BrokerFailed(f"did not stop within {STOP_SECONDS:.0f} s\n{logs}") from None
        _wait_for_end(children)
        return self._forget()

    def kill_all(self) -> None:
        """kill -9 of all processes of the broker at once, supervisord included: what a power button
        does to processes.
        """
        if self.process is None:
            return
        # stopped first: supervisord restarts no process meanwhile, and no process has time to
        # notice that another one ended and to shut down cleanly
        with contextlib.suppress(OSError):
            pause(self.process.pid)
        pids = [self.process.pid, *self._children()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait(STOP_SECONDS)
        _wait_for_end(pids[1:])  # they are no longer our children: init reaps them
        self._forget()

    def _children(self) -> list[int]:
        assert self.process is not None
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in text.split()]

    def _forget(self) -> int | None:
        assert self.process is not None
        code = self.process.poll()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        self.ready_line = ""
        return code

    def logs(self, lines: int = 40) -> str:
        parts = []
        for path in [self.data_dir / "up.stderr", *sorted((self.data_dir / "logs").glob("*.log"))]:
            if path.exists() and path.stat().st_size:
                tail = path.read_text(errors="replace").splitlines()[-lines:]
                parts.append(f"--- {path.name}\n" + "\n".join(tail))
        return "\n".join(parts)

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_exc) -> None:
        self.stop()


def is_alive(pid: int) -> bool:
    """A process whose main thread has ended is a zombie, while its other threads still hold files
    and locks.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _wait_for_end(pids: list[int]) -> None:
    eventually(lambda: not any(map(is_alive, pids)), "all processes of the broker have ended", STOP_SECONDS)


def pause(pid: int) -> None:
    """SIGSTOP; returns when all threads have stopped. One thread takes the signal, and on a busy
    machine the others run on until it is scheduled: long enough for a reactor to fetch hundreds of
    records.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_SECONDS
    while not _is_paused(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)  # the kernel tells the parent only


def _is_paused(pid: int) -> bool:
    tasks = [Path(f"/proc/{pid}/task/{thread}/stat") for thread in os.listdir(f"/proc/{pid}/task")]
    try:
        return all(task.read_text().rpartition(")")[2].split()[0] in "TZ" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):  # one of them ended meanwhile
        return False
