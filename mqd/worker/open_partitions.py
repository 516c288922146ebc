"""The partitions that this worker has open: taking them back from the reactor and closing them,
their checkpoint entries, and the clean shutdown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from mqd import native
from mqd.base import logging
from mqd.log.checkpoints import CheckpointEntry
from mqd.log.compaction import CompactionPolicy
from mqd.log.files import Files
from mqd.log.retention import RetentionPolicy
from mqd.worker import shortened_log as shortened
from mqd.worker.background import Background, run_unless_hung
from mqd.worker.catalog import Catalog, Key, OwnedPartition
from mqd.worker.commands import ReactorCommands
from mqd.worker.log_directory import LogDirectory


class OpenPartition(msgspec.Struct):
    owned: OwnedPartition
    path: Path
    log_start_offset: int
    policy: RetentionPolicy
    compaction: CompactionPolicy
    # held while the log start moves or segments are replaced
    files_lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    closing: bool = False
    truncated: bool = False  # its log was truncated, perhaps below the checkpoint's recovery point
    # set while the replica must catch up because its log was shortened (N5 in partitions.py)
    shortened_state: shortened.ShortenedState | None = None


async def run_all(awaitables: Iterable) -> None:
    """Awaits all concurrently; raises the first failure after all have ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class OpenPartitions:
    """`open`: partitions by key. `failures`: slot -> why its partition is not served."""

    def __init__(
        self,
        worker: int,
        log_dirs: list[LogDirectory],
        control: native.Control,
        reactor: native.Reactor,
        commands: ReactorCommands,
        background: Background,
        catalog: Catalog,
        static_config: dict[str, str],
        files: Files,
    ):
        self._worker = worker
        self.log_dirs = log_dirs
        self._control = control
        self._reactor = reactor
        self._commands = commands
        self._background = background
        self._catalog = catalog
        self._static_config = static_config
        self._files = files
        self.open: dict[Key, OpenPartition] = {}
        self.by_slot: dict[int, OpenPartition] = {}
        self.failures: dict[int, str] = {}
        self.scanned_bytes = 0  # bytes that opening had to read, in total
        # makes compaction release the partition's files, and waits until it has
        self.before_close: Callable[[OpenPartition], Awaitable[None]] | None = None
        self._knows_other_brokers = False  # other brokers have been passed to the reactor
        self._deletion_tasks: set[asyncio.Task[None]] = set()
        self._log = logging.get("worker.partitions")

    @property
    def broker_config(self) -> dict[str, str]:
        return {**self._static_config, **self._catalog.broker_config}

    @staticmethod
    def _checkpoint_entry(owned: OwnedPartition, offset: int) -> CheckpointEntry:
        return CheckpointEntry(owned.topic, owned.index, offset, owned.topic_id)

    def note_failed_directory(self, owned: OwnedPartition) -> None:
        """Adds the open partition to the failures if its log directory has failed."""
        log_dir = self.log_dirs[owned.log_dir]
        if log_dir.failure:
            self.failures[owned.slot] = f"{owned.name}: its log directory {log_dir.path} failed: {log_dir.failure}"

    # -- closing and deleting ----------------------------------------------------------------------

    async def _take_back(self, opened: OpenPartition, with_files_lock: bool = False) -> native.Partition | None:
        """`with_files_lock`: waits until no task is changing the partition's files."""
        opened.closing = True
        if self.before_close is not None:
            # before taking the lock: compaction, which must release the files, may be waiting for the lock
            await self.before_close(opened)
        if not with_files_lock:
            return await self._close_in_reactor(opened.owned)
        async with opened.files_lock:
            return await self._close_in_reactor(opened.owned)

    async def _close_in_reactor(self, owned: OwnedPartition) -> native.Partition | None:
        try:
            return (await self._commands.run(self._reactor.partition_close, owned.slot)).partition
        except native.NativeError as error:
            self._log.error("reactor did not return a partition", partition=owned.name, reason=str(error))
            return None
        finally:
            self.open.pop(owned.key, None)
            self.by_slot.pop(owned.slot, None)
            self.failures.pop(owned.slot, None)

    async def close_for_move(self, opened: OpenPartition) -> bool:
        """Closes the partition cleanly, so that its files are complete. Returns False if it is
        closed, but not cleanly.
        """
        partition = await self._take_back(opened, with_files_lock=True)
        return partition is not None and await self._close(opened.owned, partition, clean=True) >= 0

    async def _close_without_deleting(self, owned: OwnedPartition) -> None:
        opened = self.open.get(owned.key)
        self.failures.pop(owned.slot, None)  # if it could not be opened
        if opened is not None and (partition := await self._take_back(opened)) is not None:
            await self._close(owned, partition, clean=True)

    async def _close(self, owned: OwnedPartition, partition: native.Partition, clean: bool) -> int:
        """Returns the log end offset on disk, or -1 if closing failed."""
        try:
            log_end_offset = partition.log_end_offset
            await self._background.urgent(owned.log_dir, partition.close, clean)
            return log_end_offset
        except native.NativeError as error:
            self._log.warning(
                "partition did not close cleanly; the next start checks its log",
                partition=owned.name,
                reason=str(error),
            )
            return -1

    # -- checkpoints and shutdown ------------------------------------------------------------------

    def checkpoint_entries(self, log_dir: int) -> tuple[list[CheckpointEntry], list[CheckpointEntry]]:
        """Returns (recovery points, log starts) of the open partitions, from the published
        positions: a durable offset is published after its flush.
        """
        points, starts = [], []
        for opened in self.open.values():
            if opened.owned.log_dir == log_dir and not opened.closing:
                view = self._control.slot_view(opened.owned.slot)
                points.append(self._checkpoint_entry(opened.owned, view.durable_offset))
                starts.append(self._checkpoint_entry(opened.owned, view.log_start_offset))
        return points, starts

    def high_watermarks(self, log_dir: int) -> list[CheckpointEntry]:
        """The published high watermarks of the partitions with several replicas."""
        assignable = [
            opened.owned
            for opened in self.open.values()
            if opened.owned.gets_assignments and opened.owned.log_dir == log_dir and not opened.closing
        ]
        return [
            self._checkpoint_entry(owned, max(0, self._control.slot_view(owned.slot).high_watermark))
            for owned in assignable
        ]

    async def close_all(self, generation: int) -> list[LogDirectory]:
        """The clean shutdown: every partition is taken back from the reactor, flushed and closed;
        then the checkpoints are written; then a marker in each directory where everything
        succeeded. Returns the directories that did not respond. They get no marker, so the next
        start checks their logs. Threads may still be busy there.
        """
        for task in list(self._deletion_tasks):
            task.cancel()
        await asyncio.gather(*self._deletion_tasks, return_exceptions=True)
        hung: list[LogDirectory] = []
        await run_all(self._close_directory(log_dir, generation, hung) for log_dir in self.log_dirs)
        return hung

    async def _close_directory(self, log_dir: LogDirectory, generation: int, hung: list[LogDirectory]) -> None:
        loop = asyncio.get_running_loop()
        opened_here = [opened for opened in self.open.values() if opened.owned.log_dir == log_dir.index]
        results: list[tuple[OwnedPartition, int, int]] = []  # (partition, log end or -1, log start)
        last_step_s = loop.time()

        async def close(opened: OpenPartition) -> None:
            nonlocal last_step_s
            start = self._control.slot_view(opened.owned.slot).log_start_offset
            partition = await self._take_back(opened)
            log_end = await self._close(opened.owned, partition, clean=True) if partition is not None else -1
            results.append((opened.owned, log_end, start))
            last_step_s = loop.time()

        async def close_and_finish() -> None:
            await run_all(close(opened) for opened in opened_here)
            await self._finish_directory(log_dir, results, generation)

        if not await run_unless_hung(close_and_finish(), lambda: last_step_s):
            hung.append(log_dir)
            self._log.error(
                "log directory does not respond: it was not closed cleanly; the next start checks its logs",
                directory=str(log_dir.path),
                partitions=len(opened_here),
                closed=len(results),
            )

    async def _finish_directory(
        self, log_dir: LogDirectory, results: list[tuple[OwnedPartition, int, int]], generation: int
    ) -> None:
        closed = [result for result in results if result[1] >= 0]
        if log_dir.failure or not results:
            return
        points = [self._checkpoint_entry(owned, log_end) for owned, log_end, _ in closed]
        starts = [self._checkpoint_entry(owned, start) for owned, _, start in results]
        if len(closed) < len(results):
            return  # the last checkpoint stays valid for all partitions
        written = await self._background.slow(log_dir.index, log_dir.write_checkpoints, points, starts)
        high_watermarks = [
            self._checkpoint_entry(owned, max(0, self._control.slot_view(owned.slot).high_watermark))
            for owned, _, _ in results
            if owned.gets_assignments
        ]
        await self._background.slow(log_dir.index, log_dir.write_high_watermarks, high_watermarks)
        # a partition that could not be opened was not checked by this process, so there must be no
        # marker
        if written and not any(owned.log_dir == log_dir.index for owned in self._catalog.failed_partitions()):
            await self._background.slow(log_dir.index, log_dir.mark_clean, generation)
