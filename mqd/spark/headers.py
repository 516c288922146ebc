"""Encodes the column `headers` of rows as the header sections of records. Arrow joins the pieces,
numpy encodes the lengths; there is no loop over rows.

    section of a record    varint count, and for each header: varint key length, key, varint value
                           length (-1: null), value

    H1  each row's bytes are those that mqd.client.messages.encode_headers returns; a null or empty
        list becomes a count of 0
    H2  headers without a key are refused, and nothing is encoded; the error says how many there are
Concurrency: any thread; arrays are read, never written.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqd.client.columns import Column

# If the keys and values have at most this many bytes, the joined result always fits Arrow's binary
# type, whose offsets are int32.
_BINARY_BYTES_MAX = 1 << 30
_VARINT_BYTES_MAX = 5


class HeadersError(ValueError):
    """The headers of some rows cannot be those of a record."""


def encode(headers: pa.Array) -> Column:
    """`headers`: list or large_list of struct<key: string or binary, value: binary or string>.
    Raises HeadersError.
    """
    counts = np.asarray(headers.value_lengths().fill_null(0)).astype(np.int64)
    items = headers.flatten()
    keys, values = _binary_field(items, "key"), _binary_field(items, "value")
    if keys.null_count:
        raise HeadersError(f"{keys.null_count} headers are null, or have a null key")
    piece_counts = np.maximum(counts, 1)  # per row: a row without headers has one piece, its count of 0
    ends = np.cumsum(piece_counts)
    starts = ends - piece_counts
    piece_count = int(ends[-1]) if len(ends) else 0
    key_bytes, value_bytes = _lengths(keys), _lengths(values)
    if len(items) != piece_count:  # some rows have no headers
        is_header = np.ones(piece_count, bool)
        is_header[starts[counts == 0]] = False
        item_indexes = pa.array(np.cumsum(is_header) - 1, mask=~is_header)
        keys, values = keys.take(item_indexes), values.take(item_indexes)
        key_bytes, value_bytes = _spread(key_bytes, is_header), _spread(value_bytes, is_header)
    else:
        is_header = None
    header_counts = np.full(piece_count, -1, np.int64)  # at the first piece of a row: its number of headers
    header_counts[starts] = counts
    arrow_type = keys.type
    parts = (
        _varints(header_counts, header_counts >= 0, arrow_type),
        _varints(key_bytes, is_header, arrow_type),
        keys,
        _varints(value_bytes, is_header, arrow_type),
        values,
    )
    joined = pc.binary_join_element_wise(
        *parts, pa.scalar(b"", arrow_type), null_handling="replace", null_replacement=""
    )
    offsets = _offsets(joined)
    bounds = offsets[np.concatenate(([0], ends))]
    data = joined.buffers()[2]
    return Column(
        len(counts),
        b"" if data is None else memoryview(data)[int(bounds[0]) : int(bounds[-1])],
        np.diff(bounds).astype(np.int32),
    )


def _binary_field(items: pa.StructArray, name: str) -> pa.Array:
    """A field of the headers as binary, null where its struct is null. Keys and values get the same
    type.
    """
    field = items.flatten()[items.type.get_field_index(name)]
    is_large = items.nbytes > _BINARY_BYTES_MAX or any(
        pa.types.is_large_string(each.type) or pa.types.is_large_binary(each.type) for each in items.type
    )
    return field.cast(pa.large_binary() if is_large else pa.binary())


def _lengths(array: pa.Array) -> np.ndarray:
    """The lengths as int64, -1 for null."""
    return np.asarray(pc.binary_length(array).fill_null(-1)).astype(np.int64)


def _spread(lengths: np.ndarray, is_header: np.ndarray) -> np.ndarray:
    """The lengths where `is_header` is true, 0 elsewhere."""
    spread = np.zeros(len(is_header), np.int64)
    spread[is_header] = lengths
    return spread


def _varints(numbers: np.ndarray, mask: np.ndarray | None, arrow_type: pa.DataType) -> pa.Array:
    """Numbers from -1 to 2**31 - 1, zig-zag, as byte strings; empty where `mask` is false."""
    zigzag = (numbers << 1) ^ (numbers >> 63)
    sizes = np.ones(len(zigzag), np.int64)
    if len(zigzag) and int(zigzag.max()) >= 0x80:
        for count in range(1, _VARINT_BYTES_MAX):
            sizes += zigzag >= 1 << 7 * count
    if mask is not None:
        sizes *= mask
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    for index in range(int(sizes.max()) if len(sizes) else 0):
        has_byte = sizes > index
        continuation_bits = (sizes[has_byte] > index + 1).astype(np.uint8) << 7
        data[offsets[:-1][has_byte] + index] = (zigzag[has_byte] >> 7 * index & 0x7F).astype(
            np.uint8
        ) | continuation_bits
    offset_type = np.int64 if pa.types.is_large_binary(arrow_type) else np.int32
    return pa.Array.from_buffers(
        arrow_type, len(sizes), [None, pa.py_buffer(offsets.astype(offset_type)), pa.py_buffer(data)]
    )


def _offsets(array: pa.Array) -> np.ndarray:
    offset_type = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    return (
        np.frombuffer(array.buffers()[1], offset_type, len(array) + 1, array.offset * np.dtype(offset_type).itemsize)
        if len(array)
        else np.zeros(1, offset_type)
    )
