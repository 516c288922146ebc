"""Redrives a dead-letter topic with librdkafka; plan.py decides how each letter is handled.

One transaction writes a batch of records and commits the positions after their letters. The
transactional id names the topic only: a redrive fences an earlier one of the same topic, whatever
their filters, and aborts the earlier one's open transaction before it reads positions. So a redrive
that was killed is resumed by running it again, and each record is written once for readers with
read_committed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from mqd.base.dead_letters import ENABLED
from mqd.cli.broker_lookup import GROUP, Cluster
from mqd.cli.common import CliError
from mqd.cli.group_listing import commits, listed_names
from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, base_config, explain_kafka, metadata
from mqd.cli.redrive import plan
from mqd.cli.redrive.plan import EarlierRedrive, Filter, NewRecord, Origin, StoredRecord

BATCH_RECORDS_MAX = 500  # records per transaction
ATTEMPTS_MAX = 3  # per transaction; a transaction is not repeated if a record was refused
TRANSACTION_TIMEOUT_MS = 30_000  # how long a killed redrive can delay readers with read_committed
PROGRESS_TIMEOUT_S = 60.0  # for records to arrive, and for retries of a producer's calls
COORDINATOR_LOOKUP_TIMEOUT_S = 15.0
# the consumer reads forward to a source record within this distance, and seeks to others
READ_FORWARD_OFFSETS_MAX = 1000
_DENIED = "AUTHORIZATION_FAILED"
_TRANSIENT = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


class Source(NamedTuple):
    """A topic that letters came from."""

    partition_count: int
    is_dead_letter_topic: bool


class Outcome:
    """`moved`: (topic, group, error message) -> number of records. `refused`: reason -> number of
    letters. `first_refused`: reason -> (partition, offset) of the first letter.
    """

    def __init__(self) -> None:
        self.moved: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.first_refused: dict[str, tuple[int, int]] = {}
        self.not_selected = 0  # number of letters that the filter does not select
        self.moved_before = 0  # number of letters that a redrive with another filter has moved

    def refuse(self, letter: StoredRecord, why: str) -> None:
        self.refused[why] += 1
        self.first_refused.setdefault(why, (letter.partition, letter.offset))


class _Letter(NamedTuple):
    """A letter to move, with the record that it names and the topic of that record."""

    letter: StoredRecord
    origin: Origin
    source: Source


def to_stored_record(message: Any) -> StoredRecord:
    return StoredRecord(
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
    )


class Redrive:
    """`with Redrive(...) as redrive: redrive.run(...)`. Not thread-safe. Raises CliError,
    KafkaException.
    """

    def __init__(self, bootstrap: str, topic: str, letter_filter: Filter, is_dry_run: bool) -> None:
        self.topic, self.letter_filter, self.is_dry_run = topic, letter_filter, is_dry_run
        self.group = plan.group_of(topic, letter_filter)
        self.outcome = Outcome()
        self._bootstrap = bootstrap
        self._consumer = _consumer(bootstrap, self.group, "read_committed")
        self._sources = SourceReader(bootstrap, self.group)
        self._writer = None if is_dry_run else Writer(bootstrap, topic, self._consumer)
        self._earlier: list[EarlierRedrive] = []
        self._positions: dict[int, int] = {}  # partition -> offset after the handled letters; not committed yet
        self._ends: dict[int, int] = {}  # partition -> end offset, until the partition has been read to its end
        self._counts: Counter[tuple[str, str, str]] = Counter()  # like Outcome.moved; not committed yet
        self._pending_messages: deque[Any] = deque()
        self._problem: CliError | None = None

    def __enter__(self) -> Redrive:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._sources.close()
        if self._writer is not None:
            self._writer.close()

    def run(self, limit: int | None, rate: int | None) -> None:
        """Moves the letters that the topic has now, at most `limit` letters and `rate` letters a
        second.
        """
        partitions = sorted(metadata(self._consumer, self.topic).topics[self.topic].partitions)
        if self._writer is not None:
            self._writer.begin()
        self._resume(partitions)
        count, started_s = 0, time.monotonic()
        while (self._ends or self._pending_messages) and self._problem is None and (limit is None or count < limit):
            room = min(
                BATCH_RECORDS_MAX, rate or BATCH_RECORDS_MAX, BATCH_RECORDS_MAX if limit is None else limit - count
            )
            records = self._build_records(self._take_letters(room))
            if records:
                self._commit(records)
                count += len(records)
                if rate is not None and not self.is_dry_run:
                    time.sleep(max(0.0, started_s + count / rate - time.monotonic()))
        self._commit([])
        if self._problem is not None:
            raise self._problem

    # -- letters -----------------------------------------------------------------------------------

    def _resume(self, partitions: list[int]) -> None:
        """Finds the offsets at which to resume, and the ends up to which to read."""
        own_positions: dict[int, int] = {}
        for letter_filter, positions in self._all_positions():
            if letter_filter == self.letter_filter:
                own_positions = positions
            else:
                self._earlier.append(EarlierRedrive(letter_filter, positions))
        starts = []
        for index in partitions:
            first, end = self._consumer.get_watermark_offsets(TopicPartition(self.topic, index), REQUEST_TIMEOUT_S)
            start = max(first, own_positions.get(index, 0))
            if start < end:
                self._ends[index] = end
                starts.append(TopicPartition(self.topic, index, start))
        self._consumer.assign(starts)

    def _all_positions(self) -> list[tuple[Filter, dict[int, int]]]:
        """The filter and positions of every redrive of this topic."""
        deadline = time.monotonic() + COORDINATOR_LOOKUP_TIMEOUT_S
        while True:
            try:
                with Cluster(self._bootstrap) as cluster:
                    with cluster.every_coordinator(GROUP):
                        names = listed_names(cluster)
                    redrives = [
                        (name, letter_filter)
                        for name in names
                        if (letter_filter := plan.filter_of(name, self.topic)) is not None
                    ]
                    return [(letter_filter, self._positions_of(cluster, name)) for name, letter_filter in redrives]
            except CliError as problem:  # coordinators change, or are created by the first client that needs one
                if time.monotonic() > deadline or _DENIED in problem.message:
                    raise
                time.sleep(0.2)  # there is no notification

    def _positions_of(self, cluster: Cluster, group: str) -> dict[int, int]:
        return {
            index: commit.offset for (topic, index), commit in commits(cluster, group).items() if topic == self.topic
        }

    def _fill_pending(self) -> None:
        """Waits until there are pending messages, or all partitions have been read to their ends."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while self._ends and not self._pending_messages:
            messages: list[Any] = self._consumer.consume(BATCH_RECORDS_MAX, 0.5)
            for message in messages:
                error, index = message.error(), message.partition()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if error.code() not in _TRANSIENT:
                        raise KafkaException(error)
                elif error is not None or message.offset() >= self._ends.get(index, 0):
                    self._ends.pop(index, None)
                else:
                    self._pending_messages.append(message)
            if self._ends and not self._pending_messages and time.monotonic() > deadline:
                raise CliError(
                    f"topic {self.topic}: no records arrive from partition {min(self._ends)}; check mqd cluster status"
                )

    def _take_letters(self, room: int) -> list[_Letter]:
        """Returns the next letters to move, at most `room`."""
        letters: list[_Letter] = []
        self._fill_pending()
        while self._pending_messages and len(letters) < room:
            letter = to_stored_record(self._pending_messages[0])
            origin = plan.origin_of(letter)
            if origin is None:
                self.outcome.refuse(letter, plan.NOT_A_LETTER)
            elif not self.letter_filter.selects(letter, origin):
                self.outcome.not_selected += 1
            elif plan.is_moved(letter, origin, self._earlier):
                self.outcome.moved_before += 1
            else:
                source = self._sources.topic(origin.topic)
                if source is None:  # its letters are not skipped: the topic may still be created
                    self._problem = CliError(
                        f"stopped at {self.topic}-{letter.partition} offset {letter.offset}: its record came from topic"
                        f" {origin.topic}, which does not exist; create it and redrive again, or redrive the letters of"
                        " another topic (--source)"
                    )
                    break
                letters.append(_Letter(letter, origin, source))
            self._positions[letter.partition] = letter.offset + 1
            self._pending_messages.popleft()
        return letters

    def _build_records(self, letters: list[_Letter]) -> list[NewRecord]:
        wanted_offsets: dict[tuple[str, int], set[int]] = {}
        for letter, origin, source in letters:
            has_partition = origin.partition < source.partition_count
            if plan.needs_source(letter) and not source.is_dead_letter_topic and has_partition:
                wanted_offsets.setdefault((origin.topic, origin.partition), set()).add(origin.offset)
        source_records = self._sources.read(wanted_offsets)
        records = []
        for letter, origin, source in letters:
            record = source_records.get((origin.topic, origin.partition, origin.offset))
            new = plan.record_of(letter, origin, record, source.is_dead_letter_topic)
            if isinstance(new, str):
                self.outcome.refuse(letter, new)
                continue
            self._counts[(origin.topic, origin.group, origin.message)] += 1
            records.append(new if origin.partition < source.partition_count else new._replace(partition=-1))
        return records

    def _commit(self, records: list[NewRecord]) -> None:
        if self._writer is not None and self._positions:
            self._writer.commit(records, self._positions)
        self.outcome.moved += self._counts
        self._positions, self._counts = {}, Counter()


# -- writing ---------------------------------------------------------------------------------------


class Writer:
    def __init__(self, bootstrap: str, topic: str, consumer: Consumer) -> None:
        self._topic, self._consumer = topic, consumer
        self._failure: Any = None  # the first failure of a record: (error, its topic)
        config = {
            "transactional.id": plan.GROUP_PREFIX + topic,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "message.max.bytes": 1_000_000_000,  # topics have their own limits
            "linger.ms": 5,
            "on_delivery": self._on_delivery,
        }
        self._producer = Producer(base_config(bootstrap) | config)
        self._has_open_transaction = False

    def begin(self) -> None:
        """Fences an earlier redrive of the topic and aborts its open transaction."""
        self._call_with_retries(self._producer.init_transactions)

    def commit(self, records: Iterable[NewRecord], positions: dict[int, int]) -> None:
        records = list(records)
        offsets = [TopicPartition(self._topic, index, offset) for index, offset in sorted(positions.items())]
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                self._write_transaction(records, offsets)
                return
            except KafkaException as problem:
                error = problem.args[0]
                if error.fatal() or not error.txn_requires_abort():
                    raise CliError(self._explain(problem)) from None
                self._call_with_retries(self._producer.abort_transaction)
                self._has_open_transaction = False
                if self._failure is not None or attempt == ATTEMPTS_MAX:
                    raise CliError(self._explain(problem)) from None

    def _write_transaction(self, records: list[NewRecord], offsets: list[TopicPartition]) -> None:
        self._failure = None
        self._producer.begin_transaction()
        self._has_open_transaction = True
        for record in records:
            self._produce(record)
        self._call_with_retries(
            lambda timeout_s: self._producer.send_offsets_to_transaction(
                offsets, self._consumer.consumer_group_metadata(), timeout_s
            )
        )
        self._call_with_retries(self._producer.commit_transaction)
        self._has_open_transaction = False

    def _produce(self, record: NewRecord) -> None:
        while True:
            try:
                self._producer.produce(
                    record.topic, record.value, record.key, record.partition, headers=list(record.headers)
                )
                return
            except BufferError:  # records leave the queue when they are written, or after transaction.timeout.ms
                self._producer.poll(0.1)

    def _call_with_retries(self, step: Callable[[float], Any]) -> None:
        """Calls `step`, and repeats it after errors that librdkafka marks as retriable."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while True:
            try:
                step(REQUEST_TIMEOUT_S)
                return
            except KafkaException as problem:
                error = problem.args[0]
                if not error.retriable() or error.txn_requires_abort() or time.monotonic() > deadline:
                    raise

    def _on_delivery(self, error: Any, message: Any) -> None:
        # the other records of the failed transaction are purged: that is not the cause
        if error is not None and self._failure is None and error.code() != KafkaError._PURGE_QUEUE:
            self._failure = (error, message.topic())

    def _explain(self, problem: KafkaException) -> str:
        if problem.args[0].code() in (
            KafkaError._FENCED,
            KafkaError.PRODUCER_FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
        ):
            return (
                f"another redrive of {self._topic} has begun and has ended this one; the records that this one moved"
                " stay moved"
            )
        if self._failure is not None:
            error, topic = self._failure
            return f"topic {topic}: {explain_kafka(KafkaException(error))[0]}; redrive again to resume"
        return f"{explain_kafka(problem)[0]}; redrive again to resume"

    def close(self) -> None:
        if self._has_open_transaction:  # interrupted: abort now, so that readers do not wait for the timeout
            with contextlib.suppress(KafkaException):
                self._producer.abort_transaction(5.0)


# -- source topics ---------------------------------------------------------------------------------


class SourceReader:
    """Looks up the topics and records that letters name. Uncommitted and aborted records are read
    too, because a share group may have received them.
    """

    def __init__(self, bootstrap: str, group: str) -> None:
        # the redrive's group: librdkafka looks up the group's coordinator, and another group would
        # need its own ACL
        self._consumer = _consumer(bootstrap, group, "read_uncommitted")
        self._admin: AdminClient = admin_client(bootstrap)
        self._topics: dict[str, Source | None] = {}

    def close(self) -> None:
        self._consumer.close()

    def topic(self, name: str) -> Source | None:
        """None: there is no such topic."""
        if name not in self._topics:
            self._topics[name] = self._look_up(name)
        return self._topics[name]

    def _look_up(self, name: str) -> Source | None:
        topic = self._consumer.list_topics(name, timeout=REQUEST_TIMEOUT_S).topics[name]
        if topic.error is not None:
            if topic.error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION):
                return None
            raise KafkaException(topic.error)
        resource = ConfigResource(ResourceType.TOPIC, name)
        entry = self._admin.describe_configs([resource])[resource].result(REQUEST_TIMEOUT_S).get(ENABLED)
        return Source(len(topic.partitions), entry is not None and entry.value == "true")

    def read(self, wanted: dict[tuple[str, int], set[int]]) -> dict[tuple[str, int, int], StoredRecord]:
        """The records that still exist, by topic, partition and offset."""
        return {
            (topic, index, record.offset): record
            for (topic, index), offsets in wanted.items()
            for record in self._read_partition(topic, index, offsets)
        }

    def _read_partition(self, topic: str, index: int, offsets: set[int]) -> list[StoredRecord]:
        first, end = self._consumer.get_watermark_offsets(TopicPartition(topic, index), REQUEST_TIMEOUT_S)
        remaining = deque(sorted(offset for offset in offsets if first <= offset < end))
        records: list[StoredRecord] = []
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        position = -READ_FORWARD_OFFSETS_MAX - 1
        while remaining:
            if remaining[0] - position > READ_FORWARD_OFFSETS_MAX:
                position = remaining[0]
                self._consumer.assign([TopicPartition(topic, index, position)])
            messages: list[Any] = self._consumer.consume(100, 0.5)
            for message in messages:
                error = message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    remaining.clear()
                elif error is not None:
                    if error.code() not in _TRANSIENT:
                        raise KafkaException(error)
                else:
                    position = message.offset()
                    while remaining and remaining[0] < position:  # compacted
                        remaining.popleft()
                    if remaining and remaining[0] == position:
                        records.append(to_stored_record(message))
                        remaining.popleft()
                    deadline = time.monotonic() + PROGRESS_TIMEOUT_S
            if remaining and time.monotonic() > deadline:
                raise CliError(f"topic {topic}: no records arrive from partition {index}; check mqd cluster status")
        self._consumer.unassign()
        return records


def _consumer(bootstrap: str, group: str, isolation: str) -> Consumer:
    config = {
        "group.id": group,
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 100,
        "queued.max.messages.kbytes": 16_384,
        "check.crcs": True,
    }
    return Consumer(base_config(bootstrap) | config)
