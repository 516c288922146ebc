"""The consumer over TCP: confluent_kafka's (librdkafka), with consume_batch over it.

Nothing between the application and librdkafka where both have a method: poll, consume and the rest are the bound methods of its Consumer.
"""

from __future__ import annotations

import time
from typing import Any

import confluent_kafka

from mqd.client.config import Settings
from mqd.client.messages import KafkaError, KafkaException

CHUNK_MAX = 10_000
_METHODS = (
    "poll", "consume", "unsubscribe", "memberid", "consumer_group_metadata", "assign", "incremental_assign", "unassign", "incremental_unassign", "assignment", "seek", "pause",
    "resume", "position", "store_offsets", "committed", "list_topics", "get_watermark_offsets", "offsets_for_times", "cluster_id", "set_sasl_credentials",
)  # fmt: skip


class TcpConsumer:
    """What mqd.Consumer stands on when the broker is elsewhere. Raises KafkaException as confluent_kafka.Consumer does. `owner`: whom callbacks are given."""

    transport = "tcp"

    def __init__(self, owner: Any, settings: Settings, reason: str) -> None:
        self.reason = reason
        self._owner = owner
        more = {} if settings.logger is None else {"logger": settings.logger}
        self._consumer = consumer = confluent_kafka.Consumer(dict(settings.rdkafka), **more)
        self._subscription: list[str] = []
        self._held: list[Any] = []  # records of another partition than the batch they came with
        for name in _METHODS:
            setattr(self, name, getattr(consumer, name))

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        given = {"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost}
        callbacks = {name: self._with_owner(function) for name, function in given.items() if function is not None}
        self._consumer.subscribe(topics, **callbacks)
        self._subscription = list(topics)

    def _with_owner(self, function: Any) -> Any:
        if not callable(function):
            return function  # librdkafka's own words
        return lambda _consumer, partitions: function(self._owner, partitions)

    def subscription(self) -> list[str]:
        return list(self._subscription)

    def commit(self, message: Any = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        if message is not None:
            return self._consumer.commit(message=message, asynchronous=asynchronous)
        if offsets is not None:
            return self._consumer.commit(offsets=offsets, asynchronous=asynchronous)
        return self._consumer.commit(asynchronous=asynchronous)

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        """As mqd.Consumer.consume_batch, from messages: columns are copies."""
        from mqd.client.reading import batch_of_messages

        deadline = time.monotonic() + timeout if timeout is not None and timeout >= 0 else float("inf")
        while True:
            messages = self._held or self._some(max_records, deadline)
            if not messages:
                return None
            first = messages[0]
            if first.error() is not None:
                self._held = messages[1:]
                if first.error().code() == KafkaError._PARTITION_EOF:
                    continue
                raise KafkaException(first.error())
            place = first.topic(), first.partition()
            count = next((index for index, one in enumerate(messages) if index == max_records or one.error() is not None or (one.topic(), one.partition()) != place), len(messages))
            self._held = messages[count:]
            return batch_of_messages(messages[:count])

    def _some(self, max_records: int, deadline: float) -> list[Any]:
        """The first that comes is waited for, and what is there with it is taken along."""
        first = self._consumer.poll(deadline - time.monotonic() if deadline < float("inf") else -1)
        if first is None:
            return []
        more = self._consumer.consume(min(max_records, CHUNK_MAX) - 1, 0) if max_records > 1 else []
        return [first, *more]

    def close(self) -> None:
        self._held = []
        self._consumer.close()
