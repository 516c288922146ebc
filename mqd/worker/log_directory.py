"""One entry of log.dirs as this worker sees it: its checkpoints, its space, its failure state.

A directory in which a flush has failed holds flush-failed.W until its partitions have been
rewritten (`doubtful`): the kernel marks pages that it failed to write as clean, so a successor that
finds them in the page cache must not assume that they are on disk. The mark must outlive processes,
but not a power cut, which also empties the page cache. It is therefore neither flushed nor written
through the file layer, and does not need a working disk.

Checkpoint files are written by one thread at a time (Background.slow of this directory, or at start
and end, when that is idle).
"""

import os
from pathlib import Path

from mqd.base import logging
from mqd.cluster.host.images import owner_of
from mqd.log import checkpoints, directories
from mqd.log.checkpoints import CheckpointEntry, CheckpointWriter, TrustedPoints
from mqd.log.files import Files
from mqd.log.segments import ScanMaxTimestamp, TimestampCache
from mqd.log.space import SpaceGuard

FLUSH_FAILED = "flush-failed"


class LogDirectory:
    """`failure`: why the directory is not served; "" = it is. `doubtful`: a flush in it failed in
    an earlier run.
    """

    def __init__(
        self,
        index: int,
        path: Path,
        worker: int,
        worker_count: int,
        reserve_bytes: int,
        files: Files,
        scan: ScanMaxTimestamp,
    ):
        self.index = index
        self.path = path
        self.failure = ""
        self.pruned = False  # prune() has been called in this run
        self.doubtful = False
        self.space_guard = SpaceGuard(reserve_bytes)
        self.timestamps = TimestampCache(scan)
        self.trusted_points: TrustedPoints | None = None
        # as an earlier run recorded them
        self.high_watermarks: dict[tuple[str, int, bytes], int] = {}
        self._worker = worker
        self._worker_count = worker_count
        self._files = files
        self._writer: CheckpointWriter | None = None
        self._log = logging.get("worker.log_dir", log_dir=str(path))

    def open(self) -> list[Path]:
        """Blocking. Reads the checkpoints and removes the clean-shutdown marker. Returns the
        directories that an earlier run had set aside and this worker must delete.
        """
        try:
            self.doubtful = any(self.path.glob(f"{FLUSH_FAILED}.*"))
            stored = checkpoints.open_directory(self.path, self._worker, self._worker_count, self._files)
            for problem in stored.problems:
                self._log.warning("checkpoint cannot be read; its partitions will be scanned", reason=problem)
            self.trusted_points = stored.trusted_points(self._worker)
            self.high_watermarks = checkpoints.read_high_watermarks(self.path, self._worker)
            self._writer = CheckpointWriter(self.path, self._worker, self._files, stored)
            return [path for path in directories.leftovers(self.path) if self._must_delete(path)]
        except OSError as error:
            self.fail(f"cannot be used: {error}")
            return []

    def _must_delete(self, leftover: Path) -> bool:
        """Whether this worker must delete the directory: only the partition's owner does, so that
        no other worker sees a deletion in progress. partition.metadata, which shows the owner, is
        deleted last.
        """
        try:
            topic_id, index = (
                directories.parse_metadata((leftover / directories.METADATA).read_bytes()),
                directories.aside_partition_index(leftover),
            )
        except (OSError, directories.TopicIdMismatch):
            return sum(leftover.name.encode()) % self._worker_count == self._worker
        return owner_of(topic_id, index, self._worker_count) == self._worker

    def fail(self, reason: str) -> bool:
        """Returns False if the directory had already failed."""
        if self.failure:
            return False
        self.failure = reason
        self._log.error("log directory failed; its partitions are offline", reason=reason)
        return True

    def mark_doubtful(self) -> None:
        """Blocking."""
        try:
            (self.path / f"{FLUSH_FAILED}.{self._worker}").touch()
        except OSError as error:
            self._log.error(
                "failed flush cannot be recorded; restart this host rather than mqd alone", reason=str(error)
            )

    def _unmark_doubtful(self) -> None:
        """Removes this worker's mark: all partitions that it has open have been rewritten. Worker 0
        also removes the marks of workers that no longer exist.
        """
        for path in self.path.glob(f"{FLUSH_FAILED}.*"):
            suffix = path.name.rpartition(".")[2]
            if suffix == str(self._worker) or (
                self._worker == 0 and not (suffix.isdigit() and int(suffix) < self._worker_count)
            ):
                path.unlink(missing_ok=True)

    def prune(self, unopened: list[tuple[str, int]]) -> bool:
        """Blocking. Drops the checkpoint entries that were kept for other workers: each has a
        checkpoint of its own now. `unopened`: this worker's partitions that are not open;
        their entries stay. Worker 0 removes the files of workers that no longer exist. Returns
        False if some files cannot be removed now.
        """
        if self._writer is None or self.failure:
            return True
        self._writer.drop_carried(unopened)
        self.pruned = True
        try:
            if not unopened:
                self._unmark_doubtful()
            if self._worker == 0:
                for path in checkpoints.remove_orphans(self.path, self._worker_count, self._files):
                    self._log.info("checkpoint of a former worker was removed", path=str(path))
        except OSError as error:
            self._log.warning("files of an earlier run cannot be removed; retrying", reason=str(error))
            return False
        return True

    def write_checkpoints(self, recovery_points: list[CheckpointEntry], log_starts: list[CheckpointEntry]) -> bool:
        """Blocking. Returns False if they cannot be written now. That is not a failure of the
        directory: the disk may only be full, and the old checkpoints stay valid.
        """
        if self._writer is None or self.failure:
            return False
        try:
            self._writer.write(recovery_points, log_starts)
            return True
        except OSError as error:
            self._log.warning("checkpoints cannot be written; after a crash more will be scanned", reason=str(error))
            return False

    def write_high_watermarks(self, entries: list[CheckpointEntry]) -> None:
        """Blocking. If these are missing or outdated, that only costs time, until the followers
        have fetched.
        """
        if self._writer is None or self.failure:
            return
        try:
            self._writer.write_high_watermarks(entries)
        except OSError as error:
            self._log.warning(
                "high watermarks cannot be checkpointed; after a crash they are determined again", reason=str(error)
            )

    def mark_clean(self, generation: int) -> None:
        """Blocking. Writes the clean-shutdown marker; no write may follow (see checkpoints.py).
        Does nothing before prune(): this worker's file may still hold other workers' partitions.
        """
        if not self.pruned:
            return
        try:
            checkpoints.write_clean_shutdown(self.path, self._worker, generation, self._files)
        except OSError as error:
            self._log.warning("clean shutdown cannot be marked; the next start checks the log", reason=str(error))

    def free_bytes(self) -> int:
        """Blocking, and for long if the file system hangs. Raises OSError."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize
