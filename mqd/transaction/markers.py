"""Carries WriteMarkers out: a control batch into every partition of a transaction, until all are below their high watermarks; then MarkersWritten to the core.

Invariants
    M1  MarkersWritten is told to the very core that wanted the markers, and only when every partition has its marker, or is gone
    M2  a marker into a partition of __consumer_offsets waits until offsets that were verified for its producer before are written or refused: else one that comes behind
        the marker would begin a transaction that nobody ends
    M3  what cannot be written is tried again, later and later (RETRY_S), as long as that core lives; after a restart the log says what is left
    M4  a bumped marker that is refused for its epoch has been written before (by a coordinator that died, or with an answer that was lost), and is done: whatever is open in
        that partition is the producer's next transaction
Bounds: what runs is bounded by the transactions that are being ended: one for each transactional id.

Concurrency: the event loop's thread only. No task for a marker into a partition of users: thousands a second pass here.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from mqd.base import logging
from mqd.coordinator.actions import Core, Effect
from mqd.coordinator.log import AppendError
from mqd.coordinator.runtime import CoordinatorError
from mqd.coordinator.topics import GROUPS
from mqd.protocol.errors import ErrorCode, error_name
from mqd.transaction.events import MarkersWritten, Partition, WriteMarkers

RETRY_S = (0.01, 0.05, 0.2, 1.0)  # the last one from then on
WARN_AFTER = 10

log = logging.get("transaction.markers")

# (topic, partition, producer id, producer epoch, coordinator epoch, commit, is bumped) -> done when the marker is below the high watermark; raises AppendError, CoordinatorError
Append = Callable[[str, int, int, int, int, bool, bool], "asyncio.Future[object]"]


class Coordinating(Protocol):
    """runtime.Coordinator of transactional ids, as far as it is needed here."""

    def core(self, name: str) -> Core | None: ...

    def post(self, name: str, event: object) -> None: ...


class OffsetCommits:
    """TxnOffsetCommits under way, by producer id: from before they are verified until the group has written them (M2)."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    def enter(self, producer_id: int) -> None:
        self._counts[producer_id] = self._counts.get(producer_id, 0) + 1

    def leave(self, producer_id: int) -> None:
        count = self._counts.pop(producer_id) - 1
        if count:
            self._counts[producer_id] = count
            return
        for callback in self._waiting.pop(producer_id, ()):
            callback()

    def when_none(self, producer_id: int, callback: Callable[[], None]) -> None:
        """At once when none is under way."""
        if producer_id in self._counts:
            self._waiting.setdefault(producer_id, []).append(callback)
        else:
            callback()


class _Job:
    __slots__ = ("coordinator_epoch", "core", "effect", "left_count", "name", "tries")

    def __init__(self, name: str, core: Core, effect: WriteMarkers, coordinator_epoch: int) -> None:
        self.name, self.core, self.effect, self.coordinator_epoch = name, core, effect, coordinator_epoch
        self.left_count = len(effect.partitions)
        self.tries = 0


class Markers:
    """`exists(topic, partition)`: whether the partition still does."""

    def __init__(self, append: Append, exists: Callable[[str, int], bool], offset_commits: OffsetCommits) -> None:
        self._append = append
        self._exists = exists
        self._offset_commits = offset_commits
        self._coordinator: Coordinating | None = None
        self.job_count = 0

    def attach(self, coordinator: Coordinating) -> None:
        self._coordinator = coordinator

    def carry_out(self, name: str, effect: Effect, coordinator_epoch: int) -> None:
        assert isinstance(effect, WriteMarkers)
        core = self._core(name)
        if core is None:
            return
        job = _Job(name, core, effect, coordinator_epoch)
        self.job_count += 1
        for partition in effect.partitions:
            self._begin(job, partition)

    def _core(self, name: str) -> Core | None:
        assert self._coordinator is not None
        try:
            return self._coordinator.core(name)
        except CoordinatorError:
            return None  # unloaded; whoever loads it next begins anew

    def _begin(self, job: _Job, partition: Partition) -> None:
        if partition[0] == GROUPS:
            self._offset_commits.when_none(job.effect.producer_id, lambda: self._write(job, partition))  # M2
        else:
            self._write(job, partition)

    def _write(self, job: _Job, partition: Partition) -> None:
        effect = job.effect
        future = self._append(partition[0], partition[1], effect.producer_id, effect.producer_epoch, job.coordinator_epoch, effect.committed, effect.is_bumped)
        future.add_done_callback(lambda done: self._on_written(job, partition, done))

    def _on_written(self, job: _Job, partition: Partition, done: "asyncio.Future[object]") -> None:
        if done.cancelled():
            self.job_count -= 1
            return
        failure = done.exception()
        if failure is not None and not self._is_settled(job, partition, failure):
            self._again(job, partition, failure)
            return
        job.left_count -= 1
        if job.left_count:
            return
        self.job_count -= 1
        if self._core(job.name) is job.core:  # M1
            assert self._coordinator is not None
            self._coordinator.post(job.name, MarkersWritten(job.effect.attempt))

    def _is_settled(self, job: _Job, partition: Partition, failure: BaseException) -> bool:
        """Whether there is nothing left to be ended."""
        if not isinstance(failure, (AppendError, CoordinatorError)):
            raise failure
        code = _code(failure)
        if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return not self._exists(*partition)
        if code == ErrorCode.INVALID_PRODUCER_EPOCH:
            if job.effect.is_bumped:
                return True  # M4
            log.warning("a partition has a newer epoch of a producer than its marker: it has ended that transaction", transactional_id=job.name, partition=_title(partition))
            return True
        return False

    def _again(self, job: _Job, partition: Partition, failure: BaseException) -> None:
        job.tries += 1
        if self._core(job.name) is not job.core:
            self.job_count -= job.left_count > 0
            job.left_count = -1  # M1: never told
            return
        if job.tries % WARN_AFTER == 0:
            reason = error_name(_code(failure))
            log.warning("a transaction's marker cannot be written yet", transactional_id=job.name, partition=_title(partition), tries=job.tries, reason=reason)
        delay = RETRY_S[min(job.tries, len(RETRY_S)) - 1]
        asyncio.get_running_loop().call_later(delay, self._begin, job, partition)


def _code(failure: BaseException) -> int:
    return failure.error if isinstance(failure, AppendError) else failure.error_code  # type: ignore[attr-defined]


def _title(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}"
