"""Copies records into Arrow buffers (native/client/columns.h), for Spark's reads.

    rows = ArrowRows(65536, 8 << 20, {"key", "value", "offset"})
    count = rows.append(view, start)      # view: a RecordBatchView of mqd.client
    row_count, arrays = rows.finish()     # {"key": pyarrow.Array...}; `rows` is empty again

append() copies as many records as fit; if some records of the view are left, call finish() and
append() again.

Buffers are reused as soon as no array refers to them (BUFFER_SETS_MAX are kept): new memory for
each batch would cost more than filling it. Concurrency: one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from mqd.native.core import check, enumeration, ffi, lib

BUFFER_SETS_MAX = 4
DATA_BYTES_MAX = 2**31 - 1
_BUFFER_NAMES = {number: name for name, number in enumeration("mqd_arrow_full", "MQD_ARROW_").items()}
_ALIGNMENT = 64


class _Buffers:
    """One set of buffers: an array of memory, and a struct mqd_arrow_rows that points into it."""

    def __init__(self, row_count: int, sizes: dict[str, int], columns: Collection[str]) -> None:
        self.sizes, self.columns = dict(sizes), columns
        self.rows = ffi.new("struct mqd_arrow_rows *")
        self.rows.row_capacity = row_count
        self.views: dict[str, np.ndarray] = {}
        plan: list[tuple[str, int]] = []
        for name, kind in (("offset", "offsets"), ("timestamp", "timestamps_us")):
            if name in columns:
                plan.append((kind, 8 * row_count))
        if "timestampType" in columns:
            plan.append(("timestamp_types", 4 * row_count))
        for column, name in (("key", "keys"), ("value", "values")):
            if column in columns:
                plan += self._plan_blobs(name, row_count)
        if "headers" in columns:
            self.rows.header_capacity = sizes["headers"]
            plan += [("header_ends", 4 * (row_count + 1)), ("header_validity", row_count // 8 + 1)]
            plan += self._plan_blobs("header_keys", sizes["headers"])
            plan += self._plan_blobs("header_values", sizes["headers"])
        self.memory = np.empty(sum(-(-size // _ALIGNMENT) * _ALIGNMENT for _, size in plan) or 1, np.uint8)
        self._pointer = ffi.from_buffer("uint8_t[]", self.memory)
        position = 0
        for name, size in plan:
            self.views[name] = self.memory[position : position + size]
            self._set_pointer(name, self._pointer + position)
            position += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.idle_reference_count = sys.getrefcount(self.memory)  # while no array refers to it
        lib.mqd_arrow_begin(self.rows)

    def _plan_blobs(self, name: str, count: int) -> list[tuple[str, int]]:
        getattr(self.rows, name).data_capacity = self.sizes[name]
        return [
            (f"{name}.ends", 4 * (count + 1)),
            (f"{name}.validity", count // 8 + 1),
            (f"{name}.data", self.sizes[name]),
        ]

    def _set_pointer(self, name: str, pointer: Any) -> None:
        owner, _, field = name.rpartition(".")
        target = getattr(self.rows, owner) if owner else self.rows
        c_types = {
            "ends": "int32_t *",
            "header_ends": "int32_t *",
            "timestamp_types": "int32_t *",
            "offsets": "int64_t *",
            "timestamps_us": "int64_t *",
        }
        setattr(target, field, ffi.cast(c_types.get(field, "uint8_t *"), pointer))

    @property
    def is_free(self) -> bool:
        return sys.getrefcount(self.memory) <= self.idle_reference_count


class ArrowRows:
    """See the module docstring. `data_bytes` limits the total size of the keys and, separately,
    that of the values; a single larger record gets the memory that it needs. Raises NativeError
    (E_CORRUPT) for damaged headers.
    """

    def __init__(self, row_count: int, data_bytes: int, columns: Collection[str]) -> None:
        self._row_count, self._columns = row_count, frozenset(columns)
        self._sizes = {
            "keys": data_bytes,
            "values": data_bytes,
            "headers": 2 * row_count,  # their number; the other sizes are in bytes
            "header_keys": data_bytes // 2,
            "header_values": data_bytes // 2,
        }
        self._buffer_sets: list[_Buffers] = []
        self._current: _Buffers | None = None
        self._view = ffi.new("struct mqd_record_view *")

    def __len__(self) -> int:
        return 0 if self._current is None else self._current.rows.row_count

    @property
    def _buffers(self) -> _Buffers:
        """Allocated only for the first row: a task without records needs no buffers."""
        if self._current is None:
            self._current = self._take_buffers()
        return self._current

    def _take_buffers(self) -> _Buffers:
        for buffers in self._buffer_sets:
            if buffers.sizes == self._sizes and buffers.is_free:
                lib.mqd_arrow_begin(buffers.rows)
                return buffers
        buffers = _Buffers(self._row_count, self._sizes, self._columns)
        self._buffer_sets = [kept for kept in self._buffer_sets if kept.sizes == self._sizes][
            -(BUFFER_SETS_MAX - 1) :
        ] + [buffers]
        return buffers

    def append(self, view: Any, start: int = 0) -> int:
        """Appends as many records of a RecordBatchView as fit, beginning with number `start`, and
        returns how many; call finish() before appending the rest. While there are no rows yet, at
        least one is appended.
        """
        count = len(view)
        native = self._native_view(view, count)
        while True:
            appended = check(lib.mqd_arrow_append(self._buffers.rows, native, start, count))
            if appended or len(self) or start == count:
                return appended
            self._grow()

    def _native_view(self, view: Any, count: int) -> Any:
        """Points the native struct at the view's arrays; valid only during the append() call."""
        native, keys, values, headers = self._view, view.keys, view.values, view.header_sections
        base = ffi.from_buffer("uint8_t[]", keys.buffer)
        self._held = arrays = [
            np.ascontiguousarray(array, kind)
            for array, kind in (
                (view.offsets, np.int64),
                (view.timestamps, np.int64),
                (keys.positions, np.int64),
                (keys.sizes, np.int32),
                (values.positions, np.int64),
                (values.sizes, np.int32),
            )
        ]
        if headers is not None:
            arrays += [np.ascontiguousarray(headers.positions, np.int64), np.ascontiguousarray(headers.sizes, np.int32)]
        native.capacity = native.count = count
        native.base, native.base_bytes = base, len(base)
        native.timestamp_type = 1 if view.timestamp_type == 2 else 0
        names = (
            "offsets",
            "timestamps_ms",
            "key_positions",
            "key_bytes",
            "value_positions",
            "value_bytes",
            "header_positions",
            "header_bytes",
        )
        for index, name in enumerate(names):
            c_type = (
                "int32_t *" if name.endswith("_bytes") else "uint64_t *" if name.endswith("positions") else "int64_t *"
            )
            setattr(native, name, ffi.cast(c_type, ffi.from_buffer(arrays[index])) if index < len(arrays) else ffi.NULL)
        return native

    def _grow(self) -> None:
        """Makes room for one record that is larger than a buffer."""
        rows = self._buffers.rows
        name = {
            "KEYS": "keys",
            "VALUES": "values",
            "HEADERS": "headers",
            "HEADER_KEYS": "header_keys",
            "HEADER_VALUES": "header_values",
        }[_BUFFER_NAMES[rows.full_buffer]]
        self._sizes[name] = min(max(int(rows.needed), 2 * self._sizes[name]), DATA_BYTES_MAX)
        self._current = None

    def finish(self) -> tuple[int, dict[str, Any]]:
        """Returns (row count, pyarrow arrays by column: those requested of key, value, offset,
        timestamp, timestampType, headers). The object is empty afterwards.
        """
        import pyarrow as pa

        buffers, rows = self._buffers, self._buffers.rows
        count, out = rows.row_count, {}
        for column, view, kind, width in (
            ("offset", "offsets", pa.int64(), 8),
            ("timestamp", "timestamps_us", pa.timestamp("us", tz="UTC"), 8),
            ("timestampType", "timestamp_types", pa.int32(), 4),
        ):
            if column in self._columns:
                out[column] = pa.Array.from_buffers(
                    kind, count, [None, pa.py_buffer(buffers.views[view][: width * count])], 0
                )
        for column, name in (("key", "keys"), ("value", "values")):
            if column in self._columns:
                out[column] = _blobs(pa, buffers, name, count, pa.binary())
        if "headers" in self._columns:
            out["headers"] = _headers(pa, buffers, count)
        self._current = None
        return count, out


def _bitmap(pa: Any, buffers: _Buffers, name: str, null_count: int, count: int) -> Any:
    return pa.py_buffer(buffers.views[name][: (count + 7) // 8]) if null_count else None


def _blobs(pa: Any, buffers: _Buffers, name: str, count: int, kind: Any) -> Any:
    column, views = getattr(buffers.rows, name), buffers.views
    arrow_buffers = [
        _bitmap(pa, buffers, f"{name}.validity", column.null_count, count),
        pa.py_buffer(views[f"{name}.ends"][: 4 * (count + 1)]),
        pa.py_buffer(views[f"{name}.data"][: column.data_bytes]),
    ]
    return pa.Array.from_buffers(kind, count, arrow_buffers, column.null_count)


def _headers(pa: Any, buffers: _Buffers, count: int) -> Any:
    rows, total = buffers.rows, buffers.rows.header_count
    keys = _blobs(pa, buffers, "header_keys", total, pa.binary())
    if rows.damaged_key_count:  # as in Kafka's client: invalid UTF-8 becomes U+FFFD
        keys = pa.array([key.decode("utf-8", "replace") for key in keys.to_pylist()], pa.string())
    else:
        keys = keys.view(pa.string())
    values = _blobs(pa, buffers, "header_values", total, pa.binary())
    header = pa.StructArray.from_arrays(
        [keys, values], fields=[pa.field("key", pa.string()), pa.field("value", pa.binary())]
    )
    arrow_buffers = [
        _bitmap(pa, buffers, "header_validity", rows.header_null_count, count),
        pa.py_buffer(buffers.views["header_ends"][: 4 * (count + 1)]),
    ]
    return pa.Array.from_buffers(pa.list_(header.type), count, arrow_buffers, rows.header_null_count, children=[header])
