"""A call of produce_batch under way: its progress, and the step that continues it when there is room."""

from __future__ import annotations

import time

from mqd.client.messages import KafkaError, KafkaException, local_error
from mqd.client.shm.appending import RECORDS_PER_APPEND_MAX
from mqd.client.shm.delivering import CallReport
from mqd.client.shm.producer_driver import ProducerDriver
from mqd.client.shm.staging import Chunk, Refused, Stage, TakenCount


class BatchCall:
    """A call of produce_batch under way. `accepted_count`: how many of its `count` records have been
    accepted so far. `error`: why the call cannot continue, or None.
    """

    def __init__(self, producer: ProducerDriver, stage: Stage, records: Chunk, report: CallReport | None) -> None:
        self._producer, self._stage, self._records, self._report = producer, stage, records, report
        self._began = time.monotonic()
        self.accepted_count = 0
        self.count = records.values.count
        self.error: KafkaError | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self.accepted_count == self.count

    def step(self) -> bool:
        """Continues until there is no more room; returns True when the call has finished. First hands
        over the records that produce() staged earlier. Called with the lock held.
        """
        producer, stage = self._producer, self._stage
        if self.finished or not self._may_continue():
            return self.finished
        producer.hand_over(stage)
        while (
            not stage.entries
            and self.accepted_count < self.count
            and producer.hold_reason is None
            and producer.transactions.may_write(stage)
        ):
            room = producer.messages_max - producer.outstanding()
            end = min(self.accepted_count + min(room, RECORDS_PER_APPEND_MAX), self.count)
            if end <= self.accepted_count:
                producer.close_open_batches()  # lingering batches occupy the room that this call needs
                break
            taken = TakenCount()
            try:
                producer.appender.append(
                    stage, self._records.part(self.accepted_count, end), self._report, taken, self.accepted_count
                )
            except Refused as refused:
                self.error = refused.error
                break
            except BaseException:
                self.accepted_count += taken.count
                raise
            self.accepted_count += taken.count
            if not taken.count:
                break
        producer.send_due()
        return self.finished

    def _may_continue(self) -> bool:
        producer, stage = self._producer, self._stage
        try:
            producer.require_usable()
            # the transaction may have failed since the last step: the remaining records can never be sent
            producer.transactions.require_may_produce()
        except (KafkaException, RuntimeError) as refused:
            self.error = refused.args[0] if isinstance(refused, KafkaException) else local_error(KafkaError._DESTROY)
            return False
        if (
            not producer.resolve(stage)
            and time.monotonic() - self._began > producer.config["topic.metadata.propagation.max.ms"] / 1000
        ):
            self.error = local_error(KafkaError._UNKNOWN_TOPIC)
        return self.error is None and stage.number >= 0
