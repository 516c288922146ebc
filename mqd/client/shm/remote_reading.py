"""Reads partitions that have no readable replica on this host: from their leaders, over TCP with
librdkafka, for a consumer that otherwise reads shared memory.

    records = RemoteRecords(settings, isolation_level)   # connects only when the first reader is opened
    reader = records.open(topic, partition, offset)
    records.close()

One librdkafka consumer, without a group, reads all such partitions from the given offsets, and the
readers return its records. A reader has those methods of reading.PartitionReader that fetching.py
uses. Only the thread of RemoteRecords uses the librdkafka consumer; readers send their requests to
this thread.

    V1  a message reaches a reader only if it was consumed after the thread had carried out the
        reader's last open or seek, which is checked by `serial`
    V2  when a reader has buffered AHEAD_RECORDS, its partition is paused until half of them were
        read
    V3  `position` is the offset after the last returned record or, if librdkafka has reported the
        partition's end after it, that end (transaction markers may lie between the two)
    V4  if the thread fails, every reader gets a problem, even one that is opened or seeks later, so
        that no caller waits forever
Concurrency: only the consumer's thread uses readers; `lock` guards the data that both threads
use.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import confluent_kafka

from mqd.client.config import Settings
from mqd.client.messages import KafkaError
from mqd.client.record_batch import RecordBatchView
from mqd.client.shm.reading import Problem
from mqd.protocol.errors import ErrorCode

AHEAD_RECORDS = 20_000
CONSUME_RECORDS_MAX = 1000
POLL_S = 0.05  # requests of readers are carried out within this time
# Keys of the application's configuration that are left out: they concern its group or callbacks, or are set here.
_EXCLUDED_KEYS = frozenset(
    {
        "auto.commit.enable",
        "auto.commit.interval.ms",
        "default.topic.config",
        "error_cb",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "logger",
        "max.poll.interval.ms",
        "metadata.broker.list",
        "on_commit",
        "partition.assignment.strategy",
        "session.timeout.ms",
        "statistics.interval.ms",
        "stats_cb",
        "throttle_cb",
    }
)
_FIXED_KEYS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_FAILED = Problem("gone", int(ErrorCode.UNKNOWN_SERVER_ERROR), "reading from other hosts has failed")
_OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, int(ErrorCode.OFFSET_OUT_OF_RANGE)})

_log = logging.getLogger("mqd.client")


class RemoteReader:
    """The reader of one partition; see reading.PartitionReader."""

    is_remote = True

    def __init__(self, records: RemoteRecords, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition = topic, partition
        self.position = offset
        self._records = records
        self.serial = 0
        self.messages: deque[Any] = deque()
        self.end = -1  # the partition's end as reported by librdkafka; -1: not reported since the last record or seek
        self.problem: Problem | None = None
        self.is_paused = False

    def read(self, records_max: int, _bytes_max: int) -> RecordBatchView | None:
        return self._records.take(self, records_max)

    def lag_end(self) -> int:
        """Returns the partition's end if everything before it has been read, otherwise -1."""
        with self._records.lock:
            return self.end if not self.messages and self.problem is None else -1

    def log_start(self) -> int:
        return -1

    def lag(self) -> int:
        return 0 if self.lag_end() >= 0 else -1

    def seek(self, offset: int) -> None:
        self._records.begin(self, offset)

    def take_problem(self) -> Problem | None:
        with self._records.lock:
            problem, self.problem = self.problem, None
            return problem

    def set_aborted(self, _transactions: list[tuple[int, int]], _until_offset: int) -> None:
        """Does nothing: librdkafka leaves out aborted records."""

    def skip(self) -> None:
        self.seek(self.position + 1)

    def move(self, _native: Any) -> None:
        """Does nothing: remote readers do not use the attachment."""

    def close(self) -> None:
        self._records.close_reader(self)


class RemoteRecords:
    """See the module."""

    def __init__(self, settings: Settings, isolation_level: int) -> None:
        self.lock = threading.RLock()  # see stop()
        self._metadata: Any = None
        self._notify: Callable[[], None] = lambda: None
        self.records_read = 0
        self._config = {key: value for key, value in settings.rdkafka.items() if key not in _EXCLUDED_KEYS}
        self._config |= _FIXED_KEYS | {"isolation.level": "read_committed" if isolation_level else "read_uncommitted"}
        self._has_work = threading.Condition(self.lock)
        self._open_readers: set[RemoteReader] = set()
        # (reader, its serial, start offset or -1 to close)
        self._requests: deque[tuple[RemoteReader, int, int]] = deque()
        # used only by the thread: (topic, partition) -> (reader, serial of its last request carried out)
        self._readers: dict[tuple[str, int], tuple[RemoteReader, int]] = {}
        self._thread: threading.Thread | None = None
        self._closed = self._failed = False

    def attach(self, notify: Callable[[], None], metadata: Any) -> None:
        """`notify()` is called, in any thread, when a reader has records or a problem. `metadata` has the
        addresses of brokers that the application's bootstrap servers may not include.
        """
        self._notify, self._metadata = notify, metadata

    # -- the consumer's thread ---------------------------------------------------------------------

    def open(self, topic: str, partition: int, offset: int) -> RemoteReader:
        reader = RemoteReader(self, topic, partition, offset)
        self.begin(reader, offset)
        return reader

    def begin(self, reader: RemoteReader, offset: int) -> None:
        """Makes the reader continue at `offset`; drops its buffered records."""
        with self.lock:
            reader.serial += 1
            reader.messages.clear()
            reader.end, reader.problem, reader.position = -1, _FAILED if self._failed else None, offset
            self._open_readers.add(reader)
            self._request(reader, offset)
        if self._failed:
            self._notify()

    def close_reader(self, reader: RemoteReader) -> None:
        with self.lock:
            reader.serial += 1
            reader.messages.clear()
            reader.end = -1
            self._open_readers.discard(reader)
            self._request(reader, -1)

    def take(self, reader: RemoteReader, records_max: int) -> RecordBatchView | None:
        """Returns buffered records of the reader; None: there are none."""
        with self.lock:
            messages = [reader.messages.popleft() for _ in range(min(records_max, len(reader.messages)))]
            if messages:
                reader.position = messages[-1].offset() + 1
                self.records_read += len(messages)
            elif reader.end > reader.position:
                reader.position = reader.end
            if reader.is_paused and len(reader.messages) <= AHEAD_RECORDS // 2:
                self._has_work.notify()
        return RecordBatchView.from_messages(reader.topic, reader.partition, messages) if messages else None

    def stop(self) -> None:
        """Makes the thread end soon; does not wait for that. Any thread may call this, even the one
        that is to end, and even while it holds the lock: the garbage collector may run in that
        thread and collect the consumer.
        """
        with self.lock:
            self._closed = True
            self._has_work.notify()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _request(self, reader: RemoteReader, offset: int) -> None:
        if self._failed:
            return
        self._requests.append((reader, reader.serial, offset))
        self._has_work.notify()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="mqd-remote-records", daemon=True)
            self._thread.start()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        consumer: Any = None
        try:
            consumer = self._make_consumer()
            while self._carry_out(consumer):
                messages = consumer.consume(CONSUME_RECORDS_MAX, POLL_S)
                if messages:
                    self._distribute(messages)
                    self._pause(consumer)
        # a bug in mqd: fails the readers; otherwise the application would wait forever without an error
        except Exception:
            _log.exception("partitions on other hosts are no longer read")
            self._fail_all()
        finally:
            if consumer is not None:
                consumer.close()

    def _make_consumer(self) -> Any:
        brokers = self._metadata.cluster.brokers.values() if self._metadata is not None else ()
        servers = [str(self._config.get("bootstrap.servers") or ""), *(f"{host}:{port}" for host, port in brokers)]
        return confluent_kafka.Consumer({**self._config, "bootstrap.servers": ",".join(filter(None, servers))})

    def _carry_out(self, consumer: Any) -> bool:
        """Carries out requests of readers; waits while there is nothing to do. Returns False when closed."""
        while True:
            with self.lock:
                while not self._closed and not self._requests and not self._readers:
                    self._has_work.wait()
                if self._closed:
                    return False
                requested, self._requests = list(self._requests), deque()
                resumed = [
                    reader
                    for reader, _ in self._readers.values()
                    if reader.is_paused and len(reader.messages) <= AHEAD_RECORDS // 2
                ]
            for reader, serial, offset in requested:
                self._start_or_end(consumer, reader, serial, offset)
            for reader in resumed:
                reader.is_paused = False
                if self._readers.get((reader.topic, reader.partition), (None, 0))[0] is reader:
                    consumer.resume([confluent_kafka.TopicPartition(reader.topic, reader.partition)])
            if self._readers:
                return True

    def _start_or_end(self, consumer: Any, reader: RemoteReader, serial: int, offset: int) -> None:
        key = reader.topic, reader.partition
        current = self._readers.get(key)
        if offset < 0 and (current is None or current[0] is not reader):
            return  # this reader is not the partition's current one
        if current is not None:
            if current[0].is_paused:  # librdkafka would keep the pause for the next reader
                consumer.resume([confluent_kafka.TopicPartition(*key)])
            consumer.incremental_unassign([confluent_kafka.TopicPartition(*key)])
            del self._readers[key]
        if offset >= 0:
            reader.is_paused = False
            consumer.incremental_assign([confluent_kafka.TopicPartition(*key, offset)])
            self._readers[key] = reader, serial

    def _distribute(self, messages: list[Any]) -> None:
        with self.lock:
            for message in messages:
                reader, serial = self._readers.get((message.topic(), message.partition()), (None, 0))
                if reader is None or reader.serial != serial:
                    self._log_error(message.error())
                elif message.error() is None:
                    reader.messages.append(message)
                    reader.end = -1
                else:
                    self._report(reader, message)
        self._notify()

    def _report(self, reader: RemoteReader, message: Any) -> None:
        code = message.error().code()
        if code == KafkaError._PARTITION_EOF:
            reader.end = message.offset()
        else:
            reader.problem = (
                Problem("range")
                if code in _OUT_OF_RANGE
                else Problem("gone", code if code > 0 else int(ErrorCode.NOT_LEADER_OR_FOLLOWER), message.error().str())
            )

    def _log_error(self, error: Any) -> None:
        if error is not None:
            _log.debug("reading from other hosts: %s", error.str())

    def _pause(self, consumer: Any) -> None:
        full_readers = [
            reader
            for reader, _ in self._readers.values()
            if not reader.is_paused and len(reader.messages) >= AHEAD_RECORDS
        ]
        for reader in full_readers:
            reader.is_paused = True
            consumer.pause([confluent_kafka.TopicPartition(reader.topic, reader.partition)])

    def _fail_all(self) -> None:
        with self.lock:
            self._failed = True
            for reader in self._open_readers:
                reader.problem = _FAILED
        self._notify()
