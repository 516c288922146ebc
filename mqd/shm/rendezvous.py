"""How a client finds the client socket of a broker that it knows by `bootstrap.servers` alone.

The keeper publishes symbolic links to `run/client.sock`, named after what it listens on; a client
on the same host looks for the one of its bootstrap server.

    DIRECTORY/9092             listens on every address
    DIRECTORY/127.0.0.1@9092   listens on this address

DIRECTORY is /run/mqd where the broker may write it, $XDG_RUNTIME_DIR/mqd, and /tmp/mqd-UID: the
broker writes to all of them it can, a client takes the first that has its broker.
$MQD_RUN_RENDEZVOUS names other ones (separated by colons), for both.

1. A directory is believed only when it is a real directory that nobody but root, or this process's
   user, can have written: in /tmp anybody could have made one.
2. A link proves nothing: its broker may have been killed. The socket says it (ECONNREFUSED), and
   then TCP is the way.
3. A broker removes at its end what it has published, and at its start the links of brokers that
   were killed.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PORT_DEFAULT = 9092
_SWEEP_COUNT_MAX = 4096
_DIRECTORIES_VARIABLE = "MQD_RUN_RENDEZVOUS"
SOCKET_VARIABLE = "MQD_SOCKET"


class Rendezvous(NamedTuple):
    """What `find` found: `path` of the client socket, or None; `reason` in words, for a log line."""

    path: str | None
    reason: str


def directories() -> list[Path]:
    """Where links are kept, in the order of looking; whether they exist or not."""
    told = os.environ.get(_DIRECTORIES_VARIABLE)
    if told:
        return [Path(text) for text in told.split(":") if text]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path("/run/mqd"), *([Path(runtime) / "mqd"] if runtime else []), Path(f"/tmp/mqd-{os.getuid()}")]


def link_name(host: str, port: int) -> str:
    """Of one listening address, as bound."""
    address = host.partition("%")[0]
    return str(port) if not address or ipaddress.ip_address(address).is_unspecified else f"{_plain(address)}@{port}"


def _plain(address: str) -> str:
    """One spelling for each address; IPv4 in IPv6 is IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def _distrust(directory: Path) -> str | None:
    """Why nothing there is believed; None = it is."""
    try:
        about = os.lstat(directory)
    except OSError as error:
        return error.strerror or "missing"
    if not stat.S_ISDIR(about.st_mode):
        return "not a directory"
    if about.st_uid not in (0, os.getuid()):
        return f"belongs to uid {about.st_uid}"
    if about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and about.st_uid != 0):
        return "others can write to it"
    return None


# -- the keeper ------------------------------------------------------------------------------------


def _make(directory: Path, shared: bool) -> bool:
    """True when links can be put there. A directory of ours that is not ours alone is not touched."""
    try:
        directory.mkdir(mode=0o755 if shared else 0o700)
        if shared:
            directory.chmod(0o755)  # whatever the umask
    except FileExistsError:
        pass
    except OSError:
        return False  # no such parent, or not ours to write
    return _distrust(directory) is None and os.access(directory, os.W_OK | os.X_OK)


def _answers(target: str) -> bool:
    """False when nobody can listen there any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.EPROTOTYPE)
    return True


def _sweep(directory: Path) -> None:
    """Links of the dead: whose socket is gone, or refuses."""
    try:
        names = os.listdir(directory)[:_SWEEP_COUNT_MAX]
    except OSError:
        return
    for name in names:
        path, aside = directory / name, directory / f".{name}.{os.getpid()}.swept"
        try:
            if _answers(os.readlink(path)):
                continue
            os.rename(path, aside)
            try:
                if _answers(target := os.readlink(aside)):  # its broker is back since, and has made the link anew
                    os.symlink(target, path)
            finally:
                aside.unlink()
        except OSError:
            continue


def publish(
    addresses: Iterable[tuple[str, int]], socket_path: str | os.PathLike[str], places: Sequence[Path] | None = None
) -> list[Path]:
    """Links for every listening address (host, port; as bound) in every directory that can be
    written. The socket must be listening already. Never raises for a directory that cannot be used:
    returns the links made.
    """
    made: list[Path] = []
    names = sorted({link_name(host, port) for host, port in addresses})
    for directory in directories() if places is None else places:
        if not _make(directory, shared=directory.parent == Path("/run")):
            continue
        _sweep(directory)
        for name in names:
            link, temporary = directory / name, directory / f".{name}.{os.getpid()}"
            try:
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.abspath(socket_path))
                os.replace(temporary, link)
            except OSError:
                continue
            made.append(link)
    return made


def withdraw(links: Iterable[Path], socket_path: str | os.PathLike[str]) -> None:
    """At the broker's end. A link that another broker has taken over stays."""
    for link in links:
        try:
            if os.readlink(link) == os.path.abspath(socket_path):
                link.unlink()
        except OSError:
            continue


# -- the client ------------------------------------------------------------------------------------


def _servers(bootstrap_servers: str) -> list[tuple[str, int]]:
    """ "host:port,[::1]:port,host" as (host, port). What is not an address is left out: the TCP
    client will say what is wrong with it.
    """
    found = []
    for text in bootstrap_servers.split(","):
        text = text.strip().rpartition("://")[2]
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = rest.removeprefix(":")
        elif text.count(":") > 1:
            host, port = text, ""
        else:
            host, _, port = text.partition(":")
        if host and (not port or port.isdigit()):
            found.append((host, int(port or PORT_DEFAULT)))
    return found


def _is_local(address: str) -> bool:
    """An address of this host is one that a socket can be bound to."""
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


def _addresses(host: str) -> list[str]:
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


def _look(names: Sequence[str], places: Sequence[Path]) -> tuple[str | None, list[str]]:
    """(socket path, what was in the way)."""
    obstacles = []
    for directory in places:
        why = _distrust(directory)
        if why is not None:
            if os.path.lexists(directory):
                obstacles.append(f"{directory} is not believed: {why}")
            continue
        for name in names:
            try:
                target = os.readlink(directory / name)
            except OSError:
                continue
            if _is_socket(target):
                return target, obstacles
            obstacles.append(f"{directory / name} leads to {target}, which is no socket that this user can reach")
    return None, obstacles


def find(bootstrap_servers: str, socket_path: str | None = None, places: Sequence[Path] | None = None) -> Rendezvous:
    """The client socket of the broker at `bootstrap_servers` ("host:port,host:port"), when one of
    them is this host's. `socket_path` (property mqd.socket.path) or $MQD_SOCKET says it without
    looking. Never raises, resolves names (may take as long as the resolver does).
    """
    told = socket_path or os.environ.get(SOCKET_VARIABLE)
    if told:
        if _is_socket(told):
            return Rendezvous(told, "named by mqd.socket.path" if socket_path else f"named by ${SOCKET_VARIABLE}")
        return Rendezvous(
            None,
            f"{told} is no socket that this user can reach"
            f" ({'mqd.socket.path' if socket_path else '$' + SOCKET_VARIABLE})",
        )
    places = directories() if places is None else places
    seen: list[str] = []
    for host, port in _servers(bootstrap_servers):
        local = [address for address in _addresses(host) if _is_local(address)]
        if not local:
            seen.append(f"{host}:{port} is not on this host")
            continue
        names = [*(f"{_plain(address)}@{port}" for address in local), str(port)]
        path, obstacles = _look(names, places)
        if path is not None:
            return Rendezvous(path, f"{host}:{port} is this host's broker")
        seen.append(
            "; ".join(obstacles) or f"no local broker has published port {port} in {', '.join(map(str, places))}"
        )
    return Rendezvous(None, "; ".join(seen) or "bootstrap.servers names no address")
