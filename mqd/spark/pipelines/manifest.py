"""Which files an archive consists of, and which offsets they hold.

An archive is a directory of Parquet files, `topic=T/date=D/NAME.parquet`, which any tool can read. What makes it exact is its list of commits, `_mqd/commits/NUMBER.json`: each says which files came and which
went. A file that no commit names does not count: it is half a batch, or was replaced.

Invariants
1. Commit N+1 is written when commit N is there; a commit appears whole (written aside, then moved).
2. A file is in its place before the commit that names it, and is deleted only after the commit that takes it out.
3. (query, batch) occurs in one commit at most: a batch that Spark repeats is recognised.
4. A record is in one file. A batch adds nothing within the offsets of files that were there; its own files may hold offsets in turns (two days around midnight), as a compaction's may with
   those of other days, which holds as many records as the files that it replaces.

One writer at a time. Paths are Spark's (a local path or a URI); files are reached through pyarrow.fs.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pyarrow import fs

LOG = "_mqd/commits"
KEEP_S = 3600.0
"""A file that no commit names is left alone for this long: somebody may still read it."""


class ArchiveError(Exception):
    """An archive is not what it should be; the text says which file and what to do."""


class Span(msgspec.Struct, frozen=True):
    """Offsets of one partition in one file: [first, end), timestamps in ms of the Unix epoch, both inclusive."""

    partition: int
    first: int
    end: int
    rows: int
    min_timestamp: int
    max_timestamp: int


class ArchivedFile(msgspec.Struct, frozen=True):
    path: str
    """Below the archive's directory."""
    topic: str
    date: str
    size_bytes: int
    spans: list[Span]

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


class Commit(msgspec.Struct, frozen=True):
    query: str
    batch: int
    """-1: a compaction."""
    added: list[ArchivedFile]
    removed: list[str] = []
    ends: dict[str, dict[str, int]] = {}
    """Topic to partition to the offset where the batch ended: behind its last record there may be offsets without one (the ends of transactions)."""


def filesystem(path: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URI, and the path in it. Raises ArchiveError."""
    from pyarrow import fs

    if "://" not in path and not path.startswith("file:"):
        return fs.LocalFileSystem(), os.path.abspath(path)
    uri = path.replace("s3a://", "s3://", 1).replace("gs://", "gcs://", 1)
    try:
        return fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, ImportError) as error:
        raise ArchiveError(f"{path} cannot be reached: {error}") from None


def sync(files: fs.FileSystem, path: str) -> None:
    """A local file, or folder, is on disk afterwards; object stores and HDFS say "written" when it is."""
    if files.type_name != "local":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Archive:
    """An archive's list of files, as of the last `refresh`."""

    def __init__(self, path: str) -> None:
        self.filesystem, self.root = filesystem(path)
        self.path = self.root if self.filesystem.type_name == "local" else path  # Spark's idea of a relative path is the JVM's
        self.files: dict[str, ArchivedFile] = {}
        self.batches: dict[str, int] = {}
        self._ends: dict[str, dict[int, int]] = {}
        self._next = 0
        self.refresh()

    def refresh(self) -> None:
        """Reads the commits that came since."""
        while (commit := self._read(self._next)) is not None:
            self._apply(commit)
            self._next += 1

    def ends(self, topic: str) -> dict[int, int]:
        """Partition to the offset that the archive goes to, exclusive."""
        found = dict(self._ends.get(topic, {}))
        for file in self.of(topic):
            for span in file.spans:
                found[span.partition] = max(found.get(span.partition, 0), span.end)
        return found

    def of(self, topic: str) -> list[ArchivedFile]:
        return [file for file in self.files.values() if file.topic == topic]

    @property
    def topics(self) -> list[str]:
        return sorted({file.topic for file in self.files.values()})

    def commit(self, commit: Commit) -> None:
        """Makes the commit the next one. Raises ArchiveError when somebody else wrote it meanwhile, or when it breaks an invariant."""
        if commit.batch >= 0 and commit.batch <= self.batches.get(commit.query, -1):
            raise ArchiveError(f"batch {commit.batch} of {commit.query} is in {self.path} already")
        missing = [path for path in commit.removed if path not in self.files]
        if missing:
            raise ArchiveError(f"{self.path}: {missing[0]} is not in the archive, it cannot be taken out")
        self._refuse_overlaps(commit)
        target = self._commit_path(self._next)
        if self._exists(target):
            raise ArchiveError(f"{self.path} has another writer (commit {self._next} is there): stop one of the two")
        self._write(target, msgspec.json.encode(commit))
        self._apply(commit)
        self._next += 1

    def vacuum(self, now: float | None = None) -> list[str]:
        """Deletes files that no commit names and that are older than KEEP_S. Gives their paths below the archive."""
        from pyarrow import fs

        now = time.time() if now is None else now
        gone = []
        for info in self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=True, allow_not_found=True)):
            relative = info.path[len(self.root) :].lstrip("/")
            stays = relative in self.files or relative.startswith(LOG) or not info.is_file
            if not stays and (info.mtime_ns or 0) / 1e9 < now - KEEP_S:
                self.filesystem.delete_file(info.path)
                gone.append(relative)
        return gone

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _commit_path(self, number: int) -> str:
        return f"{self.root}/{LOG}/{number:012}.json"

    def _exists(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).is_file)

    def _read(self, number: int) -> Commit | None:
        path = self._commit_path(number)
        try:
            with self.filesystem.open_input_stream(path) as file:
                return msgspec.json.decode(file.read(), type=Commit)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ArchiveError(f"{path} is damaged ({error}): restore it from a copy; without it the files that it names do not count") from None

    def _write(self, path: str, body: bytes) -> None:
        aside = path + ".new"
        self.filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with self.filesystem.open_output_stream(aside) as file:
            file.write(body)
        sync(self.filesystem, aside)
        self.filesystem.move(aside, path)
        sync(self.filesystem, path.rsplit("/", 1)[0])

    def _apply(self, commit: Commit) -> None:
        for path in commit.removed:
            self.files.pop(path, None)
        self.files.update((file.path, file) for file in commit.added)
        if commit.batch >= 0:
            self.batches[commit.query] = commit.batch
        for topic, partitions in commit.ends.items():
            self._ends.setdefault(topic, {}).update((int(partition), end) for partition, end in partitions.items())

    def _refuse_overlaps(self, commit: Commit) -> None:
        if commit.batch < 0:
            before, after = sum(self.files[path].rows for path in commit.removed), sum(file.rows for file in commit.added)
            if before != after:
                raise ArchiveError(f"{self.path}: {before} records were to be compacted and {after} came of it; the files stay as they are")
            return
        topics = {file.topic for file in commit.added}
        there: dict[tuple[str, int], list[tuple[Span, str]]] = {}
        for file in self.files.values():
            if file.topic in topics:
                for span in file.spans:
                    there.setdefault((file.topic, span.partition), []).append((span, file.path))
        for added in commit.added:
            for span in added.spans:
                for other, path in there.get((added.topic, span.partition), ()):
                    if other.first < span.end and span.first < other.end:
                        raise ArchiveError(
                            f"{path} and {added.path} both have offset {max(other.first, span.first)} of {added.topic}-{span.partition}: "
                            f"the archive {self.path} was written by another query, or the topic was recreated; archive it elsewhere"
                        )
