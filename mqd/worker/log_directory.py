"""One entry of log.dirs as this worker sees it: its checkpoints, its space, whether it failed.

Checkpoint files are written by one thread at a time (Background.slow of this directory, or the start and the end, when that is idle).
"""

import os
from pathlib import Path

from mqd.base import logging
from mqd.log import checkpoints, directories
from mqd.log.checkpoints import CheckpointWriter, Entry, Trust
from mqd.log.files import Files
from mqd.log.segments import ScanMaxTimestamp, TimestampCache
from mqd.log.space import SpaceGuard


class LogDirectory:
    """`failure`: why nothing in it is served; "" = it is sound."""

    def __init__(self, index: int, path: Path, worker: int, worker_count: int, reserve_bytes: int, files: Files, scan: ScanMaxTimestamp):
        self.index = index
        self.path = path
        self.failure = ""
        self.settled = False
        self.guard = SpaceGuard(reserve_bytes)
        self.timestamps = TimestampCache(scan)
        self.trust: Trust | None = None
        self._worker = worker
        self._worker_count = worker_count
        self._files = files
        self._writer: CheckpointWriter | None = None
        self._log = logging.get("worker.log_dir", log_dir=str(path))

    def open(self) -> list[Path]:
        """Blocking. Reads what may be believed and removes the marker. Returns what an earlier life had set aside for deletion and is this worker's to delete."""
        try:
            found = checkpoints.open_directory(self.path, self._worker, self._worker_count, self._files)
            for problem in found.problems:
                self._log.warning("checkpoint cannot be read; its partitions will be scanned", reason=problem)
            self.trust = found.index(self._worker)
            self._writer = CheckpointWriter(self.path, self._worker, self._files, found)
            return [path for path in directories.leftovers(self.path) if sum(path.name.encode()) % self._worker_count == self._worker]
        except OSError as error:
            self.fail(f"cannot be used: {error}")
            return []

    def fail(self, reason: str) -> bool:
        """False when it had failed before."""
        if self.failure:
            return False
        self.failure = reason
        self._log.error("log directory failed; its partitions are offline", reason=reason)
        return True

    def settle(self, still_wanted: list[tuple[str, int]]) -> None:
        """Blocking. Every worker has its own checkpoints: forget what was carried for others. Worker 0 removes the files of workers that are no more."""
        if self._writer is None or self.failure:
            return
        self._writer.settle(still_wanted)
        self.settled = True
        if self._worker == 0:
            for path in checkpoints.remove_orphans(self.path, self._worker_count, self._files):
                self._log.info("checkpoint of a worker that is no more was removed", path=str(path))

    def write_checkpoints(self, recovery_points: list[Entry], log_starts: list[Entry]) -> bool:
        """Blocking. False: they cannot be written now (a full disk is no failure of the directory: the old ones stay true)."""
        if self._writer is None or self.failure:
            return False
        try:
            self._writer.write(recovery_points, log_starts)
            return True
        except OSError as error:
            self._log.warning("checkpoints cannot be written; after a crash more will be scanned", reason=str(error))
            return False

    def mark_clean(self, generation: int) -> None:
        """Blocking. Last of all (see checkpoints). Not before settling: the own file may still name partitions of others."""
        if not self.settled:
            return
        try:
            checkpoints.write_clean_shutdown(self.path, self._worker, generation, self._files)
        except OSError as error:
            self._log.warning("clean shutdown cannot be marked; the next start checks the log", reason=str(error))

    def free_bytes(self) -> int:
        """Blocking: a hung file system answers late. Raises OSError."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize
