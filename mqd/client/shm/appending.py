"""Passes records to the C core and registers the callers that wait for their outcome. Even an
interrupted caller learns how many records were accepted.

Concurrency: with the attachment's lock held.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mqd.client.messages import KafkaError, local_error
from mqd.client.shm.compressing import Compressor
from mqd.client.shm.delivering import BatchPart
from mqd.client.shm.delivery_outcomes import DeliveryOutcomes
from mqd.client.shm.staging import Chunk, Refused, Stage, TakenCount, native_columns
from mqd.client.shm.transactional import Transactions
from mqd.native import E_INVALID, NativeError
from mqd.native.client import Producer as NativeProducer

RECORDS_PER_APPEND_MAX = 8192  # after so many records the lock is released, so that other threads can take it


class Driver(Protocol):
    """The part of ProducerDriver that an Appender needs."""

    native: NativeProducer
    outcomes: DeliveryOutcomes
    transactions: Transactions
    compressor: Compressor


class Appender:
    def __init__(self, producer: Driver) -> None:
        self._producer = producer
        self._batch_numbers = np.empty(RECORDS_PER_APPEND_MAX, np.uint64)  # the number of each record's batch

    def append(self, stage: Stage, chunk: Chunk, waiters: Any, taken: TakenCount, first_index: int = 0) -> None:
        """Passes as many records to the C core as it has room for, and counts them in `taken`. `waiters`:
        see Delivery; their indices begin at first_index. Raises Refused if the C core will never accept
        the first record.
        """
        producer = self._producer
        if producer.compressor.enabled:
            producer.compressor.append(stage, chunk, waiters, taken, first_index)
            return
        batch_numbers = self._batch_numbers[: chunk.values.count]
        parts: list[tuple[int, BatchPart]] = []
        producer.outcomes.before_append(waiters)
        outstanding_before = producer.native.outstanding_records
        try:
            taken.count = producer.native.append(stage.number, native_columns(chunk), batch_numbers)
            self._register(stage, batch_numbers[: taken.count], waiters, first_index, parts)
        except NativeError as error:
            if error.code == E_INVALID:
                partition = chunk.partition if chunk.partitions is None else int(chunk.partitions[0])
                code = (
                    KafkaError._UNKNOWN_PARTITION
                    if partition >= stage.partition_count
                    else KafkaError.MSG_SIZE_TOO_LARGE
                )
                raise Refused(
                    local_error(code, str(error) if code == KafkaError.MSG_SIZE_TOO_LARGE else None)
                ) from None
            # else the attachment has ended, which the driver detects
        except BaseException:  # Ctrl-C, perhaps after the C core has accepted the records
            taken.count = producer.native.outstanding_records - outstanding_before
            self._register(stage, batch_numbers[: taken.count], waiters, first_index, parts)
            raise

    def _register(
        self,
        stage: Stage,
        batch_numbers: np.ndarray,
        waiters: Any,
        first_index: int,
        parts: list[tuple[int, BatchPart]],
    ) -> None:
        """Registers accepted records. `parts` is empty on the first call; an interrupted call is repeated
        with the same list.
        """
        if len(batch_numbers):
            self._producer.transactions.note_write()
            if not parts:
                parts.extend(self._producer.outcomes.split_by_batch(batch_numbers, waiters, first_index))
            self._producer.outcomes.add_records(stage.number, parts)

    def append_batch(self, stage: Stage, partition: int, batch: bytes) -> int:
        """Passes an encoded batch to the C core. Returns the batch's number, 0 = no room now. Raises
        Refused if the batch is larger than the C core's memory.
        """
        try:
            return self._producer.native.append_batch(stage.number, partition, batch)
        except NativeError as error:
            if error.code == E_INVALID:
                raise Refused(local_error(KafkaError.MSG_SIZE_TOO_LARGE, str(error))) from None
            return 0  # the attachment has ended, which the driver detects
