"""Brokers that are forked, not executed: nine tenths of the CPU seconds of a broker's start are
imports, and the quick tier starts some five hundred brokers.

One process imports all modules of a broker; each `mqd up` (or other command) is a fork of it that
continues as the command would, just as each process of a broker is a fork of its supervisord
(mqd.keeper.forking). Everything else is unchanged: parents, sessions, files, signals and
environments of the processes. The slow tier executes `mqd up`, and so do tests of the start itself
(some of interaction/keeper), those with variables other than FORKED_VARIABLES, and tests/packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mqd import _native
from mqd.keeper import forking

COMMAND = [sys.executable, "-m", "mqd.cli.main"]
_PYTHON = (sys.executable, "-P", "-m")
# imported lazily: importing them in a fork costs up to a tenth of a second
_ALSO = (
    *("mqd.cli.main", "mqd.cli.verbs.up", "mqd.cli.secure", "mqd.cli.joining"),
    *("mqd.keeper.supervise", "mqd.keeper.reserve", "mqd.acceptor.metrics.token", "mqd.shm.locks"),
    *("mqd.acceptor.handlers.configs.config_entries", "mqd.acceptor.handlers.configs.broker_loggers"),
    *("mqd.acceptor.handlers.groups.group_requests", "mqd.acceptor.handlers.security.authorized"),
    *("mqd.acceptor.handlers.topics.topic_names", "encodings.idna"),
    *("supervisor.dispatchers", "supervisor.process", "supervisor.socket_manager", "supervisor.web"),
)
# the core reads these when it is loaded, which happened before the fork: see _watched
_JOURNAL, _FAULTS = "MQD_FILE_JOURNAL", "MQD_FILE_FAULTS"
FORKED_VARIABLES = frozenset({_JOURNAL, _FAULTS})
_REQUEST_BYTES_MAX = 1 << 18
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


class Forked:
    """The part of subprocess.Popen that tests use, for a child of another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                while self.poll() is None:
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        raise subprocess.TimeoutExpired("mqd up", timeout or 0.0)
                    select.select([pidfd], [], [], left)
            finally:
                os.close(pidfd)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The process that is forked; it lives as long as the test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        arguments: Sequence[str],
        output: IO[str],
        errors: IO[str],
        *,
        given: IO[str] | None = None,
        environment: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        program: str = "mqd",
    ) -> Forked:
        """`mqd ARGUMENTS`, or one of the broker's programs, in its own session, with these files."""
        request = {
            "program": program,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
        }
        files = [file.fileno() for file in (output, errors, given) if file is not None]
        with self._lock:
            connection = self._connected()
            # a grandchild becomes our child when the process between us ends
            _adopt(True)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], files)
                pid = int(connection.recv(32))
            finally:
                _adopt(False)
        return Forked(pid)

    def start_piped(self, arguments: Sequence[str], errors: IO[str], **options: Any) -> Forked:
        """Like start, with a pipe from its standard output."""
        reading, writing = os.pipe()
        with open(writing, "w") as output:
            forked = self.start(arguments, output, errors, **options)
        forked.stdout = open(reading)
        return forked

    def run(
        self,
        *arguments: str,
        given: str | None = None,
        environment: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """`mqd ARGUMENTS`, as subprocess.run does."""
        with contextlib.ExitStack() as files:
            output, errors, stdin = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            stdin.write(given or "")
            stdin.seek(0)
            command = self.start(
                arguments, output, errors, given=None if given is None else stdin, environment=environment, cwd=cwd
            )
            try:
                code = command.wait(timeout)
            finally:
                command.send_signal(signal.SIGKILL)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(["mqd", *arguments], code, output.read(), errors.read())

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdout=subprocess.DEVNULL,
                )
        return self._socket


def _adopt(orphans: bool) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, int(orphans))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


PRELOADED = Preloaded()


# -- in the process that is forked -----------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 3)
        if not request:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(writing, b"%d" % pid)
                os._exit(0)
            for fd in (connection.fileno(), reading, writing):
                os.close(fd)
            _go_on(json.loads(request), fds)
        os.close(writing)
        pid_text = os.read(reading, 32)
        os.close(reading)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
        connection.send(pid_text)


def _go_on(request: dict[str, Any], files: Sequence[int]) -> None:
    """`files`: output, errors, and perhaps input."""
    program = request["program"]
    os.setsid()
    os.chdir(request["cwd"])
    for fd, place in zip(files, (1, 2, 0)):
        os.dup2(fd, place)
        os.close(fd)
    _prctl(_PR_SET_DUMPABLE, 1)
    main = importlib.import_module(f"{program}.__main__").main
    forking.become([*_PYTHON, program, *request["arguments"]], request["environment"], _watched(main))


def _watched(main: Callable[[], Any]) -> Callable[[], Any]:
    """Does what the core's constructor does in a process that is executed. A test that requests
    faults and does not get them would prove nothing.
    """

    def watched() -> Any:
        journal, faults = (os.environ.get(name, "").encode() or None for name in (_JOURNAL, _FAULTS))
        if (journal or faults) and ctypes.CDLL(_native.__file__).mqd_file_watch(journal, faults) < 0:
            raise OSError(f"{_JOURNAL} or {_FAULTS} is not valid: {journal!r}, {faults!r}")
        return main()

    return watched


def _execve(filename: str, argv: list[str], environment: Mapping[str, str]) -> None:
    """supervisord's, in the child that it has forked."""
    main = forking.main_of(argv)
    if main is not None:
        _prctl(_PR_SET_DUMPABLE, 1)
        forking.become(argv, environment, _watched(main))
    os.execve(filename, argv, environment)


def _main() -> None:
    for name in _ALSO:
        importlib.import_module(name)
    forking.preload()
    forking.execve = _execve
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
