"""Sends a consumer's commits, one at a time and in the order of the calls, and retries them while the
coordinator is unavailable or the member's epoch has changed.

    C1  while a commit is being retried, later ones wait: an older offset never replaces a newer one
    C2  every commit ends once: `outcome` is set, then its callback is called (by the thread that
        serves callbacks)
    C3  a commit is not sent for a partition that the member has lost since the call (drop()): the
        member may have rejoined the group with a valid epoch, and the commit would rewind the
        offset of the partition's new owner. A commit sent before the loss has the epoch in which the
        member owned the partition
    C4  an offset belongs to a topic id, which is sent to the broker if it is known, so that the
        offset is not committed for a new topic of the same name. A request has either ids or names for
        all topics: names if the id of any topic is unknown
Bounds: at most QUEUE_MAX commits wait; further ones are refused with _QUEUE_FULL. A commit that has not
succeeded by its timeout ends with the last error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mqd.client import requests
from mqd.client.group.coordinator import CoordinatorLookup
from mqd.client.messages import KafkaError, KafkaException, broker_error, local_error
from mqd.client.offsets import (
    COMMIT_BY_ID_VERSION,
    COORDINATOR_UNAVAILABLE,
    STALE,
    Committed,
    Key,
    PartitionResult,
    commit_request,
    commit_version_max,
    decode_commit_response,
)
from mqd.client.shm.inbox import Inbox
from mqd.protocol.errors import ErrorCode

QUEUE_MAX = 10_000
RETRY_S = 0.1
_DROPPED_CODE = int(ErrorCode.ILLEGAL_GENERATION)  # the result of a dropped partition (C3)
_RETRIABLE = COORDINATOR_UNAVAILABLE | STALE | {ErrorCode.UNSTABLE_OFFSET_COMMIT}
_UNKNOWN = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
_RETRIABLE_LOCAL = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT})

OnCommit = Callable[[KafkaError | None, list[PartitionResult]], None]


class Commit:
    """`outcome`: None until the commit has ended, then (error of the commit or None, results by partition)."""

    __slots__ = ("codes", "deadline", "dropped", "offsets", "on_commit", "outcome")

    def __init__(self, offsets: dict[Key, Committed], on_commit: OnCommit | None, deadline: float) -> None:
        self.offsets, self.on_commit, self.deadline = offsets, on_commit, deadline
        self.outcome: tuple[KafkaError | None, list[PartitionResult]] | None = None
        self.codes: dict[Key, int] = {}  # the error codes in the last response; empty: there was none
        self.dropped: set[Key] = set()  # C3

    def remaining(self) -> dict[Key, Committed]:
        """The offsets to commit, without those of dropped partitions."""
        return (
            {key: committed for key, committed in self.offsets.items() if key not in self.dropped}
            if self.dropped
            else self.offsets
        )


class CommitQueue:
    """`identity()` -> (member id, generation). Concurrency: the application's thread."""

    def __init__(
        self,
        attachment: Any,
        inbox: Inbox,
        group_id: str,
        instance_id: str | None,
        identity: Callable[[], tuple[str, int]],
        on_committed: Callable[[Key, int], None],
        coordinator: CoordinatorLookup,
    ) -> None:
        self._attachment, self._inbox, self._coordinator = attachment, inbox, coordinator
        self._group_id, self._instance_id, self._identity, self._on_committed = (
            group_id,
            instance_id,
            identity,
            on_committed,
        )
        self._queue: deque[Commit] = deque()
        self._commit_under_way: Commit | None = None
        self._retry_at = 0.0
        self.finished: deque[Commit] = deque()  # ended, with their callbacks still to be called

    @property
    def is_busy(self) -> bool:
        return self._commit_under_way is not None or bool(self._queue)

    @property
    def supports_topic_ids(self) -> bool:
        """Whether the broker supports commits by topic id (C4)."""
        return self._attachment.api.versions.get(requests.OFFSET_COMMIT, (0, -1))[1] >= COMMIT_BY_ID_VERSION

    @property
    def due(self) -> float:
        """The time of the next advance(); infinity: not before a response."""
        return self._retry_at if self._queue and self._commit_under_way is None else float("inf")

    def add(self, offsets: dict[Key, Committed], on_commit: OnCommit | None, timeout_s: float) -> Commit:
        """Queues a commit. Raises KafkaException (_QUEUE_FULL)."""
        if len(self._queue) >= QUEUE_MAX:
            raise KafkaException(local_error(KafkaError._QUEUE_FULL, f"{QUEUE_MAX} commits wait for the coordinator"))
        commit = Commit(offsets, on_commit, time.monotonic() + timeout_s)
        self._queue.append(commit)
        self.advance()
        return commit

    def advance(self) -> None:
        while self._commit_under_way is None and self._queue and time.monotonic() >= self._retry_at:
            commit = self._queue.popleft()
            if offsets := commit.remaining():
                self._send(commit, offsets)
            else:
                self._end(commit, broker_error(_DROPPED_CODE, "commit"))

    def _send(self, commit: Commit, offsets: dict[Key, Committed]) -> None:
        self._commit_under_way = commit
        member_id, generation = self._identity()
        message = commit_request(self._group_id, member_id, generation, self._instance_id, offsets)
        try:
            version = self._attachment.api.pick(requests.OFFSET_COMMIT, commit_version_max(offsets))
            self._attachment.send(
                requests.OFFSET_COMMIT,
                version,
                message,
                lambda response, error: self._inbox.put(self._on_response, commit, response, error),
            )
        except KafkaException as problem:
            self._end(commit, problem.args[0])

    def drop(self, keys: set[Key]) -> None:
        """Drops these partitions from waiting commits and retries (C3)."""
        for commit in self._pending():
            commit.dropped.update(keys.intersection(commit.offsets))

    def has_pending(self, keys: set[Key]) -> bool:
        """Whether a commit for one of these partitions has not ended."""
        return any(not keys.isdisjoint(commit.remaining()) for commit in self._pending())

    def _pending(self) -> list[Commit]:
        return [*self._queue, *([self._commit_under_way] if self._commit_under_way is not None else ())]

    def _on_response(self, commit: Commit, response: Any, error: KafkaError | None) -> None:
        if commit is self._commit_under_way:
            self._handle_result(commit, response, error)
            self.advance()

    def _handle_result(self, commit: Commit, response: Any, error: KafkaError | None) -> None:
        if error is not None:
            self._retry_or_end(commit, error, error.code() in _RETRIABLE_LOCAL)
            return
        codes = decode_commit_response(response, commit.offsets)
        # the whole commit is retried, even if another partition's topic is refused permanently
        retriable = next((code for code in codes.values() if code in _RETRIABLE), 0)
        if retriable in COORDINATOR_UNAVAILABLE:
            self._coordinator.look_up()
        if retriable:
            self._retry_or_end(commit, broker_error(retriable, "commit"), True)
            return
        commit.codes = {key: codes.get(key, _DROPPED_CODE if key in commit.dropped else 0) for key in commit.offsets}
        failed = next((code for code in commit.codes.values() if code), 0)
        for key, code in codes.items():
            if not code and key not in commit.dropped:
                self._on_committed(key, commit.offsets[key].offset)
        # as in librdkafka, an error of one partition is the error of the commit, so that callers need
        # not check each partition
        self._end(commit, broker_error(failed, "commit") if failed else None)
        if unknown := {topic for (topic, _), code in codes.items() if code in _UNKNOWN}:
            self._refresh(unknown)

    def _refresh(self, topics: set[str]) -> None:
        """Requests the metadata of these topics. Otherwise their readers might not learn that the topics
        were deleted, and would continue to use the old ids.
        """
        with self._attachment.lock:
            cached = topics.intersection(self._attachment.metadata.topics)
            if cached:
                self._attachment.metadata.refresh(cached)

    def _retry_or_end(self, commit: Commit, error: KafkaError, is_retriable: bool) -> None:
        if not is_retriable or time.monotonic() >= commit.deadline:
            self._end(commit, error)
            return
        self._commit_under_way = None
        self._queue.appendleft(commit)
        self._retry_at = time.monotonic() + RETRY_S

    def _end(self, commit: Commit, error: KafkaError | None) -> None:
        self._commit_under_way = None
        self.finish(commit, error, _results(commit, error))

    def finish(self, commit: Commit, error: KafkaError | None, results: list[PartitionResult] | None = None) -> None:
        """Sets the outcome, and queues the callback (C2)."""
        commit.outcome = error, results or []
        if commit.on_commit is not None:
            self.finished.append(commit)
            self._inbox.notify()

    def give_up(self, error: KafkaError) -> None:
        """Ends all commits with this error, without sending them."""
        while self._commit_under_way is not None or self._queue:
            self._end(self._commit_under_way or self._queue.popleft(), error)


def _results(commit: Commit, error: KafkaError | None) -> list[PartitionResult]:
    results = []
    for (topic, index), committed in commit.offsets.items():
        code = commit.codes.get((topic, index), 0)
        outcome = broker_error(code, "commit") if code else None if commit.codes else error
        results.append(
            PartitionResult(topic, index, committed.offset, committed.metadata, committed.leader_epoch, outcome)
        )
    return results
