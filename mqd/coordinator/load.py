"""Reads a coordinator's partition from its segment files and builds the coordinator's cores (its
state machines), in a thread. A million committed offsets are loaded in seconds.

The records that take effect are those that compaction would keep: the last non-transactional
(plain) record of each key, in log order, without tombstones. The records of a transaction take
effect at its commit marker, except those whose key has a current record that was written after them
(Kafka compares the offsets of the two records in the same way). Records without a marker are
pending. A pending record that can no longer take effect is passed to its core with its key but
without its value. If the core factory sets `replays_every_record` (share-partitions, whose topic is
not compacted and has no transactions), every record is replayed as it is read.

Damage is logged and skipped. At most the damaged batch is lost if the offset index shows where the
next one begins. If a core cannot read a record, only that record is logged and skipped. A
coordinator with one bad record therefore still serves everything else. Keys and values are located
natively (native/wire/record_locations.c). The files are opened for reading only, and records at or
above `end_offset` are ignored. Blocking: call load() off the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mqd.base import logging
from mqd.base.blocking_queries import QueryProgress
from mqd.coordinator.actions import CoreFactory, TransactionalCore
from mqd.coordinator.shard import LoadedPartition
from mqd.log import indexes, segments
from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch, parse_header
from mqd.log.records import records
from mqd.native import RecordPositions, WalkStop, crc32c

if TYPE_CHECKING:
    import numpy

BLOCK_BYTES = 4 << 20
RECORDS_AT_ONCE = 1 << 16
_CRC_END = 21
_LOGGED_MAX = 10  # problems that are logged individually

log = logging.get("coordinator.load")


class _LoadState:
    """The records that are in effect so far."""

    def __init__(self, cores: CoreFactory, loaded: LoadedPartition, name: str) -> None:
        self.cores, self.loaded, self.name = cores, loaded, name
        self.plain: dict[bytes, bytes] = {}
        # producer id -> (epoch, key -> (write number, value))
        self.open_transactions: dict[int, tuple[int, dict[bytes, tuple[int, bytes | None]]]] = {}
        # key -> the value of `write_count` when its current record was written. Kept only while a
        # transaction is open; keys last written before then are absent.
        self.write_numbers: dict[bytes, int] = {}
        self.write_count = 0
        self.replays_every_record: bool = getattr(cores, "replays_every_record", False)

    def log_problem(self, text: str, **fields: object) -> None:
        self.loaded.skipped_count += 1
        if self.loaded.skipped_count <= _LOGGED_MAX:
            log.error(text, partition=self.name, **fields)

    def on_plain(self, data: bytes, positions: numpy.ndarray) -> None:
        plain, discard, replays_every_record = self.plain, self.plain.pop, self.replays_every_record
        starts = positions[:, (0, 2)]
        ends = starts + positions[:, (1, 3)]
        value_sizes = positions[:, 3]
        for key_start, key_end, value_start, value_end, value_size in zip(
            starts[:, 0].tolist(),
            ends[:, 0].tolist(),
            starts[:, 1].tolist(),
            ends[:, 1].tolist(),
            value_sizes.tolist(),
            strict=True,
        ):
            key = data[key_start:key_end]
            if replays_every_record:
                self._replay(key, data[value_start:value_end] if value_size >= 0 else None)
                continue
            discard(key, None)
            if value_size >= 0:
                plain[key] = data[value_start:value_end]
        if self.open_transactions:
            self.write_count += 1
            for key_start, key_size in positions[:, :2].tolist():
                self.write_numbers[data[key_start : key_start + key_size]] = self.write_count
        self.loaded.record_count += len(positions)

    def put(self, key: bytes, value: bytes | None, write_number: int) -> None:
        if self.replays_every_record:
            self._replay(key, value)
            return
        self.plain.pop(key, None)
        if value is not None:
            self.plain[key] = value
        if self.open_transactions:
            self.write_numbers[key] = write_number

    def on_other(self, batch: BatchInfo, data: bytes) -> None:
        """Handles a transactional, control or compressed batch. Raises CorruptBatch."""
        key_values = [(record.key, record.value) for record in records(batch, data)]
        self.loaded.record_count += len(key_values)
        self.write_count += 1
        if batch.is_control:
            self._on_marker(batch, key_values)
        elif batch.is_transactional:
            epoch, pending = self.open_transactions.get(batch.producer_id, (batch.producer_epoch, {}))
            self.open_transactions[batch.producer_id] = (max(epoch, batch.producer_epoch), pending)
            for key, value in key_values:
                if key is not None:
                    pending.pop(key, None)
                    pending[key] = (self.write_count, value)
        else:
            for key, value in key_values:
                if key is not None:
                    self.put(key, value, self.write_count)

    def _on_marker(self, batch: BatchInfo, key_values: list[tuple[bytes | None, bytes | None]]) -> None:
        """Ends the producer's transaction. The marker's key: version int16, type int16 (0 abort, 1
        commit).
        """
        marker_type = (
            int.from_bytes(key_values[0][0][2:4], "big")
            if key_values and key_values[0][0] is not None and len(key_values[0][0]) >= 4
            else -1
        )
        _, pending = self.open_transactions.pop(batch.producer_id, (-1, {}))
        if marker_type == 1:
            for key, (write_number, value) in pending.items():
                if self.write_numbers.get(key, -1) < write_number:
                    self.put(key, value, write_number)
        if not self.open_transactions:
            self.write_numbers.clear()

    # -- cores -------------------------------------------------------------------------------------

    def build(self) -> None:
        replay_all = getattr(self.cores, "replay_all", None)
        if replay_all is not None:
            replay_all(self.loaded.cores, self.plain, self._on_unreadable)
        else:
            self._replay_each()
        pending_records = [
            (write_number, producer_id, epoch, key, value)
            for producer_id, (epoch, pending) in self.open_transactions.items()
            for key, (write_number, value) in pending.items()
        ]
        for write_number, producer_id, epoch, key, value in sorted(pending_records, key=lambda record: record[0]):
            self._replay_pending(
                producer_id, epoch, key, value if self.write_numbers.get(key, -1) < write_number else None
            )

    def _replay_each(self) -> None:
        for key, value in self.plain.items():
            self._replay(key, value)

    def _replay(self, key: bytes, value: bytes | None) -> None:
        try:
            name = self.cores.core_name_of(key)
            if name is None:
                return
            core = self.loaded.cores.get(name)
            if core is None:
                core = self.loaded.cores[name] = self.cores.make(name)
            core.replay(key, value)
        except ValueError as error:
            self._on_unreadable(key, error)

    def _replay_pending(self, producer_id: int, epoch: int, key: bytes, value: bytes | None) -> None:
        try:
            name = self.cores.core_name_of(key)
            if name is None:
                return
            core = self.loaded.cores.get(name)
            if core is None:
                core = self.loaded.cores[name] = self.cores.make(name)
            cast(TransactionalCore, core).replay_pending(key, value, producer_id, epoch)
        except ValueError as error:
            self._on_unreadable(key, error)
            return
        self.loaded.transactions.setdefault(producer_id, {})[name] = None
        self.loaded.transaction_epochs[producer_id] = epoch

    def _on_unreadable(self, key: bytes, error: Exception) -> None:
        self.log_problem("a coordinator's record cannot be read and is ignored", key=repr(key[:80]), reason=str(error))


def load(
    directory: Path, end_offset: int, cores: CoreFactory, name: str = "", progress: QueryProgress | None = None
) -> LoadedPartition:
    """Builds the cores from the partition's records below `end_offset`. Reports progress to
    `progress`. Raises OSError when the files cannot be read.
    """
    progress = progress or QueryProgress()
    loaded = LoadedPartition(end_offset)
    if end_offset > 0:
        state = _LoadState(cores, loaded, name or directory.name)
        walker = RecordPositions(RECORDS_AT_ONCE)
        bases = [base for base in segments.base_offsets(directory) if base < end_offset]
        for base, next_base in zip(bases, [*bases, end_offset][1:], strict=True):
            _read_segment(directory, base, min(next_base, end_offset), state, walker, progress)
        progress.stop_timing()
        state.build()
        if loaded.skipped_count > _LOGGED_MAX:
            log.error(
                "records of a coordinator cannot be read; only the first ones were logged",
                partition=state.name,
                count=loaded.skipped_count,
            )
        for core_name in [core_name for core_name, core in loaded.cores.items() if core.is_empty]:
            del loaded.cores[core_name]
    return loaded


def _read_segment(
    directory: Path, base: int, end_offset: int, state: _LoadState, walker: RecordPositions, progress: QueryProgress
) -> None:
    fd = os.open(segments.segment_path(directory, base), os.O_RDONLY | os.O_CLOEXEC)
    try:
        position, next_offset = 0, base
        while next_offset < end_offset:
            done, position, next_offset = _read_block(
                fd, directory, base, position, next_offset, end_offset, state, walker
            )
            progress.step()
            if done:
                return
    finally:
        os.close(fd)


def _read_block(
    fd: int,
    directory: Path,
    base: int,
    position: int,
    next_offset: int,
    end_offset: int,
    state: _LoadState,
    walker: RecordPositions,
) -> tuple[bool, int, int]:
    """Consumes the whole batches of one read. Returns (whether the segment is finished, position
    in the file, next offset).
    """
    data = os.pread(fd, BLOCK_BYTES, position)
    at = 0
    while True:
        stop, at, next_offset, positions = walker.walk(data, at, next_offset, end_offset)
        if len(positions):
            state.on_plain(data, positions)
        if stop == WalkStop.END_OFFSET:
            return True, position + at, next_offset
        if stop == WalkStop.OTHER:
            at, next_offset = _apply_batch(data, at, position, state)
        elif stop == WalkStop.CORRUPT:
            return _skip_damage(fd, directory, base, position + at, next_offset, end_offset, state)
        elif stop == WalkStop.END:
            if at:
                return False, position + at, next_offset
            return _read_single_batch(fd, position, data, next_offset, directory, base, end_offset, state)


def _apply_batch(data: bytes, at: int, position: int, state: _LoadState) -> tuple[int, int]:
    batch = parse_header(data, at, position + at)
    try:
        state.on_other(batch, data[at : at + batch.size_bytes])
    except CorruptBatch as error:
        state.log_problem(
            "a batch of a coordinator's partition cannot be read and is ignored",
            offset=batch.base_offset,
            records=batch.record_count,
            reason=str(error),
        )
    return at + batch.size_bytes, batch.next_offset


def _read_single_batch(
    fd: int,
    position: int,
    data: bytes,
    next_offset: int,
    directory: Path,
    base: int,
    end_offset: int,
    state: _LoadState,
) -> tuple[bool, int, int]:
    """Reads a whole batch. Called when a block holds no complete batch: the batch is larger than
    BLOCK_BYTES, or damaged, or the file ends too early.
    """
    batch = _header_at(fd, position)
    batch_bytes = _read_batch(fd, batch) if batch is not None and batch.base_offset >= next_offset else b""
    if batch is None or not batch_bytes or crc32c(batch_bytes[_CRC_END:]) != batch.crc:
        return _skip_damage(fd, directory, base, position, next_offset, end_offset, state)
    _apply_batch(batch_bytes, 0, position, state)
    return False, position + batch.size_bytes, batch.next_offset


def _header_at(fd: int, position: int) -> BatchInfo | None:
    header = os.pread(fd, HEADER_BYTES, position)
    try:
        return parse_header(header, 0, position) if len(header) == HEADER_BYTES else None
    except CorruptBatch:
        return None


def _read_batch(fd: int, batch: BatchInfo) -> bytes:
    """The bytes of the batch; b"" when the file does not hold all of them."""
    return (
        os.pread(fd, batch.size_bytes, batch.position)
        if batch.position + batch.size_bytes <= os.fstat(fd).st_size
        else b""
    )


def _skip_damage(
    fd: int, directory: Path, base: int, position: int, next_offset: int, end_offset: int, state: _LoadState
) -> tuple[bool, int, int]:
    """Finds the next intact batch after a damaged one: first where the damaged batch ends according
    to its length field, then at the positions in the offset index.
    """
    for candidate in _next_batch_positions(fd, directory, base, position):
        batch = _header_at(fd, candidate)
        batch_bytes = _read_batch(fd, batch) if batch is not None and batch.base_offset >= next_offset else b""
        if batch is not None and batch_bytes and crc32c(batch_bytes[_CRC_END:]) == batch.crc:
            end = min(batch.base_offset, end_offset)
            _log_damage(state, base, position, next_offset, end)
            return False, candidate, end
    _log_damage(state, base, position, next_offset, end_offset)
    return True, position, next_offset


def _log_damage(state: _LoadState, base: int, position: int, first_offset: int, end_offset: int) -> None:
    state.log_problem(
        "a coordinator's partition is damaged; the records in the damaged range are ignored",
        segment=base,
        position=position,
        first_offset=first_offset,
        end_offset=end_offset,
    )


def _next_batch_positions(fd: int, directory: Path, base: int, position: int) -> Iterator[int]:
    """Positions at which the next batch after the damaged one at `position` may begin."""
    damaged = _header_at(fd, position)
    if damaged is not None:
        yield position + damaged.size_bytes
    try:
        entries = indexes.read_offset_index(directory, base)
    except OSError:
        return
    yield from (indexed for indexed in entries["position"].tolist() if indexed > position)
