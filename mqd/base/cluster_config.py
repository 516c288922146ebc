"""The host's listeners for other hosts, the seeds of its cluster, and the cluster key.

A host listens for others only if cluster.seeds, controller.listener or inter.broker.listener is
set.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mqd.base.listeners import Listener, advertised_listeners, parse_listeners
from mqd.base.property_values import ConfigError

KEY_BYTES_MIN = 16
KEY_FILE_BYTES_MAX = 4096
KEY_COUNT_MAX = 3  # each costs an HMAC for every unauthenticated datagram
KEYS_HEAD = b"# keys of an mqd cluster"  # no file with a single key begins like this
INTER_BROKER_PORT_STEP, CONTROLLER_PORT_STEP = 1, 2  # relative to the clients' port
# not a secret: it rejects stray connections, not attackers
LOOPBACK_KEY = b"mqd hosts of one machine, without a cluster key"
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_WILDCARDS = ("", "0.0.0.0", "::")


class HostListener(NamedTuple):
    """A listener for other hosts: the address to bind, and the address announced to other hosts."""

    host: str
    port: int  # 0: any free port
    advertised_host: str
    advertised_port: int  # 0: the bound port


class ClusterListeners(NamedTuple):
    controller: HostListener
    inter_broker: HostListener


def parse_address(text: str) -> tuple[str, int]:
    """Parses "HOST:PORT" or "[::1]:PORT". Raises ValueError."""
    match = re.fullmatch(r"\s*(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/\s]*)):([0-9]{1,5})\s*", text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{text.strip()!r} is not HOST:PORT (IPv6: [::1]:PORT)")
    return (match[1] or match[2] or "").lower(), int(match[3])


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def seeds(config: Mapping[str, str]) -> tuple[str, ...]:
    """The value of cluster.seeds, normalized and sorted, so that two hosts can compare their lists.
    Raises ConfigError.
    """
    addresses = set()
    for text in config.get("cluster.seeds", "").split(","):
        if not text.strip():
            continue
        try:
            host, port = parse_address(text)
            if not host or not port:
                raise ValueError(f"{text.strip()!r} is not HOST:PORT")
        except ValueError as error:
            raise ConfigError(f"cluster.seeds: {error}", "cluster.seeds", config["cluster.seeds"]) from error
        addresses.add(format_address(host, port))
    return tuple(sorted(addresses))


def listens_for_hosts(config: Mapping[str, str]) -> bool:
    return any(config.get(name) for name in ("cluster.seeds", "controller.listener", "inter.broker.listener"))


def _host_listener(
    config: Mapping[str, str],
    name: str,
    advertised_name: str,
    client_listener: Listener,
    fallback_host: str,
    port_step: int,
) -> HostListener:
    text = config.get(name)
    host, port = client_listener.host, client_listener.port + port_step if client_listener.port else 0
    if text:
        try:
            host, port = parse_address(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", name, text) from error
    if port > 65535:
        raise ConfigError(
            f"{name} is not set, and has no default because the clients' port {client_listener.port} is too high; set"
            f" {name}=HOST:PORT",
            name,
            None,
        )
    advertised = config.get(advertised_name)
    if advertised:
        try:
            advertised_host, advertised_port = parse_address(advertised)
            if advertised_host in _WILDCARDS or not advertised_port:
                raise ValueError(f"another host cannot connect to {advertised!r}")
            return HostListener(host, port, advertised_host, advertised_port)
        except ValueError as error:
            raise ConfigError(f"{advertised_name}: {error}", advertised_name, advertised) from error
    advertised_host = fallback_host if host in _WILDCARDS else host
    if advertised_host in _WILDCARDS:
        raise ConfigError(
            f"{name} listens on all interfaces, so the address for other hosts must be configured: set"
            f" {advertised_name}=HOST:PORT",
            name,
            text,
        )
    return HostListener(host, port, advertised_host, 0)


def cluster_listeners(config: Mapping[str, str]) -> ClusterListeners | None:
    """Returns None if this host does not listen for other hosts. Raises ConfigError."""
    if not listens_for_hosts(config):
        return None
    client_listener = parse_listeners(config)[0]
    advertised = advertised_listeners(config).get(client_listener.name)
    fallback_host = advertised.host if advertised is not None else ""
    return ClusterListeners(
        _host_listener(
            config,
            "controller.listener",
            "advertised.controller.listener",
            client_listener,
            fallback_host,
            CONTROLLER_PORT_STEP,
        ),
        _host_listener(
            config,
            "inter.broker.listener",
            "advertised.inter.broker.listener",
            client_listener,
            fallback_host,
            INTER_BROKER_PORT_STEP,
        ),
    )


def check(config: Mapping[str, str]) -> None:
    """Performs the checks that involve several properties. Raises ConfigError."""
    seeds(config)
    listeners = cluster_listeners(config)
    for name, listener in zip(("controller.listener", "inter.broker.listener"), listeners or (), strict=False):
        is_remote = not _LOOPBACK.fullmatch(listener.host)
        if (is_remote or config.get("authorizer.class.name")) and not config.get("cluster.key.file"):
            others = "other machines" if is_remote else "other users of this machine, who otherwise have no permissions"
            raise ConfigError(
                f"{name}={format_address(listener.host, listener.port)} can be reached from {others}, so hosts must"
                " authenticate: make a key with `mqd cluster key FILE`, copy it to every host and set"
                " cluster.key.file",
                name,
                config.get(name),
            )
    heartbeat, session = int(config["broker.heartbeat.interval.ms"]), int(config["broker.session.timeout.ms"])
    if 2 * heartbeat > session:
        raise ConfigError(
            f"broker.heartbeat.interval.ms={heartbeat} must be at most half of broker.session.timeout.ms={session}:"
            " after one lost heartbeat the broker would lose the leadership of its partitions",
            "broker.heartbeat.interval.ms",
            str(heartbeat),
        )


def split_keys(content: bytes) -> list[bytes]:
    """The secrets in a key file: one per line if the first line begins with KEYS_HEAD, otherwise
    the whole content.
    """
    if not content.startswith(KEYS_HEAD):
        return [content.strip()]
    return [line.strip() for line in content.splitlines()[1:] if line.strip()]


def load_key(config: Mapping[str, str]) -> bytes:
    """The secret with which this host authenticates: the first of load_keys()."""
    return load_keys(config)[0]


def load_keys(config: Mapping[str, str]) -> tuple[bytes, ...]:
    """The cluster's secrets: this host authenticates with the first, and accepts all. Without a key
    file, LOOPBACK_KEY. Raises ConfigError if the file is unreadable, if other users of this machine
    can read it, or if its keys are too short, too long or too many.
    """
    name = config.get("cluster.key.file")
    if not name:
        return (LOOPBACK_KEY,)
    path = Path(name)
    try:
        mode = os.stat(path).st_mode
        with open(path, "rb") as file:
            content = file.read(KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cluster.key.file {path} cannot be read: {error.strerror}; make one with: mqd cluster key {path}",
            "cluster.key.file",
            name,
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"cluster.key.file {path} can be read by others on this machine: chmod 600 {path}", "cluster.key.file", name
        )
    keys = split_keys(content)
    for key in keys if len(content) <= KEY_FILE_BYTES_MAX else [content]:
        if not KEY_BYTES_MIN <= len(key) <= KEY_FILE_BYTES_MAX:
            raise ConfigError(
                f"cluster.key.file {path} contains a key of {len(key)} bytes; a key has from {KEY_BYTES_MIN} to"
                f" {KEY_FILE_BYTES_MAX} (mqd cluster key makes one)",
                "cluster.key.file",
                name,
            )
    if not 1 <= len(keys) <= KEY_COUNT_MAX:
        raise ConfigError(
            f"cluster.key.file {path} holds {len(keys)} keys; it must hold 1 to {KEY_COUNT_MAX}",
            "cluster.key.file",
            name,
        )
    return tuple(keys)
