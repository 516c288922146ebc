"""Records into the C core, and into the accounts of who waits for them: whatever interrupts that, its caller learns how many were taken.

Concurrency: with the attachment's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mqd.client.messages import KafkaError, local_error
from mqd.client.staging import Chunk, Stage, native_columns
from mqd.native import E_INVALID, NativeError

if TYPE_CHECKING:
    from mqd.client.shm_producer import ShmProducer
    from mqd.native_client import Columns
    from mqd.native_client import Producer as NativeProducer

PART_MAX = 8192  # records at a time: others want the lock, too


class Refused(Exception):
    """The C core will never take the first of these records; `error` is what its report says."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(error.str())
        self.error = error


def append_counted(native: NativeProducer, topic: int, records: Columns, batch_of: Any) -> tuple[int, BaseException | None]:
    """As native.append, and what was raised behind it: Ctrl-C, for whose handler it is late: the C core has the records. The caller raises that when they are accounted for."""
    before = native.outstanding_records
    try:
        return native.append(topic, records, batch_of), None
    except NativeError:
        raise
    except BaseException as interrupted:
        interrupted.appended = native.outstanding_records - before  # type: ignore[attr-defined]
        return interrupted.appended, interrupted  # type: ignore[attr-defined]


def appended_before(problem: BaseException) -> int:
    """How many records the append() that ended with it has put into the C core."""
    return getattr(problem, "appended", 0)


class Appender:
    def __init__(self, producer: ShmProducer) -> None:
        self._producer = producer
        self._batch_of = np.empty(PART_MAX, np.uint64)

    def append(self, stage: Stage, chunk: Chunk, rows: Any, first_index: int = 0) -> int:
        """Records into the C core; how many it took, fewer when it is full. `rows`: see Delivery, their indices begin at first_index. Raises Refused when the first record is
        one that it will never take."""
        producer = self._producer
        if producer.compressor.enabled:
            return producer.compressor.append(stage, chunk, rows, first_index)
        count = chunk.values.count
        batch_of = self._batch_of[:count]
        producer.fates.before_append(rows)
        try:
            done, interrupted = append_counted(producer.native, stage.number, native_columns(chunk), batch_of)
        except NativeError as error:
            if error.code != E_INVALID:
                return 0  # the attachment has ended: the driver knows, or will
            partition = chunk.partition if chunk.partitions is None else int(chunk.partitions[0])
            wrong = KafkaError._UNKNOWN_PARTITION if partition >= stage.partition_count else KafkaError.MSG_SIZE_TOO_LARGE
            raise Refused(local_error(wrong)) from None
        if done:
            producer.transactions.wrote()
            producer.fates.appended(stage.number, batch_of[:done], rows, first_index)
        if interrupted is not None:
            raise interrupted
        return done

    def append_batch(self, stage: Stage, partition: int, batch: bytes) -> int:
        """A whole batch into the C core; its number, 0 = no room now."""
        try:
            return self._producer.native.append_batch(stage.number, partition, batch)
        except NativeError as error:
            if error.code == E_INVALID:
                raise
            return 0  # the attachment has ended: the driver knows, or will
