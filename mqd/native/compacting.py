"""One compaction of a partition's sealed segments, step by step, and the swap of its files.

Concurrency: a Compaction belongs to one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from mqd.native.core import E_INVALID, NativeError, bytes_of, check, copy_in, failure, ffi, lib


class CompactState(IntEnum):
    """enum mqd_compact_state."""

    DONE = lib.MQD_COMPACT_DONE
    MORE = lib.MQD_COMPACT_MORE
    DECOMPRESS = lib.MQD_COMPACT_DECOMPRESS
    COMPRESS = lib.MQD_COMPACT_COMPRESS


class CompactOptions(msgspec.Struct, kw_only=True):
    """struct mqd_compact_options."""

    first_dirty_offset: int
    to_clean_count: int  # how many of the segments, counted from the first, are to be cleaned
    now_ms: int
    delete_retention_ms: int
    snapshot_offset: int = -1
    end_position: int = -1
    map_bytes: int = 128 << 20
    map_load_percent: int = 90
    index_interval_bytes: int = 4096


class CompactFigures(msgspec.Struct):
    """struct mqd_compact_figures."""

    read_bytes: int = 0
    written_bytes: int = 0
    records_read: int = 0  # while copying
    records_kept: int = 0
    records_without_key: int = 0  # dropped
    batches_read: int = 0
    batches_unchanged: int = 0
    batches_rebuilt: int = 0
    batches_emptied: int = 0
    batches_dropped: int = 0
    mapped_keys: int = 0
    mapped_end: int = 0  # the log is clean below this offset once all groups are installed
    to_clean_count: int = 0  # segments to be copied: fewer than requested if the key table was full
    map_full: int = 0  # 1: the key table was full


class CompactGroup(msgspec.Struct):
    size_bytes: int
    changed: bool
    has_transactions: bool


class Compaction:
    """One compaction of a partition's sealed segments; the order of calls:
    native/log/compaction/api.h. One thread at a time.

    Raises NativeError: E_CORRUPT (this log cannot be compacted), E_FULL (the key table cannot hold
    even one key), E_STALE (retry later), or the system's errno.
    """

    def __init__(self, directory: str | os.PathLike[str], bases: Sequence[int], options: CompactOptions):
        c_options = copy_in(options, ffi.new("struct mqd_compact_options *"))
        c_options.segment_count = len(bases)
        self._progress = ffi.new("struct mqd_compact_step_result *")
        self._pointer = lib.mqd_compact_open(os.fsencode(directory), list(bases), c_options)
        if self._pointer == ffi.NULL:
            raise failure(directory)

    def step(self, bytes_max: int) -> int:
        """Returns a CompactState. `done_bytes` counts the bytes read and written; after DECOMPRESS
        or COMPRESS, the caller converts the data of `unconverted` and passes it to resume().
        """
        return check(lib.mqd_compact_step(self._checked_pointer(), bytes_max, self._progress))

    def resume(self, data: bytes) -> int:
        memory = bytes_of(data, writable=False)
        return check(lib.mqd_compact_resume(self._checked_pointer(), memory, len(memory), self._progress))

    @property
    def done_bytes(self) -> int:
        return self._progress.done_bytes

    @property
    def unconverted(self) -> tuple[int, bytes]:
        """The (codec, data) that step() or resume() has left for the caller to convert."""
        return self._progress.codec, (
            ffi.buffer(self._progress.bytes, self._progress.size_bytes)[:] if self._progress.size_bytes else b""
        )

    def group_begin(self, first: int, count: int) -> None:
        """Begins a group of `count` segments. `first`: its first segment's index in `bases`."""
        check(lib.mqd_compact_group_begin(self._checked_pointer(), first, count))

    def group_end(self) -> CompactGroup:
        group = ffi.new("struct mqd_compact_group *")
        check(lib.mqd_compact_group_end(self._checked_pointer(), group))
        return CompactGroup(group.size_bytes, bool(group.changed), bool(group.has_transactions))

    def figures(self) -> CompactFigures:
        figures = ffi.new("struct mqd_compact_figures *")
        lib.mqd_compact_read_figures(self._checked_pointer(), figures)
        return CompactFigures(*[getattr(figures, name) for name in CompactFigures.__struct_fields__])

    def close(self) -> None:
        """Discards unfinished files."""
        if self._pointer != ffi.NULL:
            lib.mqd_compact_close(self._pointer)
            self._pointer = ffi.NULL

    def _checked_pointer(self) -> Any:
        if self._pointer == ffi.NULL:
            raise NativeError(E_INVALID, "this compaction was closed")
        return self._pointer


def compact_swap_prepare(
    directory: str | os.PathLike[str], base_offset: int, old_bases: Sequence[int], has_transactions: bool
) -> None:
    """Prepares a swap. After a crash, recovery finishes the swap if this call had returned, and
    undoes it otherwise.
    """
    check(
        lib.mqd_compact_swap_prepare(
            os.fsencode(directory), base_offset, list(old_bases), len(old_bases), has_transactions
        ),
        directory,
    )


def compact_swap_install(directory: str | os.PathLike[str], base_offset: int) -> None:
    check(lib.mqd_compact_swap_install(os.fsencode(directory), base_offset), directory)


def compact_swap_finish(directory: str | os.PathLike[str], base_offset: int) -> None:
    check(lib.mqd_compact_swap_finish(os.fsencode(directory), base_offset), directory)


def compact_swap_undo(directory: str | os.PathLike[str], base_offset: int) -> None:
    """Deletes the new files instead of installing them."""
    check(lib.mqd_compact_swap_undo(os.fsencode(directory), base_offset), directory)
