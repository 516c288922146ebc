"""The worker's periodic tasks: space, checkpoints, retention, connection credits. The decisions are
pure functions (mqd/log/retention, space; mqd/shm/credits); this module connects them to the clock,
the disk and the reactor.

    every second       free space of each log directory; credits of connections and of local memory;
                       pruning of checkpoints; all less often while nothing is connected
                       (periodic_work.py)
    CHECKPOINT_S       checkpoints, if an offset has moved; sooner after a roll; less often while
                       nothing is connected
    FREE_SPACE_S       retention by free space, when configured
    log.retention.check.interval.ms   retention by age and size

U1  the log start moves in the reactor first, then in the checkpoint, then files are deleted. Files
    are deleted even if the checkpoint cannot be written (they must make room on a full disk):
    recovery uses the first segment's base if the checkpoint is older.
U2  a tick that takes longer than its period delays the next one; ticks of one kind never overlap.
U3  each log directory has its own checkpoints, retention and pruning: one that does not respond
    does not delay the others.
"""

import asyncio
import contextlib
import errno
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from mqd import native
from mqd.base import clock, logging
from mqd.base.config import broker_number
from mqd.log import segments
from mqd.log.batches import first_timestamp_ms
from mqd.log.files import Files
from mqd.log.retention import Candidate, RetentionDecision, decide, log_starts_after_freeing
from mqd.log.segments import Segment
from mqd.shm.credits import Credits
from mqd.worker.background import Background
from mqd.worker.commands import ReactorCommands
from mqd.worker.local import LocalBudget
from mqd.worker.log_directory import LogDirectory
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet
from mqd.worker.periodic_work import Pace, PeriodicWork

TICK_S = 1.0
CHECKPOINT_S = 3.0
CHECKPOINT_AFTER_ROLL_S = 0.2
FREE_SPACE_S = 2.0
SPACE_RESPONSE_S = 0.5


def scan_max_timestamp(path: Path, base_offset: int, from_position: int) -> tuple[int, int]:
    """Implements segments.ScanMaxTimestamp with the native scan of batch headers. If the file was
    truncated since the earlier scan (after a failed write), scans from the start.
    """
    if from_position > os.stat(path).st_size:
        from_position = 0
    try:
        result = native.segment_scan(path, base_offset, from_position, check_crc=False)
    except native.NativeError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return result.valid_bytes, result.max_timestamp_ms


def _truncation_marks(truncated: list[OpenPartition]) -> list[Path]:
    """Blocking. Returns the files truncated.NUMBER of these partitions. They are obsolete once a
    later checkpoint is on disk.
    """
    return [
        mark for opened in truncated if not opened.closing for mark in opened.path.glob(f"{native.TRUNCATED_PREFIX}*")
    ]


def _remove_marks(marks: list[Path]) -> None:
    """Blocking. A mark that remains makes the next recovery slower; no records are lost."""
    with contextlib.suppress(OSError):
        for mark in marks:
            mark.unlink(missing_ok=True)


class Upkeep:
    def __init__(
        self,
        worker: int,
        worker_count: int,
        control: native.Control,
        reactor: native.Reactor,
        commands: ReactorCommands,
        partitions: PartitionSet,
        background: Background,
        credits: Credits,
        local: LocalBudget,
        connection_count_max: int,
        files: Files,
        periodic_work: PeriodicWork | None = None,
    ):
        self._worker = worker
        self._worker_count = worker_count
        self._control = control
        self._reactor = reactor
        self._commands = commands
        self._partitions = partitions
        self._background = background
        self._credits = credits
        self._local = local
        # allowed by the process's descriptor limit
        self._connection_count_max = connection_count_max
        self._files = files
        self._periodic_work = periodic_work or PeriodicWork()
        self._wake_checkpoints = {log_dir.index: asyncio.Event() for log_dir in partitions.log_dirs}
        self._prune_at_version: int | None = None
        self._space_requests: dict[int, asyncio.Future[int]] = {}
        # called when a log directory has become full, or has space again
        self.on_space: Callable[[], None] = lambda: None
        self._log = logging.get("worker.upkeep")

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines to run until they are cancelled."""
        coroutines: list[Coroutine[Any, Any, None]] = [
            self._run_at_ticks(self._periodic_work.ticks(TICK_S, self._awaits_space), self._tick, "tick"),
            self._run_at_ticks(
                self._periodic_work.ticks(TICK_S, self._is_prune_due), self.maybe_prune, "pruning of checkpoints"
            ),
        ]
        for log_dir in self._partitions.log_dirs:
            coroutines.append(self._checkpoint_loop(log_dir))
            coroutines.append(
                self._run_at_ticks(
                    self._periodic_work.ticks(FREE_SPACE_S, self._must_keep_space_free),
                    partial(self._keep_space_free, log_dir),
                    "retention by free space",
                )
            )
            coroutines.append(
                self._run_at_ticks(self._retention_ticks(), partial(self._apply_retention, log_dir), "retention")
            )
        return coroutines

    async def _run_at_ticks(self, ticks: AsyncIterator[None], work: Callable[[], Awaitable[None]], name: str) -> None:
        async for _ in ticks:
            try:
                await work()
            except OSError as error:
                self._log.warning("maintenance failed; retrying", work=name, reason=str(error))

    # -- work that continues while nothing is connected ----------------------------------------------

    def on_resumed(self) -> None:
        """The reactor is no longer idle."""
        self._periodic_work.on_resumed()
        self.on_rolled()

    def _awaits_space(self) -> bool:
        return bool(self._space_requests) or any(log_dir.space_guard.is_full for log_dir in self._partitions.log_dirs)

    def _is_prune_due(self) -> bool:
        return self._prune_at_version is not None

    def _must_keep_space_free(self) -> bool:
        return broker_number(self._partitions.broker_config, "retention.free.bytes") >= 0

    # -- space, credits ----------------------------------------------------------------------------

    async def _tick(self) -> None:
        self.adjust_credits()
        await self.measure_space()

    async def measure_space(self) -> None:
        """Also runs before the worker is ready, so that even the first write to a full disk is
        refused. Waits SPACE_RESPONSE_S at most.
        """
        await asyncio.gather(
            *(self._measure_space(log_dir) for log_dir in self._partitions.log_dirs if not log_dir.failure)
        )

    def adjust_credits(self) -> None:
        """Also runs when connections were refused."""
        if self._credits.adjust(self._control.connection_count(self._worker)):
            self.limit_connections()
        if self._local.adjust(self._control.local_usage(self._worker)[1]):
            self._local.apply(self._reactor)

    def on_applied(self) -> None:
        """Called when metadata has been applied. The configuration may have changed, and that does
        not make an idle reactor resume.
        """
        self.limit_connections()
        if self._periodic_work.is_idle():
            self._periodic_work.on_resumed()

    def limit_connections(self) -> None:
        """Allows as many connections as were granted, or fewer if the process's descriptors do not
        suffice for all.
        """
        broker_count_max = broker_number(self._partitions.broker_config, "max.connections")
        self._reactor.set_connection_max(min(self._credits.granted_count, self._connection_count_max), broker_count_max)

    async def _measure_space(self, log_dir: LogDirectory) -> None:
        config = self._partitions.broker_config
        log_dir.space_guard.reserve_bytes = broker_number(config, "log.dirs.free.bytes.min")
        request = self._space_requests.get(log_dir.index)
        if request is None:
            request = self._space_requests[log_dir.index] = asyncio.ensure_future(
                self._background.urgent(log_dir.index, log_dir.free_bytes)
            )
        done, _ = await asyncio.wait([request], timeout=SPACE_RESPONSE_S)
        if not done:
            self._log.warning("file system does not respond", log_dir=str(log_dir.path))
            return  # the same query is still pending: a hanging disk must not occupy more threads
        self._space_requests.pop(log_dir.index, None)  # concurrent callers share the result
        try:
            free_bytes = request.result()
        except OSError as error:
            self._log.warning("free space cannot be read", log_dir=str(log_dir.path), reason=str(error))
            return
        if log_dir.space_guard.on_free_bytes(free_bytes, clock.monotonic_ms()):
            await self._report_space(log_dir, free_bytes)

    async def _report_space(self, log_dir: LogDirectory, free_bytes: int) -> None:
        is_full = log_dir.space_guard.is_full
        await self._commands.run(self._reactor.set_log_dir_full, log_dir.index, is_full)
        self.on_space()
        if is_full:
            self._log.error(
                "log directory is full: Produce is refused until space returns; free some, or shorten retention",
                log_dir=str(log_dir.path),
                free_bytes=free_bytes,
                reserve_bytes=log_dir.space_guard.reserve_bytes,
            )
        else:
            self._log.info("log directory has space again", log_dir=str(log_dir.path), free_bytes=free_bytes)

    async def on_log_dir_full(self, log_dir: LogDirectory) -> None:
        """A write got ENOSPC."""
        if log_dir.space_guard.on_write_refused(clock.monotonic_ms()):
            await self._report_space(log_dir, 0)

    # -- checkpoints -------------------------------------------------------------------------------

    def prune_when_applied(self, version: int) -> None:
        """Prunes once every worker has applied this image, and so has written its checkpoints.
        Called when this worker has written its own.
        """
        if self._prune_at_version is None:
            self._prune_at_version = version

    async def maybe_prune(self) -> None:
        version = self._prune_at_version
        if version is None or self._control.metadata_version < version:
            return
        self._prune_at_version = None
        failed = self._partitions.failed_names()
        # no directory waits for a hanging one
        pruned = await asyncio.gather(
            *(self._background.slow(log_dir.index, log_dir.prune, failed) for log_dir in self._partitions.log_dirs)
        )
        if not all(pruned):
            self.prune_when_applied(version)

    def on_rolled(self) -> None:
        for wake in self._wake_checkpoints.values():
            wake.set()

    def on_truncated(self, slot: int) -> None:
        """A follower's log was truncated: the recovery point in the checkpoint may be above its
        new end (native/log/recovery/truncation.h).
        """
        opened = self._partitions.by_slot.get(slot)
        if opened is not None:
            opened.truncated = True
            self._wake_checkpoints[opened.owned.log_dir].set()

    async def on_leader_log_start(self, slot: int, offset: int) -> None:
        """The leader has deleted its log below `offset`; this follower does the same."""
        opened = self._partitions.by_slot.get(slot)
        if opened is not None and not opened.closing:
            await self.advance_start(opened, self._partitions.log_dirs[opened.owned.log_dir], offset)

    async def _checkpoint_loop(self, log_dir: LogDirectory) -> None:
        wake = self._wake_checkpoints[log_dir.index]
        pace = Pace(self._periodic_work)
        while True:
            try:
                # wait_for would lose a cancellation that comes with the event
                async with asyncio.timeout(pace.wait_s(CHECKPOINT_S)):
                    await wake.wait()
                # time to flush the rolled segment; there may be more rolls
                await asyncio.sleep(CHECKPOINT_AFTER_ROLL_S)
            except TimeoutError:
                pass
            wake.clear()
            await self.checkpoint(log_dir)

    async def checkpoint(self, log_dir: LogDirectory) -> bool:
        """Writes the changes. Returns False if they could not be written.

        A truncation mark is removed once the checkpoint on disk has positions that were read after
        the truncation (native/log/recovery/truncation.h).
        """
        truncated = [
            opened
            for opened in self._partitions.open.values()
            if opened.truncated and opened.owned.log_dir == log_dir.index
        ]
        marks = await self._background.slow(log_dir.index, _truncation_marks, truncated) if truncated else []
        for opened in truncated:
            opened.truncated = False
        points, starts = self._partitions.checkpoint_entries(log_dir.index)
        await self._background.slow(
            log_dir.index, log_dir.write_high_watermarks, self._partitions.high_watermarks(log_dir.index)
        )
        written = await self._background.slow(log_dir.index, log_dir.write_checkpoints, points, starts)
        if not written:
            for opened in truncated:
                opened.truncated = True
        elif marks:
            await self._background.slow(log_dir.index, _remove_marks, marks)
        return written

    # -- retention ---------------------------------------------------------------------------------

    def _retention_interval_s(self) -> float:
        interval_ms = broker_number(self._partitions.broker_config, "log.retention.check.interval.ms")
        return interval_ms / 1000 * random.uniform(0.9, 1.1)  # spreads the workers' checks in time

    async def _retention_ticks(self) -> AsyncIterator[None]:
        while True:
            await asyncio.sleep(self._retention_interval_s())
            yield

    async def _apply_retention(self, log_dir: LogDirectory) -> None:
        for opened in [opened for opened in self._partitions.open.values() if opened.owned.log_dir == log_dir.index]:
            if opened.closing or log_dir.failure:
                continue
            view = self._control.slot_view(opened.owned.slot)
            try:
                decision = await self._background.slow(log_dir.index, self._decide, opened, view, log_dir)
                await self._carry_out(opened, log_dir, decision)
            except OSError as error:
                if not opened.closing:
                    self._log.warning("retention failed; retrying", partition=opened.owned.name, reason=str(error))

    def _decide(self, opened: OpenPartition, view: native.SlotView, log_dir: LogDirectory) -> RetentionDecision:
        """Blocking."""
        stored = segments.list_segments(opened.path, view.log_end_segment, log_dir.timestamps)
        if not stored or stored[-1].base_offset != view.log_end_segment:
            return RetentionDecision()  # rolled or deleted since the view was taken; decided the next time
        first_ms = (
            first_timestamp_ms(segments.segment_path(opened.path, view.log_end_segment))
            if stored[-1].size_bytes
            else -1
        )
        return decide(
            stored, opened.policy, time.time_ns() // 1_000_000, view.log_start_offset, view.high_watermark, first_ms
        )

    async def _carry_out(self, opened: OpenPartition, log_dir: LogDirectory, decision: RetentionDecision) -> None:
        if decision.new_start_offset is not None and not opened.closing:
            start = await self.advance_start(opened, log_dir, decision.new_start_offset)
            self._log.info(
                "old segments deleted", partition=opened.owned.name, reason=decision.reason, log_start_offset=start
            )
        if decision.should_roll and not opened.closing:
            await self._commands.run(self._reactor.roll, opened.owned.slot)

    async def advance_start(self, opened: OpenPartition, log_dir: LogDirectory, offset: int) -> int:
        """Moves the log start (U1) and removes the files below it. Returns the new start. Raises
        OSError if the start did not move.
        """
        async with opened.files_lock:
            return await self._advance_start(opened, log_dir, offset)

    async def _advance_start(self, opened: OpenPartition, log_dir: LogDirectory, offset: int) -> int:
        # closed while this call waited for the lock: the slot may soon belong to another partition
        if opened.closing:
            raise OSError(errno.ESTALE, "the partition is no longer served here")
        event = await self._commands.run(self._reactor.advance_start, opened.owned.slot, offset)
        opened.log_start_offset = event.offset
        written = await self.checkpoint(log_dir)
        try:
            removed = await self._background.slow(log_dir.index, self._remove_below, opened, event.offset, log_dir)
            # repeated so that readers reopen their files: a deleted file frees no space while it is
            # open
            if removed and not opened.closing:
                await self._commands.run(self._reactor.advance_start, opened.owned.slot, event.offset)
        except OSError as error:
            self._log.warning(
                "files of deleted segments cannot be removed; retrying", partition=opened.owned.name, reason=str(error)
            )
        if not written:
            await self.checkpoint(log_dir)  # the disk was full: there may be room now
        return event.offset

    def _remove_below(self, opened: OpenPartition, log_start_offset: int, log_dir: LogDirectory) -> bool:
        """Blocking. Deletes the files of whole segments below the start; the segment that contains
        the start stays. Returns whether any were deleted. Works through the directory's descriptor:
        by the time the thread runs, the partition may have been deleted and its name reused.
        """
        fd = os.open(opened.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # if the partition is still open here, the opened directory is its own, even if it is
            # renamed later
            if opened.closing:
                return False
            directory = Path(f"/proc/self/fd/{fd}")
            first_kept = max(
                (base for base in segments.base_offsets(directory) if base <= log_start_offset), default=None
            )
            if first_kept is None:
                return False
            to_delete = list(segments.files_below(directory, first_kept))
            for file in to_delete:
                self._files.unlink(file)
        finally:
            os.close(fd)
        log_dir.timestamps.forget_below(opened.path, first_kept)
        return bool(to_delete)

    async def _keep_space_free(self, log_dir: LogDirectory) -> None:
        free_target = broker_number(self._partitions.broker_config, "retention.free.bytes")
        if free_target < 0 or log_dir.failure:
            return
        missing_bytes = free_target - await self._background.slow(log_dir.index, log_dir.free_bytes)
        if missing_bytes > 0:
            # every worker frees its part; the next check requests what is still missing
            await self._make_room(log_dir, -(-missing_bytes // self._worker_count))

    async def _make_room(self, log_dir: LogDirectory, bytes_needed: int) -> None:
        views = {
            opened.owned.key: self._control.slot_view(opened.owned.slot)
            for opened in self._partitions.open.values()
            if opened.owned.log_dir == log_dir.index
        }
        partitions = {key: self._partitions.open[key] for key in views}
        candidates = []
        for key, opened in partitions.items():
            stored: list[Segment] = await self._background.slow(
                log_dir.index, segments.list_segments, opened.path, views[key].log_end_segment, log_dir.timestamps
            )
            candidates.append(
                Candidate(key, stored, views[key].log_start_offset, views[key].high_watermark, opened.policy.may_delete)
            )
        for key, offset in log_starts_after_freeing(candidates, bytes_needed).items():
            if not partitions[key].closing:
                start = await self.advance_start(partitions[key], log_dir, offset)
                self._log.info(
                    "old segments deleted",
                    partition=partitions[key].owned.name,
                    reason="free space",
                    log_start_offset=start,
                )
