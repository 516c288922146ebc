"""The keeper's loop: it tracks live processes, proves deaths, and notifies the other processes. It
does nothing else, to minimize its own risk of dying.

1. A process is identified by the kernel (SO_PEERCRED) and watched through a pidfd taken from its
   own connection: a recycled pid is never mistaken for it.
2. DEAD is stored, and every other process notified, only after the pidfd has shown that the process
   has ended. A closed connection alone proves nothing: its process gets LOST_GRACE_S to end and is
   then killed, so that its resources cannot still be in use when its successor gets them.
3. A process gets the same descriptors as its predecessor with the same role and index.
4. The keeper never blocks on a peer. A process that leaves NOTICE_COUNT_MAX notices unread is
   killed; at most TOOL_COUNT_MAX tools are connected at a time.
5. The keeper serves no client. When all other processes have ended and the other hosts have been
   notified (proof.py), it refuses new connections until an acceptor is back.

One thread, one epoll. Time comes from the monotonic clock; there is no periodic work.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import secrets
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from mqd import native
from mqd.base import logging, schedule_files
from mqd.base.clock import now_ms
from mqd.keeper.broker_state import BrokerState, Process
from mqd.keeper.resources import Resources
from mqd.keeper.settings import Settings
from mqd.keeper.sockets import will_recur
from mqd.native import ProcessState
from mqd.shm.attach import peer_credentials, peer_pidfd, receive_packet, send_message
from mqd.shm.keeper_messages import (
    Alive,
    Death,
    Hello,
    Leave,
    Left,
    Probe,
    Probed,
    ProbeQuery,
    Ready,
    Refused,
    SetLogLevel,
    Shutdown,
    StatusQuery,
    ToKeeper,
    Waiting,
    Welcome,
)

LOST_GRACE_S = 1.0
SHUTDOWN_GRACE_S = 25.0
# LEAVE_S + SHUTDOWN_GRACE_S must be less than the time that supervisord waits for the keeper to end
LEAVE_S = 10.0
NOTICE_COUNT_MAX = 1024
TOOL_COUNT_MAX = 128
REFUSED_COUNT_MAX = 64  # connections refused per iteration of the loop
ACCEPT_PAUSE_S = 0.1  # pause when accept() fails and would fail again
NO_LINGER = struct.pack("ii", 1, 0)  # closes with a reset
HELLO_BYTES_MAX = 4096
# From the third death within this window, the successor is admitted only after a delay, which
# doubles with each further death: so a crash loop does not overload the host.
DEATH_WINDOW_S = 10.0
HOLD_BACK_S_MAX = 5.0

_decode = msgspec.msgpack.Decoder(ToKeeper).decode
log = logging.get("keeper")


class Keeper(BrokerState):
    def __init__(self, settings: Settings, resources: Resources, supervisor_pid: int, supervisor_is_own: bool = True):
        super().__init__(settings, resources, supervisor_pid, supervisor_is_own)
        self._selector = selectors.DefaultSelector()
        # connections of tools, and of processes not yet welcomed; oldest first
        self._tools: dict[socket.socket, None] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._leave_reason = ""  # why leaderships are being handed over before the shutdown; "" = they are not
        self._done = False
        self._tls_secret = secrets.token_bytes(32)
        self._has_reported_all_ended = self._is_refusing = False
        self._notify_voters: Callable[..., bool] | None = None
        if resources.cluster is not None:
            # imported now, because a notice is urgent; used only in a cluster
            from mqd.keeper import proof

            self._notify_voters = proof.notify_voters
        self.exit_status = 0

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Runs until all processes have ended. Returns the exit status."""
        self._watch(self.resources.keeper_socket, self._on_connect)
        self._watch_signals()
        self._watch_supervisor()
        self._publish()
        while not self._done:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, mask in self._selector.select(timeout):
                self._deliver(key, mask)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        return self.exit_status

    def _deliver(self, key: selectors.SelectorKey, mask: int) -> None:
        """Delivers the event unless an earlier event of this iteration closed or replaced its source."""
        if self._selector.get_map().get(key.fd) is key:
            key.data(mask)

    def _watch(
        self, source: Any, callback: Callable[..., None], *arguments: Any, events: int = selectors.EVENT_READ
    ) -> None:
        self._selector.register(source, events, lambda mask: callback(*arguments))

    def _forget(self, source: Any) -> None:
        try:
            self._selector.unregister(source)
        except (KeyError, ValueError):
            pass

    def _after(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._timer_count, callback))

    def _watch_signals(self) -> None:
        self._signals, write = socket.socketpair()
        self._signals.setblocking(False)
        write.setblocking(False)
        self._signal_write = write
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._watch(self._signals, self._on_signal)

    def _on_signal(self) -> None:
        numbers = self._signals.recv(64)
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self.shut_down("the broker received a request to stop")

    def _watch_supervisor(self) -> None:
        if self.supervisor_pid:
            try:
                pidfd = os.pidfd_open(self.supervisor_pid)
            except ProcessLookupError:
                self.shut_down("supervisord ended")
                return
            self._watch(pidfd, self._on_supervisor_end, pidfd)

    def _on_supervisor_end(self, pidfd: int) -> None:
        self._forget(pidfd)
        os.close(pidfd)
        self.supervisor_pid = 0
        self.shut_down("supervisord ended")

    # -- connections -------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        try:
            connection, _ = self.resources.keeper_socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) and self._tools:
                self._drop_tool(next(iter(self._tools)))
            elif will_recur(error):
                self._pause_listener(
                    self.resources.keeper_socket, lambda: self._watch(self.resources.keeper_socket, self._on_connect)
                )
            return
        connection.setblocking(False)
        if len(self._tools) >= TOOL_COUNT_MAX:
            self._drop_tool(next(iter(self._tools)))
        self._tools[connection] = None
        self._watch(connection, self._on_packet, connection, None)

    def _pause_listener(self, listener: socket.socket, resume: Callable[[], None]) -> None:
        self._forget(listener)
        self._after(ACCEPT_PAUSE_S, resume)

    def _drop_tool(self, connection: socket.socket) -> None:
        self._tools.pop(connection, None)
        self._forget(connection)
        connection.close()

    def _on_packet(self, connection: socket.socket, process: Process | None) -> None:
        try:
            packet, fds = receive_packet(connection, socket.MSG_DONTWAIT, HELLO_BYTES_MAX)
            for fd in fds:
                os.close(fd)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._on_disconnect(connection, process)
            return
        try:
            message = _decode(packet)
        except msgspec.DecodeError as error:
            log.warning(
                "a packet on the keeper's socket is malformed", pid=peer_credentials(connection)[0], error=str(error)
            )
            self._on_disconnect(connection, process)
            return
        if isinstance(message, Ready):
            if process is not None:
                self._on_ready(process, message)
        elif isinstance(message, Hello):
            if process is None:
                self._on_hello(connection, message)
        elif isinstance(message, Waiting):
            if process is not None and process.state == "starting":
                self._waiting_for = message.text
                self._publish()
        elif isinstance(message, Left):
            if process is not None and process.role == "controller" and self._leave_reason:
                self.shut_down(self._leave_reason)
        elif isinstance(message, Alive):
            if process is not None:
                process.answered_s, process.is_probed = time.monotonic(), False
        elif isinstance(message, ProbeQuery):
            self._respond(connection, Probed(self._probe_all(message.within_s)))
        elif isinstance(message, StatusQuery):
            self._respond(connection, self.status())
        elif isinstance(message, SetLogLevel):
            self._on_set_log_level(connection, message)

    def _respond(self, connection: socket.socket, message: Any, fds: list[int] | None = None) -> bool:
        try:
            send_message(connection, message, fds)
            return True
        except OSError as error:
            log.warning(
                "a response could not be sent",
                pid=peer_credentials(connection)[0],
                response=type(message).__name__,
                error=error.strerror,
            )
            return False

    def _on_disconnect(self, connection: socket.socket, process: Process | None) -> None:
        if process is None:
            self._drop_tool(connection)
            return
        self._forget(connection)
        connection.close()
        process.connection = None
        pidfd, generation = process.pidfd, process.generation
        self._after(LOST_GRACE_S, lambda: self._kill_lost(process, pidfd, generation))

    def _kill_lost(self, process: Process, pidfd: int, generation: int) -> None:
        if (
            process.pidfd == pidfd
            and process.generation == generation
            and process.state != "dead"
            and self._shutdown_reason is None
        ):
            log.error(
                "a process closed its connection to the keeper without ending; killing it",
                process=process.name,
                pid=process.pid,
            )
            self._kill(process)

    @staticmethod
    def _kill(process: Process) -> None:
        try:
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_set_log_level(self, connection: socket.socket, message: SetLogLevel) -> None:
        syslog_level = logging.SYSLOG_OF_LEVEL.get(message.level)
        if syslog_level is None:
            self._respond(
                connection,
                Refused(f"{message.level!r} is not a log level; the levels are {', '.join(logging.SYSLOG_OF_LEVEL)}"),
            )
            return
        self.resources.control.log_level = syslog_level
        log.info("log level changed", level=message.level)
        self._respond(connection, self.status())

    # -- processes ---------------------------------------------------------------------------------

    def _on_hello(self, connection: socket.socket, hello: Hello) -> None:
        process = self._by_role.get((hello.role, hello.index))
        refusal = self._refusal(connection, hello, process)
        if process is None or refusal is not None:
            log.warning("a process was refused", role=hello.role, index=hello.index, pid=hello.pid, reason=refusal)
            self._respond(connection, Refused(refusal or ""))
            self._drop_tool(connection)
            return
        if process.role == "acceptor":
            self._set_refusing(False)
        hold_back_s = self._hold_back_s(process)
        if hold_back_s > 0:
            log.warning("a process that keeps dying is held back", process=process.name, seconds=round(hold_back_s, 1))
            self._after(hold_back_s, lambda: self._on_hold_back_end(connection, hello, process))
        else:
            self._welcome(connection, hello, process)

    def _refusal(self, connection: socket.socket, hello: Hello, process: Process | None) -> str | None:
        if self._shutdown_reason is not None:
            return f"the broker is shutting down: {self._shutdown_reason}"
        if process is None:
            return f"this broker has no {hello.role} {hello.index} (it has {self.settings.worker_count} workers)"
        pid, uid = peer_credentials(connection)
        if pid != hello.pid or uid != os.getuid():
            return f"pid {hello.pid} is not the pid of the sender (pid {pid}, uid {uid})"
        if hello.abi_hash != native.abi_hash():
            return "it was built from other sources than the keeper; restart the whole broker: mqd down, mqd up"
        if process.pidfd >= 0 and _has_ended(process.pidfd):
            self._on_death(process)  # its pidfd is readable, but its event comes later in this iteration
        if process.pidfd >= 0:
            return f"another {process.name} runs as pid {process.pid}"
        return None

    def _hold_back_s(self, process: Process) -> float:
        """How long the process must wait before it is admitted, because its predecessors died."""
        now = time.monotonic()
        recent = sum(1 for died_s in process.death_times_s if now - died_s < DEATH_WINDOW_S)
        return min(HOLD_BACK_S_MAX, 0.1 * 2.0 ** (recent - 3)) if recent >= 3 else 0.0

    def _on_hold_back_end(self, connection: socket.socket, hello: Hello, process: Process) -> None:
        if connection not in self._tools:
            return  # it has disconnected in the meantime
        refusal = self._refusal(connection, hello, process)
        if refusal is not None:
            self._respond(connection, Refused(refusal))
            self._drop_tool(connection)
            return
        self._welcome(connection, hello, process)

    def _welcome(self, connection: socket.socket, hello: Hello, process: Process) -> None:
        try:
            pidfd = peer_pidfd(connection)
        except OSError:
            self._drop_tool(connection)  # it has died since it connected
            return
        process.pid, process.pidfd, process.connection = hello.pid, pidfd, connection
        process.state, process.detail, process.started_ms = "starting", "", now_ms()
        process.confinement = ""
        process.restart_count += 1
        process.notices.clear()
        control = self.resources.control
        control.set_endpoint_state(process.endpoint, ProcessState.STARTING, hello.pid)
        process.generation = control.endpoint_generation(process.endpoint)
        del self._tools[connection]
        self._forget(connection)
        self._watch(connection, self._on_packet, connection, process)
        self._watch(pidfd, self._on_pidfd, process, pidfd)
        message, fds = self._make_welcome(process)
        if self._respond(connection, message, fds):
            log.info("process attached", process=process.name, pid=process.pid, generation=process.generation)
        else:
            self._kill(process)
        self._publish()

    def _make_welcome(self, process: Process) -> tuple[Welcome, list[int]]:
        resources = self.resources
        handoffs, listeners, lock_fds, local_listeners = [], [], [], []
        cluster_sockets: list[socket.socket] = []
        cluster = resources.cluster
        if cluster is not None and process.role == "controller":
            cluster_sockets = [cluster.controller, cluster.gossip]
        elif cluster is not None and process.role == "acceptor":
            cluster_sockets = [cluster.inter_broker]
        if process.role == "worker":
            handoffs, lock_fds = [resources.handoffs[process.index][1]], resources.lock_fds
        elif process.role == "acceptor":
            handoffs, listeners = [pair[0] for pair in resources.handoffs], resources.listeners
            local_listeners = [resources.local_listener] if resources.local_listener is not None else []
        message = Welcome(
            endpoint=process.endpoint,
            generation=resources.generation,
            worker_count=self.settings.worker_count,
            control_name=resources.control_name,
            arena_bytes=resources.arena_bytes,
            keeper_pid=os.getpid(),
            supervisor_pid=self.supervisor_pid,
            supervisor_is_own=self.supervisor_is_own,
            listeners=resources.addresses,
            eventfd_count=len(resources.eventfds),
            handoff_count=len(handoffs),
            listener_count=len(listeners),
            lock_count=len(lock_fds),
            segment_count=len(resources.segment_fds),
            local_listener_count=len(local_listeners),
            cluster_socket_count=len(cluster_sockets),
            controller_listener=cluster.controller_advertised if cluster is not None else None,
            inter_broker_listener=cluster.inter_broker_advertised if cluster is not None else None,
            config=self.settings.config,
            tls_secret=self._tls_secret if process.role == "worker" else b"",
        )
        return message, [
            *resources.eventfds,
            *(connection.fileno() for connection in (*handoffs, *listeners)),
            *lock_fds,
            *(listener.fileno() for listener in (*local_listeners, *cluster_sockets)),
            *resources.segment_fds,
        ]

    def _on_ready(self, process: Process, message: Ready) -> None:
        process.state, process.detail, process.confinement = "running", message.detail, message.confinement
        process.answered_s, process.is_probed = time.monotonic(), False
        self.resources.control.set_endpoint_state(process.endpoint, ProcessState.RUNNING, process.pid)
        log.info("process ready", process=process.name, pid=process.pid)
        if self.is_ready():
            log.info("the broker is ready", after_ms=now_ms() - self.started_ms)
        self._publish()

    def _probe_all(self, within_s: float) -> list[str]:
        """Probes all serving processes, and returns those that did not answer within `within_s`."""
        running = [process for process in self.processes if process.state == "running"]
        for process in running:
            if not process.is_probed:
                process.is_probed = True
                process.notices.append(Probe())
                self._send_notices(process)
        return [process.name for process in running if time.monotonic() - process.answered_s > within_s]

    def _on_pidfd(self, process: Process, pidfd: int) -> None:
        if process.pidfd == pidfd:
            self._on_death(process)

    def _on_death(self, process: Process) -> None:
        """Publishes a proven death, then notifies and wakes the other processes, before anything else."""
        control = self.resources.control
        death = Death(process.role, process.index, process.endpoint, process.generation, process.pid)
        control.set_endpoint_state(process.endpoint, ProcessState.DEAD, process.pid)
        self._forget(process.pidfd)
        os.close(process.pidfd)
        if process.connection is not None:
            self._forget(process.connection)
            process.connection.close()
        process.pidfd, process.connection, process.state = -1, None, "dead"
        process.notices.clear()
        process.death_times_s.append(time.monotonic())
        self._broadcast(death)
        for eventfd in self.resources.eventfds:
            try:
                os.eventfd_write(eventfd, 1)
            except BlockingIOError:
                pass  # it is already readable
        if self._leave_reason and process.role == "controller":
            self.shut_down(self._leave_reason)
        if self._shutdown_reason is None:
            log.warning("process died", process=process.name, pid=process.pid, generation=death.generation)
            self._report_death(process)
        self._publish()
        self._maybe_end()

    def _report_death(self, ended: Process) -> None:
        """In a cluster, notifies the voters that this host's controller has ended, or that all
        processes but the acceptor have: no other process can report it.
        """
        if self._notify_voters is None or self.resources.cluster is None or self._leave_reason:
            return
        all_ended = all(process.pidfd < 0 for process in self.processes if process.role != "acceptor")
        if ended.role != "acceptor" and (all_ended or ended.role == "controller"):
            informed = self._notify_voters(
                self.settings.config,
                self.settings.places.run_dir,
                self.resources.control,
                self.resources.cluster.gossip,
                self._after,
                all_ended,
            )
            self._has_reported_all_ended = informed and all_ended
        if all_ended and self._has_reported_all_ended and self._by_role["acceptor", 0].pidfd < 0:
            self._set_refusing(True)

    def _set_refusing(self, refuse: bool, repeat: bool = False) -> None:
        """Starts or stops refusing connections. They are refused after all other processes have
        ended, until an acceptor is back: other hosts then lead this host's partitions, and a client
        that is not refused would wait instead of trying them. `repeat`: act even if nothing
        changes, so that a paused listener is watched again.
        """
        if refuse == self._is_refusing and not repeat:
            return
        self._is_refusing = refuse
        for listener in self.resources.listeners:
            self._forget(listener)
            if refuse:
                listener.setblocking(False)
                self._watch(listener, self._refuse, listener)

    def _refuse(self, listener: socket.socket) -> None:
        for _ in range(REFUSED_COUNT_MAX):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if will_recur(error):
                    self._pause_listener(listener, lambda: self._set_refusing(self._is_refusing, repeat=True))
                return
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            connection.close()

    # -- notices -----------------------------------------------------------------------------------

    def _broadcast(self, message: Any) -> None:
        for process in self.processes:
            if process.connection is not None:
                process.notices.append(message)
                self._send_notices(process)

    def _send_notices(self, process: Process) -> None:
        connection = process.connection
        if connection is None:
            return
        while process.notices:
            try:
                send_message(connection, process.notices[0])
            except BlockingIOError:
                if len(process.notices) > NOTICE_COUNT_MAX:
                    log.error(
                        "a process does not read the keeper's notices; killing it",
                        process=process.name,
                        pid=process.pid,
                    )
                    self._kill(process)
                    return
                self._set_watched_events(process, selectors.EVENT_READ | selectors.EVENT_WRITE)
                return
            except OSError:
                return  # the process is ending; its pidfd will show it
            process.notices.popleft()
        self._set_watched_events(process, selectors.EVENT_READ)

    def _set_watched_events(self, process: Process, events: int) -> None:
        connection = process.connection
        if connection is None or self._selector.get_key(connection).events == events:
            return

        def on_event(mask: int) -> None:
            if mask & selectors.EVENT_WRITE:
                self._send_notices(process)
            if mask & selectors.EVENT_READ and process.connection is connection:
                self._on_packet(connection, process)

        self._selector.modify(connection, events, on_event)

    # -- the end -----------------------------------------------------------------------------------

    def shut_down(self, reason: str) -> None:
        """Begins the shutdown. In a cluster the controller first hands over this host's
        leaderships, within LEAVE_S, or until a second request to stop.
        """
        controller = self._by_role[("controller", 0)]
        if self._shutdown_reason is not None:
            return
        if self.resources.cluster is not None and controller.state == "running" and not self._leave_reason:
            self._leave_reason = reason
            log.info("handing over the leaderships before the shutdown", reason=reason)
            controller.notices.append(Leave(reason))
            self._send_notices(controller)
            self._after(LEAVE_S, lambda: self.shut_down(reason))
            return
        self._shutdown_reason = reason
        log.info("shutting down", reason=reason)
        self._publish()  # before any process ends because of it
        self._broadcast(Shutdown(reason))
        schedule_files.end_timer(self.settings.places.run_dir)
        self._after(SHUTDOWN_GRACE_S, self._end_by_force)
        self._maybe_end()

    def _end_by_force(self) -> None:
        for process in self.processes:
            if process.pidfd >= 0:
                log.error("a process did not end in time; killing it", process=process.name, pid=process.pid)
                self._kill(process)
        self.exit_status = 1
        self._after(1.0, self._give_up)

    def _give_up(self) -> None:
        self._done = True

    def _maybe_end(self) -> None:
        if self._shutdown_reason is not None and all(process.pidfd < 0 for process in self.processes):
            self._done = True


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
