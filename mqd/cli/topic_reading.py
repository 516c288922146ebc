"""Reads a topic without a consumer group: assigns partitions, starts them all in the same way, and
detects their ends.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from mqd.base.clock import now_ms
from mqd.cli.client_security import take_encryption
from mqd.cli.common import CliError, error_line
from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, base_config, metadata, note_error, recent_error, unreachable
from mqd.cli.records import Position
from mqd.client.encryption.settings import Encryption

_BATCH_MESSAGES_MAX = 1000
_POLL_TIMEOUT_S = 0.5
_OUTAGE_S = 10.0  # how long an outage lasts before it is reported


def _consumer(config: dict[str, Any], encryption: Encryption | None) -> Consumer:
    if encryption is None:
        return Consumer(config)
    from mqd.client.encryption.clients import DecryptingConsumer

    return DecryptingConsumer(config, encryption)


class Reader:
    """One consumer over some partitions of a topic. Not thread-safe."""

    def __init__(
        self, bootstrap: str, topic: str, properties: dict[str, str] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ):
        self.topic = topic
        self.timeout_s = timeout_s
        self._bootstrap = bootstrap
        # since then, all brokers have been unreachable; None: they are not known to be unreachable
        self._down_since: float | None = None
        self._outage_reported = False
        self._silent_since = time.monotonic()  # since then, no message has arrived
        properties = dict(properties or {})
        encryption = take_encryption(properties)
        config = base_config(bootstrap, properties=properties) | {
            "error_cb": self._on_error,
            "group.id": "mqd-cli",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "check.crcs": True,
        }
        self.consumer = _consumer(config | properties, encryption)
        self._has_configured_group = "group.id" in properties
        self.metadata: Any = None
        self._open_partitions: set[int] = set()
        self._until_ms: int | None = None
        self._stop_offsets: dict[int, int] = {}  # partition -> the first offset that is not shown
        self._next_offsets: dict[int, int] = {}  # partition -> offset after the last record read
        self._has_all_stops = False  # every open partition has a stop

    def _on_error(self, error: Any) -> None:
        note_error(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._down_since is None:
            self._down_since = time.monotonic()

    def _check_connection(self, exit_at_end: bool) -> None:
        """Handles an outage: raises CliError if the reader waits for the end of the partitions, which
        it would not reach; otherwise reports the outage once.
        """
        now = time.monotonic()
        if self._down_since is not None:
            if now - self._down_since < _OUTAGE_S:
                return
            if exit_at_end:
                raise recent_error() or unreachable(self._bootstrap)
            if not self._outage_reported:
                error_line(f"the broker at {self._bootstrap} is no longer reachable; waiting for it")
                self._outage_reported = True
        elif exit_at_end and now - self._silent_since >= _OUTAGE_S:
            self._silent_since = now
            if (cause := recent_error()) is not None:
                raise cause
            self._check_partitions()

    def _check_partitions(self) -> None:
        """Raises CliError if the reader waits for the end of partitions that no broker serves."""
        served = metadata(self.consumer, self.topic, self.timeout_s).topics[self.topic].partitions
        offline = sorted(index for index in self._open_partitions if index not in served or served[index].leader < 0)
        if offline:
            partitions_text = f"partition{'s' if len(offline) > 1 else ''} {', '.join(map(str, offline))}"
            holders = sorted({node for index in offline if index in served for node in served[index].replicas})
            brokers_text = f"broker {' or '.join(map(str, holders))}" if holders else "the broker"
            raise CliError(
                f"topic {self.topic}: no broker serves {partitions_text}: {brokers_text} is down, or its log directory"
                " is offline; see mqd cluster status and the broker's logs. To read other partitions, use -p NUMBER"
            )

    def partitions(self, requested: list[int] | None) -> list[int]:
        """The topic's partitions, or the requested ones. Raises CliError when the topic or one
        of them does not exist.
        """
        self.metadata = metadata(self.consumer, self.topic, self.timeout_s)
        present = sorted(self.metadata.topics[self.topic].partitions)
        for index in requested or ():
            if index not in present:
                raise CliError(f"topic {self.topic} has no partition {index}; it has 0 to {len(present) - 1}")
        return sorted(set(requested)) if requested else present

    def leader(self, partition: int) -> int:
        """Node id of the partition's leader when the metadata was read."""
        return self.metadata.topics[self.topic].partitions[partition].leader

    def _offsets_at_time(self, partitions: list[int], timestamp_ms: int) -> dict[int, int]:
        requests = [TopicPartition(self.topic, index, timestamp_ms) for index in partitions]
        offsets = {}
        for response in self.consumer.offsets_for_times(requests, timeout=self.timeout_s):
            if response.error is not None:
                raise KafkaException(response.error)
            offsets[response.partition] = response.offset
        return offsets

    def _offsets(self, partitions: list[int], start: Position) -> dict[int, int]:
        if start.kind == "time":
            return self._offsets_at_time(partitions, start.value)
        if start.kind == "tail":
            offsets = {}
            for index in partitions:
                low, high = self.consumer.get_watermark_offsets(
                    TopicPartition(self.topic, index), timeout=self.timeout_s
                )
                offsets[index] = max(low, high - start.value)
            return offsets
        fixed = {"beginning": OFFSET_BEGINNING, "end": OFFSET_END, "offset": start.value}[start.kind]
        return dict.fromkeys(partitions, fixed)

    def assign(self, partitions: list[int], start: Position, stop: Position | None = None) -> None:
        """Begins at `start`. With `stop` (a time), a partition ends before its first record with
        that timestamp or a later one; without such a record, it ends once that time has passed.
        """
        offsets = self._offsets(partitions, start)
        self._open_partitions = set(partitions)
        self._until_ms = None if stop is None else stop.value
        self._find_stops()
        self.consumer.assign([TopicPartition(self.topic, index, offset) for index, offset in offsets.items()])

    def _find_stops(self) -> None:
        """Finds where each partition ends. Does this once the time of `stop` has passed, because
        records that are written afterwards have later timestamps.
        """
        if self._until_ms is None or self._has_all_stops or not self._open_partitions or now_ms() < self._until_ms:
            return
        for index, offset in self._offsets_at_time(sorted(self._open_partitions), self._until_ms).items():
            self._stop_offsets[index] = (
                offset
                if offset >= 0
                else self.consumer.get_watermark_offsets(TopicPartition(self.topic, index), timeout=self.timeout_s)[1]
            )
            if self._next_offsets.get(index, -1) >= self._stop_offsets[index]:
                self._end_partition(index)
        self._has_all_stops = True

    def batches(
        self, count: int | None, exit_at_end: bool, on_end: Callable[[int, int, bool], None] | None = None
    ) -> Iterator[list[Any]]:
        """Yields messages as they arrive, a few at a time, and [] at intervals while none arrive. Ends
        after `count` messages; with `exit_at_end`, once every partition is at its end; or at
        assign()'s `stop`. Calls on_end(partition, offset, is_last) at each partition's end;
        `is_last`: all partitions are now at their ends, so reading ends. Raises KafkaException,
        CliError.
        """
        remaining = count
        while (remaining is None or remaining > 0) and (
            self._open_partitions or not (exit_at_end or self._until_ms is not None)
        ):
            first = self.consumer.poll(_POLL_TIMEOUT_S)
            if first is None:
                self._check_connection(exit_at_end or self._has_all_stops)
                yield []
                self._find_stops()
                continue
            self._down_since, self._outage_reported, self._silent_since = None, False, time.monotonic()
            batch: list[Any] = []
            try:
                for message in [
                    first,
                    *self.consumer.consume(
                        _BATCH_MESSAGES_MAX if remaining is None else max(0, min(_BATCH_MESSAGES_MAX, remaining - 1)),
                        timeout=0,
                    ),
                ]:
                    if self._handle(message, exit_at_end, on_end):
                        batch.append(message)
            except KafkaException:
                yield batch  # messages before the error
                raise
            remaining = None if remaining is None else remaining - len(batch)
            yield batch
            self._find_stops()

    def _end_partition(self, partition: int) -> None:
        """Stops reading the partition: its later messages would restart the wait for messages, and
        so hide that another partition is silent.
        """
        self._open_partitions.discard(partition)
        self.consumer.pause([TopicPartition(self.topic, partition)])

    def _handle(self, message: Any, exit_at_end: bool, on_end: Callable[[int, int, bool], None] | None) -> bool:
        """Returns whether batches() should yield the message. False for events, and for records at
        or after a stop.
        """
        error, partition = message.error(), message.partition()
        if error is None:
            self._next_offsets[partition] = message.offset() + 1
            if self._until_ms is not None and message.timestamp()[1] >= self._until_ms:
                self._stop_offsets[partition] = min(
                    message.offset(), self._stop_offsets.get(partition, message.offset())
                )
            stop = self._stop_offsets.get(partition)
            if stop is not None and message.offset() >= stop - 1:
                self._end_partition(partition)
            return stop is None or message.offset() < stop
        if error.code() == KafkaError._PARTITION_EOF:
            self._next_offsets[partition] = message.offset()
            if exit_at_end or partition in self._stop_offsets:
                self._end_partition(partition)
            if on_end is not None:
                on_end(partition, message.offset(), exit_at_end and not self._open_partitions)
            return False
        if error.retriable() or error.code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            return False  # the client retries by itself
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and not self._has_configured_group:
            return False  # librdkafka looks up every consumer's group; this consumer does not use it
        raise KafkaException(error)

    def close(self) -> None:
        self.consumer.close()
