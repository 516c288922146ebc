"""Records as columns: converts the arguments of produce_batch (lists, numpy arrays, Arrow arrays) to
the contiguous bytes and sizes that the C core and librdkafka take.

    column = pack(values, "values")      column.data     one buffer, records one after another; the caller's
                                                                memory if it already has this form
                                         column.sizes    int32, -1 = null; None: every record has column.fixed_bytes

    list, tuple of bytes, str (UTF-8), None       joined: one copy
    numpy 'S'                                     without trailing zero bytes, as in numpy; no copy
                                                  if there are none
    numpy uint8[n, width]                         each row is a value, zeros included; no copy if it
                                                  is contiguous
    numpy object, 'U'                             like a list
    Arrow binary, string (also large)             no copy, unless a null entry has bytes
    Arrow fixed_size_binary                       no copy, unless there are nulls
    Arrow chunked array                           one copy when it has several chunks

Everything is checked before the first record is taken: a caller that gets an exception from
produce_batch knows that nothing was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mqd.client.messages import KafkaError, encode_headers, failure

_INT32_MAX = 2**31 - 1


class Column:
    """One column of byte strings; see the module docstring."""

    __slots__ = ("_ends", "count", "data", "fixed_bytes", "sizes")

    def __init__(self, count: int, data: Any, sizes: np.ndarray | None, fixed_bytes: int = 0) -> None:
        self.count, self.data, self.sizes, self.fixed_bytes = count, data, sizes, fixed_bytes
        self._ends: np.ndarray | None = None

    def position(self, index: int) -> int:
        """The position of the first byte of record `index` (0 .. count)."""
        if self.sizes is None:
            return index * self.fixed_bytes
        if index == 0:
            return 0
        if self._ends is None:
            sizes = self.sizes if not self.count or self.sizes.min() >= 0 else np.maximum(self.sizes, 0)
            self._ends = np.cumsum(sizes, dtype=np.int64)
        return int(self._ends[index - 1])

    def largest_bytes(self) -> int:
        """Returns the size of the largest value."""
        if self.sizes is None:
            return self.fixed_bytes if self.count else 0
        return int(self.sizes.max()) if self.count else 0

    def all_sizes(self) -> np.ndarray:
        """Like `sizes`, but never None."""
        return np.full(self.count, self.fixed_bytes, np.int32) if self.sizes is None else self.sizes

    def part(self, start: int, end: int) -> Column:
        """Returns records start .. end - 1, as a column over the same memory."""
        data = memoryview(self.data)[self.position(start) : self.position(end)]
        return Column(end - start, data, None if self.sizes is None else self.sizes[start:end], self.fixed_bytes)

    def items(self) -> list[bytes | None]:
        """The values as bytes objects (copies), for librdkafka."""
        data = bytes(self.data)
        if self.sizes is None:
            width = self.fixed_bytes
            return (
                [data[start : start + width] for start in range(0, self.count * width, width)]
                if width
                else [b""] * self.count
            )
        values: list[bytes | None] = []
        position = 0
        for size in self.sizes.tolist():
            if size < 0:
                values.append(None)
            else:
                values.append(data[position : position + size])
                position += size
        return values


def pack(values: Any, argument: str) -> Column:
    """Raises TypeError for types that are not in the module's table."""
    if isinstance(values, Column):
        return values
    if isinstance(values, (list, tuple)):
        return _pack_list(values, argument)
    if isinstance(values, np.ndarray):
        return _pack_numpy(values, argument)
    if type(values).__module__.partition(".")[0] == "pyarrow":
        return _pack_arrow(values, argument)
    if (
        isinstance(values, (bytes, bytearray, memoryview, str))
        or not hasattr(values, "__len__")
        or not hasattr(values, "__getitem__")
    ):
        raise TypeError(
            f"expected {argument} to be a list of bytes, a numpy or an Arrow array, not {type(values).__name__}"
        )
    return _pack_list(list(values), argument)


def _pack_list(values: Sequence[Any], argument: str) -> Column:
    try:
        data = b"".join(values)
        sizes = np.fromiter(map(len, values), np.int32, len(values))
        if sizes.sum() == len(data):  # otherwise some values have items larger than a byte
            return Column(len(values), data, sizes)
    except TypeError:
        pass  # some values are str or None
    items = [
        value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, memoryview) else value
        for value in values
    ]
    for item in items:
        if item is not None and not isinstance(item, (bytes, bytearray)):
            raise TypeError(f"expected {argument} to be bytes, str or None, not {type(item).__name__}")
    sizes = np.fromiter((-1 if item is None else len(item) for item in items), np.int32, len(items))
    return Column(len(items), b"".join(item for item in items if item is not None), sizes)


def _pack_numpy(values: np.ndarray, argument: str) -> Column:
    if values.ndim == 2 and values.dtype == np.uint8:
        rows = np.ascontiguousarray(values)
        return Column(rows.shape[0], rows.reshape(-1), None, rows.shape[1])
    if values.ndim == 1 and values.dtype.kind == "S":
        return _pack_fixed_text(np.ascontiguousarray(values))
    if values.ndim == 1 and values.dtype.kind in "OU":
        return _pack_list(values.tolist(), argument)
    raise TypeError(
        f"expected {argument} to be a numpy array of 'S', of 'U' or of objects with one dimension, or of uint8 with"
        f" two, not of {values.dtype} with {values.ndim}"
    )


def _pack_fixed_text(values: np.ndarray) -> Column:
    width = values.dtype.itemsize
    rows = values.view(np.uint8).reshape(len(values), width) if len(values) and width else np.empty((0, 0), np.uint8)
    if not len(values) or not width:
        return Column(len(values), b"", None, 0)
    if rows[:, -1].all():
        return Column(len(values), rows.reshape(-1), None, width)
    last = np.argmax(rows[:, ::-1] != 0, axis=1)
    sizes = np.where(rows.any(axis=1), width - last, 0).astype(np.int32)
    return Column(len(values), rows[np.arange(width) < sizes[:, None]], sizes)


def _pack_arrow(values: Any, argument: str) -> Column:
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):  # no chunks, or too many bytes for one array
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    arrow_type = getattr(values, "type", None)
    if arrow_type is None:
        raise TypeError(f"expected {argument} to be an Arrow array, not {type(values).__name__}")
    if pa.types.is_dictionary(arrow_type):
        return _pack_arrow(values.dictionary_decode(), argument)
    if pa.types.is_fixed_size_binary(arrow_type):
        return _pack_arrow_fixed(values, arrow_type.byte_width)
    if pa.types.is_binary(arrow_type) or pa.types.is_string(arrow_type):
        return _pack_arrow_offsets(values, np.int32)
    if pa.types.is_large_binary(arrow_type) or pa.types.is_large_string(arrow_type):
        return _pack_arrow_offsets(values, np.int64)
    if pa.types.is_binary_view(arrow_type) or pa.types.is_string_view(arrow_type):
        return _pack_arrow(
            values.cast(pa.large_binary() if pa.types.is_binary_view(arrow_type) else pa.large_string()), argument
        )
    raise TypeError(
        f"expected {argument} to be an Arrow array of binary, string or fixed_size_binary, not {arrow_type}"
    )


def _pack_arrow_fixed(values: Any, width: int) -> Column:
    if values.null_count:
        return _pack_list(values.to_pylist(), "values")
    buffer = values.buffers()[1]
    start = values.offset * width
    data = memoryview(buffer)[start : start + len(values) * width] if buffer is not None else b""
    return Column(len(values), data, None, width)


def _pack_arrow_offsets(values: Any, offset_type: type) -> Column:
    count = len(values)
    _validity, offsets_buffer, data_buffer = values.buffers()
    if not count or offsets_buffer is None:
        return Column(count, b"", np.zeros(count, np.int32))
    offsets: np.ndarray = np.frombuffer(offsets_buffer, offset_type)[values.offset : values.offset + count + 1]
    sizes = np.diff(offsets)
    if sizes.max() > _INT32_MAX:
        raise failure(KafkaError.MSG_SIZE_TOO_LARGE)
    sizes = sizes.astype(np.int32, copy=False)
    if values.null_count:
        nulls = np.asarray(values.is_null())
        if sizes[nulls].any():  # null entries have bytes, so the values are not contiguous
            return _pack_list(values.to_pylist(), "values")
        sizes = np.where(nulls, np.int32(-1), sizes)
    data = memoryview(data_buffer)[int(offsets[0]) : int(offsets[-1])] if data_buffer is not None else b""
    return Column(count, data, sizes)


# -- partitions, timestamps, headers, keys ---------------------------------------------------------


def pack_partitions(partition: Any, count: int) -> tuple[int, np.ndarray | None]:
    """Returns (partition of all records, None) or (-1, array). -1 = chosen by the partitioner."""
    if partition is None:
        return -1, None
    if isinstance(partition, (int, np.integer)):
        return _check_partition(int(partition)), None
    partitions = np.ascontiguousarray(partition)
    if partitions.shape != (count,) or partitions.dtype.kind not in "iu":
        raise TypeError(f"expected partition to be an int or an array of {count} integers")
    if count and (partitions.min() < -1 or partitions.max() > _INT32_MAX):
        raise failure(KafkaError._UNKNOWN_PARTITION, "a partition is below -1 or above 2147483647")
    return -1, partitions.astype(np.int32)


def _check_partition(partition: int) -> int:
    if partition > _INT32_MAX:
        raise OverflowError("partition is too large")
    return max(partition, -1)


def pack_timestamps(timestamps: Any, count: int, now_ms: int) -> tuple[int, np.ndarray | None]:
    """Returns (milliseconds of all records, None) or (now_ms, array). numpy's datetime64 is
    converted; 0 and None = now, as in confluent_kafka.
    """
    if timestamps is None:
        return now_ms, None
    if isinstance(timestamps, (int, np.integer)):
        return int(timestamps) or now_ms, None
    times = np.ascontiguousarray(timestamps)
    if times.dtype.kind == "M":
        times = times.astype("datetime64[ms]").astype(np.int64)
    if times.shape != (count,) or times.dtype.kind not in "iu":
        raise TypeError(
            f"expected timestamps to be an int (milliseconds) or an array of {count} integers or datetime64"
        )
    times = times.astype(np.int64)
    return now_ms, np.where(times == 0, now_ms, times) if count and not times.all() else times


def pack_headers(headers: Any, count: int) -> Column | None:
    """`headers`: a dict or a list of (str, value) applies to all records; a list of `count` dicts,
    lists or None has one element for each record.
    """
    if headers is None:
        return None
    if isinstance(headers, dict) or (isinstance(headers, list) and headers and isinstance(headers[0], tuple)):
        encoded = encode_headers(headers)
        return Column(count, encoded * count, np.full(count, len(encoded), np.int32))
    if not isinstance(headers, (list, tuple)) or len(headers) != count:
        raise TypeError(f"expected headers to be a dict, a list of (key, value) tuples, or {count} of those")
    return _pack_list([b"\0" if each is None else encode_headers(each) for each in headers], "headers")


def pack_keys(keys: Any, count: int) -> Column:
    return _check_length(pack(keys, "keys"), count, "keys")


def largest_record_bytes(values: Column, keys: Column | None) -> int:
    """Bytes of the largest record, value and key together."""
    if not values.count:
        return 0
    if keys is None:
        return values.largest_bytes()
    sizes = [
        (
            np.full(values.count, column.fixed_bytes, np.int64)
            if column.sizes is None
            else np.maximum(column.sizes, 0).astype(np.int64)
        )
        for column in (values, keys)
    ]
    return int((sizes[0] + sizes[1]).max())


def to_records(
    values: Any, keys: Any, headers: Any, partition: Any, timestamps: Any
) -> list[tuple[Any, Any, int, int, Any]]:
    """Returns (value, key, partition, timestamp or 0, headers or None) for each record. The arguments
    are checked as for columns.
    """
    packed = pack(values, "values")
    count = packed.count
    key_items = [None] * count if keys is None else pack_keys(keys, count).items()
    common_partition, partitions = pack_partitions(partition, count)
    common_timestamp, timestamp_array = pack_timestamps(timestamps, count, 0)
    pack_headers(headers, count)
    has_common_headers = isinstance(headers, dict) or (
        isinstance(headers, list) and headers and isinstance(headers[0], tuple)
    )
    header_items = [headers] * count if has_common_headers or headers is None else headers
    partition_items = [common_partition] * count if partitions is None else partitions.tolist()
    time_items = [common_timestamp] * count if timestamp_array is None else timestamp_array.tolist()
    return list(zip(packed.items(), key_items, partition_items, time_items, header_items, strict=True))


def _check_length(column: Column, count: int, argument: str) -> Column:
    if column.count != count:
        raise ValueError(f"{count} values and {column.count} {argument}")
    return column


def checked_partition(partition: Any, count: int) -> int:
    """Checks the result of the user's partitioner. Raises KafkaException (_UNKNOWN_PARTITION)."""
    if not isinstance(partition, (int, np.integer)) or not 0 <= partition < count:
        raise failure(KafkaError._UNKNOWN_PARTITION, f"the partitioner chose {partition!r} of {count} partitions")
    return int(partition)


def to_bytes(value: Any, argument_number: int) -> bytes | None:
    """A value or key as bytes. Takes bytearray and memoryview, too. Raises TypeError as
    confluent_kafka does; `argument_number` is the argument's number in produce().
    """
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"argument {argument_number}: a bytes-like object is required, not '{type(value).__name__}'")
