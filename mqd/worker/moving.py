"""Moves of this worker's partitions between the log directories of its host (AlterReplicaLogDirs,
KIP-113).

    copying    served as before; copies closed segments first, then new writes, until little is left
    switching  closed; the rest is copied and flushed; the controller is informed
    end        the metadata names the new directory: opened there, then the old copy is deleted

Y1  from the time when the controller may have been informed until the metadata shows the result,
    the partition is served from neither directory, because either may be the current one.
    MoveCompleted is repeated after every reconnection and periodically (the metadata log may have
    been full).
Y2  a move that fails before that leaves the source unchanged: the partition is opened there again
    and the copy is deleted.
Y3  the old copy is deleted only when the new one is open.
Y4  a command that arrives while the partition is served from neither directory is not refused, but
    carried out when the partition is open again.
The next start cleans up after a crash (mqd/worker/orphan_directories.py, by V1 of
mqd/log/moving.py). Bounds: one move of a partition at a time, one step (CHUNK_BYTES, or some small
files) at a time in each target directory; the pause copies at most PAUSE_BYTES, the active
segment's indexes and writes since the last check, unless the writers (or compaction) outrun the
copying for ROUNDS_MAX rounds; HELD_MAX commands wait. A target directory without space takes no
copies.
Concurrency: the event loop; opening and closing hold the worker's changes lock, like every change.
"""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import msgspec

from mqd import native
from mqd.base import logging
from mqd.base.config import broker_number
from mqd.cluster.host.messages import Command, MoveCompleted, ToController
from mqd.log import directories, moving
from mqd.log.files import Files
from mqd.protocol.errors import ErrorCode
from mqd.worker.background import Background
from mqd.worker.catalog import Catalog, Key, OwnedPartition
from mqd.worker.log_directory import LogDirectory
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet

PAUSE_BYTES = 1 << 20
ROUNDS_MAX = 50
HELD_MAX = 1000


class _Move(msgspec.Struct):
    owned: OwnedPartition
    target: int
    copy: moving.PartitionCopy
    task: asyncio.Task[None] | None = None
    is_switching: bool = False  # Y1


class Mover:
    def __init__(
        self,
        log_dirs: list[LogDirectory],
        control: native.Control,
        partitions: PartitionSet,
        catalog: Catalog,
        background: Background,
        files: Files,
        send: Callable[[ToController], None],
        changes_lock: asyncio.Lock,
    ) -> None:
        self._log_dirs = log_dirs
        self._control = control
        self._partitions = partitions
        self._catalog = catalog
        self._background = background
        self._files = files
        self._send = send
        self._changes_lock = changes_lock
        self._moves: dict[Key, _Move] = {}
        self._held: list[Command] = []  # Y4
        self._log = logging.get("worker.moving")

    # -- beginning ---------------------------------------------------------------------------------

    async def begin(self, opened: OpenPartition, target: int) -> tuple[int, str]:
        """Returns (Kafka error code, text): code 0 if the move has started, otherwise the reason
        for the refusal. A move to the current directory cancels the move in progress. Called with
        the worker's changes lock held.
        """
        owned = opened.owned
        if not 0 <= target < len(self._log_dirs):
            return int(ErrorCode.LOG_DIR_NOT_FOUND), f"Log directory {target} is not in log.dirs."
        current = self._moves.get(owned.key)
        if current is not None and current.target == target:
            return 0, ""
        if current is not None:
            await self._give_up(current)
        if target == owned.log_dir:
            return 0, ""
        log_dir = self._log_dirs[target]
        if log_dir.failure:
            return int(ErrorCode.KAFKA_STORAGE_ERROR), f"Log directory {log_dir.path} failed: {log_dir.failure}"
        if log_dir.space_guard.is_full:
            return int(ErrorCode.KAFKA_STORAGE_ERROR), f"Log directory {log_dir.path} is full."
        move = self._moves[owned.key] = _Move(
            owned,
            target,
            moving.PartitionCopy(opened.path, log_dir.path, owned.topic, owned.index, owned.topic_id, self._files),
        )
        try:
            await self._background.slow(target, move.copy.begin)
        except OSError as error:
            del self._moves[owned.key]
            await self._discard(log_dir, move.copy.path, owned)
            return int(ErrorCode.KAFKA_STORAGE_ERROR), f"Nothing can be written to {log_dir.path}: {error}"
        move.task = asyncio.get_running_loop().create_task(self._run(move))
        self._log.info(
            "move to another log directory begun",
            partition=owned.name,
            source=str(self._log_dirs[owned.log_dir].path),
            target=str(log_dir.path),
        )
        return 0, ""

    async def _give_up(self, move: _Move) -> None:
        """Cancels the move, unless it is switching: such a move ends by itself."""
        if move.is_switching:
            return
        if self._moves.get(move.owned.key) is move:
            del self._moves[move.owned.key]
        if move.task is not None and move.task is not asyncio.current_task():
            move.task.cancel()
            await asyncio.gather(move.task, return_exceptions=True)
        # after the step that may be running
        await self._background.slow(move.target, move.copy.close)
        await self._discard(self._log_dirs[move.target], move.copy.path, move.owned)

    async def _discard(self, log_dir: LogDirectory, path: Path, owned: OwnedPartition) -> None:
        aside = log_dir.path / directories.aside_name(owned.topic, owned.index, "delete")
        try:
            await self._background.slow(log_dir.index, self._files.rename, path, aside)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._log.warning(
                    "copy of a partition cannot be removed; the next start tries again",
                    path=str(path),
                    reason=str(error),
                )
            return
        self._partitions.delete_later(log_dir, aside)

    # -- copying -----------------------------------------------------------------------------------

    async def _run(self, move: _Move) -> None:
        try:
            for _ in range(ROUNDS_MAX):
                if await self._copy_round(move) <= PAUSE_BYTES:
                    break
            async with self._changes_lock:
                await self._switch(move)
        except OSError as error:  # OSError includes NativeError
            # no failure if the partition is being deleted
            if self._moves.get(move.owned.key) is move and move.owned.key in self._catalog.owned:
                self._log.error(
                    "move to another log directory failed; the partition stays where it is",
                    partition=move.owned.name,
                    reason=str(error),
                )
            await self._give_up(move)
        except Exception:  # a bug; the partition itself is intact
            self._log.exception(
                "move to another log directory failed; the partition stays where it is", partition=move.owned.name
            )
            await self._give_up(move)

    async def _copy_round(self, move: _Move) -> int:
        """Copies the published data, one chunk at a time, so that checkpoints of the directory get
        their turn. Returns the number of bytes added since.
        """
        if self._log_dirs[move.target].space_guard.is_full:
            raise OSError(
                errno.ENOSPC, "no space is left above log.dirs.free.bytes.min", str(self._log_dirs[move.target].path)
            )
        view = self._control.slot_view(move.owned.slot)
        steps, loop = move.copy.advance(view.log_end_segment, view.log_end_position), asyncio.get_running_loop()
        began_s = loop.time()
        while (copied_bytes := await self._background.slow(move.target, next, steps, None)) is not None:
            await asyncio.sleep(max(0.0, copied_bytes / self._bytes_per_second() - (loop.time() - began_s)))
            began_s = loop.time()
        view = self._control.slot_view(move.owned.slot)
        return await self._background.slow(
            move.target, move.copy.missing_bytes, view.log_end_segment, view.log_end_position
        )

    def _bytes_per_second(self) -> float:
        """An equal share for each worker: they have no common budget."""
        rate = broker_number(self._partitions.broker_config, "replica.alter.log.dirs.io.max.bytes.per.second")
        return rate / max(1, self._control.worker_count)

    # -- switching ---------------------------------------------------------------------------------

    async def _switch(self, move: _Move) -> None:
        owned = self._catalog.owned.get(move.owned.key)
        opened = self._partitions.open.get(move.owned.key)
        if (
            self._moves.get(move.owned.key) is not move
            or owned is None
            or opened is None
            or opened.closing
            or owned.log_dir != move.owned.log_dir
        ):
            await self._give_up(move)  # closed, deleted or moved in the meantime
            return
        closed = await self._partitions.close_for_move(opened)
        try:
            if not closed:
                raise OSError(errno.EIO, "it could not be closed cleanly")
            await self._background.urgent(
                move.target, move.copy.finish, self._control.slot_view(owned.slot).log_start_offset
            )
        except Exception:
            await self._partitions.apply(self._catalog.reopen([owned.key]))  # Y2
            raise
        move.is_switching = True
        self._report(move)

    def _report(self, move: _Move) -> None:
        self._send(MoveCompleted(move.owned.topic_id, move.owned.index, move.target))

    def is_moving(self) -> bool:
        return bool(self._moves)

    def report_again(self) -> None:
        for move in self._moves.values():
            if move.is_switching:
                self._report(move)

    def hold(self, command: Command) -> bool:
        """If the command's partition is served from neither directory, holds the command until
        release_held() returns it (Y4). Returns whether the command is held.
        """
        if not self._is_unserved(command.slot) or len(self._held) >= HELD_MAX:
            return False
        self._held.append(command)
        return True

    def release_held(self) -> list[Command]:
        """Removes and returns the held commands that can now be carried out or refused."""
        ready = [command for command in self._held if not self._is_unserved(command.slot)]
        self._held = [command for command in self._held if self._is_unserved(command.slot)]
        return ready

    def _is_unserved(self, slot: int) -> bool:
        """Whether the partition is served from neither directory, and not because the new one
        failed.
        """
        return slot not in self._partitions.failures and any(
            move.is_switching and move.owned.slot == slot for move in self._moves.values()
        )

    async def on_applied(self, is_image: bool) -> None:
        """Called when a message of the controller has been applied, with the changes lock held.
        `is_image`: the message is the image after a new subscription, so earlier messages to the
        controller may be lost.
        """
        if is_image:
            self._held.clear()  # the controller that sent them has forgotten them
        for key, move in list(self._moves.items()):
            owned = self._catalog.owned.get(key)
            if owned is None:
                await self._end_unserved(move)
            elif move.is_switching and owned.log_dir == move.target:
                if key in self._partitions.open:  # Y3; otherwise its opening is retried
                    await self._finish(move)
            elif move.is_switching and is_image:
                self._report(move)
            elif not move.is_switching and owned.log_dir != move.owned.log_dir:
                await self._give_up(move)

    async def _end_unserved(self, move: _Move) -> None:
        """Ends the move because this worker no longer owns the partition."""
        if not move.is_switching:
            await self._give_up(move)
            return
        del self._moves[move.owned.key]
        owned, log_dir = move.owned, self._log_dirs[move.target]
        if owned.topic_id in self._catalog.topics and not self._catalog.is_left_behind(*owned.key):
            return  # not served for now, and either copy may be the valid one (Y1): both are kept
        # exists() is false if another partition of that name is already there
        if await self._background.slow(
            log_dir.index, directories.exists, log_dir.path, owned.topic, owned.index, owned.topic_id
        ):
            await self._discard(log_dir, move.copy.path, owned)

    async def _finish(self, move: _Move) -> None:
        del self._moves[move.owned.key]
        source, target = self._log_dirs[move.owned.log_dir], self._log_dirs[move.target]
        try:
            await self._discard_source(source, move)
            await self._unmark(target, [directories.partition_path(target.path, move.owned.topic, move.owned.index)])
        except OSError as error:
            self._log.warning(
                "old copy of a moved partition cannot be removed; the next start tries again",
                path=str(move.copy.source),
                reason=str(error),
            )
        source.timestamps.forget(move.copy.source)
        self._log.info(
            "partition moved to another log directory",
            partition=move.owned.name,
            target=str(target.path),
            copied_bytes=move.copy.copied_bytes,
        )

    async def _discard_source(self, source: LogDirectory, move: _Move) -> None:
        aside = await self._background.slow(
            source.index,
            directories.set_aside_for_deletion,
            source.path,
            move.owned.topic,
            move.owned.index,
            self._files,
        )
        if aside is not None:
            self._partitions.delete_later(source, aside)

    async def unmark_all(self) -> None:
        """Removes the marks of partitions that an earlier run moved: they are open and valid."""
        for log_dir in self._log_dirs:
            paths = [opened.path for opened in self._partitions.open.values() if opened.owned.log_dir == log_dir.index]
            marked = [path for path in paths if moving.is_marked(path)]
            if marked and not log_dir.failure:
                try:
                    await self._unmark(log_dir, marked)
                except OSError as error:
                    self._log.warning(
                        "marks of moved partitions cannot be removed; the next start tries again",
                        log_dir=str(log_dir.path),
                        reason=str(error),
                    )

    async def _unmark(self, log_dir: LogDirectory, paths: list[Path]) -> None:
        """Removes the marks of moved partitions once the checkpoints are written (V3 of
        mqd/log/moving.py).
        """
        points, starts = self._partitions.checkpoint_entries(log_dir.index)
        if not await self._background.slow(log_dir.index, log_dir.write_checkpoints, points, starts):
            return
        for path in paths:
            try:
                await self._background.slow(log_dir.index, self._files.unlink, path / moving.MARKER)
            except FileNotFoundError:
                pass

    async def close(self) -> None:
        """Called when the worker ends. The next start deletes unfinished copies."""
        tasks = [move.task for move in self._moves.values() if move.task is not None and not move.is_switching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
