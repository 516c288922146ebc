"""Columns of records with sealed values, opened."""

from __future__ import annotations

import numpy as np

from mqd.client.encryption.envelope import PayloadError
from mqd.client.encryption.payload import Opener
from mqd.client.record_batch import Blobs, RecordBatchView
from mqd.native.reader import gather


def open_view(opener: Opener, view: RecordBatchView) -> tuple[RecordBatchView, PayloadError | None]:
    """The records up to the first that cannot be opened, and why that is; all in bytes of its own."""
    topic, keys, values = view.topic, view.keys, view.values
    found: list[bytes | None] = []
    problem = None
    for key, value in zip(keys.to_list(), values.to_list(), strict=True):
        try:
            found.append(None if value is None else opener.open(topic, key, value))
        except PayloadError as error:
            problem = error
            break
    if len(found) < len(view):
        view = view[: len(found)]
    sections = [view.keys] if view.header_sections is None else [view.keys, view.header_sections]
    parts = [gather(blobs.buffer, blobs.positions, blobs.sizes)[0].tobytes() for blobs in sections]
    opened = Blobs.of_list(found)
    base = b"".join([*parts, opened.buffer])
    starts = np.cumsum([0, *map(len, parts)])
    columns_of = [
        Blobs(base, start + _starts(blobs.sizes), blobs.sizes)
        for start, blobs in zip(starts, [*sections, opened], strict=True)
    ]
    headers = columns_of[1] if view.header_sections is not None else None
    return (
        RecordBatchView(
            topic,
            view.partition,
            view.offsets.copy(),
            view.timestamps.copy(),
            columns_of[0],
            columns_of[-1],
            headers,
            view.leader_epoch,
            view.timestamp_type,
        ),
        problem,
    )


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each blob begins when they lie one after another."""
    filled = np.maximum(sizes, 0)
    return np.cumsum(filled, dtype=np.int64) - filled
