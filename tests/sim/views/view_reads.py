"""mqd_view_read (native/log/views/view_cache.h) with planted bugs that can be switched on."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tests.planted_library import build

_module = build(
    "view_cache",
    "log/views",
    ["wire/api.h", "log/views/view_cache.h"],
    [
        "base/crc32c.c",
        "base/error.c",
        "codec/decompress.c",
        "codec/library.c",
        "wire/batch.c",
        "wire/filter.c",
        "wire/filter_batches.c",
        "wire/record_scan.c",
    ],
)
ffi, lib = _module.ffi, _module.lib
RULES = ("MIXED", "STALE", "JOIN", "FILE", "FILTER", "LIMIT", "BORDER", "GAP", "WITHIN", "TRIM")


class Read(NamedTuple):
    error: int
    data: bytes
    next_offset: int
    empty: bytes
    end: int  # 0: within what was read


def filtered(program: bytes, data: bytes, from_offset: int) -> tuple[bytes, int, bytes]:
    """Without an index: (batches, next offset, the last batch, if nothing of it is among them)."""
    out = ffi.new("struct mqd_filtered *")
    error = lib.mqd_filter_batches(program, len(program), data, len(data), from_offset, 1 << 40, out)
    assert error == 0, error
    found = ffi.buffer(out.bytes, out.size_bytes)[:] if out.bytes else b""
    empty = ffi.buffer(out.empty)[:] if out.has_empty else b""
    lib.mqd_filtered_free(out)
    return found, out.next_offset, empty


class Index:
    """`generation`: the partition's segments_generation."""

    def __init__(self, bytes_max: int, piece_bytes: int, planted: Collection[str] = ()) -> None:
        self._native = ffi.gc(lib.mqd_view_cache_create(bytes_max, piece_bytes), lib.mqd_view_cache_destroy)
        self.generation = ffi.new("uint64_t *", 1)
        lib.mqd_view_planted = sum(getattr(lib, f"MQD_PLANTED_{rule}") for rule in planted)

    def read(
        self, fd: int, file: int, view: int, program: bytes, position: int, limit: int, offset: int, room: int,
        generation: int, filtered_max: int,
    ) -> Read:  # fmt: skip
        kept = ffi.from_buffer(program)
        one = ffi.new("struct mqd_view_read *")
        one.fd, one.file, one.view, one.filter, one.filter_bytes = fd, file, view, kept, len(program)
        one.position, one.limit, one.from_offset, one.output_bytes_max = position, limit, offset, room
        one.generation_at, one.generation, one.filtered_bytes_max = self.generation, generation, filtered_max
        error = lib.mqd_view_read(self._native, one)
        selection = one.selection
        data = ffi.buffer(selection.bytes, selection.size_bytes)[:] if selection.bytes else b""
        empty = ffi.buffer(selection.empty)[:] if selection.has_empty else b""
        result = Read(error, data, selection.next_offset, empty, one.end_position)
        lib.mqd_filtered_free(ffi.addressof(one, "selection"))
        return result

    def stats(self) -> dict[str, int]:
        out = ffi.new("struct mqd_view_cache_stats *")
        lib.mqd_view_cache_stats(self._native, out)
        return {name: getattr(out, name) for name in ("pieces", "bytes", "hits", "added", "stale")}
