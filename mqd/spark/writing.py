"""Writes a task's rows to topics: enlist, encode, send, wait for acknowledgements. sink.py
calls it in an executor, and at the end of a batch. It does not depend on Spark.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mqd.protocol.messages import InitProducerIdRequest
from mqd.spark.encoding import Encoder, MqdWriteError
from mqd.spark.joint import Child as Child
from mqd.spark.joint import JointTransaction
from mqd.spark.producing import Producer, connections
from mqd.spark.wire import MqdReadError, check

if TYPE_CHECKING:
    import pyarrow

    from mqd.spark.sink_options import SinkOptions

HEARTBEATS_PER_TIMEOUT = 4  # within transaction.timeout.ms

BatchRun = tuple[str, int, str]  # transactional id, batch, run


class Outcome(NamedTuple):
    """The result of one task attempt. `child`: None if it wrote in no transaction. `was_dropped`:
    whether its rows were dropped because the batch had been committed before.
    """

    child: Child | None
    row_count: int
    byte_count: int
    was_dropped: bool = False


def joint_transaction(options: SinkOptions, batch_run: BatchRun) -> JointTransaction:
    return JointTransaction(connections(options).cluster, *batch_run, options.transaction_timeout_ms)


def write(
    options: SinkOptions, batch_run: BatchRun, first: pyarrow.RecordBatch, others: Iterator[pyarrow.RecordBatch]
) -> Outcome:
    """Raises MqdWriteError, MqdReadError."""
    transaction = joint_transaction(options, batch_run) if options.is_exactly_once else None
    try:
        child = transaction.enlist() if transaction is not None else _allocate_identity(options)
    except (MqdWriteError, MqdReadError) as error:  # no row has been sent yet
        raise MqdWriteError(
            f"{'topics of the column topic' if options.topic is None else f'topic {options.topic}'}: {error}"
        ) from error
    if child is None:
        for _ in others:  # Spark blocks until all its rows are read
            pass
        return Outcome(None, 0, 0, was_dropped=True)
    producer = Producer(options, child, None if transaction is None else transaction.transactional_id)
    try:
        _write_all(options, transaction, child, producer, first, others)
    finally:
        producer.close()
    return Outcome(child if transaction is not None else None, producer.record_count, producer.byte_count)


def _write_all(
    options: SinkOptions,
    transaction: JointTransaction | None,
    child: Child,
    producer: Producer,
    first: pyarrow.RecordBatch,
    others: Iterator[pyarrow.RecordBatch],
) -> None:
    encoder = Encoder(options, producer.partition_count)
    heartbeat_interval_s = options.transaction_timeout_ms / 1000 / HEARTBEATS_PER_TIMEOUT
    last_heartbeat = time.monotonic()
    batch: Any = first
    while batch is not None:
        encoder.add(batch)
        producer.send(encoder.ready_batches())
        if transaction is not None and time.monotonic() - last_heartbeat > heartbeat_interval_s:
            transaction.heartbeat(child)
            last_heartbeat = time.monotonic()
        batch = next(others, None)
    producer.send(encoder.remaining_batches())
    producer.flush()


def _allocate_identity(options: SinkOptions) -> Child:
    """The identity of an idempotent producer."""
    cluster = connections(options).cluster

    def allocate() -> Child:
        response = cluster.any_connection().request(
            InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
        )
        check(response.error_code, "a producer id")
        return Child(response.producer_id, response.producer_epoch)

    return cluster.with_retries("a producer id", allocate)
