"""Records as columns: the result of consume_batch, on either transport.

    with consumer.consume_batch(100_000, 1.0) as batch:
        batch.topic, batch.partition, len(batch)
        batch.offsets, batch.timestamps        numpy int64 (milliseconds since the epoch)
        batch.keys, batch.values               Blobs: a sequence of bytes or None, also available as
        batch.values.to_list()                     list of bytes and None; one copy each
        batch.values.views()                       list of memoryviews and None; no copy
        batch.values.to_arrow()                    Arrow BinaryView array; copies only values up to
                                                   12 bytes (needs the extra mqd[arrow])
        batch.values.to_numpy("<f8")               every value as an element of that type; one copy
        batch.headers(i)                       [(str, bytes | None)...] of one record

Lifetime. Over shared memory keys and values are not copied: they are views into the mapped segment
file. Views, arrays and Arrow arrays are valid for as long as they are referenced, even after the
segment has been deleted or compacted, or the broker has stopped; until then the file also takes up
disk space. release(), or the end of the `with` block, releases the batch's own references:
after that its methods raise ValueError, while views taken before remain valid. Bytes from to_list()
or indexing are copies.

A batch whose records came over TCP has the same interface; its bytes were copied by librdkafka.
Concurrency: a batch is used by one thread at a time; its views by any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from mqd.client.messages import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Message,
    decode_headers,
    encode_headers,
)
from mqd.native import reader as segments

if TYPE_CHECKING:
    import pyarrow

_M = TypeVar("_M", bound=Message)
_NO_HEADERS = b"\0"
_SMALL_COUNT = 16  # for more records numpy is faster
_PYARROW_VERSION_MIN = 21
_SPARSE_BYTES = 1 << 20  # a region is copied as a whole unless its gaps exceed its blobs by more than this


class Blobs(Sequence):
    """A column of byte strings, some of them None (null). Indexing returns a copy as bytes; for whole
    columns see the module.
    """

    __slots__ = ("_base", "_list", "_positions", "_sizes")

    def __init__(
        self,
        base: memoryview | bytes,
        positions: np.ndarray,
        sizes: np.ndarray,
        items: list[bytes | None] | None = None,
    ) -> None:
        self._base, self._positions, self._sizes, self._list = base, positions, sizes, items

    @classmethod
    def of_list(cls, items: list[bytes | None]) -> Blobs:
        sizes = np.fromiter((-1 if item is None else len(item) for item in items), np.int32, len(items))
        ends = np.cumsum(np.maximum(sizes, 0), dtype=np.int64)
        return cls(b"".join(item for item in items if item), ends - np.maximum(sizes, 0), sizes, items)

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...
    @overload
    def __getitem__(self, index: slice) -> Blobs: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Blobs(
                self._base,
                self._positions[index],
                self._sizes[index],
                None if self._list is None else self._list[index],
            )
        size, position = int(self._sizes[index]), int(self._positions[index])
        return None if size < 0 else bytes(self._base[position : position + size])

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"<{len(self)} blobs, {self.nbytes} bytes>"

    @property
    def sizes(self) -> np.ndarray:
        """Sizes in bytes, int32; -1 = null."""
        return self._sizes

    @property
    def positions(self) -> np.ndarray:
        """The position in `buffer` at which each begins, int64."""
        return self._positions

    @property
    def buffer(self) -> memoryview:
        """The memory to which positions refer, read-only: over shared memory the mapped segment
        file (the part beyond the last record must not be accessed).
        """
        return memoryview(self._base)

    @property
    def nbytes(self) -> int:
        return int(np.maximum(self._sizes, 0).sum(dtype=np.int64))

    @property
    def null_count(self) -> int:
        return int(np.count_nonzero(self._sizes < 0))

    def to_list(self) -> list[bytes | None]:
        """A list of copies: bytes and None."""
        if self._list is None:
            self._list = self._copy_out()
        return list(self._list)

    def views(self) -> list[memoryview | None]:
        """Read-only memoryviews and None; nothing is copied."""
        base = self.buffer
        starts = self._positions.tolist()
        return [
            None if size < 0 else base[start : start + size]
            for start, size in zip(starts, self._sizes.tolist(), strict=True)
        ]

    def _copy_out(self) -> list[bytes | None]:
        sizes = self._sizes
        if len(sizes) <= _SMALL_COUNT:
            base = self._base
            return [
                None if size < 0 else bytes(base[start : start + size])
                for start, size in zip(self._positions.tolist(), sizes.tolist(), strict=True)
            ]
        low, high = int(sizes.min()), int(sizes.max())
        if low == high:
            if high <= 0:
                return [None if high < 0 else b""] * len(sizes)
            return segments.gather(self.buffer, self._positions, sizes)[0].view(f"V{high}").tolist()
        ends = self._positions + np.maximum(sizes, 0)
        begin, end = int(self._positions.min()), int(ends.max())
        if end - begin > 2 * self.nbytes + _SPARSE_BYTES:
            data, offsets = segments.gather(self.buffer, self._positions, sizes, True)
            assert offsets is not None  # they were requested
            region, starts, stops = data.tobytes(), offsets[:-1].tolist(), offsets[1:].tolist()
        else:
            region, starts, stops = (
                bytes(self._base[begin:end]),
                (self._positions - begin).tolist(),
                (ends - begin).tolist(),
            )
        if low >= 0:
            return [region[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return [
            None if size < 0 else region[start:stop]
            for start, stop, size in zip(starts, stops, sizes.tolist(), strict=True)
        ]

    def to_numpy(self, dtype: Any = None) -> np.ndarray:
        """With a dtype of a fixed size ("<i8", "S16", a record type...): every blob is copied to one
        element; raises ValueError if a blob is null or has another size (for "S": a larger one). Without a
        dtype: uint8[count, width] when all blobs have the same size, else an array of bytes objects
        and None.
        """
        sizes = self._sizes
        low, high = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
        if dtype is None:
            if low == high and low > 0:
                return segments.gather(self.buffer, self._positions, sizes)[0].reshape(len(sizes), high)
            array = np.empty(len(sizes), object)
            array[:] = self.to_list()
            return array
        element_type = np.dtype(dtype)
        if element_type.hasobject or element_type.itemsize == 0:
            raise ValueError(f"{element_type} is not a type of fixed size; to_list() returns bytes objects")
        if not len(sizes):
            return np.empty(0, element_type)
        if low == high == element_type.itemsize:
            return segments.gather(self.buffer, self._positions, sizes)[0].view(element_type)
        if low < 0 or element_type.kind != "S" or high > element_type.itemsize:
            raise ValueError(
                f"blobs of {low} to {high} bytes (-1 = null) do not fit {element_type} of {element_type.itemsize} bytes"
            )
        return np.array(self.to_list(), element_type)

    def to_arrow(self, type: str = "binary_view") -> pyarrow.Array:  # noqa: A002  (Arrow's own word)
        """`binary_view` or `string_view`: without a copy; the array keeps the memory alive. `binary`
        or `string`: one copy, as Arrow's large_binary or large_string. Strings are not checked for
        valid UTF-8.
        """
        arrow = _pyarrow()
        if type in ("binary", "string"):
            return self._copy_to_arrow(arrow, type)
        if type not in ("binary_view", "string_view"):
            raise ValueError(f"{type!r} is not one of binary_view, string_view, binary, string")
        base = self.buffer
        views, validity, null_count, origin = segments.arrow_views(base, self._positions, self._sizes)
        end = int((self._positions + np.maximum(self._sizes, 0)).max()) if len(self) else 0
        buffers = [
            arrow.py_buffer(validity) if null_count else None,
            arrow.py_buffer(views),
            arrow.py_buffer(base[origin:end]),
        ]
        arrow_type = arrow.binary_view() if type == "binary_view" else arrow.string_view()
        return arrow.Array.from_buffers(arrow_type, len(self), buffers, null_count)

    def _copy_to_arrow(self, arrow: Any, type: str) -> pyarrow.Array:  # noqa: A002
        data, offsets = segments.gather(self.buffer, self._positions, self._sizes, True)
        null_count = self.null_count
        validity = np.packbits(self._sizes >= 0, bitorder="little") if null_count else None
        buffers = [
            None if validity is None else arrow.py_buffer(validity),
            arrow.py_buffer(offsets),
            arrow.py_buffer(data),
        ]
        return arrow.Array.from_buffers(
            arrow.large_binary() if type == "binary" else arrow.large_string(), len(self), buffers, null_count
        )


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ImportError("Arrow arrays need pyarrow: pip install 'mqd[arrow]'") from None
    if int(pyarrow.__version__.partition(".")[0]) < _PYARROW_VERSION_MIN:
        raise ImportError(
            f"pyarrow {pyarrow.__version__} cannot make BinaryView arrays over existing memory: pip install --upgrade"
            " 'mqd[arrow]'"
        )
    return pyarrow


class RecordBatchView:
    """Records of one partition, in order, as columns; see the module. Falsy without records."""

    __slots__ = (
        "_headers",
        "_keys",
        "_offsets",
        "_timestamps",
        "_values",
        "leader_epoch",
        "partition",
        "timestamp_type",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        offsets: np.ndarray,
        timestamps: np.ndarray,
        keys: Blobs,
        values: Blobs,
        headers: Blobs | None = None,
        leader_epoch: int | None = None,
        timestamp_type: int = TIMESTAMP_CREATE_TIME,
    ) -> None:
        """`headers`: header sections as records have them (count varint first); None: no record has
        any.
        """
        self.topic, self.partition = topic, partition
        self.leader_epoch = leader_epoch
        self.timestamp_type = timestamp_type
        self._offsets: np.ndarray | None = offsets
        self._timestamps = timestamps
        self._keys, self._values, self._headers = keys, values, headers

    @classmethod
    def from_messages(cls, topic: str, partition: int, messages: Sequence[Any]) -> RecordBatchView:
        """`messages` of one partition, in order: confluent_kafka's or mqd's, without error()."""
        count = len(messages)
        offsets = np.fromiter((message.offset() for message in messages), np.int64, count)
        stamps = [message.timestamp() for message in messages]
        timestamps = np.fromiter((time for _, time in stamps), np.int64, count)
        sections = [message.headers() for message in messages]
        headers = (
            Blobs.of_list([encode_headers(section) if section else _NO_HEADERS for section in sections])
            if any(sections)
            else None
        )
        keys, values = (
            Blobs.of_list([message.key() for message in messages]),
            Blobs.of_list([message.value() for message in messages]),
        )
        epoch = messages[-1].leader_epoch() if count else None
        return cls(
            topic,
            partition,
            offsets,
            timestamps,
            keys,
            values,
            headers,
            epoch,
            stamps[0][0] if count else TIMESTAMP_CREATE_TIME,
        )

    # -- lifetime ----------------------------------------------------------------------------------

    def release(self) -> None:
        """Releases the records. A second call has no effect."""
        self._offsets = None
        del self._timestamps, self._keys, self._values, self._headers
        self._timestamps = self._keys = None  # type: ignore[assignment]  # see _require_held()
        self._values = self._headers = None  # type: ignore[assignment]  # see _require_held()

    @property
    def released(self) -> bool:
        return self._offsets is None

    def __enter__(self) -> RecordBatchView:
        self._require_held()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _require_held(self) -> np.ndarray:
        if self._offsets is None:
            raise ValueError(
                f"this batch of {self.topic} [{self.partition}] was released: use it before release() or the end of its"
                " with block, or keep copies (to_list, numpy.copy)"
            )
        return self._offsets

    # -- columns -----------------------------------------------------------------------------------

    @property
    def offsets(self) -> np.ndarray:
        """int64, ascending, with gaps for compacted and aborted records and transaction markers."""
        return self._require_held()

    @property
    def timestamps(self) -> np.ndarray:
        """int64, milliseconds since the epoch; -1 = none. Their meaning: timestamp_type."""
        self._require_held()
        return self._timestamps

    @property
    def keys(self) -> Blobs:
        self._require_held()
        return self._keys

    @property
    def values(self) -> Blobs:
        self._require_held()
        return self._values

    def headers(self, index: int) -> list[tuple[str, bytes | None]]:
        """The headers of one record."""
        self._require_held()
        encoded = self._headers[index] if self._headers is not None else None
        return [] if encoded is None else decode_headers(encoded)

    @property
    def has_headers(self) -> bool:
        """Whether any record may have headers."""
        self._require_held()
        return self._headers is not None

    @property
    def header_sections(self) -> Blobs | None:
        """The headers of every record as stored in the log (count varint first), in the same memory
        as keys and values; None: no record has any.
        """
        self._require_held()
        return self._headers

    @property
    def next_offset(self) -> int:
        """The offset after the last record: what to commit when all of them were processed."""
        return int(self._require_held()[-1]) + 1

    def __len__(self) -> int:
        return len(self._require_held())

    def __bool__(self) -> bool:
        return self._offsets is not None and len(self._offsets) > 0

    def __getitem__(self, index: slice) -> RecordBatchView:
        """A slice of the records: the same bytes, with its own reference to them."""
        if not isinstance(index, slice):
            raise TypeError("a batch only takes slices; for one record use batch.values[i], or messages()")
        return RecordBatchView(
            self.topic,
            self.partition,
            self._require_held()[index],
            self._timestamps[index],
            self._keys[index],
            self._values[index],
            None if self._headers is None else self._headers[index],
            self.leader_epoch,
            self.timestamp_type,
        )

    def __repr__(self) -> str:
        if self._offsets is None:
            return f"<RecordBatchView {self.topic} [{self.partition}], released>"
        span = f"offsets {self._offsets[0]} to {self._offsets[-1]}" if len(self._offsets) else "no records"
        return f"<RecordBatchView {self.topic} [{self.partition}], {len(self._offsets)} records, {span}>"

    # -- one by one --------------------------------------------------------------------------------

    def records(self) -> Iterator[tuple[int, int, bytes | None, bytes | None]]:
        """(offset, timestamp, key, value) of each record, copied."""
        return zip(
            self._require_held().tolist(),
            self._timestamps.tolist(),
            self._keys.to_list(),
            self._values.to_list(),
            strict=True,
        )

    def messages(self, message_type: type[_M] = Message) -> Iterator[_M]:  # type: ignore[assignment]  # mypy 4236
        """A Message for each record. The call copies all of them, so they outlive the batch."""
        offsets = self._require_held().tolist()
        timestamp_type = self.timestamp_type
        stamps = zip(repeat(timestamp_type), self._timestamps.tolist())
        sections = repeat(None) if self._headers is None else map(_none_if_empty, self._headers.to_list())
        topic, partition, epoch = repeat(self.topic), repeat(self.partition), repeat(self.leader_epoch)
        return map(
            message_type,
            topic,
            partition,
            offsets,
            self._keys.to_list(),
            self._values.to_list(),
            sections,
            repeat(None),
            stamps,
            repeat(None),
            epoch,
        )


def _none_if_empty(section: bytes | None) -> bytes | None:
    return None if section == _NO_HEADERS else section


def timestamp_type_of(number: int) -> int:
    """confluent_kafka's number for the timestamp type of a record batch (0 create time, 1 log
    append time).
    """
    return TIMESTAMP_LOG_APPEND_TIME if number else TIMESTAMP_CREATE_TIME
