"""Compacts this worker's partitions, one at a time, dirtiest first (mqd/log/compaction.py decides),
on a low-priority thread, throttled.

    list -> plan -> keys of the dirty range -> group after group: rewritten (.cleaned), swapped in
    -> cleaner-offset-checkpoint

W1  the swap of a group and every move of the log start hold the partition's `files_lock`: neither
    sees segments that the other is replacing.
W2  the cleaner releases a partition (`release`) before it is taken from the reactor, so that
    nothing writes into a directory that is about to be renamed. A step takes no longer than
    processing a few MiB or flushing 32 MiB.
W3  recovery undoes or finishes the work that a stop or a crash interrupts
    (native/log/compaction/swap.c). The checkpoint moves after all groups; work that is
    interrupted before that is repeated.
W4  an unreadable log is reported once, and in the metrics, and left alone until its log start moves
    or the worker restarts; everything else continues.
W5  records that were read before the log was truncated never replace stored ones, and no truncation
    begins while a group is swapped in (segments_hold). Only after an unclean election is a
    follower's log truncated that far back, into segments that are compacted.

Concurrency: everything runs on the event loop except the steps, which run one after the other on
the cleaner's thread. Bound: one partition, one table of keys (log.cleaner.dedupe.buffer.size is
shared by all workers).
"""

import asyncio
import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mqd import native
from mqd.base import clock, logging
from mqd.base.config import broker_value
from mqd.log import compaction as policies
from mqd.log import compaction_report as reports
from mqd.log.cleaner_checkpoint import CleanerCheckpoint
from mqd.log.compaction import CompactionPlan, LogOffsets, StoredSegment
from mqd.log.files import Files
from mqd.worker import compaction_steps as steps
from mqd.worker.background import Background
from mqd.worker.catalog import Key
from mqd.worker.commands import ReactorCommands
from mqd.worker.compaction_steps import Uncleanable
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet

NICENESS = 15
RETRY_S = 60.0  # after a lack of disk space or descriptors
SWAP_PAUSE_S = 1.0
SLEEP_S_MAX = 60.0
KEY_BYTES = 24  # of an entry in the native table
MAP_BYTES_MIN = 1 << 20
_LOG_CHANGED_ERRNOS = frozenset({native.E_STALE, errno.ENOENT})
_UNREADABLE_ERRNOS = frozenset({errno.EIO})
Result = TypeVar("Result")


class _Released(Exception):
    """Another task needs the partition."""


class _Candidate(msgspec.Struct):
    opened: OpenPartition
    plan: CompactionPlan
    stored: list[StoredSegment]  # the segments to clean


class Compactor:
    def __init__(
        self,
        worker: int,
        worker_count: int,
        control: native.Control,
        reactor: native.Reactor,
        commands: ReactorCommands,
        partitions: PartitionSet,
        background: Background,
        files: Files,
        run_dir: Path,
        on_replaced: Callable[[Key], None],
    ):
        """`on_replaced`: called before and after segments of a partition are replaced under the
        same names.
        """
        self._worker = worker
        self._worker_count = worker_count
        self._control = control
        self._reactor = reactor
        self._commands = commands
        self._partitions = partitions
        self._background = background
        self._files = files
        self._run_dir = run_dir
        self._on_replaced = on_replaced
        self._thread_pool = ThreadPoolExecutor(1, "cleaner", initializer=_lower_priority)
        self._checkpoints: dict[int, CleanerCheckpoint] = {}
        self._clean_ends: dict[Key, tuple] = {}  # partition -> its ends when nothing was dirty
        self._retry_at: dict[Key, float] = {}
        # partition -> log start at the time of the failure, reason
        self._uncleanable: dict[Key, tuple[int, str]] = {}
        self._report = reports.Report()
        self._reports: dict[Key, reports.PartitionReport] = {}
        self._current: OpenPartition | None = None
        self._skip_pause = asyncio.Event()  # interrupts the throttle's sleep
        self._current_released = asyncio.Event()
        self._log = logging.get("worker.compaction")
        partitions.before_close = self.release

    # -- start and end -----------------------------------------------------------------------------

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines to run until they are cancelled."""
        return [self._run()]

    async def close(self) -> None:
        """Waits for a running step, after the tasks were cancelled."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread_pool.shutdown)

    async def release(self, opened: OpenPartition) -> None:
        """Returns when this compaction no longer touches the partition; `opened.closing` must be
        set.
        """
        while self._current is opened:
            self._skip_pause.set()
            await self._current_released.wait()
        for by_partition in (self._clean_ends, self._retry_at, self._uncleanable, self._reports):
            by_partition.pop(opened.owned.key, None)

    async def _run(self) -> None:
        if not self._value("log.cleaner.enable"):
            await asyncio.Event().wait()
        await self._publish()
        while True:
            try:
                chosen = await self._choose()
                if chosen is not None:
                    await self._compact(chosen)
                    continue
            except Exception:  # a failed compaction must not end the worker
                self._log.exception("compaction failed; retrying")
            await asyncio.sleep(self._value("log.cleaner.backoff.ms") / 1000)

    def _value(self, name: str) -> Any:
        return broker_value(self._partitions.broker_config, name)

    async def _run_in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread_pool, work, *arguments)

    # -- choosing a partition ---------------------------------------------------------------------

    async def _choose(self) -> _Candidate | None:
        best: _Candidate | None = None
        for opened in list(self._partitions.open.values()):
            candidate = await self._examine(opened) if self._may_examine(opened) else None
            if candidate is not None and (
                best is None
                or (candidate.plan.is_overdue, candidate.plan.dirty_ratio)
                > (best.plan.is_overdue, best.plan.dirty_ratio)
            ):
                best = candidate
        return best

    def _may_examine(self, opened: OpenPartition) -> bool:
        key = opened.owned.key
        if (
            not opened.compaction.is_enabled
            or opened.closing
            or self._partitions.log_dirs[opened.owned.log_dir].failure
        ):
            return False
        if self._retry_at.get(key, 0.0) > time.monotonic():
            return False
        failure = self._uncleanable.get(key)
        return failure is None or self._control.slot_view(opened.owned.slot).log_start_offset > failure[0]

    async def _examine(self, opened: OpenPartition) -> _Candidate | None:
        view = self._control.slot_view(opened.owned.slot)
        key, log_dir = opened.owned.key, self._partitions.log_dirs[opened.owned.log_dir]
        ends_seen = (view.log_start_offset, view.log_end_segment, id(opened))
        if self._clean_ends.get(key) == ends_seen:
            return None
        try:
            dirty_from = await self._first_dirty(opened)
            stored = await self._background.slow(
                log_dir.index, steps.list_stored, opened.path, view.log_end_segment, log_dir.timestamps, dirty_from or 0
            )
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._log.warning(
                    "segments cannot be listed for compaction; retrying", partition=opened.owned.name, reason=str(error)
                )
            return None
        if opened.closing or not stored or stored[-1].base_offset != view.log_end_segment:
            return None  # rolled or deleted since the view was taken; it is examined again later
        offsets = LogOffsets(
            view.log_start_offset,
            view.last_stable_offset,
            view.high_watermark_segment,
            view.high_watermark_position,
            view.durable_offset,
        )
        plan = policies.plan(stored, offsets, opened.compaction, dirty_from, clock.now_ms())
        if plan is None:
            if len(stored) == 1 or (dirty_from is not None and dirty_from >= view.log_end_segment):
                self._clean_ends[key] = ends_seen  # until the next roll
            return None
        self._report_of(opened).dirty_ratio = plan.dirty_ratio
        first = next(number for number, segment in enumerate(stored) if segment.base_offset == plan.bases[0])
        return (
            _Candidate(opened, plan, stored[first : first + plan.to_clean_count])
            if plan.is_due(opened.compaction)
            else None
        )

    async def _first_dirty(self, opened: OpenPartition) -> int | None:
        """The first offset that is not cleaned, from the cleaner checkpoint; None: nothing is
        cleaned yet.
        """
        return (await self._checkpoint_of(opened)).get(opened.owned.topic, opened.owned.index, opened.owned.topic_id)

    async def _checkpoint_of(self, opened: OpenPartition) -> CleanerCheckpoint:
        log_dir = self._partitions.log_dirs[opened.owned.log_dir]
        if log_dir.index not in self._checkpoints:
            checkpoint = CleanerCheckpoint(log_dir.path, self._worker, self._files)
            await self._background.slow(log_dir.index, checkpoint.load)
            for problem in checkpoint.problems:
                self._log.warning(
                    "cleaner checkpoint cannot be read; its partitions are compacted again", reason=problem
                )
            self._checkpoints[log_dir.index] = checkpoint
        return self._checkpoints[log_dir.index]

    # -- one partition -----------------------------------------------------------------------------

    async def _compact(self, chosen: _Candidate) -> None:
        opened, began = chosen.opened, time.monotonic()
        self._current = opened
        self._skip_pause.clear()
        self._current_released.clear()
        compaction: native.Compaction | None = None
        try:
            if opened.closing:
                return
            # the count of truncations must be taken before anything is read (W5)
            truncation_count = (await self._commands.run(self._reactor.segments_hold, opened.owned.slot, -1)).offset
            options = await self._run_in_thread(self._options, chosen)
            compaction = await self._run_in_thread(native.Compaction, opened.path, chosen.plan.bases, options)
            await self._carry_out(chosen, compaction, truncation_count)
            self._record_run(opened, compaction.figures(), time.monotonic() - began)
        except _Released:
            pass
        except Uncleanable as error:
            self._give_up(opened, str(error))
        except OSError as error:
            self._on_failure(opened, error)
        finally:
            if compaction is not None:
                self._thread_pool.submit(compaction.close)  # after the step that may be running
            try:
                await asyncio.shield(self._run_in_thread(int))  # int() does nothing: waits until the thread is idle
            finally:
                self._current = None
                self._current_released.set()
        await self._publish()

    def _options(self, chosen: _Candidate) -> native.CompactOptions:
        """Blocking."""
        plan, policy = chosen.plan, chosen.opened.compaction
        share_bytes = int(self._value("log.cleaner.dedupe.buffer.size")) // self._worker_count
        load_percent = max(1, min(95, int(100 * self._value("log.cleaner.io.buffer.load.factor"))))
        needed_bytes = (plan.bases[-1] + 1 - plan.first_dirty_offset) * KEY_BYTES * 110 // load_percent
        return native.CompactOptions(
            first_dirty_offset=plan.first_dirty_offset,
            to_clean_count=plan.to_clean_count,
            now_ms=clock.now_ms(),
            delete_retention_ms=policy.delete_retention_ms,
            snapshot_offset=steps.newest_snapshot(chosen.opened.path),
            end_position=plan.end_position,
            map_bytes=max(MAP_BYTES_MIN, min(share_bytes, needed_bytes)),
            map_load_percent=load_percent,
            index_interval_bytes=policy.index_interval_bytes,
        )

    async def _carry_out(self, chosen: _Candidate, compaction: native.Compaction, truncation_count: int) -> None:
        opened, plan = chosen.opened, chosen.plan
        await self._run_steps(opened, compaction)
        figures = compaction.figures()
        stored = chosen.stored[: figures.to_clean_count]
        bases = [*plan.bases, plan.bases[-1] + 1]
        for first, count in policies.merge_groups(
            stored, bases[figures.to_clean_count], opened.compaction.segment_bytes
        ):
            await self._run_in_thread(compaction.group_begin, first, count)
            await self._run_steps(opened, compaction)
            group = await self._run_in_thread(compaction.group_end)
            if group.changed:
                await self._swap(
                    opened, bases[first : first + count], bases[first + count], group.has_transactions, truncation_count
                )
        owned = opened.owned
        checkpoint = await self._checkpoint_of(opened)
        await self._background.slow(
            owned.log_dir, checkpoint.put, owned.topic, owned.index, owned.topic_id, figures.mapped_end
        )

    async def _run_steps(self, opened: OpenPartition, compaction: native.Compaction) -> None:
        """Runs steps until done, no faster than log.cleaner.io.max.bytes.per.second allows."""
        done = False
        while not done:
            began = time.monotonic()
            done, processed_bytes = await self._run_in_thread(steps.advance, compaction)
            if opened.closing:
                raise _Released
            rate = float(self._value("log.cleaner.io.max.bytes.per.second")) / self._worker_count
            pause = min(SLEEP_S_MAX, processed_bytes / rate - (time.monotonic() - began))
            if pause > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):  # wait_for would lose a cancellation that comes with the event
                        await self._skip_pause.wait()

    async def _swap(
        self, opened: OpenPartition, bases: list[int], end_offset: int, has_transactions: bool, truncation_count: int
    ) -> None:
        """Replaces the old files with the new ones (W1, W5). Once prepared, the swap is completed
        even if the reactor no longer serves the partition.
        """
        slot = opened.owned.slot
        async with opened.files_lock:
            hold_event = await self._commands.run(self._reactor.segments_hold, slot, 1)
            try:
                if hold_event.offset != truncation_count:
                    raise native.NativeError(native.E_STALE, "the log was truncated meanwhile")
                await self._install(opened, bases, end_offset, has_transactions)
            finally:
                with contextlib.suppress(native.NativeError):  # it is no longer served
                    await self._commands.run(self._reactor.segments_hold, slot, 0)

    async def _install(self, opened: OpenPartition, bases: list[int], end_offset: int, has_transactions: bool) -> None:
        view = self._control.slot_view(opened.owned.slot)
        if opened.closing:
            raise _Released
        if view.log_start_offset >= end_offset or (len(bases) > 1 and view.log_start_offset >= bases[1]):
            raise native.NativeError(native.E_STALE, "the log start has passed these segments")
        self._on_replaced(opened.owned.key)
        await self._run_in_thread(native.compact_swap_prepare, opened.path, bases[0], bases[1:], has_transactions)
        try:
            await self._commands.run(self._reactor.segments_replaced, opened.owned.slot, bases[0], bases[-1])
        except native.NativeError:
            await self._run_in_thread(native.compact_swap_undo, opened.path, bases[0])
            raise
        await self._complete(native.compact_swap_install, opened, bases[0])
        await self._reload_segments(opened, bases[0])
        await self._complete(native.compact_swap_finish, opened, bases[0])
        await self._reload_segments(opened, bases[0])  # closes the descriptors of deleted files
        log_dir = self._partitions.log_dirs[opened.owned.log_dir]
        await self._background.slow(log_dir.index, log_dir.timestamps.forget, opened.path)
        self._on_replaced(opened.owned.key)

    async def _complete(self, step: Callable[[Path, int], None], opened: OpenPartition, base: int) -> None:
        def on_failure(error: OSError) -> None:
            self._log.error(
                "compacted segments cannot be put in place; readers of committed records wait; retrying",
                partition=opened.owned.name,
                reason=str(error),
            )

        await until_done(lambda: self._run_in_thread(step, opened.path, base), lambda: opened.closing, on_failure)

    async def _reload_segments(self, opened: OpenPartition, base: int) -> None:
        await self._commands.run(self._reactor.segments_replaced, opened.owned.slot, base, base)

    # -- outcomes ----------------------------------------------------------------------------------

    def _report_of(self, opened: OpenPartition) -> reports.PartitionReport:
        return self._reports.setdefault(
            opened.owned.key, reports.PartitionReport(opened.owned.topic, opened.owned.index)
        )

    def _record_run(self, opened: OpenPartition, figures: native.CompactFigures, seconds: float) -> None:
        report, total = self._report_of(opened), self._report
        report.runs += 1
        report.finished_ms = clock.now_ms()
        report.dirty_ratio, report.uncleanable = 0.0, ""
        self._uncleanable.pop(opened.owned.key, None)
        total.runs += 1
        total.seconds += seconds
        for name in ("read_bytes", "written_bytes", "records_read", "records_kept"):
            setattr(total, name, getattr(total, name) + getattr(figures, name))
        self._log.info(
            "partition compacted",
            partition=opened.owned.name,
            records_read=figures.records_read,
            records_kept=figures.records_kept,
            read_bytes=figures.read_bytes,
            written_bytes=figures.written_bytes,
            clean_to=figures.mapped_end,
            seconds=round(seconds, 3),
        )
        if figures.records_without_key:
            self._log.warning(
                "records without a key were dropped: they were written before the topic was compacted",
                partition=opened.owned.name,
                records=figures.records_without_key,
            )

    def _give_up(self, opened: OpenPartition, reason: str) -> None:
        self._report.failures += 1
        self._uncleanable[opened.owned.key] = (self._control.slot_view(opened.owned.slot).log_start_offset, reason)
        self._report_of(opened).uncleanable = reason
        self._log.error(
            "partition cannot be compacted and is left as it is; everything else continues",
            partition=opened.owned.name,
            reason=reason,
        )

    def _on_failure(self, opened: OpenPartition, error: OSError) -> None:
        if error.errno in _UNREADABLE_ERRNOS:
            self._give_up(opened, str(error))
            return
        self._retry_at[opened.owned.key] = time.monotonic() + (1.0 if error.errno in _LOG_CHANGED_ERRNOS else RETRY_S)
        if error.errno not in _LOG_CHANGED_ERRNOS and not opened.closing:
            self._report.failures += 1
            self._log.warning("compaction failed; retrying", partition=opened.owned.name, reason=str(error))

    async def _publish(self) -> None:
        self._report.partitions = list(self._reports.values())
        try:
            await self._run_in_thread(reports.write, self._run_dir, self._worker, self._report)
        except OSError as error:
            self._log.warning("the metrics of compaction cannot be written", reason=str(error))


async def until_done(
    attempt: Callable[[], Awaitable[None]],
    is_closing: Callable[[], bool],
    on_failure: Callable[[OSError], None],
    pause_s: float = SWAP_PAUSE_S,
) -> None:
    """Repeats `attempt` while a disk refuses it: a swap that has begun must be completed. Calls
    `on_failure` at the first refusal. Raises OSError when the partition is being closed; recovery
    then completes the swap.
    """
    for number in itertools.count():
        try:
            await attempt()
            return
        except OSError as error:
            if is_closing():
                raise
            if number > 0 and error.errno == errno.ENOENT:
                return  # the swap's list is already removed: only the sync of its directory had failed
            if number == 0:
                on_failure(error)
        await asyncio.sleep(pause_s)


def _lower_priority() -> None:
    try:
        # on Linux niceness is per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError:
        pass  # not permitted here: only the priority is affected
