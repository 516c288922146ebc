"""Handles partition directories that belong to no topic of the image. Remains of moves between log
directories (V1 of mqd/log/moving.py) are set aside for deletion, and so are the directories of a
topic that was removed while this worker was down. Directories of an unknown topic, for example in
a log directory from another host, are moved aside and never deleted: only an administrator may
decide that.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mqd.base import logging
from mqd.cluster.host.images import LOG_DIR_NONE, owner_of
from mqd.cluster.host.messages import Image
from mqd.log import directories, moving
from mqd.log.files import Files
from mqd.worker.log_directory import LogDirectory

_PARTITION = re.compile(r"(.+)-([0-9]+)")


def set_aside_strays(
    log_dirs: list[LogDirectory], image: Image, worker: int, worker_count: int, files: Files
) -> list[tuple[LogDirectory, Path]]:
    """Blocking. Each worker handles the directories that it would own, so that none interferes with
    directories that another has just created. Returns those to be deleted.
    """
    assigned_log_dirs = {
        (topic.topic_id, partition.index): partition.log_dir for topic in image.topics for partition in topic.partitions
    }
    topic_ids = frozenset(topic.topic_id for topic in image.topics) if image.node_id >= 0 else frozenset()
    removed_ids = frozenset(image.removed_topic_ids)
    to_delete = []
    log_dir_paths = [log_dir.path for log_dir in log_dirs]
    for log_dir in log_dirs:
        if not log_dir.failure:
            try:
                to_delete += [
                    (log_dir, path) for path in _set_aside_unfinished_copies(log_dir, worker, worker_count, files)
                ]
                to_delete += [
                    (log_dir, path)
                    for path in _set_strays_of_directory_aside(
                        log_dir, assigned_log_dirs, topic_ids, removed_ids, worker, worker_count, files, log_dir_paths
                    )
                ]
            except OSError as error:
                log_dir.fail(f"cannot be searched: {error}")
    return to_delete


def _set_strays_of_directory_aside(
    log_dir: LogDirectory,
    assigned_log_dirs: dict[tuple[bytes, int], int],
    topic_ids: frozenset[bytes],
    removed_ids: frozenset[bytes],
    worker: int,
    worker_count: int,
    files: Files,
    log_dir_paths: list[Path],
) -> list[Path]:
    to_delete, moved_count = [], 0
    for entry in list(os.scandir(log_dir.path)):
        match = _PARTITION.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            topic_id = directories.parse_metadata((Path(entry.path) / directories.METADATA).read_bytes())
        except (FileNotFoundError, directories.TopicIdMismatch):
            continue  # not decidable here; directories.prepare() handles it when its name is needed
        index = int(match[2])
        if (
            owner_of(topic_id, index, worker_count) != worker
            or assigned_log_dirs.get((topic_id, index), log_dir.index + 1) == log_dir.index
        ):
            continue
        if topic_id in topic_ids and assigned_log_dirs.get((topic_id, index), LOG_DIR_NONE) == LOG_DIR_NONE:
            # removed according to metadata that may be outdated:
            # set_aside_left_behind_replicas() checks it later
            continue
        moved_count += 1
        if topic_id in removed_ids or _is_old_copy(
            Path(entry.path), assigned_log_dirs.get((topic_id, index)), topic_id, match[1], index, log_dir_paths
        ):
            target = log_dir.path / directories.aside_name(match[1], index, "delete")
            files.rename(Path(entry.path), target)
            to_delete.append(target)
            continue
        target = log_dir.path / directories.aside_name(match[1], index, "stray")
        files.rename(Path(entry.path), target)
        logging.get("worker.strays").warning(
            "partition of no known topic was moved aside; delete it when it is not needed",
            path=entry.path,
            moved_to=str(target),
        )
    if moved_count:
        files.sync_directory(log_dir.path)
    return to_delete


def set_aside_left_behind_replicas(
    log_dirs: list[LogDirectory],
    is_left_behind: Callable[[bytes, int], bool],
    worker: int,
    worker_count: int,
    files: Files,
) -> list[tuple[LogDirectory, Path]]:
    """Blocking. Sets aside the files of replicas that this host no longer has although their topics
    exist, according to `is_left_behind(topic id, index)`. Returns them for deletion. Call it only
    when the metadata is known to be current.
    """
    to_delete = []
    for log_dir in [log_dir for log_dir in log_dirs if not log_dir.failure]:
        renamed: list[Path] = []
        with _log_errors(log_dir.path):
            for entry in list(os.scandir(log_dir.path)):
                match = _PARTITION.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    continue
                with _log_errors(Path(entry.path)):
                    try:
                        topic_id = directories.parse_metadata((Path(entry.path) / directories.METADATA).read_bytes())
                    except (FileNotFoundError, directories.TopicIdMismatch):
                        continue
                    index = int(match[2])
                    if owner_of(topic_id, index, worker_count) == worker and is_left_behind(topic_id, index):
                        target = log_dir.path / directories.aside_name(match[1], index, "delete")
                        files.rename(Path(entry.path), target)
                        renamed.append(target)
                        logging.get("worker.strays").info(
                            "deleting a replica that is no longer assigned to this host", path=entry.path
                        )
            if renamed:
                files.sync_directory(log_dir.path)
        to_delete += [(log_dir, target) for target in renamed]
    return to_delete


@contextlib.contextmanager
def _log_errors(path: Path) -> Iterator[None]:
    """Logs an OSError raised in this context instead of propagating it: these files do no harm, and
    the next start tries again.
    """
    try:
        yield
    except OSError as error:
        logging.get("worker.strays").error(
            "replicas that are no longer assigned to this host cannot be set aside; they are left behind",
            path=str(path),
            reason=str(error),
        )


def _is_old_copy(
    path: Path, assigned: int | None, topic_id: bytes, topic: str, index: int, log_dir_paths: list[Path]
) -> bool:
    """Whether the directory is the remainder of a move: a copy that never became valid, or the
    source of one that did.
    """
    if assigned is None or assigned >= len(log_dir_paths):
        return False
    authoritative_copy = directories.partition_path(log_dir_paths[assigned], topic, index)
    return directories.exists(log_dir_paths[assigned], topic, index, topic_id) and (
        moving.is_marked(path) or moving.is_marked(authoritative_copy)
    )


def _set_aside_unfinished_copies(log_dir: LogDirectory, worker: int, worker_count: int, files: Files) -> list[Path]:
    """Sets aside the copies that were in progress when their worker ended. Returns them for
    deletion.
    """
    to_delete = []
    for path, index in list(moving.future_copies(log_dir.path)):
        try:
            owner = owner_of(
                directories.parse_metadata((path / directories.METADATA).read_bytes()), index, worker_count
            )
        except (FileNotFoundError, directories.TopicIdMismatch):
            owner = sum(path.name.encode()) % worker_count
        if owner == worker:
            target = path.with_name(path.name.removesuffix("-future") + "-delete")
            files.rename(path, target)
            to_delete.append(target)
    return to_delete
