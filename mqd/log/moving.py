"""Copies of partitions on their way to another log directory (KIP-113): their names, what says that one counts, and how one is brought up to its source.

    TARGET/TOPIC-PARTITION.UUID-future    being copied; nobody serves it; whatever dies, it is deleted
    TARGET/TOPIC-PARTITION                whole and flushed, the source closed; holds MARKER until the source is gone

V1  which of two directories counts is said by the metadata alone. While it names the source, a directory with MARKER elsewhere is a copy that never counted: deleted.
    When it names the directory with MARKER, what lies elsewhere under that name is the old copy: deleted. A directory that no move has to do with is never deleted.
V2  a copy gets its final name, and so its MARKER, only when all of its files are as long as the source's and flushed.

Bytes below a published position never change, so a log that is being written is copied up to there, again and again; what was replaced or rewritten since (another
inode, size or time) is copied anew. Blocking; called off the event loop.
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mqd.log import directories
from mqd.log.files import Files

MARKER = "moved-here"
CHUNK_BYTES = 4 << 20
_FUTURE = re.compile(r"(.+)-([0-9]+)\.[0-9a-f]{32}-future")
_NOT_COPIED = frozenset({MARKER})

Print = tuple[int, int, int]  # inode, size, mtime_ns


def future_name(topic: str, partition: int) -> str:
    return directories.aside_name(topic, partition, "future")


def futures(log_dir: Path) -> Iterator[tuple[Path, int]]:
    """Copies under way (or left by a crash), with their partition index."""
    with os.scandir(log_dir) as entries:
        for entry in entries:
            match = _FUTURE.fullmatch(entry.name)
            if match is not None and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), int(match[2])


def future_of(log_dir: Path, topic_id: bytes, partition: int) -> Path | None:
    for path, index in futures(log_dir):
        try:
            if index == partition and directories.parse_metadata((path / directories.METADATA).read_bytes()) == topic_id:
                return path
        except (OSError, directories.TopicIdMismatch):
            continue
    return None


def is_marked(path: Path) -> bool:
    return (path / MARKER).exists()


class Copy:
    """One partition's files from `source` to a new directory under `log_dir`."""

    def __init__(self, source: Path, log_dir: Path, topic: str, partition: int, topic_id: bytes, files: Files) -> None:
        self.source = source
        self.path = log_dir / future_name(topic, partition)
        self._log_dir = log_dir
        self._final = directories.partition_path(log_dir, topic, partition)
        self._topic, self._partition, self._topic_id = topic, partition, topic_id
        self._files = files
        self._seen: dict[str, Print] = {}  # of closed files of the source, when they were copied
        self._held: dict[str, int] = {}  # descriptors of logs that were copied while they were written to
        self._copied: dict[str, int] = {}  # bytes of each
        self.copied_bytes = 0

    def begin(self) -> None:
        self._files.make_directory(self.path)
        self._files.replace(self.path / directories.METADATA, directories.format_metadata(self._topic_id))
        self._files.sync_directory(self._log_dir)

    def advance(self, active_segment: int, active_position: int) -> Iterator[int]:
        """While the source is written to: logs of closed segments, and the active one up to its published position. Yields the bytes of each step."""
        for base in sorted(int(name[:-4]) for name in os.listdir(self.source) if name.endswith(".log") and name[:-4].isdigit()):
            if base > active_segment:
                break
            try:
                yield from self._bring(f"{base:020d}.log", active_position if base == active_segment else None)
            except FileNotFoundError:
                pass  # retention took it; finish() sees what is there

    def missing_bytes(self, active_segment: int, active_position: int) -> int:
        missing = 0
        for entry in os.scandir(self.source):
            if entry.name.endswith(".log") and entry.name[:-4].isdigit() and int(entry.name[:-4]) <= active_segment:
                try:
                    size = active_position if int(entry.name[:-4]) == active_segment else entry.stat().st_size
                except FileNotFoundError:
                    continue
                missing += max(0, size - self._copied.get(entry.name, 0))
        return missing

    def finish(self) -> Path:
        """The source is closed, nothing writes there any more: brings over what is missing or changed, drops what is gone, flushes, gives the copy its name (V2)."""
        names = {entry.name for entry in os.scandir(self.source) if entry.is_file(follow_symlinks=False)} - _NOT_COPIED
        for name in sorted(names):
            for _ in self._bring(name, None):
                pass
        for entry in list(os.scandir(self.path)):
            if entry.name not in names:
                self._files.unlink(Path(entry.path))
        self._files.replace(self.path / MARKER, f"from {self.source}\n".encode())
        self._files.sync_directory(self.path)
        if self._final.exists():  # nobody's: the metadata names the source
            self._files.rename(self._final, self._log_dir / directories.aside_name(self._topic, self._partition, "stray"))
        self._files.rename(self.path, self._final)
        self.close()
        self._files.sync_directory(self._log_dir)
        return self._final

    def _bring(self, name: str, limit: int | None) -> Iterator[int]:
        """Bytes of one file that the copy lacks, up to `limit` of a log that is being written (None: a closed file, all of it)."""
        with open(self.source / name, "rb") as source:
            status = os.fstat(source.fileno())
            now: Print = (status.st_ino, status.st_size, status.st_mtime_ns)
            done = self._reusable(name, now, limit)
            end = status.st_size if limit is None else min(limit, status.st_size)
            if limit is None and self._seen.get(name) == now and done == end:
                return
            if limit is not None and name not in self._held:
                self._held[name] = os.dup(source.fileno())
            with open(self.path / name, "r+b" if (self.path / name).exists() else "w+b") as target:
                target.truncate(done)
                while done < end:
                    step = _copy_range(source.fileno(), target.fileno(), done, min(CHUNK_BYTES, end - done))
                    if step == 0:
                        raise OSError(errno.EIO, f"it ends at byte {done}, before {end}", str(self.source / name))
                    done += step
                    self._copied[name] = done
                    self.copied_bytes += step
                    yield step
                os.fdatasync(target.fileno())  # at once: the pause must not wait for what was copied before it
            self._copied[name] = done
            if limit is None:
                self._seen[name] = now
                self._let_go(name)

    def _reusable(self, name: str, now: Print, limit: int | None) -> int:
        """How many bytes of the copy are the source's still. While a log is written to its file is held open, so that no other can have its inode."""
        done = self._copied.get(name, 0)
        if name in self._held:
            return done if os.fstat(self._held[name]).st_ino == now[0] and done <= (now[1] if limit is None else limit) else self._again(name)
        return done if self._seen.get(name) == now else 0

    def _again(self, name: str) -> int:
        self._let_go(name)
        return 0

    def _let_go(self, name: str) -> None:
        fd = self._held.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        for name in list(self._held):
            self._let_go(name)


def _copy_range(source: int, target: int, position: int, size: int) -> int:
    data = os.pread(source, size, position)
    view = memoryview(data)
    while view:
        view = view[os.pwrite(target, view, position + len(data) - len(view)) :]
    return len(data)
