"""The local client's C core for Python: attachments and producers of native/client/client.h, one
thin method per function.

1. A failing call raises NativeError; `errno` EPIPE = the worker at the other end has ended (attach
   again, then `Producer.move`). If a queue or the memory is full, the call does not fail: it
   returns False, 0, or a smaller number than requested.
2. A call only reads the buffers passed to it, and keeps none of them.
3. Producer.move closes the Client that the producer leaves; closing that Client again does
   nothing.

Concurrency: one thread at a time for a Client and the Producer on it; only Client.wait and
Client.wake may run concurrently. Calls release the GIL.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any

import msgspec

from mqd.native.core import E_FULL, E_INVALID, NativeError, bytes_of, check, failure, ffi, lib

# Client.submit takes correlation ids below this; the producer uses this and higher ones.
CORRELATION_ID_END = 1 << 30
INT64_MAX = (1 << 63) - 1  # Producer.next_send_us: no batch is open


class Partitioner(IntEnum):
    """enum mqd_partitioner."""

    RANDOM = lib.MQD_PARTITIONER_RANDOM
    CONSISTENT = lib.MQD_PARTITIONER_CONSISTENT
    CONSISTENT_RANDOM = lib.MQD_PARTITIONER_CONSISTENT_RANDOM
    MURMUR2 = lib.MQD_PARTITIONER_MURMUR2
    MURMUR2_RANDOM = lib.MQD_PARTITIONER_MURMUR2_RANDOM
    FNV1A = lib.MQD_PARTITIONER_FNV1A
    FNV1A_RANDOM = lib.MQD_PARTITIONER_FNV1A_RANDOM


def partition_for(partitioner: int, key: bytes | None, partition_count: int, random_state: Any = None) -> int:
    """The partition of a key, as librdkafka's partitioner of that name computes it.
    `random_state`: ffi.new("uint64_t *"), for random partitioners.
    """
    if random_state is None:
        random_state = ffi.new("uint64_t *", int.from_bytes(os.urandom(8), "little"))
    return lib.mqd_partition_for(
        partitioner,
        key if key is not None else ffi.NULL,
        -1 if key is None else len(key),
        partition_count,
        random_state,
    )


class Client:
    """An attachment to a broker on this host. `data_bytes`: the size of the memory for requests and
    batches. `request_bytes`: the part of it for `submit` (for a consumer: all of it). `server`: the
    server name that the broker must have (mqd/shm/rendezvous.py), "" = any broker.

    Raises NativeError: ENOENT or ECONNREFUSED (no broker), EACCES, ETIMEDOUT, E_LAYOUT (another
    build), or the broker's refusal.
    """

    __slots__ = ("_bytes", "_pointer", "worker")

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        client_id: str = "mqd",
        *,
        data_bytes: int = 0,
        reply_bytes: int = 0,
        submission_count: int = 0,
        request_bytes: int = 0,
        timeout_ms: int = 0,
        spin_us: int = 0,
        server: str = "",
    ) -> None:
        self._pointer = ffi.NULL
        c_path = ffi.new("char[]", os.fsencode(socket_path))
        c_client_id, c_server = ffi.new("char[]", client_id.encode()[:63]), ffi.new("char[]", server.encode())
        options = ffi.new("struct mqd_client_options *")
        options.socket_path, options.client_id, options.server = c_path, c_client_id, c_server
        options.data_bytes, options.reply_bytes, options.submission_count, options.request_bytes = (
            data_bytes,
            reply_bytes,
            submission_count,
            request_bytes,
        )
        options.timeout_ms, options.spin_us = timeout_ms, spin_us
        self._pointer = lib.mqd_client_open(options)
        if self._pointer == ffi.NULL:
            raise failure(socket_path)
        self._bytes = ffi.new("uint8_t **")
        self.worker: int = lib.mqd_client_worker(self._pointer)

    @property
    def pointer(self) -> Any:
        """struct mqd_client *, for readers on this attachment."""
        if self._pointer == ffi.NULL:
            raise NativeError(E_INVALID, "this attachment was closed")
        return self._pointer

    @property
    def control(self) -> Any:
        """The control segment, read-only: void *."""
        return lib.mqd_client_control(self.pointer)

    @property
    def free_bytes(self) -> int:
        return lib.mqd_client_available_bytes(self.pointer)

    def submit(self, frame: bytes) -> bool:
        """Submits a whole request. `frame` begins with the api key; its correlation id must be
        below CORRELATION_ID_END. The broker sees the request after flush(). False: no room now
        (wait, then retry).
        """
        if lib.mqd_client_submit(self.pointer, frame, len(frame)) == 0:
            return True
        error = failure()
        if error.code != E_FULL:
            raise error
        return False

    def flush(self) -> None:
        lib.mqd_client_flush(self.pointer)

    def poll(self) -> None:
        """Processes received replies."""
        if lib.mqd_client_poll(self.pointer) < 0:
            raise failure()

    def next_response(self) -> bytes | None:
        """The next response to a submitted request, beginning with the correlation id; None = none
        has arrived.
        """
        size = lib.mqd_client_response(self.pointer, self._bytes)
        return ffi.buffer(self._bytes[0], size)[:] if size else None

    def wait(self, timeout_us: int = -1) -> int:
        """Returns 1 when a reply has arrived (call poll), or 0 after the timeout. May be called on any
        thread.
        """
        return check(lib.mqd_client_wait(self.pointer, timeout_us))

    def wake(self) -> None:
        """Ends a wait. May be called on any thread, but not after close."""
        if self._pointer != ffi.NULL:
            lib.mqd_client_wake(self._pointer)

    def close(self) -> None:
        if self._pointer != ffi.NULL:
            pointer, self._pointer = self._pointer, ffi.NULL
            lib.mqd_client_close(pointer)


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """struct mqd_delivery: the outcome of a batch. `batch` and `topic` are the numbers that
    Producer.put() and register_topic() returned. `error`: Kafka's code; 0: the batch was written (if
    base_offset is -1, at an unknown offset). `timestamp_ms`: the log append time, or -1.
    """

    batch: int
    topic: int
    partition: int
    base_offset: int
    timestamp_ms: int
    record_count: int
    error: int


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """struct mqd_producer_options."""

    acks: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    request_timeout_ms: int = 30000
    transactional_id: str | None = None
    batch_bytes: int = 1000000
    batch_records_max: int = 10000
    inflight_max: int = 1000000
    linger_us: int = 5000
    buffer_bytes_max: int = 0
    produce_version: int = 11


class Columns(msgspec.Struct, kw_only=True, gc=False):
    """struct mqd_record_columns. Each column is a buffer (bytes or a numpy array), or None.
    `values`, `keys` and `headers` each hold the blobs of all records back to back; sizes are int32
    (-1 = null), times int64. If the sizes of keys or headers are None, no record has any. If
    `value_bytes`, `partitions` or `timestamps_ms` is None, `fixed_value_bytes`, `partition` or
    `timestamp_ms` applies to all records.
    """

    count: int
    values: Any = None
    value_bytes: Any = None
    fixed_value_bytes: int = -1
    keys: Any = None
    key_bytes: Any = None
    headers: Any = None
    header_bytes: Any = None
    partitions: Any = None
    partition: int = -1
    timestamps_ms: Any = None
    timestamp_ms: int = 0

    def _int32_column(self, name: str) -> tuple[Any, int]:
        """The column `name` as int32, and the sum of its values (negative ones are treated as 0).
        Raises NativeError (E_INVALID) if it has fewer than `count` elements.
        """
        import numpy

        column = numpy.ascontiguousarray(getattr(self, name), dtype=numpy.int32)
        if len(column) < self.count:
            raise NativeError(E_INVALID, f"{name} has {len(column)} elements, but there are {self.count} records")
        column = column[: self.count]
        return column, int(numpy.maximum(column, 0, dtype=numpy.int64).sum()) if self.count else 0

    def _set_blobs(self, native: Any, held: list[Any], blobs: str, sizes: str) -> None:
        column, total = self._int32_column(sizes)
        held.append(column)
        setattr(native, sizes, ffi.from_buffer("int32_t[]", column))
        self._set_bytes(native, held, blobs, total)

    def _set_bytes(self, native: Any, held: list[Any], name: str, total: int) -> None:
        memory = bytes_of(getattr(self, name) if getattr(self, name) is not None else b"", writable=False)
        if len(memory) < total:
            raise NativeError(E_INVALID, f"{name} has {len(memory)} bytes, its sizes add up to {total}")
        held.append(memory)
        setattr(native, name, memory)

    def to_c_struct(self) -> tuple[Any, list[Any]]:
        """Returns the C struct, and the objects that must live as long as it does."""
        native = ffi.new("struct mqd_record_columns *")
        held: list[Any] = []
        native.count, native.fixed_value_bytes = self.count, self.fixed_value_bytes
        native.partition, native.timestamp_ms = self.partition, self.timestamp_ms
        if self.value_bytes is not None:
            self._set_blobs(native, held, "values", "value_bytes")
        else:
            self._set_bytes(native, held, "values", self.count * max(self.fixed_value_bytes, 0))
        if self.key_bytes is not None:
            self._set_blobs(native, held, "keys", "key_bytes")
        if self.header_bytes is not None:
            self._set_blobs(native, held, "headers", "header_bytes")
        if self.partitions is not None:
            column = self._int32_column("partitions")[0]
            held.append(column)
            native.partitions = ffi.from_buffer("int32_t[]", column)
        if self.timestamps_ms is not None:
            import numpy

            times = numpy.ascontiguousarray(self.timestamps_ms, dtype=numpy.int64)
            if len(times) < self.count:
                raise NativeError(
                    E_INVALID, f"timestamps_ms has {len(times)} elements, but there are {self.count} records"
                )
            held.append(times)
            native.timestamps_ms = ffi.from_buffer("int64_t[]", times)
        return native, held


class Producer:
    """A producer on an attachment. native/client/client.h describes the lifecycle of a batch, with
    retries and drops.
    """

    __slots__ = ("_client", "_deliveries", "_number", "_pointer", "_put", "_unreturned_count")

    DELIVERIES_MAX = 512  # outcomes that one call returns

    def __init__(self, client: Client, options: ProducerOptions) -> None:
        self._pointer = ffi.NULL
        native = ffi.new("struct mqd_producer_options *")
        for name in options.__struct_fields__:
            if name != "transactional_id":
                setattr(native, name, getattr(options, name))
        transactional_id = (
            ffi.new("char[]", options.transactional_id.encode()) if options.transactional_id is not None else ffi.NULL
        )
        native.transactional_id = transactional_id
        self._pointer = lib.mqd_producer_open(client.pointer, native)
        if self._pointer == ffi.NULL:
            raise failure()
        self._client = client
        self._deliveries = ffi.new("struct mqd_delivery[]", self.DELIVERIES_MAX)
        self._unreturned_count = 0  # outcomes in _deliveries that are not returned yet
        self._number = ffi.new("uint64_t *")
        self._put = lib.mqd_producer_put

    @property
    def client(self) -> Client:
        return self._client

    @property
    def pointer(self) -> Any:
        """struct mqd_producer *: for callers that use lib directly on a hot path."""
        if self._pointer == ffi.NULL:
            raise NativeError(E_INVALID, "this producer was closed")
        return self._pointer

    def register_topic(self, name: str, partition_count: int, partitioner: int) -> int:
        """Registers a topic and returns its number; a repeated call can only increase its partition
        count.
        """
        return check(lib.mqd_producer_topic(self.pointer, name.encode(), partition_count, partitioner))

    def put(
        self,
        topic: int,
        partition: int,
        value: bytes | None,
        key: bytes | None,
        headers: bytes | None,
        timestamp_ms: int,
    ) -> int:
        """Appends one record; partition -1 = chosen by the partitioner. Returns the number of its
        batch, 0 = full. `headers` are encoded as in a record.
        """
        number = self._put(
            self._pointer,
            topic,
            partition,
            value if value is not None else ffi.NULL,
            len(value) if value is not None else -1,
            key if key is not None else ffi.NULL,
            len(key) if key is not None else -1,
            headers or ffi.NULL,
            len(headers) if headers else 0,
            timestamp_ms,
        )
        if number < 0:
            raise failure()
        return number

    def append(self, topic: int, columns: Columns, batch_numbers: Any = None) -> int:
        """Appends records in order, and returns how many. `batch_numbers`: a writable buffer of
        `count` uint64, which receives the batch number of each record. Raises NativeError
        (E_INVALID) when the first record can never be appended.
        """
        native, held = columns.to_c_struct()
        out = ffi.NULL
        if batch_numbers is not None:
            out = ffi.from_buffer("uint64_t[]", batch_numbers, require_writable=True)
            if len(out) < columns.count:
                raise NativeError(
                    E_INVALID, f"batch_numbers has {len(out)} elements, but there are {columns.count} records"
                )
        appended = lib.mqd_producer_append(self.pointer, topic, native, out)
        held.clear()
        return check(appended)

    def append_batch(self, topic: int, partition: int, batch: Any) -> int:
        """Appends a whole encoded batch, such as a compressed one. Returns its number, 0 = full.
        If Ctrl-C interrupts the call after the batch was appended (outstanding_records shows that),
        `batch_number` has the batch's number.
        """
        memory = bytes_of(batch, writable=False)
        if lib.mqd_producer_append_batch(self.pointer, topic, partition, memory, len(memory), self._number) == 0:
            return self._number[0]
        error = failure()
        if error.code != E_FULL:
            raise error
        return 0

    @property
    def batch_number(self) -> int:
        """The number of the last batch that append_batch appended."""
        return self._number[0]

    def send(self, now_us: int, everything: bool = False) -> None:
        """Sends the batches whose linger time has passed, or all batches if `everything`. `now_us`:
        time.monotonic_ns() // 1000.
        """
        if lib.mqd_producer_send(self.pointer, now_us, everything) < 0:
            raise failure()

    def next_send_us(self) -> int:
        """When send() must be called next, as its `now_us`; INT64_MAX: no batch is open."""
        return lib.mqd_producer_next_send_us(self.pointer)

    def deliveries(self) -> list[Delivery]:
        """Up to DELIVERIES_MAX outcomes, oldest first. If Ctrl-C interrupts a call, the next one
        returns the outcomes of that call.
        """
        out = self._deliveries
        if not self._unreturned_count:
            self._unreturned_count = lib.mqd_producer_deliveries(self.pointer, out, self.DELIVERIES_MAX)
        deliveries = [
            Delivery(d.batch, d.topic, d.partition, d.base_offset, d.timestamp_ms, d.record_count, d.error)
            for d in out[0 : self._unreturned_count]
        ]
        self._unreturned_count = 0
        return deliveries

    def retry(self, batch: int) -> None:
        check(lib.mqd_producer_retry(self.pointer, batch))

    def drop(self, batch: int) -> None:
        check(lib.mqd_producer_drop(self.pointer, batch))

    def move(self, to: Client) -> None:
        """Moves all batches to another attachment; the old Client is closed. When this raises,
        nothing was moved.
        """
        check(lib.mqd_producer_move(self.pointer, to.pointer))
        self._client._pointer, self._client = ffi.NULL, to

    def set_identity(self, producer_id: int, producer_epoch: int) -> None:
        check(lib.mqd_producer_set_identity(self.pointer, producer_id, producer_epoch))

    @property
    def outstanding_records(self) -> int:
        return lib.mqd_producer_outstanding_records(self.pointer)

    @property
    def outstanding_bytes(self) -> int:
        return lib.mqd_producer_outstanding_bytes(self.pointer)

    def close(self) -> None:
        """Must be called before its Client is closed."""
        if self._pointer != ffi.NULL:
            pointer, self._pointer = self._pointer, ffi.NULL
            lib.mqd_producer_close(pointer)


def records_encode(columns: Columns, out: Any, records_max: int = 0) -> tuple[int, int]:
    """Encodes as many of the first records as fit into `out` (a writable buffer) as one
    uncompressed batch. Returns (bytes, records); (0, 0) if not even one record fits.
    """
    native, held = columns.to_c_struct()
    memory, encoded_count = bytes_of(out), ffi.new("uint32_t *")
    size = check(lib.mqd_records_encode(native, records_max, memory, len(memory), encoded_count))
    held.clear()
    return size, encoded_count[0]


def partitions_for(
    partitioner: int, columns: Columns, partition_count: int, unkeyed_partition: int, partitions: Any
) -> None:
    """Fills in the negative entries of `partitions` (int32, one for each record): with the
    partition of the record's key in `columns`, or with `unkeyed_partition` if it has no key. Only
    for partitioners that depend on the key alone: MURMUR2_RANDOM, FNV1A_RANDOM.
    """
    native, held = columns.to_c_struct()
    if len(partitions) != columns.count:
        raise NativeError(E_INVALID, f"{len(partitions)} partitions for {columns.count} records")
    check(
        lib.mqd_partitions_for(
            partitioner,
            native.keys,
            native.key_bytes,
            columns.count,
            partition_count,
            unkeyed_partition,
            ffi.from_buffer("int32_t[]", partitions, require_writable=True),
        )
    )
    held.clear()
