"""Carries out WriteMarkers: writes a control batch to every partition of a transaction, waits until
all these batches are below the high watermarks, then posts MarkersWritten to the Core of the
transactional id.

Invariants
    M1  MarkersWritten goes only to the core object that requested the markers, and only when every
        partition has its marker or is deleted
    M2  a marker for a partition of __consumer_offsets waits until every offset commit already
        verified for its producer has been written or refused: an offset written after the
        marker would begin a transaction that is never ended
    M3  a failed write is retried with growing delays (RETRY_S) while that core exists; after a
        restart the log shows which markers remain
    M4  if a marker with a bumped epoch is refused because of that epoch, an earlier attempt has
        already written it (its coordinator died, or its response was lost), and the marker counts as
        written: any open transaction in that partition is the producer's next one. The partition's
        owner refuses the repetition only once the first marker is below the high watermark
    M5  a marker is sent only while its core still needs it. When a core is gone its successor
        writes the markers and may have finished: a late marker would then end the producer's next
        transaction, which has the same epoch if the client is older than KIP-890
Bounds: one job for each transaction that is ending, and so at most one for each transactional id.

Concurrency: the event loop's thread only. There are thousands of markers per second, so they get no
asyncio tasks of their own.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from mqd.base import logging
from mqd.coordinator.actions import Core, Effect
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import AppendError
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.coordinator.transaction.events import MarkersWritten, Partition, WriteMarkers
from mqd.protocol.errors import ErrorCode, error_name

RETRY_S = (0.01, 0.05, 0.2, 1.0)  # the last delay repeats
TRIES_PER_WARNING = 10

log = logging.get("transaction.markers")

# (topic, partition, producer id, producer epoch, coordinator epoch, is commit, is bumped) -> a future
# that is done when the marker is below the high watermark; it raises AppendError, CoordinatorError
Append = Callable[[str, int, int, int, int, bool, bool], "asyncio.Future[object]"]


class MarkerCoordinator(Protocol):
    """The part of runtime.Coordinator (the one for transactional ids) that Markers uses."""

    def core(self, name: str) -> Core | None: ...

    def post(self, name: str, event: object) -> None: ...


class OffsetCommits:
    """Tracks the TxnOffsetCommits in flight by producer id, from before their verification until
    the group has written them (M2). A marker waits only for commits that came before it. Later
    commits are verified against a transaction that is ending, and a client that sends them
    continuously, perhaps under another client's producer id, must not keep that transaction from
    ending.
    """

    def __init__(self) -> None:
        self._last_ticket = 0
        self._in_flight: dict[int, set[int]] = {}  # producer id -> tickets
        # producer id -> (tickets waited for, callback)
        self._waiting: dict[int, list[tuple[set[int], Callable[[], None]]]] = {}

    def enter(self, producer_id: int) -> int:
        """Returns a ticket for leave()."""
        self._last_ticket += 1
        self._in_flight.setdefault(producer_id, set()).add(self._last_ticket)
        return self._last_ticket

    def leave(self, producer_id: int, ticket: int) -> None:
        tickets = self._in_flight[producer_id]
        tickets.discard(ticket)
        if not tickets:
            del self._in_flight[producer_id]
        waiting = self._waiting.pop(producer_id, None)
        if waiting is None:
            return
        ready = []
        for waited_for, callback in waiting:
            waited_for.discard(ticket)
            if not waited_for:
                ready.append(callback)
        remaining = [(waited_for, callback) for waited_for, callback in waiting if waited_for]
        if remaining:
            self._waiting[producer_id] = remaining
        for callback in ready:
            callback()

    def when_done(self, producer_id: int, callback: Callable[[], None]) -> None:
        """Calls back when the commits that are in flight now are done, or immediately if there are
        none.
        """
        if producer_id in self._in_flight:
            self._waiting.setdefault(producer_id, []).append((set(self._in_flight[producer_id]), callback))
        else:
            callback()


class _Job:
    """One WriteMarkers effect in progress."""

    __slots__ = ("coordinator_epoch", "core", "effect", "remaining_count", "name", "tries")

    def __init__(self, name: str, core: Core, effect: WriteMarkers, coordinator_epoch: int) -> None:
        self.name, self.core, self.effect, self.coordinator_epoch = name, core, effect, coordinator_epoch
        self.remaining_count = len(effect.partitions)
        self.tries = 0


class Markers:
    """`exists(topic, partition)`: whether the partition, or the partition that its records are
    redirected to, exists. Only then can an open transaction remain in it.
    """

    def __init__(self, append: Append, exists: Callable[[str, int], bool], offset_commits: OffsetCommits) -> None:
        self._append = append
        self._exists = exists
        self._offset_commits = offset_commits
        self._coordinator: MarkerCoordinator | None = None
        self.job_count = 0

    def attach(self, coordinator: MarkerCoordinator) -> None:
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
        if not effect.partitions:  # another coordinator may have logged a record without partitions
            self._finish(job)

    def _core(self, name: str) -> Core | None:
        assert self._coordinator is not None
        try:
            return self._coordinator.core(name)
        except CoordinatorError:
            return None  # unloaded in the meantime; the next load starts the job again

    def _begin(self, job: _Job, partition: Partition) -> None:
        if partition[0] == OFFSETS_TOPIC:
            self._offset_commits.when_done(job.effect.producer_id, lambda: self._write(job, partition))  # M2
        else:
            self._write(job, partition)

    def _write(self, job: _Job, partition: Partition) -> None:
        if self._drop_if_gone(job):
            return
        effect = job.effect
        try:
            future = self._append(
                partition[0],
                partition[1],
                effect.producer_id,
                effect.producer_epoch,
                job.coordinator_epoch,
                effect.committed,
                effect.is_bumped,
            )
        except Exception as failure:
            self._log_failure(job, partition, failure)
            self._retry(job, partition, failure)
            return
        future.add_done_callback(lambda append: self._on_written(job, partition, append))

    def _on_written(self, job: _Job, partition: Partition, append: "asyncio.Future[object]") -> None:
        if append.cancelled():
            self._drop(job)
            return
        failure = append.exception()
        if failure is not None and not self._is_transaction_over(job, partition, failure):
            self._retry(job, partition, failure)
            return
        job.remaining_count -= 1
        if not job.remaining_count:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        self.job_count -= 1
        if self._core(job.name) is job.core:  # M1
            assert self._coordinator is not None
            # if the lease has ended in the meantime, the next load starts the job again
            with contextlib.suppress(CoordinatorError):
                self._coordinator.post(job.name, MarkersWritten(job.effect.attempt))

    def _is_transaction_over(self, job: _Job, partition: Partition, failure: BaseException) -> bool:
        """Whether the failure means that no open transaction is left in the partition."""
        if not isinstance(failure, (AppendError, CoordinatorError)):
            self._log_failure(job, partition, failure)
            return False
        code = _error_code(failure)
        if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return not self._exists(*partition)
        if code == ErrorCode.INVALID_PRODUCER_EPOCH:
            if job.effect.is_bumped:
                return True  # M4
            log.warning(
                "a marker's epoch is older than its producer's in a partition: the transaction has already ended there",
                transactional_id=job.name,
                partition=_partition_name(partition),
            )
            return True
        return False

    def _drop_if_gone(self, job: _Job) -> bool:
        """Drops the job if the core that requested the markers is gone; returns whether it is."""
        if self._core(job.name) is job.core:
            return False
        self._drop(job)
        return True

    def _drop(self, job: _Job) -> None:
        """Stops counting the job; its end is never reported (M1)."""
        self.job_count -= job.remaining_count > 0
        job.remaining_count = -1

    def _log_failure(self, job: _Job, partition: Partition, failure: BaseException) -> None:
        """Logs a failure that only a bug can cause. The write is still retried, because the
        transaction must be ended.
        """
        log.error(
            "a transaction's marker failed; retrying",
            transactional_id=job.name,
            partition=_partition_name(partition),
            reason=repr(failure),
        )

    def _retry(self, job: _Job, partition: Partition, failure: BaseException) -> None:
        job.tries += 1
        if self._drop_if_gone(job):
            return
        if job.tries % TRIES_PER_WARNING == 0:
            reason = error_name(_error_code(failure))
            log.warning(
                "a transaction's marker cannot be written yet",
                transactional_id=job.name,
                partition=_partition_name(partition),
                tries=job.tries,
                reason=reason,
            )
        delay = RETRY_S[min(job.tries, len(RETRY_S)) - 1]
        asyncio.get_running_loop().call_later(delay, self._begin, job, partition)


def _error_code(failure: BaseException) -> int:
    if isinstance(failure, AppendError):
        return failure.error
    return failure.error_code if isinstance(failure, CoordinatorError) else int(ErrorCode.UNKNOWN_SERVER_ERROR)


def _partition_name(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}"
