"""The producer over TCP: confluent_kafka's Producer (librdkafka), with produce_batch() and a callable
as partitioner added.

Methods that need no change (poll, flush and others, and produce without a partitioner) are the
bound methods of librdkafka's Producer.
"""

from __future__ import annotations

import time
from typing import Any

import confluent_kafka

from mqd.client import columns
from mqd.client.config import ProducerConfig, Settings
from mqd.client.messages import BatchDelivery, KafkaError, KafkaException, failure

_ROOM_WAIT_S = 0.01
_PARTITION_COUNT_TTL_S = 5.0


class TcpProducer:
    """Used by mqd.Producer when the broker is on another host. Raises KafkaException as
    confluent_kafka.Producer does.
    """

    transport = "tcp"

    def __init__(self, settings: Settings, reason: str) -> None:
        self.reason = reason
        options = {} if settings.logger is None else {"logger": settings.logger}
        if settings.encryption is None:
            self._producer = producer = confluent_kafka.Producer(dict(settings.rdkafka), **options)
        else:
            from mqd.client.encryption.clients import EncryptingProducer

            self._producer = producer = EncryptingProducer(dict(settings.rdkafka), settings.encryption, **options)
        self._partitioner = settings.partitioner
        self._bytes_max: int = ProducerConfig(settings)["message.max.bytes"]
        self._partition_counts: dict[str, tuple[int, float]] = {}
        self.produce = producer.produce if self._partitioner is None else self._produce_partitioned
        for name in (
            "poll",
            "flush",
            "purge",
            "list_topics",
            "set_sasl_credentials",
            "init_transactions",
            "begin_transaction",
            "commit_transaction",
            "abort_transaction",
            "send_offsets_to_transaction",
        ):
            setattr(self, name, getattr(producer, name))

    def __len__(self) -> int:
        return len(self._producer)

    def close(self) -> bool:
        """Closes the producer; before confluent_kafka 2.13, whose Producer has no close(), flushes
        outstanding records.
        """
        close = getattr(self._producer, "close", None)
        if close is not None:
            return bool(close())
        self._producer.flush()
        return True

    def abandon(self) -> None:
        """Called when the mqd.Producer was garbage-collected. librdkafka's destructor ends the
        producer.
        """

    # -- a callable as partitioner -----------------------------------------------------------------

    def _produce_partitioned(self, topic, value=None, key=None, partition=-1, *arguments: Any, **keywords: Any) -> None:
        if partition is None or partition < 0:
            partition = self._choose_partition(topic, key.encode() if isinstance(key, str) else key)
        self._producer.produce(topic, value, key, partition, *arguments, **keywords)

    def _choose_partition(self, topic: str, key: bytes | None) -> int:
        count, valid_until = self._partition_counts.get(topic, (0, 0.0))
        if time.monotonic() >= valid_until:
            metadata = self._producer.list_topics(topic, 10).topics[topic]
            if metadata.error is not None:
                raise KafkaException(metadata.error)
            count = len(metadata.partitions)
            self._partition_counts[topic] = (count, time.monotonic() + _PARTITION_COUNT_TTL_S)
        assert self._partitioner is not None  # otherwise librdkafka chooses the partition
        return columns.checked_partition(self._partitioner(key, count), count)

    # -- batches -----------------------------------------------------------------------------------

    def produce_batch(
        self,
        topic: str,
        values: Any,
        keys: Any = None,
        *,
        headers: Any = None,
        partition: Any = -1,
        timestamps: Any = None,
        on_delivery: Any = None,
        timeout: float = -1,
    ) -> int:
        """Like mqd.Producer.produce_batch. Waits for room by serving delivery reports, as poll() does."""
        if on_delivery is not None and not callable(on_delivery):
            raise TypeError("expected on_delivery to be callable")
        batch = columns.to_records(values, keys, headers, partition, timestamps)
        if any(len(value or b"") + len(key or b"") > self._bytes_max for value, key, *_ in batch):
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Unable to produce message: Broker: Message size too large")
        deadline = time.monotonic() + timeout if timeout >= 0 else float("inf")
        report = _Report(topic, on_delivery) if on_delivery is not None else None
        index = 0
        try:
            for index, record in enumerate(batch):
                if not self._produce_one(
                    topic, record, None if report is None else report.callback_for(index), deadline
                ):
                    return index
        # also on Ctrl-C and exceptions of a callback: the caller must not pass accepted records again
        except BaseException as problem:
            problem.accepted = index  # type: ignore[attr-defined]  # read by the caller
            raise
        return len(batch)

    def _produce_one(self, topic: str, record: tuple[Any, ...], on_delivery: Any, deadline: float) -> bool:
        """Produces a record. Returns False if there was no room before `deadline`."""
        value, key, partition, timestamp, headers = record
        optional: dict[str, Any] = {}
        if headers is not None:
            optional["headers"] = headers
        if timestamp:
            optional["timestamp"] = timestamp
        if on_delivery is not None:
            optional["on_delivery"] = on_delivery
        while True:
            try:
                self.produce(topic, value, key, partition, **optional)
                return True
            except BufferError:
                if time.monotonic() >= deadline:
                    return False
                self._producer.poll(min(_ROOM_WAIT_S, max(deadline - time.monotonic(), 0)))


class _Report:
    """Turns librdkafka's delivery report of each record into a BatchDelivery of one record."""

    def __init__(self, topic: str, on_delivery: Any) -> None:
        self.topic, self.on_delivery, self.began = topic, on_delivery, time.monotonic()

    def callback_for(self, index: int) -> Any:
        def report(error: KafkaError | None, message: Any) -> None:
            offset = message.offset()
            has_offset = error is None and offset is not None and offset >= 0
            self.on_delivery(
                error,
                BatchDelivery(
                    self.topic,
                    message.partition(),
                    offset if has_offset else None,
                    (index,),
                    time.monotonic() - self.began,
                ),
            )

        return report
