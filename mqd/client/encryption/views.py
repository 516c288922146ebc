"""Opens the sealed values of records that are read as columns."""

from __future__ import annotations

import numpy as np

from mqd.client.encryption.envelope import PayloadError
from mqd.client.encryption.payload import Opener
from mqd.client.record_batch import Blobs, RecordBatchView
from mqd.native.reader import gather


def open_view(opener: Opener, view: RecordBatchView) -> tuple[RecordBatchView, PayloadError | None]:
    """Opens the records up to the first that cannot be opened. Returns them, in new memory, and the
    error or None.
    """
    opened: list[bytes | None] = []
    problem = None
    for key, value in zip(view.keys.to_list(), view.values.to_list(), strict=True):
        try:
            opened.append(None if value is None else opener.open(view.topic, key, value))
        except PayloadError as error:
            problem = error
            break
    if len(opened) < len(view):
        view = view[: len(opened)]
    headers = [] if view.header_sections is None else [view.header_sections]
    keys, values, *headers = _in_one_buffer([view.keys, Blobs.of_list(opened), *headers])
    records = view.offsets.copy(), view.timestamps.copy(), keys, values, headers[0] if headers else None
    return RecordBatchView(view.topic, view.partition, *records, view.leader_epoch, view.timestamp_type), problem


def _in_one_buffer(columns: list[Blobs]) -> list[Blobs]:
    """The same columns, copied into one buffer: native code that reads a view supports only one buffer."""
    base = b"".join([gather(blobs.buffer, blobs.positions, blobs.sizes)[0].tobytes() for blobs in columns])
    sizes = np.maximum(np.concatenate([blobs.sizes for blobs in columns]), 0)
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    ends = np.cumsum([len(blobs) for blobs in columns])
    return [Blobs(base, starts[end - len(blobs) : end], blobs.sizes) for end, blobs in zip(ends, columns, strict=True)]
