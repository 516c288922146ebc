"""Lets a client find the client socket of a broker that it knows only by `bootstrap.servers`.

The keeper publishes symbolic links to `run/client.sock`, named after its listening addresses; a
client on the same host looks for the link that has its bootstrap server's address.

    DIRECTORY/0.0.0.0@9092.net-f0000000-5bd2a1c0     listens on every IPv4 address
    DIRECTORY/127.0.0.1@9092.net-f0000000-5bd2a1c0   listens on this address
    DIRECTORY/.NAME.lock                             locked by the keeper that created the link

The end of a name identifies the network namespace: its number, and the beginning of the machine's
boot id.

DIRECTORY is /run/mqd and $XDG_RUNTIME_DIR/mqd (/run/user/UID/mqd if the variable is not set): the
broker creates its links in each of the two to which it may write, and in ~/.mqd if it may write to
neither. A client uses the first directory that has a link to its broker. If $MQD_RUN_RENDEZVOUS is
set, broker and client use the directories in it (separated by colons) instead.

1. A directory is trusted only if it is a real directory that belongs to root or to this process's
   user, or to any user if its parent belongs to root and only root can write to the parent.
2. A link proves nothing: its broker may have been killed, and its path may lead elsewhere in
   another container. The client sends the name in its hello, and a broker that does not serve that
   name refuses (mqd/acceptor/local/clients.py). One socket at a time listens on an address and port
   of a network namespace, so a broker that serves the name is the broker that TCP would reach.
3. A link whose lock is held is never replaced or removed by another broker. The kernel releases the
   lock when the keeper ends, however it ends. A broker removes its own links when it ends, and the
   links of killed brokers when it starts.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PORT_DEFAULT = 9092
_NAME = re.compile(r"[0-9a-f.:]+@\d+\.net-[0-9a-f]+-[0-9a-f]+")  # the result of server_name()
_SWEEP_COUNT_MAX = 8192
_LOCK_ATTEMPT_COUNT = 10
_HOME_SUBDIRECTORY = ".mqd"
_DIRECTORIES_VARIABLE = "MQD_RUN_RENDEZVOUS"
SOCKET_VARIABLE = "MQD_SOCKET"


class Rendezvous(NamedTuple):
    """The result of `find`: `path` of the client socket, or None; `reason`, for a log line;
    `server`, to be sent in the hello: the name that the broker must serve ("" = any broker).
    """

    path: str | None
    reason: str
    server: str = ""


class PublishedLink(NamedTuple):
    """A link that this broker has created, and the descriptor that holds its lock."""

    link: Path
    lock_fd: int


def directories() -> list[Path]:
    """The directories of links in search order, whether they exist or not."""
    configured = os.environ.get(_DIRECTORIES_VARIABLE)
    if configured:
        return [Path(text) for text in configured.split(":") if text]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return [
        Path("/run/mqd"),
        Path(runtime) / "mqd",
        *([home / _HOME_SUBDIRECTORY] if (home := _home_directory()) else []),
    ]


def _home_directory() -> Path | None:
    """The home directory in the user database: broker and client agree on it, whatever $HOME is."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def network_namespace() -> str:
    """This process's network namespace, as it appears at the end of link names. A namespace's
    number is unique only on its machine and while the namespace exists, and several machines may
    share a directory. Raises OSError without /proc.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{os.stat('/proc/self/ns/net').st_ino:x}-{boot}"


def server_name(host: str, port: int) -> str:
    """The name of one bound listening address in this network namespace. Raises OSError without
    /proc.
    """
    return f"{_canonical(host)}@{port}.net-{network_namespace()}"


def server_names(addresses: Iterable[tuple[str, int]]) -> frozenset[str]:
    """The names of all addresses that a broker listens on. Empty without /proc; then no client
    finds the broker.
    """
    try:
        return frozenset(server_name(host, port) for host, port in addresses)
    except OSError:
        return frozenset()


def _canonical(address: str) -> str:
    """The canonical spelling of an address: IPv4-mapped IPv6 becomes IPv4, "" means every
    address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0] or "0.0.0.0")
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def _reason_for_distrust(directory: Path) -> str | None:
    """Why the directory is not trusted; None if it is."""
    try:
        status, parent = os.lstat(directory), os.stat(directory.parent)
    except OSError as error:
        return error.strerror or "missing"
    if not stat.S_ISDIR(status.st_mode):
        return "not a directory"
    parent_is_safe = parent.st_uid == 0 and not parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (0, os.getuid()) and not parent_is_safe:
        return f"belongs to uid {status.st_uid}"
    group_may_write = status.st_mode & stat.S_IWGRP
    if status.st_mode & stat.S_IWOTH or (group_may_write and status.st_uid != 0 and not parent_is_safe):
        return "others can write to it"
    return None


# -- the keeper ------------------------------------------------------------------------------------


def _prepare_directory(directory: Path, is_shared: bool) -> bool:
    """Creates the directory if missing; returns True if links can be created in it. The mode of an
    existing directory is not changed, even if others can write to it.
    """
    try:
        directory.mkdir(mode=0o755 if is_shared else 0o700)
        if is_shared:
            directory.chmod(0o755)  # whatever the umask
    except FileExistsError:
        pass
    except OSError:
        return False  # the parent is missing, or this user cannot write to it
    return _reason_for_distrust(directory) is None and os.access(directory, os.W_OK | os.X_OK)


def _lock_path(link: Path) -> Path:
    return link.with_name(f".{link.name}.lock")


def _lock(link: Path) -> int | None:
    """The descriptor that holds a name's lock. None: a live broker holds it, or the file belongs to
    another user.
    """
    path = _lock_path(link)
    for _ in range(_LOCK_ATTEMPT_COUNT):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except FileNotFoundError:
            pass  # its last holder has just removed it
        except OSError:
            os.close(fd)
            return None
        os.close(fd)
    return None


def _remove(link: Path, lock_fd: int) -> None:
    """Removes a link whose lock we hold, and the lock file."""
    try:
        link.unlink(missing_ok=True)
        _lock_path(link).unlink(missing_ok=True)
    except OSError:
        # the directory has become read-only; the lock is free, so the next broker may remove the
        # link
        pass
    finally:
        os.close(lock_fd)


def _sweep(directory: Path) -> None:
    """Removes the links of dead brokers, whose locks are free; other files are left alone."""
    try:
        names = os.listdir(directory)[:_SWEEP_COUNT_MAX]
    except OSError:
        return
    for name in {name[1:-5] if name.startswith(".") and name.endswith(".lock") else name for name in names}:
        link = directory / name
        is_broker_link = _NAME.fullmatch(name) is not None and (link.is_symlink() or not link.exists())
        if is_broker_link and (lock_fd := _lock(link)) is not None:
            _remove(link, lock_fd)


def _create_link(link: Path, socket_path: str) -> PublishedLink | None:
    lock_fd = _lock(link)
    if lock_fd is None:
        return None
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(socket_path)
    except OSError:
        _remove(link, lock_fd)
        return None
    return PublishedLink(link, lock_fd)


def publish(
    addresses: Iterable[tuple[str, int]], socket_path: str | os.PathLike[str], search_dirs: Sequence[Path] | None = None
) -> list[PublishedLink]:
    """Creates links for every bound listening address (host, port) in every writable directory; in
    the user's home only if there is no other. The socket must be listening already. Never raises
    for an unusable directory. Returns the created links, whose locks are held until `withdraw`.
    """
    published: list[PublishedLink] = []
    names, target = sorted(server_names(addresses)), os.path.abspath(socket_path)
    for directory in directories() if search_dirs is None else search_dirs:
        if (directory.name == _HOME_SUBDIRECTORY and published) or not _prepare_directory(
            directory, is_shared=directory.parent == Path("/run")
        ):
            continue
        _sweep(directory)
        published.extend(link for name in names if (link := _create_link(directory / name, target)) is not None)
    return published


def withdraw(published: Iterable[PublishedLink]) -> None:
    """Removes the links; called when the broker ends."""
    for link, lock_fd in published:
        _remove(link, lock_fd)


# -- the client ------------------------------------------------------------------------------------


def addresses_of(bootstrap_servers: str) -> list[tuple[str, int]]:
    """ "host:port,[::1]:port,host" as (host, port). Invalid addresses are left out: the TCP client
    will report them.
    """
    addresses = []
    for text in bootstrap_servers.split(","):
        text = text.strip().rpartition("://")[2]
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = rest.removeprefix(":")
        elif text.count(":") > 1:
            host, port = text, ""
        else:
            host, _, port = text.partition(":")
        if host and (not port or port.isdecimal()):
            addresses.append((host, int(port or PORT_DEFAULT)))
    return addresses


def _is_local(address: str) -> bool:
    """Whether the address belongs to this host, that is, whether a socket can be bound to it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or ip.is_unspecified:
        return True
    try:
        with socket.socket(
            socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        ) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False


def _resolve(host: str) -> list[str]:
    try:
        return list(
            dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        )
    except (OSError, UnicodeError):
        return []


def _is_socket(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _search(names: Sequence[str], search_dirs: Sequence[Path]) -> tuple[str, str | None, list[str]]:
    """(name, socket path or None, obstacles): the first link that leads to a socket."""
    obstacles = []
    for directory in search_dirs:
        distrust = _reason_for_distrust(directory)
        if distrust is not None:
            if os.path.lexists(directory):
                obstacles.append(f"{directory} is not trusted: {distrust}")
            continue
        for name in names:
            try:
                target = os.readlink(directory / name)
            except OSError:
                continue
            if _is_socket(target):
                return name, target, obstacles
            obstacles.append(f"{directory / name} leads to {target}, which is not a socket that this user can reach")
    return "", None, obstacles


def _candidate_names(addresses: Iterable[str], port: int) -> list[str]:
    """The names that a broker may have published if its TCP listener accepts connections to one of
    these addresses. A listener on :: accepts IPv4 too (mqd/keeper/sockets.py). Raises OSError
    without /proc.
    """
    hosts: list[str] = []
    for address in addresses:
        wildcards = ["::"] if ":" in _canonical(address) else ["0.0.0.0", "::"]
        hosts += [address, *wildcards]
    return [server_name(host, port) for host in dict.fromkeys(hosts)]


def find(
    bootstrap_servers: str, socket_path: str | None = None, search_dirs: Sequence[Path] | None = None
) -> Rendezvous:
    """The client socket of the first of `bootstrap_servers` ("host:port,host:port") that is on this
    host. `socket_path` (property mqd.socket.path) or $MQD_SOCKET gives it directly, without
    verification. Never raises. Resolves host names, so it may block for as long as the resolver
    does.
    """
    configured = socket_path or os.environ.get(SOCKET_VARIABLE)
    if configured:
        if _is_socket(configured):
            return Rendezvous(configured, "set by mqd.socket.path" if socket_path else f"set by ${SOCKET_VARIABLE}")
        return Rendezvous(
            None,
            f"{configured} is not a socket that this user can reach"
            f" ({'mqd.socket.path' if socket_path else '$' + SOCKET_VARIABLE})",
        )
    search_dirs = directories() if search_dirs is None else search_dirs
    reasons: list[str] = []
    for host, port in addresses_of(bootstrap_servers):
        result = find_at(host, port, search_dirs)
        if result.path is not None:
            return result
        reasons.append(result.reason)
    return Rendezvous(None, "; ".join(reasons) or "bootstrap.servers has no address")


def find_at(host: str, port: int, search_dirs: Sequence[Path] | None = None) -> Rendezvous:
    """The client socket of the broker at this address, if it is on this host. Ignores $MQD_SOCKET.
    Never raises.
    """
    search_dirs = directories() if search_dirs is None else search_dirs
    local_addresses = [address for address in _resolve(host) if _is_local(address)]
    if not local_addresses:
        return Rendezvous(None, f"{host}:{port} is not on this host")
    try:
        names = _candidate_names(local_addresses, port)
    except OSError as error:
        return Rendezvous(None, f"this process's network namespace is not known: {error}")
    name, path, obstacles = _search(names, search_dirs)
    if path is not None:
        return Rendezvous(path, f"{host}:{port} is this host's broker", name)
    return Rendezvous(
        None,
        "; ".join(obstacles)
        or f"no broker of this network namespace has published port {port} in {', '.join(map(str, search_dirs))}",
    )
