"""Attaches a process to its broker: connects to the keeper, receives its descriptors and maps the
shared memory.

    client = KeeperClient.connect(run_dir, "worker", 0)     # waits for the keeper, at most 10 s
    ... set up, recover ...
    client.report_ready()
    client.watch(loop, on_death=..., on_shutdown=..., on_parent_death=...)

1. The process never serves without the keeper and supervisord. The socket and pidfds show when one
   of these has ended; pids and timeouts are not used for this.
2. Everything mapped here stays mapped until the process ends: the native side keeps raw pointers
   into it.
3. The process's own arena is mapped writable, every other one read-only.

Concurrency: one thread. The socket blocks until report_ready() has been called; after that it is
read only when it is readable.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mqd import native
from mqd.base.crash_on_error import crash_on_error
from mqd.base.paths import trusts
from mqd.shm import segments
from mqd.shm.keeper_messages import (
    KEEPER_LOST,
    Alive,
    Death,
    FromKeeper,
    Hello,
    Leave,
    Left,
    Probe,
    Ready,
    Refused,
    Shutdown,
    Waiting,
    Welcome,
)

MESSAGE_BYTES_MAX = 128 << 10
DESCRIPTOR_COUNT_MAX = 253  # the kernel's SCM_MAX_FD
CONNECT_TIMEOUT_S = 10.0
SO_PEERPIDFD = 77  # Linux 6.5

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromKeeper).decode


class KeeperError(RuntimeError):
    """The keeper cannot be reached, has refused this process, or has ended. The message names the
    cause and the remedy.
    """


class KeeperDenied(KeeperError):
    """This user may not access the keeper, so it is unknown whether there is one."""


def send_message(connection: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Sends one packet, with descriptors if any. Raises OSError."""
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    connection.sendmsg([_encode(message)], control, socket.MSG_NOSIGNAL)


def receive_packet(
    connection: socket.socket, flags: int = 0, size_bytes_max: int = MESSAGE_BYTES_MAX
) -> tuple[bytes, list[int]]:
    """(bytes, descriptors); b"" means that the peer has closed the connection. Raises OSError;
    EMSGSIZE if the packet did not fit (its descriptors are closed).
    """
    data, ancillary, message_flags, _ = connection.recvmsg(
        size_bytes_max, socket.CMSG_SPACE(DESCRIPTOR_COUNT_MAX * 4), flags | socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(payload) // 4
            fds.extend(struct.unpack(f"{count}i", payload[: count * 4]))
    if message_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMSGSIZE, "a packet on the keeper's socket was cut off")
    return data, fds


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of the socket, as recorded by the kernel when that
    process connected or began to listen.
    """
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of the socket's peer. Raises OSError if it has ended."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(peer_credentials(connection)[0])


def _describe_owner(path: Path) -> str:
    """The owner of the deepest accessible directory above `path`, as text."""
    for directory in path.parents:
        try:
            return f"its user (uid {os.stat(directory).st_uid})"
        except OSError:
            continue
    return "its user"


def connect_keeper(path: str | os.PathLike[str], timeout_s: float = 0.0) -> socket.socket:
    """Connects to a keeper, waiting for it while it starts. Raises KeeperError."""
    deadline, pause = time.monotonic() + timeout_s, 0.002
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(os.fspath(path))
            _, uid = peer_credentials(connection)
            if not trusts(Path(path).parent, uid):
                raise KeeperDenied(
                    f"the process that listens at {path} runs as another user (uid {uid}), so it is not this user's"
                    " broker"
                )
            return connection
        except KeeperDenied:
            connection.close()
            raise
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            connection.close()
            if time.monotonic() + pause > deadline:
                raise KeeperError(
                    f"no keeper listens at {path}: is the broker running? (start it with: mqd up)"
                ) from error
        except PermissionError as error:
            connection.close()
            raise KeeperDenied(
                f"this user may not reach {path}, so it is not known whether a broker runs there: try again as"
                f" {_describe_owner(Path(path))} or as root"
            ) from error
        except OSError as error:
            connection.close()
            raise KeeperError(f"cannot connect to {path}: {error.strerror}") from error
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


class KeeperClient:
    """The attached process. Attributes, all set by connect:

    welcome, config     the keeper's response; the broker's properties (name -> text, resolved)
    control             native.Control, attached
    control_read_fd     the control segment opened read-only, to be passed to local clients
    links               mapping of the links segment
    endpoint            this process's end of the links, with the index endpoint_index
    endpoint_count      how many endpoints the broker has
    generation          of this process, in the control segment
    eventfds            one per endpoint; this process's own is at endpoint_index
    arenas              mappings by endpoint, None if it has none; `arena` is this process's
    handoff_fds         worker: [its own end]; acceptor: one per worker, by worker index
    listeners           acceptor: the listening sockets, in the order of welcome.listeners
    local_listener      acceptor: the socket at which this host's clients request shared memory, or
                        None
    cluster_sockets     controller: TCP listener and UDP socket for other hosts; acceptor: the
                        inter-broker listener; [] on a host that accepts no other hosts
    lock_fds            held open, so that the directory locks last as long as this process
    """

    def __init__(self, connection: socket.socket, role: str, index: int, welcome: Welcome, fds: list[int]):
        self._connection = connection
        self.role = role
        self.index = index
        self.welcome = welcome
        self.config: dict[str, str] = welcome.config
        self._parent_fds: list[tuple[int, str]] = []
        self.exit_status = 0  # clean shutdown
        self.confinement = ""  # restrictions in force, for `mqd status` (mqd/security/confinement.py)
        remaining_fds = iter(fds)
        self.eventfds = [next(remaining_fds) for _ in range(welcome.eventfd_count)]
        self.handoff_fds = [next(remaining_fds) for _ in range(welcome.handoff_count)]
        self.listeners = [socket.socket(fileno=next(remaining_fds)) for _ in range(welcome.listener_count)]
        self.lock_fds = [next(remaining_fds) for _ in range(welcome.lock_count)]
        self.local_listener = socket.socket(fileno=next(remaining_fds)) if welcome.local_listener_count else None
        self.cluster_sockets = [socket.socket(fileno=next(remaining_fds)) for _ in range(welcome.cluster_socket_count)]
        segment_fds = [next(remaining_fds) for _ in range(welcome.segment_count)]
        self.endpoint_index = welcome.endpoint
        self.endpoint_count = welcome.eventfd_count
        self._map(*segment_fds)
        self._open_parent_pidfds()

    @classmethod
    def connect(
        cls, run_dir: str | os.PathLike[str], role: str, index: int = 0, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> KeeperClient:
        """Sends Hello and attaches. Raises KeeperError, native.NativeError (another build) or
        segments.SegmentError.
        """
        deadline = time.monotonic() + timeout_s
        connection = connect_keeper(Path(run_dir) / "keeper.sock", timeout_s)
        try:
            send_message(connection, Hello(role, index, os.getpid(), native.abi_hash()))
            # The keeper may delay the response for some seconds if this process has died often. If
            # the keeper ends, the socket is closed.
            connection.settimeout(max(1.0, deadline - time.monotonic()) + 10.0)
            packet, fds = receive_packet(connection)
            connection.settimeout(None)
            if not packet:
                raise KeeperError("the keeper ended before it answered: see its log")
            response = _decode(packet)
            if isinstance(response, Refused):
                raise KeeperError(f"the keeper refused this process: {response.reason}")
            if isinstance(response, Shutdown):
                raise KeeperError(f"the broker is shutting down: {response.reason}")
            if not isinstance(response, Welcome):
                raise KeeperError(f"the keeper answered Hello with {type(response).__name__}")
            announced_count = (
                response.eventfd_count
                + response.handoff_count
                + response.listener_count
                + response.lock_count
                + response.local_listener_count
                + response.cluster_socket_count
                + response.segment_count
            )
            if len(fds) != announced_count:
                raise KeeperError(f"the keeper sent {len(fds)} descriptors, not the number that it announced")
            return cls(connection, role, index, response, fds)
        except TimeoutError as error:
            connection.close()
            raise KeeperError(f"the keeper did not answer within {timeout_s + 10:.0f} s") from error
        except BaseException:
            connection.close()
            raise

    def _map(self, control_fd: int, control_read_fd: int, links_fd: int, *arena_fds: int) -> None:
        self.control = native.Control.attach(segments.attach(control_fd, "control", native.control_size_bytes()))
        self.control_read_fd = control_read_fd
        self.links = segments.attach(links_fd, "links", native.links_size_bytes(self.endpoint_count))
        self.arenas: list[mmap.mmap | None] = [
            segments.attach(fd, f"arena-{endpoint}", size_bytes, writable=endpoint == self.endpoint_index)
            for endpoint, (fd, size_bytes) in enumerate(zip(arena_fds, self.welcome.arena_bytes, strict=True))
        ]
        self.arena = self.arenas[self.endpoint_index]
        self.generation = self.control.endpoint_generation(self.endpoint_index)
        self._endpoint: native.Endpoint | None = None

    @property
    def endpoint(self) -> native.Endpoint:
        """Opened on first use. A worker must not use it: its reactor opens the only endpoint."""
        if self._endpoint is None:
            self._endpoint = native.Endpoint(
                self.control, self.links, self.endpoint_index, self.endpoint_count, self.eventfds
            )
        return self._endpoint

    def _open_parent_pidfds(self) -> None:
        try:
            self._parent_fds.append((peer_pidfd(self._connection), "the keeper ended"))
            if self.welcome.supervisor_pid:
                self._parent_fds.append((os.pidfd_open(self.welcome.supervisor_pid), "supervisord ended"))
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):  # EINVAL: a dead peer, before Linux 6.15
                raise
            raise KeeperError("the keeper or supervisord ended while this process attached") from error

    # -- after attaching ---------------------------------------------------------------------------

    def report_ready(self, detail: str = "") -> None:
        """Reports that this process serves now. `detail`: "metrics_port=12345" from the acceptor.
        Raises KeeperError.
        """
        try:
            send_message(self._connection, Ready(detail, self.confinement))
        except OSError as error:
            raise KeeperError("the keeper ended") from error

    def report_waiting(self, text: str) -> None:
        """Reports what this process is waiting for before it can be ready."""
        try:
            send_message(self._connection, Waiting(text[:1000]))
        except OSError:
            pass

    def report_left(self) -> None:
        """Sends the controller's response to Leave. Not needed if the keeper has ended."""
        try:
            send_message(self._connection, Left())
        except OSError:
            pass

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def parent_fds(self) -> list[int]:
        """Descriptors that become readable when the keeper or supervisord has ended; for event loops
        other than asyncio's.
        """
        return [fd for fd, _ in self._parent_fds]

    def parent_death(self) -> str | None:
        """Returns text that says which parent has ended; this process must then end too. Returns None
        if neither has. Never blocks.
        """
        poll = select.poll()
        for fd, _ in self._parent_fds:
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return next((reason for fd, reason in self._parent_fds if fd in ended), None)

    def receive(self) -> list[Death | Leave | Shutdown]:
        """Returns the notices that have arrived, and answers probes; never blocks. Raises
        KeeperError when the keeper has ended.
        """
        notices: list[Death | Leave | Shutdown] = []
        while True:
            try:
                packet, fds = receive_packet(self._connection, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return notices
            except OSError as error:
                raise KeeperError(f"the keeper's socket failed: {error.strerror}") from error
            for fd in fds:
                os.close(fd)
            if not packet:
                if notices:
                    return notices  # the next call will raise KeeperError
                raise KeeperError("the keeper ended")
            message = _decode(packet)
            if isinstance(message, Death | Leave | Shutdown):
                notices.append(message)
            elif isinstance(message, Probe):
                self._send_alive()

    def watch(
        self,
        loop: Any,
        on_death: Callable[[Death], None],
        on_shutdown: Callable[[str], None],
        on_parent_death: Callable[[str], None],
        on_leave: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Calls the callbacks from an asyncio loop. `on_parent_death` is called at most once, and
        never after `on_shutdown`; after either, the process must end with `exit_status`.
        """
        is_ending = False

        def parent_died(reason: str) -> None:
            nonlocal is_ending
            unwatch()
            if not is_ending:
                is_ending = True
                if self.welcome.supervisor_is_own:
                    self._end_supervisor()
                else:
                    self.exit_status = KEEPER_LOST
                on_parent_death(reason)

        @crash_on_error
        def handle_notices() -> None:
            nonlocal is_ending
            try:
                notices = self.receive()
            except KeeperError as error:
                parent_died(str(error))
                return
            for notice in notices:
                if isinstance(notice, Death):
                    on_death(notice)
                elif isinstance(notice, Leave):
                    on_leave(notice.reason)
                elif not is_ending:
                    is_ending = True
                    on_shutdown(notice.reason)

        def unwatch() -> None:
            loop.remove_reader(self._connection.fileno())
            for fd, _ in self._parent_fds:
                loop.remove_reader(fd)

        loop.add_reader(self._connection.fileno(), handle_notices)
        for fd, reason in self._parent_fds:
            loop.add_reader(fd, parent_died, reason)

    def _send_alive(self) -> None:
        with contextlib.suppress(OSError):  # the keeper has ended, or is slow and will probe again
            self._connection.sendmsg([_encode(Alive())], [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _end_supervisor(self) -> None:
        """Ends a supervisord that runs only this broker: since it does not restart the keeper, the
        whole broker must end with the keeper, even if no `mqd up` is there to stop it. The signal
        is sent through a pidfd, so that it cannot reach another process.
        """
        for fd, _ in self._parent_fds[1:]:
            try:
                signal.pidfd_send_signal(fd, signal.SIGTERM)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """Detaches from the broker. The mappings stay."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self._connection.close()
        for fd, _ in self._parent_fds:
            os.close(fd)
        self._parent_fds.clear()
