"""The list of an archive's files and of the offsets in them.

An archive is a directory of Parquet files, `topic=T/date=D/NAME.parquet`, which any tool can read.
Its exact contents are defined by its commits, `_mqd/commits/NUMBER.json`: each lists added and
removed files. A file that no commit lists does not count: it is part of an unfinished batch, or was
replaced.

Invariants
1. Commit N+1 is written only after commit N; a commit appears as a whole (it is written under a
   temporary name, then moved), and never replaces another.
2. A file is in its place, with its size, before the commit that names it, and stays for KEEP_S
   after the commit that removes it. A file that no commit has listed stays for KEEP_S after it was
   written.
3. (query, batch) occurs in at most one commit: a batch that Spark repeats is recognized. If a
   batch has the number of an existing one but extends beyond the archive's end, it is a different
   batch, and is refused.
4. A record is in only one file. A batch adds no offsets within the ranges of existing files. The
   ranges of its own files may interleave (two days around midnight), and so may the ranges of a
   compacted file and of files of other days. For each day, a compaction has as many records as the
   files that it replaces.
5. Only an archive's own files are deleted: `topic=T/date=YYYY-MM-DD/NAME.parquet`, and files below
   `_mqd/staging`. Other files below the path are left alone: a checkpoint, notes, another table.
6. A snapshot, `_mqd/snapshots/NUMBER.json`, is the result of the commits before NUMBER. It saves
   reading those commits, which are kept; an unreadable snapshot is skipped.

One writer at a time. A second writer is refused at the first commit that both try to write: on a
local file system by a hard link, on HDFS by the rename. Object stores overwrite on a move: a commit
that a writer wrote between another writer's check and move is lost; the writer of the lost commit
detects that at its next commit. Paths are Spark's (a local path or a URI); files are reached
through pyarrow.fs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import msgspec

if TYPE_CHECKING:
    from pyarrow import fs

COMMITS = "_mqd/commits"
SNAPSHOTS = "_mqd/snapshots"
STAGING = "_mqd/staging"
"""Directory where an earlier version wrote files before they were moved."""
SNAPSHOT_INTERVAL = 1000
"""A snapshot is written after this many commits."""
SNAPSHOTS_KEPT = 2
KEEP_S = 3600.0
"""A file that is not part of the archive, or no longer is, is kept for this long: a process may
still write or read it."""
_OWN_FILE = re.compile(rf"topic=[^/]+/date=\d{{4}}-\d\d-\d\d/[^/]+\.parquet|{STAGING}/.+")


class ArchiveError(Exception):
    """An archive is invalid; the message names the file and the remedy."""


class Span(msgspec.Struct, frozen=True):
    """The offsets of one partition in one file: [first, end). The timestamps are the lowest and the
    highest, in ms since the Unix epoch.
    """

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
    def row_count(self) -> int:
        return sum(span.rows for span in self.spans)

    @property
    def offsets_text(self) -> str:
        """The offsets as text, for messages."""
        return ", ".join(f"{self.topic}-{span.partition} from {span.first} to {span.end}" for span in self.spans)


class Commit(msgspec.Struct, frozen=True):
    query: str
    batch: int
    """-1: a compaction."""
    added: list[ArchivedFile]
    removed: list[str] = []
    ends: dict[str, dict[str, int]] = {}
    """Topic -> partition -> end offset of the batch. After the last record there may be offsets
    without a record (transaction markers).
    """
    topic_ids: dict[str, str] = {}
    """Topic -> its id, as in a query's offsets (mqd/spark/offsets.py): a recreated topic has
    another id.
    """
    at: int = 0
    """When it was written, ms since the Unix epoch; 0: written by an earlier version, which did not
    record it.
    """

    def __str__(self) -> str:
        return f"batch {self.batch} of {self.query}" if self.batch >= 0 else "a compaction"


class Snapshot(msgspec.Struct, frozen=True):
    """The result of all commits before a number."""

    files: list[ArchivedFile]
    batches: dict[str, int]
    """Query -> number of its last batch."""
    ends: dict[str, dict[int, int]]
    """Topic -> partition -> end offset."""
    removed: dict[str, int]
    """Path -> time of the commit that removed it, ms since the Unix epoch."""
    topic_ids: dict[str, str] = {}


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


def sync(file_system: fs.FileSystem, path: str) -> None:
    """Makes a local file or folder durable. Object stores and HDFS need no call: they report a
    write when it is durable.
    """
    if file_system.type_name != "local":
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
        self._local = self.filesystem.type_name == "local"
        self.path = self.root if self._local else path  # Spark resolves relative paths as the JVM does
        # as in Snapshot
        self.files: dict[str, ArchivedFile] = {}  # by path
        self.batches: dict[str, int] = {}
        self.topic_ids: dict[str, str] = {}
        self._ends: dict[str, dict[int, int]] = {}
        self._removed: dict[str, int] = {}
        self._next_number = 0
        self._last_body: bytes | None = None
        """The content of the commit before `_next_number`, if this object wrote it."""
        self._load_snapshot()
        self.refresh()

    def refresh(self) -> None:
        """Reads the commits since the last call."""
        while (commit := self._read_commit(self._next_number)) is not None:
            self._apply(commit)
            self._next_number += 1
            self._last_body = None
        self._forget_removed(time.time())

    def ends(self, topic: str) -> dict[int, int]:
        """Partition -> the archive's end offset, exclusive."""
        ends = dict(self._ends.get(topic, {}))
        for file in self.files_of(topic):
            for span in file.spans:
                ends[span.partition] = max(ends.get(span.partition, 0), span.end)
        return ends

    def files_of(self, topic: str) -> list[ArchivedFile]:
        return [file for file in self.files.values() if file.topic == topic]

    @property
    def topics(self) -> list[str]:
        return sorted({file.topic for file in self.files.values()})

    def has_batch(self, query: str, number: int, ends: Mapping[str, Mapping[str, int]] | None = None) -> bool:
        """Whether a batch is in the archive. ends: its end offsets. Raises ArchiveError if the
        archive has a batch of that number, but `ends` are beyond the archive's end offsets: then
        this is a different batch.
        """
        if number > self.batches.get(query, -1):
            return False
        for topic, partitions in (ends or {}).items():
            archived = self.ends(topic)
            for partition, end in partitions.items():
                if end > archived.get(int(partition), 0):
                    raise ArchiveError(
                        f"batch {number} of {query} is in {self.path} already, but with other offsets"
                        f" ({topic}-{partition} ended at {archived.get(int(partition), 0)} there, at {end} now): the"
                        " checkpoint was lost or recreated; give the pipeline another name, or its old checkpoint"
                    )
        return True

    def commit(self, commit: Commit) -> None:
        """Writes the next commit. Raises ArchiveError if another writer has written one meanwhile,
        or if `commit` would break an invariant.
        """
        if commit.batch >= 0 and commit.batch <= self.batches.get(commit.query, -1):
            offsets = "; ".join(file.offsets_text for file in commit.added) or "nothing"
            raise ArchiveError(
                f"{commit} is in {self.path} already, so it cannot add {offsets} again: give the pipeline another"
                " name, or its old checkpoint"
            )
        missing = [path for path in commit.removed if path not in self.files]
        if missing:
            raise ArchiveError(f"{self.path}: {missing[0]} is not in the archive, so it cannot be removed")
        for topic, topic_id in commit.topic_ids.items():
            if self.topic_ids.get(topic, topic_id) != topic_id:
                raise ArchiveError(
                    f"{topic} was recreated after it was archived in {self.path}: the same offset is now a different"
                    " record; archive the new topic elsewhere"
                )
        if commit.batch < 0:
            self._refuse_other_row_counts(commit)
        else:
            self._refuse_overlaps(commit)
        self._refuse_invisible_files(commit)
        commit = msgspec.structs.replace(commit, at=round(time.time() * 1000))
        body = msgspec.json.encode(commit)
        self._publish(body)
        self._apply(commit)
        self._next_number += 1
        self._last_body = body
        if self._next_number % SNAPSHOT_INTERVAL == 0:
            with contextlib.suppress(OSError):  # optional: without it the archive's next reader reads more commits
                self._write_snapshot()

    def vacuum(self, now: float | None = None) -> list[str]:
        """Deletes files that are not part of the archive and are older than KEEP_S. Returns their
        paths below the archive's directory. Lists the whole directory.
        """
        from pyarrow import fs

        now = time.time() if now is None else now
        self.refresh()
        deleted = []
        top_level = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        folders = [info.path for info in top_level if info.base_name.startswith("topic=") and not info.is_file]
        for folder in (*folders, f"{self.root}/{STAGING}"):
            for info in self.filesystem.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True)):
                path = info.path[len(self.root) :].lstrip("/")
                unused_since_s = max((info.mtime_ns or 0) / 1e9, self._removed.get(path, 0) / 1000)
                if (
                    info.is_file
                    and _OWN_FILE.fullmatch(path)
                    and path not in self.files
                    and unused_since_s < now - KEEP_S
                ):
                    self.filesystem.delete_file(info.path)
                    deleted.append(path)
        self._forget_removed(now)
        return deleted

    def sweep(self, now: float | None = None) -> None:
        """Deletes the files that were removed more than KEEP_S ago by commits that this object has
        read or written. Unlike vacuum(), this lists no directory; it is for a writer that runs for
        months.
        """
        now = time.time() if now is None else now
        for path, removed_ms in self._removed.items():
            if removed_ms / 1000 < now - KEEP_S:
                with contextlib.suppress(OSError):  # the next vacuum finds it
                    self.filesystem.delete_file(f"{self.root}/{path}")
        self._forget_removed(now)

    # -- commits -----------------------------------------------------------------------------------

    def _commit_path(self, number: int) -> str:
        return f"{self.root}/{COMMITS}/{number:012}.json"

    def _exists(self, path: str) -> bool:
        return bool(self.filesystem.get_file_info(path).is_file)

    def _read_body(self, path: str) -> bytes | None:
        try:
            with self.filesystem.open_input_stream(path) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def _read_commit(self, number: int) -> Commit | None:
        path = self._commit_path(number)
        try:
            body = self._read_body(path)
            return None if body is None else msgspec.json.decode(body, type=Commit)
        except msgspec.DecodeError as error:
            raise ArchiveError(
                f"{path} is damaged ({error}): restore it from a copy; without it the files that it lists do not count"
            ) from None

    def _publish(self, body: bytes) -> None:
        """Writes the next commit. Raises ArchiveError if another writer has written it."""
        if (
            not self._local
            and self._last_body is not None
            and self._read_body(self._commit_path(self._next_number - 1)) != self._last_body
        ):
            self._refuse_other_writer(
                self._next_number - 1,
                "the commits of this writer were overwritten; archive their records elsewhere, from the topic",
            )
        target = self._commit_path(self._next_number)
        temporary = self._write_temporary(target, body)
        try:
            if not self._try_link(temporary, target):
                self._move(temporary, target, body)
        finally:
            with contextlib.suppress(OSError):
                self.filesystem.delete_file(temporary)
        sync(self.filesystem, target.rsplit("/", 1)[0])

    def _write_temporary(self, target: str, body: bytes) -> str:
        temporary = f"{target}.{uuid.uuid4().hex}.new"
        self.filesystem.create_dir(target.rsplit("/", 1)[0], recursive=True)
        with self.filesystem.open_output_stream(temporary) as file:
            file.write(body)
        sync(self.filesystem, temporary)
        return temporary

    def _try_link(self, temporary: str, target: str) -> bool:
        """Creates `target` as a hard link to `temporary`. Returns False if the file system has no
        hard links.
        """
        if not self._local:
            return False
        try:
            os.link(temporary, target)
        except FileExistsError:
            self._refuse_other_writer(self._next_number)
        except OSError:
            return False
        return True

    def _move(self, temporary: str, target: str, body: bytes) -> None:
        if self._exists(target):
            self._refuse_other_writer(self._next_number)
        try:
            self.filesystem.move(temporary, target)
        except OSError:
            if self._exists(target):
                self._refuse_other_writer(self._next_number)
            raise
        if self._read_body(target) != body:
            self._refuse_other_writer(self._next_number)

    def _refuse_other_writer(self, number: int, remedy: str = "") -> NoReturn:
        raise ArchiveError(
            f"{self.path} has another writer (commit {number} there is"
            f" {self._read_commit(number) or 'deleted again'}): stop one of the two" + (f"; {remedy}" if remedy else "")
        )

    def _apply(self, commit: Commit) -> None:
        for path in commit.removed:
            self.files.pop(path, None)
            self._removed[path] = commit.at
        self.files.update((file.path, file) for file in commit.added)
        if commit.batch >= 0:
            self.batches[commit.query] = commit.batch
        self.topic_ids.update(commit.topic_ids)
        for topic, partitions in commit.ends.items():
            self._ends.setdefault(topic, {}).update((int(partition), end) for partition, end in partitions.items())

    def _forget_removed(self, now: float) -> None:
        """Forgets files that were removed more than KEEP_S ago. `vacuum` still finds them old
        enough: a file is older than the commit that removes it.
        """
        self._removed = {
            path: removed_ms for path, removed_ms in self._removed.items() if removed_ms / 1000 >= now - KEEP_S
        }

    # -- snapshots ---------------------------------------------------------------------------------

    def _snapshot_numbers(self) -> list[int]:
        """The numbers of the snapshots, newest first."""
        from pyarrow import fs

        infos = self.filesystem.get_file_info(fs.FileSelector(f"{self.root}/{SNAPSHOTS}", allow_not_found=True))
        return sorted(
            (int(info.base_name[:-5]) for info in infos if re.fullmatch(r"\d{12}\.json", info.base_name)), reverse=True
        )

    def _snapshot_path(self, number: int) -> str:
        return f"{self.root}/{SNAPSHOTS}/{number:012}.json"

    def _load_snapshot(self) -> None:
        for number in self._snapshot_numbers():
            try:
                snapshot = msgspec.json.decode(self._read_body(self._snapshot_path(number)) or b"", type=Snapshot)
            except (msgspec.DecodeError, OSError):
                continue
            self.files = {file.path: file for file in snapshot.files}
            self.batches, self.topic_ids = snapshot.batches, snapshot.topic_ids
            self._ends, self._removed = snapshot.ends, snapshot.removed
            self._next_number = number
            return

    def _write_snapshot(self) -> None:
        path = self._snapshot_path(self._next_number)
        temporary = self._write_temporary(
            path,
            msgspec.json.encode(
                Snapshot(list(self.files.values()), self.batches, self._ends, self._removed, self.topic_ids)
            ),
        )
        self.filesystem.move(temporary, path)
        sync(self.filesystem, path.rsplit("/", 1)[0])
        for number in self._snapshot_numbers()[SNAPSHOTS_KEPT:]:
            self.filesystem.delete_file(self._snapshot_path(number))

    # -- checks ------------------------------------------------------------------------------------

    def _refuse_invisible_files(self, commit: Commit) -> None:
        """Raises ArchiveError if the driver cannot see the files that the tasks have written."""
        infos = self.filesystem.get_file_info([f"{self.root}/{file.path}" for file in commit.added])
        for file, info in zip(commit.added, infos, strict=True):
            if not info.is_file or info.size != file.size_bytes:
                actual_state = f"has {info.size} bytes here" if info.is_file else "is not here"
                raise ArchiveError(
                    f"{info.path} ({file.offsets_text}) was written with {file.size_bytes} bytes and {actual_state}:"
                    " Spark's executors and its driver do not see the same file system (a path without a scheme, on a"
                    " cluster of several hosts?); use a path that all of them can reach, such as hdfs:// or s3://"
                )

    def _refuse_other_row_counts(self, commit: Commit) -> None:
        """Raises ArchiveError for a compaction whose number of records differs from that of its
        sources.
        """
        old, new = [self.files[path] for path in commit.removed], commit.added
        for topic, date in sorted({(file.topic, file.date) for file in (*old, *new)}):
            before, after = (
                [file for file in files if (file.topic, file.date) == (topic, date)] for files in (old, new)
            )
            rows_before, rows_after = sum(file.row_count for file in before), sum(file.row_count for file in after)
            if rows_before != rows_after:
                offsets = "; ".join(f"{file.path}: {file.offsets_text}" for file in before) or "no file"
                raise ArchiveError(
                    f"{self.path}: {rows_before} records of {topic}, {date}, were compacted into {rows_after}; the"
                    f" files are unchanged ({offsets}). Check that each of them can be read; compact_from_files = 0"
                    " archives without compacting"
                )

    def _refuse_overlaps(self, commit: Commit) -> None:
        """Raises ArchiveError for a batch that has offsets of existing files."""
        topics = {file.topic for file in commit.added}
        existing: dict[tuple[str, int], list[tuple[Span, str]]] = {}
        for file in self.files.values():
            if file.topic in topics:
                for span in file.spans:
                    existing.setdefault((file.topic, span.partition), []).append((span, file.path))
        for added in commit.added:
            for span in added.spans:
                for other, path in existing.get((added.topic, span.partition), ()):
                    if other.first < span.end and span.first < other.end:
                        raise ArchiveError(
                            f"{path} and {added.path} both have offset {max(other.first, span.first)} of"
                            f" {added.topic}-{span.partition}: the archive {self.path} was written by another query, or"
                            " the topic was recreated; archive it elsewhere"
                        )
