"""supervisord for `mqd up`: in this process, in the foreground, with the shipped supervisord.conf.

Additions to supervisord, which remains responsible for starting, restarting, stopping and logging:

1. It reacts immediately. supervisord checks for signals and exited children only once a second; here
   a signal wakes its poll, and after any event it polls quickly a few times.
2. The broker ends when the keeper does; `failure` then holds the reason, unless the keeper received
   a request to stop.
3. It reports when the broker is ready, and gives up on a process that keeps failing before that.
4. A full disk costs log lines, and nothing else. (Unmodified, supervisord reports a failed write on
   its standard error and, if that fails too, closes the pipe of the process whose line it was.)
5. A process that exits on SIGTERM (status 0) while the broker continues is started again: this is
   the way to restart the acceptor.
6. Its children become the broker's programs without execve (mqd.keeper.forking).

Single-threaded on purpose: supervisord forks, and a fork while other threads run may inherit their
locks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from supervisor import events, loggers
from supervisor.medusa import asyncore_25 as asyncore
from supervisor.options import ServerOptions
from supervisor.states import SupervisorStates
from supervisor.supervisord import Supervisor

from mqd.base import restarts
from mqd.base.paths import Layout
from mqd.keeper import forking, systemd
from mqd.shm.keeper_messages import CANNOT_START

KEEPER = "mqd-keeper"
TIMER = "mqd-timer"
START_FAILURE_COUNT_MAX = 5
_QUICK_POLL_S = 0.005
_STARTUP_POLL_S = 0.01
# iterations of the loop from the end of a child to the start of its successor: read its output,
# reap it, note its state, start the successor
_QUICK_POLL_COUNT = 4


_roll_over = loggers.RotatingFileHandler.doRollover


def _roll_over_or_keep(handler: Any) -> None:
    try:
        _roll_over(handler)
    # no space for another file; or there was no space earlier, and the stream is closed
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            handler.stream = open(handler.baseFilename, "ab")


def survive_full_disks() -> None:
    """Point 4 of the module docstring, for this process. Data that cannot be written stays
    in the stream's buffer while there is room in it, and is written once the disk has space.
    """
    loggers.Handler.handleError = lambda handler: None
    loggers.RotatingFileHandler.doRollover = _roll_over_or_keep


class BrokerStatus(msgspec.Struct):
    """The relevant part of run/broker.json."""

    host: str
    port: int
    node_id: int
    ready: bool
    ending: str | None
    processes: list[dict[str, Any]]
    waiting: str = ""  # what the broker waits for while it is not ready

    @property
    def keeper_pid(self) -> int:
        return next((process["pid"] for process in self.processes if process["role"] == "keeper"), 0)


def _fork() -> int:
    """Like os.fork(), for a child that becomes another program. No signal handler of this process
    ever runs in the child: it would only record a SIGTERM, and execve would lose the record.
    """
    handled = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        pid = os.fork()
        if not pid:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


class _Waker:
    """Makes a file descriptor readable when a signal arrives. Implements the part of supervisord's
    dispatcher interface that its loop uses.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.fd = self._read.fileno()
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        try:
            self._read.recv(4096)
        except BlockingIOError:
            pass

    def handle_error(self) -> None:
        pass

    def close(self) -> None:  # supervisord closes everything in its socket map
        signal.set_wakeup_fd(-1)
        self._read.close()
        self._write.close()


class _AdjustablePoller:
    """supervisord's poller with an adjustable timeout."""

    def __init__(self, poller: Any, timeout_s: Callable[[float], float], on_events: Callable[[], None]):
        self._poller = poller
        self._timeout_s = timeout_s
        self._on_events = on_events

    def poll(self, timeout: float) -> tuple[list[int], list[int]]:
        readable, writable = self._poller.poll(self._timeout_s(timeout))
        if readable or writable:
            self._on_events()
        return readable, writable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


class BrokerSupervisor(Supervisor):
    """`on_ready` is called once, when every process is up. After main(): `failure` is None, or the
    reason why the broker ended unexpectedly; `interrupted`: Ctrl-C came before it was ready.
    """

    def __init__(
        self,
        options: ServerOptions,
        layout: Layout,
        on_ready: Callable[[BrokerStatus], None],
        on_waiting: Callable[[str], None],
    ):
        super().__init__(options)
        survive_full_disks()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        self.failure: str | None = None
        self.interrupted = False
        self._layout = layout
        self._on_ready, self._on_waiting = on_ready, on_waiting
        self._waiting_for = ""
        self._is_ready = False
        self._quick_polls_left = 1  # the first children should not wait for the first timeout
        self._failure_counts: dict[str, int] = {}
        # sizes at the start: everything before these positions was logged by an earlier run
        self._log_sizes = {path.stem: path.stat().st_size for path in layout.logs_dir.glob("*.log")}
        options.poller = _AdjustablePoller(options.poller, self._poll_timeout_s, self._poll_soon)
        receive = options.signal_receiver.receive

        def record_interruption(number: int, frame: Any) -> None:
            self.interrupted |= number == signal.SIGINT and not self._is_ready
            receive(number, frame)

        options.signal_receiver.receive = record_interruption
        self._restarts: restarts.Restarts = {}
        self._reap = options.waitpid
        options.waitpid = self._reap_and_count
        options.fork = _fork
        options.execve = forking.execve
        self._manager = systemd.ServiceManager.from_environment(os.environ, os.getpid())
        self._watchdog = systemd.WatchdogFeeder(self._manager, layout.keeper_socket, options.get_socket_map())
        self._has_notified_stopping = False

    def runforever(self) -> None:
        waker = _Waker()
        self.options.get_socket_map()[waker.fd] = waker
        receive = self.options.signal_receiver.receive
        # supervisord would restart everything when its terminal closes
        signal.signal(
            signal.SIGHUP,
            signal.SIG_IGN if self._outlives_terminal else lambda _number, frame: receive(signal.SIGTERM, frame),
        )
        self._publish_restarts()  # an empty file replaces the one from an earlier run
        for kind in (events.ProcessStateExitedEvent, events.ProcessStateStoppedEvent):
            events.subscribe(kind, self._on_exit)
        super().runforever()

    # -- waiting -----------------------------------------------------------------------------------

    def _poll_soon(self) -> None:
        self._quick_polls_left = _QUICK_POLL_COUNT

    def _poll_timeout_s(self, timeout: float) -> float:
        if not self._is_ready and not self.stopping:
            self._check_ready()
        if self._is_ready:
            self._watchdog.tick()
        if self.options.mood < SupervisorStates.RUNNING and not self._has_notified_stopping:
            self._has_notified_stopping = True
            self._manager.notify("STOPPING=1")
        if self._quick_polls_left:
            self._quick_polls_left -= 1
            return _QUICK_POLL_S
        return timeout if self._is_ready and not self.stopping else _STARTUP_POLL_S

    def _status(self) -> BrokerStatus | None:
        """The status of our keeper; None while there is none."""
        try:
            status = msgspec.json.decode(self._layout.broker_json.read_bytes(), type=BrokerStatus)
        except (OSError, msgspec.DecodeError):
            return None
        keeper = self._process(KEEPER)
        return status if keeper is not None and keeper.pid and keeper.pid == status.keeper_pid else None

    def _check_ready(self) -> None:
        status = self._status()
        if status is not None and status.waiting and status.waiting != self._waiting_for:
            self._waiting_for = status.waiting
            self._on_waiting(status.waiting)
        if status is not None and status.ready:
            self._is_ready = True
            self._on_ready(status)
            self._manager.notify("READY=1", f"MAINPID={os.getpid()}")

    def _process(self, name: str) -> Any:
        group = self.process_groups.get(name)
        return group.processes.get(name) if group is not None else None

    # -- ended processes --------------------------------------------------------------------------

    def _reap_and_count(self) -> tuple[int | None, int | None]:
        """Calls supervisord's waitpid() and counts the exit by its reason: supervisord itself does
        not keep the signal.
        """
        pid, status = self._reap()
        process = self.options.pidhistory.get(pid) if pid else None
        if process is not None and status is not None and self.options.mood >= SupervisorStates.RUNNING:
            counts = self._restarts.setdefault(process.config.name, {})
            reason = restarts.reason(status)
            counts[reason] = counts.get(reason, 0) + 1
            self._publish_restarts()
        return pid, status

    def _publish_restarts(self) -> None:
        with contextlib.suppress(OSError):  # a full disk costs only a number on the metrics page
            restarts.write(self._layout.run_dir, self._restarts)

    def _on_exit(self, event: Any) -> None:
        self._poll_soon()
        process = event.process
        name = process.config.name
        if name == KEEPER:
            # This also applies while the broker is being stopped: before supervisord notices the
            # keeper's death, another process may already have told it to stop.
            if process.exitstatus != 0 and self.failure is None and not self._stopped_before_it_began(event):
                error_text = self._last_error(name) if process.exitstatus > 0 else ""
                self.failure = (
                    error_text or f"the keeper ended ({_describe_exit(process.exitstatus)}); see {self._log_path(name)}"
                )
            self._end()
            return
        if name == TIMER:
            return  # the timer ends when no schedules remain, and the broker starts without it
        if self.options.mood < SupervisorStates.RUNNING or not isinstance(event, events.ProcessStateExitedEvent):
            return
        status = self._status()
        if status is not None and status.ending is not None:
            process.exitstatus = 0  # the keeper would only refuse a new process
        elif event.expected and status is not None:
            # not a real exit status: it makes supervisord restart the process
            process.exitstatus = -1
        elif not event.expected and not self._is_ready:
            self._failure_counts[name] = self._failure_counts.get(name, 0) + 1
            if process.exitstatus == CANNOT_START or self._failure_counts[name] >= START_FAILURE_COUNT_MAX:
                error_text = self._last_error(name) or "it logged nothing"
                self.failure = (
                    f"{name} does not start ({_describe_exit(process.exitstatus)}): {error_text};"
                    f" see {self._log_path(name)}"
                )
                self._end()

    def _stopped_before_it_began(self, event: Any) -> bool:
        """Whether the keeper was ended by our SIGTERM before it had a handler for it. No other
        process knew the keeper yet, so none can have stopped us because of its death.
        """
        return (
            isinstance(event, events.ProcessStateStoppedEvent)
            and event.process.exitstatus < 0
            and not self._layout.broker_json.exists()
        )

    def _log_path(self, name: str) -> Path:
        return self._layout.logs_dir / f"{name}.log"

    def _last_error(self, name: str) -> str:
        return last_error(self._log_path(name), self._log_sizes.get(name, 0))

    def _end(self) -> None:
        self.options.mood = SupervisorStates.SHUTDOWN


def _describe_exit(status: int | None) -> str:
    """The status in words; supervisord reports -1 for a signal."""
    return "killed by a signal" if status is None or status < 0 else f"exit status {status}"


def _error_text(line: str) -> str | None:
    """The text of one of our error lines, in either format; None for other lines."""
    if " ERROR " in line:
        return line.partition(" ERROR ")[2].strip().partition(" ")[2]
    if line.startswith("{"):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        return str(fields.get("message")) if fields.get("level") == "error" else None
    return None


def last_error(log_path: Path, start_position: int, searched_bytes_max: int = 4096) -> str:
    """Returns the last error in a log after `start_position`, otherwise its last line (the end of a
    traceback), or "" if the log is empty or cannot be read.
    """
    try:
        with log_path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = start_position if start_position <= end else 0  # rotated in the meantime
            file.seek(max(start, end - searched_bytes_max))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return next((error for line in reversed(lines) if (error := _error_text(line))), lines[-1] if lines else "")


def run(
    configuration: Path,
    layout: Layout,
    on_ready: Callable[[BrokerStatus], None],
    on_waiting: Callable[[str], None] = lambda text: None,
) -> str | None:
    """Runs the broker until it has ended; the environment must hold the variables that the
    configuration refers to. Returns None, or the reason why it ended unexpectedly. Raises
    KeyboardInterrupt, after everything has ended, if Ctrl-C came before it was ready.
    """
    forking.preload()
    options = ServerOptions()
    options.realize(["-c", str(configuration)], doc="mqd")
    options.first, options.test = True, False
    supervisor = BrokerSupervisor(options, layout, on_ready, on_waiting)
    try:
        supervisor.main()
    except asyncore.ExitNow:
        pass
    finally:
        options.close_httpservers()
        options.close_logger()
    if supervisor.interrupted:
        raise KeyboardInterrupt
    return supervisor.failure
