"""The sink of `format("mqd")`: the objects that Spark calls to write, on the driver and in
executors.

    batch_writer(options, schema, overwrite)     df.write                 MqdBatchWriter
    stream_writer(options, schema, overwrite)    df.writeStream           MqdStreamWriter

Exactly once: every task attempt that has a row enlists a child in the batch's joint transaction and
writes as that child; its commit message names the child. commit() ends the transaction with the
children that Spark has chosen as winners; all others are aborted. A batch whose number was
committed before gets no children: its rows are dropped, and its commit does nothing.

At least once: each task attempt has an idempotent producer; rows are readable as soon as they are
written.

1. Objects of this module are pickled to other processes: they hold options and plain values.
2. write() leaves behind only connections without outstanding responses (producing.py), and no
   thread.
3. A commit message names its batch: commit() is called in another process, on a new object,
   without a task's context.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from mqd.coordinator.transaction.joint import JOINT_PREFIX
from mqd.spark.options import MqdOptionError
from mqd.spark.sink_options import SinkOptions, sink_options

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("mqd.spark")

_PREFIX = JOINT_PREFIX + "spark."


class BatchRun(NamedTuple):
    """Identifies the transaction that a task writes in."""

    transactional_id: str
    batch_id: int
    run_id: str


class TaskResult(WriterCommitMessage):
    """The result of one task attempt. `child`: None if it wrote nothing in a transaction.
    `was_dropped`: whether its rows were dropped because the batch had been committed before.
    """

    def __init__(
        self,
        batch_run: BatchRun | None,
        child: tuple[int, int] | None,
        row_count: int,
        byte_count: int,
        was_dropped: bool = False,
    ) -> None:
        self.batch_run, self.child = batch_run, child
        self.row_count, self.byte_count, self.was_dropped = row_count, byte_count, was_dropped


def batch_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> MqdBatchWriter:
    """Raises MqdOptionError."""
    if overwrite:
        raise MqdOptionError(
            'mode overwrite: a topic cannot be overwritten, records are only added: use .mode("append"). To remove'
            " the existing records, delete the topic (mqd topic delete)"
        )
    return MqdBatchWriter(sink_options(options, schema, streaming=False))


def stream_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> MqdStreamWriter:
    """Output mode complete (`overwrite`) writes all rows of every batch as new records, as Kafka's
    sink does. Raises MqdOptionError.
    """
    return MqdStreamWriter(sink_options(options, schema, streaming=True))


def _write(options: SinkOptions, batch_run: BatchRun, batches: Iterator[pyarrow.RecordBatch]) -> TaskResult:
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return TaskResult(batch_run, None, 0, 0)
    from mqd.spark import writing

    outcome = writing.write(options, batch_run, first, batches)
    return TaskResult(
        batch_run,
        None if outcome.child is None else (outcome.child[0], outcome.child[1]),
        outcome.row_count,
        outcome.byte_count,
        outcome.was_dropped,
    )


def _end_batch(
    options: SinkOptions, messages: Sequence[WriterCommitMessage | None], commit: bool, batch_run: BatchRun | None
) -> None:
    """Ends a batch, according to the messages of its tasks. `batch_run`: None if only the messages
    identify it.
    """
    from mqd.spark import writing

    results = [message for message in messages if isinstance(message, TaskResult)]
    batch_runs = {result.batch_run for result in results if result.batch_run is not None} or (
        {batch_run} if batch_run is not None else set()
    )
    if not batch_runs or not options.is_exactly_once:
        return
    if len(batch_runs) > 1:
        raise RuntimeError(f"tasks of one batch name {len(batch_runs)} transactions: {sorted(batch_runs)}")
    joint = writing.joint_transaction(options, batch_runs.pop())
    if commit:
        if any(result.was_dropped for result in results):
            log.warning(
                "batch %d of %s was committed before: its repetition is dropped", joint.batch_id, joint.transactional_id
            )
        joint.commit([writing.Child(*result.child) for result in results if result.child is not None])
    else:
        joint.abort()


class MqdBatchWriter(DataSourceArrowWriter):
    """One job, one transaction."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        run_id = uuid.uuid4().hex
        if options.app_id is None:
            self.batch_run = BatchRun(f"{_PREFIX}job.{run_id}", 0, run_id)
        else:
            self.batch_run = BatchRun(f"{_PREFIX}app.{options.app_id}", options.app_version, run_id)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        return _write(self.options, self.batch_run, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _end_batch(self.options, messages, True, self.batch_run)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with _log_failed_abort():
            _end_batch(self.options, messages, False, self.batch_run)


class MqdStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches, each a transaction of the query. Spark creates one object for every
    batch, and another one to commit it.
    """

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self.fallback_run_id = uuid.uuid4().hex

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "write() runs in a task"
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or batch is None:
            raise RuntimeError(
                "Spark has not set the query's id and batch (sql.streaming.queryId, streaming.sql.batchId): this is"
                " not a streaming query"
            )
        # Spark sets the id of the query's run as the group of its jobs
        run = context.getLocalProperty("spark.jobGroup.id") or self.fallback_run_id
        return _write(self.options, BatchRun(f"{_PREFIX}query.{query}", int(batch), run[:100]), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  (Spark's name)
        _end_batch(self.options, messages, True, None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        # only the tasks' messages name the query and its run
        if self.options.is_exactly_once and not any(isinstance(message, TaskResult) for message in messages):
            log.warning(
                "batch %d failed before any of its tasks was done, so its transaction is not aborted here. If"
                " any of its rows were written, read_committed consumers wait for the transaction to end: when the"
                " query is restarted, or after %d ms (kafka.transaction.timeout.ms). `mqd txn abort` ends it"
                " immediately",
                batchId,
                self.options.transaction_timeout_ms,
            )
            return
        with _log_failed_abort():
            _end_batch(self.options, messages, False, None)


@contextlib.contextmanager
def _log_failed_abort() -> Iterator[None]:
    """Logs an exception raised in this context instead of propagating it. A failed abort is
    harmless: the transaction ends when it times out, or when the batch is repeated. Spark shows the
    error that caused the abort.
    """
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        log.warning(
            "the batch's transaction could not be aborted in %.1f s, and will end when it times out: %s",
            time.monotonic() - began,
            error,
        )
