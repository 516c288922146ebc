"""The broker's processes are forks of supervisord, which has already imported their modules.
Otherwise five new interpreters would import mostly the same modules, and a killed process would be
back only after its imports.

A fork continues as if it had been started by exec: supervisord sets its arguments, environment,
signals and files, and what `ps` shows. The fork inherits its parent's memory and memory layout,
including every secret there; the keeper would pass these secrets on anyway. supervisord has no
threads (mqd.keeper.supervise).

Another supervisord (`mqd up --print-supervisord`), or another Python, starts the programs by exec.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROGRAMS = ("mqd.keeper", "mqd.controller", "mqd.worker", "mqd.acceptor", "mqd.timer")
# modules that the programs import only after they have started
_LATER_IMPORTS = (
    "mqd.keeper.loop",
    "mqd.keeper.resources",
    "mqd.keeper.broker_state",
    "mqd.keeper.identity",
    "mqd.keeper.sockets",
    "mqd.worker.worker",
    "mqd.controller.membership",
    "encodings.idna",
)
# variables for tests, which the native library reads when it is loaded
_LOAD_TIME_VARIABLES = frozenset({"MQD_FILE_JOURNAL", "MQD_FILE_FAULTS"})
_PR_SET_NAME = 15
# indexes of the start addresses of the arguments and the environment, among the fields that follow
# the name in /proc/self/stat; each end address is in the next field
_ARGUMENTS_FIELD, _ENVIRONMENT_FIELD = 45, 47


@functools.cache
def preload() -> None:
    """Imports the programs, once. Called by a process that becomes their parent and does nothing else."""
    if not sys.flags.safe_path:
        del sys.path[0]  # like -P: import no module from a script's directory or the working directory
    gc.disable()
    for name in (*(f"{program}.__main__" for program in PROGRAMS), *_LATER_IMPORTS):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def main_of(argv: Sequence[str]) -> Callable[[], Any] | None:
    """The main function of the program that `argv` would execute, if it is one of PROGRAMS run by
    this Python interpreter; otherwise None.
    """
    if len(argv) < 4 or argv[:3] != [sys.executable, "-P", "-m"] or argv[3] not in PROGRAMS:
        return None
    return importlib.import_module(f"{argv[3]}.__main__").main


def execve(filename: str, argv: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces os.execve for supervisord, in the child that it has forked."""
    main = main_of(argv)
    if main is not None and environment.keys().isdisjoint(_LOAD_TIME_VARIABLES):
        become(argv, environment, main)
    os.execve(filename, argv, environment)


def become(argv: Sequence[str], environment: Mapping[str, str], main: Callable[[], Any]) -> NoReturn:
    """Resets the process as execve would, then runs the program."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = argv[3:]
        _set_title(argv)
        result = main()
        status = result if isinstance(result, int) else 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
        os._exit(status)


def _set_title(argv: Sequence[str]) -> None:
    """Sets /proc/PID/cmdline and comm. Clears /proc/PID/environ, which still shows the environment
    that the parent was started with: it may contain secrets that the parent has removed since.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) < _ENVIRONMENT_FIELD + 2:
        return  # an emulator (qemu-user), which reports no addresses
    begin, end = map(int, fields[_ARGUMENTS_FIELD : _ARGUMENTS_FIELD + 2])
    size = end - begin
    title = b"".join(word.encode() + b"\0" for word in argv)
    if len(title) > size:  # no room: leave out the interpreter and its options
        title = b"".join(word.encode() + b"\0" for word in argv[3:])[: size - 1]
    ctypes.memmove(begin, title.ljust(size, b"\0"), size)
    begin, end = map(int, fields[_ENVIRONMENT_FIELD : _ENVIRONMENT_FIELD + 2])
    ctypes.memset(begin, 0, end - begin)
    name = os.environ.get("SUPERVISOR_PROCESS_NAME", argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
