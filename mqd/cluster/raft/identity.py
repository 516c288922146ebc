"""Identity of this replica of the metadata quorum: node id and the id of its metadata directory,
kept in DATA_DIR/metadata/meta.properties.

An emptied directory gets a new id. A host that lost its metadata is therefore a new host and not a
voter, even with the same node id (docs/design/cluster.md, 3.1).
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path

from mqd import native
from mqd.cluster.raft.messages import ReplicaKey

TOPIC_DIRECTORY = "__cluster_metadata-0"


class MetadataCorrupt(RuntimeError):
    """The metadata directory is damaged or incomplete. The message names the file, the position and the
    remedy.
    """


def directory_text(directory_id: bytes) -> str:
    return urlsafe_b64encode(directory_id).rstrip(b"=").decode()


def directory_bytes(text: str) -> bytes:
    """Raises ValueError if the text is not a directory id."""
    decoded = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(decoded) != 16:
        raise ValueError(f"{text!r} is not a directory id")
    return decoded


def load_or_create_key(directory: Path, node_id: int, new_id: bytes) -> ReplicaKey:
    """Returns this replica's identity. For a new directory, `new_id` (16 random bytes) is stored
    durably and used. Raises MetadataCorrupt, OSError.
    """
    path = directory / "meta.properties"
    try:
        properties = dict(
            line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")
        )
    except FileNotFoundError:
        if (directory / TOPIC_DIRECTORY / "vote").exists():
            raise MetadataCorrupt(
                f"{path} is missing, but this replica has voted: restore it from a copy; or empty {directory}, and"
                " this host will join its cluster as a new host"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        native.file_replace(path, f"version=1\nnode.id={node_id}\ndirectory.id={directory_text(new_id)}\n".encode())
        return ReplicaKey(node_id, new_id)
    try:
        key = ReplicaKey(int(properties["node.id"]), directory_bytes(properties["directory.id"]))
    except (KeyError, ValueError) as error:
        raise MetadataCorrupt(f"{path} is damaged ({error}); restore it from a copy") from error
    if key.node_id != node_id:
        raise MetadataCorrupt(
            f"{path} has node.id {key.node_id}, but this broker has node.id {node_id}: the directory belongs to"
            " another broker"
        )
    return key
