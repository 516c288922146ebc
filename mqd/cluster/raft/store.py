"""The quorum's store on disk: the metadata log, its snapshots, the vote. A write takes effect only when
it is flushed; damaged files are refused, never skipped.

    DIRECTORY/                            (DATA_DIR/metadata)
        meta.properties                   node.id, directory.id: identity of this replica. An
                                          emptied directory gets a new directory.id and is not a
                                          voter
        __cluster_metadata-0/
            00000000000000000042.log          batches from offset 42 on (bytes: raft/files.py); the
                                              next file begins where it ends
            00000000000000000042.checkpoint   the state at offset 42, with the voters and the epoch
                                              at that offset
            vote                              epoch, the replica voted for, the leader followed
            committed                         the mark: how far the log is known to be flushed, and
                                              how far it is known to be committed
            reserve                           reserved space: deleted when the disk is full, so that
                                              DeleteTopics and configuration changes still work

Invariants
    M1  append() returns after fdatasync. After a failed write the files are as before. After a failed
        flush the outcome is unknown: the process ends, and the next one reads the disk
    M2  `committed` (the mark) is written after the flush that it records, and lowered and flushed
        before a truncation, so it is never too high; after a power cut it can be too low
    M3  bytes below the mark were flushed: an unreadable batch there is corruption, and the controller
        refuses to start. Unreadable bytes after the mark are the torn end of an unacknowledged write
        and are cut off, unless a complete batch follows them: that is corruption, too
    M4  valid bytes beyond the mark are written and flushed again before they are used, because
        the page cache is unreliable after a failed flush
    M5  a checkpoint is complete and durable before the log that it replaces is deleted; the log file
        that continues after an installed checkpoint is created before the checkpoint
    M6  a vote is durable before it is sent; if the vote file of a member is missing or damaged, that
        is an error, because this replica could vote twice in one epoch

Single-threaded: one call at a time, off the event loop.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from mqd import native
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.cluster.raft import files
from mqd.cluster.raft.events import Stored, VoteState
from mqd.cluster.raft.files import Mark
from mqd.cluster.raft.identity import TOPIC_DIRECTORY, MetadataCorrupt
from mqd.cluster.raft.messages import Batch, ReplicaKey, SnapshotMeta, Voter
from mqd.log.batches import CorruptBatch, walk

RESERVE_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)


class FlushFailed(RuntimeError):
    """A flush has failed, so it is unknown whether the change is on the disk. The controller must exit."""


class Recovered(NamedTuple):
    stored: Stored  # for the quorum; `stored.snapshot` None: the directory is empty
    state: MetadataState  # the state in the snapshot
    cut_bytes: int  # size of the torn end that was cut off


# -- the state's bytes -----------------------------------------------------------------------------


def encode_state(state: MetadataState) -> bytes:
    return msgspec.msgpack.encode(state.snapshot())


def decode_state(data: bytes, offset: int) -> MetadataState:
    """Raises ValueError if the bytes are damaged, or hold the state at another offset."""
    try:
        state = MetadataState.from_snapshot(_snapshot_decoder.decode(data))
    except Exception as error:  # any error here means that the bytes are invalid
        raise ValueError(str(error)) from error
    if state.version != offset:
        raise ValueError(f"it holds the state at offset {state.version}")
    return state


class _LogFile(NamedTuple):
    base_offset: int
    path: Path


# -- the log ---------------------------------------------------------------------------------------


class QuorumStore:
    """open() recovers the log; initialize() starts in an empty directory; append(), truncate(), install() and
    write_vote() carry out the quorum's effects; store_snapshot() limits the log's size.
    """

    def __init__(self, directory: Path, key: ReplicaKey, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.directory = directory / TOPIC_DIRECTORY
        self._mark_path, self._vote_path = self.directory / "committed", self.directory / "vote"
        self._reserve_path = self.directory / "reserve"
        self.key = key
        self._reserve_bytes = reserve_bytes
        self._fd = self._mark_fd = -1
        self._files: list[_LogFile] = []  # the last one is the write target
        self._position = 0  # in the last file
        self._committed_offset = 0
        self._snapshot: SnapshotMeta | None = None
        self.next_offset = 0

    def _log_path(self, base_offset: int) -> Path:
        return self.directory / f"{base_offset:020d}.log"

    def _checkpoint_path(self, offset: int) -> Path:
        return self.directory / f"{offset:020d}.checkpoint"

    # -- recovery ----------------------------------------------------------------------------------

    def open(self) -> Recovered:
        """Recovers and returns the contents. Raises MetadataCorrupt, OSError."""
        self._make_directory()
        meta, state, state_bytes = self._newest_checkpoint()
        mark = self._read_mark()
        self._files = self._relevant_log_files(state.version)
        if meta is None and not state.version:
            self._remove_empty_log()
        if meta is None and (self._files or state.version):
            meta, state_bytes = self._adopt_old_log(state)
        if meta is None:
            if mark.position > 0:
                raise MetadataCorrupt(
                    f"{self._log_path(max(mark.base_offset, 0))} is missing, but {mark.position} bytes of it were"
                    f" flushed; restore {self.directory} from a copy"
                )
            self.restore_reserve()
            return Recovered(Stored(vote=self._read_vote(False)), state, 0)
        self._snapshot = meta
        vote = self._read_vote(True)
        batches, cut_bytes = self._read_files(state.version, mark)
        self._committed_offset = max(meta.offset, min(mark.committed_offset, self.next_offset))
        self._open_for_writing()
        self._delete_obsolete_files()
        self.restore_reserve()
        return Recovered(Stored(vote, meta, state_bytes, tuple(batches), self._committed_offset), state, cut_bytes)

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            native.file_mkdir(self.directory)
            native.file_sync_directory(self.directory.parent)

    def _newest_checkpoint(self) -> tuple[SnapshotMeta | None, MetadataState, int]:
        """Returns (meta, state, size of the encoded state); an empty state if there is no checkpoint. A damaged
        one is never skipped, because an older one and the remaining log would lack changes.
        """
        paths = sorted(path for path in self.directory.glob("*.checkpoint") if path.stem.isdigit())
        if not paths:
            return None, MetadataState(), 0
        path = paths[-1]
        data = path.read_bytes()
        try:
            head = files.decode_checkpoint(data)
            if head.meta is not None and head.meta.offset != int(path.stem):
                raise ValueError(f"it holds the state at offset {head.meta.offset}")
            return head.meta, decode_state(data[head.state_position :], int(path.stem)), head.state_bytes
        except ValueError as error:
            raise MetadataCorrupt(f"{path} is damaged ({error}); restore it from a copy of {self.directory}") from error

    def _remove_empty_log(self) -> None:
        """Removes an empty log that has no checkpoint: it is left over from an interrupted
        initialize() or install(). Adopting it would make this host the only voter of another
        cluster.
        """
        if any(file.path.stat().st_size for file in self._files):
            return
        for file in self._files:
            native.file_unlink(file.path)
        self._files = []

    def _adopt_old_log(self, state: MetadataState) -> tuple[SnapshotMeta, int]:
        """Adopts the log of a release that predates clusters, with this host as its only voter."""
        meta = SnapshotMeta(state.version, 0, (Voter(self.key, "", 0),), 1)
        if not self._vote_path.exists():
            native.file_replace(self._vote_path, files.encode_vote(VoteState()))
        data = encode_state(state)
        self._write_checkpoint(meta, data)
        return meta, len(data)

    def _read_vote(self, is_required: bool) -> VoteState:
        try:
            return files.decode_vote(self._vote_path.read_bytes())
        except FileNotFoundError:
            if not is_required:
                return VoteState()
            reason = "is missing"
        except ValueError as error:
            reason = f"is damaged ({error})"
        raise MetadataCorrupt(
            f"{self._vote_path} {reason}, so this replica could vote twice: restore it from a copy; or empty"
            f" {self.directory.parent}, and this host will join its cluster as a new host"
        )

    def _read_mark(self) -> Mark:
        try:
            return files.decode_mark(self._mark_path.read_bytes())
        except FileNotFoundError:
            return Mark(-1, 0, 0)

    def _relevant_log_files(self, snapshot_offset: int) -> list[_LogFile]:
        """The log files that follow the snapshot, and the one that contains its offset. If none
        contains it, an empty file is left over from an interrupted installation of a snapshot.
        """
        log_files = sorted(
            _LogFile(int(path.stem), path) for path in self.directory.glob("*.log") if path.stem.isdigit()
        )
        later = [file for file in log_files if file.base_offset > snapshot_offset]
        containing = [file for file in log_files if file.base_offset <= snapshot_offset][-1:]
        if not containing and later:
            if later[0].path.stat().st_size:
                raise MetadataCorrupt(
                    f"{later[0].path} begins at offset {later[0].base_offset}, but the newest checkpoint ends at"
                    f" {snapshot_offset}; restore {self._checkpoint_path(later[0].base_offset)} from a copy"
                )
            native.file_unlink(later[0].path)
            later = later[1:]
        return containing + later

    def _read_files(self, snapshot_offset: int, mark: Mark) -> tuple[list[Batch], int]:
        """Returns all batches from the snapshot's offset on, and the size of the torn end that was cut
        off.
        """
        base_offsets = [file.base_offset for file in self._files]
        if mark.position > 0 and mark.base_offset >= snapshot_offset and mark.base_offset not in base_offsets:
            raise MetadataCorrupt(
                f"{self._log_path(mark.base_offset)} is missing, but {mark.position} bytes of it were flushed; restore"
                f" it from a copy of {self.directory}"
            )
        if not self._files:
            self._files = [_LogFile(snapshot_offset, self._log_path(snapshot_offset))]
            self._position, self.next_offset = 0, snapshot_offset
            return [], 0
        batches: list[Batch] = []
        offset, cut_bytes = self._files[0].base_offset, 0
        for number, file in enumerate(self._files):
            is_last = number == len(self._files) - 1
            if file.base_offset != offset:
                if file.path.stat().st_size or not is_last:
                    raise MetadataCorrupt(
                        f"{file.path} begins at offset {file.base_offset}, but the file before it ends at {offset};"
                        f" restore {self.directory} from a copy"
                    )
                native.file_unlink(file.path)  # remains of a snapshot that was not installed
                del self._files[number]
                break
            flushed_bytes = (
                mark.position
                if file.base_offset == mark.base_offset
                else 0
                if file.base_offset > mark.base_offset
                else -1
            )
            later_files_are_empty = all(later.path.stat().st_size == 0 for later in self._files[number + 1 :])
            offset, cut_bytes = self._read_file(file, flushed_bytes, later_files_are_empty, batches)
        # the log ends before the checkpoint, so it cannot continue in this file
        if offset < snapshot_offset:
            self._files = [_LogFile(snapshot_offset, self._log_path(snapshot_offset))]
            self._position, self.next_offset = 0, snapshot_offset
            return [], cut_bytes
        self.next_offset = offset
        return [batch for batch in batches if batch.base_offset >= snapshot_offset], cut_bytes

    def _read_file(
        self, file: _LogFile, flushed_bytes: int, may_be_torn: bool, batches: list[Batch]
    ) -> tuple[int, int]:
        """Appends the file's batches to `batches`. `flushed_bytes`: number of bytes that were flushed (-1 =
        all). Returns (offset after the last batch, size of the torn end).
        """
        data = file.path.read_bytes()
        flushed_bytes = len(data) if flushed_bytes < 0 else flushed_bytes
        position, offset = 0, file.base_offset
        while position < len(data):
            try:
                header = files.read_header(data, position, offset)
                batches.append(files.decode_batch(header, data, position))
            except CorruptBatch as error:
                self._check_torn_end(file.path, data, position, offset, flushed_bytes, str(error), may_be_torn)
                break
            position, offset = position + header.size_bytes, header.next_offset
        if position < flushed_bytes:
            raise MetadataCorrupt(
                f"{file.path} ends at byte {position}, but its first {flushed_bytes} bytes were flushed: changes that"
                f" were acknowledged are missing; restore the file from a copy, or delete {self._mark_path} to accept"
                f" the loss of every change from offset {offset} on"
            )
        if position > flushed_bytes:
            self._rewrite(file.path, data[:position], flushed_bytes)
        self._position = position
        return offset, len(data) - position

    def _check_torn_end(
        self, path: Path, data: bytes, position: int, offset: int, flushed_bytes: int, reason: str, may_be_torn: bool
    ) -> None:
        """Returns if the unreadable batch is a torn end, raises MetadataCorrupt if it is corruption (M3)."""
        later = files.find_later_batch(data, position, offset)
        if position >= flushed_bytes and later < 0 and may_be_torn:
            return
        evidence = (
            f"a valid batch follows at byte {later}"
            if later >= 0
            else "the log continues in the next file"
            if not may_be_torn
            else f"the first {flushed_bytes} bytes were flushed"
        )
        raise MetadataCorrupt(
            f"{path} is corrupt at byte {position} (offset {offset}): {reason}; {evidence}, so this is not an"
            f" interrupted write. Restore the file from a copy. To continue without the changes from offset {offset}"
            f" on: stop the broker, truncate the file to {position} bytes and delete {self._mark_path}"
        )

    @staticmethod
    def _rewrite(path: Path, data: bytes, position: int) -> None:
        """M4: writes `data[position:]` a second time, so that it is flushed. Cuts off the file after `data`."""
        fd = native.file_open_append(path, len(data))
        try:
            native.file_append(fd, data[position:], position)
            native.file_flush(fd)
        finally:
            native.file_close(fd)

    def _open_for_writing(self) -> None:
        path = self._files[-1].path
        is_new = not path.exists()
        self._fd = native.file_open_append(path, self._position)
        try:
            size = self._mark_path.stat().st_size if self._mark_path.exists() else 0
            self._mark_fd = native.file_open_append(self._mark_path, min(size, files.MARK_BYTES))
            if is_new:
                native.file_sync_directory(self.directory)
        except OSError:
            self.close()
            raise

    # -- initializing ------------------------------------------------------------------------------

    def initialize(self, meta: SnapshotMeta, vote: VoteState = VoteState()) -> Stored:  # noqa: B008 (frozen)
        """Starts in an empty directory with the empty state and these voters. If it raises OSError, the
        next start finds an empty directory.
        """
        assert self._snapshot is None and meta.offset == 0
        native.file_replace(self._vote_path, files.encode_vote(vote))
        self._files, self._position, self.next_offset = [_LogFile(0, self._log_path(0))], 0, 0
        self._open_for_writing()
        state = encode_state(MetadataState())
        self._write_checkpoint(meta, state)
        self._snapshot, self._committed_offset = meta, 0
        return Stored(vote, meta, len(state), (), 0)

    # -- writing -----------------------------------------------------------------------------------

    def write_vote(self, vote: VoteState) -> None:
        """Writes the vote durably. If it raises OSError, the previous vote remains."""
        data = files.encode_vote(vote)
        self._with_reserve(lambda: native.file_replace(self._vote_path, data))

    def append(self, batches: Sequence[Batch], now_ms: int, committed_offset: int = 0) -> None:
        """Appends batches durably. `committed_offset`: an offset known to be committed. Raises OSError if
        no batch was written, FlushFailed if the outcome is unknown.
        """
        if batches[0].base_offset != self.next_offset:
            raise ValueError(
                f"cannot append at offset {batches[0].base_offset}: the log ends at offset {self.next_offset}"
            )
        data = b"".join(files.encode_batch(batch, now_ms) for batch in batches)
        self._with_reserve(lambda: native.file_append(self._fd, data, self._position))
        self._flush(self._fd)
        self._position += len(data)
        self.next_offset = batches[-1].next_offset
        self._committed_offset = max(self._committed_offset, min(committed_offset, self.next_offset))
        self._write_mark()

    def _with_reserve(self, write) -> None:
        """Calls `write`; if the disk is full, deletes the reserve and calls it again."""
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._delete_reserve():
                raise
            write()

    def _flush(self, fd: int) -> None:
        try:
            native.file_flush(fd)
        except OSError as error:
            raise FlushFailed(f"{self._files[-1].path}: {error}") from error

    def _write_mark(self, flush: bool = False) -> None:
        data = files.encode_mark(Mark(self._files[-1].base_offset, self._position, self._committed_offset))
        try:
            native.file_append(self._mark_fd, data, 0)
        except OSError:
            if flush:
                raise
            return  # a lower mark is also valid (M2)
        if flush:
            self._flush(self._mark_fd)

    def truncate(self, offset: int) -> None:
        """Removes the batches from `offset` on; none may be committed. Raises FlushFailed."""
        if offset < self._committed_offset or offset > self.next_offset:
            raise ValueError(
                f"cannot truncate to offset {offset}: the log is committed up to {self._committed_offset} and ends at"
                f" {self.next_offset}"
            )
        try:
            self._truncate(offset)
        except OSError as error:
            raise FlushFailed(f"{self.directory}: {error}") from error

    def _truncate(self, offset: int) -> None:
        kept = [file for file in self._files if file.base_offset <= offset]
        removed = self._files[len(kept) :]
        self._files = kept
        self._position, self.next_offset = self._end_before(kept[-1], offset)
        self._write_mark(flush=True)
        for file in reversed(removed):
            native.file_unlink(file.path)
        if removed:
            native.file_sync_directory(self.directory)
        native.file_close(self._fd)
        self._fd = native.file_open_append(kept[-1].path, self._position)
        self._flush(self._fd)

    @staticmethod
    def _end_before(file: _LogFile, offset: int) -> tuple[int, int]:
        """Returns (position, offset) of the end of the last batch that ends at or before `offset`."""
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            position, end_offset = 0, file.base_offset
            for header in walk(fd, 0, os.fstat(fd).st_size):
                if header.next_offset > offset:
                    break
                position, end_offset = header.position + header.size_bytes, header.next_offset
            return position, end_offset
        finally:
            os.close(fd)

    def _delete_reserve(self) -> bool:
        try:
            os.unlink(self._reserve_path)
        except OSError:
            return False
        return True

    def restore_reserve(self) -> None:
        """Recreates the reserve when there is space again; called periodically. Never raises, because the
        log works without the reserve.
        """
        try:
            if not self._reserve_bytes or self._reserve_path.exists():
                return
            fd = os.open(self._reserve_path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # no room for a file, or no descriptor
        try:
            os.posix_fallocate(fd, 0, self._reserve_bytes)
        except OSError:
            self._delete_reserve()
        finally:
            os.close(fd)

    # -- snapshots ---------------------------------------------------------------------------------

    def store_snapshot(self, meta: SnapshotMeta, state: bytes) -> None:
        """Stores this replica's state at a committed offset. The log continues in a new file, and the files
        below the snapshot are deleted. Raises OSError (the old log continues), FlushFailed.
        """
        if self._snapshot is not None and meta.offset <= self._snapshot.offset:
            return
        if self._position:
            self._roll(self.next_offset)
        self._write_checkpoint(meta, state)
        self._snapshot = meta
        self._committed_offset = max(self._committed_offset, meta.offset)
        self._write_mark()
        self._delete_obsolete_files()

    def begin_generation(self, meta: SnapshotMeta, state: bytes) -> None:
        """For force-standalone: stores the state at the end of the log with a new voter set and generation.
        Raises OSError, FlushFailed; then the old generation remains.
        """
        assert (
            self._snapshot is not None
            and meta.generation > self._snapshot.generation
            and meta.offset == self.next_offset
        )
        if meta.offset > self._snapshot.offset:
            self.store_snapshot(meta, state)
        else:
            self._write_checkpoint(meta, state)
            self._snapshot = meta

    def _roll(self, base_offset: int) -> None:
        path = self._log_path(base_offset)
        fd = native.file_open_append(path, 0)
        try:
            native.file_sync_directory(self.directory)
        except OSError as error:
            native.file_close(fd)
            raise FlushFailed(f"{path}: {error}") from error
        if self._fd >= 0:
            native.file_close(self._fd)
        self._fd, self._position = fd, 0
        self._files = [*self._files, _LogFile(base_offset, path)]

    def _write_checkpoint(self, meta: SnapshotMeta, state: bytes) -> None:
        path = self._checkpoint_path(meta.offset)
        try:
            native.file_replace(path, files.encode_checkpoint(meta, state))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise FlushFailed(f"{path}: {error}") from error
            raise

    def install(self, meta: SnapshotMeta, state: bytes) -> MetadataState:
        """Replaces the log with the leader's snapshot. Returns the snapshot's state. Raises
        ValueError if the snapshot is unreadable, OSError (the old log remains), FlushFailed (the
        old log may have been truncated).
        """
        new_state = decode_state(state, meta.offset)
        before = self._files, self._position
        truncated = False
        if self._snapshot is None:
            native.file_replace(self._vote_path, files.encode_vote(self._read_vote(False)))
            self._files, self._position = [_LogFile(meta.offset, self._log_path(meta.offset))], 0
            self._open_for_writing()
        else:
            # the leader's history, which replaces ours, is committed
            if self.next_offset > meta.offset:
                self.truncate(meta.offset)
                before, truncated = (self._files, self._position), True
            if self._files[-1].base_offset != meta.offset:
                self._roll(meta.offset)
        try:
            self._write_checkpoint(meta, state)
        except OSError as error:
            self._undo_install(*before)
            if truncated:
                raise FlushFailed(f"{self.directory}: the log was truncated, but {error}") from error
            raise
        for file in self._files[:-1]:
            native.file_unlink(file.path)
        self._files, self._snapshot = self._files[-1:], meta
        self.next_offset = self._committed_offset = meta.offset
        self._write_mark()
        self._delete_obsolete_files()
        return new_state

    def _undo_install(self, before: list[_LogFile], position: int) -> None:
        """Removes the log file that was created for the snapshot; the old log remains."""
        native.file_close(self._fd)
        self._fd = -1
        for file in self._files[len(before) :]:
            native.file_unlink(file.path)
        self._files, self._position = before, position
        if before:
            self._fd = native.file_open_append(before[-1].path, position)
        else:
            self.close()

    def read_snapshot(self, offset: int, epoch: int, position: int, size_bytes: int) -> bytes:
        """Returns a part of the state's bytes; b"": the snapshot no longer exists. Raises OSError."""
        if self._snapshot is None or (self._snapshot.offset, self._snapshot.epoch) != (offset, epoch):
            return b""
        path = self._checkpoint_path(offset)
        with open(path, "rb") as file:
            header = file.read(24)
            start = 24 + int.from_bytes(header[12:16], "big")
            return os.pread(file.fileno(), size_bytes, start + position)

    def _delete_obsolete_files(self) -> None:
        """Deletes log files and checkpoints that the newest checkpoint replaces (M5), and unfinished
        checkpoints.
        """
        assert self._snapshot is not None
        while len(self._files) > 1 and self._files[1].base_offset <= self._snapshot.offset:
            del self._files[0]
        kept = {file.path for file in self._files} | {self._checkpoint_path(self._snapshot.offset)}
        for path in self.directory.iterdir():
            if (
                path.suffix in (".log", ".checkpoint") and path.stem.isdigit() and path not in kept
            ) or path.suffix == ".tmp":
                native.file_unlink(path)

    def close(self) -> None:
        for fd in (self._fd, self._mark_fd):
            if fd >= 0:
                native.file_close(fd)
        self._fd = self._mark_fd = -1
