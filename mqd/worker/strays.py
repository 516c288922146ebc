"""Partition directories that no topic of the image accounts for. Of a topic that was removed while this worker was down: set aside for deletion. Of a topic of
which nothing is known, as in a log directory that was brought from elsewhere: moved aside, never deleted, for to delete is the administrator's choice."""

import os
import re
from pathlib import Path

from mqd.base import logging
from mqd.cluster.controller_messages import Image
from mqd.cluster.host_core import owner_of
from mqd.log import directories
from mqd.log.files import Files
from mqd.worker.log_directory import LogDirectory

_PARTITION = re.compile(r"(.+)-([0-9]+)")


def set_strays_aside(log_dirs: list[LogDirectory], image: Image, worker: int, worker_count: int, files: Files) -> list[tuple[LogDirectory, Path]]:
    """Blocking. Each worker looks after the directories that it would own, so that none meets what another has just created. Returns those to be deleted."""
    known = {(topic.topic_id, partition.index): partition.log_dir for topic in image.topics for partition in topic.partitions}
    removed = frozenset(image.removed_topic_ids)
    doomed = []
    for log_dir in log_dirs:
        if not log_dir.failure:
            try:
                doomed += [(log_dir, path) for path in _in_directory(log_dir, known, removed, worker, worker_count, files)]
            except OSError as error:
                log_dir.fail(f"cannot be searched: {error}")
    return doomed


def _in_directory(
    log_dir: LogDirectory, known: dict[tuple[bytes, int], int], removed: frozenset[bytes], worker: int, worker_count: int, files: Files
) -> list[Path]:
    doomed, moved = [], 0
    for entry in list(os.scandir(log_dir.path)):
        match = _PARTITION.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            topic_id = directories.parse_metadata((Path(entry.path) / directories.METADATA).read_bytes())
        except (FileNotFoundError, directories.TopicIdMismatch):
            continue  # not ours to judge; prepare() does when its name is wanted
        index = int(match[2])
        if owner_of(topic_id, index, worker_count) != worker or known.get((topic_id, index), log_dir.index + 1) == log_dir.index:
            continue
        moved += 1
        if topic_id in removed:
            target = log_dir.path / directories.aside_name(match[1], index, "delete")
            files.rename(Path(entry.path), target)
            doomed.append(target)
            continue
        target = log_dir.path / directories.aside_name(match[1], index, "stray")
        files.rename(Path(entry.path), target)
        logging.get("worker.strays").warning("partition of no known topic was moved aside; delete it when nobody needs it", path=entry.path, moved_to=str(target))
    if moved:
        files.sync_directory(log_dir.path)
    return doomed
