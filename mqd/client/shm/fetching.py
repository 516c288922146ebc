"""Fetches records for a consumer: finds the start of each partition, chooses the partition to read
next, and sleeps while there is nothing to read.

Records are read from mapped segments by readers (reading.py) without a request. When everything is
read, one Fetch asks the broker for positions only, of all partitions that are read to their end
(parking.py). The broker responds when one of them has grown. This Fetch can wait for a long time,
and would delay the responses to later requests, so it has its own connection (`data`).

    F1  at most one Fetch for positions is in flight. `_covered` lists its partitions; a caller that
        also waits for other partitions waits for at most UNCOVERED_WAIT_S
    F2  a partition's start is looked up in the background: the group's committed offset, else
        auto.offset.reset; a response is ignored if the partition's `serial` has changed since the
        request
    F3  an error of a partition is reported once, until it changes, and the operation is retried
    F4  when no record can be read after the response to a Fetch, a pause follows
        (PAUSE_MIN_S..PAUSE_MAX_S), so that errors cannot cause a busy loop
    F5  a partition without a usable replica on this host is read from its leader
        (remote_reading.py) until its replicas or its in-sync set change; then this host's replica
        is tried first again. An in-sync replica on this host is read up to its own high watermark,
        even if the leader is on another host (KIP-392)
    F6  an offset belongs to a topic id. When a topic was deleted and created again with the same name,
        the consumer continues at the offset of a seek() or an assignment if nothing was read from
        there yet, else at the offset that the group has committed since, else by
        auto.offset.reset. A reader does not detect the change if its partition is paused or read by
        name from another host; then the change is found in the metadata, which is requested when an
        offset is out of range
Concurrency: the application's thread, except for the inbox, to which another thread adds responses.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from mqd.client import offsets, requests
from mqd.client.group.coordinator import CoordinatorLookup
from mqd.client.messages import (
    OFFSET_BEGINNING,
    OFFSET_END,
    KafkaError,
    KafkaException,
    Message,
    broker_error,
    local_error,
)
from mqd.client.offsets import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from mqd.client.shm.consumer_config import EARLIEST, ERROR, ConsumerConfig
from mqd.client.shm.inbox import Inbox
from mqd.client.shm.parking import PositionSession
from mqd.client.shm.partitions import AssignedPartition, AssignedPartitions, Phase
from mqd.protocol.errors import ErrorCode

PARK_S = 10.0
POSITIONS_MAX = 10_000  # in one Fetch, each at most 60 bytes
PARTITIONS_PER_REQUEST_MAX = 5_000
UNCOVERED_WAIT_S = 0.05
PAUSE_MIN_S, PAUSE_MAX_S = 0.001, 0.1
# how soon an unknown topic or partition is looked up again: before and after it is reported
UNKNOWN_RETRY_S, REPORTED_RETRY_S = 0.1, 0.5
SHORT_RETRY_S = 0.05  # a leader is being elected, or a replica here is slightly behind its leader
UNKNOWN_REPORT_S = 5.0  # a busy broker may need this long to learn of a new topic or partition
OUT_OF_RANGE = int(ErrorCode.OFFSET_OUT_OF_RANGE)
NO_REPLICA = int(ErrorCode.REPLICA_NOT_AVAILABLE)  # no replica here, or one without the required records
UNKNOWN = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID})
_RETRIED = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
    }
)
_INFINITY = float("inf")


class Fetcher:
    """`open_reader(native, part, offset)` returns a reader of reading.py; `remote` opens readers of
    remote_reading.py. Attachments: `control` for requests, `data` for the Fetch that waits.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        control: Any,
        coordinator: CoordinatorLookup,
        data: Any,
        inbox: Inbox,
        parts: AssignedPartitions,
        open_reader: Callable[..., Any],
        remote: Any,
    ) -> None:
        self._coordinator = coordinator
        self._remote = remote
        self._config, self._control, self._data = config, control, data
        self._inbox, self._parts, self._open_reader = inbox, parts, open_reader
        # called when a partition's topic was recreated (F6)
        self.on_restarted: Callable[[AssignedPartition], None] = lambda part: None
        self.events: deque[Message] = deque()  # errors and ends of partitions, for the application
        # the positions in the Fetch in flight (F1): (topic id, partition) -> offset; None: none in flight
        self._covered: dict[tuple[bytes, int], int] | None = None
        self._fetch_serial = 0
        self._session = PositionSession(config.isolation_level, config["client.rack"])
        self._generation = data.generation
        self._pause_s = 0.0
        self._pause_until = 0.0
        self._starting = False  # some partition is not ACTIVE
        self._chunks_read = 0

    # -- starting ----------------------------------------------------------------------------------

    def start(self, parts: Iterable[AssignedPartition]) -> None:
        """Starts reading each partition at its `start`: an offset, or OFFSET_BEGINNING, OFFSET_END,
        OFFSET_STORED, OFFSET_INVALID.
        """
        for part in parts:
            part.serial += 1
            part.phase = Phase.TOPIC
            self._starting = True
        self.advance()

    def advance(self) -> None:
        """Takes the next step for each starting partition, where possible."""
        if not self._starting:
            return
        now = time.monotonic()
        needing_committed: list[AssignedPartition] = []
        needing_list: list[AssignedPartition] = []
        self._starting = False
        for part in self._parts:
            if part.phase is Phase.FAILED and now >= part.retry_at:
                part.phase = Phase.TOPIC
            if part.phase is Phase.TOPIC:
                self._find_topic(part, now)
            if part.phase is Phase.COMMITTED:
                needing_committed.append(part)
            elif part.phase is Phase.LIST:
                needing_list.append(part)
            self._starting = self._starting or part.phase is not Phase.ACTIVE
        for begin in range(0, len(needing_committed), PARTITIONS_PER_REQUEST_MAX):
            self._request_committed(needing_committed[begin : begin + PARTITIONS_PER_REQUEST_MAX])
        for begin in range(0, len(needing_list), PARTITIONS_PER_REQUEST_MAX):
            self._request_list_offsets(needing_list[begin : begin + PARTITIONS_PER_REQUEST_MAX])

    @property
    def due(self) -> float:
        """The time at which advance() must be called next even if no response arrives."""
        if not self._starting:
            return _INFINITY
        return min((part.retry_at for part in self._parts if part.phase is Phase.FAILED), default=_INFINITY)

    def _find_topic(self, part: AssignedPartition, now: float) -> None:
        info = self._control.metadata.topics.get(part.topic)
        if info is None or info.error or part.index >= info.partition_count:
            if part.unknown_since is None:
                part.unknown_since = now
            elif now >= part.unknown_since + UNKNOWN_REPORT_S:
                problem = offsets.unknown_partition_error(part.topic, part.index, info)
                self._report(part, problem or local_error(KafkaError._UNKNOWN_PARTITION))
            part.retry_at = now + (UNKNOWN_RETRY_S if part.reported_error == 0 else REPORTED_RETRY_S)
            part.phase = Phase.FAILED
            self._control.metadata.refresh([part.topic], bool(self._config["allow.auto.create.topics"]))
            return
        part.unknown_since = None
        if part.topic_id not in (None, info.topic_id):
            self._restart(part)
        part.topic_id = info.topic_id
        if part.start >= 0:
            self._activate(part, part.start)
        elif part.start in (OFFSET_BEGINNING, OFFSET_END):
            part.timestamp = EARLIEST_TIMESTAMP if part.start == OFFSET_BEGINNING else LATEST_TIMESTAMP
            part.phase = Phase.LIST
        else:
            part.phase = Phase.COMMITTED

    def _restart(self, part: AssignedPartition) -> None:
        """Resets a partition whose topic was recreated (F6)."""
        self._close_reader(part)
        self.on_restarted(part)
        part.restart()

    def _activate(self, part: AssignedPartition, offset: int) -> None:
        part.fetched = offset
        part.eof_reported_at = -1
        try:
            if part.remote_replicas is not None and part.remote_replicas != self._current_replicas(part):
                self._close_reader(part)
            if part.reader is None and part.remote_replicas is not None:
                part.reader = self._remote.open(part.topic, part.index, offset)
            elif part.reader is None:
                with self._data.lock:  # so that `native` is not closed while it is used
                    part.reader = self._open_reader(self._data.native, part, offset)
            else:
                part.reader.seek(offset)
        except OSError as problem:
            part.start = offset
            self._retry_later(part, local_error(KafkaError._TRANSPORT, str(problem), retriable=True))
            return
        part.phase, part.is_unknown = Phase.ACTIVE, False

    def _current_replicas(self, part: AssignedPartition) -> object:
        info = self._control.metadata.topics.get(part.topic)
        return (
            ()
            if info is None or part.index >= info.partition_count
            else (info.replicas[part.index], info.in_sync_replicas[part.index])
        )

    def _close_reader(self, part: AssignedPartition) -> None:
        if part.reader is not None:
            part.reader.close()
        part.reader = part.remote_replicas = None

    def _read_remotely(self, part: AssignedPartition) -> None:
        self._close_reader(part)
        part.remote_replicas = self._current_replicas(part)
        self._activate(part, part.fetched)

    def on_metadata(self) -> None:
        """Handles new metadata: a partition that is read from another host may have a replica here now."""
        for part in self._parts:
            if part.phase is not Phase.ACTIVE or (part.remote_replicas is None and not part.paused):
                continue
            info = self._control.metadata.topics.get(part.topic)
            # the reader requests by name, or is not used, so it cannot detect the change (F6)
            if info is not None and not info.error and info.topic_id != part.topic_id:
                part.phase, part.start, self._starting = Phase.TOPIC, part.fetched, True
            elif part.remote_replicas is not None and part.remote_replicas != self._current_replicas(part):
                self._activate(part, part.fetched)

    def _request(
        self,
        api_key: int,
        version_max: int,
        message: object,
        parts: list[AssignedPartition],
        handler: Callable[..., None],
    ) -> None:
        requested = [(part, part.serial) for part in parts]
        for part in parts:
            part.phase = Phase.REQUESTING
        version = self._control.api.pick(api_key, version_max)
        self._control.send(
            api_key,
            version,
            message,
            lambda response, error: self._inbox.put(self._take_response, handler, requested, response, error),
        )

    def _take_response(
        self,
        handler: Callable[..., None],
        requested: list[tuple[AssignedPartition, int]],
        response: Any,
        error: KafkaError | None,
    ) -> None:
        for part, serial in requested:
            if part.serial == serial and part.phase is Phase.REQUESTING:
                if error is not None:
                    self._retry_later(part, error)
                else:
                    handler(part, response)
        self.advance()

    def _request_committed(self, parts: list[AssignedPartition]) -> None:
        message = offsets.offset_fetch_request(
            self._config["group.id"], [part.key for part in parts], bool(self._config.isolation_level)
        )
        requested = [(part, part.serial) for part in parts]
        for part in parts:
            part.phase = Phase.REQUESTING
        version = self._control.api.pick(requests.OFFSET_FETCH, offsets.OFFSET_FETCH_VERSION_MAX)
        self._coordinator.when_known(
            lambda: self._control.send(
                requests.OFFSET_FETCH,
                version,
                message,
                lambda response, error: self._inbox.put(
                    self._take_response, self._on_committed, requested, response, error
                ),
            )
        )

    def _on_committed(self, part: AssignedPartition, response: Any) -> None:
        code, committed = offsets.decode_offset_fetch_response(response).get(
            part.key, (int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), None)
        )
        if code in offsets.COORDINATOR_UNAVAILABLE:
            self._coordinator.look_up()
        if code:
            self._retry_later(
                part,
                broker_error(code, "committed offset"),
                quietly=code in offsets.COORDINATOR_UNAVAILABLE or code == ErrorCode.UNSTABLE_OFFSET_COMMIT,
            )
        elif committed is not None and committed.offset >= 0:
            part.committed = committed.offset
            self._activate(part, committed.offset)
        else:
            self.reset(part, None)

    def reset(self, part: AssignedPartition, cause: KafkaError | None) -> None:
        """Applies auto.offset.reset, because nothing is committed (no `cause`) or the requested offset is
        out of range (`cause`).
        """
        if self._config.offset_reset == ERROR:
            reason = (
                f"no committed offset and auto.offset.reset=error: {part.topic} [{part.index}]"
                if cause is None
                else f"{cause.str()}: {part.topic} [{part.index}]"
            )
            self._fail(part, local_error(KafkaError._AUTO_OFFSET_RESET, reason))
            part.retry_at = _INFINITY  # until a seek or another assignment
            return
        part.serial += 1
        part.timestamp = EARLIEST_TIMESTAMP if self._config.offset_reset == EARLIEST else LATEST_TIMESTAMP
        part.phase, self._starting = Phase.LIST, True

    def _request_list_offsets(self, parts: list[AssignedPartition]) -> None:
        timeout_ms = int(self._config["socket.timeout.ms"])
        message = offsets.list_offsets_request(
            {part.key: part.timestamp for part in parts}, self._config.isolation_level, timeout_ms
        )
        self._request(requests.LIST_OFFSETS, 1 << 14, message, parts, self._on_list_offsets)

    def _on_list_offsets(self, part: AssignedPartition, response: Any) -> None:
        code, offset, _ = offsets.read_list_offsets(response).get(
            part.key, (int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), -1, -1)
        )
        if code:
            if code in UNKNOWN:  # as in _on_error: the metadata shows whether the partition is gone
                self._control.metadata.refresh([part.topic])
            self._retry_later(
                part,
                broker_error(code, "list offsets"),
                quietly=code in UNKNOWN or code in _RETRIED,
                soon=code in _RETRIED,
            )
        else:
            self._activate(part, max(offset, 0))

    def _retry_later(
        self, part: AssignedPartition, error: KafkaError, quietly: bool = True, soon: bool = False
    ) -> None:
        part.phase, self._starting = Phase.FAILED, True
        pause_s = self._config["fetch.error.backoff.ms"] / 1000
        part.retry_at = time.monotonic() + (min(pause_s, SHORT_RETRY_S) if soon else pause_s)
        if not quietly:
            self._report(part, error)

    def _fail(self, part: AssignedPartition, error: KafkaError) -> None:
        self._retry_later(part, error, quietly=False)

    def _report(self, part: AssignedPartition, error: KafkaError) -> None:
        if part.reported_error != error.code():
            part.reported_error = error.code()
            self.events.append(
                Message(part.topic, part.index, part.fetched if part.fetched >= 0 else None, error=error)
            )

    # -- reading -----------------------------------------------------------------------------------

    def read(self, records_max: int, bytes_max: int) -> tuple[AssignedPartition, int, Any] | None:
        """Returns the next chunk, as (partition, offset where the read began, records), from the
        partition that has waited longest. None: no partition has records.
        """
        if self._generation != self._data.generation:
            self._move_readers()
        for part in self._parts.turns():
            reader = part.reader
            end = reader.lag_end()
            if 0 <= end <= part.fetched:
                self._at_end(part, end)
                continue
            try:
                begin, batch = part.fetched, reader.read(records_max, bytes_max)
            except OSError as problem:
                # EPIPE: the worker has ended; ETIMEDOUT: it is late
                if problem.errno not in (errno.EPIPE, errno.ETIMEDOUT):
                    part.start = part.fetched
                    self._fail(part, local_error(KafkaError._FS, f"{part.topic} [{part.index}]: {problem}"))
                continue
            part.fetched = reader.position
            if batch is not None:
                part.reported_error, part.requested_start = 0, None
                self._pause_s = 0.0
                self._chunks_read += 1
                return part, begin, batch
            self._on_no_records(part, reader)
        return None

    def _on_no_records(self, part: AssignedPartition, reader: Any) -> None:
        """Handles a reader that returned nothing because it is at the end or has a problem."""
        problem = reader.take_problem()
        if problem is None:
            end = reader.lag_end()
            if 0 <= end <= part.fetched:
                self._at_end(part, end)
            return
        if problem.kind == "aborted":
            self._request_aborted(part)
        elif problem.kind == "range":
            self._on_error(part, OUT_OF_RANGE)
        elif problem.kind == "corrupt":
            self._report(
                part,
                local_error(
                    KafkaError._BAD_MSG, f"{part.topic} [{part.index}] at offset {part.fetched}: {problem.text}"
                ),
            )
            self._retry_later(part, local_error(KafkaError._BAD_MSG))
            part.start = part.fetched
        else:
            self._on_error(part, problem.code)

    def _on_error(self, part: AssignedPartition, code: int) -> None:
        """Handles a Kafka error code of a partition."""
        part.start = part.fetched
        error = broker_error(code, f"{part.topic} [{part.index}]")
        if code == OUT_OF_RANGE:
            if part.reader.is_remote:
                self._request_topic(part)
            else:
                self.reset(part, error)
            self.advance()
            return
        if code == NO_REPLICA and not part.reader.is_remote:
            self._read_remotely(part)
            return
        if code in UNKNOWN:
            part.is_unknown = True
            self._close_reader(part)
            self._control.metadata.refresh([part.topic])
        # A worker that has just started does not know its partitions yet: the metadata decides
        # whether a topic was deleted (_find_topic), as in librdkafka.
        self._retry_later(part, error, quietly=code in UNKNOWN or code in _RETRIED, soon=code in _RETRIED)

    def _request_topic(self, part: AssignedPartition) -> None:
        """Requests the topic's metadata. For a reader by name whose offset is out of range: the topic
        may have been recreated (F6).
        """
        part.serial, self._starting = part.serial + 1, True
        self._request(
            requests.METADATA, 1 << 14, requests.metadata_request([part.topic], False), [part], self._on_topic
        )

    def _on_topic(self, part: AssignedPartition, response: Any) -> None:
        try:
            with self._control.lock:
                self._control.metadata.learn(response)
        except KafkaException as problem:
            self._retry_later(part, problem.args[0])
            return
        info = self._control.metadata.topics.get(part.topic)
        if info is not None and not info.error and info.topic_id == part.topic_id:
            self.reset(part, broker_error(OUT_OF_RANGE, f"{part.topic} [{part.index}]"))
        else:
            part.phase = Phase.TOPIC

    def _at_end(self, part: AssignedPartition, end: int) -> None:
        if end == part.fetched:  # not if the reader waits at an offset beyond the end
            part.requested_start = None
        if self._config["enable.partition.eof"] and part.eof_reported_at != end:
            part.eof_reported_at = end
            error = local_error(
                KafkaError._PARTITION_EOF, f"Fetch from broker reached end of partition at offset {end}"
            )
            self.events.append(Message(part.topic, part.index, end, error=error))

    def _request_aborted(self, part: AssignedPartition) -> None:
        """Requests the list of transactions aborted between the next offset and the last stable offset,
        which is needed before the next record can be returned.
        """
        part.phase, part.serial, self._starting = Phase.REQUESTING, part.serial + 1, True
        message = offsets.positions_request(
            [(part.topic_id or b"", part.index, part.fetched)],
            self._config.isolation_level,
            0,
            self._config["client.rack"],
        )
        part.start = part.fetched
        self._request(requests.FETCH, 1 << 14, message, [part], self._on_aborted)

    def _on_aborted(self, part: AssignedPartition, response: Any) -> None:
        for _, _, data in offsets.read_positions(response):
            if data.error_code:
                self._on_error(part, data.error_code)
                return
            part.reader.set_aborted(
                [
                    (transaction.producer_id, transaction.first_offset)
                    for transaction in data.aborted_transactions or ()
                ],
                data.last_stable_offset,
            )
            if data.last_stable_offset <= part.fetched:  # during compaction, or when this offset has decreased
                self._retry_later(part, local_error(KafkaError._STATE), soon=True)
                return
            part.phase = Phase.ACTIVE
            return
        self._retry_later(part, broker_error(response.error_code or int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)))

    def _move_readers(self) -> None:
        """Moves the readers to the new data attachment after the old one was replaced."""
        self._generation = self._data.generation
        self._covered = None
        self._fetch_serial += 1
        self._session.reset()
        for part in self._parts:
            if part.reader is not None:
                with self._data.lock:
                    part.reader.move(self._data.native)

    # -- sleeping ----------------------------------------------------------------------------------

    def wait(self, until: float) -> None:
        """Sleeps until a partition has records, the inbox has an entry, or `until`
        (time.monotonic). May end early.
        """
        now = time.monotonic()
        until = min(until, self.due)
        if now < self._pause_until:
            until = min(until, self._pause_until)
        elif self._data.attached:
            until = min(until, self._park(now))
        if until > now:
            self._data.wait_for(lambda: self._inbox.attention, until - now if until < _INFINITY else -1)

    def _park(self, now: float) -> float:
        """Sends the Fetch if necessary. Returns the time until which to wait for its response."""
        requested = {
            (part.topic_id or b"", part.index): part.fetched
            for part in self._parts
            if part.phase is Phase.ACTIVE and not part.paused and not part.reader.is_remote
        }
        if self._covered is not None:
            return (
                _INFINITY
                if all(self._covered.get(key) == offset for key, offset in requested.items())
                else now + UNCOVERED_WAIT_S
            )
        if not requested:
            return _INFINITY
        requested = dict(islice(requested.items(), POSITIONS_MAX))  # for the others: F1, UNCOVERED_WAIT_S
        message = self._session.request(requested, int(PARK_S * 1000))
        self._covered = requested
        self._fetch_serial += 1
        serial, chunks_read = self._fetch_serial, self._chunks_read
        version = self._data.api.pick(requests.FETCH)
        self._data.send(
            requests.FETCH,
            version,
            message,
            lambda response, error: self._inbox.put(self._on_fetched, serial, chunks_read, response, error),
            PARK_S + 20,
        )
        return _INFINITY

    def _on_fetched(self, serial: int, chunks_before: int, response: Any, error: KafkaError | None) -> None:
        if serial != self._fetch_serial:
            return
        covered, self._covered = self._covered or {}, None
        if chunks_before == self._chunks_read and self._pause_s:
            self._pause_until = time.monotonic() + self._pause_s
        if error is not None:
            self._session.reset()
            self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
            return
        partition_data = self._session.on_response(response)
        if response.error_code:
            if not self._session.is_session_error(response.error_code):
                self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
            return
        has_grown = False
        by_key = {(part.topic_id or b"", part.index): part for part in self._parts}
        for topic_id, index, data in partition_data:
            part = by_key.get((topic_id, index))
            if (
                part is None
                or part.phase is not Phase.ACTIVE
                or part.reader.is_remote
                or covered.get((topic_id, index)) != part.fetched
            ):
                continue
            if data.error_code:
                self._on_error(part, data.error_code)
                continue
            has_grown = True
            if self._config.isolation_level and data.aborted_transactions is not None:
                part.reader.set_aborted(
                    [(transaction.producer_id, transaction.first_offset) for transaction in data.aborted_transactions],
                    data.last_stable_offset,
                )
        if has_grown or not covered:
            # read() resets the pause when it returns records
            self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
