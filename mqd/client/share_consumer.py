"""confluent_kafka's ShareConsumer, over shared memory if the broker is on this host, otherwise over
TCP; both transports use our own client (mqd/client/share).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import confluent_kafka
from confluent_kafka import AcknowledgeType, ConcurrentModificationException, IllegalStateException, Messages

from mqd.client import config as configuration
from mqd.client.messages import KafkaError, KafkaException, TopicPartition, broker_error, failure, local_error
from mqd.client.share.core import ShareCore
from mqd.client.share.events import ACCEPT, REJECT, RELEASE, RENEW, Limits, Outcome, Problem, TopicPartitionKey
from mqd.client.share.opening import open_share_runner
from mqd.client.share.records import ShareMessage
from mqd.client.share.runner import ShareRunner
from mqd.client.share.share_config import ShareConfig

CLOSE_S = 10.0
COMMIT_S = 60.0
CONSUME_MAX = 1_000_000

CommitResults = dict[TopicPartition, KafkaException | None]
OnCommitted = Callable[[dict[TopicPartition, set[int]], KafkaException | None], None]


class ShareConsumer:
    """A member of a share group with confluent_kafka.ShareConsumer's methods, and consume(),
    acknowledge_batch() and renew().

        consumer = ShareConsumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "workers",
                                  "share.acknowledgement.mode": "explicit"})
        consumer.subscribe(["jobs"])
        for message in consumer.poll(1.0):
            consumer.acknowledge(message, AcknowledgeType.ACCEPT if work(message) else
                                 AcknowledgeType.RELEASE)
        consumer.commit_sync()

    `config`: librdkafka's keys; unknown ones, and those without a meaning for a share group, raise
    what confluent_kafka raises. Added keys: transport, mqd.socket.path, mqd.spin.us, as for
    Consumer. `transport` and `transport_reason` give the transport in use and the reason.

    One thread at a time: a call during another thread's call raises
    ConcurrentModificationException. In a child of fork() every call raises KafkaException; after
    close(), IllegalStateException. As a context manager, it is closed at the end of the block.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        settings = configuration.read(
            config, {name.replace("_", "."): value for name, value in more.items()} if config is None else more
        )
        self._config = ShareConfig(settings)
        choice = configuration.choose_transport(settings)
        self._runner, self._credentials, choice = open_share_runner(settings, self._config, choice)
        self.transport, self.transport_reason = choice.transport, choice.reason
        self._core: ShareCore = self._runner.core
        self._callback: OnCommitted | None = None
        self._taken: list[Any] = []  # counted as held by the application, but not returned yet
        self._calling_thread: int | None = None  # id of the thread that is in a call
        self._is_in_callback = self._is_closed = False
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, self._runner, self._pid)

    # -- records -----------------------------------------------------------------------------------

    def poll(self, timeout: float = -1) -> Messages:
        """Returns the next records as soon as there are some, or none after `timeout` seconds (below 0:
        no limit).

        Implicit mode: the records of the previous call are accepted. Explicit mode: they must all
        have been acknowledged, else IllegalStateException. Acknowledgements are sent; their results
        go to the callback of set_acknowledgement_commit_callback(). Raises KafkaException for an
        error of the group or a topic: each error once, but a fatal one on every call. Records that
        cannot be read are rejected, and the KafkaException (_BAD_MSG) names them.
        """
        return self._take(self._config["max.poll.records"], False, timeout)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> Messages:
        """Like poll(), but no more than `num_messages` records are acquired, so that the group's other
        members can have the rest. The request goes to one broker at a time.
        """
        if not 1 <= num_messages <= CONSUME_MAX:
            raise ValueError(f"num_messages must be between 1 and {CONSUME_MAX}")
        return self._take(num_messages, True, timeout)

    def _take(self, count: int, is_strict: bool, timeout: float) -> Messages:
        core, deadline = self._core, _deadline(timeout)
        with self._call():
            if not core.subscription:
                raise IllegalStateException("Consumer is not subscribed to any topics")
            if self._taken:  # the call that took them was ended by Ctrl-C or by an exception of the callback
                messages, self._taken = self._taken[:count], self._taken[count:]
                return Messages._from_list(messages)
            if self._config.is_explicit and core.holds_records:
                raise IllegalStateException("not all records of the previous poll have been acknowledged")
            with self._runner.lock:
                core.acknowledge_all(ACCEPT)
            limits = Limits(count, 0, is_strict, self._config["fetch.min.bytes"], self._config["fetch.max.bytes"])
            wait_max_ms = self._config["fetch.wait.max.ms"]
            try:
                while True:
                    self._serve()
                    wait_ms = int(max(0, min(wait_max_ms, (deadline - time.monotonic()) * 1000)))
                    self._runner.call(partial(core.set_limits, limits._replace(wait_ms=wait_ms)))
                    until = min(deadline, time.monotonic() + max(wait_ms, 1) / 1000)
                    self._runner.wait_for(lambda: core.ready or core.problems or core.outcomes or core.fatal, until)
                    messages = self._taken = self._runner.call(lambda now: core.take(count, now))
                    if messages or (time.monotonic() >= deadline and not core.problems):
                        self._serve_outcomes()
                        self._taken = []
                        return Messages._from_list(messages)
            finally:
                self._runner.call(lambda now: core.set_limits(None, now))

    # -- acknowledging -----------------------------------------------------------------------------

    def acknowledge(
        self, message: confluent_kafka.Message, ack_type: AcknowledgeType | int = AcknowledgeType.ACCEPT
    ) -> None:
        """ACCEPT: the record is done. RELEASE: deliver it again. REJECT: do not deliver it again. The next
        poll(), consume(), commit_sync() or commit_async() sends the acknowledgement. Explicit mode only.
        Raises IllegalStateException if the consumer does not hold the record, or no longer holds it.
        """
        # called for each record, so it makes as few calls as possible
        if (
            type(message) is ShareMessage
            and self._calling_thread is None
            and not self._is_closed
            and os.getpid() == self._pid
        ):
            if not self._config.is_explicit:
                self._require_explicit()
            with self._runner.lock:
                if self._core.acknowledge(
                    (message._topic, message._partition), message._offset, _checked_ack_type(ack_type)
                ):
                    return
        if not isinstance(message, confluent_kafka.Message):
            raise TypeError(f"argument 1 must be confluent_kafka.cimpl.Message, not {type(message).__name__}")
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        self.acknowledge_offset(topic, partition, offset, ack_type)  # type: ignore[arg-type]  # checked by the callee

    def acknowledge_offset(
        self, topic: str, partition: int, offset: int, ack_type: AcknowledgeType | int = AcknowledgeType.ACCEPT
    ) -> None:
        """Like acknowledge(), by topic, partition and offset."""
        checked_type = _checked_ack_type(ack_type)
        topic_partition, offset = _checked_record_id(topic, partition, offset)
        with self._call():
            self._require_explicit()
            with self._runner.lock:
                self._acknowledge_held([(topic_partition, offset)], checked_type)

    def acknowledge_batch(
        self, messages: Iterable[confluent_kafka.Message], ack_type: AcknowledgeType | int = AcknowledgeType.ACCEPT
    ) -> None:
        """Acknowledges all of the messages, or none if one of them is not held."""
        checked_type, record_ids = _checked_ack_type(ack_type), _checked_record_ids(messages)
        with self._call():
            self._require_explicit()
            with self._runner.lock:
                self._acknowledge_held(record_ids, checked_type)

    def _require_explicit(self) -> None:
        if not self._config.is_explicit:
            raise IllegalStateException(
                "share.acknowledgement.mode is implicit: records are accepted by the next poll()"
            )

    def _acknowledge_held(self, record_ids: list[tuple[TopicPartitionKey, int]], ack_type: int) -> None:
        held = self._core.held
        if len(set(record_ids)) < len(record_ids):
            raise ValueError("a record is listed twice")
        for topic_partition, offset in record_ids:
            if offset not in held.get(topic_partition, ()):
                raise IllegalStateException(
                    f"{topic_partition[0]} [{topic_partition[1]}] at offset {offset} is not held by this consumer"
                )
        for topic_partition, offset in record_ids:
            self._core.acknowledge(topic_partition, offset, ack_type)

    def commit_sync(self, timeout: float = COMMIT_S) -> CommitResults:
        """Sends the acknowledgements (implicit mode: accepts what the previous poll() returned) and
        waits for the broker. Returns, for each partition, None or its error, which is _TIMED_OUT if
        there was no response within `timeout` seconds (below 0: no limit). Empty when there was
        nothing to send.
        """
        if not isinstance(timeout, (int, float)):
            raise TypeError(f"must be real number, not {type(timeout).__name__}")
        with self._call():
            if not self._config.is_explicit:
                with self._runner.lock:
                    self._core.acknowledge_all(ACCEPT)
            return self._commit(timeout)

    def commit_async(self) -> None:
        """Like commit_sync(), without waiting: the callback gets the results."""
        with self._call():
            if not self._config.is_explicit:
                with self._runner.lock:
                    self._core.acknowledge_all(ACCEPT)
            self._runner.call(self._core.flush)
            self._serve_outcomes()

    def renew(
        self, messages: Iterable[confluent_kafka.Message] | None = None, timeout: float = COMMIT_S
    ) -> CommitResults:
        """Renews the locks of these records (KIP-1222); None: of all records that are held. They must
        still be acknowledged. Also sends pending acknowledgements. Returns the same as commit_sync().
        Raises KafkaException (_UNSUPPORTED_FEATURE) if the broker does not support renewals.
        """
        record_ids = None if messages is None else _checked_record_ids(messages)
        with self._call():
            with self._runner.lock:
                if record_ids is None:
                    self._core.acknowledge_all(RENEW)
                else:
                    self._acknowledge_held(record_ids, RENEW)
            return self._commit(timeout)

    def _commit(self, timeout: float) -> CommitResults:
        core = self._core
        deadline = _deadline(timeout)
        partitions = self._runner.call(lambda _: core.unconfirmed_partitions())
        self._runner.call(core.flush)
        self._runner.wait_for(lambda: core.fatal or partitions.isdisjoint(core.unconfirmed_partitions()), deadline)
        with self._runner.lock:
            late = partitions & core.unconfirmed_partitions()
            self._raise_fatal()
        results: CommitResults = {
            TopicPartition(*topic_partition): KafkaException(local_error(KafkaError._TIMED_OUT))
            for topic_partition in sorted(late)
        }
        for outcome in self._serve_outcomes():
            partition = TopicPartition(*outcome.topic_partition)
            if results.get(partition) is None:
                results[partition] = _failure_of(outcome)
        return results

    def set_acknowledgement_commit_callback(self, callback: OnCommitted | None) -> None:
        """callback(offsets by partition, KafkaException or None), called by this consumer's other
        methods in the thread that calls them; None: no callback.
        """
        if callback is not None and not callable(callback):
            raise TypeError("callback must be callable or None")
        if self._is_in_callback:
            raise IllegalStateException("the callback cannot replace itself while it runs")
        with self._call():
            self._callback = callback

    def _serve(self) -> None:
        """Calls the callback, then raises the next error."""
        self._serve_outcomes()
        with self._runner.lock:
            self._raise_fatal()
            problem = self._core.problems.popleft() if self._core.problems else None
        if problem is not None:
            raise _exception_of(problem)

    def _raise_fatal(self) -> None:
        if self._core.fatal is not None:
            self._core.problems.clear()
            raise _exception_of(self._core.fatal)

    def _serve_outcomes(self) -> list[Outcome]:
        with self._runner.lock:
            outcomes = list(self._core.outcomes)
            self._core.outcomes.clear()
        by_code: dict[int, dict[TopicPartition, set[int]]] = {}
        for outcome in outcomes if self._callback is not None else ():
            offsets = by_code.setdefault(outcome.code, {}).setdefault(TopicPartition(*outcome.topic_partition), set())
            for range_ in outcome.ranges:
                offsets.update(range(range_.first, range_.last + 1))
        for code, partitions in by_code.items():
            if self._callback is not None:
                self._is_in_callback = True
                try:
                    self._callback(partitions, KafkaException(broker_error(code, "acknowledge")) if code else None)
                finally:
                    self._is_in_callback = False
        return outcomes

    # -- the group ---------------------------------------------------------------------------------

    def subscribe(self, topics: list[str]) -> None:
        """Joins the group for these topics; replaces an earlier subscription. Empty: unsubscribe().
        Share groups do not support regular expressions.
        """
        if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
            raise TypeError("expected list of topic unicode strings")
        if not all(topics) or len(set(topics)) < len(topics):
            raise ValueError("Failed to subscribe: Local: Invalid argument or configuration")
        with self._call():
            self._runner.call(lambda now: self._core.subscribe(tuple(topics), now))

    def unsubscribe(self) -> None:
        """Leaves the group. Records that are held can still be acknowledged."""
        self.subscribe([])

    def subscription(self) -> list[str]:
        """The topics given to subscribe()."""
        with self._call():
            return list(self._core.subscription)

    def memberid(self) -> str:
        """This member's id in the group."""
        return self._core.membership.member_id

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Sets the credentials for future TCP connections."""
        if not isinstance(username, str) or not isinstance(password, str):
            raise TypeError("username and password must be str")
        with self._call():
            self._credentials.update({"sasl.username": username, "sasl.password": password})

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Sends the acknowledgements, releases all other records (including those that implicit mode
        would have accepted with the next poll()), and leaves the group. A second call has no effect.
        """
        if self._is_closed or os.getpid() != self._pid:
            self._is_closed = True
            return
        with self._call():
            try:
                self._runner.call(self._core.close)
                self._runner.wait_for(lambda: self._core.is_closed, time.monotonic() + CLOSE_S)
                self._serve_outcomes()
            finally:
                self._is_closed = True
                self._finalizer()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise failure(KafkaError._STATE, "this client was made before fork(): make a new one in the child process")
        if self._is_closed:
            raise IllegalStateException("Share consumer closed")
        thread_id, previous = threading.get_ident(), self._calling_thread
        if previous is not None and previous != thread_id:
            raise ConcurrentModificationException("another thread is calling this share consumer")
        self._calling_thread = thread_id
        try:
            yield
        finally:
            self._calling_thread = previous

    def __enter__(self) -> ShareConsumer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _stop(runner: ShareRunner, pid: int) -> None:
    """Stops the runner, but not in a child of fork(): that would shut down the connections that the
    parent uses.
    """
    if os.getpid() == pid:
        runner.stop()


def _deadline(timeout: float) -> float:
    return time.monotonic() + timeout if timeout >= 0 else float("inf")


def _checked_ack_type(ack_type: AcknowledgeType | int) -> int:
    if not isinstance(ack_type, int):
        raise TypeError(f"ack_type must be an integer, not {type(ack_type).__name__}")
    if ack_type not in (ACCEPT, RELEASE, REJECT):
        raise ValueError(f"ack_type {ack_type} is not one of ACCEPT, RELEASE, REJECT; to renew locks, call renew()")
    return int(ack_type)


def _checked_record_id(topic: object, partition: object, offset: object) -> tuple[TopicPartitionKey, int]:
    if not isinstance(topic, str) or not isinstance(partition, int) or not isinstance(offset, int):
        raise (ValueError if topic is None else TypeError)("expected a topic's name, a partition and an offset")
    if partition < 0 or offset < 0:
        raise ValueError("partition and offset must not be negative")
    return (topic, partition), offset


def _checked_record_ids(messages: Iterable[confluent_kafka.Message]) -> list[tuple[TopicPartitionKey, int]]:
    return [_checked_record_id(message.topic(), message.partition(), message.offset()) for message in messages]


def _failure_of(outcome: Outcome) -> KafkaException | None:
    return KafkaException(broker_error(outcome.code, "acknowledge")) if outcome.code else None


def _exception_of(problem: Problem) -> KafkaException:
    flags = {"fatal": True} if problem.is_fatal else {}
    if problem.code < 0:
        return failure(problem.code, problem.text, **flags)
    return KafkaException(broker_error(problem.code, problem.text, **flags))
