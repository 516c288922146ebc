"""The consumer over TCP: confluent_kafka's Consumer (librdkafka), with consume_batch() added.

Methods that need no change (assignment, committed and others: _METHODS) are the bound methods of
librdkafka's Consumer.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import confluent_kafka

from mqd.client.config import Settings
from mqd.client.messages import KafkaError, KafkaException, failure

CHUNK_MAX = 10_000
SLICE_S = 0.1  # an interruptible wait checks for an interrupt this often
# while records arrive, the offsets of returned records are stored this often, and also before each wait
STORE_RECORDS, STORE_S = 100, 0.5
_METHODS = (
    "memberid",
    "consumer_group_metadata",
    "incremental_assign",
    "assignment",
    "resume",
    "committed",
    "list_topics",
    "get_watermark_offsets",
    "offsets_for_times",
    "cluster_id",
    "set_sasl_credentials",
)
_TRUE = {"true", "t", "1"}


class TcpConsumer:
    """Used by mqd.Consumer when the broker is on another host. Raises KafkaException as
    confluent_kafka.Consumer does. `owner`: the consumer that is passed to callbacks.

    With enable.auto.offset.store (the default) this class stores offsets instead of librdkafka,
    which would treat records that are still buffered here as returned.
    """

    transport = "tcp"

    def __init__(self, owner: Any, settings: Settings, reason: str) -> None:
        self.reason = reason
        self._owner = owner
        options = {} if settings.logger is None else {"logger": settings.logger}
        config = dict(settings.rdkafka)
        self._auto_store = str(config.get("enable.auto.offset.store", True)).lower() in _TRUE
        config["enable.auto.offset.store"] = False
        if settings.encryption is None:
            self._consumer = consumer = confluent_kafka.Consumer(config, **options)
        else:
            from mqd.client.encryption.clients import DecryptingConsumer

            self._consumer = consumer = DecryptingConsumer(config, settings.encryption, **options)
        self._poll_one = consumer.poll
        self._subscription: list[str] = []
        self._buffered: list[Any] = []  # received from librdkafka, but not returned yet
        # the offsets at which paused partitions with buffered records continue: librdkafka has no
        # position until it returns the next record
        self._resume_offsets: dict[tuple[str, int], int] = {}
        # the result of the latest take() or gather(), which the next call treats as returned to the
        # application, unless that call is give_back()
        self._taken: list[Any] = []
        self._unstored: dict[tuple[str, int], Any] = {}  # the last returned message of each partition
        self._unstored_count = 0
        self._stored_at = 0.0
        self._interrupted = False
        for name in _METHODS:
            setattr(self, name, getattr(consumer, name))

    # -- records -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Any:
        if self._buffered:
            message = self._buffered.pop(0)
        else:
            message = self._next(-1 if timeout is None else timeout)
        if message is not None:
            if message.error() is not None:
                self._store()
            elif self._auto_store:
                self._note_returned(message)
        return message

    def _next(self, timeout: float) -> Any:
        """Returns librdkafka's next record or event. Stores offsets before a wait, which may be long."""
        if self._unstored:
            message = self._poll_one(0)
            if message is not None:
                return message
            self._store()
        return self._poll_one(timeout)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Any]:
        if not self._buffered:
            self._buffered = self._consumer.consume(num_messages, 0)
            missing = num_messages - len(self._buffered)
            if missing > 0:
                self._store()  # before a wait, which may be long
                more = self._consumer.consume(missing, timeout)  # which may raise, or drop buffered records
                self._buffered += more
        messages, self._buffered = self._buffered[:num_messages], self._buffered[num_messages:]
        for message in messages:
            if self._auto_store and message.error() is None:
                self._note_returned(message)
        return messages

    def take(self, count: int, timeout: float | None) -> list[Any]:
        """Returns the available records, up to `count`; waits for the first, or until interrupt(). The
        next call other than give_back() treats them as returned to the application.
        """
        self._mark_taken_as_returned()
        deadline = time.monotonic() + timeout if timeout is not None and timeout >= 0 else float("inf")
        while not self._buffered:
            remaining_s = deadline - time.monotonic()
            self._fill(count, min(max(remaining_s, 0), SLICE_S))
            if not self._buffered and (remaining_s <= 0 or self._interrupted):
                self._interrupted = False
                return []
        return self._take_buffered(count)

    def gather(self, count: int) -> list[Any]:
        """Returns `count` records and events; fewer after interrupt(). As with take(), the next call other
        than give_back() treats them as returned to the application.
        """
        self._mark_taken_as_returned()
        while (before := len(self._buffered)) < count:
            self._fill(count - before, 0 if self._interrupted else SLICE_S)
            if self._interrupted and len(self._buffered) <= before:
                break
        self._interrupted = False
        return self._take_buffered(count)

    def interrupt(self) -> None:
        self._interrupted = True

    def uninterrupt(self) -> None:
        """Clears an interrupt() that came after the take() or gather() it was meant for had ended. Must
        not be called while either runs.
        """
        self._interrupted = False

    def give_back(self, messages: list[Any]) -> None:
        """Takes back `messages`, the end of the latest result of take() or gather(), because they did not
        reach the application: they are returned next, and committed offsets stop short of them.
        """
        self._taken = self._taken[: len(self._taken) - len(messages)]
        self._mark_taken_as_returned()
        self._buffered = [*messages, *self._buffered]

    def _take_buffered(self, count: int) -> list[Any]:
        self._taken, self._buffered = self._buffered[:count], self._buffered[count:]
        return self._taken

    def _mark_taken_as_returned(self) -> None:
        taken, self._taken = self._taken, []
        for message in taken:
            if self._auto_store and message.error() is None:
                self._note_returned(message)

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        """Like mqd.Consumer.consume_batch, but its columns are copies, made from messages."""
        from mqd.client.record_batch import RecordBatchView

        if max_records < 1:
            raise ValueError("max_records must be positive")
        self._mark_taken_as_returned()
        deadline = time.monotonic() + timeout if timeout is not None and timeout >= 0 else float("inf")
        while True:
            if not self._buffered:
                self._fill(max_records, deadline - time.monotonic() if deadline < float("inf") else -1)
            messages = self._buffered
            if not messages:
                if time.monotonic() >= deadline:
                    return None
                continue  # for example, a rebalance has dropped the messages with their partition
            first = messages[0]
            if first.error() is not None:
                self._buffered = messages[1:]
                if first.error().code() == KafkaError._PARTITION_EOF:
                    continue
                raise KafkaException(first.error())
            key = first.topic(), first.partition()
            count = next(
                (
                    index
                    for index, message in enumerate(messages)
                    if index == max_records
                    or message.error() is not None
                    or (message.topic(), message.partition()) != key
                ),
                len(messages),
            )
            self._buffered = messages[count:]
            if self._auto_store:
                self._note_returned(messages[count - 1])
            return RecordBatchView.from_messages(*key, messages[:count])

    def _fill(self, count: int, timeout: float) -> None:
        """Waits for the first message, and takes all that are available with it."""
        first = self._next(max(timeout, 0) if timeout != -1 else -1)
        if first is None:
            return
        self._buffered.append(first)  # before consume(), which may raise, or drop `first` with its partition
        if count > 1:
            more = self._consumer.consume(min(count, CHUNK_MAX) - 1, 0)
            self._buffered += more

    # -- buffered records are dropped with their partition -----------------------------------------

    def _drop_buffered(self, partitions: list[Any] | None) -> dict[tuple[str, int], int]:
        """Drops the buffered records of `partitions`; None = all partitions. Returns the first dropped offset
        of each partition.
        """
        keys = None if partitions is None else {(one.topic, one.partition) for one in partitions}
        first_dropped: dict[tuple[str, int], int] = {}
        kept = []
        for message in self._buffered:
            key = message.topic(), message.partition()
            if keys is None or key in keys:
                first_dropped.setdefault(key, message.offset())
            else:
                kept.append(message)
        self._buffered = kept
        self._resume_offsets = (
            {} if keys is None else {key: offset for key, offset in self._resume_offsets.items() if key not in keys}
        )
        return first_dropped

    def seek(self, partition: Any) -> None:
        self._consumer.seek(partition)
        self._drop_buffered([partition])

    def pause(self, partitions: list[Any]) -> None:
        self._consumer.pause(partitions)
        paused_before, first_dropped = self._resume_offsets, self._drop_buffered(partitions)
        self._resume_offsets = paused_before | first_dropped
        for (topic, index), offset in first_dropped.items():
            self._consumer.seek(confluent_kafka.TopicPartition(topic, index, offset))

    def assign(self, partitions: list[Any]) -> None:
        self._store()
        self._drop_buffered(None)
        self._consumer.assign(partitions)

    def unassign(self) -> None:
        self._store()
        self._drop_buffered(None)
        self._consumer.unassign()

    def incremental_unassign(self, partitions: list[Any]) -> None:
        self._store()
        self._drop_buffered(partitions)
        self._consumer.incremental_unassign(partitions)

    def position(self, partitions: list[Any]) -> list[Any]:
        """Returns the positions after the returned records; librdkafka's positions are after the records
        that are buffered here.
        """
        first_buffered: dict[tuple[str, int], int] = {}
        for message in self._buffered:
            if message.error() is None:
                first_buffered.setdefault((message.topic(), message.partition()), message.offset())
        positions = []
        for position in self._consumer.position(partitions):
            key = position.topic, position.partition
            offset = first_buffered.get(key, self._resume_offsets.get(key) if position.offset < 0 else None)
            positions.append(position if offset is None else confluent_kafka.TopicPartition(*key, offset))
        return positions

    # -- offsets -----------------------------------------------------------------------------------

    def _note_returned(self, message: Any) -> None:
        self._unstored[message.topic(), message.partition()] = message
        self._unstored_count += 1
        if self._unstored_count >= STORE_RECORDS or time.monotonic() >= self._stored_at + STORE_S:
            self._store()

    def _store(self) -> None:
        self._mark_taken_as_returned()
        if self._unstored:
            messages, self._unstored = self._unstored.values(), {}
            self._unstored_count, self._stored_at = 0, time.monotonic()
            self._store_offsets([_position_after(message) for message in messages])

    def _store_offsets(self, offsets: list[Any]) -> None:
        with contextlib.suppress(KafkaException):  # for partitions that have been revoked in the meantime
            self._consumer.store_offsets(offsets=offsets)

    def store_offsets(self, message: Any = None, offsets: Any = None) -> None:
        if self._auto_store:
            raise failure(KafkaError._INVALID_ARG, "enable.auto.offset.store must be false for store_offsets")
        if message is not None:
            self._consumer.store_offsets(message=message)
        else:
            self._consumer.store_offsets(offsets=offsets)

    def commit(self, message: Any = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        commit: Any = self._consumer.commit  # its type stubs need a literal for `asynchronous`
        if message is not None:
            return commit(message=message, asynchronous=asynchronous)
        if offsets is not None:
            return commit(offsets=offsets, asynchronous=asynchronous)
        self._store()
        return commit(asynchronous=asynchronous)

    # -- the group ---------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        callbacks: dict[str, Any] = {"on_revoke": self._wrap_on_revoke(on_revoke)}
        if on_assign is not None:
            callbacks["on_assign"] = self._with_owner(on_assign)
        if on_lost is not None:  # otherwise on_revoke is called
            callbacks["on_lost"] = self._wrap_on_lost(on_lost)
        self._consumer.subscribe(topics, **callbacks)
        self._subscription = list(topics)

    def _with_owner(self, function: Any) -> Any:
        if not callable(function):
            return function  # librdkafka raises its own error
        return lambda _consumer, partitions: function(self._owner, partitions)

    def _wrap_on_revoke(self, function: Any) -> Any:
        """Wraps on_revoke so that buffered records of the revoked partitions are dropped, and the offsets
        of returned records are stored before librdkafka's last commit.
        """
        if function is not None and not callable(function):
            return function

        def call(_consumer: Any, partitions: list[Any]) -> None:
            self._drop_buffered(partitions)
            self._store()
            if function is not None:
                function(self._owner, partitions)

        return call

    def _wrap_on_lost(self, function: Any) -> Any:
        """Wraps on_lost so that buffered records of the lost partitions, which another member may read
        now, are dropped.
        """
        if not callable(function):
            return function

        def call(_consumer: Any, partitions: list[Any]) -> None:
            self._drop_buffered(partitions)
            function(self._owner, partitions)

        return call

    def subscription(self) -> list[str]:
        return list(self._subscription)

    def unsubscribe(self) -> None:
        self._drop_buffered(None)
        self._store()
        self._consumer.unsubscribe()
        self._subscription = []

    def close(self) -> None:
        self._buffered = []
        self._store()
        self._consumer.close()


def _position_after(message: Any) -> Any:
    epoch = message.leader_epoch()
    optional = {} if epoch is None or epoch < 0 else {"leader_epoch": epoch}
    return confluent_kafka.TopicPartition(message.topic(), message.partition(), message.offset() + 1, **optional)
