"""The checkpoint files of a worker, next to its partitions in each log directory, and the rules for
trusting them after a start.

Files, W = worker index:

    recovery-point-offset-checkpoint.W   everything below the offset is on disk: recovery scans from
                                         there
    log-start-offset-checkpoint.W        records below the offset were deleted: never serve them
                                         again
    replication-offset-checkpoint.W      records below the offset are committed; only for partitions
                                         with several replicas. Only the worker's own file is trusted,
                                         and a missing entry is 0: a leader learns the value again
                                         as soon as its followers fetch
    clean-shutdown.W                     generation of the broker run that ended cleanly; written
                                         last, removed before any other change

The first two have Kafka's text format (version line, count line, then `topic partition offset`),
version 1 with a fourth column: the topic id. Files of several workers, of an earlier worker count
or of a deleted topic of the same name may contradict each other about one partition. The id
distinguishes incarnations; of the remaining values, the safe one is used:

C1  recovery point: the lowest of all files. A low value costs a scan; a high one would trust bytes
    that a power cut destroyed.
C2  log start: the highest of all files. It only ever moves up, and a deleted record must not come
    back.
C3  clean: this worker's own marker existed, its own file names the partition, and no other file
    does (another worker's file may have been written since).
C4  a file keeps its entries for partitions that moved to another worker until every worker has
    written its own file (`drop_carried`).
C5  an offset is written only after the flush that makes it true (the caller passes durable offsets,
    never log ends).

One writer per file, so there is no lock. Formatting and merging are pure; reading uses plain files;
writing goes through Files.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from mqd.log.files import Files

RECOVERY_POINT = "recovery-point-offset-checkpoint"
LOG_START = "log-start-offset-checkpoint"
HIGH_WATERMARK = "replication-offset-checkpoint"
CLEAN_SHUTDOWN = "clean-shutdown"
_FILE_BYTES_MAX = 64 << 20  # 16384 partitions need 5 MB
_NO_ID = "-"


class CheckpointError(ValueError):
    """A checkpoint file violates its format."""


class CheckpointEntry(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    topic_id: bytes | None  # None: written by Kafka, without ids


TopicPartition = tuple[str, int]


def format_checkpoint(entries: Iterable[CheckpointEntry]) -> bytes:
    lines = [
        f"{entry.topic} {entry.partition} {entry.offset} {_NO_ID if entry.topic_id is None else entry.topic_id.hex()}"
        for entry in entries
    ]
    return "\n".join(["1", str(len(lines)), *lines, ""]).encode()


def parse_checkpoint(data: bytes, name: str = "checkpoint") -> list[CheckpointEntry]:
    """Raises CheckpointError naming the line. Accepts version 0 (Kafka's) and 1."""
    try:
        lines = data.decode().split("\n")
        version, count = int(lines[0]), int(lines[1])
    except (UnicodeDecodeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{name}: no version and count in the first two lines") from error
    if version not in (0, 1):
        raise CheckpointError(f"{name}: version {version} is unknown; it was written by a newer broker")
    entry_lines = [line for line in lines[2:] if line]
    if len(entry_lines) != count:
        raise CheckpointError(f"{name}: {count} entries announced, {len(entry_lines)} found")
    return [_parse_entry(line, version, f"{name} line {number}") for number, line in enumerate(entry_lines, 3)]


def _parse_entry(line: str, version: int, location: str) -> CheckpointEntry:
    fields = line.split(" ")
    try:
        if len(fields) != 3 + version:
            raise ValueError(f"{len(fields)} columns")
        topic_id = None if version == 0 or fields[3] == _NO_ID else bytes.fromhex(fields[3])
        entry = CheckpointEntry(fields[0], int(fields[1]), int(fields[2]), topic_id)
        if entry.partition < 0 or entry.offset < 0 or (topic_id is not None and len(topic_id) != 16):
            raise ValueError("a number out of its range")
    except ValueError as error:
        raise CheckpointError(f"{location}: {error}") from error
    return entry


# -- contents found at start -----------------------------------------------------------------------


class InitialCheckpoints(msgspec.Struct):
    """The contents of the checkpoint files of one log directory before this worker changed any."""

    recovery_points: dict[str, list[CheckpointEntry]] = {}  # by file suffix ("" = Kafka's own file)
    log_starts: dict[str, list[CheckpointEntry]] = {}
    had_clean_shutdown: bool = False  # the worker's own marker existed
    problems: list[str] = []  # files that could not be read; their missing entries cost a scan

    def trusted_points(self, worker: int) -> "TrustedPoints":
        return TrustedPoints(self, worker)


class TrustedPoints:
    """Determines the trusted values of individual partitions (C1, C2, C3)."""

    def __init__(self, initial: InitialCheckpoints, worker: int):
        self._had_clean_shutdown = initial.had_clean_shutdown
        self._own_suffix = str(worker)
        self._recovery = _by_key(initial.recovery_points)
        self._starts = _by_key(initial.log_starts)

    def recovery_point(self, topic: str, partition: int, topic_id: bytes) -> int:
        """Everything below this offset is on disk; -1 = unknown."""
        offsets = [offset for _, offset in _offsets_of(self._recovery, topic, partition, topic_id)]
        return min(offsets) if offsets else -1

    def log_start_offset(self, topic: str, partition: int, topic_id: bytes) -> int:
        return max((offset for _, offset in _offsets_of(self._starts, topic, partition, topic_id)), default=0)

    def had_clean_shutdown(self, topic: str, partition: int, topic_id: bytes) -> bool:
        return self._had_clean_shutdown and [
            suffix for suffix, _ in _offsets_of(self._recovery, topic, partition, topic_id)
        ] == [self._own_suffix]


def _by_key(files: Mapping[str, list[CheckpointEntry]]) -> dict[TopicPartition, list[tuple[str, CheckpointEntry]]]:
    table: dict[TopicPartition, list[tuple[str, CheckpointEntry]]] = {}
    for suffix, entries in files.items():
        for entry in entries:
            table.setdefault((entry.topic, entry.partition), []).append((suffix, entry))
    return table


def _offsets_of(
    table: dict[TopicPartition, list[tuple[str, CheckpointEntry]]], topic: str, partition: int, topic_id: bytes
) -> list[tuple[str, int]]:
    """(file suffix, offset) of this incarnation. Entries without an id are used only if no entry
    has an id.
    """
    candidates = table.get((topic, partition), [])
    matching = [(suffix, entry.offset) for suffix, entry in candidates if entry.topic_id == topic_id]
    if matching or any(entry.topic_id is not None for _, entry in candidates):
        return matching
    return [(suffix, entry.offset) for suffix, entry in candidates]


def _paths_by_suffix(directory: Path, stem: str) -> dict[str, Path]:
    pattern = re.compile(re.escape(stem) + r"(?:\.([0-9]{1,2}))?")
    names = {path.name: path for path in directory.iterdir()}
    return {match[1] or "": path for name, path in sorted(names.items()) if (match := pattern.fullmatch(name))}


def _read(directory: Path, stem: str, problems: list[str]) -> dict[str, list[CheckpointEntry]]:
    entries_by_suffix = {}
    for suffix, path in _paths_by_suffix(directory, stem).items():
        try:
            if path.stat().st_size > _FILE_BYTES_MAX:
                raise CheckpointError(f"{path}: larger than any checkpoint ({path.stat().st_size} bytes)")
            entries_by_suffix[suffix] = parse_checkpoint(path.read_bytes(), str(path))
        except FileNotFoundError:
            continue  # its worker has just replaced or removed the file
        except (OSError, CheckpointError) as error:
            problems.append(str(error))
    return entries_by_suffix


def open_directory(directory: Path, worker: int, worker_count: int, files: Files) -> InitialCheckpoints:
    """Reads the files, then durably removes the worker's own clean-shutdown marker and those of
    workers that no longer exist: the next start can then recognize a crash. Nothing else may be
    written to the directory before this call. Raises OSError.
    """
    initial = InitialCheckpoints()
    initial.had_clean_shutdown = _clean_shutdown_path(directory, worker).exists()
    initial.recovery_points = _read(directory, RECOVERY_POINT, initial.problems)
    initial.log_starts = _read(directory, LOG_START, initial.problems)
    outdated = [
        path
        for suffix, path in _paths_by_suffix(directory, CLEAN_SHUTDOWN).items()
        if suffix and (int(suffix) == worker or int(suffix) >= worker_count)
    ]
    for path in outdated:
        try:
            files.unlink(path)
        except FileNotFoundError:
            pass  # another worker has removed it
    if outdated:
        files.sync_directory(directory)
    return initial


def read_high_watermarks(directory: Path, worker: int) -> dict[tuple[str, int, bytes], int]:
    """(topic, partition, topic id) -> offset; empty if there is no readable file."""
    path = directory / f"{HIGH_WATERMARK}.{worker}"
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            return {}
        entries = parse_checkpoint(path.read_bytes(), str(path))
    except (OSError, CheckpointError):
        return {}
    return {
        (entry.topic, entry.partition, entry.topic_id): entry.offset for entry in entries if entry.topic_id is not None
    }


def _clean_shutdown_path(directory: Path, worker: int) -> Path:
    return directory / f"{CLEAN_SHUTDOWN}.{worker}"


def write_clean_shutdown(directory: Path, worker: int, generation: int, files: Files) -> None:
    """The last write to a log directory, after every partition was flushed and closed and the
    checkpoints are in place.
    """
    files.replace(_clean_shutdown_path(directory, worker), f"version: 0\ngeneration: {generation}\n".encode())


# -- writing ---------------------------------------------------------------------------------------


class CheckpointWriter:
    """The checkpoint files of one worker in one log directory. Not thread-safe: one caller at a time."""

    def __init__(self, directory: Path, worker: int, files: Files, initial: InitialCheckpoints):
        self.directory = directory
        self._worker = worker
        self._files = files
        self._carried_entries = {
            RECOVERY_POINT: initial.recovery_points.get(str(worker), []),
            LOG_START: initial.log_starts.get(str(worker), []),
            HIGH_WATERMARK: [],
        }
        self._written: dict[str, bytes] = {}

    def drop_carried(self, unopened: Iterable[TopicPartition] = ()) -> None:
        """Called when every worker has written its own files, which now contain the carried entries
        (C4). `unopened`: this worker's partitions that are not open; their entries stay.
        """
        kept = set(unopened)
        for stem, entries in self._carried_entries.items():
            self._carried_entries[stem] = [entry for entry in entries if (entry.topic, entry.partition) in kept]

    def write(self, recovery_points: Iterable[CheckpointEntry], log_starts: Iterable[CheckpointEntry]) -> bool:
        """Writes changed files; False if nothing changed. Log starts first: a recovery point must
        never be combined with an older start. Raises OSError; the old files then remain and the
        next call tries again.
        """
        changed = self._write(LOG_START, [entry for entry in log_starts if entry.offset > 0])
        return self._write(RECOVERY_POINT, list(recovery_points)) or changed

    def write_high_watermarks(self, entries: Iterable[CheckpointEntry]) -> bool:
        """Writes the file if it changed; False if it did not, or if there has never been a
        partition with several replicas. Raises OSError.
        """
        entries = list(entries)
        if not entries and HIGH_WATERMARK not in self._written:
            return False
        return self._write(HIGH_WATERMARK, entries)

    def _write(self, stem: str, entries: list[CheckpointEntry]) -> bool:
        own = {(entry.topic, entry.partition) for entry in entries}
        carried = [entry for entry in self._carried_entries[stem] if (entry.topic, entry.partition) not in own]
        data = format_checkpoint(sorted([*entries, *carried], key=lambda entry: (entry.topic, entry.partition)))
        if self._written.get(stem) == data:
            return False
        self._files.replace(self.directory / f"{stem}.{self._worker}", data)
        self._written[stem] = data
        return True


def remove_orphans(directory: Path, worker_count: int, files: Files) -> list[Path]:
    """Removes Kafka's own checkpoints and those of workers that no longer exist; only after
    drop_carried(). One worker does it for all.
    """
    removed = []
    for stem in (RECOVERY_POINT, LOG_START, HIGH_WATERMARK):
        for suffix, path in _paths_by_suffix(directory, stem).items():
            if not suffix or int(suffix) >= worker_count:
                files.unlink(path)
                removed.append(path)
    if removed:
        files.sync_directory(directory)
    return removed
