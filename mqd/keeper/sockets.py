"""The sockets that the keeper opens, so that they outlive every other process of the broker:
listeners for clients and for other hosts, the keeper's socket, and the hand-off sockets.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mqd.base.cluster_config import HostListener

BACKLOG = 4096  # the kernel lowers it to net.core.somaxconn
# errors of accept() after which the connection is gone, and the next one can be accepted
_CONNECTION_GONE = frozenset(
    (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPROTO, errno.ENOTCONN, errno.EINVAL, errno.ECONNRESET)
)


def will_recur(error: OSError) -> bool:
    """Whether accept() has failed without consuming a connection (out of descriptors or memory, or
    a security module refused). Then the socket stays readable, and accept() would fail again
    immediately.
    """
    return error.errno not in _CONNECTION_GONE


class ListenError(OSError):
    """The broker cannot listen at a configured address; the message names the address, the cause
    and the remedy.
    """


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    if not host:  # all interfaces: one socket for both families if the host has IPv6
        families = [(socket.AF_INET6, ("::", port))] if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else []
        return [*families, (socket.AF_INET, ("0.0.0.0", port))]
    # as bytes: for a str, Python loads the idna codec with its tables
    name = host.encode() if host.isascii() else host
    results = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted(
        ((family, address) for family, _, _, _, address in results), key=lambda pair: pair[0] != socket.AF_INET
    )


def listen(
    host: str, port: int, setting: str = "listeners", remedy: str = "choose another with --port"
) -> socket.socket:
    """A non-blocking listening TCP socket. `setting`: the property that holds the address, for
    error messages. Raises ListenError.
    """
    address_text = f"{host or '*'}:{port}"
    try:
        addresses = _addresses(host, port)
    except socket.gaierror as error:
        raise ListenError(
            errno.EADDRNOTAVAIL,
            f"cannot listen on {address_text}: the name {host} is not known ({error.strerror}); correct the setting"
            f" {setting}",
        ) from error
    failure: OSError | None = None
    for family, address in addresses:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
            listener.bind(address)
            if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
                _avoid_pacing(listener)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    assert failure is not None
    raise ListenError(failure.errno, _explain(address_text, port, failure, setting, remedy)) from failure


def _avoid_pacing(listener: socket.socket) -> None:
    """Selects a congestion control other than BBR, which may be the host's default. BBR paces with
    a timer for every 64 KiB, which doubles the CPU cost of a fetch over loopback without any
    benefit. Connections inherit the listener's algorithm; one that began with BBR is paced forever,
    whatever is set later (sk_pacing_status), so the algorithm is set here and not after accept.
    """
    for algorithm in (b"cubic", b"reno"):
        try:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
            return
        except OSError:
            continue  # not in this kernel, or not permitted


def _explain(address_text: str, port: int, error: OSError, setting: str, remedy: str) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        return (
            f"port {port} is in use{f' by {holder}' if holder else ''} (cannot listen on {address_text}): stop that"
            f" process, or {remedy.replace('another', 'another port', 1)}"
        )
    if error.errno == errno.EACCES:
        return f"cannot listen on {address_text}: ports below 1024 are privileged; {remedy}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address_text}: this host has no such address; correct the setting {setting}"
    return f"cannot listen on {address_text}: {error.strerror}"


def port_holder(port: int, proc: str = "/proc") -> str | None:
    """ "java (pid 4711)": the process that listens on a TCP port, if this user may see it;
    None = not found.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(proc, "net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for pid in (name for name in os.listdir(proc) if name.isdigit()):
        try:
            if any(_link_target(f"{proc}/{pid}/fd/{fd}") in inodes for fd in os.listdir(f"{proc}/{pid}/fd")):
                return f"{Path(proc, pid, 'comm').read_text().strip()} (pid {pid})"
        except OSError:
            continue
    return None


def _link_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def listen_all(config: Mapping[str, str]) -> list[socket.socket]:
    """One socket for each of `listeners`, in their order. Raises ListenError, ConfigError."""
    from mqd.base.listeners import parse_listeners

    sockets: list[socket.socket] = []
    try:
        for listener in parse_listeners(config):
            sockets.append(listen(listener.host, listener.port))
    except BaseException:
        for opened in sockets:
            opened.close()
        raise
    return sockets


class ClusterSockets(NamedTuple):
    """The sockets on which other hosts reach this one, and the advertised addresses."""

    controller: socket.socket
    gossip: socket.socket  # UDP, on the controller's address
    inter_broker: socket.socket
    controller_advertised: tuple[str, int]
    inter_broker_advertised: tuple[str, int]

    def close(self) -> None:
        for opened in (self.controller, self.gossip, self.inter_broker):
            opened.close()


def _advertised_address(configured: HostListener, listener: socket.socket) -> tuple[str, int]:
    return configured.advertised_host, configured.advertised_port or listener.getsockname()[1]


def listen_cluster(config: Mapping[str, str]) -> ClusterSockets | None:
    """Listens for other hosts; returns None if this host is not in a cluster. Raises ListenError,
    ConfigError.
    """
    from mqd.base.cluster_config import cluster_listeners

    listeners = cluster_listeners(config)
    if listeners is None:
        return None
    opened: list[socket.socket] = []
    try:
        for configured, setting in (
            (listeners.controller, "controller.listener"),
            (listeners.inter_broker, "inter.broker.listener"),
        ):
            opened.append(listen(configured.host, configured.port, setting, f"set {setting}"))
        opened.append(_bind_udp(opened[0]))
    except BaseException:
        for listener in opened:
            listener.close()
        raise
    controller, inter_broker, gossip = opened
    return ClusterSockets(
        controller,
        gossip,
        inter_broker,
        _advertised_address(listeners.controller, controller),
        _advertised_address(listeners.inter_broker, inter_broker),
    )


def _bind_udp(listener: socket.socket) -> socket.socket:
    """A UDP socket at the same address and port as a TCP listener. Raises ListenError."""
    gossip = socket.socket(listener.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    address = listener.getsockname()
    try:
        if listener.family == socket.AF_INET6:
            gossip.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            )
        gossip.bind(address)
    except OSError as error:
        gossip.close()
        raise ListenError(
            error.errno,
            f"cannot receive UDP on {address[0]}:{address[1]} ({error.strerror}): choose another controller.listener",
        ) from error
    return gossip


def listen_keeper(path: Path) -> socket.socket:
    """The keeper's socket for processes and tools. An old socket file is removed, so the caller
    must hold the data directory's lock.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    listener.bind(os.fspath(path))
    os.chmod(path, 0o600)
    listener.listen(256)
    return listener


def traversal_bits(permissions: int) -> int:
    """The permission bits of 0o011 (group, others) needed on the directories above a socket with
    these permissions.
    """
    return (0o010 if permissions & 0o060 else 0) | (0o001 if permissions & 0o006 else 0)


def listen_local(path: Path, permissions: int) -> socket.socket:
    """The socket on which local clients request shared memory (mqd/acceptor/local/clients.py). The
    caller must hold the data directory's lock. If other users may connect, they may also traverse
    the directory: they cannot list it, and every other socket in it is accessible to this user
    only.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    listener.bind(os.fspath(path))
    os.chmod(path, permissions)
    os.chmod(path.parent, 0o700 | traversal_bits(permissions))
    listener.listen(BACKLOG)
    return listener


def handoff_pair() -> tuple[socket.socket, socket.socket]:
    """(acceptor's end, worker's end). The keeper keeps both, so connections in transit survive a
    restart of either side.
    """
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
