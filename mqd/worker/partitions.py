"""The partitions that this worker has open: opening with recovery, passing to the reactor and
taking back, closing, deleting.

Required order
    N1  a directory is prepared (D1..D3 of log/directories.py) before its log is opened; new
        directories are made durable before they are announced.
    N2  partitions with existing data are entered in this worker's own checkpoint before they are
        passed to the reactor (C3 of log/checkpoints.py).
    N3  a partition that cannot be opened is OFFLINE and listed in the failures; all others
        continue.
    N4  a deleted partition's directory is renamed, durably, before the removal is reported as
        applied; its files are deleted later.
    N5  if recovery has cut a replica's log below acknowledged records, the replica follows and does
        not lead (shortened_log.py). If the log ends below the end that a predecessor of this worker
        has published since the broker started, the replica stays offline until the broker is
        restarted, because the replicas that rely on it do not know of the loss.
    N6  missing segments are logged as an ERROR. A sole replica is served with the remaining
        segments, and keeps its old log end. One of several replicas is treated as shortened if
        its end is missing. With a gap in the middle, which replication would never fill, it stays
        offline.
    N7  if a broken invariant has aborted the worker RECOVERY_ABORTS_MAX times while it recovered a
        partition, the partition is offline until the broker is restarted.

Concurrency: methods run on the event loop; blocking work runs in Background. One change at a time
(the caller's lock); upkeep may run concurrently: an OpenPartition that is `closing` is left alone.
"""

import asyncio
import errno
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec

from mqd import native
from mqd.base.views import VIEW_FILTER, VIEW_OF
from mqd.base.views.conditions import compile_filter
from mqd.cluster.host.images import LOG_DIR_NONE
from mqd.cluster.host.messages import BrokerImage, TopicImage
from mqd.log import directories, moving
from mqd.worker import shortened_log as shortened
from mqd.worker.assignments import Assignment, leader_worker
from mqd.worker.catalog import Changes, OwnedPartition
from mqd.worker.log_directory import LogDirectory
from mqd.worker.open_partitions import OpenPartition, OpenPartitions, run_all
from mqd.worker.options import compaction_policy, log_options, retention_policy

_TRANSIENT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
RECOVERY_ABORTS_MAX = 2


class _OpenResult(msgspec.Struct):
    owned: OwnedPartition
    path: Path
    partition: native.Partition
    recovery: native.Recovery
    existed: bool


def _abort_reason(path: Path, abort_count: int) -> str:
    return (
        f"its worker has aborted {abort_count} times while opening it, because of a broken invariant (see the worker's"
        f" log); all other partitions are served. To check its files, run `mqd log verify {path}`; to try once more,"
        " restart the broker"
    )


class PartitionSet(OpenPartitions):
    """Opens, closes and deletes partitions according to the metadata."""

    async def apply(self, changes: Changes) -> None:
        """Returns when everything is applied; failures are in `failures`."""
        if changes.brokers is not None:
            await self._put_brokers(changes.brokers)
        for topic in changes.forget_topics:
            await self._ignore_missing(self._commands.run(self._reactor.topic_remove, topic.topic_id))
        await run_all(self._close_without_deleting(owned) for owned in changes.close)
        await run_all(self._delete(owned) for owned in changes.delete)
        await run_all(self._put_topic(topic) for topic in changes.put_topics)
        if changes.open:
            await self._open_all(changes.open)
        await run_all(self._set_epoch(owned) for owned in changes.set_epoch)
        await run_all(self._set_options(owned) for owned in changes.set_options)
        await run_all(self._assign(owned, assignment) for owned, assignment in changes.assign)

    async def _ignore_missing(self, command: Awaitable[native.Event]) -> None:
        try:
            await command
        except native.NativeError as error:
            self._log.warning("reactor does not know a removed topic", reason=str(error))

    async def _put_brokers(self, brokers: list[BrokerImage]) -> None:
        """Passes the brokers to the reactor. A host that has never known another broker does not
        need this: its clients are not directed to other hosts.
        """
        node_id = self._catalog.cluster.node_id
        if self._knows_other_brokers or any(broker.node_id != node_id for broker in brokers):
            self._knows_other_brokers = True
            await self._commands.run(
                self._reactor.brokers_put,
                node_id,
                [(broker.node_id, broker.host, broker.port, broker.rack) for broker in brokers],
            )

    async def _put_view(self, view: TopicImage) -> None:
        base = self._catalog.base_of(view)
        entries = [
            (partition.slot, partition.leader, partition.leader_epoch, -1, 0, 0)
            for partition in (base.partitions if base is not None else ())
        ]
        await self._commands.run(
            self._reactor.view_put,
            view.topic_id,
            view.name,
            entries,
            view.config[VIEW_OF],
            compile_filter(view.config[VIEW_FILTER]),
        )

    async def _put_topic(self, topic: TopicImage) -> None:
        if topic.config.get(VIEW_OF):
            await self._put_view(topic)
            return
        node_id = self._catalog.cluster.node_id
        unplaced = [
            partition.index
            for partition in topic.partitions
            if partition.slot < 0 and partition.log_dir != LOG_DIR_NONE
        ]
        if unplaced:
            self._log.error(
                "no partition slot is free: some replicas are not served",
                topic=topic.name,
                partitions=str(unplaced[:10]),
            )
        if (
            all(
                partition.slot >= 0 and not partition.retiring and partition.leader in (node_id, partition.replicas[0])
                for partition in topic.partitions
            )
            and not self._knows_other_brokers
        ):
            await self._commands.run(
                self._reactor.topic_put, topic.topic_id, topic.name, [partition.slot for partition in topic.partitions]
            )
            return
        cluster = self._catalog.cluster
        entries = [
            (
                partition.slot,
                partition.leader,
                partition.leader_epoch,
                partition.redirect,
                partition.retiring,
                leader_worker(topic, partition, cluster),
            )
            for partition in topic.partitions
        ]
        await self._commands.run(self._reactor.topic_put_partitions, topic.topic_id, topic.name, entries)

    # -- opening -----------------------------------------------------------------------------------

    async def _open_all(self, to_open: list[OwnedPartition]) -> None:
        views = {owned.key: self._control.slot_view(owned.slot) for owned in to_open}
        results = await asyncio.gather(
            *(self._background.urgent(owned.log_dir, self._open_one, owned, views[owned.key]) for owned in to_open),
            return_exceptions=True,
        )
        opened: list[_OpenResult] = []
        for owned, result in zip(to_open, results, strict=True):
            if isinstance(result, _OpenResult):
                opened.append(result)
            elif isinstance(result, Exception):
                self._record_failure(owned, str(result), result)
            elif isinstance(result, BaseException):
                raise result
        await self._make_durable(opened)
        await run_all(self._pass_to_reactor(result) for result in opened)

    def _open_one(self, owned: OwnedPartition, view: native.SlotView) -> _OpenResult:
        """Blocking, several at a time."""
        if owned.log_dir >= len(self.log_dirs):
            raise OSError(errno.EINVAL, f"log directory {owned.log_dir} is not in log.dirs")
        log_dir = self.log_dirs[owned.log_dir]
        if log_dir.failure or log_dir.trusted_points is None:
            raise OSError(errno.EIO, f"its log directory {log_dir.path} failed: {log_dir.failure}")
        existed = directories.exists(log_dir.path, owned.topic, owned.index, owned.topic_id)
        recovery = self._recovery_inputs(owned, view, log_dir)
        known_high_watermark = self._known_high_watermark(owned, view, log_dir) if owned.gets_assignments else None
        known_end = max(
            recovery.recovery_point_offset,
            recovery.trusted_end_offset,
            recovery.log_start_offset,
            known_high_watermark or 0,
        )
        path, moved_to = directories.prepare(
            log_dir.path, owned.topic, owned.index, owned.topic_id, self._files, known_end, owned.has_other_replicas
        )
        if moved_to is not None:
            self._log.warning(
                "directory of another topic was moved aside; delete it when it is not needed",
                partition=owned.name,
                moved_to=str(moved_to),
            )
        # V3 of mqd/log/moving.py
        recovery.log_start_offset = max(recovery.log_start_offset, moving.marked_log_start(path))
        options = self._log_options(owned)
        known_start = recovery.log_start_offset
        with self._control.opening(owned.slot) as abort_count:
            if abort_count >= RECOVERY_ABORTS_MAX:
                raise OSError(errno.EIO, _abort_reason(path, abort_count))
            now_ms = time.time_ns() // 1_000_000
            partition = native.Partition.open(
                path, options, owned.leader_epoch, now_ms, recovery, known_high_watermark, owned.has_other_replicas
            )
        self._check_missing(owned, path, partition, recovery, known_start)
        if known_high_watermark is not None and owned.has_other_replicas:
            self._check_length(owned, path, partition, recovery, view, known_high_watermark)
        elif not owned.has_other_replicas and shortened.is_marked(path):
            self._unmark_shortened(owned.name, path)  # there is no other replica that could have more
        return _OpenResult(owned, path, partition, recovery, existed)

    def _unmark_shortened(self, partition: str, path: Path) -> None:
        """Blocking."""
        try:
            shortened.unmark(path, self._files)
        except OSError as error:
            self._log.warning(
                "file cannot be removed; if there are other replicas, this one must catch up again after the next"
                " start",
                partition=partition,
                path=str(path / shortened.MARKER),
                reason=str(error),
            )

    def _check_missing(
        self,
        owned: OwnedPartition,
        path: Path,
        partition: native.Partition,
        recovery: native.Recovery,
        known_start: int,
    ) -> None:
        """Reports missing records, and refuses a gap if there are other replicas (N6). Blocking."""
        if recovery.log_start_offset > known_start and recovery.missing_from < 0:
            self._log.error(
                "records are missing: the first segments are gone",
                partition=owned.name,
                from_offset=known_start,
                to_offset=recovery.log_start_offset - 1,
            )
        if recovery.missing_from < 0:
            return
        at_end = recovery.log_end_offset <= recovery.missing_from
        self._log.error(
            "records are missing: a segment's file is gone or too short",
            partition=owned.name,
            from_offset=recovery.missing_from,
            to_offset=recovery.missing_to - 1,
            log_end_offset=recovery.log_end_offset,
            directory=str(path),
        )
        try:
            if at_end and owned.has_other_replicas:
                shortened.mark(path, self._files)
            elif owned.has_other_replicas and recovery.missing_to < recovery.log_end_offset:
                raise OSError(errno.EIO, shortened.gap_reason(path, recovery.missing_from, recovery.missing_to))
        except OSError:
            partition.close(False)
            raise

    def _check_length(
        self,
        owned: OwnedPartition,
        path: Path,
        partition: native.Partition,
        recovery: native.Recovery,
        view: native.SlotView,
        known_end: int,
    ) -> None:
        """Marks a log that is shorter than it was known to be (N5). Blocking."""
        is_same_partition = view.topic_id == owned.topic_id and view.partition_index == owned.index
        published = view.log_end_offset if is_same_partition else 0
        if recovery.log_end_offset >= max(known_end, published):
            return
        try:
            shortened.mark(path, self._files)
            if published > recovery.log_end_offset:
                text = (
                    f"its log ends at {recovery.log_end_offset} and ended at {published} before this worker was"
                    " started; restart the broker: it then follows until it has caught up"
                )
                raise OSError(errno.EIO, text)
        except OSError:
            partition.close(False)
            raise

    def _recovery_inputs(self, owned: OwnedPartition, view: native.SlotView, log_dir: LogDirectory) -> native.Recovery:
        """The trusted inputs of recovery: the checkpoints; and, if a predecessor of this worker
        published positions under the same keeper process, the page cache as the predecessor left
        it. A published durable offset counts only in that case: the machine has not lost power
        since, otherwise the control segment would be gone. OFFLINE means that the predecessor met
        an error there, perhaps a failed flush.
        """
        trusted_points = log_dir.trusted_points
        assert trusted_points is not None
        name = (owned.topic, owned.index, owned.topic_id)
        recovery = native.Recovery(
            recovery_point_offset=trusted_points.recovery_point(*name),
            clean_shutdown=trusted_points.had_clean_shutdown(*name),
            log_start_offset=trusted_points.log_start_offset(*name),
        )
        if view.topic_id == owned.topic_id and view.partition_index == owned.index and view.log_end_offset > 0:
            recovery.trusted_end_offset = view.log_end_offset
            recovery.recovery_point_offset = max(recovery.recovery_point_offset, view.durable_offset)
            recovery.log_start_offset = max(recovery.log_start_offset, view.log_start_offset)
            recovery.clean_shutdown = False
            recovery.rewrite = view.state == native.SlotState.OFFLINE
        if log_dir.doubtful:
            recovery.rewrite, recovery.clean_shutdown = True, False
        return recovery

    @staticmethod
    def _known_high_watermark(owned: OwnedPartition, view: native.SlotView, log_dir: LogDirectory) -> int:
        """Records below this offset were committed. It is the value that a predecessor published
        under the same keeper process, otherwise the recorded one.
        """
        if view.topic_id == owned.topic_id and view.partition_index == owned.index and view.high_watermark > 0:
            return view.high_watermark
        return log_dir.high_watermarks.get((owned.topic, owned.index, owned.topic_id), 0)

    async def _make_durable(self, opened: list[_OpenResult]) -> None:
        """Makes new directories and the checkpoints durable (N1, N2). If a log directory cannot be
        synced, its new partitions fail: they might be lost in a power cut, together with their
        records.
        """
        for log_dir in self.log_dirs:
            in_directory = [result for result in opened if result.owned.log_dir == log_dir.index]
            if any(not result.existed for result in in_directory):
                try:
                    await self._background.urgent(log_dir.index, self._files.sync_directory, log_dir.path)
                except OSError as error:
                    for result in [result for result in in_directory if not result.existed]:
                        opened.remove(result)
                        await self._background.urgent(log_dir.index, result.partition.close, False)
                        self._record_failure(result.owned, f"its new directory cannot be made durable: {error}", error)
            existing = [result for result in in_directory if result.existed]
            if existing:
                points, starts = self.checkpoint_entries(log_dir.index)
                points += [
                    self._checkpoint_entry(result.owned, max(0, self._trusted_point(result.recovery)))
                    for result in existing
                ]
                starts += [
                    self._checkpoint_entry(result.owned, result.recovery.log_start_offset) for result in existing
                ]
                await self._background.slow(log_dir.index, log_dir.write_checkpoints, points, starts)

    @staticmethod
    def _trusted_point(recovery: native.Recovery) -> int:
        """The old recovery point, or the log end if recovery has cut the log below that. Recovery
        never proves more than was known before.
        """
        return min(recovery.recovery_point_offset, recovery.log_end_offset)

    async def _pass_to_reactor(self, result: _OpenResult) -> None:
        owned, recovery = result.owned, result.recovery
        try:
            await self._commands.run(self._reactor.partition_open, owned.slot, owned.log_dir, result.partition)
        except native.NativeError as error:
            if result.partition.pointer != native.ffi.NULL:
                await self._background.urgent(owned.log_dir, result.partition.close, False)
            self._record_failure(owned, f"the reactor refused it: {error}")
            return
        self.scanned_bytes += recovery.scanned_bytes
        if recovery.truncated_bytes:
            self._log.warning(
                "log was truncated at its first invalid byte",
                partition=owned.name,
                segment=recovery.corrupt_segment,
                position=recovery.corrupt_position,
                truncated_bytes=recovery.truncated_bytes,
                log_end_offset=recovery.log_end_offset,
            )
        policy = retention_policy(self.broker_config, self._catalog.topic_of(owned).config)
        compaction = compaction_policy(self.broker_config, self._catalog.topic_of(owned).config)
        opened = OpenPartition(
            owned, result.path, recovery.log_start_offset, policy, compaction, truncated=owned.gets_assignments
        )
        if owned.has_other_replicas and shortened.is_marked(result.path):
            opened.shortened_state = shortened.ShortenedState()
            self._log.error("replica may lack acknowledged records", partition=owned.name, reason=shortened.REASON)
        self.open[owned.key] = self.by_slot[owned.slot] = opened
        self.failures.pop(owned.slot, None)
        self.note_failed_directory(owned)  # it may have failed meanwhile

    def _record_failure(self, owned: OwnedPartition, reason: str, cause: Exception | None = None) -> None:
        self._log.error("partition cannot be opened; it is offline", partition=owned.name, reason=reason)
        self.failures[owned.slot] = f"{owned.name}: {reason}"
        self._catalog.record_failure(owned.key, isinstance(cause, OSError) and cause.errno in _TRANSIENT_ERRNOS)
        self._control.set_slot_state(owned.slot, native.SlotState.OFFLINE)

    async def _delete(self, owned: OwnedPartition) -> None:
        opened = self.open.get(owned.key)
        self.failures.pop(owned.slot, None)
        if opened is not None and (partition := await self._take_back(opened)) is not None:
            await self._close(owned, partition, clean=False)
        log_dir = self.log_dirs[owned.log_dir]
        try:
            aside = await self._background.urgent(log_dir.index, self._set_aside, log_dir.path, owned)
        except OSError as error:
            self._log.error(
                "directory of a deleted partition cannot be renamed; it is left behind",
                partition=owned.name,
                reason=str(error),
            )
            return
        finally:
            # another partition of that name may be created later
            log_dir.timestamps.forget(directories.partition_path(log_dir.path, owned.topic, owned.index))
        if aside is not None:
            self.delete_later(log_dir, aside)

    def _set_aside(self, log_dir: Path, owned: OwnedPartition) -> Path | None:
        if not directories.exists(log_dir, owned.topic, owned.index, owned.topic_id):
            return None  # never created, or another topic's
        return directories.set_aside_for_deletion(log_dir, owned.topic, owned.index, self._files)

    def delete_later(self, log_dir: LogDirectory, path: Path) -> None:
        task = asyncio.get_running_loop().create_task(self._delete_tree(log_dir, path))
        self._deletion_tasks.add(task)
        task.add_done_callback(self._deletion_tasks.discard)

    async def _delete_tree(self, log_dir: LogDirectory, path: Path) -> None:
        """Deletes one file at a time, so that checkpoints of the directory get their turn. The next
        start finds the remains after a crash.
        """
        steps = directories.delete_tree(path, self._files)
        try:
            while await self._background.slow(log_dir.index, next, steps, None) is not None:
                pass
        except OSError as error:
            self._log.warning(
                "deleted partition cannot be removed; the next start tries again", path=str(path), reason=str(error)
            )

    # -- changes of open partitions ----------------------------------------------------------------

    async def _set_epoch(self, owned: OwnedPartition) -> None:
        opened = self.open.get(owned.key)
        if opened is not None:
            await self._commands.run(self._reactor.set_leader_epoch, owned.slot, owned.leader_epoch)
            opened.owned = owned

    def _log_options(self, owned: OwnedPartition) -> native.LogOptions:
        topic = self._catalog.topic_of(owned)
        return native.LogOptions(**log_options(self.broker_config, topic.config, topic.internal))

    async def _set_options(self, owned: OwnedPartition) -> None:
        opened = self.open.get(owned.key)
        if opened is None:
            return
        config = self._catalog.topic_of(owned).config
        await self._commands.run(self._reactor.set_options, owned.slot, self._log_options(owned))
        opened.policy = retention_policy(self.broker_config, config)
        opened.compaction = compaction_policy(self.broker_config, config)

    async def _assign(self, owned: OwnedPartition, assignment: Assignment) -> None:
        opened = self.open.get(owned.key)
        if opened is not None:
            if opened.shortened_state is not None:
                assignment = await self._assignment_while_shortened(opened, opened.shortened_state, assignment)
            await self._commands.run(self._reactor.replica_set, owned.slot, assignment, assignment.leader_worker)
            opened.owned = owned

    async def _assignment_while_shortened(
        self, opened: OpenPartition, state: shortened.ShortenedState, assignment: Assignment
    ) -> Assignment:
        """The assignment for the reactor, until the replica has caught up (N5)."""
        effective, has_caught_up = state.on_assignment(assignment)
        slot = opened.owned.slot
        if has_caught_up:
            opened.shortened_state = None
            self._log.info("replica has caught up", partition=opened.owned.name)
            await self._background.urgent(opened.owned.log_dir, self._unmark_shortened, opened.owned.name, opened.path)
        if not self.log_dirs[opened.owned.log_dir].failure:
            self.failures.pop(slot, None)
            if not has_caught_up and shortened.is_leader_or_candidate(assignment):
                self.failures[slot] = f"{opened.owned.name}: {shortened.REASON}"
        return effective

    def failed_names(self) -> list[tuple[str, int]]:
        """(topic, partition index) of partitions that are wanted but not open: their checkpoints
        must be kept.
        """
        return [(owned.topic, owned.index) for owned in self._catalog.failed_partitions()]
