"""Partition directories: their names, their identity, and their deletion.

A partition lives in LOG_DIR/TOPIC-PARTITION. `partition.metadata` in it holds the topic id (Kafka's
format, KIP-516), so that a directory left by an earlier topic of the same name is never served.

D1  a directory is served only if its partition.metadata names the topic id in the metadata image,
    or if it holds no record and no metadata (a crash between the two steps of its creation).
D2  any other directory of that name is moved aside to TOPIC-PARTITION.UUID-stray: never served,
    never deleted automatically.
D3  deletion renames to TOPIC-PARTITION.UUID-delete first; the name is free from then on, and the
    next start recognizes the remains after a crash.
D4  a partition that has records according to a checkpoint never restarts at offset 0: its
    offsets would be assigned twice. It is not served if its partition.metadata is lost. If its
    directory is lost, a partition without other replicas is not served; with others, it starts
    empty, and the caller marks it as shortened.

Names are Kafka's. These functions block: never call them on the reactor or the event loop.
"""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from mqd.log.files import Files

METADATA = "partition.metadata"
_NAME_BYTES_MAX = 255
_DELETED = re.compile(r".*-([0-9]+)\.[0-9a-f]{32}-delete")


class TopicIdMismatch(ValueError):
    """partition.metadata is unreadable or names another topic."""


def partition_path(log_dir: Path, topic: str, partition: int) -> Path:
    return log_dir / f"{topic}-{partition}"


def aside_name(topic: str, partition: int, suffix: str) -> str:
    """TOPIC-PARTITION.UUID-SUFFIX; a long topic name is shortened, because a file name has at most
    255 bytes.
    """
    tail = f"-{partition}.{uuid.uuid4().hex}-{suffix}"
    return topic[: _NAME_BYTES_MAX - len(tail)] + tail


def format_metadata(topic_id: bytes) -> bytes:
    return f"version: 0\ntopic_id: {_to_text(topic_id)}\n".encode()


def parse_metadata(data: bytes) -> bytes:
    """The topic id. Raises TopicIdMismatch."""
    match = re.fullmatch(rb"version: 0\ntopic_id: ([A-Za-z0-9_-]{22})\n?", data)
    if match is None:
        raise TopicIdMismatch(f"{METADATA} is not in the format version 0")
    return _from_text(match[1])


def _to_text(topic_id: bytes) -> str:
    """Kafka's form of a Uuid: base64 for URLs without padding."""
    import base64

    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def _from_text(text: bytes) -> bytes:
    import base64

    return base64.urlsafe_b64decode(text + b"==")


def prepare(
    log_dir: Path,
    topic: str,
    partition: int,
    topic_id: bytes,
    files: Files,
    known_end: int = 0,
    has_other_replicas: bool = False,
) -> tuple[Path, Path | None]:
    """Ensures that the partition's directory exists and belongs to this topic. Returns (its path,
    the path of a directory moved aside or None). Raises OSError.

    known_end: according to a checkpoint, this very partition has records up to this offset.
    has_other_replicas: the partition has other replicas (D4).

    A new directory is durable only after sync_directory(log_dir), which the caller calls once for
    many directories.
    """
    path = partition_path(log_dir, topic, partition)
    stray_path = None
    if path.exists():
        try:
            stored_id = parse_metadata((path / METADATA).read_bytes())
        except FileNotFoundError:
            stored_id = None
        except TopicIdMismatch:
            stored_id = b""
        if stored_id == topic_id:
            return path, None
        if not stored_id and known_end > 0 and _holds_records(path):  # lost or unreadable, not another topic's
            raise OSError(errno.EIO, _lost_metadata_message(path, topic_id, known_end))
        if stored_id is not None or _holds_records(path):
            stray_path = log_dir / aside_name(topic, partition, "stray")
            files.rename(path, stray_path)
    if known_end > 0 and not has_other_replicas:
        raise OSError(errno.EIO, _lost_records_message(path, known_end))
    if stray_path is not None or not path.exists():
        files.make_directory(path)
    files.replace(path / METADATA, format_metadata(topic_id))
    return path, stray_path


def _lost_metadata_message(path: Path, topic_id: bytes, known_end: int) -> str:
    return (
        f"{path / METADATA} is lost or damaged, and according to the checkpoints the topic has records below offset"
        f" {known_end}. If the directory is this topic's, restore the file, two lines: 'version: 0' and 'topic_id:"
        f" {_to_text(topic_id)}'; then restart the broker"
    )


def _lost_records_message(path: Path, known_end: int) -> str:
    return (
        f"{path} is lost, and according to the checkpoints the topic has records below offset {known_end}, so it is not"
        " created again at offset 0. Restore the directory from a copy while the broker is down; or, if the records are"
        " to be given up, delete the topic and create it again"
    )


def _holds_records(path: Path) -> bool:
    return any(entry.name.endswith(".log") and entry.stat().st_size > 0 for entry in os.scandir(path))


def exists(log_dir: Path, topic: str, partition: int, topic_id: bytes) -> bool:
    """Whether there is a directory of this very partition."""
    try:
        return parse_metadata((partition_path(log_dir, topic, partition) / METADATA).read_bytes()) == topic_id
    except (OSError, TopicIdMismatch):
        return False


def set_aside_for_deletion(log_dir: Path, topic: str, partition: int, files: Files) -> Path | None:
    """Frees the name (D3), durably. Returns the new path; None if there was no directory. Raises
    OSError.
    """
    target = log_dir / aside_name(topic, partition, "delete")
    try:
        files.rename(partition_path(log_dir, topic, partition), target)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    files.sync_directory(log_dir)
    return target


def leftovers(log_dir: Path) -> list[Path]:
    """Directories that an earlier run set aside for deletion."""
    return sorted(
        path for path in log_dir.iterdir() if _DELETED.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def aside_partition_index(path: Path) -> int:
    """The partition of a directory set aside for deletion."""
    match = _DELETED.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def delete_tree(path: Path, files: Files) -> Iterator[Path]:
    """Deletes a set-aside directory file by file, yielding each file before it is unlinked (so that
    the caller can pace or stop). Raises OSError.
    """
    try:
        entries = sorted(path.iterdir())
    except FileNotFoundError:
        # a starting worker deletes leftovers too, even those that another worker is deleting
        return
    entries.sort(key=lambda entry: entry.name == METADATA)  # last: it identifies the partition
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            yield from delete_tree(entry, files)
            continue
        yield entry
        try:
            files.unlink(entry)
        except FileNotFoundError:
            pass
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
