"""The shared-memory consumer: implements confluent_kafka.Consumer's methods with readers of mapped
segments and a core for the group membership.

Threads: the application's thread reads, and applies the group's changes, in poll(), consume() and
consume_batch(); the attachment's thread maintains the membership. There are two attachments: one for
requests, one for the Fetch that waits for records (fetching.py) and would delay other responses.

    L1  a record is returned once: seek(), pause() and the loss of a partition drop the chunk that
        was read ahead from it, and set its position back to the first record that was not returned
    L2  a commit covers the records returned before the call that makes it; automatic commits are
        made in poll() (before it returns the next record), in consume(), when a partition is taken
        away, and in close()
    L3  partitions that a rebalance takes away are committed (automatic commits) before the
        coordinator learns that they were released
Concurrency: one thread at a time, except for wake-ups, memberid() and consumer_group_metadata(); a
child of fork has no consumer (attachment.py).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from mqd.client.group.classic import ClassicCore
from mqd.client.group.committing import CommitQueue
from mqd.client.group.consumer_protocol import ConsumerProtocolCore
from mqd.client.group.coordinator import CoordinatorLookup
from mqd.client.group.joining import classic_core, consumer_protocol_core, split_subscription
from mqd.client.group.rebalancing import Rebalancer
from mqd.client.group.runner import GroupRunner
from mqd.client.messages import (
    GroupMetadata,
    KafkaError,
    KafkaException,
    Message,
    broker_error,
    failure,
    is_eof,
    local_error,
    next_offset,
    offset_of,
    partition_of,
    will_be_read_again,
)
from mqd.client.offsets import Key
from mqd.client.shm.consumer_assignment import ConsumerAssignment
from mqd.client.shm.consumer_config import ConsumerConfig
from mqd.client.shm.consumer_offsets import CLOSE_S, INFINITY, ConsumerOffsets, deadline_of
from mqd.client.shm.consumer_statistics import ConsumerStatistics
from mqd.client.shm.consumer_turns import ControlListener
from mqd.client.shm.fetching import Fetcher
from mqd.client.shm.inbox import Inbox
from mqd.client.shm.partitions import AssignedPartition, AssignedPartitions, Phase
from mqd.client.shm.remote_reading import RemoteRecords
from mqd.protocol.errors import ErrorCode

POLL_RECORDS = 2048
BATCH_RECORDS_MAX = 1 << 20
_log = logging.getLogger("mqd.client")
_NO_MESSAGES: Iterator[Message] = iter(())
# the errors of a topic that the broker is creating for this consumer
_BEING_CREATED = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.LEADER_NOT_AVAILABLE})


class ShmConsumer:
    """See the module. `open_attachment(name)` -> Attachment; `open_reader`, `remote`:
    fetching.Fetcher.
    """

    transport = "shm"

    def __init__(
        self,
        config: ConsumerConfig,
        owner: Any,
        open_attachment: Callable[[str], Any],
        open_reader: Callable[..., Any],
        remote: RemoteRecords,
        reason: str = "",
    ) -> None:
        self.reason, self.remote = reason, remote
        self.config, self._owner = config, owner
        self.control = open_attachment("requests")
        try:
            self._data = open_attachment("fetch")
        except BaseException:
            self.control.close()
            raise
        self._inbox = Inbox(self._data.wake)
        self.parts = AssignedPartitions()
        self.coordinator = CoordinatorLookup(self.control, config["group.id"])
        self._fetcher = Fetcher(
            config, self.control, self.coordinator, self._data, self._inbox, self.parts, open_reader, remote
        )
        self._fetcher.on_restarted = self._forget
        remote.attach(self._inbox.notify, self.control.metadata)
        commits = CommitQueue(
            self.control,
            self._inbox,
            config["group.id"],
            config["group.instance.id"],
            self._identity,
            self._on_committed,
            self.coordinator,
        )
        self._offsets = ConsumerOffsets(self, commits)
        for name in (
            "commit",
            "store_offsets",
            "committed",
            "get_watermark_offsets",
            "offsets_for_times",
            "list_topics",
            "cluster_id",
        ):
            setattr(self, name, getattr(self._offsets, name))
        assignment = ConsumerAssignment(self, self._fetcher)
        for name in (
            "assign",
            "incremental_assign",
            "unassign",
            "incremental_unassign",
            "assignment",
            "seek",
            "pause",
            "resume",
            "position",
        ):
            setattr(self, name, getattr(assignment, name))
        self._remove = assignment.remove
        self._runner: GroupRunner | None = None
        self._rebalancer = Rebalancer(self)
        self._subscription: list[str] = []
        self._ready: Iterator[Message] = _NO_MESSAGES  # the rest of the chunk that was read ahead
        self._last: Message | None = None  # the last returned record, if `position` is not past it yet
        self._chunk_part: AssignedPartition | None = None  # the partition of the records in _ready
        self._chunk_begin = 0  # offset at which the part of the chunk after `position` begins
        # partitions whose topic was recreated since the last records were taken: those records
        # belong to the old topic
        self._recreated: set[Key] = set()
        self._pid = os.getpid()
        self._is_closed = False
        self._interrupted = False
        self._metadata_version = -1
        self._topics_reported: set[str] = set()  # subscribed topics that the application knows to be missing
        self._statistics = ConsumerStatistics(self)
        self._last_progress: Message | None = None
        self._listener = ControlListener(self)
        _open_consumers.add(self)
        self.control.subscribe(self._listener)
        self._data.subscribe(self._listener.data)
        self._member_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()

    # -- records -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Message | None:
        if not self._inbox.attention:  # take_ready() inlined, which saves a call
            for message in self._ready:
                self._last = message
                return message
        messages = self.take(1, timeout)
        return messages[0] if messages else None

    def take_ready(self) -> Message | None:
        """Returns a buffered record if no other work is due. No other thread may be using the consumer."""
        if not self._inbox.attention:
            for message in self._ready:
                self._last = message
                return message
        return None

    def interrupt(self) -> None:
        """Ends a waiting take() or consume_batch(), or the next one that would wait. Any thread."""
        self._interrupted = True
        self._inbox.notify()

    def uninterrupt(self) -> None:
        """Drops an interrupt() that arrived after its take() had ended. Must not be called during a take()."""
        self._interrupted = False

    def give_back(self, messages: list[Message]) -> None:
        """Takes back `messages`, the end of the latest result of take() or gather(), because they did not
        reach the application: they will be read again, and commits end before them.
        """
        self._advance_past_returned()
        for part in self._rewind(messages):
            part.position = part.start
            if self._offsets.auto_store:
                part.stored = part.start

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        if not 0 <= num_messages <= 1_000_000:
            raise ValueError("num_messages must be between 0 and 1000000 (1M)")
        deadline = deadline_of(timeout)
        messages = self.take(num_messages, timeout) if num_messages else []
        if 0 < len(messages) < num_messages:
            self._gather(messages, num_messages, deadline)
        return messages

    def gather(self, count: int) -> list[Message]:
        """Returns `count` records and events; fewer if the group needs attention or after interrupt()."""
        return self.consume(count)

    def _gather(self, messages: list[Message], count: int, deadline: float) -> None:
        """Appends records and events to `messages` until `deadline`; ends early when the group or
        interrupt() requires it, when a topic was recreated, or when nothing is available and
        on_commit is due. The application has not received `messages` yet: commits end before its
        records, no partition is taken away, no user callback is called. After an exception all of
        `messages` are read again.
        """
        # (partition, topic id) of each chunk that has been taken completely -> its last record
        ended: dict[tuple[AssignedPartition | None, bytes | None], Message] = {}
        try:
            while len(messages) < count and not self._has_recreated(messages):
                records = list(islice(self._ready, count - len(messages)))
                if records:
                    self._last = records[-1]
                    messages += records
                    continue
                self._inbox.attention = False
                self._handle_responses()
                if self._inbox.operations:
                    break
                if time.monotonic() >= self._offsets.due:
                    self._offsets.commit_automatically(more_follow=True)
                part, last = self._chunk_part, self._last
                previous = part, part.topic_id if part is not None else None
                if self._fetcher.events:
                    messages.append(self._fetcher.events.popleft())
                elif self._read_chunk():
                    if last is not None:
                        ended[previous] = last
                elif not self._fetcher.events and (
                    self._interrupted
                    or self._offsets.commits.finished
                    or self._has_recreated(messages)
                    or not self._wait(deadline)
                ):
                    break
        except BaseException:
            self._last = None
            self._rewind(messages)
            raise
        finally:
            self._inbox.attention = True
        self._interrupted = False
        for (part, topic_id), message in ended.items():
            if part is not None and part.topic_id == topic_id:
                self._offsets.note_received(part, next_offset(message), message.leader_epoch())

    def take(self, count: int, timeout: float | None) -> list[Message]:
        """Returns the available records and events, up to `count`; waits for the first."""
        deadline = deadline_of(timeout)
        while True:
            event = self._serve()
            self._recreated.clear()
            if event is not None:
                return [event]
            messages = list(islice(self._ready, count))
            if messages:
                self._last = messages[-1]
                return messages
            if self._read_chunk():
                continue
            if self._interrupted:
                self._interrupted = False
                return []
            if not self._fetcher.events and not self._wait(deadline):
                return []

    def _read_chunk(self) -> bool:
        """Loads the next records after all earlier ones were returned. False: there are none."""
        chunk = self._fetcher.read(POLL_RECORDS, self._bytes_max())
        if chunk is None:
            return False
        self._chunk_part, self._chunk_begin, batch = chunk
        self._last, self._ready = None, iter(batch.messages())
        self._offsets.schedule_commit()
        return True

    def consume_batch(self, max_records: int = 65_536, timeout: float | None = None) -> Any:
        if max_records < 1:
            raise ValueError("max_records must be positive")
        deadline = deadline_of(timeout)
        while True:
            event = self._serve()
            if event is not None:
                if is_eof(event):
                    continue
                raise KafkaException(event.error())
            self._drop_chunk()
            chunk = self._fetcher.read(min(max_records, BATCH_RECORDS_MAX), self._bytes_max())
            if chunk is not None:
                part, _, batch = chunk
                self._offsets.note_received(part, batch.next_offset, batch.leader_epoch)
                self._offsets.schedule_commit()
                return batch
            if not self._fetcher.events and (self._interrupted or not self._wait(deadline)):
                self._interrupted = False
                return None

    def _bytes_max(self) -> int:
        return min(int(self.config["queued.max.messages.kbytes"]) << 10, 1 << 30)

    def _wait(self, deadline: float) -> bool:
        """Waits until there may be something to do. False: `deadline` had already passed."""
        now = time.monotonic()
        if now >= deadline:
            return False
        if self._runner is not None:
            self._runner.is_polling = True
        try:
            self._fetcher.wait(min(deadline, self._offsets.commits.due))
        finally:
            if self._runner is not None:
                self._runner.is_polling = False
        return True

    # -- positions of returned records -------------------------------------------------------------

    def _advance_past_returned(self) -> None:
        """Advances the partition's position past the records that were returned."""
        part, last = self._chunk_part, self._last
        if part is not None and last is not None:
            self._offsets.note_received(part, next_offset(last), last.leader_epoch())
            self._last = None
            self._chunk_begin = part.position

    def _drop_chunk(self) -> None:
        """Drops records that were read ahead and not returned; they are read again later."""
        self._advance_past_returned()
        part, self._chunk_part, self._ready = self._chunk_part, None, _NO_MESSAGES
        if part is None or part.fetched == self._chunk_begin:
            return
        if part.reader is not None and part.phase is Phase.ACTIVE:
            part.reader.seek(self._chunk_begin)
            part.fetched = self._chunk_begin
        else:  # the partition is being retried: it starts again before the records read ahead
            part.start = self._chunk_begin
            self._fetcher.start([part])

    def _rewind(self, messages: list[Message]) -> list[AssignedPartition]:
        """Goes back to the first of these records. None was returned yet. Returns the partitions."""
        self._drop_chunk()
        first = {partition_of(message): offset_of(message) for message in reversed(messages) if message.error() is None}
        parts = [part for part in map(self.parts.get, first) if part is not None and part.key not in self._recreated]
        for part in parts:
            part.start, part.reported_error = first[part.key], 0
        reread = {part.key for part in parts}
        kept = [
            event
            for event in messages
            if event.error() is not None and not will_be_read_again(event, first if is_eof(event) else reread)
        ]
        self._fetcher.events = deque(
            [*kept, *(event for event in self._fetcher.events if not will_be_read_again(event, reread))]
        )
        self._fetcher.start(parts)
        return parts

    def _drop_chunk_of(self, part: AssignedPartition) -> None:
        if self._chunk_part is part:
            self._drop_chunk()

    def _forget(self, part: AssignedPartition) -> None:
        """Forgets buffered records and pending commits of a partition whose topic was recreated."""
        if self._chunk_part is part:
            self._chunk_part, self._last, self._ready = None, None, _NO_MESSAGES
        self._recreated.add(part.key)
        self._offsets.commits.drop({part.key})

    def _has_recreated(self, taken: list[Message]) -> bool:
        """Whether some of these records are of a topic that has been recreated since."""
        if self._recreated and not any(
            message.error() is None and (message.topic(), message.partition()) in self._recreated for message in taken
        ):
            self._recreated.clear()
        return bool(self._recreated)

    # -- pending work ------------------------------------------------------------------------------

    def enter(self) -> None:
        """Called first in each call of the application: raises if the consumer is closed, and advances
        the position past the records returned so far.
        """
        self._require_open()
        self._advance_past_returned()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise failure(
                KafkaError._STATE, "this consumer was made before fork(): make a new one in the child process"
            )
        if self._is_closed:
            raise RuntimeError("Consumer closed")

    def _serve(self) -> Message | None:
        """Does the work due on the application's thread. Returns an event for the application, or None."""
        self._require_open()
        self._inbox.attention = False
        self._advance_past_returned()
        if self._runner is not None:
            self._runner.note_poll()
        self._handle_responses()
        if time.monotonic() >= self._offsets.due:
            self._offsets.commit_automatically(more_follow=self._chunk_part is not None)
        while self._inbox.operations:
            problem = self._rebalancer.carry_out(self._inbox.operations.popleft())
            if problem is not None:
                return Message(error=problem)
        self._call_on_commit()
        return self._fetcher.events.popleft() if self._fetcher.events else None

    def _handle_responses(self) -> None:
        self._inbox.handle_responses()
        if self._metadata_version != self.control.metadata.version:
            self._metadata_version = self.control.metadata.version
            self._report_missing_topics()
            self._fetcher.on_metadata()
        self._fetcher.advance()
        self._offsets.commits.advance()

    def _call_on_commit(self) -> None:
        while self._offsets.commits.finished:
            commit = self._offsets.commits.finished.popleft()
            if commit.on_commit is not None and commit.outcome is not None:
                commit.on_commit(*commit.outcome)

    def wait_until(self, is_done: Callable[[], object], deadline: float) -> bool:
        """Processes responses until is_done() is true; calls no user callback. False: `deadline` came
        first.
        """
        while True:
            self._handle_responses()
            if is_done():
                return True
            remaining_s = min(deadline, self._offsets.commits.due, self._fetcher.due) - time.monotonic()
            if time.monotonic() >= deadline:
                return False
            if remaining_s > 0:
                self.control.wait_for(lambda: self._inbox.responses, remaining_s if remaining_s < INFINITY else -1)

    def _identity(self) -> tuple[str, int]:
        return self._runner.identity() if self._runner is not None else ("", -1)

    def _on_committed(self, key: Key, offset: int) -> None:
        part = self.parts.get(key)
        if part is not None:
            part.committed = offset

    # -- the group ---------------------------------------------------------------------------------

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
        if not all(topics):
            raise failure(KafkaError._INVALID_ARG, "Failed to set subscription: a topic's name is empty")
        self._subscription = list(topics)
        if names := self._requested_topics()[0]:
            self._metadata_version = -1
            with self.control.lock:
                self.control.metadata.refresh(names, bool(self.config["allow.auto.create.topics"]))
        if self._runner is None:
            self._join_with(consumer_protocol_core(self.config, self._member_id))
        else:
            self._runner.subscribe(*self._requested_topics())

    def _report_missing_topics(self) -> None:
        """Reports each missing subscribed topic to the application once: otherwise the group would
        wait for it silently.
        """
        for topic in self._subscription:
            info = self.control.metadata.topics.get(topic)
            if info is None or not info.error:
                self._topics_reported.discard(topic)
            elif topic not in self._topics_reported and not (
                info.error in _BEING_CREATED and self.config["allow.auto.create.topics"]
            ):
                self._topics_reported.add(topic)
                error = broker_error(info.error, f"Subscribed topic not available: {topic}")
                self._fetcher.events.append(Message(topic, 0, None, error=error))

    def _join_with(self, core: ConsumerProtocolCore | ClassicCore) -> None:
        self._runner = GroupRunner(
            self.control, self.coordinator, core, self._inbox.put_operation, self._has_progressed
        )
        self._runner.subscribe(*self._requested_topics())

    def _requested_topics(self) -> tuple[tuple[str, ...], str | None]:
        return split_subscription(self.config, self._subscription)

    def switch_to_classic_protocol(self) -> bool:
        """Joins again with the classic protocol, because the group has classic members and the broker
        admits no others (group.consumer.migration.policy). False: this member already uses it.
        """
        if self._runner is None or isinstance(self._runner.core, ClassicCore) or not self._subscription:
            return False
        _log.info("group %s stays with the classic protocol: joining with it", self.config["group.id"])
        self._runner.close()
        self._join_with(classic_core(self.config))
        return True

    def _has_progressed(self) -> bool:
        """Whether poll() has returned a record since this function was last called. Any thread; after a
        race the next call returns True.
        """
        last, previous = self._last, self._last_progress
        self._last_progress = last
        return last is not None and last is not previous

    def unsubscribe(self) -> None:
        self._require_open()
        self._subscription = []
        if self._runner is not None:
            self._runner.leave()
            self._rebalancer.wait_until_left(time.monotonic() + CLOSE_S)
        else:
            self._remove([part for part in self.parts])

    def subscription(self) -> list[str]:
        return list(self._subscription)

    def memberid(self) -> str | None:
        self._require_open()
        return self._runner.identity()[0] if self._runner is not None else ""

    def consumer_group_metadata(self) -> bytes:
        self._require_open()
        member_id, generation = self._identity()
        instance_id = self.config["group.instance.id"] if generation >= 0 else None
        return GroupMetadata(
            self.config["group.id"], generation, member_id if generation >= 0 else "", instance_id
        ).to_bytes()

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Does nothing: over shared memory a client is identified by its process's user."""

    # -- the end -----------------------------------------------------------------------------------

    def __del__(self) -> None:
        """Called when the consumer is dropped without close(): releases threads and memory, but commits
        nothing; the coordinator removes the member after the session timeout.
        """
        if not getattr(self, "_is_closed", True) and os.getpid() == self._pid:
            self._is_closed = True
            self.remote.stop()
            self._data.close()
            self.control.close()

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + CLOSE_S
        try:
            self._advance_past_returned()
            if self._runner is not None and not self.control.is_closed:
                self._runner.leave()
                self._rebalancer.wait_until_left(deadline)
            self._remove([part for part in self.parts])
            self.wait_until(lambda: not self._offsets.commits.is_busy, deadline)
            self._call_on_commit()
        except KafkaException as error:
            _log.info("closing a consumer of group %s: %s", self.config["group.id"], error)
        finally:
            self._is_closed = True
            self._offsets.commits.give_up(local_error(KafkaError._DESTROY))
            if self._runner is not None:
                self._runner.close()
            self.parts.remove([part.key for part in self.parts])
            self.remote.close()
            self._data.close()
            self.control.close()


_open_consumers: weakref.WeakSet[ShmConsumer] = weakref.WeakSet()


def _stop_in_child() -> None:
    """Called in a child of fork: records that were read ahead belong to the parent."""
    for consumer in list(_open_consumers):
        consumer._inbox.attention = True


os.register_at_fork(after_in_child=_stop_in_child)
