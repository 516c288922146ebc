"""The consumer on shared memory: confluent_kafka.Consumer's methods over readers of mapped segments and a group membership core.

Who does what: the application's thread reads, and carries out what its group wants of it, in poll(), consume() and consume_batch(); the attachment's thread keeps the membership.
Two attachments: one for requests, one for the Fetch that sleeps (fetching.py), since answers keep their order.

    L1  a record is handed out once: a chunk read ahead is dropped, and its partition set back, by seek, pause and everything that takes the partition away
    L2  a commit says what was handed out before the call that makes it; automatic ones are made in poll(), before it hands out the next record, when a partition goes, and in close()
    L3  what a rebalance takes away is committed (automatic commits) before the coordinator hears that it was given up
Concurrency: one thread at a time, but wake-ups and memberid(); a child of fork has no consumer (attachment.py).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from mqd.client import offsets, requests
from mqd.client.attachment import Attachment
from mqd.client.committing import Commit, Commits
from mqd.client.config import Choice, Settings
from mqd.client.consumer_config import ConsumerConfig
from mqd.client.coordinator import Coordinator
from mqd.client.fetching import Fetcher
from mqd.client.group_core import GroupCore
from mqd.client.group_core import Settings as GroupSettings
from mqd.client.group_runner import GroupRunner
from mqd.client.inbox import Inbox
from mqd.client.messages import OFFSET_INVALID, GroupMetadata, KafkaError, KafkaException, Message, TopicPartition, failure, local_error
from mqd.client.offsets import Committed, Key, PartitionResult, with_outcome
from mqd.client.opening import opener
from mqd.client.partitions import Part, Parts, Phase
from mqd.client.reading import BlockPool, PartitionReader
from mqd.client.rebalancing import Rebalancer
from mqd.protocol.errors import ErrorCode

POLL_RECORDS = 2048
DATA_BYTES = 256 << 10  # for requests alone: the records come from mapped files
BATCH_RECORDS_MAX = 1 << 20
CLOSE_S = 10.0
_INFINITY = float("inf")
_log = logging.getLogger("mqd.client")
_NOTHING: Iterator[Message] = iter(())


class ShmConsumer:
    """See the module. `open_attachment(name)` -> Attachment; `open_reader`: fetching.Fetcher."""

    transport = "shm"

    def __init__(self, config: ConsumerConfig, owner: Any, open_attachment: Callable[[str], Any], open_reader: Callable[..., Any], reason: str = "") -> None:
        self.reason = reason
        self._config, self._owner = config, owner
        self._control = open_attachment("requests")
        try:
            self._data = open_attachment("fetch")
        except BaseException:
            self._control.close()
            raise
        self._inbox = Inbox(self._data.wake)
        self._parts = Parts()
        self._coordinator = Coordinator(self._control, config["group.id"])
        self._fetcher = Fetcher(config, self._control, self._coordinator, self._data, self._inbox, self._parts, open_reader)
        self._commits = Commits(self._control, self._inbox, config["group.id"], config["group.instance.id"], self._identity, self._on_committed, self._coordinator)
        self._runner: GroupRunner | None = None
        self._rebalancer = Rebalancer(self)
        self._subscription: list[str] = []
        self._ready: Iterator[Message] = _NOTHING
        self._last: Message | None = None
        self._chunk: Part | None = None  # whose records _ready has
        self._chunk_begin = 0
        self._pid = os.getpid()
        self._is_closed = False
        self._interrupted = False
        self._auto_commit_s = config["auto.commit.interval.ms"] / 1000 if config["enable.auto.commit"] else _INFINITY
        self._auto_store = bool(config["enable.auto.offset.store"])
        self._commit_due = _INFINITY  # set while something may have to be committed
        self._metadata_version = -1
        self._progress: Message | None = None
        self._turns = _Turns(self)
        _all.add(self)
        self._control.subscribe(self._turns)
        self._data.subscribe(self._turns.data)
        self._own_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()

    # -- records ----------------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Message | None:
        if not self._inbox.attention:
            for message in self._ready:
                self._last = message
                return message
        found = self.take(1, timeout)
        return found[0] if found else None

    def take_ready(self) -> Message | None:
        """What can be handed out without a look at anything else. Not while another thread is in here."""
        if not self._inbox.attention:
            for message in self._ready:
                self._last = message
                return message
        return None

    def interrupt(self) -> None:
        """Ends a take() that waits, or the next one that would. Any thread."""
        self._interrupted = True
        self._inbox.notice()

    def give_back(self, messages: list[Message]) -> None:
        """They were taken, the latest ones, but nobody has seen them: what is committed ends before them."""
        self._settle()
        for message in reversed(messages):
            part = self._parts.get((message.topic(), message.partition())) if message.error() is None else None
            if part is not None:
                part.position = message.offset()
                if self._auto_store:
                    part.stored = message.offset()

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        if not 0 <= num_messages <= 1_000_000:
            raise ValueError("num_messages must be between 0 and 1000000 (1M)")
        found: list[Message] = []
        deadline = _deadline(timeout)
        while len(found) < num_messages:
            more = self.take(num_messages - len(found), deadline - time.monotonic() if deadline < _INFINITY else None)
            if not more:
                break
            found += more
        return found

    def take(self, count: int, timeout: float | None) -> list[Message]:
        """What is there, up to `count`; waits for the first."""
        deadline = _deadline(timeout)
        while True:
            event = self._serve()
            if event is not None:
                return [event]
            found = list(islice(self._ready, count))
            if found:
                self._last = found[-1]
                return found
            chunk = self._fetcher.read(POLL_RECORDS, self._bytes_max())
            if chunk is not None:
                part, begin, batch = chunk
                self._settle()
                self._chunk, self._last, self._chunk_begin = part, None, begin
                self._ready = iter(batch.messages())
                self._expect_commit()
            elif self._interrupted:
                self._interrupted = False
                return []
            elif not self._fetcher.events and not self._wait(deadline):
                return []

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        if max_records < 1:
            raise ValueError("max_records must be positive")
        deadline = _deadline(timeout)
        while True:
            event = self._serve()
            if event is not None:
                if event.error().code() == KafkaError._PARTITION_EOF:
                    continue
                raise KafkaException(event.error())
            self._drop_chunk()
            chunk = self._fetcher.read(min(max_records, BATCH_RECORDS_MAX), self._bytes_max())
            if chunk is not None:
                part, _, batch = chunk
                self._moved(part, batch.next_offset, batch.leader_epoch)
                self._expect_commit()
                return batch
            if not self._fetcher.events and not self._wait(deadline):
                return None

    def _bytes_max(self) -> int:
        return min(int(self._config["queued.max.messages.kbytes"]) << 10, 1 << 30)

    def _wait(self, deadline: float) -> bool:
        """False: `deadline` has come with nothing to do."""
        now = time.monotonic()
        if now >= deadline:
            return False
        if self._runner is not None:
            self._runner.is_polling = True
        try:
            self._fetcher.wait(min(deadline, self._commits.due))
        finally:
            if self._runner is not None:
                self._runner.is_polling = False
        return True

    # -- positions of what was handed out ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        part, last = self._chunk, self._last
        if part is not None and last is not None:
            self._moved(part, last.offset() + 1, last.leader_epoch())
            self._last = None
            self._chunk_begin = part.position

    def _moved(self, part: Part, position: int, leader_epoch: int | None) -> None:
        part.position = position
        part.leader_epoch = leader_epoch if leader_epoch is not None else -1
        if self._auto_store:
            part.stored, part.stored_epoch, part.stored_metadata = position, part.leader_epoch, None

    def _drop_chunk(self) -> None:
        """What was read ahead and not handed out is read again later."""
        self._settle()
        part, self._chunk, self._ready = self._chunk, None, _NOTHING
        if part is not None and part.reader is not None and part.phase is Phase.ACTIVE and part.fetched != self._chunk_begin:
            part.reader.seek(self._chunk_begin)
            part.fetched = self._chunk_begin

    def _drop_chunk_of(self, part: Part) -> None:
        if self._chunk is part:
            self._drop_chunk()
            self._chunk = None

    # -- what has come meanwhile -------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise failure(KafkaError._STATE, "this consumer was made before fork(): make a new one in the child process")
        if self._is_closed:
            raise RuntimeError("Consumer closed")

    def _serve(self) -> Message | None:
        """Everything that is due on the application's thread. Returns an event to hand out."""
        self._require_open()
        self._inbox.attention = False
        self._settle()
        if self._runner is not None:
            self._runner.polled()
        self._serve_answers()
        if time.monotonic() >= self._commit_due:
            self._auto_commit()
        while self._inbox.operations:
            problem = self._rebalancer.carry_out(self._inbox.operations.popleft())
            if problem is not None:
                return Message(error=problem)
        self._call_on_commit()
        return self._fetcher.events.popleft() if self._fetcher.events else None

    def _serve_answers(self) -> None:
        self._inbox.serve()
        if self._metadata_version != self._control.metadata.version:
            self._metadata_version = self._control.metadata.version
        self._fetcher.advance()
        self._commits.advance()

    def _call_on_commit(self) -> None:
        while self._commits.finished:
            commit = self._commits.finished.popleft()
            if commit.on_commit is not None and commit.outcome is not None:
                commit.on_commit(*commit.outcome)

    def _until(self, is_done: Callable[[], object], deadline: float) -> bool:
        """Serves answers until it is; calls none of the user's functions. False: `deadline` came first."""
        while True:
            self._serve_answers()
            if is_done():
                return True
            left = min(deadline, self._commits.due, self._fetcher.due) - time.monotonic()
            if time.monotonic() >= deadline:
                return False
            if left > 0:
                self._control.wait_for(lambda: self._inbox.answers, left if left < _INFINITY else -1)

    # -- commits ----------------------------------------------------------------------------------------------------------------

    def _identity(self) -> tuple[str, int]:
        return self._runner.identity() if self._runner is not None else ("", -1)

    def _on_committed(self, key: Key, offset: int) -> None:
        part = self._parts.get(key)
        if part is not None:
            part.committed = offset

    def _expect_commit(self) -> None:
        if self._commit_due == _INFINITY and self._auto_commit_s < _INFINITY:
            self._commit_due = time.monotonic() + self._auto_commit_s
            self._control.wake_by(self._commit_due)

    def _auto_commit(self) -> None:
        self._commit_due = _INFINITY
        stored = self._stored(self._parts)
        if stored:
            self._commits.add(stored, self._config["on_commit"], self._config["socket.timeout.ms"] / 1000)
        if self._chunk is not None:
            self._expect_commit()

    def _stored(self, parts: Iterable[Part]) -> dict[Key, Committed]:
        return {part.key: Committed(part.stored, part.stored_epoch, part.stored_metadata) for part in parts if part.stored >= 0 and part.stored != part.committed}

    def commit_before_leaving(self, parts: list[Part]) -> None:
        """L3: of partitions that go; waits for the outcome, which on_commit is told."""
        self._settle()
        stored = self._stored(parts) if self._auto_commit_s < _INFINITY else {}
        if stored:
            commit = self._commits.add(stored, self._config["on_commit"], min(CLOSE_S, self._config["socket.timeout.ms"] / 1000))
            self._until(lambda: commit.outcome is not None, commit.deadline)

    def commit(self, message: Message | None = None, offsets: list[TopicPartition] | None = None, asynchronous: bool = True) -> list[TopicPartition] | None:
        self._require_open()
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive")
        self._settle()
        wanted = self._wanted(message, offsets)
        on_commit = self._config["on_commit"]
        if not wanted:
            error = local_error(KafkaError._NO_OFFSET)
            if not asynchronous:
                raise KafkaException(error)
            if on_commit is not None:
                done = Commit({}, on_commit, 0.0)
                done.outcome = error, []
                self._commits.finished.append(done)
                self._inbox.notice()
            return None
        commit = self._commits.add(wanted, on_commit, self._config["socket.timeout.ms"] / 1000)
        if asynchronous:
            return None
        self._until(lambda: commit.outcome is not None, _INFINITY)
        error, results = commit.outcome or (None, [])
        if error is not None:
            raise KafkaException(error)
        return list(results)

    def _wanted(self, message: Message | None, given: list[TopicPartition] | None) -> dict[Key, Committed]:
        if message is not None:
            if message.error() is not None:
                raise KafkaException(message.error())
            return {(message.topic(), message.partition()): Committed(message.offset() + 1, _epoch(message.leader_epoch()))}
        if given is not None:
            for one in given:
                if one.offset < 0 and one.offset not in (OFFSET_INVALID, -1000):
                    raise failure(KafkaError._INVALID_ARG, f"{one.topic} [{one.partition}]: offset {one.offset} cannot be committed")
            return {(one.topic, one.partition): Committed(one.offset, _epoch(one.leader_epoch), one.metadata) for one in given if one.offset >= 0}
        return {part.key: Committed(part.stored, part.stored_epoch, part.stored_metadata) for part in self._parts if part.stored >= 0}

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        self._require_open()
        if (message is None) == (offsets is None):
            raise ValueError("expected either message or offsets")
        if self._auto_store:
            raise failure(KafkaError._INVALID_ARG, "enable.auto.offset.store must be false for store_offsets")
        given = self._wanted(message, offsets)
        missing = [key for key in given if key not in self._parts]
        for key, one in given.items():
            part = self._parts.get(key)
            if part is not None:
                part.stored, part.stored_epoch, part.stored_metadata = one.offset, one.leader_epoch, one.metadata
        if given:
            self._expect_commit()
        if missing:
            raise failure(KafkaError._STATE, f"not assigned: {', '.join(f'{topic} [{index}]' for topic, index in missing)}")

    def committed(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        self._require_open()
        deadline = _deadline(timeout if timeout is not None else self._config["socket.timeout.ms"] / 1000)
        keys = [(one.topic, one.partition) for one in partitions]
        message = offsets.committed_request(self._config["group.id"], dict.fromkeys(keys), bool(self._config.isolation_level))
        while True:
            response = self._request(requests.OFFSET_FETCH, offsets.FETCH_VERSION_MAX, message, deadline)
            found = offsets.read_committed(response)
            codes = {code for code, _ in found.values()}
            if codes & offsets.COORDINATOR_AWAY:
                self._coordinator.ask()
            if not codes & {*offsets.COORDINATOR_AWAY, int(ErrorCode.UNSTABLE_OFFSET_COMMIT)} or time.monotonic() + 0.1 >= deadline:
                break
            self._until(lambda: False, time.monotonic() + 0.1)
        missing = (3, Committed(-1))
        results: list[TopicPartition] = []
        for topic, index in keys:
            code, one = found.get((topic, index), missing)
            results.append(with_outcome(topic, index, one.offset if one.offset >= 0 else OFFSET_INVALID, code, one.metadata, one.leader_epoch))
        return results

    def _request(self, api_key: int, version_max: int, message: object, deadline: float) -> Any:
        left = max(deadline - time.monotonic(), 0) if deadline < _INFINITY else -1
        return self._control.request(api_key, self._control.api.pick(api_key, version_max), message, left)

    # -- the assignment ---------------------------------------------------------------------------------------------------------

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._require_open()
        self._rebalancer.on_application_assigns()
        self._remove([part for part in self._parts])
        self._add(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self._require_open()
        self._rebalancer.on_application_assigns()
        for one in partitions:
            if (one.topic, one.partition) in self._parts:
                raise failure(KafkaError._CONFLICT, f"{one.topic} [{one.partition}] is assigned already")
        self._add(partitions)

    def unassign(self) -> None:
        self._require_open()
        self._rebalancer.on_application_assigns()
        self._remove([part for part in self._parts])

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self._require_open()
        self._rebalancer.on_application_assigns()
        parts = [self._part(one) for one in partitions]
        self._remove(parts)

    def _add(self, partitions: Iterable[TopicPartition]) -> None:
        added = []
        for one in partitions:
            if one.partition < 0:
                raise failure(KafkaError._INVALID_ARG, f"{one.topic}: a partition number is needed")
            if (one.topic, one.partition) in self._parts or any(part.key == (one.topic, one.partition) for part in added):
                raise failure(KafkaError._INVALID_ARG, f"{one.topic} [{one.partition}] is there twice")
            added.append(Part(one.topic, one.partition, one.offset))
        for part in added:
            self._parts.add(part)
        self._fetcher.start(added)

    def _remove(self, parts: list[Part]) -> None:
        for part in parts:
            self._drop_chunk_of(part)
        if not self._rebalancer.is_lost:
            self.commit_before_leaving(parts)
        self._parts.remove([part.key for part in parts])

    def _part(self, partition: TopicPartition) -> Part:
        part = self._parts.get((partition.topic, partition.partition))
        if part is None:
            raise failure(KafkaError._STATE, f"{partition.topic} [{partition.partition}] is not assigned")
        return part

    def assignment(self) -> list[TopicPartition]:
        self._require_open()
        return sorted(TopicPartition(part.topic, part.index, part.position if part.position >= 0 else part.start) for part in self._parts)

    def seek(self, partition: TopicPartition) -> None:
        self._require_open()
        part = self._parts.get((partition.topic, partition.partition))
        if part is None:
            raise failure(KafkaError._STATE, f"Failed to seek to offset {partition.offset}: {partition.topic} [{partition.partition}] is not assigned")
        self._drop_chunk_of(part)
        part.start, part.position, part.told = partition.offset, OFFSET_INVALID, 0
        self._fetcher.events = type(self._fetcher.events)(event for event in self._fetcher.events if (event.topic(), event.partition()) != part.key)
        self._fetcher.start([part])

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._require_open()
        for one in partitions:
            part = self._part(one)
            self._drop_chunk_of(part)
            part.paused = True

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._require_open()
        for one in partitions:
            self._part(one).paused = False

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        self._require_open()
        self._settle()
        results: list[TopicPartition] = []
        for one in partitions:
            part = self._parts.get((one.topic, one.partition))
            error = local_error(KafkaError._UNKNOWN_PARTITION) if part is None else None
            results.append(PartitionResult(one.topic, one.partition, part.position if part is not None else OFFSET_INVALID, error=error))
        return results

    # -- the group --------------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        self._require_open()
        if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
            raise TypeError("expected list of topic unicode strings")
        for function in (on_assign, on_revoke, on_lost):
            if function is not None and not callable(function):
                raise TypeError("on_assign, on_revoke and on_lost expect a callable")
        if not topics:
            self.unsubscribe()
            return
        self._rebalancer.set_callbacks(on_assign, on_revoke, on_lost)
        self._subscription = list(topics)
        if self._runner is None:
            self._runner = GroupRunner(self._control, self._coordinator, self._new_core(), self._inbox.put_operation, self._has_progressed)
        names = tuple(sorted({topic for topic in topics if not topic.startswith("^")}))
        self._runner.subscribe(names, self._regex([topic for topic in topics if topic.startswith("^")]))

    def _regex(self, expressions: list[str]) -> str | None:
        """librdkafka's expressions find, the coordinator's match whole names; who asks for group.protocol=consumer writes the latter."""
        if not expressions:
            return None
        if str(self._config["group.protocol"]).lower() == "consumer":
            return "|".join(expressions)
        return "|".join(f".*(?:{expression}).*" for expression in expressions)

    def _new_core(self) -> GroupCore:
        config = self._config
        return GroupCore(
            GroupSettings(config["group.id"], self._own_id, config["group.instance.id"], config["client.rack"] or None, config["group.remote.assignor"], config["max.poll.interval.ms"])
        )

    def _has_progressed(self) -> bool:
        """Whether poll() has handed something out since the last question. Any thread; a race costs one question."""
        last, before = self._last, self._progress
        self._progress = last
        return last is not None and last is not before

    def unsubscribe(self) -> None:
        self._require_open()
        self._subscription = []
        if self._runner is not None:
            self._runner.leave()
            self._rebalancer.until_left(time.monotonic() + CLOSE_S)
        else:
            self._remove([part for part in self._parts])

    def subscription(self) -> list[str]:
        return list(self._subscription)

    def memberid(self) -> str | None:
        self._require_open()
        return self._runner.identity()[0] if self._runner is not None else ""

    def consumer_group_metadata(self) -> bytes:
        self._require_open()
        member_id, generation = self._identity()
        instance_id = self._config["group.instance.id"] if generation >= 0 else None
        return GroupMetadata(self._config["group.id"], generation, member_id if generation >= 0 else "", instance_id).to_bytes()

    # -- asking the broker ------------------------------------------------------------------------------------------------------

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float | None = None, cached: bool = False) -> tuple[int, int] | None:
        self._require_open()
        part = self._parts.get((partition.topic, partition.partition))
        if cached:
            if part is None or part.reader is None:
                return OFFSET_INVALID, OFFSET_INVALID
            return part.reader.log_start(), part.reader.lag_end()
        deadline = _deadline(timeout)
        low = self._list({(partition.topic, partition.partition): offsets.EARLIEST_TIMESTAMP}, deadline)
        high = self._list({(partition.topic, partition.partition): offsets.LATEST_TIMESTAMP}, deadline)
        for result in (low[0], high[0]):
            if result.error is not None:
                raise KafkaException(result.error)
        return low[0].offset, high[0].offset

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        self._require_open()
        found = {(one.topic, one.partition): one for one in self._list({(one.topic, one.partition): one.offset for one in partitions}, _deadline(timeout))}
        return [found[one.topic, one.partition] for one in partitions]

    def _list(self, timestamps: dict[Key, int], deadline: float) -> list[PartitionResult]:
        deadline = min(deadline, time.monotonic() + self._config["socket.timeout.ms"] / 1000)
        left_ms = int(max(deadline - time.monotonic(), 0) * 1000)
        response = self._request(requests.LIST_OFFSETS, 1 << 14, offsets.list_offsets_request(timestamps, self._config.isolation_level, left_ms), deadline)
        found = offsets.read_list_offsets(response)
        return [with_outcome(topic, index, offset, code, None, epoch) for (topic, index), (code, offset, epoch) in found.items()]

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._require_open()
        return self._control.metadata.list_topics(topic, timeout, allow_auto_create=bool(self._config["allow.auto.create.topics"]))

    def cluster_id(self, timeout: float = -1) -> str | None:
        self._require_open()
        return requests.read_metadata(self._request(requests.METADATA, 1 << 14, requests.metadata([], False), _deadline(timeout)))[0].cluster_id

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Nothing: on shared memory a client is its process's user."""

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + CLOSE_S
        try:
            self._settle()
            if self._runner is not None and not self._control.is_closed:
                self._runner.leave()
                self._rebalancer.until_left(deadline)
            self._remove([part for part in self._parts])
            self._until(lambda: not self._commits.is_busy, deadline)
            self._call_on_commit()
        except KafkaException as error:
            _log.info("closing a consumer of group %s: %s", self._config["group.id"], error)
        finally:
            self._is_closed = True
            self._commits.give_up(local_error(KafkaError._DESTROY))
            if self._runner is not None:
                self._runner.close()
            self._parts.remove([part.key for part in self._parts])
            self._data.close()
            self._control.close()


class _Turns:
    """The attachments' listener: it must not keep the consumer alive, nor run its code."""

    def __init__(self, consumer: ShmConsumer) -> None:
        self._consumer = consumer
        self._version = -1
        self.data = _DataTurns(consumer)

    def on_turn(self, now: float) -> float | None:
        consumer = self._consumer
        version = consumer._control.metadata.version
        if version != self._version:
            self._version = version
            if consumer._fetcher._starting:
                consumer._inbox.notice()
        if now >= consumer._commit_due:
            if not consumer._inbox.attention:
                consumer._inbox.notice()
            return None
        return consumer._commit_due if consumer._commit_due < _INFINITY else None

    def on_lost(self, error: KafkaError) -> None:
        if error.fatal():
            self._consumer._inbox.notice()

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._consumer._inbox.notice()


class _DataTurns:
    def __init__(self, consumer: ShmConsumer) -> None:
        self._consumer = consumer

    def on_turn(self, _now: float) -> float | None:
        return None

    def on_lost(self, _error: KafkaError) -> None:
        self._consumer._inbox.notice()

    def on_reattached(self, _old: Any, _new: Any) -> None:
        self._consumer._inbox.notice()


def _deadline(timeout: float | None) -> float:
    """confluent_kafka: None and below 0 are without end."""
    return _INFINITY if timeout is None or timeout < 0 else time.monotonic() + timeout


def _epoch(leader_epoch: int | None) -> int:
    return leader_epoch if leader_epoch is not None else -1


_all: weakref.WeakSet[ShmConsumer] = weakref.WeakSet()


def _stop_in_child() -> None:
    """What was read ahead is the parent's to hand out."""
    for consumer in list(_all):
        consumer._inbox.attention = True


os.register_at_fork(after_in_child=_stop_in_child)


def open_consumer(owner: Any, settings: Settings, choice: Choice) -> ShmConsumer:
    """Raises KafkaException or OSError when the broker cannot be attached."""
    config = ConsumerConfig(settings)
    pool = BlockPool()

    def attachment(name: str) -> Attachment:
        attach = opener(settings, choice, config["client.id"], DATA_BYTES)
        return Attachment(
            attach, client_id=config["client.id"] if name == "requests" else f"{config['client.id']}-{name}", request_timeout_s=config["socket.timeout.ms"] / 1000,
            metadata_max_age_s=max(config["topic.metadata.refresh.interval.ms"], 1000) / 1000,
        )  # fmt: skip

    def reader(native: Any, part: Part, offset: int) -> PartitionReader:
        return PartitionReader(native, part.topic, part.topic_id or b"", part.index, offset, config.isolation_level, bool(config["check.crcs"]), pool)

    return ShmConsumer(config, owner, attachment, reader, choice.reason)
