"""The identity of a data directory, and its generation: a number that rises with each start
of a keeper there.

meta.properties is Kafka's file of that name: cluster.id, node.id, directory.id, version. It is
created at the first start. Afterwards it is authoritative, and a configuration that contradicts it
is refused: if the records in the directory were served under another broker's node id, clients
would mistake one broker for the other.
"""

from __future__ import annotations

import base64
import errno
import os
import uuid
from pathlib import Path

import msgspec

from mqd import native
from mqd.base.clock import now_ms
from mqd.base.paths import Layout

_VERSION = "1"


class IdentityError(RuntimeError):
    """The data directory belongs to another broker, or cannot be interpreted."""


class Identity(msgspec.Struct, frozen=True):
    cluster_id: str
    node_id: int
    directory_id: str


def _random_id() -> str:
    """22 characters, like Kafka's ids: a random UUID in base64url. It never starts with a dash,
    which command lines would take for an option.
    """
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        pass
    return text


def read_properties(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition("=") for line in lines if line and line[0] not in "#!")
    }


def load_identity(places: Layout) -> Identity | None:
    """The directory's identity; None if no keeper has run here yet. Raises IdentityError."""
    path = places.meta_properties
    try:
        properties = read_properties(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"cannot read {path}: {error}") from error
    if properties.get("version") != _VERSION:
        raise IdentityError(
            f"{path} has version {properties.get('version')!r}; this mqd reads {_VERSION}: use the mqd that wrote it,"
            " or another --data-dir"
        )
    node_id, cluster_id, directory_id = (
        properties.get("node.id", ""),
        properties.get("cluster.id", ""),
        properties.get("directory.id", ""),
    )
    # cluster.id may be empty: the host has not formed or joined its cluster yet
    if not node_id.isdigit() or "cluster.id" not in properties or not directory_id:
        raise IdentityError(
            f"{path} is incomplete (it needs cluster.id, node.id, directory.id): restore it, or choose another"
            " --data-dir"
        )
    return Identity(cluster_id, int(node_id), directory_id)


def check_node_id(identity: Identity, places: Layout, node_id: int) -> None:
    """Raises IdentityError if the directory belongs to another node."""
    if identity.node_id != node_id:
        raise IdentityError(
            f"{places.data_dir} belongs to node.id {identity.node_id}, but this broker is configured as node.id"
            f" {node_id}: start it with --node-id {identity.node_id}, or choose another --data-dir"
        )


def load_or_create(places: Layout, node_id: int, cluster_id: str | None = None) -> Identity:
    """The directory's identity; if it has none, a new one is created durably. `cluster_id` is for a
    new identity: None = create a new cluster's id, "" = not known yet (the controller writes it
    later). Raises IdentityError, native.NativeError.
    """
    identity = load_identity(places)
    if identity is None:
        identity = Identity(_random_id() if cluster_id is None else cluster_id, node_id, _random_id())
        write_identity(places, identity)
    check_node_id(identity, places, node_id)
    return identity


def write_identity(places: Layout, identity: Identity) -> None:
    """Writes meta.properties durably. Raises native.NativeError."""
    text = (
        f"version={_VERSION}\ncluster.id={identity.cluster_id}\nnode.id={identity.node_id}\n"
        f"directory.id={identity.directory_id}\n"
    )
    native.file_replace(places.meta_properties, text.encode())


def next_generation(places: Layout) -> int:
    """A number larger than every earlier one of this directory: the clock's milliseconds, or one
    more than the last number if the clock went back.

    On a full disk the number is not stored: a broker must be able to start, so that something can
    be deleted.
    """
    try:
        text = places.generation.read_text().strip()
        last = int(text) if text.isdigit() else 0
    except (FileNotFoundError, UnicodeDecodeError):
        last = 0
    generation = max(last + 1, now_ms())
    try:
        native.file_replace(places.generation, b"%d\n" % generation)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    return generation


def boot_id() -> bytes:
    """16 bytes that change with every boot of the machine: what was known about the page cache no
    longer holds after a reboot.
    """
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return os.urandom(16)
