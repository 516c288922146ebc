"""The metadata log on disk: record batches in one file, a checkpoint when it has grown, nothing in force before it is flushed.

    DIRECTORY/__cluster_metadata-0/
        00000000000000000042.log          record batches (magic 2, one per change) from offset 42 on; a record's value is a metadata record (metadata_records.py)
        00000000000000000042.checkpoint   the state at offset 42:  "MQDMETA1", crc32c of the rest uint32, length uint64 (big-endian), msgpack
        committed                         how far the log is known to be flushed:  "MQDMARK1", base offset int64, position uint64, crc32c uint32
        reserve                           ballast: given up when the disk is full, so that DeleteTopics and configuration changes still work

Invariants
    M1  append returns after fdatasync; a write that fails leaves the file as before (definite); a flush that fails leaves the outcome unknown: the process
        ends, and its successor reads what the disk holds
    M2  `committed` is written after the flush that it tells of, so it never claims too much; it may lag behind after a power cut
    M3  bytes below the committed position are what was decided: a batch that is unreadable there is corruption, and the controller refuses to start.
        Bytes after it are the torn end of a write that nobody was answered: cut off, unless a whole batch follows them (that is corruption too)
    M4  what lay beyond the mark and was kept goes into a fresh checkpoint before anything rests on it: after a failed flush the page cache lies
    M5  a checkpoint is complete and durable before the log that it replaces is deleted

Single-threaded: one call at a time, off the event loop.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec

from mqd import native
from mqd.cluster.metadata_records import Record, decode_record, encode_record
from mqd.cluster.metadata_state import MetadataState, Snapshot
from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch, parse_header
from mqd.log.records import records as stored_records
from mqd.protocol import records as codec

TOPIC_DIRECTORY = "__cluster_metadata-0"
LOG_BYTES_MAX = 4 << 20  # then a checkpoint takes its place
BATCH_BYTES_MAX = 64 << 20
RESERVE_BYTES = 1 << 20
_CHECKPOINT_MAGIC, _MARK_MAGIC = b"MQDMETA1", b"MQDMARK1"
_CHECKPOINT_HEAD = Struct(">8sIQ")
_MARK = Struct(">8sqQI")
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)


class MetadataCorrupt(RuntimeError):
    """The log or checkpoint is not what was written. The message names file, position and the way out."""


class FlushFailed(RuntimeError):
    """The disk did not confirm a flush: whether the change survives is unknown. The controller must end."""


class Recovered(NamedTuple):
    state: MetadataState
    cut_bytes: int  # torn end that was cut off


# -- batches -------------------------------------------------------------------------------------------------------------------


def encode_batch(base_offset: int, leader_epoch: int, timestamp_ms: int, values: Sequence[bytes]) -> bytes:
    """One uncompressed batch of records without keys."""
    return codec.encode_batch([codec.Record(timestamp_ms=timestamp_ms, value=value) for value in values], base_offset=base_offset, partition_leader_epoch=leader_epoch)


def _read_batch(data: bytes, position: int, base_offset: int) -> BatchInfo:
    """The sound batch at `position`. Raises CorruptBatch."""
    if len(data) - position < HEADER_BYTES:
        raise CorruptBatch(f"{len(data) - position} bytes are less than a batch header")
    batch = parse_header(data, position, position)
    if batch.size_bytes > min(BATCH_BYTES_MAX, len(data) - position):
        raise CorruptBatch(f"a batch of {batch.size_bytes} bytes where {len(data) - position} are left")
    if batch.base_offset != base_offset:
        raise CorruptBatch(f"base offset {batch.base_offset} where {base_offset} is due")
    if native.crc32c(data[position + 21 : position + batch.size_bytes]) != batch.crc:
        raise CorruptBatch("the checksum does not match")
    if batch.record_count != batch.last_offset - batch.base_offset + 1:
        raise CorruptBatch(f"{batch.record_count} records for offsets {batch.base_offset} to {batch.last_offset}")
    return batch


def _later_batch(data: bytes, position: int, base_offset: int) -> int:
    """Position of a whole batch with a later offset anywhere after `position`, or -1. Only a candidate whose header is sane costs a checksum."""
    at = data.find(b"\2", position + 17)
    while at >= 0:
        start = at - 16
        try:
            found = int.from_bytes(data[start : start + 8], "big")
            if base_offset < found < base_offset + (1 << 40):
                _read_batch(data, start, found)
                return start
        except CorruptBatch:
            pass
        at = data.find(b"\2", at + 1)
    return -1


# -- the log -------------------------------------------------------------------------------------------------------------------


class MetadataLog:
    """open() recovers; append() makes records durable; maybe_checkpoint() keeps the log short."""

    def __init__(self, directory: Path, log_bytes_max: int = LOG_BYTES_MAX, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.directory = directory / TOPIC_DIRECTORY
        self._log_bytes_max = log_bytes_max
        self._reserve_bytes = reserve_bytes
        self._fd = self._mark_fd = -1
        self._base_offset = self._position = 0
        self.next_offset = 0

    def _log_path(self, base_offset: int) -> Path:
        return self.directory / f"{base_offset:020d}.log"

    def _checkpoint_path(self, offset: int) -> Path:
        return self.directory / f"{offset:020d}.checkpoint"

    @property
    def _mark_path(self) -> Path:
        return self.directory / "committed"

    @property
    def _reserve_path(self) -> Path:
        return self.directory / "reserve"

    # -- recovery ----------------------------------------------------------------------------------------------------------

    def open(self) -> Recovered:
        """Raises MetadataCorrupt, OSError."""
        self._make_directory()
        state = self._newest_checkpoint()
        logs = self._logs(state)
        # A checkpoint's log is made before the checkpoint: if it is missing, its predecessor goes on.
        base = state.version if state.version in logs or not logs else logs[-1]
        mark_base, mark_position = self._read_mark()
        cut_bytes, beyond_mark = 0, False
        self._base_offset, self._position, self.next_offset = base, 0, base
        if base in logs:
            cut_bytes, beyond_mark = self._replay(state, base, mark_position if mark_base == base else 0)
        elif mark_base == base and mark_position > 0:
            raise MetadataCorrupt(f"{self._log_path(base)} is missing, but {mark_position} bytes of it were in force; restore it from a copy of {self.directory}")
        self._begin()
        if beyond_mark:
            self._checkpoint_anyhow(state)
        self._drop_older()
        self.restore_reserve()
        return Recovered(state, cut_bytes)

    def _logs(self, state: MetadataState) -> list[int]:
        """Base offsets of the logs; an empty one above the newest checkpoint is what a crash left of a checkpoint that was not finished."""
        logs = sorted(int(path.stem) for path in self.directory.glob("*.log") if path.stem.isdigit())
        for base in [base for base in logs if base > state.version]:
            if self._log_path(base).stat().st_size:
                raise MetadataCorrupt(
                    f"{self._log_path(base)} begins at offset {base}, but the newest checkpoint ends at {state.version}; restore {self._checkpoint_path(base)} from a copy"
                )
            native.file_unlink(self._log_path(base))
            logs.remove(base)
        return logs

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            native.file_mkdir(self.directory)
            native.file_sync_directory(self.directory.parent)

    def _newest_checkpoint(self) -> MetadataState:
        """The state of the newest checkpoint; an empty one when there is none. A damaged one is never passed over: an older one plus a log that was cut would lack
        changes."""
        paths = sorted(path for path in self.directory.glob("*.checkpoint") if path.stem.isdigit())
        if not paths:
            return MetadataState()
        path = paths[-1]
        data = path.read_bytes()
        try:
            magic, crc, size = _CHECKPOINT_HEAD.unpack_from(data)
            body = data[_CHECKPOINT_HEAD.size :]
            if magic != _CHECKPOINT_MAGIC or size != len(body) or native.crc32c(body) != crc:
                raise ValueError(f"checksum or length ({len(body)} bytes, {size} announced) does not match")
            state = MetadataState.from_snapshot(_snapshot_decoder.decode(body))
            if state.version != int(path.stem):
                raise ValueError(f"it holds the state at offset {state.version}")
        except Exception as error:  # whatever the bytes lead to, it is this file's fault
            raise MetadataCorrupt(f"{path} is damaged ({error}); restore it from a copy of {self.directory}") from error
        return state

    def _read_mark(self) -> tuple[int, int]:
        """(base offset of the log, position in it) that is known to be flushed; (-1, 0) when the mark cannot be read (it is rewritten in place)."""
        try:
            data = self._mark_path.read_bytes()
        except FileNotFoundError:
            return -1, 0
        if len(data) != _MARK.size:
            return -1, 0
        magic, base, position, crc = _MARK.unpack(data)
        return (base, position) if magic == _MARK_MAGIC and crc == native.crc32c(data[:-4]) else (-1, 0)

    def _replay(self, state: MetadataState, base: int, committed_position: int) -> tuple[int, bool]:
        """Applies the log to the checkpoint's state. Returns (bytes of torn end, whether something beyond the mark was kept)."""
        path = self._log_path(base)
        data = path.read_bytes()
        position, offset = 0, base
        while position < len(data):
            try:
                batch = _read_batch(data, position, offset)
                values = [(record.offset, record.value) for record in stored_records(batch, data[position : position + batch.size_bytes])]
            except CorruptBatch as error:
                self._judge(path, data, position, offset, committed_position, str(error))
                break
            for record_offset, value in values:
                if record_offset >= state.version:
                    self._apply(state, path, position, value)
            position, offset = position + batch.size_bytes, batch.next_offset
        if position < committed_position:
            raise MetadataCorrupt(
                f"{path} ends at byte {position}, but its first {committed_position} bytes were in force: changes that were acknowledged are missing; restore the file"
                f" from a copy, or delete {self._mark_path} to accept the loss of every change from offset {offset} on"
            )
        cut_bytes, beyond_mark = len(data) - position, position > committed_position
        if offset >= state.version:
            self._position, self.next_offset = position, offset
        else:  # the checkpoint has more than the log before it: that log cannot go on
            self._base_offset, self._position, self.next_offset = state.version, 0, state.version
        return cut_bytes, beyond_mark

    def _judge(self, path: Path, data: bytes, position: int, offset: int, committed_position: int, reason: str) -> None:
        """A batch that cannot be read: returns when it is a torn end, raises when it is corruption (M3)."""
        later = _later_batch(data, position, offset)
        if position >= committed_position and later < 0:
            return
        known = f"a sound batch follows at byte {later}" if later >= 0 else f"the first {committed_position} bytes were in force"
        raise MetadataCorrupt(
            f"{path} is corrupt at byte {position} (offset {offset}): {reason}; {known}, so this is no interrupted write. Restore the file from a copy. To go on without"
            f" the changes from offset {offset} on: stop the broker, cut the file to {position} bytes and delete {self._mark_path}"
        )

    @staticmethod
    def _apply(state: MetadataState, path: Path, position: int, value: bytes | None) -> None:
        try:
            state.apply(decode_record(value or b""))
        except (ValueError, KeyError, IndexError) as error:
            raise MetadataCorrupt(
                f"{path}: the record at offset {state.version} (batch at byte {position}) cannot be applied: {error}. Start the mqd version that wrote it, or restore the file from a copy"
            ) from error

    def _begin(self) -> None:
        path = self._log_path(self._base_offset)
        new = not path.exists()
        self._fd = native.file_open_append(path, self._position)
        size = self._mark_path.stat().st_size if self._mark_path.exists() else 0
        self._mark_fd = native.file_open_append(self._mark_path, min(size, _MARK.size))
        if new:
            native.file_sync_directory(self.directory)

    def _checkpoint_anyhow(self, state: MetadataState) -> None:
        """On a full disk the ballast goes first; if that is not enough the log goes on as it is: a broker must be able to start there to delete something."""
        try:
            self.checkpoint(state)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self._give_up_reserve():
                self._checkpoint_anyhow(state)

    # -- writing -----------------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[Record], base_offset: int, leader_epoch: int, now_ms: int) -> None:
        """Afterwards the records are on disk. Raises OSError: nothing was written; FlushFailed: nobody knows."""
        if base_offset != self.next_offset:
            raise ValueError(f"append at offset {base_offset}, the log ends at {self.next_offset}")
        batch = encode_batch(base_offset, leader_epoch, now_ms, [encode_record(record) for record in records])
        try:
            native.file_append(self._fd, batch, self._position)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._give_up_reserve():
                raise
            native.file_append(self._fd, batch, self._position)
        try:
            native.file_flush(self._fd)
        except OSError as error:
            raise FlushFailed(f"{self._log_path(self._base_offset)}: {error}") from error
        self._position += len(batch)
        self.next_offset += len(records)
        self._write_mark()

    def _write_mark(self) -> None:
        mark = _MARK.pack(_MARK_MAGIC, self._base_offset, self._position, 0)[:-4]
        try:
            native.file_append(self._mark_fd, mark + native.crc32c(mark).to_bytes(4, "big"), 0)
        except OSError:
            pass  # it only sharpens recovery (M2)

    def _give_up_reserve(self) -> bool:
        try:
            os.unlink(self._reserve_path)
        except OSError:
            return False
        return True

    def restore_reserve(self) -> None:
        """Called now and then: takes the ballast back when there is room for it again."""
        if not self._reserve_bytes or self._reserve_path.exists():
            return
        fd = os.open(self._reserve_path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._reserve_bytes)
        except OSError:
            self._give_up_reserve()
        finally:
            os.close(fd)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def maybe_checkpoint(self, state: MetadataState) -> bool:
        """`state` is exactly what the log holds. Raises OSError, after which the old log goes on."""
        if self._position < self._log_bytes_max or state.version != self.next_offset:
            return False
        self.checkpoint(state)
        return True

    def checkpoint(self, state: MetadataState) -> None:
        """Raises OSError: the old log goes on; FlushFailed: nobody knows which of the two a successor will find, so this process must write to neither."""
        body = msgspec.msgpack.encode(state.snapshot())
        head = _CHECKPOINT_HEAD.pack(_CHECKPOINT_MAGIC, native.crc32c(body), len(body))
        if state.version == self._base_offset:
            return
        fd = native.file_open_append(self._log_path(state.version), 0)
        try:
            native.file_sync_directory(self.directory)
            native.file_replace(self._checkpoint_path(state.version), head + body)
        except OSError as error:
            native.file_close(fd)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise FlushFailed(f"{self._checkpoint_path(state.version)}: {error}") from error
            native.file_unlink(self._log_path(state.version))
            raise
        native.file_close(self._fd)
        self._fd, self._base_offset, self._position, self.next_offset = fd, state.version, 0, state.version
        self._write_mark()
        self._drop_older()

    def _drop_older(self) -> None:
        """Logs and checkpoints that a newer checkpoint stands for (M5), and what a crash left of an unfinished one."""
        for path in self.directory.iterdir():
            old = path.suffix in (".log", ".checkpoint") and path.stem.isdigit() and int(path.stem) < self._base_offset
            if old or path.suffix == ".tmp":
                native.file_unlink(path)

    def close(self) -> None:
        for fd in (self._fd, self._mark_fd):
            if fd >= 0:
                native.file_close(fd)
        self._fd = self._mark_fd = -1
