"""Copies of partitions that move to another log directory (KIP-113): their names, their validity,
and how a copy catches up with its source.

    TARGET/TOPIC-PARTITION.UUID-future    being copied; never served; deleted after any crash
    TARGET/TOPIC-PARTITION                complete and flushed, the source closed; holds MARKER
                                          until the source is deleted

V1  the metadata alone decides which of two directories is valid. While it names the source, a
    directory with MARKER elsewhere is a copy that was never valid, and is deleted. When it names
    the directory with MARKER, another directory of that name is the old copy, and is deleted. A
    directory not involved in a move is never deleted.
V2  a copy gets its final name, and so its MARKER, only when all of its files are as long as the
    source's and flushed.
V3  MARKER holds the log start, because the checkpoint that has it is in the source's log directory.
    MARKER is removed only when the checkpoint in the target's log directory has the log start.

Bytes below a published position never change, so a log that is being written is copied in passes,
each up to the position published by then. Files that were replaced or rewritten since (another
inode, size or time) are copied again.
Blocking; called off the event loop, from one thread at a time.
"""

import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mqd.log import directories
from mqd.log.files import Files

MARKER = "moved-here"
CHUNK_BYTES = 4 << 20
FILES_PER_STEP = 64
COARSE_NS = 1_000_000_000  # file times may be this coarse
_FUTURE = re.compile(r"(.+)-([0-9]+)\.[0-9a-f]{32}-future")
_SEGMENT_FILE = re.compile(r"([0-9]{20})\.(?:log|index|timeindex|txnindex|txnsum|snapshot)")
_LOG_START = re.compile(rb"^log_start_offset ([0-9]{1,19})$", re.MULTILINE)
_NOT_COPIED = frozenset({MARKER})


class Fingerprint(NamedTuple):
    """Identifies the contents of a file."""

    inode: int
    size_bytes: int
    mtime_ns: int


def future_name(topic: str, partition: int) -> str:
    return directories.aside_name(topic, partition, "future")


def future_copies(log_dir: Path) -> Iterator[tuple[Path, int]]:
    """Copies in progress (or left by a crash), with their partition index."""
    with os.scandir(log_dir) as entries:
        for entry in entries:
            match = _FUTURE.fullmatch(entry.name)
            if match is not None and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), int(match[2])


def find_future(log_dir: Path, topic_id: bytes, partition: int) -> Path | None:
    for path, index in future_copies(log_dir):
        try:
            if (
                index == partition
                and directories.parse_metadata((path / directories.METADATA).read_bytes()) == topic_id
            ):
                return path
        except (OSError, directories.TopicIdMismatch):
            continue
    return None


def is_marked(path: Path) -> bool:
    return (path / MARKER).exists()


def marked_log_start(path: Path) -> int:
    """The log start in MARKER (V3). 0: unknown."""
    try:
        match = _LOG_START.search((path / MARKER).read_bytes())
    except FileNotFoundError:
        return 0
    return int(match[1]) if match is not None else 0


class PartitionCopy:
    """The copy of one partition's files from `source` to a new directory under `log_dir`."""

    def __init__(self, source: Path, log_dir: Path, topic: str, partition: int, topic_id: bytes, files: Files) -> None:
        self.source = source
        self.path = log_dir / future_name(topic, partition)
        self._log_dir = log_dir
        self._final = directories.partition_path(log_dir, topic, partition)
        self._topic, self._partition, self._topic_id = topic, partition, topic_id
        self._files = files
        # fingerprints of the source's closed files when they were copied
        self._copied_fingerprints: dict[str, Fingerprint] = {}
        self._held_fds: dict[str, int] = {}  # descriptors of logs copied while they were being written
        self._copied_sizes: dict[str, int] = {}  # bytes copied of each file
        self.copied_bytes = 0

    def begin(self) -> None:
        self._files.make_directory(self.path)
        self._files.replace(self.path / directories.METADATA, directories.format_metadata(self._topic_id))
        self._files.sync_directory(self._log_dir)

    def advance(self, active_segment: int, active_position: int) -> Iterator[int]:
        """Copies the closed segments, and the active log up to its published position, while the
        source is being written. Yields the bytes of each step.
        """
        active_log = f"{active_segment:020d}.log"
        names = [
            name
            for name in os.listdir(self.source)
            if (match := _SEGMENT_FILE.fullmatch(name)) and (name == active_log or int(match[1]) < active_segment)
        ]
        step_bytes = 0
        for number, name in enumerate(sorted(names), 1):
            try:
                for size in self._copy_file(name, active_position if name == active_log else None):
                    step_bytes += size
                    if step_bytes >= CHUNK_BYTES:
                        yield step_bytes
                        step_bytes = 0
            except FileNotFoundError:
                pass  # deleted by retention; finish() uses the remaining files
            if step_bytes and (number % FILES_PER_STEP == 0 or number == len(names)):
                yield step_bytes
                step_bytes = 0

    def missing_bytes(self, active_segment: int, active_position: int) -> int:
        """Bytes that advance() would copy; a closed file that has been replaced since (by
        compaction) is counted in full.
        """
        missing, active_log = 0, f"{active_segment:020d}.log"
        for name in os.listdir(self.source):
            match = _SEGMENT_FILE.fullmatch(name)
            if match is None or (name != active_log and int(match[1]) >= active_segment):
                continue
            try:
                fingerprint = _fingerprint(os.stat(self.source / name))
            except FileNotFoundError:
                continue
            limit = active_position if name == active_log else None
            missing += max(
                0,
                (fingerprint.size_bytes if limit is None else min(limit, fingerprint.size_bytes))
                - self._reusable_bytes(name, fingerprint, limit),
            )
        return missing

    def finish(self, log_start_offset: int) -> Path:
        """Called when the source is closed. Copies missing and changed files, removes deleted ones,
        flushes, and gives the copy its final name (V2).
        """
        names = {entry.name for entry in os.scandir(self.source) if entry.is_file(follow_symlinks=False)} - _NOT_COPIED
        for name in sorted(names):
            for _ in self._copy_file(name, None):
                pass
        for entry in list(os.scandir(self.path)):
            if entry.name not in names:
                self._files.unlink(Path(entry.path))
        self._files.replace(self.path / MARKER, f"from {self.source}\nlog_start_offset {log_start_offset}\n".encode())
        self._files.sync_directory(self.path)
        if self._final.exists():  # invalid: the metadata names the source
            self._files.rename(
                self._final, self._log_dir / directories.aside_name(self._topic, self._partition, "stray")
            )
        self._files.rename(self.path, self._final)
        self.path = self._final
        self.close()
        self._files.sync_directory(self._log_dir)
        return self._final

    def _copy_file(self, name: str, limit: int | None) -> Iterator[int]:
        """Copies the missing bytes of one file, up to `limit` for a log that is being written
        (None: a closed file, all of it).
        """
        with open(self.source / name, "rb") as source:
            began_ns = time.time_ns()
            fingerprint = _fingerprint(os.fstat(source.fileno()))
            copied = self._reusable_bytes(name, fingerprint, limit)
            end = fingerprint.size_bytes if limit is None else min(limit, fingerprint.size_bytes)
            if limit is None and self._copied_fingerprints.get(name) == fingerprint and copied == end:
                return
            if copied == 0:
                self._close_held(name)
            if limit is not None and name not in self._held_fds:
                self._held_fds[name] = os.dup(source.fileno())
            with open(self.path / name, "r+b" if (self.path / name).exists() else "w+b") as target:
                target.truncate(copied)
                while copied < end:
                    step_bytes = _copy_range(source.fileno(), target.fileno(), copied, min(CHUNK_BYTES, end - copied))
                    if step_bytes == 0:
                        raise OSError(errno.EIO, f"it ends at byte {copied}, before {end}", str(self.source / name))
                    copied += step_bytes
                    self._copied_sizes[name] = copied
                    self.copied_bytes += step_bytes
                    yield step_bytes
                # flushed here, so that finish(), which runs while the partition is closed, need not
                # wait
                os.fdatasync(target.fileno())
            self._copied_sizes[name] = copied
            if limit is None:
                self._close_held(name)
                # a file changed in place may keep its size, and its time if the clock is coarse
                if name.endswith(".log") or fingerprint.mtime_ns + COARSE_NS < began_ns:
                    self._copied_fingerprints[name] = fingerprint

    def _reusable_bytes(self, name: str, fingerprint: Fingerprint, limit: int | None) -> int:
        """How many bytes of the copy still equal the source's. The file of a log that is still
        being written is held open, so that no other file can get its inode.
        """
        copied = self._copied_sizes.get(name, 0)
        if name in self._held_fds:
            return (
                copied
                if os.fstat(self._held_fds[name]).st_ino == fingerprint.inode
                and copied <= (fingerprint.size_bytes if limit is None else limit)
                else 0
            )
        return copied if self._copied_fingerprints.get(name) == fingerprint else 0

    def _close_held(self, name: str) -> None:
        fd = self._held_fds.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        for name in list(self._held_fds):
            self._close_held(name)


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return Fingerprint(status.st_ino, status.st_size, status.st_mtime_ns)


def _copy_range(source: int, target: int, position: int, size: int) -> int:
    data = os.pread(source, size, position)
    view = memoryview(data)
    while view:
        view = view[os.pwrite(target, view, position + len(data) - len(view)) :]
    return len(data)
