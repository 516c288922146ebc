"""Sends record batches to the leaders of their partitions, idempotently or as a child of a joint
transaction: through shared memory to a broker of this host, over TCP to others.

    S1  the batches of a partition are sent in order, one at a time; a repeated batch keeps its
        sequence, so the broker writes it once
    S2  a batch is done when its leader has acknowledged it; after flush() all are, or an exception
        was raised
    S3  after a lost response, a moved leader or a broker restart the batch is retried, until
        delivery.timeout.ms after it was first sent; then MqdWriteError names topic, partition and
        the last problem
    S4  memory: at most QUEUED_BYTES_MAX plus one round of batches are queued
    S5  batches that were assigned to a partition are sent to its last leader, which still accepts
        them, even if the topic no longer lists the partition (retired and empty); no new rows are
        assigned to it
    S6  a silent leader delays only its own partitions, for kafka.request.timeout.ms or, if that
        is shorter, delivery.timeout.ms
Concurrency: one task. Connections outlive the task (a Spark worker runs many), except those with an
outstanding response.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from mqd.protocol import decode_response
from mqd.protocol.errors import ERRORS, ErrorCode, ProtocolError, is_retriable
from mqd.protocol.messages import MetadataRequest, ProduceRequest
from mqd.spark.encoding import Batch, MqdWriteError
from mqd.spark.local_link import FRAME_BYTES_MAX, LocalLink, find
from mqd.spark.sink_options import SinkOptions
from mqd.spark.wire import BrokerConnection, BrokerError, Cluster, Topic

# version 12: topics by name; the first Produce to a partition adds the partition to the transaction
PRODUCE, VERSION = 0, 12
QUEUED_BYTES_MAX = 8 << 20
_HEAD_BYTES_MAX = 1 << 18  # size of a request without its batches
_LARGE_BYTES = 1 << 20  # a larger request may have exceeded the broker's socket.request.max.bytes
BROKER_TIMEOUT_MS = 30_000
METADATA_AGE_S = 300.0
RETRY_S = 0.05
POLL_S = 0.002
_ABSENT_S = 5.0  # how long a topic may take to appear after its creation was requested
_WRITTEN_CODES = frozenset((0, int(ErrorCode.DUPLICATE_SEQUENCE_NUMBER)))
_FENCED_CODES = frozenset(
    (
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.INVALID_TXN_STATE,
    )
)
_MOVED_CODES = frozenset(
    (
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
    )
)
_ABSENT_CODES = frozenset((ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.LEADER_NOT_AVAILABLE))

Key = tuple[str, int]
# a Spark process runs many queries one after the other, and each broker of this host costs
# local_link.MEMORY_BYTES
CONNECTIONS_MAX = 4
# by process id and all settings, because timeouts differ by query; the most recently used is last
_connections: dict[tuple[int, bytes], Connections] = {}


class Connections:
    """The cluster's metadata, and the links to each leader, used for Produce only."""

    def __init__(self, options: SinkOptions) -> None:
        self.cluster = Cluster(options.kafka)
        self._links: dict[int, BrokerConnection] = {}
        self._local: dict[int, LocalLink | None] = {}  # None: this broker cannot be reached through shared memory
        self.local_request_count = 0  # requests that went through shared memory
        self.producer_count = 0  # open producers that use this object

    def link(self, node_id: int, size_bytes: int) -> BrokerConnection | LocalLink:
        """Returns the link for a request of `size_bytes`: through shared memory if possible,
        otherwise over TCP. Raises OSError, MqdWriteError.
        """
        if node_id not in self._local:
            address = self.cluster.brokers.get(node_id)
            self._local[node_id] = find(*address, self.cluster.settings) if address is not None else None
        local = self._local[node_id]
        if local is not None and size_bytes <= FRAME_BYTES_MAX - _HEAD_BYTES_MAX:
            self.local_request_count += 1
            return local
        link = self._links.get(node_id)
        if link is None:
            link = self._links[node_id] = self.cluster.new_connection(node_id)
        return link

    def drop(self, node_id: int) -> None:
        """Closes the links to this broker, over TCP and through shared memory."""
        for link in (self._links.pop(node_id, None), self._local.pop(node_id, None)):
            if link is not None:
                link.close()

    def close(self) -> None:
        """Closes all links. A later call for a link opens a new one."""
        for node_id in {*self._links, *self._local}:
            self.drop(node_id)
        self.cluster.close()


def connections(options: SinkOptions) -> Connections:
    """Returns this process's connections for these options, never those of a parent process. If
    there are more than CONNECTIONS_MAX, closes the least recently used, unless they are in use.
    """
    process = os.getpid()
    key = (process, msgspec.json.encode(options.kafka, order="sorted"))
    existing = _connections.pop(key, None)
    chosen = _connections[key] = existing or Connections(options)
    own_keys = [key for key in _connections if key[0] == process]
    for old_key in own_keys[:-CONNECTIONS_MAX]:
        if not _connections[old_key].producer_count:
            _connections.pop(old_key).close()
    return chosen


class _InFlight:
    """A request whose response has not arrived. `deadline`: by the monotonic clock."""

    __slots__ = ("batches", "correlation_id", "deadline", "link", "node_id", "version")

    def __init__(
        self,
        node_id: int,
        link: BrokerConnection | LocalLink,
        version: int,
        correlation_id: int,
        batches: list[Batch],
        deadline: float,
    ) -> None:
        self.node_id, self.link, self.version = node_id, link, version
        self.correlation_id, self.batches, self.deadline = correlation_id, batches, deadline


class Producer:
    """`identity`: producer id and epoch. They belong to a child of the joint transaction
    `transactional_id`, or, if that is None, to an idempotent producer.
    """

    def __init__(self, options: SinkOptions, identity: tuple[int, int], transactional_id: str | None) -> None:
        self._options, self._identity, self._transactional_id = options, identity, transactional_id
        self._connections = connections(options)
        self._connections.producer_count += 1
        self._closed = False
        self._topics: dict[str, Topic] = {}
        # topic id, and the last known leader of each partition that the topic has ever listed
        self._leaders: dict[str, tuple[bytes, dict[int, int]]] = {}
        self._metadata_requested_at = 0.0
        self._queues: dict[Key, collections.deque[Batch]] = {}
        self._next_sequence: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}  # time of the next attempt, after a failed one
        self._flights: dict[int, _InFlight] = {}  # by node id
        self._queued_bytes = 0
        self.record_count = self.byte_count = 0

    # -- topics ------------------------------------------------------------------------------------

    def partition_count(self, name: str) -> int:
        return len(self._topic(name).leaders)

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None or topic.error or time.monotonic() - self._metadata_requested_at > METADATA_AGE_S:
            self._refresh([*self._topics, name])
            topic = self._topics[name]
        if topic.error:
            topic = self._await_topic(name)
        return topic

    def _refresh(self, names: Iterable[str]) -> None:
        cluster = self._connections.cluster
        metadata = cluster.with_retries("metadata of " + ", ".join(names), lambda: cluster.metadata(names))
        for topic in metadata.topics.values():
            self._learn(topic)
        self._metadata_requested_at = time.monotonic()

    def _learn(self, topic: Topic) -> None:
        self._topics[topic.name] = topic
        if not topic.error:
            topic_id, leaders = self._leaders.get(topic.name, (topic.topic_id, {}))
            # keeps the leaders of partitions that the topic no longer lists (S5)
            self._leaders[topic.name] = topic.topic_id, (leaders if topic_id == topic.topic_id else {}) | topic.leaders

    def _leader(self, key: Key) -> int:
        """Returns the leader's node id; -1: the partition has no leader at present."""
        self._topic(key[0])
        return self._leaders[key[0]][1].get(key[1], -1)

    def _await_topic(self, name: str) -> Topic:
        """Waits until the topic exists. The metadata request lets the broker create it, if
        auto-creation is enabled. Raises MqdWriteError.
        """
        cluster = self._connections.cluster
        deadline = time.monotonic() + min(_ABSENT_S, self._options.topic_timeout_s)
        request = MetadataRequest(
            topics=[MetadataRequest.Topic(name=name, topic_id=bytes(16))], allow_auto_topic_creation=True
        )
        while True:
            cluster.with_retries(f"metadata of {name}", lambda: cluster.any_connection().request(request))
            self._refresh([name])
            topic = self._topics[name]
            if not topic.error and topic.leaders:
                return topic
            if topic.error not in _ABSENT_CODES or time.monotonic() >= deadline:
                error = ERRORS.get(topic.error)
                remedy = (
                    f"create it first: mqd topic create {name}"
                    if topic.error in _ABSENT_CODES
                    else "see the broker's log"
                )
                raise MqdWriteError(
                    f"topic {name} cannot be written: {error.message if error else topic.error}"
                    f" ({error.name if error else 'unknown error'}); {remedy}"
                )
            time.sleep(RETRY_S)  # there is no notification when a topic is created

    # -- sending -----------------------------------------------------------------------------------

    def send(self, batches: Iterable[Batch]) -> None:
        """Queues batches; returns when there is space for more. Raises MqdWriteError."""
        for batch in batches:
            self._queues.setdefault((batch.topic, batch.partition), collections.deque()).append(batch)
            self._queued_bytes += len(batch.data)
            while self._queued_bytes > QUEUED_BYTES_MAX:
                self._step()
        self._send_due()

    def flush(self) -> None:
        """Returns when everything is acknowledged. Raises MqdWriteError."""
        while self._queues:
            self._step()

    def close(self) -> None:
        """Closes connections with an outstanding response: they cannot be used again."""
        if self._closed:
            return
        self._closed = True
        self._connections.producer_count -= 1
        for flight in self._flights.values():
            self._connections.drop(flight.node_id)
        self._flights = {}

    def _step(self) -> None:
        """Sends what is due, then waits for one response, or for the next attempt."""
        self._send_due()
        if self._flights:
            self._complete(self._wait_for_flight())
        else:
            now = time.monotonic()
            wait = min((self._not_before.get(key, now) for key in self._queues), default=now) - now
            time.sleep(max(wait, 0.001))  # every partition waits for its next attempt
            self._refresh_leaders()

    def _wait_for_flight(self) -> _InFlight:
        """Returns a flight that has its response or has timed out (S6)."""
        flights = collections.deque(self._flights.values())
        while True:
            for flight in flights:
                if _has_response(flight, 0) or time.monotonic() >= flight.deadline:
                    return flight
            remaining_s = min(flight.deadline for flight in flights) - time.monotonic()
            _has_response(flights[0], max(0, remaining_s if len(flights) == 1 else min(remaining_s, POLL_S)))
            flights.rotate()

    def _send_due(self) -> None:
        """Sends a request to every leader that has none in flight."""
        now = time.monotonic()
        by_node: dict[int, list[Batch]] = {}
        busy = {(batch.topic, batch.partition) for flight in self._flights.values() for batch in flight.batches}
        due = [key for key in self._queues if key not in busy and self._not_before.get(key, 0.0) <= now]
        if now - self._metadata_requested_at >= RETRY_S and any(self._leader(key) < 0 for key in due):
            self._refresh_leaders()  # not left to _step(), which does it only while nothing is in flight
        for key in due:
            batch, leader = self._queues[key][0], self._leader(key)
            if leader < 0:
                self._retry_later(key, batch, "it has no leader")
            elif leader not in self._flights:
                by_node.setdefault(leader, []).append(batch)
        for node_id, batches in by_node.items():
            self._request(node_id, batches)

    def _request(self, node_id: int, batches: list[Batch]) -> None:
        chosen, size = [], 0
        for batch in batches:
            if size and size + len(batch.data) > self._options.request_bytes:
                break
            chosen.append(batch)
            size += len(batch.data)
            self._prepare(batch)
        topics: dict[str, list[Any]] = {}
        for batch in chosen:
            topics.setdefault(batch.topic, []).append(
                ProduceRequest.PartitionData(index=batch.partition, records=batch.data)  # type: ignore[arg-type]  # not copied
            )
        data = [ProduceRequest.TopicData(name=name, partition_data=partitions) for name, partitions in topics.items()]
        request = ProduceRequest(
            transactional_id=self._transactional_id,
            acks=self._options.acks,
            timeout_ms=BROKER_TIMEOUT_MS,
            topic_data=data,
        )
        try:
            link = self._connections.link(node_id, size)
            version = link.pick(PRODUCE, VERSION)
            if self._transactional_id is not None and version < VERSION:
                raise MqdWriteError(
                    f"the broker {link.host}:{link.port} does not support transactions of version 2 (KIP-890): set the"
                    " option delivery to at-least-once"
                )
            correlation_id, settings = link.send(request, version), self._options
            deadline = min(
                time.monotonic() + settings.kafka.request_timeout_s,
                min(batch.first_sent_s for batch in chosen) + settings.delivery_timeout_s,
            )
            self._flights[node_id] = _InFlight(node_id, link, version, correlation_id, chosen, deadline)
        except OSError as error:
            self._on_connection_lost(node_id, chosen, str(error))

    def _prepare(self, batch: Batch) -> None:
        if batch.sequence < 0:
            key = (batch.topic, batch.partition)
            sequence = self._next_sequence.get(key, 0)
            self._next_sequence[key] = (sequence + batch.count) & 0x7FFFFFFF
            batch.stamp(*self._identity, sequence, self._transactional_id is not None)
            batch.first_sent_s = time.monotonic()

    def _complete(self, flight: _InFlight) -> None:
        try:
            if not _has_response(flight, 0):
                host, port = flight.link.host, flight.link.port
                # the metadata connection may use this broker
                self._connections.cluster.prefer_other_brokers((host, port))
                raise TimeoutError(f"broker {host}:{port} has not responded (kafka.request.timeout.ms)")
            frame = flight.link.receive()
            correlation_id, response = decode_response(frame, PRODUCE, flight.version)
            if correlation_id != flight.correlation_id:
                raise ConnectionError(
                    f"a response to request {correlation_id} where {flight.correlation_id} was expected"
                )
        except (OSError, ProtocolError) as error:
            del self._flights[flight.node_id]
            self._on_connection_lost(flight.node_id, flight.batches, str(error))
            return
        del self._flights[flight.node_id]
        responses = {
            (topic.name, partition.index): partition
            for topic in response.responses
            for partition in topic.partition_responses
        }
        moved = False
        for batch in flight.batches:
            result = responses.get((batch.topic, batch.partition))
            code = result.error_code if result is not None else int(ErrorCode.UNKNOWN_SERVER_ERROR)
            moved |= code in _MOVED_CODES
            self._handle_result(
                batch, code, result.error_message if result is not None else "it is missing in the broker's response"
            )
        if moved:
            self._refresh_leaders()

    def _handle_result(self, batch: Batch, code: int, message: str | None) -> None:
        key = (batch.topic, batch.partition)
        if code in _WRITTEN_CODES:
            self._remove_first(key)
            self.record_count += batch.count
            self.byte_count += len(batch.data)
            return
        error = ERRORS.get(code)
        text = f"{message or (error.message if error else 'unknown error')} ({error.name if error else code})"
        if code == ErrorCode.MESSAGE_TOO_LARGE and batch.count > 1:
            self._halve(key, batch)
        elif code == ErrorCode.MESSAGE_TOO_LARGE:
            raise MqdWriteError(
                f"topic {batch.topic}, partition {batch.partition}: a row of {len(batch.data)} bytes is larger than"
                f" the topic allows: {text}. Raise its max.message.bytes (mqd config set topic/{batch.topic}"
                " max.message.bytes=...), or write smaller rows"
            )
        elif code in _FENCED_CODES:
            raise MqdWriteError(
                f"topic {batch.topic}, partition {batch.partition}: this task's part of the transaction has ended:"
                f" {text}. Another run of the query has replaced this one, the batch was committed or aborted"
                " meanwhile, or the task had no activity for kafka.transaction.timeout.ms"
            )
        elif is_retriable(code):
            self._retry_later(key, batch, text)
        else:
            raise MqdWriteError(
                f"topic {batch.topic}, partition {batch.partition}: {batch.count} rows are refused: {text}"
            )

    def _remove_first(self, key: Key) -> None:
        queue = self._queues[key]
        self._queued_bytes -= len(queue.popleft().data)
        self._not_before.pop(key, None)
        if not queue:
            del self._queues[key]

    def _halve(self, key: Key, batch: Batch) -> None:
        """Replaces a batch with its halves. None of it was written, so the halves reuse its
        sequences.
        """
        queue = self._queues[key]
        queue.popleft()
        self._queued_bytes -= len(batch.data)
        sequence = batch.sequence
        for half in reversed(halves := batch.split_in_half(self._options.compression)):
            queue.appendleft(half)
            self._queued_bytes += len(half.data)
        for half in halves:
            half.stamp(*self._identity, sequence, self._transactional_id is not None)
            half.first_sent_s = batch.first_sent_s
            sequence = (sequence + half.count) & 0x7FFFFFFF

    # -- retries -----------------------------------------------------------------------------------

    def _retry_later(self, key: Key, batch: Batch, problem: str) -> None:
        """Raises MqdWriteError after delivery.timeout.ms."""
        now = time.monotonic()
        if batch.first_sent_s == 0.0:
            batch.first_sent_s = now
        if now >= batch.first_sent_s + self._options.delivery_timeout_s:
            raise MqdWriteError(
                f"topic {key[0]}, partition {key[1]}: {batch.count} rows were not acknowledged within"
                f" {self._options.delivery_timeout_s:g} s (kafka.delivery.timeout.ms): {problem}"
            )
        self._not_before[key] = now + RETRY_S

    def _on_connection_lost(self, node_id: int, batches: list[Batch], problem: str) -> None:
        self._connections.drop(node_id)
        size = sum(len(batch.data) for batch in batches)
        if size > _LARGE_BYTES:
            problem += (
                f"; the request had {size} bytes, perhaps more than the broker's socket.request.max.bytes"
                " (kafka.max.request.size limits a request, but a single row may be larger)"
            )
        for batch in batches:
            self._retry_later((batch.topic, batch.partition), batch, problem)
        self._refresh_leaders()

    def _refresh_leaders(self) -> None:
        """Looks up the leaders; if that fails, the next attempt queries another broker."""
        names = sorted({name for name, _ in self._queues})
        cluster = self._connections.cluster
        try:
            topics = cluster.metadata(names).topics
        except (OSError, BrokerError):
            cluster.close()
            cluster.prefer_other_brokers()
            return
        for topic in topics.values():
            if not topic.error:
                self._learn(topic)
        self._metadata_requested_at = time.monotonic()


def _has_response(flight: _InFlight, seconds: float) -> bool:
    """Whether there is a response, or the connection has ended, which receive() reports."""
    try:
        return flight.link.ready(seconds)
    except OSError:
        return True
