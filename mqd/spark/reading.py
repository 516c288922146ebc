"""An executor's task: the records of one offset range as Arrow batches.

    for batch in read_range(options, ("key", "value", ...), range_):
        ...                                      # a pyarrow.RecordBatch of at most ROWS_MAX rows

Records come from two sources. On the host of a broker that has the partition, records are read from
its mapped segments (local.py), elsewhere by Fetch (fetching.py). Both return views, which refer to
bytes that are not copied. A view is copied once, into Arrow's buffers, by native/client/columns.c.
The columns topic and partition are created here, once per task.

    R1  the batches hold the range's records, in order, each once. Left out are control records and,
        with read_committed, records of aborted transactions
    R2  a local read may continue over TCP at the same offset (the worker died, the leader moved, no
        records arrived), but never the other way round
    R3  a returned batch keeps its buffers; they are not reused while it exists
Concurrency: one thread. A Spark worker process keeps its attachment to the broker for later tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mqd.base.property_values import ConfigError
from mqd.client.shm.reading import BlockPool
from mqd.native import NativeError
from mqd.native.columns import ArrowRows
from mqd.spark import local
from mqd.spark.driver import report_loss
from mqd.spark.fetching import TcpBatchViews
from mqd.spark.options import SourceOptions
from mqd.spark.planning import Range
from mqd.spark.schema import arrow_schema
from mqd.spark.wire import Cluster, MqdReadError

log = logging.getLogger("mqd.spark")

ROWS_MAX = 65536
DATA_BYTES_MAX = 16 << 20  # size of each of a batch's two buffers: for keys and for values
# that size for a range of at most SMALL_ROWS: micro-batches do not need large buffers
SMALL_ROWS, SMALL_DATA_BYTES = 4096, 1 << 20
_RECORD_COLUMNS = ("key", "value", "offset", "timestamp", "timestampType", "headers")


class BatchBuilder:
    """Builds batches of the wanted columns."""

    def __init__(self, names: Sequence[str], topic: str, partition: int, rows_max: int) -> None:
        self._names, self._schema = names, arrow_schema(names)
        self._rows = ArrowRows(
            rows_max,
            DATA_BYTES_MAX if rows_max > SMALL_ROWS else SMALL_DATA_BYTES,
            [name for name in names if name in _RECORD_COLUMNS],
        )
        self._constant = {
            "topic": lambda: _repeat(topic.encode(), rows_max),
            "partition": lambda: pa.array(np.full(rows_max, partition, np.int32)),
        }
        self._columns: dict[str, Any] = {}

    def add(self, view: Any) -> Iterator[pa.RecordBatch]:
        """Yields full batches. Raises NativeError (E_CORRUPT) for damaged headers."""
        start = 0
        while start < len(view):
            start += self._rows.append(view, start)
            if start < len(view):
                yield self._batch()

    def remaining(self) -> Iterator[pa.RecordBatch]:
        if len(self._rows):
            yield self._batch()

    def _batch(self) -> pa.RecordBatch:
        count, columns = self._rows.finish()
        for name, make in self._constant.items():
            if name in self._names:
                if name not in self._columns:
                    self._columns[name] = make()
                columns[name] = self._columns[name].slice(0, count)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._names], schema=self._schema)


def _repeat(text: bytes, count: int) -> Any:
    """A string column of one value."""
    ends = np.arange(count + 1, dtype=np.int32) * len(text)
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(text * count))


def read_range(options: SourceOptions, names: Sequence[str], range_: Range) -> Iterator[pa.RecordBatch]:
    """See the module's docstring. Raises MqdReadError."""
    builder = BatchBuilder(names, range_.topic, range_.partition, min(ROWS_MAX, max(range_.size, 1)))
    cluster = Cluster(options.kafka)
    try:
        for view in _views(options, cluster, range_):
            last = len(view) - 1
            if view.offsets[last] >= range_.end:
                # the record batch extends beyond the range
                view = view[: int(np.searchsorted(view.offsets, range_.end))]
            try:
                yield from builder.add(_decrypt(options, view))
            except NativeError as error:
                raise MqdReadError(
                    f"{range_.topic}-{range_.partition}: {error.strerror}. To skip it, set startingOffsets to a"
                    " later offset"
                ) from error
        yield from builder.remaining()
    finally:
        cluster.close()


def _decrypt(options: SourceOptions, view: Any) -> Any:
    """Decrypts sealed values. Raises MqdReadError."""
    if options.kafka.encryption is None:
        return view
    from mqd.client.encryption.payload import shared_opener
    from mqd.client.encryption.views import open_view

    try:
        opened, problem = open_view(shared_opener(options.kafka.encryption), view)
    except ConfigError as error:
        raise MqdReadError(f"option {error}") from None
    if problem is not None:
        raise MqdReadError(
            f"{view.topic}-{view.partition}: the value at offset {view.offsets[len(opened)]} cannot be decrypted:"
            f" {problem}. encryption.on.failure=raw returns it encrypted"
        )
    return opened


def _views(options: SourceOptions, cluster: Cluster, range_: Range) -> Iterator[Any]:
    """Yields views from the range's start to its end, perhaps with some records beyond the end."""
    pool = BlockPool()

    def report_lost(_: int, text: str) -> None:
        report_loss(options, f"{range_.topic}-{range_.partition}: {text}")

    tcp_batch_views = TcpBatchViews(cluster, options, range_, report_lost, pool)
    try:
        local_batch_views = _open_local(options, cluster, range_, report_lost, pool)
        if local_batch_views is not None:
            yield from local_batch_views.views()
            tcp_batch_views.continue_at(local_batch_views.position)  # R2
            local_batch_views.close()
        yield from tcp_batch_views.views()
    finally:
        tcp_batch_views.close()


def _open_local(
    options: SourceOptions, cluster: Cluster, range_: Range, report_lost: Callable[[int, str], None], pool: BlockPool
) -> local.LocalBatchViews | None:
    """Returns None if the range must be read over TCP: the broker is on another host, the topic id
    is not known, or the option transport says so.
    """
    if options.kafka.transport == "tcp" or not range_.topic_id:
        return None
    try:
        return local.open_views(options, cluster, range_, report_lost, pool)
    except local.NotLocal as reason:
        if options.kafka.transport == "shm":
            raise MqdReadError(
                f"{range_.topic}-{range_.partition}: transport is shm, but {reason}. transport=auto reads partitions of"
                " other hosts over TCP"
            ) from None
        log.debug("%s-%d is read over TCP: %s", range_.topic, range_.partition, reason)
        return None
